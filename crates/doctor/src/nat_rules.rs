//! Matching of services' packets with nftables rules that change destination addresses.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use coreward_model::ServiceAddress;
use coreward_model::tuple::TransportProtocol;

/// Chain of nftables rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetfilterChain {
    /// Address family and name of the chain's table, and name of the chain, separated by spaces.
    pub qualified_name: String,
    /// Name of the netfilter hook to which the chain is attached, or an empty string if it has no hook.
    pub hook_name: String,
    /// Whether the chain drops packets that no rule accepts.
    pub drops_by_default: bool,
    /// Whether at least one rule accepts packets or jumps to another chain.
    pub accepts_packets: bool,
    /// Whether at least one rule uses connection tracking or NAT, so that connections are tracked.
    pub tracks_connections: bool,
    /// Whether at least one rule exempts packets from connection tracking.
    pub exempts_from_tracking: bool,
    /// Rules that change destination addresses or jump to other chains.
    pub rules: Vec<NatRule>,
}

/// Rule that changes destination addresses or jumps to other chains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NatRule {
    /// Conditions that a packet must meet to match the rule. Conditions of an unknown form are omitted, so that the
    /// rule may seem to match more packets than it does.
    pub conditions: Vec<NatDestinationCondition>,
    pub changes_destination: bool,
    /// Names of the chains to which the rule jumps.
    pub jump_targets: Vec<String>,
}

/// Condition of a rule on the destination of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NatDestinationCondition {
    Address(Vec<RangeInclusive<IpAddr>>),
    Port(Vec<RangeInclusive<u16>>),
    Protocol(Vec<TransportProtocol>),
}

impl NatDestinationCondition {
    fn may_match(&self, service: &ServiceAddress) -> bool {
        match self {
            NatDestinationCondition::Address(ranges) => {
                ranges.iter().any(|range| range.contains(&service.vip_and_port.ip()))
            }
            NatDestinationCondition::Port(ranges) => {
                ranges.iter().any(|range| range.contains(&service.vip_and_port.port()))
            }
            NatDestinationCondition::Protocol(protocols) => protocols.contains(&service.protocol),
        }
    }
}

/// Returns the names of the chains with a rule that can change the destination of the service's packets.
pub fn find_translating_chains<'a>(chains: &'a [NetfilterChain], service: &ServiceAddress) -> BTreeSet<&'a str> {
    let (mut translating_chain_names, mut visited_chain_names) = (BTreeSet::new(), BTreeSet::new());
    let mut pending_chains: Vec<&NetfilterChain> =
        chains.iter().filter(|chain| chain.hook_name == "prerouting").collect();
    while let Some(chain) = pending_chains.pop() {
        if !covers_address_family(chain, service) || !visited_chain_names.insert(&chain.qualified_name) {
            continue;
        }
        for rule in
            chain.rules.iter().filter(|rule| rule.conditions.iter().all(|condition| condition.may_match(service)))
        {
            if rule.changes_destination {
                translating_chain_names.insert(chain.qualified_name.as_str());
            }
            pending_chains.extend(chains.iter().filter(|chain| rule.jump_targets.contains(&chain.qualified_name)));
        }
    }
    translating_chain_names
}

fn covers_address_family(chain: &NetfilterChain, service: &ServiceAddress) -> bool {
    match chain.qualified_name.split(' ').next() {
        Some("ip") => service.vip_and_port.is_ipv4(),
        Some("ip6") => service.vip_and_port.is_ipv6(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_chain(name: &str, hook: &str, rules: Vec<NatRule>) -> NetfilterChain {
        NetfilterChain {
            qualified_name: name.to_owned(),
            hook_name: hook.to_owned(),
            rules,
            ..NetfilterChain::default()
        }
    }

    fn jump_rule(target: &str) -> NatRule {
        NatRule { jump_targets: vec![target.to_owned()], ..NatRule::default() }
    }

    fn dnat_rule(conditions: Vec<NatDestinationCondition>) -> NatRule {
        NatRule { conditions, changes_destination: true, jump_targets: vec![] }
    }

    fn tcp_service_at(socket: &str) -> ServiceAddress {
        ServiceAddress { vip_and_port: socket.parse().unwrap(), protocol: TransportProtocol::Tcp }
    }

    #[test]
    fn nat_rule_applies_to_service_if_all_conditions_may_match() {
        let is_translated_with = |conditions| {
            let chains = [new_chain("ip nat PREROUTING", "prerouting", vec![dnat_rule(conditions)])];
            !find_translating_chains(&chains, &tcp_service_at("10.200.0.1:80")).is_empty()
        };
        let address_condition = |first_address: &str, last_address: &str| {
            NatDestinationCondition::Address(vec![first_address.parse().unwrap()..=last_address.parse().unwrap()])
        };
        assert!(is_translated_with(vec![]));
        assert!(is_translated_with(vec![
            NatDestinationCondition::Port(vec![80..=80]),
            NatDestinationCondition::Protocol(vec![TransportProtocol::Tcp])
        ]));
        assert!(!is_translated_with(vec![NatDestinationCondition::Port(vec![8000..=9000])]));
        assert!(!is_translated_with(vec![
            NatDestinationCondition::Port(vec![80..=80]),
            NatDestinationCondition::Protocol(vec![TransportProtocol::Udp])
        ]));
        assert!(is_translated_with(vec![address_condition("10.200.0.0", "10.200.0.255")]));
        assert!(!is_translated_with(vec![address_condition("10.96.0.0", "10.96.255.255")]));
        assert!(!is_translated_with(vec![address_condition("::", "ffff::")]));
    }

    #[test]
    fn nat_chains_apply_only_if_reachable_from_prerouting() {
        let unrelated_rule =
            NatRule { conditions: vec![NatDestinationCondition::Port(vec![443..=443])], ..jump_rule("ip nat OTHER") };
        let chains = [
            new_chain("ip nat PREROUTING", "prerouting", vec![jump_rule("ip nat DOCKER"), unrelated_rule]),
            new_chain("ip nat DOCKER", "", vec![dnat_rule(vec![]), jump_rule("ip nat DOCKER")]),
            new_chain("ip nat OTHER", "", vec![dnat_rule(vec![])]),
            new_chain("ip nat UNUSED", "", vec![dnat_rule(vec![])]),
            new_chain("ip nat OUTPUT", "output", vec![dnat_rule(vec![])]),
        ];
        assert_eq!(
            find_translating_chains(&chains, &tcp_service_at("10.200.0.1:80")),
            BTreeSet::from(["ip nat DOCKER"])
        );
        assert!(find_translating_chains(&chains, &tcp_service_at("[2001:db8::1]:80")).is_empty());
    }
}
