//! Rules of nftables that change destinations: matching with the packets of services.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use coreward_model::ServiceAddress;
use coreward_model::tuple::Protocol;

/// Netfilter chain of nftables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    /// Family, table and name of the chain.
    pub name: String,
    /// Name of the chain's hook; empty if it has none.
    pub hook: String,
    /// Whether the chain's policy is to drop.
    pub drops_by_default: bool,
    /// Whether any rule accepts packets or jumps to another chain.
    pub accepts_packets: bool,
    /// Whether any rule uses connection tracking state or NAT.
    pub tracks_connections: bool,
    /// Whether any rule exempts packets from connection tracking.
    pub exempts_packets: bool,
    /// Rules that change destination addresses, or lead to other chains.
    pub rules: Vec<NatRule>,
}

/// Rule that changes destination addresses, or leads to other chains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NatRule {
    /// Conditions on packets, all of which must hold. A condition that is not understood is omitted, so that the rule
    /// matches more packets.
    pub conditions: Vec<MatchCondition>,
    /// Whether the rule changes destination addresses.
    pub translates: bool,
    /// Names of the chains to which the rule jumps.
    pub jumps: Vec<String>,
}

/// Condition of a rule on a packet's destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MatchCondition {
    Address(Vec<RangeInclusive<IpAddr>>),
    Port(Vec<RangeInclusive<u16>>),
    Protocol(Vec<Protocol>),
}

impl MatchCondition {
    fn allows(&self, service: &ServiceAddress) -> bool {
        match self {
            MatchCondition::Address(ranges) => ranges.iter().any(|range| range.contains(&service.socket.ip())),
            MatchCondition::Port(ranges) => ranges.iter().any(|range| range.contains(&service.socket.port())),
            MatchCondition::Protocol(protocols) => protocols.contains(&service.protocol),
        }
    }
}

/// Returns the names of the chains that can change the destination of the service's packets by a rule.
pub fn translating_chains<'a>(chains: &'a [Chain], service: &ServiceAddress) -> BTreeSet<&'a str> {
    let (mut found, mut visited) = (BTreeSet::new(), BTreeSet::new());
    let mut pending: Vec<&Chain> = chains.iter().filter(|chain| chain.hook == "prerouting").collect();
    while let Some(chain) = pending.pop() {
        if !covers_address_family(chain, service) || !visited.insert(&chain.name) {
            continue;
        }
        for rule in chain.rules.iter().filter(|rule| rule.conditions.iter().all(|is| is.allows(service))) {
            if rule.translates {
                found.insert(chain.name.as_str());
            }
            pending.extend(chains.iter().filter(|chain| rule.jumps.contains(&chain.name)));
        }
    }
    found
}

fn covers_address_family(chain: &Chain, service: &ServiceAddress) -> bool {
    match chain.name.split(' ').next() {
        Some("ip") => service.socket.is_ipv4(),
        Some("ip6") => service.socket.is_ipv6(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(name: &str, hook: &str, rules: Vec<NatRule>) -> Chain {
        Chain { name: name.to_owned(), hook: hook.to_owned(), rules, ..Chain::default() }
    }

    fn jump(target: &str) -> NatRule {
        NatRule { jumps: vec![target.to_owned()], ..NatRule::default() }
    }

    fn dnat(conditions: Vec<MatchCondition>) -> NatRule {
        NatRule { conditions, translates: true, jumps: vec![] }
    }

    fn service(socket: &str) -> ServiceAddress {
        ServiceAddress { socket: socket.parse().unwrap(), protocol: Protocol::Tcp }
    }

    #[test]
    fn rule_counts_if_all_conditions_allow_the_service() {
        let found = |conditions| {
            let chains = [chain("ip nat PREROUTING", "prerouting", vec![dnat(conditions)])];
            !translating_chains(&chains, &service("10.200.0.1:80")).is_empty()
        };
        let address = |from: &str, to: &str| MatchCondition::Address(vec![from.parse().unwrap()..=to.parse().unwrap()]);
        assert!(found(vec![]));
        assert!(found(vec![MatchCondition::Port(vec![80..=80]), MatchCondition::Protocol(vec![Protocol::Tcp])]));
        assert!(!found(vec![MatchCondition::Port(vec![8000..=9000])]));
        assert!(!found(vec![MatchCondition::Port(vec![80..=80]), MatchCondition::Protocol(vec![Protocol::Udp])]));
        assert!(found(vec![address("10.200.0.0", "10.200.0.255")]));
        assert!(!found(vec![address("10.96.0.0", "10.96.255.255")]));
        assert!(!found(vec![address("::", "ffff::")]));
    }

    #[test]
    fn nat_chains_count_only_if_reachable() {
        let other = NatRule { conditions: vec![MatchCondition::Port(vec![443..=443])], ..jump("ip nat OTHER") };
        let chains = [
            chain("ip nat PREROUTING", "prerouting", vec![jump("ip nat DOCKER"), other]),
            chain("ip nat DOCKER", "", vec![dnat(vec![]), jump("ip nat DOCKER")]),
            chain("ip nat OTHER", "", vec![dnat(vec![])]),
            chain("ip nat UNUSED", "", vec![dnat(vec![])]),
            chain("ip nat OUTPUT", "output", vec![dnat(vec![])]),
        ];
        assert_eq!(translating_chains(&chains, &service("10.200.0.1:80")), BTreeSet::from(["ip nat DOCKER"]));
        assert!(translating_chains(&chains, &service("[2001:db8::1]:80")).is_empty());
    }
}
