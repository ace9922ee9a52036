//! Checks of RSS, and of settings that override it.

use std::collections::BTreeSet;

use coreward_agent::rss::ethtool::FlowType;
use coreward_model::rss::InputTransform;

use crate::facts::{Device, Facts, RssProblem};
use crate::finding::{Finding, Fix};

const WRONG_CORE_CONSEQUENCE: &str =
    "cores other than the table's serve connections: core-aware policies select wrong cores";

const UNKNOWN_CORE_CONSEQUENCE: &str = "the core of a connection is unknown: core-aware policies select by server only";

pub fn rss(facts: &Facts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    match &device.rss {
        Ok((_, InputTransform::None)) if hides_input_transform(facts, device) => {
            let name = facts.interface();
            let found = format!(
                "{name}: the driver mlx5_core hashes symmetrically by default, and reports it from Linux 6.15 on only; \
                 the agent detects it by the queues of SYNs (`coreward status`: input_transform)"
            );
            vec![
                Finding::unknown(found)
                    .with_remediation(format!("Linux 6.15 or newer; there: ethtool -X {name} xfrm none")),
            ]
        }
        Ok((entries, input)) => {
            let symmetric = match input {
                InputTransform::None => String::new(),
                input => format!(" over a symmetric input ({}), which agent and load balancers follow", input.name()),
            };
            vec![Finding::ok(format!(
                "a key and a table of {entries} entries{symmetric}; `coreward agent rss --interface {}` shows if they \
                 are \
                 in force",
                facts.interface()
            ))]
        }
        Err(RssProblem::NoIndirectionTable(words)) => {
            vec![
                Finding::warning(words.clone(), UNKNOWN_CORE_CONSEQUENCE)
                    .with_remediation("a NIC (for a virtual machine: a device) with several queues and RSS"),
            ]
        }
        Err(RssProblem::UnsupportedHash(words)) => {
            let name = facts.interface();
            let remedy = format!("ethtool -X {name} hfunc toeplitz; ethtool -N {name} rx-flow-hash tcp4 sdfn");
            vec![Finding::warning(words.clone(), UNKNOWN_CORE_CONSEQUENCE).with_remediation(remedy)]
        }
    }
}

/// Returns whether the driver may hide the input transform: mlx5e_get_rxfh() reports it only since Linux 6.15.
fn hides_input_transform(facts: &Facts, device: &Device) -> bool {
    device.driver == "mlx5_core" && super::machine::parse_kernel_version(&facts.kernel.release) < (6, 15)
}

pub fn flow_director(facts: &Facts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let (driver, name) = (&device.driver, facts.interface());
    match device.moves_connections {
        None => vec![Finding::ok("the driver has no flow director")],
        Some(false) => vec![Finding::ok(format!("{driver} moves no connections"))],
        Some(true) => {
            let remedy = match driver.as_str() {
                "i40e" => format!("ethtool --set-priv-flags {name} flow-director-atr off"),
                _ => format!("ethtool -K {name} ntuple on  # the link may go down for a moment"),
            };
            let found = format!("{driver} moves open connections to the queue of the CPU that sent last (ATR)");
            vec![Finding::warning(found, WRONG_CORE_CONSEQUENCE).with_remediation(remedy)]
        }
    }
}

/// Checks that the NIC includes ports in its hash. TCP over IPv4 is covered by [`check_rss`].
pub fn ports(facts: &Facts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let types = facts.services.iter().map(|service| FlowType::new(service.address.protocol, service.vip()));
    let types: BTreeSet<FlowType> = types.filter(|flow_type| *flow_type != FlowType::Tcp4).collect();
    types.into_iter().map(|flow_type| ports_of(facts, device, flow_type)).collect()
}

fn ports_of(facts: &Facts, device: &Device, flow_type: FlowType) -> Finding {
    let (interface, name) = (facts.interface(), flow_type.name());
    match device.port_hashing.get(&flow_type) {
        None => Finding::unknown(format!("the driver does not report how it hashes {name}")),
        Some(true) => Finding::ok(format!("{name} is hashed by addresses and ports")),
        Some(false) => {
            let why = "all packets of a client arrive at one core, which is not the predicted one";
            let note = if flow_type == FlowType::Udp4 { "  # fragments then arrive on another queue" } else { "" };
            Finding::warning(format!("{interface} hashes {name} by addresses alone"), why)
                .with_remediation(format!("ethtool -N {interface} rx-flow-hash {name} sdfn{note}"))
        }
    }
}

pub fn irqbalance(facts: &Facts) -> Vec<Finding> {
    if facts.device.as_ref().is_some_and(|device| device.rss_conflicts.is_irqbalance_running) {
        let why = "it moves receive queues between CPUs, away from pinned workers";
        return vec![
            Finding::warning("irqbalance is running", why).with_remediation("systemctl disable --now irqbalance"),
        ];
    }
    vec![Finding::ok("does not run")]
}

/// Adds a fix that writes zero to a sysfs attribute of these queues, effective until the next boot.
fn with_zeroing_fix(facts: &Facts, finding: Finding, queues: &[String], attribute: &str) -> Finding {
    let of_device = format!("/sys/class/net/{}/queues", facts.interface());
    queues.iter().fold(finding, |finding, queue| {
        finding.with_fix(Fix::WriteFile { path: format!("{of_device}/{queue}/{attribute}").into(), value: "0" })
    })
}

fn unknown_without_sysfs(device: &Device) -> Option<Vec<Finding>> {
    (!device.is_sysfs_visible).then(|| vec![Finding::unknown("/sys shows another network namespace (or none)")])
}

pub fn rps(facts: &Facts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let queues = &device.rss_conflicts.rps_queues;
    if queues.is_empty() {
        return unknown_without_sysfs(device).unwrap_or_else(|| vec![Finding::ok("off")]);
    }
    let found = format!("RPS is on for {} ({})", facts.interface(), queues.join(", "));
    vec![with_zeroing_fix(facts, Finding::warning(found, WRONG_CORE_CONSEQUENCE), queues, "rps_cpus")]
}

pub fn rfs(facts: &Facts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let rss_conflicts = &device.rss_conflicts;
    if !rss_conflicts.has_rfs() {
        return unknown_without_sysfs(device).unwrap_or_else(|| vec![Finding::ok("off")]);
    }
    let found = format!(
        "{} is on for {} (net.core.rps_sock_flow_entries {}, {})",
        rss_conflicts.flow_steering_name(),
        facts.interface(),
        rss_conflicts.rps_sock_flow_entries,
        rss_conflicts.rfs_queues.join(", ")
    );
    vec![with_zeroing_fix(
        facts,
        Finding::warning(found, WRONG_CORE_CONSEQUENCE),
        &rss_conflicts.rfs_queues,
        "rps_flow_cnt",
    )]
}

pub fn flow_rules(facts: &Facts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let (rules, name) = (device.rss_conflicts.flow_rule_count, facts.interface());
    if rules == 0 {
        return vec![Finding::ok("none")];
    }
    vec![
        Finding::warning(format!("{name} has {rules} flow rules"), WRONG_CORE_CONSEQUENCE)
            .with_remediation(format!("ethtool -n {name}  # lists them"))
            .with_remediation(format!("ethtool -N {name} delete NUMBER")),
    ]
}
