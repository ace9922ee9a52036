//! Quantities on the horizontal and vertical axes of figures.

use serde::Deserialize;

/// Parameter whose values form the horizontal axis of a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SweepAxis {
    /// Offered load as a fraction of the cores' total capacity.
    Load,
    /// Latency objective (SLO), which bounds the p99 latency, in multiples of the short service time.
    Slo,
    Cores,
    /// One-way latency between NIC and cores, in multiples of the short service time.
    Latency,
    /// Ratio of the long to the short service time of a bimodal distribution.
    LongFactor,
    /// Weight lambda by which policy `jbsrq` counts queued requests of lower priority.
    Lambda,
    /// Time that a core needs to switch to another service under policy `jbsrq`.
    Switch,
    RequestsPerServer,
    /// Number of servers behind the load balancer.
    Servers,
    /// Number of simultaneously open connections.
    Connections,
    /// Number of servers that are added to or removed from the pool per minute.
    UpdatesPerMinute,
    /// Load above which method `beamer` sends no new connections to a server (% above the mean load).
    ThresholdPct,
    TagBits,
    IndexBits,
    /// Speed at which a trace is replayed, and thus its offered load, as a percentage of the recorded speed.
    SpeedPct,
    /// Maximum number of candidate cores that a rack controller reports for each bucket.
    RackCandidates,
    /// Delay from the servers' reports until the load balancer uses the table computed from them (ms).
    TableDelayMs,
    /// Time since the start of the run. A single run yields all points of this axis.
    Time,
}

/// Result of a run that a panel can show on its vertical axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FigureMetric {
    /// 99th percentile of the latency of all requests, in multiples of the short service time.
    P99,
    /// [`FigureMetric::P99`] of the shortest class of requests only.
    ShortP99,
    /// [`FigureMetric::P99`] of the longest class of requests only.
    LongP99,
    /// Mean latency of all requests, in multiples of the short service time.
    Mean,
    /// Highest load at which the p99 latency is within the SLO.
    PeakLoad,
    /// [`FigureMetric::PeakLoad`] as the number of requests that all cores together complete per short service time.
    PeakThroughput,
    /// Population variance of the servers' packet counts, each divided by their mean, in windows of 1 s (%).
    ServerVariancePct,
    /// [`FigureMetric::ServerVariancePct`], computed for cores instead of servers.
    CoreVariancePct,
    /// Percentage of packets that were not dropped at a full queue.
    ServedPct,
    /// Percentage of connections whose packets reached more than one server.
    BrokenPct,
    /// Amount by which the most loaded server exceeds the servers' mean load, averaged over time (%).
    ImbalancePct,
    PoolServers,
    /// Number of connections that ended per second without having been broken.
    CompletedPerSecond,
    /// CPU time that the load balancer spends per packet, less that of an empty XDP program (ns, only in live figures).
    PacketNs,
    /// Responses to the longest class of requests within the measured time, as a percentage of the requests due in it.
    LongAnsweredPct,
    /// Percentage of the cores' time that a batch service received. Only live figures measure it.
    BatchPct,
}
