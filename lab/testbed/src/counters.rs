//! Kernel counters of a network namespace, with the names that `nstat` prints.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, ensure};

use crate::namespace::NetworkNamespace;

/// Absolute values of the kernel's network counters. Their names are those of nstat (`TcpRetransSegs`,
/// `TcpExtPAWSEstab` ...).
pub type KernelNetworkCounters = BTreeMap<String, u64>;

/// Names of the kernel's counters for segments that it dropped because of their timestamps. They grow if coreward
/// writes wrong timestamps.
pub const TIMESTAMP_DROP_COUNTERS: [&str; 4] =
    ["TcpExtPAWSActive", PAWS_ESTABLISHED_DROP_COUNTER, "TcpExtPAWSTimewait", "TcpExtTSEcrRejected"];

/// Name of the counter of established connections' data segments that failed the PAWS check (RFC 7323). It includes
/// segments whose TSval is more than a tick older than that of a segment received before.
pub const PAWS_ESTABLISHED_DROP_COUNTER: &str = "TcpExtPAWSEstab";

/// Name of the counter of pure acknowledgements that arrived after a newer segment, because veth reorders packets under
/// load. Since 6.14, Linux counts them separately from other failures of the PAWS check (net/ipv4/tcp_input.c,
/// tcp_disordered_ack_check).
pub const PAWS_OLD_ACK_COUNTER: &str = "TcpExtPAWSOldAck";

/// Reads the network counters of a namespace. Fails when the namespace cannot be entered, or when the files in
/// /proc/net have another format.
pub fn read_kernel_counters(namespace: &NetworkNamespace) -> anyhow::Result<KernelNetworkCounters> {
    namespace.run_within(|| {
        let mut counters = KernelNetworkCounters::new();
        for file in ["snmp", "netstat"] {
            // Do not read /proc/net, because it belongs to the namespace of the process's first thread.
            let text = fs::read_to_string(format!("/proc/thread-self/net/{file}"))?;
            parse_counters(&text, &mut counters)?;
        }
        Ok(counters)
    })
}

/// Returns the sum of one counter over several namespaces. A counter that the kernel lacks counts as 0.
pub fn sum_counter_over_namespaces(namespace_counters: &[KernelNetworkCounters], name: &str) -> u64 {
    namespace_counters.iter().filter_map(|counters| counters.get(name)).sum()
}

/// Adds the kernel's counters in `text` to `counters`. In each pair of lines, the first has the names and the second
/// the values (`Tcp: Name Name ...`, `Tcp: 1 2 ...`).
fn parse_counters(text: &str, counters: &mut KernelNetworkCounters) -> anyhow::Result<()> {
    let lines: Vec<&str> = text.lines().collect();
    for line_pair in lines.chunks(2) {
        ensure!(line_pair.len() == 2, "a line of names without values: {line_pair:?}");
        let (prefix, names) = line_pair[0].split_once(": ").context("a line without a prefix")?;
        let (values_prefix, values) = line_pair[1].split_once(": ").context("a line without a prefix")?;
        ensure!(prefix == values_prefix, "values of {values_prefix} after names of {prefix}");
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            // Some values are signed (Tcp MaxConn is -1), but none of them is a counter.
            counters.insert(format!("{prefix}{name}"), value.parse().unwrap_or(0));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_names_are_paired_with_their_values() {
        let mut counters = KernelNetworkCounters::new();
        parse_counters("Tcp: MaxConn RetransSegs\nTcp: -1 7\nTcpExt: PAWSEstab\nTcpExt: 3\n", &mut counters).unwrap();
        assert_eq!(counters["TcpRetransSegs"], 7);
        assert_eq!(counters["TcpExtPAWSEstab"], 3);
        assert_eq!(counters["TcpMaxConn"], 0);
        assert!(parse_counters("Tcp: A\nUdp: 1\n", &mut counters).is_err());
        assert!(parse_counters("Tcp: A\n", &mut counters).is_err());
    }
}
