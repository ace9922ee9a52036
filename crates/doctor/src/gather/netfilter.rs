//! Facts about firewalls and connection tracking, from `nft --json list ruleset`. Only libnftables can decode the
//! kernel's rules.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::process::Command;

use coreward_model::tuple::TransportProtocol;
use serde_json::Value;

use crate::facts::NetfilterFacts;
use crate::nat_rules::{NatDestinationCondition, NatRule, NetfilterChain};

pub(super) fn gather_netfilter() -> NetfilterFacts {
    let legacy_tables_text = fs::read_to_string("/proc/thread-self/net/ip_tables_names").unwrap_or_default();
    NetfilterFacts { chains: read_ruleset(), legacy_tables: legacy_tables_text.lines().map(str::to_owned).collect() }
}

fn read_ruleset() -> Result<Vec<NetfilterChain>, String> {
    // A login shell's PATH may lack /usr/sbin.
    let nft_output = ["/usr/sbin/nft", "/sbin/nft", "nft"]
        .into_iter()
        .map(|nft| Command::new(nft).args(["--json", "list", "ruleset"]).output());
    let Some(output) = nft_output.flatten().next() else {
        return Err("nft is not installed (Debian package nftables)".to_owned());
    };
    if !output.status.success() {
        return Err(format!("nft: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let ruleset: Value = serde_json::from_slice(&output.stdout).map_err(|error| format!("nft --json: {error}"))?;
    Ok(parse_chains(&ruleset))
}

fn parse_chains(ruleset: &Value) -> Vec<NetfilterChain> {
    let ruleset_objects = ruleset["nftables"].as_array().map_or(&[][..], Vec::as_slice);
    let to_text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let format_qualified_name = |object: &Value, chain: &str| {
        format!("{} {} {}", to_text(&object["family"]), to_text(&object["table"]), to_text(&object[chain]))
    };
    let mut chains_by_name: BTreeMap<String, NetfilterChain> = BTreeMap::new();
    for chain in ruleset_objects.iter().filter_map(|object| object.get("chain")) {
        let new_chain = NetfilterChain {
            qualified_name: format_qualified_name(chain, "name"),
            hook_name: to_text(&chain["hook"]),
            drops_by_default: chain["policy"] == "drop",
            // Chains of type nat always track connections.
            tracks_connections: chain["type"] == "nat",
            ..NetfilterChain::default()
        };
        chains_by_name.insert(new_chain.qualified_name.clone(), new_chain);
    }
    for rule in ruleset_objects.iter().filter_map(|object| object.get("rule")) {
        let Some(chain) = chains_by_name.get_mut(&format_qualified_name(rule, "chain")) else { continue };
        let expressions = rule["expr"].as_array().map_or(&[][..], Vec::as_slice);
        chain.accepts_packets |=
            expressions.iter().any(|expression| contains_any_key(expression, &["accept", "jump", "goto", "vmap"]));
        chain.exempts_from_tracking |= expressions.iter().any(|expression| contains_any_key(expression, &["notrack"]));
        let qualified_table = format!("{} {}", to_text(&rule["family"]), to_text(&rule["table"]));
        let nat_rule = parse_nat_rule(expressions, &qualified_table);
        if nat_rule.changes_destination || !nat_rule.jump_targets.is_empty() {
            chain.rules.push(nat_rule);
        }
        chain.tracks_connections |= expressions.iter().any(|expression| {
            // iptables-nft translates its matches to `xt`.
            let is_iptables_compat_match =
                ["conntrack", "state", "connlimit", "connmark"].iter().any(|name| expression["xt"]["name"] == *name);
            is_iptables_compat_match || contains_any_key(expression, &["ct", "masquerade", "dnat", "snat", "redirect"])
        });
    }
    chains_by_name.into_values().collect()
}

/// Returns the jumps and conditions of a rule, and whether it changes destinations, from its nftables expressions in
/// JSON. `qualified_table` contains the address family and name of the rule's table.
fn parse_nat_rule(expressions: &[Value], qualified_table: &str) -> NatRule {
    let mut nat_rule = NatRule::default();
    for expression in expressions {
        // iptables-nft translates its targets to `xt`, too.
        let is_dnat_target = ["DNAT", "REDIRECT"].iter().any(|name| expression["xt"]["name"] == *name);
        nat_rule.changes_destination |= is_dnat_target || contains_any_key(expression, &["dnat", "redirect"]);
        add_jump_targets(expression, qualified_table, &mut nat_rule.jump_targets);
        add_match_conditions(&expression["match"], &mut nat_rule.conditions);
    }
    nat_rule
}

/// Adds the names of the chains to which an expression jumps, including those in a verdict map.
fn add_jump_targets(value: &Value, qualified_table: &str, jump_targets: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                match member["target"].as_str().filter(|_| matches!(name.as_str(), "jump" | "goto")) {
                    Some(target) => jump_targets.push(format!("{qualified_table} {target}")),
                    None => add_jump_targets(member, qualified_table, jump_targets),
                }
            }
        }
        Value::Array(members) => {
            members.iter().for_each(|member| add_jump_targets(member, qualified_table, jump_targets))
        }
        _ => {}
    }
}

