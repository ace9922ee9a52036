//! How a service's packets reach its servers.

use std::net::Ipv4Addr;

use coreward_intf as intf;

/// `enum forwarding` of `bpf/include/intf.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Forwarding {
    /// With the server's MAC address: it is on the load balancer's segment.
    #[default]
    L2,
    /// IPv4 in IPv4 (RFC 2003).
    Ipip,
    /// IPv4 in UDP (GUE variant 1).
    Gue,
}

impl Forwarding {
    /// All, in the order of `enum forwarding`.
    pub const ALL: [Forwarding; intf::FORWARDING_COUNT as usize] = [Forwarding::L2, Forwarding::Ipip, Forwarding::Gue];

    /// The value in `enum forwarding`.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The name as configuration and wire write it.
    pub fn name(self) -> &'static str {
        match self {
            Forwarding::L2 => "l2",
            Forwarding::Ipip => "ipip",
            Forwarding::Gue => "gue",
        }
    }

    /// Whether packets get an outer header, so that servers may be behind routers.
    pub fn encapsulates(self) -> bool {
        self != Forwarding::L2
    }

    /// Bytes of the outer header.
    pub fn overhead(self) -> usize {
        match self {
            Forwarding::L2 => 0,
            Forwarding::Ipip => 20,
            Forwarding::Gue => 28,
        }
    }
}

/// A kind that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("forwarding {0:?} is not known: expected \"l2\", \"ipip\" or \"gue\"")]
pub struct UnknownForwarding(pub String);

impl std::str::FromStr for Forwarding {
    type Err = UnknownForwarding;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|forwarding| forwarding.name() == name);
        known.ok_or_else(|| UnknownForwarding(name.to_owned()))
    }
}

/// The source port of GUE for a flow: flow_port() of `bpf/lb/emit_gue.h`. Ports in the packet's byte order, 0 where
/// unknown (later fragments, ICMP).
pub fn flow_port(client: Ipv4Addr, ports: [u8; 4]) -> u16 {
    const FIRST: u16 = 0xc000;
    let word = u64::from(u32::from_ne_bytes(client.octets())) | u64::from(u32::from_ne_bytes(ports)) << 32;
    FIRST | (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for forwarding in Forwarding::ALL {
            assert_eq!(forwarding.name().parse(), Ok(forwarding));
        }
        let error = "vxlan".parse::<Forwarding>().unwrap_err().to_string();
        assert_eq!(error, "forwarding \"vxlan\" is not known: expected \"l2\", \"ipip\" or \"gue\"");
    }

    #[test]
    fn flows_of_one_client_and_of_many_are_spread_evenly() {
        let port = |client: u32, source: u16| {
            let [high, low] = source.to_be_bytes();
            flow_port(Ipv4Addr::from(0x0a00_0000 + client), [high, low, 0, 80])
        };
        let one_client: Vec<u16> = (32_768..60_960).map(|source| port(1, source)).collect();
        let many_clients: Vec<u16> = (0..28_192).map(|client| port(client, 40_000)).collect();
        for ports in [one_client, many_clients] {
            let mut groups = [0u32; 16];
            ports.iter().for_each(|port| groups[usize::from(port % 16)] += 1);
            assert!(ports.iter().all(|port| *port >= 0xc000));
            let mean = ports.len() as u32 / 16;
            assert!(groups.iter().all(|count| count.abs_diff(mean) < mean / 5), "{groups:?}");
        }
    }
}
