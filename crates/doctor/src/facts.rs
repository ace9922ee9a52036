//! Facts about a machine, as plain data, so tests can construct them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use coreward_agent::config::Steer;
use coreward_agent::load::queues::Interrupt;
use coreward_agent::rss::ethtool::FlowType;
use coreward_agent::rss_conflicts::RssConflicts;
use coreward_dataplane::device::XdpState;
use coreward_dataplane::ethtool::Channels;
use coreward_dataplane::lb::XdpMode;
use coreward_model::ServiceAddress;
use coreward_model::forwarding::Forwarding;
use coreward_model::rss::InputTransform;

use crate::nat_rules::Chain;

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
    /// Returns the role's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Role::Lb => "lb",
            Role::Server => "server",
            Role::Controller => "controller",
        }
    }
}

/// Settings of the daemon's file, or defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Device of the services' packets; `None` for a controller.
    pub interface: Option<String>,
    /// Directory of the pins.
    pub pin_directory: Option<PathBuf>,
    /// Addresses of the controllers.
    pub controllers: Vec<SocketAddr>,
    /// Agent: whether it sets net.ipv4.tcp_timestamps.
    pub manage_timestamps: bool,
    /// Whether load is the busy time of CPUs.
    pub load_by_cpu_time: bool,
    /// Agent: whether and how it selects workers.
    pub steer: Steer,
    /// Load balancer: XDP mode.
    pub xdp_mode: XdpMode,
    /// Load balancer: routing table for announced VIPs.
    pub announce_table: Option<u32>,
}

/// All facts about a machine.
#[derive(Debug, Clone)]
pub struct Facts {
    pub role: Role,
    pub settings: Settings,
    pub kernel: Kernel,
    /// Missing capabilities.
    pub missing_rights: Vec<&'static str>,
    /// Hard limit of open files, to which a daemon raises its limit.
    pub open_files_limit: u64,
    /// Sysctls by path below /proc/sys; missing sysctls have no entry.
    pub sysctls: BTreeMap<String, String>,
    /// File system of the pins.
    pub bpf_file_system: BpfFileSystem,
    /// Reason why a new process cannot take over the pins.
    pub pins_problem: Option<String>,
    /// Device of the services' packets; `None`: not configured, or missing.
    pub device: Option<Device>,
    /// Addresses of all devices.
    pub addresses: Vec<Address>,
    /// Devices of default routes.
    pub default_routes: BTreeSet<String>,
    /// Online CPUs.
    pub cpu_count: usize,
    pub clock: Clock,
    /// Firewalls and connection tracking.
    pub netfilter: Netfilter,
    /// Controller that answered, or the error; `None`: no address is configured, or this machine is a controller's.
    pub reachable_controller: Option<Result<SocketAddr, String>>,
    /// Services of this machine.
    pub services: Vec<Service>,
    /// Servers of these services.
    pub servers: BTreeMap<String, Server>,
    /// Reports rejected as sent in the future.
    pub future_report_count: u64,
    /// Announcement of VIPs; `None`: coreward announces no VIPs.
    pub announcement: Option<Announcement>,
    /// Facts about a controller.
    pub controller_facts: Option<ControllerFacts>,
    /// Polling threads.
    pub polling_threads: Vec<PollingThread>,
    /// Certificates of `[tls]`.
    pub certificates: Vec<CertificateFacts>,
}

/// Thread that is pinned to one CPU and never waits: it polls, or is at full load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PollingThread {
    /// Thread id.
    pub thread_id: u32,
    /// Name of the thread.
    pub name: String,
    /// CPU of the thread.
    pub cpu: usize,
}

/// Certificate of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// "own", or "ca" of an authority.
    pub usage: &'static str,
    /// Subject.
    pub subject: String,
    /// Identity, if it is another daemon's.
    pub wrong_owner: Option<String>,
    /// Remaining validity; zero: expired.
    pub remaining_validity: Duration,
    /// Whether less than a third of its validity remains.
    pub is_renewal_due: bool,
}

/// Requirements of announced VIPs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// Number of the routing table.
    pub table: u32,
    /// `ip rule` entries that use the table, or the error.
    pub rules: Result<Vec<String>, String>,
    /// Name of the running routing daemon.
    pub daemon: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Kernel release, which `uname -r` prints.
    pub release: String,
    /// Whether /sys/kernel/btf/vmlinux exists.
    pub has_btf: bool,
    /// Result of loading each program of the role; empty without capabilities.
    pub programs: BTreeMap<&'static str, Result<(), String>>,
}

/// File system of the pins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BpfFileSystem {
    /// Nearest existing directory above the pins.
    pub directory: PathBuf,
    /// Whether it is a BPF file system.
    pub is_bpf: bool,
}

