//! What on this host overrides RSS, so that a connection's packets are not worked on where Toeplitz and the table say.

use std::fs;
use std::path::Path;

use crate::rss::ethtool::flow_rules;
use crate::sysfs;

/// All that is found now, in words for `coreward status`. Looks through /proc: not more often than a few times a minute.
pub fn find(interface: &str) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(directory) = sysfs::device_directory(interface) {
        let queues = queues_with_packet_steering(&directory.join("queues"));
        if !queues.is_empty() {
            found.push(format!("RPS is on for {interface} ({}): expected rps_cpus 0", queues.join(", ")));
        }
    }
    let flows = fs::read_to_string("/proc/sys/net/core/rps_sock_flow_entries").unwrap_or_default();
    let flow_steering = !matches!(flows.trim(), "" | "0");
    let (ntuple, rules) = flow_rules(interface);
    if flow_steering {
        let kind = if ntuple { "accelerated RFS" } else { "RFS" };
        found.push(format!("{kind} is on (rps_sock_flow_entries {}): expected 0", flows.trim()));
    }
    if rules > 0 {
        found.push(format!(
            "{interface} has {rules} flow rules (`ethtool -n {interface}`), which override its RSS table"
        ));
    }
    if runs("irqbalance") {
        found.push("irqbalance is running: it moves receive queues from CPU to CPU".to_owned());
    }
    found
}

fn queues_with_packet_steering(queues: &Path) -> Vec<String> {
    let mut found: Vec<String> = fs::read_dir(queues)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|queue| {
            let mask = fs::read_to_string(queue.path().join("rps_cpus")).unwrap_or_default();
            mask.chars().any(|digit| digit.is_ascii_hexdigit() && digit != '0')
        })
        .filter_map(|queue| queue.file_name().into_string().ok())
        .collect();
    found.sort();
    found
}

fn runs(command: &str) -> bool {
    fs::read_dir("/proc").into_iter().flatten().flatten().any(|process| {
        process.file_name().as_encoded_bytes()[0].is_ascii_digit()
            && fs::read_to_string(process.path().join("comm")).is_ok_and(|name| name.trim_end() == command)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_whose_packets_go_elsewhere_are_named() {
        let queues = tempfile::tempdir().unwrap();
        for (queue, mask) in [("rx-0", "0000,00000000\n"), ("rx-1", "0000,0000000f\n"), ("rx-10", "1\n")] {
            fs::create_dir(queues.path().join(queue)).unwrap();
            fs::write(queues.path().join(queue).join("rps_cpus"), mask).unwrap();
        }
        fs::create_dir(queues.path().join("tx-0")).unwrap();
        assert_eq!(queues_with_packet_steering(queues.path()), ["rx-1", "rx-10"]);
    }

    #[test]
    fn running_commands_are_found() {
        let own = fs::read_to_string("/proc/self/comm").unwrap();
        assert!(runs(own.trim_end()));
        assert!(!runs("no-such-command"));
    }
}
