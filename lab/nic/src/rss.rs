//! RSS settings that the guest's NIC shows, and its actual behaviour, which is measured without coreward in the guest.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use coreward_model::FourTuple;
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey};

use crate::guest::{NicModel, QemuGuest};
use crate::guest_tap::{FLOWS_PER_IP_VERSION, GuestTap, measured_flows, outer_gue_flows};

/// Maximum time until a SYN appears in the guest's counters.
const SYN_ARRIVAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the RSS key and indirection table that the guest's ethtool shows. If the driver (igb) does not show the key,
/// returns the kernel's key. Fails when there is no table or it cannot be read.
pub fn read_rss(guest: &mut QemuGuest) -> Result<RssConfig> {
    let ethtool_output = guest.run_successfully("ethtool -x eth0")?;
    let key = match parse_rss_key(&ethtool_output)? {
        Some(key) => key,
        None => parse_kernel_rss_key(&guest.run_successfully("cat /proc/sys/net/core/netdev_rss_key")?)?,
    };
    Ok(RssConfig { key, indirection_table: parse_indirection_table(&ethtool_output)? })
}

/// Parses the indirection table in the output of `ethtool -x`, whose lines have the form `first entry: queue queue
/// ...`.
fn parse_indirection_table(text: &str) -> Result<IndirectionTable> {
    let mut queues = Vec::new();
    for line in text.lines() {
        let Some((first_entry, queues_text)) = line.split_once(':') else { continue };
        if first_entry.trim().parse() == Ok(queues.len()) {
            for queue in queues_text.split_whitespace() {
                queues.push(queue.parse().with_context(|| format!("queue {queue:?} in {line:?}"))?);
            }
        }
    }
    IndirectionTable::new(&queues).with_context(|| format!("`ethtool -x` shows no usable table: {text:?}"))
}

/// Parses the line after `RSS hash key:` in the output of `ethtool -x`. Returns `None` if the driver does not show its
/// key.
fn parse_rss_key(text: &str) -> Result<Option<RssKey>> {
    let key_line = text.lines().skip_while(|line| !line.starts_with("RSS hash key:")).nth(1).unwrap_or_default();
    if key_line.contains(':') { Ok(Some(key_line.trim().parse()?)) } else { Ok(None) }
}

/// Returns the first 40 bytes of the kernel's RSS key, which has 52 (Documentation/admin-guide/sysctl/net.rst,
/// netdev_rss_key).
fn parse_kernel_rss_key(text: &str) -> Result<RssKey> {
    let key: RssKey = text.trim().parse()?;
    Ok(RssKey::new(&key.key_bytes()[..40])?)
}

/// RSS settings that a NIC shows, and the measured behaviour of that NIC.
pub struct RssMeasurement {
    /// RSS key and indirection table that the NIC shows.
    pub shown_rss: RssConfig,
    /// Measured flows, each with the queue on which its SYN arrived.
    pub flow_queues: Vec<(FourTuple, u16)>,
}

impl RssMeasurement {
    /// Returns whether all flows arrived on the queues that the shown key and table predict.
    pub fn is_in_force(&self) -> bool {
        self.are_families_in_force() == [true, true]
    }

    /// Returns two values: whether all IPv4 flows arrived on the predicted queues, and whether all IPv6 flows did.
    pub fn are_families_in_force(&self) -> [bool; 2] {
        self.matched_flow_count_by_family().map(|matched_count| matched_count == FLOWS_PER_IP_VERSION)
    }

    /// Returns how many IPv4 and how many IPv6 flows arrived on the queue that the shown key and table predict.
    fn matched_flow_count_by_family(&self) -> [u16; 2] {
        let mut matched_flows = [0; 2];
        for (flow, _) in
            self.flow_queues.iter().filter(|(flow, queue)| predicted_queue(&self.shown_rss, flow) == *queue)
        {
            matched_flows[usize::from(flow.client().is_ipv6())] += 1;
        }
        matched_flows
    }
}

impl fmt::Display for RssMeasurement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [ipv4_matches, ipv6_matches] = self.matched_flow_count_by_family();
        write!(
            f,
            "on the predicted queue: {ipv4_matches} of {FLOWS_PER_IP_VERSION} IPv4 flows, {ipv6_matches} of \
             {FLOWS_PER_IP_VERSION} IPv6 flows"
        )?;
        let used_queues: BTreeSet<u16> = self.flow_queues.iter().map(|(_, queue)| *queue).collect();
        match Vec::from_iter(used_queues)[..] {
            [queue] => write!(f, "; all on queue {queue}"),
            _ => Ok(()),
        }
    }
}

pub fn predicted_queue(rss: &RssConfig, flow: &FourTuple) -> u16 {
    rss.indirection_table.queue_for_hash(rss.key.toeplitz_hash(&flow.bytes()))
}

/// Sends the SYN of each flow, and records the queue whose counter in the driver grows. Fails when a SYN does not
/// arrive, or changes more than one counter.
pub fn measure_flow_queues(guest: &mut QemuGuest, nic: NicModel, guest_tap: &GuestTap) -> Result<RssMeasurement> {
    measure_queues_of_flows(guest, nic, measured_flows(), |flow| guest_tap.send_syn(flow))
}

