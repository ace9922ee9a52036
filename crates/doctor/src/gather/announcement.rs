//! Routing daemon and rules for announced VIPs.

use std::fs;
use std::process::Command;

use crate::facts::Announcement;

/// Process names of routing daemons that learn routes from the kernel.
const ROUTING_DAEMONS: [&str; 2] = ["bird", "zebra"];

pub fn gather(table: u32) -> Announcement {
    Announcement { table, rules: read_ip_rules(table), daemon: routing_daemon() }
}

fn read_ip_rules(table: u32) -> Result<Vec<String>, String> {
    let output = Command::new("ip").args(["-4", "rule", "show", "table", &table.to_string()]).output();
    let output = output.map_err(|error| format!("ip cannot be run ({error}): expected iproute2"))?;
    if !output.status.success() {
        return Err(format!("ip rule: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect())
}

fn routing_daemon() -> Option<String> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut names = processes.filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok());
    names.find_map(|name| ROUTING_DAEMONS.contains(&name.trim()).then(|| name.trim().to_owned()))
}
