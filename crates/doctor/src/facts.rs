//! Facts about a machine as plain data, so that tests can construct them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use coreward_agent::config::ConnectionSteeringMode;
use coreward_agent::load::receive_queue_cpus::ReceiveQueueInterrupt;
use coreward_agent::rss::ethtool::RssFlowType;
use coreward_agent::rss_conflicts::RssConflicts;
use coreward_dataplane::device::DeviceXdpState;
use coreward_dataplane::ethtool::DeviceQueueCounts;
use coreward_dataplane::lb::XdpMode;
use coreward_model::ServiceAddress;
use coreward_model::forwarding::ForwardingMode;
use coreward_model::rss::RssInputTransform;

use crate::nat_rules::NetfilterChain;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum MachineRole {
    /// `coreward lb`
    Lb,
    /// `coreward agent`
    Server,
    /// `coreward controller`
    Controller,
}

impl MachineRole {
    pub fn name(self) -> &'static str {
        match self {
            MachineRole::Lb => "lb",
            MachineRole::Server => "server",
            MachineRole::Controller => "controller",
        }
    }
}

/// Settings from the daemon's configuration file, or their defaults without a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonSettings {
    /// Network device that receives the services' packets, or `None` for a controller.
    pub interface: Option<String>,
    /// Directory in which the daemon pins its programs and maps.
    pub pin_directory: Option<PathBuf>,
    pub controllers: Vec<SocketAddr>,
    /// Whether the agent sets the sysctl net.ipv4.tcp_timestamps itself.
    pub manages_tcp_timestamps: bool,
    /// Whether the agent reports the busy time of a CPU as the load of its core.
    pub reports_cpu_time_as_load: bool,
    /// Method by which the agent selects the worker for a connection.
    pub steering_mode: ConnectionSteeringMode,
    pub xdp_mode: XdpMode,
    /// Number of the routing table in which the load balancer announces VIPs, or `None` if it announces none.
    pub announcement_table_number: Option<u32>,
}

/// All facts about this machine that the checks examine.
#[derive(Debug, Clone)]
pub struct MachineFacts {
    pub role: MachineRole,
    pub settings: DaemonSettings,
    pub kernel: KernelFacts,
    /// Names of the required capabilities that this process lacks.
    pub missing_capabilities: Vec<&'static str>,
    /// Hard limit of open files. A daemon raises its own soft limit to it.
    pub open_files_limit: u64,
    /// Values of sysctls, by path below /proc/sys. Sysctls that do not exist have no entry.
    pub sysctl_values: BTreeMap<String, String>,
    pub bpf_file_system: BpfFileSystem,
    /// Reason why a new process could not take over the pinned programs and maps, or `None` if it could.
    pub pin_takeover_problem: Option<String>,
    /// Network device that receives the services' packets. `None` if it is not configured or does not exist.
    pub device: Option<DeviceFacts>,
    /// Addresses of all network devices.
    pub addresses: Vec<DeviceAddress>,
    /// Names of the network devices of the default routes.
    pub default_route_devices: BTreeSet<String>,
    /// Number of online CPUs.
    pub online_cpu_count: usize,
    pub clock: ClockFacts,
    pub netfilter: NetfilterFacts,
    /// Address of the controller that answered, or the error. `None` for a controller, or if no address is configured.
    pub answering_controller: Option<Result<SocketAddr, String>>,
    /// Services for which this machine is a server or a load balancer.
    pub services: Vec<ServiceFacts>,
    /// Servers of the services in `services`, by name.
    pub servers_by_name: BTreeMap<String, ServerFacts>,
    /// Number of agents' reports that the controller rejected because their time was in the future by the controller's
    /// clock.
    pub future_dated_report_count: u64,
    /// Facts about the announcement of VIPs, or `None` if this machine announces none.
    pub announcement: Option<AnnouncementFacts>,
    /// Facts about the controller, if this machine runs one.
    pub controller_facts: Option<ControllerFacts>,
    /// Threads that occupy a CPU by polling.
    pub polling_threads: Vec<PollingThread>,
    /// Certificates that the table `[tls]` of the configuration file names.
    pub certificates: Vec<CertificateFacts>,
}

/// Thread that is pinned to one CPU and never sleeps, because it polls or is at full load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PollingThread {
    pub thread_id: u32,
    pub name: String,
    /// CPU to which the thread is pinned.
    pub cpu: usize,
}

