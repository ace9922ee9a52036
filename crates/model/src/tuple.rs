//! Addresses, services and the 4-tuple of a connection, for both address families.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use coreward_intf as intf;

/// Id of a server within a service (0 to 16,383), which the cookie carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServerId(u16);

/// Error returned for a number that is not a server id (0 to 16,383).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "server id {0} is out of range: expected 0 to {max}, the 14 bits that a cookie holds",
    max = intf::SERVER_ID_COUNT - 1
)]
pub struct ServerIdOutOfRange(pub u64);

impl ServerId {
    /// Number of possible server ids.
    pub const COUNT: usize = intf::SERVER_ID_COUNT as usize;

    /// Returns the id as a number below [`ServerId::COUNT`].
    pub fn get(self) -> u16 {
        self.0
    }
}

impl TryFrom<u64> for ServerId {
    type Error = ServerIdOutOfRange;

    fn try_from(value: u64) -> Result<Self, Self::Error> {
        if value < Self::COUNT as u64 { Ok(Self(value as u16)) } else { Err(ServerIdOutOfRange(value)) }
    }
}

impl fmt::Display for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Layer-4 protocol that coreward balances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransportProtocol {
    /// TCP (protocol number 6).
    Tcp,
    /// UDP (protocol number 17).
    Udp,
}

impl TransportProtocol {
    /// All protocols that coreward balances.
    pub const ALL: [TransportProtocol; 2] = [TransportProtocol::Tcp, TransportProtocol::Udp];

    /// Returns the protocol number in the IP header (IANA protocol numbers).
    pub fn iana_number(self) -> u8 {
        match self {
            TransportProtocol::Tcp => 6,
            TransportProtocol::Udp => 17,
        }
    }

    /// Returns the protocol's name in configuration and messages.
    pub fn name(self) -> &'static str {
        match self {
            TransportProtocol::Tcp => "tcp",
            TransportProtocol::Udp => "udp",
        }
    }
}

/// Error returned for the name of an unknown or unsupported protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("protocol {0:?} is not known: expected \"tcp\" or \"udp\"")]
pub struct UnknownTransportProtocol(pub String);

impl fmt::Display for TransportProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TransportProtocol {
    type Err = UnknownTransportProtocol;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let matching_protocol = Self::ALL.into_iter().find(|protocol| protocol.name() == name);
        matching_protocol.ok_or_else(|| UnknownTransportProtocol(name.to_string()))
    }
}

/// Address of a service, which consists of VIP, port and protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceAddress {
    /// VIP and port of the service.
    pub vip_and_port: SocketAddr,
    /// Protocol of the service.
    pub protocol: TransportProtocol,
}

impl fmt::Display for ServiceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.vip_and_port, self.protocol.name())
    }
}

/// Error returned for a text that is not a service address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("service address {0:?}: expected VIP, port and protocol, as \"10.200.0.1:80/tcp\"")]
pub struct InvalidServiceAddress(String);

impl FromStr for ServiceAddress {
    type Err = InvalidServiceAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let service_address = text.split_once('/').and_then(|(socket, protocol)| {
            Some(Self { vip_and_port: socket.parse().ok()?, protocol: protocol.parse().ok()? })
        });
        service_address.ok_or_else(|| InvalidServiceAddress(text.to_owned()))
    }
}

/// Returns an address as four words in network byte order, in the layout of `bpf/include/intf.h`. An IPv4 address is in
/// the last word (IPv4-mapped, RFC 4291 Sect. 2.5.5.2).
pub fn address_to_words(address: IpAddr) -> [u32; 4] {
    let octets = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    std::array::from_fn(|word_index| {
        u32::from_ne_bytes(octets[word_index * 4..word_index * 4 + 4].try_into().expect("four bytes"))
    })
}

/// Returns the address that `words` encode, as the inverse of [`address_to_words`].
pub fn address_from_words(words: [u32; 4]) -> IpAddr {
    let mut octets = [0; 16];
    octets.chunks_exact_mut(4).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_ne_bytes()));
    Ipv6Addr::from(octets).to_canonical()
}

impl ServiceAddress {
    /// Returns the key of the service in the maps of the BPF programs.
    pub fn to_service_key(&self) -> intf::service_key {
        intf::service_key {
            address: address_to_words(self.vip_and_port.ip()),
            port: self.vip_and_port.port().to_be(),
            protocol: self.protocol.iana_number(),
            family: match self.vip_and_port {
                SocketAddr::V4(_) => intf::ADDRESS_FAMILY_IPV4,
                SocketAddr::V6(_) => intf::ADDRESS_FAMILY_IPV6,
            } as u8,
        }
    }
}