/// Device of the services' packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Whether the device is up and has a carrier.
    pub is_up: bool,
    /// Whether the device has a MAC address.
    pub is_ethernet: bool,
    /// MTU in bytes.
    pub mtu: u32,
    /// Name of the driver.
    pub driver: String,
    /// Channels; `None`: the driver does not report them.
    pub channels: Option<Channels>,
    /// Whether the device merges received packets in hardware.
    pub is_lro_enabled: bool,
    /// Whether RSS hashes packets of this type by their ports; no entry: the driver does not report it.
    pub port_hashing: BTreeMap<FlowType, bool>,
    /// XDP programs on the device.
    pub xdp: XdpState,
    /// Whether the other end has an XDP program; `None`: the device is no veth, or its other end is not visible.
    pub veth_peer_has_xdp: Option<bool>,
    /// Counters above 0 of frames that XDP sent and the driver dropped.
    pub xdp_send_errors: Vec<(String, u64)>,
    /// Id of coreward's program, by its pinned link.
    pub own_program_id: Option<u32>,
    /// Settings that override RSS.
    pub rss_conflicts: RssConflicts,
    /// Known interrupts by receive queue.
    pub interrupts: BTreeMap<u16, Interrupt>,
    /// Entries of the indirection table and transform of the hash's input, or the problem.
    pub rss: Result<(usize, InputTransform), RssProblem>,
    /// Whether the driver moves open connections (ATR); `None`: it cannot.
    pub moves_connections: Option<bool>,
    /// Whether the device removes VLAN tags of received frames.
    pub strips_vlan_tags: bool,
    /// VLAN devices on this device.
    pub vlans: Vec<String>,
    /// Whether /sys belongs to this network namespace. If not, RPS and interrupts are not visible.
    pub is_sysfs_visible: bool,
}

/// Reason why the receive queue of a connection is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RssProblem {
    /// The device shows no indirection table.
    NoIndirectionTable(String),
    /// The device uses another hash, or reports none.
    UnsupportedHash(String),
}

/// Address of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Name of the device.
    pub device: String,
    /// Address.
    pub address: IpAddr,
    /// Netmask, of the same address family.
    pub mask: IpAddr,
}

impl Address {
    /// Returns whether `other` is in the address's network.
    pub fn reaches(&self, other: IpAddr) -> bool {
        match (self.address, self.mask, other) {
            (IpAddr::V4(own), IpAddr::V4(mask), IpAddr::V4(other)) => own & mask == other & mask,
            (IpAddr::V6(own), IpAddr::V6(mask), IpAddr::V6(other)) => own & mask == other & mask,
            _ => false,
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clock {
    /// Clock source of the kernel; empty: unknown.
    pub source: String,
    /// Whether the wall clock is synchronised (NTP); `None`: not known.
    pub synchronised: Option<bool>,
}

/// Firewalls and connection tracking of this network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netfilter {
    /// Chains of nftables, also of iptables-nft, or the error.
    pub chains: Result<Vec<Chain>, String>,
    /// Tables of legacy iptables.
    pub legacy_tables: Vec<String>,
}

/// Service of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Name of the service.
    pub name: String,
    /// VIP, port, protocol.
    pub address: ServiceAddress,
    /// Whether load balancers stamp it (`timestamps = "lb"`).
    pub is_stamped_by_lb: bool,
    /// Whether anything stamps the service's packets.
    pub is_stamped: bool,
    /// Forwarding of packets to the servers.
    pub forwarding: Forwarding,
    /// Sockets of the service on this machine, or the error; `None`: the machine does not serve it.
    pub sockets: Option<Result<Sockets, String>>,
}

impl Service {
    pub fn vip(&self) -> IpAddr {
        self.address.socket.ip()
    }
}

/// Server of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Server {
    /// Address for load balancers.
    pub address: IpAddr,
    /// Whether load balancers send untagged frames to the server, by `forwarding = "l2"`.
    pub is_on_segment: bool,
}

/// Sockets of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sockets {
    /// Number of sockets.
    pub count: usize,
    /// Whether the sockets have SO_REUSEPORT; `None`: unknown.
    pub has_reuseport: Option<bool>,
    /// Allowed CPUs of each process that waits for one of the sockets.
    pub worker_cpus: Vec<BTreeSet<usize>>,
}

/// Facts about a controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerFacts {
    /// Listening address.
    pub listen: SocketAddr,
    /// Error of binding the address.
    pub listen_problem: Option<String>,
    /// Whether a controller answers at the address.
    pub is_running: bool,
    /// Store of the controller's records.
    pub store: StoreFacts,
}

/// Store of the records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreFacts {
    /// A file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Reason why the file cannot be created or written.
        problem: Option<String>,
        /// Permission bits; `None`: the file does not exist.
        mode: Option<u32>,
    },
    /// etcd.
    Etcd {
        /// Endpoints.
        endpoints: Vec<String>,
        /// Leader in etcd, or the error.
        leader: Result<String, String>,
    },
}

impl Facts {
    /// Returns the name of the device.
    pub fn interface(&self) -> &str {
        self.settings.interface.as_deref().unwrap_or_default()
    }

    pub fn sysctl(&self, path: &str) -> Option<u32> {
        self.sysctls.get(path)?.trim().parse().ok()
    }

    /// Returns values of net.ipv4.conf for `all` and for the device.
    pub fn device_sysctl(&self, name: &str) -> Option<(u32, u32)> {
        let of = |device: &str| self.sysctl(&device_sysctl(device, name));
        Some((of("all")?, of(self.interface())?))
    }

    pub fn vips(&self) -> BTreeSet<IpAddr> {
        self.services.iter().map(Service::vip).collect()
    }
}

/// Returns the path below /proc/sys of the sysctl that switches IPv6 off at a device.
pub fn disable_ipv6_sysctl(device: &str) -> String {
    format!("net/ipv6/conf/{device}/disable_ipv6")
}

/// Path below /proc/sys of the sysctl by which a machine routes IPv6.
pub const IPV6_FORWARDING: &str = "net/ipv6/conf/all/forwarding";

/// Returns the path of a device's sysctl below /proc/sys.
pub fn device_sysctl(device: &str, name: &str) -> String {
    format!("net/ipv4/conf/{device}/{name}")
}
