//! Receive-side scaling (RSS), with the Toeplitz hash, its keys, and indirection tables.

mod input;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use coreward_intf as intf;
use rand::SeedableRng as _;
use rand_xoshiro::Xoshiro256PlusPlus;
use siphasher::sip::SipHasher13;

pub use input::{RssInputTransform, UnknownRssInputTransform};

/// Returns a random number generator for a seed and a stream number. Different streams of a seed draw different
/// numbers.
pub fn seeded_rng(seed: u64, stream: u64) -> Xoshiro256PlusPlus {
    // SplitMix64's increment (Steele et al., OOPSLA'14) keeps neighbouring streams apart. seed_from_u64 mixes further.
    Xoshiro256PlusPlus::seed_from_u64(seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Returns a uniform random number below `exclusive_bound`, without modulo bias (Lemire, "Fast random integer
/// generation in an interval", 2019).
pub fn uniform_below(rng: &mut impl rand::Rng, exclusive_bound: u32) -> u32 {
    assert!(exclusive_bound > 0, "an empty range has no numbers");
    loop {
        let product = u64::from(rng.next_u32()) * u64::from(exclusive_bound);
        if product as u32 >= exclusive_bound.wrapping_neg() % exclusive_bound {
            return (product >> 32) as u32;
        }
    }
}

/// RSS key of 40 to 52 bytes, and the transform of the input that the NIC hashes with the key. 40 bytes suffice for
/// IPv6 with ports, which takes 36 bytes of input and a window of 4 bytes. Two NICs hash alike if both key and
/// transform are equal.
#[derive(Clone, Eq, PartialOrd, Ord)]
pub struct RssKey {
    key_bytes: Arc<[u8]>,
    input_transform: RssInputTransform,
}

impl PartialEq for RssKey {
    /// Compares two keys. Clones of one key are equal without a comparison of bytes, because a table compares thousands
    /// of keys.
    fn eq(&self, other: &Self) -> bool {
        self.input_transform == other.input_transform
            && (Arc::ptr_eq(&self.key_bytes, &other.key_bytes) || self.key_bytes == other.key_bytes)
    }
}

impl Hash for RssKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key_bytes.hash(state);
        self.input_transform.hash(state);
    }
}

impl From<Arc<[u8]>> for RssKey {
    fn from(bytes: Arc<[u8]>) -> Self {
        Self { key_bytes: bytes, input_transform: RssInputTransform::None }
    }
}

/// Error returned for an RSS key of fewer than 40 or more than 52 bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an RSS key of {0} bytes: expected {min} to {max}", min = intf::RSS_KEY_BYTES, max = intf::RSS_KEY_MAX_BYTES)]
pub struct RssKeyLengthError(pub usize);

impl RssKey {
    /// Returns the key with these bytes. Fails if there are fewer than 40 or more than 52 bytes.
    pub fn new(bytes: &[u8]) -> Result<Self, RssKeyLengthError> {
        let allowed_lengths = intf::RSS_KEY_BYTES as usize..=intf::RSS_KEY_MAX_BYTES as usize;
        if allowed_lengths.contains(&bytes.len()) {
            Ok(Self::from(Arc::from(bytes)))
        } else {
            Err(RssKeyLengthError(bytes.len()))
        }
    }

    /// Returns a random key of 40 bytes.
    pub fn random(rng: &mut impl rand::Rng) -> Self {
        let mut bytes = [0; intf::RSS_KEY_BYTES as usize];
        rng.fill_bytes(&mut bytes);
        Self::from(Arc::<[u8]>::from(bytes))
    }

    /// Returns Microsoft's verification key ("Verifying the RSS Hash Calculation"), which is the default of many
    /// drivers.
    pub fn microsoft_verification_key() -> Self {
        Self::from(Arc::<[u8]>::from([
            0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca,
            0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b,
            0xbe, 0xac, 0x01, 0xfa,
        ]))
    }

    /// Returns the bytes of the key.
    pub fn key_bytes(&self) -> &[u8] {
        &self.key_bytes
    }

    /// Returns the transform of addresses and ports that the NIC applies before hashing.
    pub fn input_transform(&self) -> RssInputTransform {
        self.input_transform
    }

    /// Returns a key with the same bytes and this input transform.
    pub fn with_input_transform(&self, input_transform: RssInputTransform) -> Self {
        Self { key_bytes: self.key_bytes.clone(), input_transform }
    }

    /// Returns an identifier of the key for logs. It does not reveal the key, which would let a client aim its
    /// connections at one core.
    pub fn key_fingerprint(&self) -> String {
        let mut hasher = SipHasher13::new();
        hasher.write(&self.key_bytes);
        if self.input_transform != RssInputTransform::None {
            hasher.write_u8(self.input_transform.ethtool_number());
        }
        format!("{:08x}", hasher.finish() as u32)
    }

    /// Returns the 32 bits of the key that start at bit `bit_position`, with zeros after the key's end.
    fn key_bits_at(&self, bit_position: usize) -> u32 {
        let (byte_index, bit_index) = (bit_position / 8, bit_position % 8);
        let key_bits = (0..5).fold(0u64, |key_bits, i| {
            key_bits << 8 | u64::from(self.key_bytes.get(byte_index + i).copied().unwrap_or(0))
        });
        (key_bits >> (8 - bit_index)) as u32
    }

    /// Returns the RSS hash of a packet with these addresses and ports ([`FourTuple::bytes`](crate::FourTuple::bytes)).
    /// It is the Toeplitz hash, which is the XOR of the key's 32-bit windows at the set bits of the transformed input.
    pub fn toeplitz_hash(&self, four_tuple_bytes: &[u8]) -> u32 {
        let tuple = self.input_transform.transform_tuple(four_tuple_bytes);
        tuple.iter().enumerate().fold(0, |hash, (index, byte)| hash ^ self.byte_hash_contribution(index, *byte))
    }

    /// Returns the value that `byte` at position `index` of the transformed input contributes to the hash by XOR.
    fn byte_hash_contribution(&self, index: usize, byte: u8) -> u32 {
        (0..8).filter(|bit| byte & (0x80 >> bit) != 0).fold(0, |hash, bit| hash ^ self.key_bits_at(index * 8 + bit))
    }

    /// Returns one table of 256 entries for each byte position of the transformed input. The hash is the XOR of the
    /// entries of the input's bytes.
    fn hash_contribution_tables<const BYTES: usize>(&self) -> Box<[[u32; 256]; BYTES]> {
        let mut tables = Box::new([[0; 256]; BYTES]);
        for (index, table) in tables.iter_mut().enumerate() {
            for (byte, entry) in table.iter_mut().enumerate() {
                *entry = self.byte_hash_contribution(index, byte as u8);
            }
        }
        tables
    }

    /// Returns the key as precomputed tables, which hash many inputs fast (see [`ToeplitzTables`]).
    pub fn toeplitz_tables(&self) -> ToeplitzTables {
        ToeplitzTables {
            hash_contribution_table_by_position: self.hash_contribution_tables(),
            input_transform: self.input_transform,
        }
    }

    /// Returns one table for each byte of source address and source port, which differ between the packets to one
    /// service. These are 6 tables for IPv4 and 18 for IPv6. The entries are XORed with
    /// [`destination_hash_part`](Self::destination_hash_part). With an input transform, the contribution of a source
    /// byte also depends on the destination byte at the same offset. That byte is constant, so one entry per source
    /// byte suffices.
    pub fn source_hash_contribution_tables(&self, vip: SocketAddr) -> Vec<[u32; 256]> {
        let contribution_table = |byte_pair: SourceDestinationBytePair| {
            let hash_of_zero_source = self.byte_pair_hash_contribution(&byte_pair, 0);
            std::array::from_fn(|source| {
                self.byte_pair_hash_contribution(&byte_pair, source as u8) ^ hash_of_zero_source
            })
        };
        source_destination_byte_pairs(vip).map(contribution_table).collect()
    }

    /// Returns the constant part of the hashes of a service's packets, which is the hash of a packet whose source is
    /// zero.
    pub fn destination_hash_part(&self, vip: SocketAddr) -> u32 {
        source_destination_byte_pairs(vip)
            .fold(0, |hash, byte_pair| hash ^ self.byte_pair_hash_contribution(&byte_pair, 0))
    }

    /// Returns the contribution of a source byte, and of the destination byte at the same offset, to the hash.
    fn byte_pair_hash_contribution(&self, byte_pair: &SourceDestinationBytePair, source_byte: u8) -> u32 {
        let (source, destination) = self.input_transform.transform_bytes(source_byte, byte_pair.destination_byte);
        self.byte_hash_contribution(byte_pair.source_index, source)
            ^ self.byte_hash_contribution(byte_pair.destination_index, destination)
    }
}

/// Destination byte of a hash input, with its index and the index of the source byte at the same offset.
struct SourceDestinationBytePair {
    source_index: usize,
    destination_index: usize,
    destination_byte: u8,
}

fn source_destination_byte_pairs(vip: SocketAddr) -> impl Iterator<Item = SourceDestinationBytePair> {
    let address = match vip.ip() {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let (length, port) = (address.len(), vip.port().to_be_bytes());
    let byte_pair = |source_index, index_distance, destination_byte| SourceDestinationBytePair {
        source_index,
        destination_index: source_index + index_distance,
        destination_byte,
    };
    let address_pairs = address.into_iter().enumerate().map(move |(index, byte)| byte_pair(index, length, byte));
    let port_pairs =
        port.into_iter().enumerate().map(move |(index, byte)| byte_pair(2 * length + index, size_of::<u16>(), byte));
    address_pairs.chain(port_pairs)
}

/// Number of bytes of the longest hash input, which consists of IPv6 addresses and ports.
const MAX_RSS_INPUT_BYTES: usize = intf::RSS_INPUT_IPV6_BYTES as usize;

/// RSS key as precomputed tables, which hash by one look-up per input byte. The tables take 36 KiB, and are fifty times
/// as fast as [`RssKey::toeplitz_hash`].
#[derive(Debug, Clone)]
pub struct ToeplitzTables {
    hash_contribution_table_by_position: Box<[[u32; 256]; MAX_RSS_INPUT_BYTES]>,
    input_transform: RssInputTransform,
}

impl ToeplitzTables {
    /// Returns the same hash as [`RssKey::toeplitz_hash`], for an input of at most 36 bytes.
    pub fn hash_four_tuple(&self, four_tuple_bytes: &[u8]) -> u32 {
        let hash_transformed_input = |input: &[u8]| {
            input
                .iter()
                .zip(self.hash_contribution_table_by_position.iter())
                .fold(0, |hash, (byte, table)| hash ^ table[usize::from(*byte)])
        };
        // Nothing is copied for a NIC without a transform, because the simulator spends its time here.
        if self.input_transform == RssInputTransform::None {
            hash_transformed_input(four_tuple_bytes)
        } else {
            hash_transformed_input(&self.input_transform.transform_tuple(four_tuple_bytes))
        }
    }
}

impl fmt::Debug for RssKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RssKey({})", self.key_fingerprint())
    }
}

