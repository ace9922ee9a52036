//! Kinds of faults.

use std::fmt;
use std::ops::Range;

use crate::fleet::agent_name;

/// Kind of fault, by its name in `--faults`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum FaultKind {
    /// Kill a daemon (SIGKILL) and start it again
    Kill,
    /// Stop a daemon for a while (SIGSTOP, SIGCONT)
    Stop,
    /// End a daemon (SIGTERM) and start another process, every second time from `--upgrade-binary`
    Upgrade,
    /// Drop packets from one machine to another, in one or both directions
    Partition,
    /// Take the link of a machine down
    Link,
    /// Fill the disk of the controller's store (one controller only)
    Disk,
    /// Kill or stop an etcd member, every second time the leader (several controllers only)
    Etcd,
    /// Set the wall clock of a daemon to a wrong time, and back
    Clock,
    /// Replace a server's agent by an impostor with false reports, and flood the controller with connections
    ByzantineAgent,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: [Self; 9] = [
        Self::Kill,
        Self::Stop,
        Self::Upgrade,
        Self::Partition,
        Self::Link,
        Self::Disk,
        Self::Etcd,
        Self::Clock,
        Self::ByzantineAgent,
    ];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Upgrade => "upgrade",
            Self::Partition => "partition",
            Self::Link => "link",
            Self::Disk => "disk",
            Self::Etcd => "etcd",
            Self::Clock => "clock",
            Self::ByzantineAgent => "byzantine-agent",
        }
    }
}

/// Fault and its target. Daemons have the names of [`crate::fleet`], machines those of their switch ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A daemon's process is killed.
    Kill(String),
    /// A daemon's process is stopped.
    Stop(String),
    /// A daemon is upgraded.
    Upgrade(String),
    /// Packets between two machines are dropped.
    Partition {
        from: String,
        /// Destination of the dropped packets.
        to: String,
        /// Whether packets in the other direction are dropped too.
        is_bidirectional: bool,
    },
    /// A machine's link is down.
    Link(String),
    /// The disk of the controller's store is full.
    Disk {
        /// Whether every write fails; otherwise writes that need no space succeed.
        fails_every_write: bool,
    },
    /// A member of etcd fails.
    Etcd {
        /// Whether the leading member fails.
        is_leader: bool,
        /// Otherwise the number of the failing member, counted from 1.
        member_number: u16,
        /// Whether the member is stopped; otherwise it is killed.
        is_stopped: bool,
    },
    /// A daemon's clock is wrong.
    Clock {
        daemon: String,
        /// Offset of the clock (s).
        offset_s: i64,
    },
    /// A server's agent sends false reports.
    ByzantineAgent(u16),
}

/// Duration of a fault without effect on clients (ms).
const LOSSLESS_DURATION_MS: Range<u32> = 300..6_000;
/// Duration of a fault that loses clients' packets (ms): TCP must retransmit them before the client's timeout of 30 s.
const LOSS_DURATION_MS: Range<u32> = 200..2_500;

impl Fault {
    pub fn kind(&self) -> FaultKind {
        match self {
            Self::Kill(_) => FaultKind::Kill,
            Self::Stop(_) => FaultKind::Stop,
            Self::Upgrade(_) => FaultKind::Upgrade,
            Self::Partition { .. } => FaultKind::Partition,
            Self::Link(_) => FaultKind::Link,
            Self::Disk { .. } => FaultKind::Disk,
            Self::Etcd { .. } => FaultKind::Etcd,
            Self::Clock { .. } => FaultKind::Clock,
            Self::ByzantineAgent(_) => FaultKind::ByzantineAgent,
        }
    }

    /// Returns the range of the fault's duration (ms).
    pub fn duration_range_ms(&self) -> Range<u32> {
        match self {
            Self::Upgrade(_) => 0..1,
            Self::Partition { from, to, .. } if is_control_port(from) || is_control_port(to) => LOSSLESS_DURATION_MS,
            Self::Link(port) if is_control_port(port) => LOSSLESS_DURATION_MS,
            Self::Partition { .. } | Self::Link(_) => LOSS_DURATION_MS,
            _ => LOSSLESS_DURATION_MS,
        }
    }

    /// Returns whether the faults affect the same daemon, or both the network, so that their effects would be
    /// indistinguishable. Clock faults never overlap.
    pub fn overlaps(&self, other: &Self) -> bool {
        let networks = |fault: &Self| matches!(fault, Self::Partition { .. } | Self::Link(_));
        if networks(self) || networks(other) {
            return networks(self) && networks(other);
        }
        match (self, other) {
            (Self::Disk { .. }, Self::Disk { .. }) | (Self::Etcd { .. }, Self::Etcd { .. }) => true,
            (Self::Clock { daemon, .. }, Self::Clock { daemon: other, .. }) => daemon == other,
            _ => self.affected_daemon().is_some_and(|process| other.affected_daemon() == Some(process)),
        }
    }

    /// Returns the daemon whose process is affected.
    fn affected_daemon(&self) -> Option<String> {
        match self {
            Self::Kill(daemon) | Self::Stop(daemon) | Self::Upgrade(daemon) => Some(daemon.clone()),
            Self::ByzantineAgent(server) => Some(agent_name(*server)),
            Self::Partition { .. } | Self::Link(_) | Self::Disk { .. } | Self::Etcd { .. } | Self::Clock { .. } => None,
        }
    }
}

/// Returns whether the port is a controller's or a rack's, which get no client packets.
fn is_control_port(port: &str) -> bool {
    port == "controller" || port.starts_with("rack")
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill(daemon) => write!(f, "SIGKILL of {daemon}"),
            Self::Stop(daemon) => write!(f, "SIGSTOP of {daemon}"),
            Self::Upgrade(daemon) => write!(f, "upgrade of {daemon}"),
            Self::Partition { from, to, is_bidirectional: true } => write!(f, "partition between {from} and {to}"),
            Self::Partition { from, to, is_bidirectional: false } => write!(f, "what {from} sends to {to} is lost"),
            Self::Link(port) => write!(f, "link of {port} down"),
            Self::Disk { fails_every_write: true } => write!(f, "every write of the controller fails: no room"),
            Self::Disk { fails_every_write: false } => write!(f, "disk of the store full"),
            Self::Etcd { is_leader, member_number, is_stopped } => {
                let signal = if *is_stopped { "SIGSTOP" } else { "SIGKILL" };
                if *is_leader {
                    write!(f, "{signal} of etcd's leader")
                } else {
                    write!(f, "{signal} of etcd{member_number}")
                }
            }
            Self::Clock { daemon, offset_s } => write!(f, "clock of {daemon} jumps by {offset_s} s"),
            Self::ByzantineAgent(server) => write!(f, "an impostor reports for s{server}"),
        }
    }
}
