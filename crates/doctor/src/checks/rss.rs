//! Checks of RSS, and of settings that override RSS.

use std::collections::BTreeSet;

use coreward_agent::rss::ethtool::RssFlowType;
use coreward_model::rss::RssInputTransform;

use crate::facts::{DeviceFacts, MachineFacts, RssProblem};
use crate::finding::{AutomaticFix, Finding};

const WRONG_CORE_CONSEQUENCE: &str =
    "cores other than the table's serve connections: core-aware policies select wrong cores";

const UNKNOWN_CORE_CONSEQUENCE: &str = "the core of a connection is unknown: core-aware policies select by server only";

pub fn check_rss(facts: &MachineFacts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    match &device.rss_entry_count_and_transform {
        Ok((_, RssInputTransform::None)) if may_driver_hide_transform(facts, device) => {
            let interface_name = facts.interface_name();
            let observation = format!(
                "{interface_name}: the driver mlx5_core hashes symmetrically by default, and reports it from Linux \
                 6.15 on only; the agent detects it by the queues of SYNs (`coreward status`: input_transform)"
            );
            vec![
                Finding::unknown(observation)
                    .with_remedy_step(format!("Linux 6.15 or newer; there: ethtool -X {interface_name} xfrm none")),
            ]
        }
        Ok((entries, input)) => {
            let symmetric_note = match input {
                RssInputTransform::None => String::new(),
                input => format!(" over a symmetric input ({}), which agent and load balancers follow", input.name()),
            };
            vec![Finding::ok(format!(
                "a key and a table of {entries} entries{symmetric_note}; `coreward agent rss --interface {}` shows if \
                 they are in force",
                facts.interface_name()
            ))]
        }
        Err(RssProblem::NoIndirectionTable(words)) => {
            vec![
                Finding::warning(words.clone(), UNKNOWN_CORE_CONSEQUENCE)
                    .with_remedy_step("a NIC (for a virtual machine: a device) with several queues and RSS"),
            ]
        }
        Err(RssProblem::UnsupportedHash(words)) => {
            let interface_name = facts.interface_name();
            let remedy = format!(
                "ethtool -X {interface_name} hfunc toeplitz; ethtool -N {interface_name} rx-flow-hash tcp4 sdfn"
            );
            vec![Finding::warning(words.clone(), UNKNOWN_CORE_CONSEQUENCE).with_remedy_step(remedy)]
        }
    }
}

/// Returns whether the driver may use an input transform of the RSS hash without reporting it. mlx5e_get_rxfh() reports
/// the transform since Linux 6.15.
fn may_driver_hide_transform(facts: &MachineFacts, device: &DeviceFacts) -> bool {
    device.driver == "mlx5_core" && super::machine::parse_kernel_version(&facts.kernel.release) < (6, 15)
}

pub fn check_flow_director(facts: &MachineFacts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let (driver, name) = (&device.driver, facts.interface_name());
    match device.moves_connections_between_queues {
        None => vec![Finding::ok("the driver has no flow director")],
        Some(false) => vec![Finding::ok(format!("{driver} moves no connections"))],
        Some(true) => {
            let remedy = match driver.as_str() {
                "i40e" => format!("ethtool --set-priv-flags {name} flow-director-atr off"),
                _ => format!("ethtool -K {name} ntuple on  # the link may go down for a moment"),
            };
            let observation = format!("{driver} moves open connections to the queue of the CPU that sent last (ATR)");
            vec![Finding::warning(observation, WRONG_CORE_CONSEQUENCE).with_remedy_step(remedy)]
        }
    }
}

/// Checks that the NIC includes the ports in its hash. TCP over IPv4 is covered by [`check_rss`].
pub fn check_port_hashing(facts: &MachineFacts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let flow_types = facts.services.iter().map(|service| RssFlowType::new(service.address.protocol, service.vip()));
    let flow_types: BTreeSet<RssFlowType> = flow_types.filter(|flow_type| *flow_type != RssFlowType::Tcp4).collect();
    flow_types.into_iter().map(|flow_type| check_flow_type_port_hashing(facts, device, flow_type)).collect()
}