/// Adds the conditions in a `match` expression. If the expression has an unknown form, adds none.
fn add_match_conditions(expression: &Value, conditions: &mut Vec<NatDestinationCondition>) {
    if expression["op"] != "==" {
        return;
    }
    let (left, right) = (&expression["left"], &expression["right"]);
    let matched_values = right["set"].as_array().map_or(std::slice::from_ref(right), Vec::as_slice);
    let (header, field) = (left["payload"]["protocol"].as_str(), left["payload"]["field"].as_str());
    match (header, field) {
        (Some("ip" | "ip6"), Some("daddr")) => {
            conditions.extend(
                matched_values
                    .iter()
                    .map(parse_address_range)
                    .collect::<Option<_>>()
                    .map(NatDestinationCondition::Address),
            );
        }
        (Some(header), Some("dport")) => {
            conditions.extend(
                matched_values.iter().map(parse_port_range).collect::<Option<_>>().map(NatDestinationCondition::Port),
            );
            conditions.extend(
                parse_protocol(&Value::from(header)).map(|protocol| NatDestinationCondition::Protocol(vec![protocol])),
            );
        }
        (Some("ip"), Some("protocol")) | (Some("ip6"), Some("nexthdr")) => {
            add_protocol_condition(matched_values, conditions)
        }
        _ if left["meta"]["key"] == "l4proto" => add_protocol_condition(matched_values, conditions),
        _ => {}
    }
}

/// Adds a condition on a packet's protocol. Omits protocols other than TCP and UDP, which no service can have.
fn add_protocol_condition(values: &[Value], conditions: &mut Vec<NatDestinationCondition>) {
    if values.iter().all(|value| value.is_string() || value.is_u64()) {
        conditions.push(NatDestinationCondition::Protocol(values.iter().filter_map(parse_protocol).collect()));
    }
}

fn parse_protocol(value: &Value) -> Option<TransportProtocol> {
    [TransportProtocol::Tcp, TransportProtocol::Udp].into_iter().find(|protocol| {
        value.as_str() == Some(protocol.name()) || value.as_u64() == Some(protocol.iana_number().into())
    })
}

fn parse_port_range(value: &Value) -> Option<RangeInclusive<u16>> {
    let to_port = |value: &Value| value.as_u64()?.try_into().ok();
    match value["range"].as_array().map(Vec::as_slice) {
        Some([first, last]) => Some(to_port(first)?..=to_port(last)?),
        _ => to_port(value).map(|port| port..=port),
    }
}

fn parse_address_range(value: &Value) -> Option<RangeInclusive<IpAddr>> {
    let to_address = |value: &Value| value.as_str()?.parse::<IpAddr>().ok();
    if let Some([first, last]) = value["range"].as_array().map(Vec::as_slice) {
        return Some(to_address(first)?..=to_address(last)?);
    }
    let prefix = &value["prefix"];
    if prefix.is_null() {
        return to_address(value).map(|address| address..=address);
    }
    let prefix_length = u32::try_from(prefix["len"].as_u64()?).ok()?;
    Some(match to_address(&prefix["addr"])? {
        IpAddr::V4(first) => {
            let host_bit_mask = u32::MAX.checked_shr(prefix_length).unwrap_or(0);
            first.into()..=Ipv4Addr::from_bits(first.to_bits() | host_bit_mask).into()
        }
        IpAddr::V6(first) => {
            let host_bits = u128::MAX.checked_shr(prefix_length).unwrap_or(0);
            first.into()..=Ipv6Addr::from_bits(first.to_bits() | host_bits).into()
        }
    })
}

