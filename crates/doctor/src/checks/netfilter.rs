//! Firewalls and connection tracking.

use std::collections::BTreeMap;

use crate::facts::{Chain, Facts, Role, Service};
use crate::finding::Finding;
use crate::nat_rules::translating_chains;

fn with_chains(facts: &Facts, check: impl FnOnce(&[Chain]) -> Vec<Finding>) -> Vec<Finding> {
    if !facts.netfilter.legacy_tables.is_empty() {
        let tables = facts.netfilter.legacy_tables.join(", ");
        return vec![Finding::unknown(format!("the old iptables has tables ({tables}): see `iptables-legacy-save`"))];
    }
    match &facts.netfilter.chains {
        Ok(chains) => check(chains),
        Err(reason) => vec![Finding::unknown(reason.clone())],
    }
}

pub fn conntrack(facts: &Facts) -> Vec<Finding> {
    with_chains(facts, |chains| {
        let tracking: Vec<&str> = chains.iter().filter(|chain| chain.tracks).map(|chain| chain.name.as_str()).collect();
        if tracking.is_empty() {
            return vec![Finding::ok("no rule asks for it")];
        }
        if chains.iter().any(|chain| chain.untracks) {
            return vec![Finding::ok(format!("{} ask for it; some packets are taken from it", tracking.join(", ")))];
        }
        let stamps = facts.role == Role::Lb && facts.services.iter().any(|service| service.stamped_by_lb);
        let why = match (facts.role, stamps) {
            (Role::Lb, true) => {
                "XDP takes clients' packets before it sees them, so that servers' answers are \"invalid\" to it"
            }
            (Role::Lb, false) => "packets that XDP passes to the kernel are tracked; those of services are not",
            _ => "every connection takes a place in its table, and new ones are dropped when it is full",
        };
        let found = format!("connections are tracked, for {}", tracking.join(", "));
        vec![Finding::fault_if(stamps, found, why).remedy(
            "nft 'add table ip coreward; add chain ip coreward raw { type filter hook prerouting priority raw; }; add rule ip coreward raw ip daddr VIP notrack'  # and ip saddr VIP in a chain of hook output",
        )]
    })
}

/// Returns a text per chain, with the services whose packets it can change. Without known services every rule counts.
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
                .remedy("docker run --network host  # or `consistency = \"stateless\"` with `timestamps = \"server\"`"),
        ]
    })
}

pub fn firewall(facts: &Facts) -> Vec<Finding> {
    let stamps = facts.services.iter().any(|service| service.stamped_by_lb);
    let on_path = |hook: &str| match (facts.role, hook) {
        (_, "prerouting") | (Role::Server, "input" | "output") => true,
        (Role::Lb, "forward" | "postrouting") => stamps,
        // A stateful rule accepts reports and tables, which are answers.
        _ => false,
    };
    with_chains(facts, |chains| {
        let dropping: Vec<&Chain> = chains.iter().filter(|chain| chain.drops && on_path(&chain.hook)).collect();
        if dropping.is_empty() {
            return vec![Finding::ok("no chain on the services' path drops what no rule accepts")];
        }
        let ports: Vec<String> = facts
            .services
            .iter()
            .map(|service| format!("{} dport {}", service.address.protocol.name(), service.address.socket.port()))
            .collect();
        let ports = if ports.is_empty() { "tcp dport PORT".to_owned() } else { ports.join("; ") };
        let of = |chain: &&Chain| {
            let why = "packets of services are dropped where no rule lets them through";
            let accepted = if chain.accepts {
                "its rules accept some: see that those of services are among them"
            } else {
                "no rule of it accepts anything"
            };
            let found = format!("chain {} (hook {}) drops; {accepted}", chain.name, chain.hook);
            Finding::fault_if(!chain.accepts, found, why).remedy(format!("nft add rule {} {ports} accept", chain.name))
        };
        dropping.iter().map(of).collect()
    })
}
