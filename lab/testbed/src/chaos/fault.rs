//! Faults that the chaos test injects.

use std::fmt;
use std::ops::Range;

use crate::fleet::agent_name;

/// Kind of fault. Its name is a value of the option `--faults`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum ChaosFaultKind {
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

impl ChaosFaultKind {
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

    /// Returns the name of the kind, as the option `--faults` expects it.
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

/// Fault and its target. Daemons have the names that [`crate::fleet`] gives them. A machine has the name of its switch
/// port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChaosFault {
    /// The daemon with this name is killed (SIGKILL) and restarted.
    KillDaemon(String),
    /// The daemon with this name is stopped (SIGSTOP) and resumed.
    StopDaemon(String),
    /// The daemon with this name is terminated and replaced by a new process.
    UpgradeDaemon(String),
    /// The switch drops the packets from one machine to a different one.
    Partition {
        sender_port: String,
        /// Switch port of the machine that no longer receives the packets.
        receiver_port: String,
        /// Whether packets in the other direction are dropped as well.
        is_bidirectional: bool,
    },
    /// The link of the machine at the switch port with this name is down.
    LinkDown(String),
    /// The disk that contains the controller's store is full.
    DiskFull {
        /// Whether every write fails. If false, writes that need no additional disk space still succeed.
        fails_every_write: bool,
    },
    /// A member of the etcd cluster fails.
    EtcdFailure {
        /// Whether the member that leads the cluster fails. `member_number` is then ignored.
        hits_leader: bool,
        /// Number of the failing member, counted from 1, if `hits_leader` is false.
        member_number: u16,
        /// Whether the fault stops the member (SIGSTOP) instead of killing it (SIGKILL).
        is_stopped: bool,
    },
    /// The wall clock of one daemon is wrong.
    ClockOffset {
        daemon: String,
        /// Deviation of the daemon's clock from the correct time (s), positive if it is fast.
        offset_s: i64,
    },
    /// An impostor sends false reports in place of the agent of the server with this number.
    ByzantineAgent(u16),
}

/// Range of durations of faults that do not drop clients' packets (ms).
const LOSSLESS_FAULT_DURATION_MS: Range<u32> = 300..6_000;
/// Range of durations of faults that drop clients' packets (ms). TCP must retransmit the dropped packets before the
/// clients' timeout of 30 s.
const LOSSY_FAULT_DURATION_MS: Range<u32> = 200..2_500;

impl ChaosFault {
    pub fn kind(&self) -> ChaosFaultKind {
        match self {
            Self::KillDaemon(_) => ChaosFaultKind::Kill,
            Self::StopDaemon(_) => ChaosFaultKind::Stop,
            Self::UpgradeDaemon(_) => ChaosFaultKind::Upgrade,
            Self::Partition { .. } => ChaosFaultKind::Partition,
            Self::LinkDown(_) => ChaosFaultKind::Link,
            Self::DiskFull { .. } => ChaosFaultKind::Disk,
            Self::EtcdFailure { .. } => ChaosFaultKind::Etcd,
            Self::ClockOffset { .. } => ChaosFaultKind::Clock,
            Self::ByzantineAgent(_) => ChaosFaultKind::ByzantineAgent,
        }
    }

    /// Returns the range from which the fault's duration is drawn (ms).
    pub fn duration_range_ms(&self) -> Range<u32> {
        match self {
            Self::UpgradeDaemon(_) => 0..1,
            Self::Partition { sender_port, receiver_port, .. }
                if is_controller_port(sender_port) || is_controller_port(receiver_port) =>
            {
                LOSSLESS_FAULT_DURATION_MS
            }
            Self::LinkDown(port) if is_controller_port(port) => LOSSLESS_FAULT_DURATION_MS,
            Self::Partition { .. } | Self::LinkDown(_) => LOSSY_FAULT_DURATION_MS,
            _ => LOSSLESS_FAULT_DURATION_MS,
        }
    }

    /// Returns whether two faults must not be active at the same time. Faults conflict if they affect the same daemon
    /// or if both affect the network, because their effects could not be separated. A clock fault conflicts only with
    /// clock faults of the same daemon.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        let affects_network = |fault: &Self| matches!(fault, Self::Partition { .. } | Self::LinkDown(_));
        if affects_network(self) || affects_network(other) {
            return affects_network(self) && affects_network(other);
        }
        match (self, other) {
            (Self::DiskFull { .. }, Self::DiskFull { .. }) | (Self::EtcdFailure { .. }, Self::EtcdFailure { .. }) => {
                true
            }
            (Self::ClockOffset { daemon, .. }, Self::ClockOffset { daemon: other, .. }) => daemon == other,
            _ => self.affected_daemon().is_some_and(|process| other.affected_daemon() == Some(process)),
        }
    }

    /// Returns the name of the daemon whose process the fault kills, stops or replaces, or `None` if there is none.
    fn affected_daemon(&self) -> Option<String> {
        match self {
            Self::KillDaemon(daemon) | Self::StopDaemon(daemon) | Self::UpgradeDaemon(daemon) => Some(daemon.clone()),
            Self::ByzantineAgent(server) => Some(agent_name(*server)),
            Self::Partition { .. }
            | Self::LinkDown(_)
            | Self::DiskFull { .. }
            | Self::EtcdFailure { .. }
            | Self::ClockOffset { .. } => None,
        }
    }
}

/// Returns whether a switch port belongs to a controller or rack controller. These receive no packets from clients.
fn is_controller_port(port: &str) -> bool {
    port == "controller" || port.starts_with("rack")
}

impl fmt::Display for ChaosFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KillDaemon(daemon) => write!(f, "SIGKILL of {daemon}"),
            Self::StopDaemon(daemon) => write!(f, "SIGSTOP of {daemon}"),
            Self::UpgradeDaemon(daemon) => write!(f, "upgrade of {daemon}"),
            Self::Partition { sender_port, receiver_port, is_bidirectional: true } => {
                write!(f, "partition between {sender_port} and {receiver_port}")
            }
            Self::Partition { sender_port, receiver_port, is_bidirectional: false } => {
                write!(f, "what {sender_port} sends to {receiver_port} is lost")
            }
            Self::LinkDown(port) => write!(f, "link of {port} down"),
            Self::DiskFull { fails_every_write: true } => write!(f, "every write of the controller fails: no room"),
            Self::DiskFull { fails_every_write: false } => write!(f, "disk of the store full"),
            Self::EtcdFailure { hits_leader: is_leader, member_number, is_stopped } => {
                let signal_name = if *is_stopped { "SIGSTOP" } else { "SIGKILL" };
                if *is_leader {
                    write!(f, "{signal_name} of etcd's leader")
                } else {
                    write!(f, "{signal_name} of etcd{member_number}")
                }
            }
            Self::ClockOffset { daemon, offset_s } => write!(f, "clock of {daemon} jumps by {offset_s} s"),
            Self::ByzantineAgent(server) => write!(f, "an impostor reports for s{server}"),
        }
    }
}