fn contains_any_key(value: &Value, keys: &[&str]) -> bool {
    match value {
        Value::Object(members) => {
            members.iter().any(|(name, member)| keys.contains(&name.as_str()) || contains_any_key(member, keys))
        }
        Value::Array(members) => members.iter().any(|member| contains_any_key(member, keys)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ruleset in JSON, in the form that nft 1.0.6 prints.
    const NFTABLES_RULESET_JSON: &str = r#"{"nftables": [{"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
        {"table": {"family": "ip", "name": "filter", "handle": 1}},
        {"chain": {"family": "ip", "table": "filter", "name": "input", "handle": 1, "type": "filter",
            "hook": "input", "prio": 0, "policy": "drop"}},
        {"chain": {"family": "ip", "table": "filter", "name": "raw", "handle": 2, "type": "filter",
            "hook": "prerouting", "prio": -300, "policy": "accept"}},
        {"chain": {"family": "ip", "table": "filter", "name": "own", "handle": 3}},
        {"chain": {"family": "ip", "table": "filter", "name": "out", "handle": 4, "type": "nat",
            "hook": "postrouting", "prio": 100, "policy": "accept"}},
        {"rule": {"family": "ip", "table": "filter", "chain": "input", "handle": 5,
            "expr": [{"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established", "related"]}},
                {"accept": null}]}},
        {"rule": {"family": "ip", "table": "filter", "chain": "raw", "handle": 6, "expr": [{"notrack": null}]}},
        {"rule": {"family": "ip", "table": "filter", "chain": "out", "handle": 8,
            "expr": [{"xt": {"type": "target", "name": "DNAT"}}]}},
        {"rule": {"family": "ip", "table": "filter", "chain": "own", "handle": 7,
            "expr": [{"xt": {"type": "match", "name": "conntrack"}}, {"drop": null}]}}]}"#;

    #[test]
    fn parsed_chains_summarize_their_rules() {
        let parsed_chains = parse_chains(&serde_json::from_str(NFTABLES_RULESET_JSON).unwrap());
        let find_chain = |name: &str| {
            parsed_chains.iter().find(|chain| chain.qualified_name == format!("ip filter {name}")).unwrap().clone()
        };
        let new_chain = |name: &str, hook: &str| NetfilterChain {
            qualified_name: format!("ip filter {name}"),
            hook_name: hook.to_owned(),
            ..NetfilterChain::default()
        };
        assert_eq!(
            find_chain("input"),
            NetfilterChain {
                drops_by_default: true,
                accepts_packets: true,
                tracks_connections: true,
                ..new_chain("input", "input")
            }
        );
        assert_eq!(find_chain("raw"), NetfilterChain { exempts_from_tracking: true, ..new_chain("raw", "prerouting") });
        assert_eq!(find_chain("own"), NetfilterChain { tracks_connections: true, ..new_chain("own", "") });
        let translating_rule = NatRule { changes_destination: true, ..NatRule::default() };
        assert_eq!(
            find_chain("out"),
            NetfilterChain {
                tracks_connections: true,
                rules: vec![translating_rule],
                ..new_chain("out", "postrouting")
            }
        );
        assert!(parse_chains(&Value::Null).is_empty());
    }

    /// Checks rules of Docker 20.10 (iptables-nft), of Kubernetes, and written by hand, in the form that nft 1.0.6
    /// prints.
    #[test]
    fn parsed_rules_contain_the_conditions_of_their_expressions() {
        let parse_rule =
            |text: &str| parse_nat_rule(serde_json::from_str::<Value>(text).unwrap().as_array().unwrap(), "ip nat");
        let docker_rule = r#"[{"match": {"op": "!=", "left": {"meta": {"key": "iifname"}}, "right": "docker0"}},
            {"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": "tcp"}},
            {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 8080}},
            {"counter": {"packets": 0, "bytes": 0}}, {"xt": {"type": "target", "name": "DNAT"}}]"#;
        let new_tcp_condition = || NatDestinationCondition::Protocol(vec![TransportProtocol::Tcp]);
        let conditions =
            vec![new_tcp_condition(), NatDestinationCondition::Port(vec![8080..=8080]), new_tcp_condition()];
        assert_eq!(parse_rule(docker_rule), NatRule { conditions, changes_destination: true, jump_targets: vec![] });
        let prefix_rule = r#"[{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}},
            "right": {"prefix": {"addr": "10.96.0.0", "len": 12}}}}, {"jump": {"target": "KUBE-SERVICES"}}]"#;
        let address_range = "10.96.0.0".parse().unwrap()..="10.111.255.255".parse().unwrap();
        let conditions = vec![NatDestinationCondition::Address(vec![address_range])];
        let jump_targets = vec!["ip nat KUBE-SERVICES".to_owned()];
        assert_eq!(parse_rule(prefix_rule), NatRule { conditions, changes_destination: false, jump_targets });
        let set_rule = r#"[{"match": {"op": "==", "left": {"payload": {"protocol": "th", "field": "dport"}},
            "right": {"set": [80, {"range": [8000, 8010]}]}}}, {"redirect": {"port": 3128}}]"#;
        assert_eq!(parse_rule(set_rule).conditions, [NatDestinationCondition::Port(vec![80..=80, 8000..=8010])]);
        // Named sets are not resolved, so the rule may match any packet.
        let named_set_rule = r#"[{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}},
            "right": "@vips"}}, {"dnat": {"addr": "10.0.0.1"}}]"#;
        assert_eq!(parse_rule(named_set_rule), NatRule { changes_destination: true, ..NatRule::default() });
    }
}
