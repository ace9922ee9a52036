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
use coreward_dataplane::ethtool::QueueCounts;
use coreward_dataplane::lb::XdpMode;
use coreward_model::ServiceAddress;
use coreward_model::forwarding::Forwarding;
use coreward_model::rss::InputTransform;

use crate::nat_rules::NetfilterChain;

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

/// Settings of the daemon's configuration file, or their defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Network device of the services' packets; `None` for a controller.
    pub interface: Option<String>,
    /// Directory in which the daemon pins its programs and maps.
    pub pin_directory: Option<PathBuf>,
    /// Addresses of the controllers.
    pub controllers: Vec<SocketAddr>,
    /// Whether the agent sets net.ipv4.tcp_timestamps.
    pub manage_timestamps: bool,
    /// Whether the reported load of a core is the busy time of its CPU.
    pub is_load_cpu_time: bool,
    /// How the agent selects workers, if it does.
    pub steer: Steer,
    /// XDP mode of the load balancer.
    pub xdp_mode: XdpMode,
    /// Number of the routing table in which the load balancer announces VIPs.
    pub announcement_table: Option<u32>,
}

/// All facts about a machine that checks examine.
#[derive(Debug, Clone)]
pub struct Facts {
    pub role: Role,
    pub settings: Settings,
    pub kernel: Kernel,
    /// Capabilities that this process lacks.
    pub missing_capabilities: Vec<&'static str>,
    /// Hard limit of open files, to which a daemon raises its limit.
    pub open_files_limit: u64,
    /// Values of sysctls by path below /proc/sys; missing sysctls have no entry.
    pub sysctl_values: BTreeMap<String, String>,
    /// File system of the pin directory.
    pub bpf_file_system: BpfFileSystem,
    /// Reason why a new process cannot take over the pinned programs and maps.
    pub pins_problem: Option<String>,
    /// Network device of the services' packets; `None`: not configured, or missing.
    pub device: Option<Device>,
    /// Addresses of all network devices.
    pub addresses: Vec<Address>,
    /// Names of the devices of default routes.
    pub default_route_devices: BTreeSet<String>,
    /// Number of online CPUs.
    pub cpu_count: usize,
    pub clock: Clock,
    /// Firewalls and connection tracking.
    pub netfilter: Netfilter,
    /// Controller that answered, or the error; `None`: no address is configured, or this is a controller's machine.
    pub controller_answer: Option<Result<SocketAddr, String>>,
    /// Services that this machine serves or balances.
    pub services: Vec<Service>,
    /// Servers of these services by name.
    pub servers_by_name: BTreeMap<String, Server>,
    /// Number of reports that the controller rejected because their time is in the future.
    pub future_report_count: u64,
    /// Announcement of VIPs; `None`: coreward announces no VIPs.
    pub announcement: Option<Announcement>,
    /// Facts about the controller on this machine.
    pub controller_facts: Option<ControllerFacts>,
    /// Threads that poll instead of waiting.
    pub polling_threads: Vec<PollingThread>,
    /// Certificates of the file's `[tls]` table.
    pub certificates: Vec<CertificateFacts>,
}

/// Thread that is pinned to one CPU and never waits: it polls, or is at full load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PollingThread {
    /// Id of the thread.
    pub thread_id: u32,
    /// Name of the thread.
    pub name: String,
    /// CPU to which the thread is pinned.
    pub cpu: usize,
}

/// Facts about a certificate of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Use of the certificate: "own", or "ca" for that of an authority.
    pub usage: &'static str,
    /// Subject of the certificate.
    pub subject: String,
    /// Identity in the certificate, if it is another daemon's.
    pub wrong_owner: Option<String>,
    /// Remaining validity; zero if expired.
    pub remaining_validity: Duration,
    /// Whether less than a third of the certificate's validity remains.
    pub is_renewal_due: bool,
}

/// Facts that the announcement of VIPs depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// Number of the routing table.
    pub routing_table_number: u32,
    /// `ip rule` entries that use the table, or the error.
    pub ip_rules: Result<Vec<String>, String>,
    /// Name of the running routing daemon.
    pub routing_daemon: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Kernel release, which `uname -r` prints.
    pub release: String,
    /// Whether /sys/kernel/btf/vmlinux exists.
    pub has_btf: bool,
    /// Result of loading each program of the role; empty without capabilities.
    pub program_load_results: BTreeMap<&'static str, Result<(), String>>,
}

/// File system of the pin directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BpfFileSystem {
    /// Nearest existing ancestor of the pin directory.
    pub existing_directory: PathBuf,
    /// Whether the directory is in a BPF file system.
    pub is_bpf: bool,
}

