//! The cookie in the TCP timestamp (Cheetah, NSDI'20, Sect. 3.2 and 4.1), in a layout that clients' PAWS accepts.
//!
//! `bpf/include/intf.h` has the bit diagram. The paper puts the cookie into the upper half of TSval. This fails the
//! PAWS check of today's clients (RFC 7323, Sect. 5), for which the upper half must be time. docs/design.md, "The
//! cookie", has the measurements.

mod permutation;

use std::hash::Hasher as _;
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};

use coreward_intf as intf;
use rand::Rng;
use siphasher::sip::SipHasher13;

pub use permutation::KeyedPermutation;

use crate::{FourTuple, ServerId};

/// Secret key (128 bits) of the hash that hides cookies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CookieKey {
    /// First 64 bits of the key.
    pub k0: u64,
    /// Second 64 bits of the key.
    pub k1: u64,
}

impl CookieKey {
    /// Returns a random key. `rng` must be of cryptographic quality if clients must not be able to guess cookies.
    pub fn random(rng: &mut impl Rng) -> Self {
        Self { k0: rng.next_u64(), k1: rng.next_u64() }
    }

    /// Returns the factor of the VIP in the cookie hash (`cookie_key.vip_factor` of `bpf/include/intf.h`).
    pub fn vip_factor(&self) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.k0, self.k1);
        hasher.write(b"vip_factor");
        hasher.finish() | 1
    }

    /// Returns the key in the layout of the BPF programs.
    pub fn to_bpf_key(&self) -> intf::cookie_key {
        intf::cookie_key { k0: self.k0, k1: self.k1, vip_factor: self.vip_factor() }
    }
}

/// Formats the key without any bit of the secret.
impl std::fmt::Debug for CookieKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CookieKey(..)")
    }
}

/// The two cookie keys of a fleet, and the index of the key with which new cookies are stamped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetCookieKeys {
    /// The two keys. Cookies made with either key are always accepted.
    pub keys: [CookieKey; 2],
    /// Index of the key with which new cookies are stamped.
    pub current_key_index: CookieKeyIndex,
}

/// Index of one of a fleet's two cookie keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CookieKeyIndex {
    /// The key of cookies whose key bit is 0.
    First,
    /// The key of cookies whose key bit is 1.
    Second,
}

impl CookieKeyIndex {
    /// Returns the index as a number, 0 or 1.
    pub fn get(self) -> usize {
        self as usize
    }

    /// Returns the index of the other key.
    pub fn other_index(self) -> Self {
        match self {
            CookieKeyIndex::First => CookieKeyIndex::Second,
            CookieKeyIndex::Second => CookieKeyIndex::First,
        }
    }
}

/// Content of a cookie, which is a server's id or an index into a connection table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cookie {
    /// Cookie of stateless mode, which holds the id of the connection's server.
    Server(ServerId),
    /// Cookie of stateful mode, which holds an index into the connection table of one load balancer.
    TableIndex(u16),
}

impl FleetCookieKeys {
    /// Returns the keys, with the key that stamps the server's TSval `tsval_ms` as the current one. The fleet's current
    /// key stamps from TSval `switch_tsval_ms` on, and the other key before. The TSval decides rather than the time at
    /// which the packet passes, so that TSval never decreases (PAWS). The two TSvals must be less than 2^31 ms apart.
    pub fn keys_for_tsval(&self, tsval_ms: u32, switch_tsval_ms: u32) -> FleetCookieKeys {
        let is_switched = tsval_ms.wrapping_sub(switch_tsval_ms) as i32 >= 0;
        FleetCookieKeys {
            current_key_index: if is_switched { self.current_key_index } else { self.current_key_index.other_index() },
            ..*self
        }
    }
}

/// Returns the keyed hash of a connection. It is SipHash-1-3 (Aumasson and Bernstein, INDOCRYPT'12) of the client's
/// address and port, combined with the VIP and its port. `bpf/include/cookie.h` gives the reasons for this hash.
pub fn cookie_hash(key: &CookieKey, tuple: &FourTuple) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(key.k0, key.k1);
    match (tuple.client(), tuple.vip()) {
        (SocketAddr::V4(client), SocketAddr::V4(vip)) => {
            let hash_input = socket_address_word(client) ^ socket_address_word(vip).wrapping_mul(key.vip_factor()) >> 8;
            hasher.write(&hash_input.to_le_bytes()[..7]);
        }
        (SocketAddr::V6(client), SocketAddr::V6(vip)) => {
            let hash_input = u64::from(client.port().to_be()) ^ fold_vip(key, vip) >> 8;
            hasher.write(&client.ip().octets());
            hasher.write(&hash_input.to_le_bytes()[..7]);
        }
        _ => unreachable!("a tuple has one address family"),
    }
    hasher.finish()
}