/// Addresses and ports of the client and the VIP of a connection, in the direction from client to VIP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FourTuple {
    client: SocketAddr,
    vip: SocketAddr,
}

/// Error returned for a client and a VIP of different address families.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "client {client} and VIP {vip} are of different address families: expected a client with an {family} address",
    family = if vip.is_ipv4() { "IPv4" } else { "IPv6" }
)]
pub struct MixedAddressFamilies {
    client: SocketAddr,
    vip: SocketAddr,
}

impl FourTuple {
    /// Returns the 4-tuple of client and VIP. Fails if one address is IPv4 and the other is IPv6.
    pub fn new(client: SocketAddr, vip: SocketAddr) -> Result<Self, MixedAddressFamilies> {
        if client.is_ipv4() == vip.is_ipv4() {
            Ok(Self { client, vip })
        } else {
            Err(MixedAddressFamilies { client, vip })
        }
    }

    /// Returns the 4-tuple of two IPv4 addresses.
    pub fn ipv4(client: (Ipv4Addr, u16), vip: (Ipv4Addr, u16)) -> Self {
        Self { client: client.into(), vip: vip.into() }
    }

    /// Returns the 4-tuple of two IPv6 addresses.
    pub fn ipv6(client: (Ipv6Addr, u16), vip: (Ipv6Addr, u16)) -> Self {
        Self { client: client.into(), vip: vip.into() }
    }

    /// Returns the address and port of the client.
    pub fn client(&self) -> SocketAddr {
        self.client
    }

    /// Returns the address and port of the VIP.
    pub fn vip(&self) -> SocketAddr {
        self.vip
    }

    /// Returns source address, destination address, source port and destination port in network byte order (12 bytes,
    /// or 36 for IPv6). These bytes are the input of the RSS hash with ports ("RSS hashing types", Microsoft, NDIS 6.0)
    /// and of the cookie's keyed hash.
    pub fn bytes(&self) -> FourTupleBytes {
        let mut bytes = FourTupleBytes { buffer: [0; 36], byte_count: 0 };
        for address in [self.client.ip(), self.vip.ip()] {
            match address {
                IpAddr::V4(v4) => bytes.push_bytes(&v4.octets()),
                IpAddr::V6(v6) => bytes.push_bytes(&v6.octets()),
            }
        }
        bytes.push_bytes(&self.client.port().to_be_bytes());
        bytes.push_bytes(&self.vip.port().to_be_bytes());
        bytes
    }
}

/// Bytes of a [`FourTuple`], stored without a heap allocation.
#[derive(Debug, Clone, Copy)]
pub struct FourTupleBytes {
    buffer: [u8; 36],
    byte_count: usize,
}

impl FourTupleBytes {
    fn push_bytes(&mut self, bytes: &[u8]) {
        self.buffer[self.byte_count..self.byte_count + bytes.len()].copy_from_slice(bytes);
        self.byte_count += bytes.len();
    }
}

impl std::ops::Deref for FourTupleBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[..self.byte_count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_words_round_trip() {
        for text in ["10.200.0.1", "2001:db8::1", "::1"] {
            let address = text.parse().unwrap();
            assert_eq!(address_from_words(address_to_words(address)), address);
        }
    }

    #[test]
    fn service_key_is_in_network_byte_order() {
        let address =
            ServiceAddress { vip_and_port: "10.200.0.1:80".parse().unwrap(), protocol: TransportProtocol::Tcp };
        let key = address.to_service_key();
        assert_eq!(key.address[3].to_ne_bytes(), [10, 200, 0, 1]);
        assert_eq!(key.address[2].to_ne_bytes(), [0, 0, 0xff, 0xff]);
        assert_eq!(key.port.to_ne_bytes(), [0, 80]);
        assert_eq!((key.protocol, key.family), (6, 4));
    }

    #[test]
    fn four_tuple_bytes_are_in_the_input_order_of_rss() {
        let tuple = FourTuple::ipv4((Ipv4Addr::new(1, 2, 3, 4), 0x0506), (Ipv4Addr::new(7, 8, 9, 10), 0x0b0c));
        assert_eq!(&tuple.bytes()[..], &[1, 2, 3, 4, 7, 8, 9, 10, 5, 6, 11, 12]);
    }

    #[test]
    fn mixed_address_families_and_server_ids_out_of_range_are_rejected() {
        assert!(FourTuple::new("10.0.0.1:1".parse().unwrap(), "[::1]:80".parse().unwrap()).is_err());
        assert!(ServerId::try_from(16_383).is_ok());
        assert_eq!(
            ServerId::try_from(16_384).unwrap_err().to_string(),
            "server id 16384 is out of range: expected 0 to 16383, the 14 bits that a cookie holds"
        );
    }
}
