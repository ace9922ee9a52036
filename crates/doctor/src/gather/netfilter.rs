//! Firewalls and connection tracking, by `nft --json list ruleset`: the kernel's rules need libnftables to be read.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::facts::{Chain, Netfilter};

pub(super) fn gather() -> Netfilter {
    let legacy = fs::read_to_string("/proc/thread-self/net/ip_tables_names").unwrap_or_default();
    Netfilter { chains: ruleset(), legacy_tables: legacy.lines().map(str::to_owned).collect() }
}

fn ruleset() -> Result<Vec<Chain>, String> {
    // A login shell's PATH may lack it.
    let found = ["/usr/sbin/nft", "/sbin/nft", "nft"]
        .into_iter()
        .map(|nft| Command::new(nft).args(["--json", "list", "ruleset"]).output());
    let Some(output) = found.flatten().next() else {
        return Err("nft is not there to ask (Debian package nftables)".to_owned());
    };
    if !output.status.success() {
        return Err(format!("nft: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let answer: Value = serde_json::from_slice(&output.stdout).map_err(|error| format!("nft --json: {error}"))?;
    Ok(chains(&answer))
}

fn chains(ruleset: &Value) -> Vec<Chain> {
    let objects = ruleset["nftables"].as_array().map_or(&[][..], Vec::as_slice);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name = |object: &Value, chain: &str| {
        format!("{} {} {}", text(&object["family"]), text(&object["table"]), text(&object[chain]))
    };
    let mut chains: BTreeMap<String, Chain> = BTreeMap::new();
    for chain in objects.iter().filter_map(|object| object.get("chain")) {
        let found = Chain {
            name: name(chain, "name"),
            hook: text(&chain["hook"]),
            drops: chain["policy"] == "drop",
            // A chain of type nat tracks connections.
            tracks: chain["type"] == "nat",
            ..Chain::default()
        };
        chains.insert(found.name.clone(), found);
    }
    for rule in objects.iter().filter_map(|object| object.get("rule")) {
        let Some(chain) = chains.get_mut(&name(rule, "chain")) else { continue };
        let expressions = rule["expr"].as_array().map_or(&[][..], Vec::as_slice);
        chain.accepts |= expressions.iter().any(|expression| has_key(expression, &["accept", "jump", "goto", "vmap"]));
        chain.untracks |= expressions.iter().any(|expression| has_key(expression, &["notrack"]));
        // `DNAT` is the target of iptables-nft.
        chain.translates |= expressions
            .iter()
            .any(|expression| expression["xt"]["name"] == "DNAT" || has_key(expression, &["dnat", "redirect"]));
        chain.tracks |= expressions.iter().any(|expression| {
            // `xt`: a match of iptables-nft.
            let by_match =
                ["conntrack", "state", "connlimit", "connmark"].iter().any(|name| expression["xt"]["name"] == *name);
            by_match || has_key(expression, &["ct", "masquerade", "dnat", "snat", "redirect"])
        });
    }
    chains.into_values().collect()
}

fn has_key(value: &Value, keys: &[&str]) -> bool {
    match value {
        Value::Object(members) => {
            members.iter().any(|(name, member)| keys.contains(&name.as_str()) || has_key(member, keys))
        }
        Value::Array(members) => members.iter().any(|member| has_key(member, keys)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As nft 1.0.6 prints it.
    const RULESET: &str = r#"{"nftables": [{"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
        {"table": {"family": "ip", "name": "filter", "handle": 1}},
        {"chain": {"family": "ip", "table": "filter", "name": "input", "handle": 1, "type": "filter", "hook": "input", "prio": 0, "policy": "drop"}},
        {"chain": {"family": "ip", "table": "filter", "name": "raw", "handle": 2, "type": "filter", "hook": "prerouting", "prio": -300, "policy": "accept"}},
        {"chain": {"family": "ip", "table": "filter", "name": "own", "handle": 3}},
        {"chain": {"family": "ip", "table": "filter", "name": "out", "handle": 4, "type": "nat", "hook": "postrouting", "prio": 100, "policy": "accept"}},
        {"rule": {"family": "ip", "table": "filter", "chain": "input", "handle": 5, "expr": [{"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established", "related"]}}, {"accept": null}]}},
        {"rule": {"family": "ip", "table": "filter", "chain": "raw", "handle": 6, "expr": [{"notrack": null}]}},
        {"rule": {"family": "ip", "table": "filter", "chain": "out", "handle": 8,
            "expr": [{"xt": {"type": "target", "name": "DNAT"}}]}},
        {"rule": {"family": "ip", "table": "filter", "chain": "own", "handle": 7, "expr": [{"xt": {"type": "match", "name": "conntrack"}}, {"drop": null}]}}]}"#;

    #[test]
    fn netfilter_chains_are_described_by_their_rules() {
        let found = chains(&serde_json::from_str(RULESET).unwrap());
        let of = |name: &str| found.iter().find(|chain| chain.name == format!("ip filter {name}")).unwrap().clone();
        let chain = |name: &str, hook: &str| Chain {
            name: format!("ip filter {name}"),
            hook: hook.to_owned(),
            ..Chain::default()
        };
        assert_eq!(of("input"), Chain { drops: true, accepts: true, tracks: true, ..chain("input", "input") });
        assert_eq!(of("raw"), Chain { untracks: true, ..chain("raw", "prerouting") });
        assert_eq!(of("own"), Chain { tracks: true, ..chain("own", "") });
        assert_eq!(of("out"), Chain { tracks: true, translates: true, ..chain("out", "postrouting") });
        assert!(chains(&Value::Null).is_empty());
    }
}
