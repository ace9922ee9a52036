//! RSS settings that the guest shows, and the behaviour of its NIC, measured without coreward in the guest.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use coreward_model::FourTuple;
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey};

use crate::guest::{Guest, Nic};
use crate::wire::{FLOWS_PER_FAMILY, GuestLink, flows, gue_flows};

/// Maximum time until a SYN appears in the guest's counters.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the RSS key and table that the guest's ethtool shows. Some drivers (igb) do not show their key, which is
/// that of the kernel. Fails without a table, or when it cannot be read.
pub fn read_rss(guest: &mut Guest) -> Result<RssConfig> {
    let text = guest.run("ethtool -x eth0")?;
    let key = match parse_key(&text)? {
        Some(key) => key,
        None => kernel_key(&guest.run("cat /proc/sys/net/core/netdev_rss_key")?)?,
    };
    Ok(RssConfig { key, indirection_table: parse_table(&text)? })
}

/// Parses the indirection table in the output of `ethtool -x`: lines of the form `first entry: queue queue ...`.
fn parse_table(text: &str) -> Result<IndirectionTable> {
    let mut queues = Vec::new();
    for line in text.lines() {
        let Some((entry, rest)) = line.split_once(':') else { continue };
        if entry.trim().parse() == Ok(queues.len()) {
            for queue in rest.split_whitespace() {
                queues.push(queue.parse().with_context(|| format!("queue {queue:?} in {line:?}"))?);
            }
        }
    }
    IndirectionTable::new(&queues).with_context(|| format!("`ethtool -x` shows no usable table: {text:?}"))
}

/// Parses the line after `RSS hash key:` in the output of `ethtool -x`; `None` if the driver does not show its key.
fn parse_key(text: &str) -> Result<Option<RssKey>> {
    let line = text.lines().skip_while(|line| !line.starts_with("RSS hash key:")).nth(1).unwrap_or_default();
    if line.contains(':') { Ok(Some(line.trim().parse()?)) } else { Ok(None) }
}

/// Returns the first 40 of 52 bytes of the kernel's RSS key (Documentation/admin-guide/sysctl/net.rst, netdev_rss_key).
fn kernel_key(text: &str) -> Result<RssKey> {
    let key: RssKey = text.trim().parse()?;
    Ok(RssKey::new(&key.bytes()[..40])?)
}

/// RSS settings that a NIC shows, and the measured behaviour of that NIC.
pub struct Measurement {
    /// RSS key and indirection table that the NIC shows.
    pub shown_rss: RssConfig,
    /// Measured flows, each with the queue that received its SYN.
    pub flow_queues: Vec<(FourTuple, u16)>,
}

impl Measurement {
    /// Returns whether all flows arrived on the queues that the shown key and table predict.
    pub fn is_in_force(&self) -> bool {
        self.is_in_force_by_family() == [true, true]
    }

    /// Returns whether all IPv4 flows, and whether all IPv6 flows, arrived on the predicted queues.
    pub fn is_in_force_by_family(&self) -> [bool; 2] {
        self.matched_by_family().map(|matched| matched == FLOWS_PER_FAMILY)
    }

    /// Returns how many IPv4 and how many IPv6 flows arrived on the queue that the shown key and table predict.
    fn matched_by_family(&self) -> [u16; 2] {
        let mut matched = [0; 2];
        for (flow, _) in
            self.flow_queues.iter().filter(|(flow, queue)| predicted_queue(&self.shown_rss, flow) == *queue)
        {
            matched[usize::from(flow.client().is_ipv6())] += 1;
        }
        matched
    }
}

impl fmt::Display for Measurement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [ipv4, ipv6] = self.matched_by_family();
        write!(
            f,
            "on the predicted queue: {ipv4} of {FLOWS_PER_FAMILY} IPv4 flows, {ipv6} of {FLOWS_PER_FAMILY} IPv6 flows"
        )?;
        let queues: BTreeSet<u16> = self.flow_queues.iter().map(|(_, queue)| *queue).collect();
        match Vec::from_iter(queues)[..] {
            [queue] => write!(f, "; all on queue {queue}"),
            _ => Ok(()),
        }
    }
}

/// Returns the receive queue that the RSS settings predict for a flow.
pub fn predicted_queue(rss: &RssConfig, flow: &FourTuple) -> u16 {
    rss.indirection_table.queue(rss.key.toeplitz(&flow.bytes()))
}

