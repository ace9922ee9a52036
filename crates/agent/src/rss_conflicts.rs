//! Finds settings of this host that override RSS, so that packets are processed on other CPUs than predicted.

use std::fs;
use std::path::Path;

use crate::rss::ethtool::flow_rule_support_and_count;
use crate::sysfs;

/// Settings of this host that send packets to other cores than those that RSS selects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RssConflicts {
    /// Names of the receive queues whose packets RPS (Receive Packet Steering) distributes to CPUs.
    pub rps_queues: Vec<String>,
    /// Names of the receive queues that have a flow table for RFS (Receive Flow Steering).
    pub rfs_queues: Vec<String>,
    /// Value of net.core.rps_sock_flow_entries. RFS also needs [`Self::rfs_queues`] (get_rps_cpu() in net/core/dev.c).
    pub rps_sock_flow_entries: u64,
    /// Whether the driver accepts rules for single flows. With RFS, such a driver creates the rules itself (accelerated
    /// RFS).
    pub accepts_flow_rules: bool,
    pub flow_rule_count: u64,
    pub is_irqbalance_running: bool,
}

impl RssConflicts {
    /// Reads the current settings. Reads all of /proc, so that it should be called at most a few times per minute.
    pub fn gather(interface: &str) -> Self {
        let queues_directory = sysfs::network_device_directory(interface).map(|directory| directory.join("queues"));
        let find_queues_with_attribute = |attribute| {
            queues_directory
                .as_deref()
                .map_or_else(Vec::new, |directory| queues_with_nonzero_attribute(directory, attribute))
        };
        let flow_entries_text = fs::read_to_string("/proc/sys/net/core/rps_sock_flow_entries").unwrap_or_default();
        let (accepts_flow_rules, flow_rule_count) = flow_rule_support_and_count(interface);
        Self {
            rps_queues: find_queues_with_attribute("rps_cpus"),
            rfs_queues: find_queues_with_attribute("rps_flow_cnt"),
            rps_sock_flow_entries: flow_entries_text.trim().parse().unwrap_or(0),
            accepts_flow_rules,
            flow_rule_count,
            is_irqbalance_running: is_process_running("irqbalance"),
        }
    }

    pub fn is_rfs_active(&self) -> bool {
        self.rps_sock_flow_entries > 0 && !self.rfs_queues.is_empty()
    }

    /// Returns the name of the device's kind of RFS for messages: "RFS" or "accelerated RFS".
    pub fn rfs_kind_name(&self) -> &'static str {
        if self.accepts_flow_rules { "accelerated RFS" } else { "RFS" }
    }

    pub fn describe_conflicts(&self, interface: &str) -> Vec<String> {
        let mut descriptions = Vec::new();
        if !self.rps_queues.is_empty() {
            descriptions
                .push(format!("RPS is on for {interface} ({}): expected rps_cpus 0", self.rps_queues.join(", ")));
        }
        if self.is_rfs_active() {
            let (kind, entries, queues) =
                (self.rfs_kind_name(), self.rps_sock_flow_entries, self.rfs_queues.join(", "));
            descriptions.push(format!(
                "{kind} is on for {interface} (rps_sock_flow_entries {entries}, {queues}): expected rps_flow_cnt 0"
            ));
        }
        if self.flow_rule_count > 0 {
            let rule_count = self.flow_rule_count;
            descriptions.push(format!(
                "{interface} has {rule_count} flow rules (`ethtool -n {interface}`), which override its RSS table"
            ));
        }
        if self.is_irqbalance_running {
            descriptions.push("irqbalance is running: it moves receive queues from CPU to CPU".to_owned());
        }
        descriptions
    }
}

fn queues_with_nonzero_attribute(queues_directory: &Path, attribute: &str) -> Vec<String> {
    let mut queue_names: Vec<String> = fs::read_dir(queues_directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|queue| {
            let attribute_value = fs::read_to_string(queue.path().join(attribute)).unwrap_or_default();
            attribute_value.chars().any(|digit| digit.is_ascii_hexdigit() && digit != '0')
        })
        .filter_map(|queue| queue.file_name().into_string().ok())
        .collect();
    queue_names.sort();
    queue_names
}

fn is_process_running(expected_command_name: &str) -> bool {
    fs::read_dir("/proc").into_iter().flatten().flatten().any(|proc_entry| {
        proc_entry.file_name().as_encoded_bytes()[0].is_ascii_digit()
            && fs::read_to_string(proc_entry.path().join("comm"))
                .is_ok_and(|command_name| command_name.trim_end() == expected_command_name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_with_nonzero_rps_mask_are_found() {
        let queues_directory = tempfile::tempdir().unwrap();
        for (queue, mask) in [("rx-0", "0000,00000000\n"), ("rx-1", "0000,0000000f\n"), ("rx-10", "1\n")] {
            fs::create_dir(queues_directory.path().join(queue)).unwrap();
            fs::write(queues_directory.path().join(queue).join("rps_cpus"), mask).unwrap();
        }
        fs::create_dir(queues_directory.path().join("tx-0")).unwrap();
        assert_eq!(queues_with_nonzero_attribute(queues_directory.path(), "rps_cpus"), ["rx-1", "rx-10"]);
        assert!(queues_with_nonzero_attribute(queues_directory.path(), "rps_flow_cnt").is_empty());
    }

    #[test]
    fn each_rss_conflict_is_described() {
        assert!(RssConflicts::default().describe_conflicts("eth7").is_empty());
        let rss_conflicts = RssConflicts {
            rps_queues: vec!["rx-0".to_owned()],
            rfs_queues: vec!["rx-1".to_owned(), "rx-2".to_owned()],
            rps_sock_flow_entries: 32_768,
            accepts_flow_rules: true,
            flow_rule_count: 3,
            is_irqbalance_running: true,
        };
        let descriptions = rss_conflicts.describe_conflicts("eth7").join("\n");
        for expected in [
            "RPS is on for eth7 (rx-0)",
            "accelerated RFS is on for eth7 (rps_sock_flow_entries 32768, rx-1, rx-2)",
            "eth7 has 3 flow rules",
            "irqbalance is running",
        ] {
            assert!(descriptions.contains(expected), "{descriptions}");
        }
        // RFS is configured on the host, but the kernel ignores it because this device's queues have no flow table.
        assert!(!RssConflicts { rfs_queues: vec![], ..rss_conflicts }.is_rfs_active());
    }

    #[test]
    fn running_processes_are_found_by_command_name() {
        let own_command_name = fs::read_to_string("/proc/self/comm").unwrap();
        assert!(is_process_running(own_command_name.trim_end()));
        assert!(!is_process_running("no-such-command"));
    }
}