/// Formats the key like `ethtool -x`, as hexadecimal bytes separated by colons.
impl fmt::Display for RssKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.key_bytes.iter().enumerate() {
            if index > 0 {
                f.write_str(":")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// Error returned for a text that is not an RSS key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RssKeyTextError {
    /// The text does not consist of pairs of hexadecimal digits.
    #[error("RSS key {0:?}: expected bytes in hexadecimal, as `ethtool -x` prints them (6d:5a:56: ...)")]
    NotHexadecimal(String),
    /// The number of bytes is too small or too large for a key.
    #[error(transparent)]
    InvalidLength(#[from] RssKeyLengthError),
}

/// Parses a key from hexadecimal bytes, with or without colons between them.
impl std::str::FromStr for RssKey {
    type Err = RssKeyTextError;

    fn from_str(text: &str) -> Result<Self, RssKeyTextError> {
        let digits: Vec<u32> = text.chars().filter(|c| *c != ':').filter_map(|c| c.to_digit(16)).collect();
        if digits.len() != text.chars().filter(|c| *c != ':').count() || !digits.len().is_multiple_of(2) {
            return Err(RssKeyTextError::NotHexadecimal(text.to_owned()));
        }
        let bytes: Vec<u8> = digits.chunks(2).map(|digit_pair| (digit_pair[0] * 16 + digit_pair[1]) as u8).collect();
        Ok(Self::new(&bytes)?)
    }
}

/// RSS indirection table, which maps the low bits of the hash to a receive queue. The queue is also the core's index.
#[derive(Debug, Clone, Eq)]
pub struct IndirectionTable {
    queue_by_entry: Arc<[u16]>,
}

impl PartialEq for IndirectionTable {
    /// Compares two tables. Two clones are equal without a comparison of entries, because they share them.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.queue_by_entry, &other.queue_by_entry) || self.queue_by_entry == other.queue_by_entry
    }
}

impl Hash for IndirectionTable {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.queue_by_entry.hash(state);
    }
}