/// Returns an IPv4 address and its port, both in network byte order, packed into one word.
fn socket_address_word(socket: SocketAddrV4) -> u64 {
    u64::from(u32::from_le_bytes(socket.ip().octets())) | u64::from(socket.port().to_be()) << 32
}

/// Returns an IPv6 VIP and its port, folded into one word by a factor that clients do not know.
fn fold_vip(key: &CookieKey, vip: SocketAddrV6) -> u64 {
    let (vip_bits, factor) = (u128::from_le_bytes(vip.ip().octets()), key.vip_factor());
    let [high, low] = [vip_bits as u64, (vip_bits >> 64) as u64];
    let xor_shift = |number: u64| number ^ number >> 32;
    let vip_hash = (xor_shift(high.wrapping_mul(factor)) ^ low).wrapping_mul(factor);
    xor_shift(vip_hash).wrapping_add(u64::from(vip.port().to_be())).wrapping_mul(factor)
}

/// Returns the number, modulo 2^16, that is added to the time in a cookie. It depends only on the server's own time
/// key, so that a change of the fleet's keys does not interrupt a connection's time.
pub fn time_part_addend(time_key: &CookieKey, tuple: &FourTuple) -> u16 {
    cookie_hash(time_key, tuple) as u16
}

/// Returns the stamped TSval for the client. It combines the low 16 bits of the server's own TSval `server_tsval_ms`
/// with the cookie, which is hidden with the current key.
///
/// The result is never 0, which a client reads as "no TSecr" (RFC 7323, Sect. 3.2). In place of 0, returns the TSval of
/// the next millisecond.
pub fn stamp_tsval(
    keys: &FleetCookieKeys,
    time_key: &CookieKey,
    tuple: &FourTuple,
    cookie: Cookie,
    server_tsval_ms: u32,
) -> u32 {
    let plain_cookie = match cookie {
        Cookie::Server(id) => id.get(),
        Cookie::TableIndex(index) => index & intf::COOKIE_ID_MASK as u16 | intf::COOKIE_KIND_BIT as u16,
    };
    let key_bit = if keys.current_key_index == CookieKeyIndex::Second { intf::COOKIE_KEY_BIT } else { 0 };
    let hash = cookie_hash(&keys.keys[keys.current_key_index.get()], tuple);
    let cookie_part = KeyedPermutation::COOKIE.hide(hash, plain_cookie.into()) | key_bit;
    let time_part = (server_tsval_ms as u16).wrapping_add(time_part_addend(time_key, tuple));
    let stamped_tsval = u32::from(time_part) << intf::COOKIE_TIME_SHIFT | cookie_part;
    if stamped_tsval == 0 { 1 << intf::COOKIE_TIME_SHIFT } else { stamped_tsval }
}

/// Returns the cookie in the TSecr of a client's packet.
pub fn decode_cookie(keys: &FleetCookieKeys, tuple: &FourTuple, tsecr: u32) -> Cookie {
    let key = &keys.keys[usize::from(tsecr & intf::COOKIE_KEY_BIT != 0)];
    let plain_cookie =
        KeyedPermutation::COOKIE.reveal(cookie_hash(key, tuple), tsecr & intf::COOKIE_HIDDEN_MASK) as u16;
    let cookie_number = plain_cookie & intf::COOKIE_ID_MASK as u16;
    if plain_cookie & intf::COOKIE_KIND_BIT as u16 == 0 {
        Cookie::Server(ServerId::try_from(u64::from(cookie_number)).expect("14 bits"))
    } else {
        Cookie::TableIndex(cookie_number)
    }
}

/// Returns the time in the TSecr of a client's packet, which is the low 16 bits of the server's own TSval.
pub fn decode_time_part(time_key: &CookieKey, tuple: &FourTuple, tsecr: u32) -> u16 {
    ((tsecr >> intf::COOKIE_TIME_SHIFT) as u16).wrapping_sub(time_part_addend(time_key, tuple))
}

/// Maximum time (ms) by which a server's own TSval may exceed the clock from which [`restore_tsval`] restores it. The
/// clocks of kernel and BPF are read at different times and rounded differently.
pub const TSVAL_RESTORE_SLACK_MS: u32 = intf::RESTORE_SLACK_MS;

