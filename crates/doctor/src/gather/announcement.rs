//! Facts about the announcement of VIPs, from the routing daemon and the routing rules.

use std::fs;
use std::process::Command;

use crate::facts::AnnouncementFacts;

/// Process names of routing daemons that can read routes from the kernel's routing tables.
const ROUTING_DAEMON_NAMES: [&str; 2] = ["bird", "zebra"];

pub fn gather_announcement(routing_table_number: u32) -> AnnouncementFacts {
    AnnouncementFacts {
        routing_table_number,
        ip_rules: read_ip_rules(routing_table_number),
        routing_daemon: find_running_routing_daemon(),
    }
}

fn read_ip_rules(routing_table_number: u32) -> Result<Vec<String>, String> {
    let command_output =
        Command::new("ip").args(["-4", "rule", "show", "table", &routing_table_number.to_string()]).output();
    let command_output = command_output.map_err(|error| format!("ip cannot be run ({error}): expected iproute2"))?;
    if !command_output.status.success() {
        return Err(format!("ip rule: {}", String::from_utf8_lossy(&command_output.stderr).trim()));
    }
    let text = String::from_utf8_lossy(&command_output.stdout);
    Ok(text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect())
}

fn find_running_routing_daemon() -> Option<String> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut process_names = processes.filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok());
    process_names.find_map(|name| ROUTING_DAEMON_NAMES.contains(&name.trim()).then(|| name.trim().to_owned()))
}