/// Sends the SYN of each flow, and records the queue whose counter in the driver grows. Fails when a SYN does not
/// arrive, or changes more than one counter.
pub fn measure(guest: &mut Guest, nic: Nic, wire: &GuestLink) -> Result<Measurement> {
    measure_flows(guest, nic, flows(), |flow| wire.send_syn(flow))
}

/// As [`measure`], with SYNs in the outer headers of a load balancer that forwards by GUE.
pub fn measure_gue(guest: &mut Guest, nic: Nic, wire: &GuestLink) -> Result<Measurement> {
    measure_flows(guest, nic, gue_flows(), |outer| wire.send_gue_syn(outer))
}

fn measure_flows(
    guest: &mut Guest,
    nic: Nic,
    flows: impl Iterator<Item = FourTuple>,
    send: impl Fn(&FourTuple) -> Result<()>,
) -> Result<Measurement> {
    let shown_rss = read_rss(guest)?;
    let mut before = counters(guest, nic)?;
    let mut flow_queues = Vec::new();
    for flow in flows {
        send(&flow)?;
        let (queue, after) = wait_for_arrival(guest, nic, &before).with_context(|| format!("the SYN of {flow:?}"))?;
        flow_queues.push((flow, queue));
        before = after;
    }
    Ok(Measurement { shown_rss, flow_queues })
}

type QueueCounters = BTreeMap<u16, u64>;

/// Waits until the counter of one queue changes. Returns that queue, and the new counters.
fn wait_for_arrival(guest: &mut Guest, nic: Nic, before: &QueueCounters) -> Result<(u16, QueueCounters)> {
    let end = Instant::now() + ARRIVAL_TIMEOUT;
    loop {
        let after = counters(guest, nic)?;
        let moved: Vec<u16> = after.keys().filter(|queue| before.get(queue) != after.get(queue)).copied().collect();
        match moved[..] {
            [queue] => return Ok((queue, after)),
            [] if Instant::now() < end => {}
            _ => bail!("moved the counters of queues {moved:?}: expected one"),
        }
    }
}

/// Returns a counter of each receive queue, which grows with every packet on that queue.
fn counters(guest: &mut Guest, nic: Nic) -> Result<QueueCounters> {
    let mut counters = QueueCounters::new();
    for line in guest.run(nic.counters_command())?.lines().filter(|line| !line.trim().is_empty()) {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        let queue = numbers.next().context("an empty line")?.with_context(|| format!("{line:?}"))?;
        let count = numbers.sum::<Result<u64, _>>().with_context(|| format!("{line:?}"))?;
        counters.insert(u16::try_from(queue)?, count);
    }
    ensure!(!counters.is_empty(), "`{}` shows no receive queues", nic.counters_command());
    Ok(counters)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETHTOOL_OUTPUT: &str = "RX flow hash indirection table for eth0 with 4 RX ring(s):\n    0:      0     1\n\
                         \u{20}   2:      2     3\nRSS hash key:\n";

    #[test]
    fn measurement_counts_each_family() {
        let shown_rss =
            RssConfig { key: RssKey::microsoft(), indirection_table: IndirectionTable::balanced(1, 128, 4).unwrap() };
        let deliver =
            |flow: FourTuple| (flow, if flow.client().is_ipv6() { 4 } else { predicted_queue(&shown_rss, &flow) });
        let flow_queues = flows().map(deliver).collect();
        let measured = Measurement { shown_rss, flow_queues };
        assert_eq!(measured.is_in_force_by_family(), [true, false]);
        assert!(!measured.is_in_force());
        assert_eq!(measured.to_string(), "on the predicted queue: 64 of 64 IPv4 flows, 0 of 64 IPv6 flows");
        let on_one = Measurement { flow_queues: flows().map(|flow| (flow, 4)).collect(), ..measured };
        assert!(on_one.to_string().ends_with("0 of 64 IPv4 flows, 0 of 64 IPv6 flows; all on queue 4"), "{on_one}");
    }

    #[test]
    fn ethtool_output_is_parsed() {
        let key = (0..40).map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":");
        let text = format!("{ETHTOOL_OUTPUT}{key}\nRSS hash function:\n    toeplitz: on\n");
        assert_eq!(parse_table(&text).unwrap().queues(), [0, 1, 2, 3]);
        assert_eq!(parse_key(&text).unwrap().unwrap().bytes()[39], 39);
        assert_eq!(parse_key(&format!("{ETHTOOL_OUTPUT}Operation not supported\n")).unwrap(), None);
        assert!(parse_table("no table").is_err());
        assert_eq!(kernel_key(&vec!["aa"; 52].join(":")).unwrap().bytes(), [0xaa; 40]);
    }
}