/// Facts about one of the daemon's certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Use of the certificate: "own", or "ca" for an authority.
    pub usage: &'static str,
    pub subject: String,
    /// Text with the actual and the expected identity if the certificate belongs to another daemon, and otherwise
    /// `None`.
    pub identity_mismatch: Option<String>,
    /// Remaining validity, which is zero if the certificate has expired.
    pub remaining_validity: Duration,
    /// Whether less than a third of the certificate's validity remains.
    pub is_renewal_due: bool,
}

/// Facts about the announcement of VIPs through a routing daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnouncementFacts {
    pub routing_table_number: u32,
    /// Entries of `ip rule` that refer to the routing table, or the error if they cannot be read.
    pub ip_rules: Result<Vec<String>, String>,
    /// Name of the running routing daemon, or `None` if none is running.
    pub routing_daemon: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFacts {
    /// Kernel release, in the form that `uname -r` prints.
    pub release: String,
    /// Whether the kernel provides its BTF at /sys/kernel/btf/vmlinux.
    pub has_btf: bool,
    /// Result of loading each of the role's BPF programs. Empty if this process lacks the capabilities for it.
    pub program_load_results: BTreeMap<&'static str, Result<(), String>>,
}

/// File system that contains the pin directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BpfFileSystem {
    /// Pin directory, or its nearest existing ancestor.
    pub nearest_existing_directory: PathBuf,
    /// Whether `nearest_existing_directory` is in a BPF file system.
    pub is_bpf_file_system: bool,
}

/// Network device that receives the services' packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Whether the device is up and has a carrier.
    pub is_up: bool,
    /// Whether the device has a MAC address.
    pub is_ethernet: bool,
    /// MTU of the device, in bytes.
    pub mtu_bytes: u32,
    pub driver: String,
    /// Current and maximum numbers of the device's queues, or `None` if the driver does not report them.
    pub queue_counts: Option<DeviceQueueCounts>,
    /// Whether the device merges received packets in hardware (large receive offload, LRO).
    pub is_lro_enabled: bool,
    /// Whether the RSS hash includes the ports, by flow type. Types that the driver does not report have no entry.
    pub port_hashing_by_flow_type: BTreeMap<RssFlowType, bool>,
    pub xdp_state: DeviceXdpState,
    /// Whether the peer of a veth device has an XDP program. `None` for other devices, or if the peer is not visible.
    pub veth_peer_has_xdp: Option<bool>,
    /// Names and values of the nonzero counters of frames that XDP sent and the driver dropped.
    pub xdp_send_error_counts: Vec<(String, u64)>,
    /// Id of the XDP program that coreward has attached, which is found through its pinned link.
    pub own_program_id: Option<u32>,
    /// Settings that send packets to other cores than those that RSS selects.
    pub rss_conflicts: RssConflicts,
    /// Known interrupts of the device, by receive queue.
    pub interrupts_by_queue: BTreeMap<u16, ReceiveQueueInterrupt>,
    /// Number of entries in the RSS indirection table and input transform of the hash, or the reason why they are
    /// unknown.
    pub rss_entry_count_and_transform: Result<(usize, RssInputTransform), RssProblem>,
    /// Whether the driver moves open connections to other queues (ATR), or `None` if it never can.
    pub moves_connections_between_queues: Option<bool>,
    /// Whether the device removes the VLAN tags of received frames.
    pub strips_vlan_tags: bool,
    /// Names of the VLAN devices that use this device.
    pub vlan_devices: Vec<String>,
    /// Whether /sys belongs to this network namespace. If not, RPS and interrupts are not visible.
    pub is_sysfs_visible: bool,
}

/// Reason why the receive queue of a connection's packets cannot be predicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RssProblem {
    /// The device reports no RSS indirection table.
    NoIndirectionTable(String),
    /// The device uses a hash function other than Toeplitz, or reports none.
    UnsupportedHash(String),
}

/// IP address of a network device, with its netmask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAddress {
    pub device_name: String,
    pub address: IpAddr,
    pub mask: IpAddr,
}

