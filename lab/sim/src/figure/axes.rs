//! Axes of a figure.

use serde::Deserialize;

/// Swept parameter of the horizontal axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SweepAxis {
    /// Offered load as a fraction of the cores' capacity.
    Load,
    /// Bound on p99, in multiples of the short service time.
    Slo,
    Cores,
    /// One-way latency, in units of the short service time.
    Latency,
    /// Ratio of the long service time to the short one (bimodal).
    LongFactor,
    /// JBSRQ's weight of lower-priority requests.
    Lambda,
    RequestsPerServer,
    /// Servers behind the load balancer.
    Servers,
    /// Number of simultaneously open connections.
    Connections,
    /// Changes of the pool per minute.
    UpdatesPerMinute,
    /// Imbalance above which a server is removed from the table (%).
    ThresholdPct,
    TagBits,
    IndexBits,
    /// Replay speed or offered load of the trace, in percent of the recorded one.
    SpeedPct,
    /// Largest number of candidates that a rack sends per bucket.
    RackCandidates,
    /// Time from the reports until their table is in force (ms).
    TableDelayMs,
    /// Time within the run; every run gives all points.
    Time,
}

/// Metric of a run, named by panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// 99th percentile of the latency of all requests, in short service times.
    P99,
    /// [`Metric::P99`] of the shortest class of requests.
    ShortP99,
    /// [`Metric::P99`] of the longest class.
    LongP99,
    /// Mean latency of all requests.
    Mean,
    /// Highest load at which the p99 of short requests is within `slo`.
    PeakLoad,
    /// [`Metric::PeakLoad`] as requests per short service time, of all cores together.
    PeakThroughput,
    /// Population variance of the servers' packets relative to their mean, in 1 s windows (%).
    ServerVariancePct,
    /// [`Metric::ServerVariancePct`] of the cores.
    CoreVariancePct,
    /// Share of packets that no full queue dropped (%).
    ServedPct,
    /// Share of connections whose packets reached two servers (%).
    BrokenPct,
    /// Load of the most loaded server relative to the mean, averaged over time, minus 1 (%).
    ImbalancePct,
    PoolServers,
    /// Connections per second that ended unbroken.
    CompletedPerSecond,
    /// CPU time of the load balancer per packet above an XDP program that does nothing (ns; live only).
    PacketNs,
    /// Responses to requests of the longest class within the measured time, relative to the requests due in it (%).
    LongAnsweredPct,
    /// Share of the cores' time that a batch service got (%; live only).
    BatchPct,
}