/// Error returned for an indirection table that RSS cannot use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IndirectionTableError {
    /// The number of entries is not a power of two from 1 to 2048, so the hash's low bits cannot address them.
    #[error(
        "an indirection table of {0} entries: expected a power of two from 1 to {max}",
        max = intf::MAX_INDIRECTION_ENTRIES
    )]
    InvalidEntryCount(usize),
    /// An entry has a queue number above 16 bits.
    #[error("receive queue {queue} in entry {entry} of the indirection table: expected 0 to 65535")]
    QueueOutOfRange {
        /// Index of the entry in the table.
        entry: usize,
        /// Queue number in the entry.
        queue: u32,
    },
}

impl IndirectionTable {
    /// Returns the table with the receive queues `queues`. Fails unless their number is a power of two from 1 to 2048,
    /// and each queue fits in 16 bits.
    pub fn new(queues: &[u32]) -> Result<Self, IndirectionTableError> {
        if !queues.len().is_power_of_two() || queues.len() > intf::MAX_INDIRECTION_ENTRIES as usize {
            return Err(IndirectionTableError::InvalidEntryCount(queues.len()));
        }
        let to_queue_number = |(entry, queue): (usize, &u32)| {
            u16::try_from(*queue).map_err(|_| IndirectionTableError::QueueOutOfRange { entry, queue: *queue })
        };
        Ok(Self { queue_by_entry: queues.iter().enumerate().map(to_queue_number).collect::<Result<_, _>>()? })
    }

