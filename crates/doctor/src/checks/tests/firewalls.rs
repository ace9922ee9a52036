//! Tests of checks for netfilter chains that drop, track or redirect packets.

use super::*;
use crate::nat_rules::{NatDestinationCondition, NatRule, NetfilterChain};

fn new_chain(hook: &str, drops_packets: bool, accepts_packets: bool, tracks_connections: bool) -> NetfilterChain {
    NetfilterChain {
        qualified_name: format!("ip filter {hook}"),
        hook_name: hook.to_owned(),
        drops_by_default: drops_packets,
        accepts_packets,
        tracks_connections,
        exempts_from_tracking: false,
        rules: vec![],
    }
}

/// Returns the warnings and faults about `chain`, for a service whose cookies are written by load balancers or servers.
fn problems_with_chain(
    role: MachineRole,
    chain: NetfilterChain,
    is_stamped_by_lb: bool,
) -> Vec<(&'static str, FindingSeverity)> {
    problems_after_change(role, |facts| {
        facts.netfilter.chains = Ok(vec![chain]);
        facts.services[0].is_stamped_by_lb = is_stamped_by_lb;
    })
}

#[test]
fn firewalls_are_reported_where_they_drop_packets() {
    assert_eq!(
        problems_with_chain(MachineRole::Server, new_chain("input", true, false, false), false),
        [("firewall", FAULT_SEVERITY)]
    );
    assert_eq!(
        problems_with_chain(MachineRole::Server, new_chain("input", true, true, false), false),
        [("firewall", WARNING_SEVERITY)]
    );
    assert_eq!(problems_with_chain(MachineRole::Server, new_chain("forward", true, false, false), false), []);
    assert_eq!(
        problems_with_chain(MachineRole::Lb, new_chain("forward", true, false, false), true),
        [("firewall", FAULT_SEVERITY)]
    );
    let use_legacy_iptables = |facts: &mut MachineFacts| facts.netfilter.legacy_tables = vec!["filter".to_owned()];
    assert_eq!(problems_after_change(MachineRole::Server, use_legacy_iptables), []);
}

#[test]
fn connection_tracking_is_reported_unless_exempted() {
    assert_eq!(
        problems_with_chain(MachineRole::Lb, new_chain("input", true, true, true), true),
        [("conntrack", FAULT_SEVERITY)]
    );
    assert_eq!(
        problems_with_chain(MachineRole::Server, new_chain("input", false, true, true), false),
        [("conntrack", WARNING_SEVERITY)]
    );
    let untracked_chain = NetfilterChain { exempts_from_tracking: true, ..new_chain("prerouting", false, true, true) };
    assert_eq!(problems_with_chain(MachineRole::Server, untracked_chain, false), []);
}

#[test]
fn nat_rule_that_changes_the_vip_is_reported_at_servers() {
    let chain_with_nat_rule = |conditions| {
        let nat_rule = NatRule { conditions, changes_destination: true, jump_targets: vec![] };
        NetfilterChain { rules: vec![nat_rule], ..new_chain("prerouting", false, true, false) }
    };
    assert_eq!(
        problems_with_chain(MachineRole::Server, chain_with_nat_rule(vec![]), false),
        [("dnat", WARNING_SEVERITY)]
    );
    assert_eq!(
        problems_with_chain(
            MachineRole::Server,
            chain_with_nat_rule(vec![NatDestinationCondition::Port(vec![8080..=8080])]),
            false
        ),
        []
    );
    assert_eq!(problems_with_chain(MachineRole::Lb, chain_with_nat_rule(vec![]), false), []);
}
