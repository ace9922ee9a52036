//! What there is to know of a machine. Plain data: tests make their own.

use coreward_model::rss::InputTransform;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use coreward_agent::config::Steer;
use coreward_agent::load::queues::Interrupt;
use coreward_agent::rss::ethtool::Channels;
use coreward_agent::rss_conflicts::RssConflicts;
use coreward_dataplane::device::Xdp;
use coreward_lb::config::XdpMode;
use coreward_model::ServiceAddress;

/// What the machine is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Role {
    /// `coreward lb`
    Lb,
    /// `coreward agent`
    Server,
    /// `coreward controller`
    Controller,
}

impl Role {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Role::Lb => "lb",
            Role::Server => "server",
            Role::Controller => "controller",
        }
    }
}

/// What the daemon's file says, or its defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The device of the services' packets; a controller has none.
    pub interface: Option<String>,
    /// Where the daemon pins.
    pub pin_directory: Option<PathBuf>,
    /// Where the controllers listen.
    pub controllers: Vec<SocketAddr>,
    /// An agent's: it sets net.ipv4.tcp_timestamps itself.
    pub manage_timestamps: bool,
    /// The load of cores is the busy time of CPUs.
    pub load_by_cpu_time: bool,
    /// An agent's: which worker takes the connections of a core.
    pub steer: Steer,
    /// A load balancer's.
    pub xdp_mode: XdpMode,
    /// A load balancer's: the routing table by which it announces VIPs.
    pub announce_table: Option<u32>,
}

/// Everything.
#[derive(Debug, Clone)]
pub struct Facts {
    /// What the machine is for.
    pub role: Role,
    /// What its daemon is told.
    pub settings: Settings,
    /// The kernel.
    pub kernel: Kernel,
    /// Names of the capabilities that this process lacks.
    pub missing_rights: Vec<&'static str>,
    /// RLIMIT_NOFILE, the hard limit: as far as a daemon can raise its own.
    pub open_files: u64,
    /// By path below /proc/sys; what is not there does not stand here.
    pub sysctls: BTreeMap<String, String>,
    /// Where pins are to be.
    pub bpf_file_system: BpfFileSystem,
    /// Why what is pinned cannot be taken over.
    pub pins_problem: Option<String>,
    /// The device; `None`: there is none of that name, or none was named.
    pub device: Option<Device>,
    /// IPv4 addresses of all devices.
    pub addresses: Vec<Address>,
    /// Devices of default routes.
    pub default_routes: BTreeSet<String>,
    /// CPUs that run.
    pub cpus: usize,
    /// The clocks.
    pub clock: Clock,
    /// Firewalls and connection tracking.
    pub netfilter: Netfilter,
    /// Which controller answered, or why none did; `None`: no address of one is known, or this is its machine.
    pub controller: Option<Result<SocketAddr, String>>,
    /// Services of this server, or of this load balancer.
    pub services: Vec<Service>,
    /// Servers of these services, with their addresses.
    pub servers: BTreeMap<String, Ipv4Addr>,
    /// Reports that the controller refused as being from the future.
    pub reports_from_the_future: u64,
    /// How VIPs are announced; `None`: not by coreward.
    pub announcement: Option<Announcement>,
    /// What a controller needs.
    pub controller_place: Option<ControllerPlace>,
    /// Threads that poll.
    pub polling: Vec<PollingThread>,
    /// Those of `[tls]`; empty: it has none.
    pub certificates: Vec<CertificateFacts>,
}

/// A thread that is pinned to one CPU and never waits: a server that polls, or one at full load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PollingThread {
    /// Its id.
    pub thread: u32,
    /// Its name.
    pub name: String,
    /// Its CPU.
    pub cpu: usize,
}

/// A certificate that the daemon has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// "own", or "ca": an authority's.
    pub which: &'static str,
    /// Whose it is.
    pub subject: String,
    /// Why it is no use to this daemon, though it is right: it is for somebody else.
    pub wrong_owner: Option<String>,
    /// How long it is good yet; zero: it has ended.
    pub remains: Duration,
    /// Less than a third of its life is left.
    pub is_old: bool,
}

/// What VIPs need to be announced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// The routing table.
    pub table: u32,
    /// Rules of the kernel that look at it, as `ip rule` shows them, or why they cannot be seen.
    pub rules: Result<Vec<String>, String>,
    /// A routing daemon runs: its name.
    pub daemon: Option<String>,
}

/// The kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// As `uname -r` has it.
    pub release: String,
    /// /sys/kernel/btf/vmlinux is there.
    pub type_information: bool,
    /// What the kernel said to each program of the role; empty: it was not asked, for want of rights.
    pub programs: BTreeMap<&'static str, Result<(), String>>,
}

/// Where pins are to be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BpfFileSystem {
    /// The nearest directory above the pins that exists.
    pub directory: PathBuf,
    /// It is on a BPF file system.
    pub is_bpf: bool,
}