impl DeviceAddress {
    /// Returns whether an IP address belongs to the network of this address.
    pub fn shares_network_with(&self, address: IpAddr) -> bool {
        match (self.address, self.mask, address) {
            (IpAddr::V4(own), IpAddr::V4(mask), IpAddr::V4(other)) => own & mask == other & mask,
            (IpAddr::V6(own), IpAddr::V6(mask), IpAddr::V6(other)) => own & mask == other & mask,
            _ => false,
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClockFacts {
    /// Name of the kernel's clock source, or an empty string if it is unknown.
    pub clock_source: String,
    /// Whether the wall clock is synchronized (NTP), or `None` if this is unknown.
    pub is_synchronised: Option<bool>,
}

/// Firewalls and connection tracking in this network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetfilterFacts {
    /// Chains of nftables, including those of iptables-nft, or the error if they cannot be read.
    pub chains: Result<Vec<NetfilterChain>, String>,
    /// Names of the tables that legacy iptables uses.
    pub legacy_tables: Vec<String>,
}

/// Service for which this machine is a server or a load balancer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceFacts {
    pub name: String,
    pub address: ServiceAddress,
    /// Whether load balancers stamp the service's packets (`timestamps = "lb"`).
    pub is_stamped_by_lb: bool,
    /// Whether servers or load balancers stamp the service's packets.
    pub is_stamped: bool,
    /// Method by which load balancers forward packets to the servers.
    pub forwarding: ForwardingMode,
    /// Sockets of the service on this machine, or the error. `None` if this machine is not a server of the service.
    pub sockets: Option<Result<ServiceSocketFacts, String>>,
}

impl ServiceFacts {
    pub fn vip(&self) -> IpAddr {
        self.address.vip_and_port.ip()
    }
}

/// Facts about how load balancers reach a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerFacts {
    /// Address at which load balancers reach the server.
    pub address: IpAddr,
    /// Whether load balancers forward to the server in untagged Ethernet frames (`forwarding = "l2"`).
    pub is_on_segment: bool,
}

/// Sockets on this machine that receive the packets of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceSocketFacts {
    pub socket_count: usize,
    /// Whether the sockets have SO_REUSEPORT set, or `None` if this is unknown.
    pub has_reuseport: Option<bool>,
    /// CPU affinity of each process that waits at one of the sockets.
    pub worker_cpu_affinities: Vec<BTreeSet<usize>>,
}

/// Facts about the controller of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerFacts {
    pub listen_address: SocketAddr,
    /// Reason why the listening address cannot be bound, or `None` if it can.
    pub bind_problem: Option<String>,
    /// Whether a controller already answers at the listening address.
    pub is_running: bool,
    pub store: ControllerStoreFacts,
}

/// Facts about the store in which the controller keeps its records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControllerStoreFacts {
    Embedded {
        path: PathBuf,
        /// Reason why the store's file cannot be created or written, or `None` if it can.
        problem: Option<String>,
        /// Permission bits of the store's file, or `None` if the file does not exist.
        permission_bits: Option<u32>,
    },
    Etcd {
        endpoints: Vec<String>,
        /// Name of the leading controller according to etcd, or the error of the request.
        leader: Result<String, String>,
    },
}

impl MachineFacts {
    pub fn interface_name(&self) -> &str {
        self.settings.interface.as_deref().unwrap_or_default()
    }

    pub fn sysctl_value(&self, path: &str) -> Option<u32> {
        self.sysctl_values.get(path)?.trim().parse().ok()
    }

    /// Returns the values of a sysctl in net.ipv4.conf, for `all` and for the services' device.
    pub fn global_and_device_sysctl_values(&self, name: &str) -> Option<(u32, u32)> {
        let read_value = |device: &str| self.sysctl_value(&ipv4_device_sysctl_path(device, name));
        Some((read_value("all")?, read_value(self.interface_name())?))
    }

    pub fn vips(&self) -> BTreeSet<IpAddr> {
        self.services.iter().map(ServiceFacts::vip).collect()
    }
}

/// Returns the path below /proc/sys of the sysctl that disables IPv6 on a device.
pub fn ipv6_disabling_sysctl_path(device: &str) -> String {
    format!("net/ipv6/conf/{device}/disable_ipv6")
}

/// Path below /proc/sys of the sysctl that makes the machine forward IPv6 packets.
pub const IPV6_FORWARDING_SYSCTL: &str = "net/ipv6/conf/all/forwarding";

/// Returns the path below /proc/sys of a device's sysctl in net.ipv4.conf.
pub fn ipv4_device_sysctl_path(device: &str, name: &str) -> String {
    format!("net/ipv4/conf/{device}/{name}")
}
