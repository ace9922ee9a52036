//! Firewalls and connection tracking.

use std::collections::BTreeMap;

use crate::facts::{Facts, Role, Service};
use crate::finding::Finding;
use crate::nat_rules::{Chain, translating_chains};

fn with_chains(facts: &Facts, check: impl FnOnce(&[Chain]) -> Vec<Finding>) -> Vec<Finding> {
    if !facts.netfilter.legacy_tables.is_empty() {
        let tables = facts.netfilter.legacy_tables.join(", ");
        return vec![Finding::unknown(format!("legacy iptables has tables ({tables}): see `iptables-legacy-save`"))];
    }
    match &facts.netfilter.chains {
        Ok(chains) => check(chains),
        Err(reason) => vec![Finding::unknown(reason.clone())],
    }
}

pub fn conntrack(facts: &Facts) -> Vec<Finding> {
    with_chains(facts, |chains| {
        let tracking: Vec<&str> =
            chains.iter().filter(|chain| chain.tracks_connections).map(|chain| chain.name.as_str()).collect();
        if tracking.is_empty() {
            return vec![Finding::ok("no rule enables it")];
        }
        if chains.iter().any(|chain| chain.exempts_packets) {
            return vec![Finding::ok(format!("{} enable it, with exceptions", tracking.join(", ")))];
        }
        let stamps = facts.role == Role::Lb && facts.services.iter().any(|service| service.is_stamped_by_lb);
        let why = match (facts.role, stamps) {
            (Role::Lb, true) => {
                "XDP takes clients' packets before connection tracking, for which servers' replies are then invalid"
            }
            (Role::Lb, false) => "packets that XDP passes to the kernel are tracked; those of services are not",
            _ => "every connection takes an entry of its table; when it is full, new ones are dropped",
        };
        let found = format!("connections are tracked, for {}", tracking.join(", "));
        vec![Finding::fault_if(stamps, found, why).with_remediation(
            "nft 'add table ip coreward; add chain ip coreward raw { type filter hook prerouting priority raw; }; add \
             rule ip coreward raw ip daddr VIP notrack'  # and ip saddr VIP in a chain of hook output",
        )]
    })
}

/// Returns a text per chain that can change destinations, with the services. If none is known, every rule counts.
fn translating_chains_of(chains: &[Chain], services: &[Service]) -> Vec<String> {
    if services.is_empty() {
        let translates = |chain: &&Chain| chain.rules.iter().any(|rule| rule.translates);
        return chains.iter().filter(translates).map(|chain| chain.name.clone()).collect();
    }
    let mut by_chain: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for service in services {
        for chain in translating_chains(chains, &service.address) {
            by_chain.entry(chain).or_default().push(&service.name);
        }
    }
    by_chain.into_iter().map(|(chain, services)| format!("{chain} of {}", services.join(", "))).collect()
}

pub fn dnat(facts: &Facts) -> Vec<Finding> {
    with_chains(facts, |chains| {
        let translating = translating_chains_of(chains, &facts.services);
        if translating.is_empty() {
            return vec![Finding::ok("no rule changes the destinations of services")];
        }
        let why = "sockets of services behind it are not visible: `consistency = \"stateful\"` is stateless there, and \
                   with \"beamer\" or `timestamps = \"off\"` connections break when the pool changes";
        vec![
            Finding::warning(format!("{} can change destinations (containers?)", translating.join("; ")), why)
                .with_remediation(
                    "docker run --network host  # or `consistency = \"stateless\"` with `timestamps = \"server\"`",
                ),
        ]
    })
}

pub fn firewall(facts: &Facts) -> Vec<Finding> {
    let stamps = facts.services.iter().any(|service| service.is_stamped_by_lb);
    let on_path = |hook: &str| match (facts.role, hook) {
        (_, "prerouting") | (Role::Server, "input" | "output") => true,
        (Role::Lb, "forward" | "postrouting") => stamps,
        // A stateful rule accepts reports and tables, which are answers.
        _ => false,
    };
    with_chains(facts, |chains| {
        let dropping: Vec<&Chain> =
            chains.iter().filter(|chain| chain.drops_by_default && on_path(&chain.hook)).collect();
        if dropping.is_empty() {
            return vec![Finding::ok("no chain drops the services' packets by default")];
        }
        let ports: Vec<String> = facts
            .services
            .iter()
            .map(|service| format!("{} dport {}", service.address.protocol.name(), service.address.socket.port()))
            .collect();
        let ports = if ports.is_empty() { "tcp dport PORT".to_owned() } else { ports.join("; ") };
        let of = |chain: &&Chain| {
            let why = "packets of services are dropped unless a rule accepts them";
            let accepted = if chain.accepts_packets {
                "its rules accept some packets: check that those of services are among them"
            } else {
                "it has no accept rule"
            };
            let found = format!("chain {} (hook {}) drops; {accepted}", chain.name, chain.hook);
            Finding::fault_if(!chain.accepts_packets, found, why)
                .with_remediation(format!("nft add rule {} {ports} accept", chain.name))
        };
        dropping.iter().map(of).collect()
    })
}