/// Returns the server's own TSval whose low 16 bits are `time_part`. It is the latest possible value that is not after
/// `now_ms` plus [`TSVAL_RESTORE_SLACK_MS`]. The result is correct for values up to 65.5 s old.
pub fn restore_tsval(time_part: u16, now_ms: u32) -> u32 {
    let latest_tsval_ms = now_ms.wrapping_add(TSVAL_RESTORE_SLACK_MS);
    latest_tsval_ms.wrapping_sub(u32::from((latest_tsval_ms as u16).wrapping_sub(time_part)))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;

    fn build_four_tuple(client_address: u32, port: u16) -> FourTuple {
        FourTuple::ipv4((Ipv4Addr::from(client_address), port), (Ipv4Addr::new(10, 200, 0, 1), 80))
    }

    #[test]
    fn every_part_of_an_ipv6_tuple_changes_its_hash() {
        let key = CookieKey { k0: 1, k1: 2 };
        let (client, vip) = (Ipv6Addr::from(0x2001_0db8 << 96 | 7), Ipv6Addr::from(0x2001_0db8 << 96 | 1));
        let original_hash = cookie_hash(&key, &FourTuple::ipv6((client, 1024), (vip, 80)));
        let mut hashes = std::collections::HashSet::from([original_hash]);
        for bit in 0..128 {
            let flip_bit = |address: Ipv6Addr| Ipv6Addr::from(u128::from(address) ^ 1 << bit);
            assert!(hashes.insert(cookie_hash(&key, &FourTuple::ipv6((flip_bit(client), 1024), (vip, 80)))));
            assert!(hashes.insert(cookie_hash(&key, &FourTuple::ipv6((client, 1024), (flip_bit(vip), 80)))));
        }
        for bit in 0..16 {
            assert!(hashes.insert(cookie_hash(&key, &FourTuple::ipv6((client, 1024 ^ 1 << bit), (vip, 80)))));
            assert!(hashes.insert(cookie_hash(&key, &FourTuple::ipv6((client, 1024), (vip, 80 ^ 1 << bit)))));
        }
    }

    fn build_fleet_keys(key_words: [u64; 4], is_second_current: bool) -> FleetCookieKeys {
        FleetCookieKeys {
            keys: [CookieKey { k0: key_words[0], k1: key_words[1] }, CookieKey { k0: key_words[2], k1: key_words[3] }],
            current_key_index: if is_second_current { CookieKeyIndex::Second } else { CookieKeyIndex::First },
        }
    }

    proptest! {
        #[test]
        fn cookie_and_server_tsval_are_recovered_from_the_tsecr(
            k: [u64; 4], time_key_words: [u64; 2], is_second_current: bool, client: u32, port: u16,
            id in 0u64..16_384, sent_ms: u32, age_ms in 0u32..65_000,
        ) {
            let (keys, time_key) =
                (build_fleet_keys(k, is_second_current), CookieKey { k0: time_key_words[0], k1: time_key_words[1] });
            let tuple = build_four_tuple(client, port);
            let server = ServerId::try_from(id).unwrap();
            let stamped_tsval = stamp_tsval(&keys, &time_key, &tuple, Cookie::Server(server), sent_ms);
            prop_assert_ne!(stamped_tsval, 0);
            // The key that stamps may have changed meanwhile, but the key bit of TSecr selects the right one.
            let keys_after_rotation = FleetCookieKeys { current_key_index: CookieKeyIndex::First, ..keys };
            prop_assert_eq!(decode_cookie(&keys_after_rotation, &tuple, stamped_tsval), Cookie::Server(server));
            let restored_tsval = restore_tsval(decode_time_part(&time_key, &tuple, stamped_tsval),
                sent_ms.wrapping_add(age_ms));
            prop_assert!(restored_tsval == sent_ms || restored_tsval == sent_ms.wrapping_add(1));
        }
    }

    #[test]
    fn stamped_tsval_is_never_zero() {
        // With these keys and this tuple, the plain stamp would be 0, because id and time are chosen from the masks.
        let keys = build_fleet_keys([1, 2, 3, 4], false);
        let tuple = build_four_tuple(0x0a01_0007, 40312);
        let time_key = CookieKey { k0: 5, k1: 6 };
        let cookie = decode_cookie(&keys, &tuple, 0);
        let server_tsval_ms = u32::from(time_part_addend(&time_key, &tuple).wrapping_neg());
        assert_eq!(stamp_tsval(&keys, &time_key, &tuple, cookie, server_tsval_ms), 1 << 16);
    }
}