/// Measures like [`measure_flow_queues`], but with SYNs in GUE packets, as a load balancer forwards them.
pub fn measure_gue_flow_queues(guest: &mut QemuGuest, nic: NicModel, guest_tap: &GuestTap) -> Result<RssMeasurement> {
    measure_queues_of_flows(guest, nic, outer_gue_flows(), |outer_flow| guest_tap.send_gue_syn(outer_flow))
}

fn measure_queues_of_flows(
    guest: &mut QemuGuest,
    nic: NicModel,
    flows: impl Iterator<Item = FourTuple>,
    send_syn: impl Fn(&FourTuple) -> Result<()>,
) -> Result<RssMeasurement> {
    let shown_rss = read_rss(guest)?;
    let mut counters_before = read_queue_counters(guest, nic)?;
    let mut flow_queues = Vec::new();
    for flow in flows {
        send_syn(&flow)?;
        let (queue, counters_after) =
            wait_for_queue_with_packet(guest, nic, &counters_before).with_context(|| format!("the SYN of {flow:?}"))?;
        flow_queues.push((flow, queue));
        counters_before = counters_after;
    }
    Ok(RssMeasurement { shown_rss, flow_queues })
}

type CountersByQueue = BTreeMap<u16, u64>;

/// Waits until one queue's counter changes. Returns that queue, and the new counters.
fn wait_for_queue_with_packet(
    guest: &mut QemuGuest,
    nic: NicModel,
    counters_before: &CountersByQueue,
) -> Result<(u16, CountersByQueue)> {
    let deadline = Instant::now() + SYN_ARRIVAL_TIMEOUT;
    loop {
        let counters_after = read_queue_counters(guest, nic)?;
        let changed_queues: Vec<u16> = counters_after
            .keys()
            .filter(|queue| counters_before.get(queue) != counters_after.get(queue))
            .copied()
            .collect();
        match changed_queues[..] {
            [queue] => return Ok((queue, counters_after)),
            [] if Instant::now() < deadline => {}
            _ => bail!("moved the counters of queues {changed_queues:?}: expected one"),
        }
    }
}

/// Returns the value of a counter for each receive queue, which grows with every packet on that queue.
fn read_queue_counters(guest: &mut QemuGuest, nic: NicModel) -> Result<CountersByQueue> {
    let mut counters = CountersByQueue::new();
    for line in guest.run_successfully(nic.queue_counters_command())?.lines().filter(|line| !line.trim().is_empty()) {
        let mut line_numbers = line.split_whitespace().map(str::parse::<u64>);
        let queue = line_numbers.next().context("an empty line")?.with_context(|| format!("{line:?}"))?;
        let count = line_numbers.sum::<Result<u64, _>>().with_context(|| format!("{line:?}"))?;
        counters.insert(u16::try_from(queue)?, count);
    }
    ensure!(!counters.is_empty(), "`{}` shows no receive queues", nic.queue_counters_command());
    Ok(counters)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETHTOOL_OUTPUT: &str = "RX flow hash indirection table for eth0 with 4 RX ring(s):\n    0:      0     1\n\
                         \u{20}   2:      2     3\nRSS hash key:\n";

    #[test]
    fn measurement_reports_ipv4_and_ipv6_matches_separately() {
        let shown_rss = RssConfig {
            key: RssKey::microsoft_verification_key(),
            indirection_table: IndirectionTable::draw_balanced_entries(1, 128, 4).unwrap(),
        };
        let assign_queue =
            |flow: FourTuple| (flow, if flow.client().is_ipv6() { 4 } else { predicted_queue(&shown_rss, &flow) });
        let flow_queues = measured_flows().map(assign_queue).collect();
        let measurement = RssMeasurement { shown_rss, flow_queues };
        assert_eq!(measurement.are_families_in_force(), [true, false]);
        assert!(!measurement.is_in_force());
        assert_eq!(measurement.to_string(), "on the predicted queue: 64 of 64 IPv4 flows, 0 of 64 IPv6 flows");
        let single_queue_measurement =
            RssMeasurement { flow_queues: measured_flows().map(|flow| (flow, 4)).collect(), ..measurement };
        assert!(
            single_queue_measurement.to_string().ends_with("0 of 64 IPv4 flows, 0 of 64 IPv6 flows; all on queue 4"),
            "{single_queue_measurement}"
        );
    }

    #[test]
    fn rss_table_and_key_are_parsed_from_ethtool_output() {
        let key = (0..40).map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":");
        let full_output = format!("{ETHTOOL_OUTPUT}{key}\nRSS hash function:\n    toeplitz: on\n");
        assert_eq!(parse_indirection_table(&full_output).unwrap().queue_by_entry(), [0, 1, 2, 3]);
        assert_eq!(parse_rss_key(&full_output).unwrap().unwrap().key_bytes()[39], 39);
        assert_eq!(parse_rss_key(&format!("{ETHTOOL_OUTPUT}Operation not supported\n")).unwrap(), None);
        assert!(parse_indirection_table("no table").is_err());
        assert_eq!(parse_kernel_rss_key(&vec!["aa"; 52].join(":")).unwrap().key_bytes(), [0xaa; 40]);
    }
}