/// The device of the services' packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Set up, and with a carrier.
    pub running: bool,
    /// It has a MAC address.
    pub ethernet: bool,
    /// Bytes.
    pub mtu: u32,
    /// The driver's name.
    pub driver: String,
    /// `None`: the driver does not tell.
    pub channels: Option<Channels>,
    /// It merges what it receives in hardware.
    pub lro: bool,
    /// Whether UDP is hashed by its ports; `None`: the driver does not tell.
    pub udp_ports: Option<bool>,
    /// XDP programs.
    pub xdp: Xdp,
    /// Whether the other end has an XDP program; `None`: the device is no veth, or the other end is not shown.
    pub veth_peer_has_xdp: Option<bool>,
    /// Counters of frames that XDP programs sent and the driver dropped, where they are not 0.
    pub xdp_send_errors: Vec<(String, u64)>,
    /// The id of coreward's own, by its pinned link.
    pub own_xdp: Option<u32>,
    /// What overrides RSS.
    pub rss_conflicts: RssConflicts,
    /// The interrupts that are found, by receive queue.
    pub interrupts: BTreeMap<u16, Interrupt>,
    /// Entries of the indirection table and what is done to the hash's input, if key and table can be used; else why not.
    pub rss: Result<(usize, InputTransform), RssProblem>,
    /// The driver moves open connections by itself (ATR); `None`: it cannot.
    pub moves_connections: Option<bool>,
    /// It takes VLAN tags off what it receives.
    pub strips_vlan_tags: bool,
    /// VLAN devices on top of it.
    pub vlans: Vec<String>,
    /// /sys is of this network namespace: without it RPS and interrupts are not seen.
    pub seen_in_sys: bool,
}

/// Why nobody can tell where a device sends a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RssProblem {
    /// It has no table to show.
    None(String),
    /// It hashes in another way, or cannot be asked.
    Other(String),
}

/// An address of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The device's name.
    pub device: String,
    /// The address.
    pub address: Ipv4Addr,
    /// Its network's mask.
    pub mask: Ipv4Addr,
}

impl Address {
    /// Whether `other` is in the network of this address.
    pub fn reaches(&self, other: Ipv4Addr) -> bool {
        let mask = self.mask.to_bits();
        self.address.to_bits() & mask == other.to_bits() & mask
    }
}

/// The clocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clock {
    /// Of the kernel; empty: not known.
    pub source: String,
    /// The kernel is told by somebody (NTP) that its wall clock is right; `None`: not known.
    pub synchronised: Option<bool>,
}

/// Firewalls and connection tracking of this network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netfilter {
    /// nftables' chains (iptables-nft's among them), or why they are not known.
    pub chains: Result<Vec<Chain>, String>,
    /// Tables of the old iptables.
    pub legacy_tables: Vec<String>,
}

/// A chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    /// Family, table and name.
    pub name: String,
    /// Where packets come to it, if they do.
    pub hook: String,
    /// What no rule decides is dropped.
    pub drops: bool,
    /// A rule accepts something, or goes to another chain.
    pub accepts: bool,
    /// A rule asks for a connection's state, or rewrites addresses.
    pub tracks: bool,
    /// A rule takes packets from connection tracking.
    pub untracks: bool,
}

/// A service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// VIP, port, protocol.
    pub address: ServiceAddress,
    /// The load balancers stamp it (`timestamps = "lb"`).
    pub stamped_by_lb: bool,
    /// Its timestamps are stamped by somebody.
    pub stamped: bool,
    /// Who serves it on this machine, or why that is not known; `None`: it is not this machine's to serve.
    pub sockets: Option<Result<Sockets, String>>,
}

impl Service {
    /// The VIP, where it is IPv4.
    pub fn vip(&self) -> Option<Ipv4Addr> {
        match self.address.socket.ip() {
            IpAddr::V4(vip) => Some(vip),
            IpAddr::V6(_) => None,
        }
    }
}

/// Sockets that take a service's connections or datagrams.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sockets {
    /// How many.
    pub count: usize,
    /// They have SO_REUSEPORT; `None`: not known.
    pub reuseport: Option<bool>,
    /// Of each process that waits for one: CPUs that it may run on.
    pub workers: Vec<BTreeSet<usize>>,
}

/// What a controller needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerPlace {
    /// Where it listens.
    pub listen: SocketAddr,
    /// `None`: it can be bound; else why not.
    pub listen_problem: Option<String>,
    /// A controller answers there.
    pub running: bool,
    /// Where it keeps what must survive.
    pub store: StoreFacts,
}

/// Where a controller keeps what must survive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreFacts {
    /// In a file.
    File {
        /// The file.
        path: PathBuf,
        /// Why it cannot be made or written.
        problem: Option<String>,
        /// Its permission bits; `None`: it is not there yet.
        mode: Option<u32>,
    },
    /// In etcd.
    Etcd {
        /// Its members.
        endpoints: Vec<String>,
        /// Who leads, in words, or why etcd cannot be asked.
        leader: Result<String, String>,
    },
}

impl Facts {
    /// The device's name, as the file has it.
    pub fn interface(&self) -> &str {
        self.settings.interface.as_deref().unwrap_or_default()
    }

    /// A sysctl that is a number.
    pub fn sysctl(&self, path: &str) -> Option<u32> {
        self.sysctls.get(path)?.trim().parse().ok()
    }

    /// Of net.ipv4.conf: (all, the device's).
    pub fn device_sysctl(&self, name: &str) -> Option<(u32, u32)> {
        let of = |device: &str| self.sysctl(&device_sysctl(device, name));
        Some((of("all")?, of(self.interface())?))
    }

    /// VIPs of the services, each once.
    pub fn vips(&self) -> BTreeSet<Ipv4Addr> {
        self.services.iter().filter_map(Service::vip).collect()
    }
}

/// Path of a device's sysctl below /proc/sys.
pub fn device_sysctl(device: &str, name: &str) -> String {
    format!("net/ipv4/conf/{device}/{name}")
}