/// Network device of the services' packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Whether the device is up and has a carrier.
    pub is_up: bool,
    /// Whether the device has a MAC address.
    pub is_ethernet: bool,
    /// MTU in bytes.
    pub mtu: u32,
    /// Name of the device's driver.
    pub driver: String,
    /// Numbers of channels (queues); `None`: the driver does not report them.
    pub channels: Option<QueueCounts>,
    /// Whether the device merges received packets in hardware.
    pub is_lro_enabled: bool,
    /// Whether RSS hashes packets of this type by their ports; no entry: the driver does not report it.
    pub port_hashing_by_flow_type: BTreeMap<FlowType, bool>,
    /// XDP programs on the device.
    pub xdp: XdpState,
    /// Whether the other end has an XDP program; `None`: the device is no veth, or its other end is not visible.
    pub veth_peer_has_xdp: Option<bool>,
    /// Counters of frames that XDP sent and the driver dropped, if above 0.
    pub xdp_send_errors: Vec<(String, u64)>,
    /// Id of coreward's XDP program, found by its pinned link.
    pub own_program_id: Option<u32>,
    /// Settings by which packets reach other cores than RSS selects.
    pub rss_conflicts: RssConflicts,
    /// Known interrupts of the device by receive queue.
    pub interrupts_by_queue: BTreeMap<u16, Interrupt>,
    /// Number of entries of the RSS table and input transform of the hash, or the problem.
    pub rss_entries_and_transform: Result<(usize, InputTransform), RssProblem>,
    /// Whether the driver moves open connections to other queues (ATR); `None`: it cannot.
    pub moves_open_connections: Option<bool>,
    /// Whether the device removes VLAN tags of received frames.
    pub strips_vlan_tags: bool,
    /// VLAN devices on this device.
    pub vlan_devices: Vec<String>,
    /// Whether /sys shows this network namespace. If not, RPS and interrupts are not visible.
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

/// IP address of a network device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Name of the network device.
    pub device: String,
    /// The IP address.
    pub address: IpAddr,
    /// Netmask, of the same address family.
    pub mask: IpAddr,
}

impl Address {
    /// Returns whether `other` is in the network of this address.
    pub fn is_same_network(&self, other: IpAddr) -> bool {
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
    pub clock_source: String,
    /// Whether the wall clock is synchronised (NTP); `None` if unknown.
    pub is_synchronised: Option<bool>,
}

/// Firewalls and connection tracking of this network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netfilter {
    /// Chains of nftables, including those of iptables-nft, or the error of reading them.
    pub chains: Result<Vec<NetfilterChain>, String>,
    /// Names of the tables of legacy iptables.
    pub legacy_tables: Vec<String>,
}

/// Service that this machine serves or balances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Name of the service.
    pub name: String,
    /// VIP, port and protocol of the service.
    pub address: ServiceAddress,
    /// Whether load balancers stamp the service's packets (`timestamps = "lb"`).
    pub is_stamped_by_lb: bool,
    /// Whether servers or load balancers stamp the service's packets.
    pub is_stamped: bool,
    /// Kind of forwarding of packets to the servers.
    pub forwarding: Forwarding,
    /// Sockets of the service on this machine, or the error; `None`: the machine does not serve it.
    pub sockets: Option<Result<Sockets, String>>,
}

impl Service {
    pub fn vip(&self) -> IpAddr {
        self.address.socket.ip()
    }
}

/// Server of a service, as load balancers reach it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Server {
    /// Address by which load balancers reach the server.
    pub address: IpAddr,
    /// Whether load balancers send untagged frames to the server, by `forwarding = "l2"`.
    pub is_on_segment: bool,
}

/// Sockets of a service on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sockets {
    /// Number of the service's sockets.
    pub socket_count: usize,
    /// Whether the sockets have SO_REUSEPORT; `None`: unknown.
    pub has_reuseport: Option<bool>,
    /// CPUs on which each process that waits for one of the sockets may run.
    pub worker_cpus: Vec<BTreeSet<usize>>,
}

/// Facts about a controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerFacts {
    /// Listening address of the controller.
    pub listen_address: SocketAddr,
    /// Error of binding the listening address.
    pub listen_problem: Option<String>,
    /// Whether a controller answers at the listening address.
    pub is_running: bool,
    /// Store of the controller's records.
    pub store: StoreFacts,
}

/// Store of the controller's records, and its problems.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreFacts {
    /// The store is a file.
    File {
        /// Path of the store's file.
        path: PathBuf,
        /// Reason why the store's file cannot be created or written.
        problem: Option<String>,
        /// Permission bits of the store's file; `None`: the file does not exist.
        mode: Option<u32>,
    },
    /// The store is etcd.
    Etcd {
        /// Addresses of etcd's endpoints.
        endpoints: Vec<String>,
        /// Name of the leading controller in etcd, or the error.
        leader: Result<String, String>,
    },
}

impl Facts {
    /// Returns the name of the services' network device.
    pub fn interface(&self) -> &str {
        self.settings.interface.as_deref().unwrap_or_default()
    }

    pub fn sysctl(&self, path: &str) -> Option<u32> {
        self.sysctl_values.get(path)?.trim().parse().ok()
    }

    /// Returns the values of a sysctl in net.ipv4.conf for `all` and for the services' device.
    pub fn device_and_all_sysctl(&self, name: &str) -> Option<(u32, u32)> {
        let of = |device: &str| self.sysctl(&device_sysctl_path(device, name));
        Some((of("all")?, of(self.interface())?))
    }

    pub fn vips(&self) -> BTreeSet<IpAddr> {
        self.services.iter().map(Service::vip).collect()
    }
}

/// Returns the path below /proc/sys of the sysctl that disables IPv6 on a device.
pub fn disable_ipv6_sysctl_path(device: &str) -> String {
    format!("net/ipv6/conf/{device}/disable_ipv6")
}

/// Path below /proc/sys of the sysctl that makes the machine forward IPv6 packets.
pub const IPV6_FORWARDING_SYSCTL: &str = "net/ipv6/conf/all/forwarding";

/// Returns the path below /proc/sys of a device's sysctl in net.ipv4.conf.
pub fn device_sysctl_path(device: &str, name: &str) -> String {
    format!("net/ipv4/conf/{device}/{name}")
}
