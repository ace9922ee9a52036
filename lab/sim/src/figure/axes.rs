//! Axes of a figure.

use serde::Deserialize;

/// Parameter that is swept along the horizontal axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SweepAxis {
    /// Offered load as a fraction of the cores' capacity.
    Load,
    /// SLO: upper bound of the p99 latency, in multiples of the short service time.
    Slo,
    Cores,
    /// One-way network latency, in multiples of the short service time.
    Latency,
    /// Ratio of the long service time to the short one (bimodal).
    LongFactor,
    /// Weight lambda that JBSRQ gives to lower-priority requests.
    Lambda,
    /// Time in which a core switches to another service, of policy `jbsrq`.
    Switch,
    RequestsPerServer,
    /// Number of servers behind the load balancer.
    Servers,
    /// Number of simultaneously open connections.
    Connections,
    /// Number of changes of the server pool per minute.
    UpdatesPerMinute,
    /// Imbalance above which a server is removed from the table (%).
    ThresholdPct,
    TagBits,
    IndexBits,
    /// Replay speed or offered load of the trace, in percent of the recorded one.
    SpeedPct,
    /// Maximum number of candidates that a rack sends per bucket.
    RackCandidates,
    /// Time from the reports until the table computed from them is in force (ms).
    TableDelayMs,
    /// Time since the start of the run; every run gives all points of this axis.
    Time,
}

/// Result of a run that a panel can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// 99th percentile of the latency of all requests, in short service times.
    P99,
    /// [`Metric::P99`] of the shortest class of requests only.
    ShortP99,
    /// [`Metric::P99`] of the longest class of requests only.
    LongP99,
    /// Mean latency of all requests, in short service times.
    Mean,
    /// Highest load at which the p99 of short requests is within `slo`.
    PeakLoad,
    /// [`Metric::PeakLoad`] as the number of requests that all cores together complete per short service time.
    PeakThroughput,
    /// Population variance of the servers' packets relative to their mean, in 1 s windows (%).
    ServerVariancePct,
    /// [`Metric::ServerVariancePct`] for cores instead of servers.
    CoreVariancePct,
    /// Share of packets that were not dropped by a full queue (%).
    ServedPct,
    /// Share of connections whose packets reached two servers (%).
    BrokenPct,
    /// Load of the most loaded server relative to the mean, averaged over time, minus 1 (%).
    ImbalancePct,
    PoolServers,
    /// Number of connections per second that ended unbroken.
    CompletedPerSecond,
    /// CPU time that the load balancer needs per packet beyond that of an XDP program that does nothing (ns; live
    /// only).
    PacketNs,
    /// Responses to the longest class of requests within the measured time, relative to the requests due in it (%).
    LongAnsweredPct,
    /// Share of the cores' time that a batch service got (%; live only).
    BatchPct,
}