    /// Returns a table in which the cores' numbers of entries differ by at most one, in an order shuffled by the seed.
    /// Fails if `entry_count` is not a power of two from 1 to 2048.
    ///
    /// The CrossRSS paper draws each entry independently, which gives some cores twice the buckets of others. A
    /// balanced draw removes that part of the imbalance (docs/design.md, "Indirection tables").
    pub fn draw_balanced_entries(
        server_seed: u64,
        entry_count: usize,
        core_count: u16,
    ) -> Result<Self, IndirectionTableError> {
        let core_count = u32::from(core_count.max(1));
        let mut queues: Vec<u32> = (0..entry_count as u32).map(|entry| entry % core_count).collect();
        let mut rng = seeded_rng(server_seed, INDIRECTION_TABLE_RNG_STREAM);
        // Shuffle by Fisher and Yates.
        for last in (1..queues.len()).rev() {
            queues.swap(last, uniform_below(&mut rng, last as u32 + 1) as usize);
        }
        Self::new(&queues)
    }

    /// Returns a table in which each entry is drawn independently by the seed, as in the CrossRSS paper (CoNEXT'20,
    /// Sect. 2). Fails if `entry_count` is not a power of two from 1 to 2048.
    pub fn draw_independent_entries(
        server_seed: u64,
        entry_count: usize,
        core_count: u16,
    ) -> Result<Self, IndirectionTableError> {
        let mut rng = seeded_rng(server_seed, INDIRECTION_TABLE_RNG_STREAM);
        let queues: Vec<u32> =
            (0..entry_count).map(|_| uniform_below(&mut rng, u32::from(core_count.max(1)))).collect();
        Self::new(&queues)
    }

