//! Axes of a figure.

use serde::Deserialize;

/// Swept parameter of the horizontal axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SweepAxis {
    /// Offered load as a part of what the cores can serve.
    Load,
    /// The bound on p99, in multiples of the short service time.
    Slo,
    Cores,
    /// One-way latency, in units of the short service time.
    Latency,
    /// Long service time over the short one (bimodal).
    LongFactor,
    /// JBSRQ's weight of lower-priority requests.
    Lambda,
    RequestsPerServer,
    /// Servers behind the load balancer.
    Servers,
    /// Connections open at the same time.
    Connections,
    /// Changes of the pool a minute.
    UpdatesPerMinute,
    /// Imbalance above which a server is taken out of the table, percent.
    ThresholdPct,
    TagBits,
    IndexBits,
    /// Replay speed or offered load of the trace, percent of its own.
    SpeedPct,
    /// Candidates that a rack sends for each bucket.
    RackCandidates,
    /// Time from reports to the table in force (ms).
    TableDelayMs,
    /// Time within the run: every run gives all points.
    Time,
}

/// Result of a run, as panels name it.
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
    /// The highest load whose p99 of short requests is within `slo`.
    PeakLoad,
    /// [`Metric::PeakLoad`] as requests in a short service time, of all cores together.
    PeakThroughput,
    /// Population variance of the servers' packets over their mean, 1 s windows, percent.
    ServerVariancePct,
    /// [`Metric::ServerVariancePct`] of the cores.
    CoreVariancePct,
    /// Packets that were not lost in full queues, percent.
    ServedPct,
    /// Connections that reached two servers, percent of all.
    BrokenPct,
    /// Most loaded server over the mean, averaged over time, minus one, percent.
    ImbalancePct,
    PoolServers,
    /// Connections that ended unbroken, in a second.
    CompletedPerSecond,
    /// CPU time of the load balancer per packet above an XDP program that does nothing, ns (live only).
    PacketNs,
    /// Responses to requests of the longest class that came in the measured time, percent of the requests due in it.
    LongAnsweredPct,
    /// Time of the cores that a batch service had, percent (live only).
    BatchPct,
}
