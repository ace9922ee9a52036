//! Transforms of the RSS input.

use coreward_intf as intf;

use super::MAX_RSS_INPUT_BYTES;

/// Transformation of a packet's addresses and ports before the NIC hashes them (`input_xfrm` of `struct ethtool_rxfh`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RssInputTransform {
    /// Addresses and ports are hashed unchanged.
    #[default]
    None,
    /// Source and destination are both replaced by their XOR (RXH_XFRM_SYM_XOR), so both directions of a flow hash
    /// alike.
    SymmetricXor,
    /// The source is replaced by the OR of source and destination, and the destination by their XOR
    /// (RXH_XFRM_SYM_OR_XOR). This is mlx5's default.
    SymmetricOrXor,
}

/// Error returned for the number of an unknown input transform.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("input transform {0} of RSS: expected 0 (none), 1 (symmetric-xor) or 2 (symmetric-or-xor)")]
pub struct UnknownRssInputTransform(pub u32);

impl TryFrom<u32> for RssInputTransform {
    type Error = UnknownRssInputTransform;

    fn try_from(number: u32) -> Result<Self, UnknownRssInputTransform> {
        let input_transform = Self::ALL.into_iter().find(|input| u32::from(input.ethtool_number()) == number);
        input_transform.ok_or(UnknownRssInputTransform(number))
    }
}

impl RssInputTransform {
    /// All input transforms in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::None, Self::SymmetricXor, Self::SymmetricOrXor];

    /// Returns the number of the transform in ethtool.
    pub fn ethtool_number(self) -> u8 {
        match self {
            Self::None => intf::RSS_INPUT_UNCHANGED as u8,
            Self::SymmetricXor => intf::RSS_INPUT_SYMMETRIC_XOR as u8,
            Self::SymmetricOrXor => intf::RSS_INPUT_SYMMETRIC_OR_XOR as u8,
        }
    }

    /// Returns the name of the transform in ethtool.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::SymmetricXor => "symmetric-xor",
            Self::SymmetricOrXor => "symmetric-or-xor",
        }
    }

    /// Transforms a source byte and the destination byte at the same offset, and returns both results.
    pub(super) fn transform_bytes(self, source: u8, destination: u8) -> (u8, u8) {
        match self {
            Self::None => (source, destination),
            Self::SymmetricXor => (source ^ destination, source ^ destination),
            Self::SymmetricOrXor => (source | destination, source ^ destination),
        }
    }

    /// Returns the transformed addresses and ports of IPv4 (12 bytes) or IPv6 (36 bytes). Input of any other length is
    /// treated as addresses without ports.
    pub(super) fn transform_tuple(self, four_tuple_bytes: &[u8]) -> Vec<u8> {
        let mut tuple = four_tuple_bytes.to_vec();
        let address_bytes = match tuple.len() {
            IPV4_RSS_INPUT_BYTES | MAX_RSS_INPUT_BYTES => tuple.len() - 4,
            length => length,
        };
        let (addresses, ports) = tuple.split_at_mut(address_bytes);
        for field_bytes in [addresses, ports] {
            let (sources, destinations) = field_bytes.split_at_mut(field_bytes.len() / 2);
            for (source, destination) in sources.iter_mut().zip(destinations) {
                (*source, *destination) = self.transform_bytes(*source, *destination);
            }
        }
        tuple
    }
}

/// Number of bytes of the hash input for IPv4 addresses and ports.
const IPV4_RSS_INPUT_BYTES: usize = intf::RSS_INPUT_IPV4_BYTES as usize;