    /// Returns the receive queue of the entry that the low bits of `hash` select.
    pub fn queue_for_hash(&self, hash: u32) -> u16 {
        self.queue_by_entry[hash as usize & (self.queue_by_entry.len() - 1)]
    }

    /// Returns the receive queue of each entry.
    pub fn queue_by_entry(&self) -> &[u16] {
        &self.queue_by_entry
    }

    /// Returns the number of table entries, a power of two.
    pub fn entry_count(&self) -> usize {
        self.queue_by_entry.len()
    }
}

/// Number of the random-number stream ([`seeded_rng`]) from which indirection tables are drawn.
const INDIRECTION_TABLE_RNG_STREAM: u64 = 1;

/// RSS configuration of one server's NIC, as reported by the server's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RssConfig {
    /// RSS key of the server's NIC.
    pub key: RssKey,
    /// Indirection table of the server's NIC.
    pub indirection_table: IndirectionTable,
}

/// Error of a conversion between an RSS configuration and the registers of the testbed's emulated NIC.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EmulatedRssError {
    /// The length of the key differs from that of the NIC's key register.
    #[error("an RSS key of {0} bytes: the testbed's emulated NIC takes {expected}", expected = intf::RSS_KEY_BYTES)]
    UnsupportedKeyLength(usize),
    /// The NIC has no valid indirection table, because the table was never written.
    #[error(transparent)]
    InvalidIndirectionTable(#[from] IndirectionTableError),
    /// The register for the input transform has an unknown value.
    #[error(transparent)]
    InvalidInputTransform(#[from] UnknownRssInputTransform),
}

impl RssConfig {
    /// Returns the configuration for the BPF programs' prediction of receive queues, with the number `generation`.
    pub fn to_bpf_mapping(&self, generation: u32) -> Box<intf::rss_mapping> {
        let mut mapping = Box::new(intf::rss_mapping {
            entry_count: self.indirection_table.entry_count() as u32,
            generation,
            input_transform: u32::from(self.key.input_transform.ethtool_number()),
            byte: *self.key.hash_contribution_tables(),
            ..Default::default()
        });
        mapping.queue[..self.indirection_table.entry_count()].copy_from_slice(self.indirection_table.queue_by_entry());
        mapping
    }

    /// Returns the configuration as registers of the testbed's emulated NIC. Fails unless the key has 40 bytes.
    pub fn to_emulated_registers(&self, generation: u32) -> Result<Box<intf::emulated_rss>, EmulatedRssError> {
        let bytes = self.key.key_bytes();
        let key = bytes.try_into().map_err(|_| EmulatedRssError::UnsupportedKeyLength(bytes.len()))?;
        Ok(Box::new(intf::emulated_rss { mapping: *self.to_bpf_mapping(generation), key, ..Default::default() }))
    }

    /// Returns the RSS configuration in `registers` of the emulated NIC. Fails if its table or transform is invalid.
    pub fn from_emulated_registers(registers: &intf::emulated_rss) -> Result<Self, EmulatedRssError> {
        let entry_count = (registers.mapping.entry_count as usize).min(registers.mapping.queue.len());
        let queues: Vec<u32> = registers.mapping.queue[..entry_count].iter().map(|queue| u32::from(*queue)).collect();
        let input_transform = RssInputTransform::try_from(registers.mapping.input_transform)?;
        let key = RssKey { key_bytes: registers.key.into(), input_transform };
        Ok(Self { key, indirection_table: IndirectionTable::new(&queues)? })
    }
}

#[cfg(test)]
mod tests;
