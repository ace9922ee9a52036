//! Ethernet addresses.

use std::fmt;

/// MAC address of six bytes, in the order of transmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The broadcast address ff:ff:ff:ff:ff:ff.
    pub const BROADCAST: MacAddress = MacAddress([0xff; 6]);

    /// Returns whether the address is a multicast or broadcast address. The first transmitted bit of such an address is
    /// 1 (IEEE 802.3, Sect. 3.2.3).
    pub fn is_group_address(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Returns the address as the low 48 bits of a word, in the byte order in which a BPF program loads it from a
    /// frame.
    pub(crate) fn to_word(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
    }

    /// Converts the low 48 bits of a word to an address. The upper 16 bits are ignored.
    pub(crate) fn from_word(word: u64) -> Self {
        let [a, b, c, d, e, f, ..] = word.to_le_bytes();
        Self([a, b, c, d, e, f])
    }
}

/// Formats the address as six hexadecimal bytes, separated by colons.
impl fmt::Display for MacAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(formatter, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_convert_to_words_and_text() {
        let mac = MacAddress([0x02, 0x42, 0xac, 0x11, 0x00, 0xfe]);
        assert_eq!(MacAddress::from_word(mac.to_word() | 0xabcd << 48), mac);
        assert_eq!(mac.to_string(), "02:42:ac:11:00:fe");
        assert!(!mac.is_group_address() && MacAddress::BROADCAST.is_group_address());
    }
}