fn check_flow_type_port_hashing(facts: &MachineFacts, device: &DeviceFacts, flow_type: RssFlowType) -> Finding {
    let (interface, name) = (facts.interface_name(), flow_type.ethtool_name());
    match device.port_hashing_by_flow_type.get(&flow_type) {
        None => Finding::unknown(format!("the driver does not report how it hashes {name}")),
        Some(true) => Finding::ok(format!("{name} is hashed by addresses and ports")),
        Some(false) => {
            let consequence = "all packets of a client arrive at one core, which is not the predicted one";
            let fragment_note =
                if flow_type == RssFlowType::Udp4 { "  # fragments then arrive on another queue" } else { "" };
            Finding::warning(format!("{interface} hashes {name} by addresses alone"), consequence)
                .with_remedy_step(format!("ethtool -N {interface} rx-flow-hash {name} sdfn{fragment_note}"))
        }
    }
}

pub fn check_irqbalance(facts: &MachineFacts) -> Vec<Finding> {
    if facts.device.as_ref().is_some_and(|device| device.rss_conflicts.is_irqbalance_running) {
        let consequence = "it moves receive queues between CPUs, away from pinned workers";
        return vec![
            Finding::warning("irqbalance is running", consequence)
                .with_remedy_step("systemctl disable --now irqbalance"),
        ];
    }
    vec![Finding::ok("does not run")]
}

/// Adds a fix that writes zero to a sysfs attribute of these queues. The fix lasts until the next boot.
fn add_zeroing_fix(facts: &MachineFacts, finding: Finding, queues: &[String], attribute: &str) -> Finding {
    let queues_directory = format!("/sys/class/net/{}/queues", facts.interface_name());
    queues.iter().fold(finding, |finding, queue| {
        finding.with_automatic_fix(AutomaticFix::WriteFile {
            path: format!("{queues_directory}/{queue}/{attribute}").into(),
            value: "0",
        })
    })
}

fn missing_sysfs_findings(device: &DeviceFacts) -> Option<Vec<Finding>> {
    (!device.is_sysfs_visible).then(|| vec![Finding::unknown("/sys shows another network namespace (or none)")])
}

pub fn check_rps(facts: &MachineFacts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let rps_queues = &device.rss_conflicts.rps_queues;
    if rps_queues.is_empty() {
        return missing_sysfs_findings(device).unwrap_or_else(|| vec![Finding::ok("off")]);
    }
    let observation = format!("RPS is on for {} ({})", facts.interface_name(), rps_queues.join(", "));
    vec![add_zeroing_fix(facts, Finding::warning(observation, WRONG_CORE_CONSEQUENCE), rps_queues, "rps_cpus")]
}

pub fn check_rfs(facts: &MachineFacts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let rss_conflicts = &device.rss_conflicts;
    if !rss_conflicts.is_rfs_active() {
        return missing_sysfs_findings(device).unwrap_or_else(|| vec![Finding::ok("off")]);
    }
    let observation = format!(
        "{} is on for {} (net.core.rps_sock_flow_entries {}, {})",
        rss_conflicts.rfs_kind_name(),
        facts.interface_name(),
        rss_conflicts.rps_sock_flow_entries,
        rss_conflicts.rfs_queues.join(", ")
    );
    vec![add_zeroing_fix(
        facts,
        Finding::warning(observation, WRONG_CORE_CONSEQUENCE),
        &rss_conflicts.rfs_queues,
        "rps_flow_cnt",
    )]
}

pub fn check_flow_rules(facts: &MachineFacts) -> Vec<Finding> {
    let Some(device) = &facts.device else { return vec![] };
    let (rules, name) = (device.rss_conflicts.flow_rule_count, facts.interface_name());
    if rules == 0 {
        return vec![Finding::ok("none")];
    }
    vec![
        Finding::warning(format!("{name} has {rules} flow rules"), WRONG_CORE_CONSEQUENCE)
            .with_remedy_step(format!("ethtool -n {name}  # lists them"))
            .with_remedy_step(format!("ethtool -N {name} delete NUMBER")),
    ]
}
