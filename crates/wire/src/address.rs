//! Conversion of addresses, which have 4 (IPv4) or 16 (IPv6) bytes on the wire, in network byte order.

use std::net::{IpAddr, SocketAddr};

use coreward_model::tuple::{ServiceAddress, TransportProtocol};

use crate::{WireError, v1};

/// Returns the address as bytes in network byte order.
pub fn address_to_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Parses an IP address. Fails unless it has 4 or 16 bytes.
pub fn parse_address(field: &str, bytes: &[u8]) -> Result<IpAddr, WireError> {
    if let Ok(octets) = <[u8; 4]>::try_from(bytes) {
        return Ok(octets.into());
    }
    let octets = <[u8; 16]>::try_from(bytes).map_err(|_| {
        WireError::new(field, format!("an address of {} bytes: expected 4 (IPv4) or 16 (IPv6)", bytes.len()))
    })?;
    Ok(octets.into())
}

/// Parses an IP address that may be absent, in which case it has 0 bytes. Fails unless it has 0, 4 or 16 bytes.
pub fn parse_optional_address(field: &str, bytes: &[u8]) -> Result<Option<IpAddr>, WireError> {
    if bytes.is_empty() { Ok(None) } else { parse_address(field, bytes).map(Some) }
}

/// Parses a port number. Fails if it is 0 or above 65,535.
pub fn parse_port(field: &str, port: u32) -> Result<u16, WireError> {
    match u16::try_from(port) {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(WireError::new(field, format!("port {port}: expected 1 to 65535"))),
    }
}

/// Parses a server id. Fails if the id does not fit into a cookie.
pub fn parse_server_id(field: &str, id: u32) -> Result<coreward_model::ServerId, WireError> {
    u64::from(id).try_into().map_err(|error| WireError::new(field, error))
}

impl From<ServiceAddress> for v1::ServiceAddress {
    fn from(address: ServiceAddress) -> Self {
        Self {
            address: address_to_bytes(address.vip_and_port.ip()),
            port: address.vip_and_port.port().into(),
            protocol: address.protocol.name().to_owned(),
        }
    }
}

impl TryFrom<&v1::ServiceAddress> for ServiceAddress {
    type Error = WireError;

    fn try_from(message: &v1::ServiceAddress) -> Result<Self, WireError> {
        let ip = parse_address("address", &message.address)?;
        let port = parse_port("port", message.port)?;
        let protocol: TransportProtocol =
            message.protocol.parse().map_err(|error| WireError::new("protocol", error))?;
        Ok(Self { vip_and_port: SocketAddr::new(ip, port), protocol })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn service_addresses_round_trip(ip: IpAddr, port in 1u16.., udp: bool) {
            let protocol = if udp { TransportProtocol::Udp } else { TransportProtocol::Tcp };
            let service_address = ServiceAddress { vip_and_port: SocketAddr::new(ip, port), protocol };
            prop_assert_eq!(ServiceAddress::try_from(&v1::ServiceAddress::from(service_address)), Ok(service_address));
        }
    }

    #[test]
    fn errors_contain_the_invalid_field_and_its_value() {
        let valid_message = v1::ServiceAddress { address: vec![10, 200, 0, 1], port: 80, protocol: "tcp".into() };
        let parse_error = |message: v1::ServiceAddress| ServiceAddress::try_from(&message).unwrap_err().to_string();
        assert_eq!(
            parse_error(v1::ServiceAddress { address: vec![1; 5], ..valid_message.clone() }),
            "address: an address of 5 bytes: expected 4 (IPv4) or 16 (IPv6)"
        );
        assert_eq!(
            parse_error(v1::ServiceAddress { port: 65_536, ..valid_message.clone() }),
            "port: port 65536: expected 1 to 65535"
        );
        assert_eq!(
            parse_error(v1::ServiceAddress { port: 0, ..valid_message.clone() }),
            "port: port 0: expected 1 to 65535"
        );
        assert_eq!(
            parse_error(v1::ServiceAddress { protocol: "sctp".into(), ..valid_message }),
            "protocol: protocol \"sctp\" is not known: expected \"tcp\" or \"udp\""
        );
    }
}
