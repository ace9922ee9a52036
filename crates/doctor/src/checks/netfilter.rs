//! Checks of firewalls, NAT rules and connection tracking.

use std::collections::BTreeMap;

use crate::facts::{MachineFacts, MachineRole, ServiceFacts};
use crate::finding::Finding;
use crate::nat_rules::{NetfilterChain, find_translating_chains};

fn run_netfilter_check(facts: &MachineFacts, check: impl FnOnce(&[NetfilterChain]) -> Vec<Finding>) -> Vec<Finding> {
    if !facts.netfilter.legacy_tables.is_empty() {
        let legacy_table_names = facts.netfilter.legacy_tables.join(", ");
        return vec![Finding::unknown(format!(
            "legacy iptables has tables ({legacy_table_names}): see `iptables-legacy-save`"
        ))];
    }
    match &facts.netfilter.chains {
        Ok(chains) => check(chains),
        Err(reason) => vec![Finding::unknown(reason.clone())],
    }
}

pub fn check_conntrack(facts: &MachineFacts) -> Vec<Finding> {
    run_netfilter_check(facts, |chains| {
        let tracking_chains: Vec<&str> =
            chains.iter().filter(|chain| chain.tracks_connections).map(|chain| chain.qualified_name.as_str()).collect();
        if tracking_chains.is_empty() {
            return vec![Finding::ok("no rule enables it")];
        }
        if chains.iter().any(|chain| chain.exempts_from_tracking) {
            return vec![Finding::ok(format!("{} enable it, with exceptions", tracking_chains.join(", ")))];
        }
        let stamps_at_lb =
            facts.role == MachineRole::Lb && facts.services.iter().any(|service| service.is_stamped_by_lb);
        let consequence = match (facts.role, stamps_at_lb) {
            (MachineRole::Lb, true) => {
                "XDP takes clients' packets before connection tracking, for which servers' replies are then invalid"
            }
            (MachineRole::Lb, false) => "packets that XDP passes to the kernel are tracked; those of services are not",
            _ => "every connection takes an entry of its table; when it is full, new ones are dropped",
        };
        let observation = format!("connections are tracked, for {}", tracking_chains.join(", "));
        vec![Finding::fault_or_warning(stamps_at_lb, observation, consequence).with_remedy_step(
            "nft 'add table ip coreward; add chain ip coreward raw { type filter hook prerouting priority raw; }; add \
             rule ip coreward raw ip daddr VIP notrack'  # and ip saddr VIP in a chain of hook output",
        )]
    })
}

/// Returns a description of each chain that can change the destination of services' packets. If no service is known,
/// includes every chain with a rule that changes destinations.
fn describe_translating_chains(chains: &[NetfilterChain], services: &[ServiceFacts]) -> Vec<String> {
    if services.is_empty() {
        let changes_destinations = |chain: &&NetfilterChain| chain.rules.iter().any(|rule| rule.changes_destination);
        return chains.iter().filter(changes_destinations).map(|chain| chain.qualified_name.clone()).collect();
    }
    let mut services_by_chain: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for service in services {
        for chain in find_translating_chains(chains, &service.address) {
            services_by_chain.entry(chain).or_default().push(&service.name);
        }
    }
    services_by_chain.into_iter().map(|(chain, services)| format!("{chain} of {}", services.join(", "))).collect()
}

pub fn check_dnat(facts: &MachineFacts) -> Vec<Finding> {
    run_netfilter_check(facts, |chains| {
        let translating_chains = describe_translating_chains(chains, &facts.services);
        if translating_chains.is_empty() {
            return vec![Finding::ok("no rule changes the destinations of services")];
        }
        let consequence = "sockets of services behind it are not visible: `consistency = \"stateful\"` is stateless \
                           there, and with \"beamer\" or `timestamps = \"off\"` connections break when the pool \
                           changes";
        vec![
            Finding::warning(
                format!("{} can change destinations (containers?)", translating_chains.join("; ")),
                consequence,
            )
            .with_remedy_step(
                "docker run --network host  # or `consistency = \"stateless\"` with `timestamps = \"server\"`",
            ),
        ]
    })
}

pub fn check_firewall(facts: &MachineFacts) -> Vec<Finding> {
    let has_lb_stamped_services = facts.services.iter().any(|service| service.is_stamped_by_lb);
    let is_on_packet_path = |hook: &str| match (facts.role, hook) {
        (_, "prerouting") | (MachineRole::Server, "input" | "output") => true,
        (MachineRole::Lb, "forward" | "postrouting") => has_lb_stamped_services,
        // Reports and placement tables are answers within a connection, which a stateful rule accepts.
        _ => false,
    };
    run_netfilter_check(facts, |chains| {
        let dropping_chains: Vec<&NetfilterChain> =
            chains.iter().filter(|chain| chain.drops_by_default && is_on_packet_path(&chain.hook_name)).collect();
        if dropping_chains.is_empty() {
            return vec![Finding::ok("no chain drops the services' packets by default")];
        }
        let port_matches: Vec<String> = facts
            .services
            .iter()
            .map(|service| format!("{} dport {}", service.address.protocol.name(), service.address.vip_and_port.port()))
            .collect();
        let port_matches = if port_matches.is_empty() { "tcp dport PORT".to_owned() } else { port_matches.join("; ") };
        let to_firewall_finding = |chain: &&NetfilterChain| {
            let consequence = "packets of services are dropped unless a rule accepts them";
            let acceptance_note = if chain.accepts_packets {
                "its rules accept some packets: check that those of services are among them"
            } else {
                "it has no accept rule"
            };
            let observation =
                format!("chain {} (hook {}) drops; {acceptance_note}", chain.qualified_name, chain.hook_name);
            Finding::fault_or_warning(!chain.accepts_packets, observation, consequence)
                .with_remedy_step(format!("nft add rule {} {port_matches} accept", chain.qualified_name))
        };
        dropping_chains.iter().map(to_firewall_finding).collect()
    })
}
