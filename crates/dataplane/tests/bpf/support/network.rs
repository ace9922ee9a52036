//! Network of simulated hosts. Each is an anonymous network namespace, which the kernel removes when this process ends.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use coreward_dataplane::mac::MacAddress;
use nix::sched::{CloneFlags, CpuSet, sched_getaffinity, sched_setaffinity, setns, unshare};
use nix::unistd::Pid;

pub const CLIENT_IPV4: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
pub const SERVER_IPV4: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
pub const VIP: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);

/// Pins the calling thread and its later children to one CPU, which then also processes their packets over veth.
///
/// With several CPUs, a segment now and then overtakes an older segment. If both were sent within a millisecond, Linux
/// accepts the older one, whose TSval is one tick less (TCP_PAWS_WINDOW in include/net/tcp.h). With stamping, a
/// millisecond is 65,536 ticks (4,096 with timestamps = "lb"). The older segment is then dropped (PAWSEstab).
pub fn pin_thread_to_one_cpu() {
    let (mut cpu_set, this_thread) = (CpuSet::new(), Pid::from_raw(0));
    let allowed_cpus = sched_getaffinity(this_thread).unwrap();
    let cpu_numbers: Vec<usize> = (0..CpuSet::count()).filter(|cpu| allowed_cpus.is_set(*cpu).unwrap()).collect();
    // Concurrent test processes use different CPUs.
    cpu_set.set(cpu_numbers[std::process::id() as usize % cpu_numbers.len()]).unwrap();
    sched_setaffinity(this_thread, &cpu_set).unwrap();
}

pub fn interface_mac(interface: &str) -> MacAddress {
    let link_entries = nix::ifaddrs::getifaddrs().unwrap().filter(|entry| entry.interface_name == interface);
    let mac_addresses = link_entries.filter_map(|entry| entry.address?.as_link_addr()?.addr()).collect::<Vec<_>>();
    MacAddress(mac_addresses[0])
}

/// Simulated host, which is a network namespace.
#[derive(Debug)]
pub struct NamespaceHost {
    namespace_file: File,
}

impl NamespaceHost {
    fn new() -> Self {
        let namespace_file = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        Self { namespace_file: namespace_file.join().unwrap() }
    }

    /// Runs `action` in a new thread in the host's network namespace, to which the sockets that it opens belong.
    pub fn run_in_namespace<T: Send>(&self, action: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let namespace_thread = scope.spawn(|| {
                setns(&self.namespace_file, CloneFlags::CLONE_NEWNET).unwrap();
                action()
            });
            namespace_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    pub fn run_ip_command(&self, arguments: &str) {
        let run_ip = || Command::new("ip").args(arguments.split_whitespace()).status().unwrap();
        assert!(self.run_in_namespace(run_ip).success(), "ip {arguments}");
    }

    pub fn set_sysctl(&self, path: &str, value: &str) {
        self.run_in_namespace(|| fs::write(format!("/proc/sys/net/{path}"), value).unwrap());
    }

    /// Returns a counter of the host's kernel, by its name in `nstat` (such as TcpExtPAWSEstab or TcpRetransSegs).
    pub fn kernel_counter(&self, name: &str) -> u64 {
        let counter_text = self.run_in_namespace(|| {
            ["netstat", "snmp"]
                .map(|file| fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap())
                .concat()
        });
        // The files have pairs of lines, "Group: name name ..." and "Group: value value ...".
        let counter_lines: Vec<&str> = counter_text.lines().collect();
        let counter_value = counter_lines.chunks(2).find_map(|line_pair| {
            let (group, names) = line_pair[0].split_once(':').unwrap();
            let name_index = names.split_whitespace().position(|n| format!("{group}{n}") == name)?;
            line_pair[1].split_whitespace().nth(name_index + 1)?.parse().ok()
        });
        counter_value.unwrap_or_else(|| panic!("the kernel has no counter {name}"))
    }
}

/// Client and server connected by a veth pair. The server also has the VIP. Both devices are called eth0.
#[derive(Debug)]
pub struct VethPair {
    pub client: NamespaceHost,
    pub server: NamespaceHost,
}

impl VethPair {
    pub fn new() -> Self {
        let (client, server) = (NamespaceHost::new(), NamespaceHost::new());
        let server_namespace = format!("/proc/{}/fd/{}", std::process::id(), server.namespace_file.as_raw_fd());
        client.run_ip_command(&format!(
            "link add eth0 numrxqueues 4 numtxqueues 4 type veth peer name eth0 numrxqueues 4 numtxqueues 4 netns \
             {server_namespace}"
        ));
        for (host, address) in [(&client, CLIENT_IPV4), (&server, SERVER_IPV4)] {
            host.run_ip_command(&format!("address add {address}/24 dev eth0"));
            host.run_ip_command("link set lo up");
            host.run_ip_command("link set eth0 up");
        }
        server.run_ip_command(&format!("address add {VIP}/32 dev lo"));
        client.run_ip_command(&format!("route add {VIP}/32 via {SERVER_IPV4}"));
        server.set_sysctl("ipv4/tcp_timestamps", "2");
        Self { client, server }
    }

    pub fn server_interface_index(&self) -> u32 {
        self.server.run_in_namespace(|| nix::net::if_::if_nametoindex("eth0").unwrap())
    }
}

/// Pin directory on a bpffs, removed when the value is dropped. The next test removes the directories of killed tests.
#[derive(Debug)]
pub struct PinDirectory {
    path: PathBuf,
}

impl PinDirectory {
    pub fn new() -> Self {
        static NEXT_PIN_DIRECTORY_NUMBER: AtomicU32 = AtomicU32::new(0);
        const PIN_DIRECTORY_PREFIX: &str = "coreward-test-";
        for entry in fs::read_dir("/sys/fs/bpf").unwrap().flatten() {
            let directory_name = entry.file_name().into_string().unwrap_or_default();
            let process_id =
                directory_name.strip_prefix(PIN_DIRECTORY_PREFIX).and_then(|name_suffix| name_suffix.split('-').next());
            if process_id.is_some_and(|process| !PathBuf::from(format!("/proc/{process}")).exists()) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let directory_number = NEXT_PIN_DIRECTORY_NUMBER.fetch_add(1, Ordering::Relaxed);
        let path =
            PathBuf::from(format!("/sys/fs/bpf/{PIN_DIRECTORY_PREFIX}{}-{directory_number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self { path }
    }

    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }
}

impl Drop for PinDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Network segment with a load balancer, a client and servers. The servers have the VIP and reach the client through
/// the load balancer. All devices are called eth0.
#[derive(Debug)]
pub struct NetworkSegment {
    pub load_balancer: NamespaceHost,
    pub client: NamespaceHost,
    pub servers: Vec<NamespaceHost>,
    _switch: NamespaceHost,
}

impl NetworkSegment {
    pub fn new(servers: u8) -> Self {
        let switch_host = NamespaceHost::new();
        switch_host.run_ip_command("link add br0 type bridge");
        switch_host.run_ip_command("link set br0 up");
        let all_hosts: Vec<NamespaceHost> =
            (0..2 + servers).map(|number| Self::add_host(&switch_host, number)).collect();
        let mut remaining_hosts = all_hosts.into_iter();
        let (load_balancer, client) = (remaining_hosts.next().unwrap(), remaining_hosts.next().unwrap());
        let servers: Vec<NamespaceHost> = remaining_hosts.collect();
        let load_balancer_address = Self::host_address(0);
        client.run_ip_command(&format!("route add {VIP}/32 via {load_balancer_address}"));
        load_balancer.set_sysctl("ipv4/ip_forward", "1");
        load_balancer.set_sysctl("ipv4/conf/all/send_redirects", "0");
        load_balancer.set_sysctl("ipv4/conf/eth0/send_redirects", "0");
        for server in &servers {
            server.run_ip_command(&format!("address add {VIP}/32 dev lo"));
            server.run_ip_command(&format!("route add {}/32 via {load_balancer_address}", Self::host_address(1)));
            server.set_sysctl("ipv4/tcp_timestamps", "2");
            server.set_sysctl("ipv4/conf/all/arp_ignore", "1");
        }
        Self { load_balancer, client, servers, _switch: switch_host }
    }

    /// Returns the address of the load balancer (`host_number` 0), the client (1), or server K (2 + K).
    pub fn host_address(host_number: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 1, 0, 1 + host_number)
    }

    fn add_host(switch: &NamespaceHost, host_number: u8) -> NamespaceHost {
        let host = NamespaceHost::new();
        let switch_namespace = format!("/proc/{}/fd/{}", std::process::id(), switch.namespace_file.as_raw_fd());
        host.run_ip_command(&format!("link add eth0 type veth peer name port{host_number} netns {switch_namespace}"));
        host.run_ip_command(&format!("address add {}/24 dev eth0", Self::host_address(host_number)));
        host.run_ip_command("link set lo up");
        host.run_ip_command("link set eth0 up");
        // veth leaves checksums to a NIC, so packets that XDP forwards would have incomplete checksums.
        let turn_off_checksum_offload = || Command::new("ethtool").args(["-K", "eth0", "tx", "off"]).output().unwrap();
        assert!(host.run_in_namespace(turn_off_checksum_offload).status.success(), "ethtool -K eth0 tx off");
        switch.run_ip_command(&format!("link set port{host_number} master br0"));
        switch.run_ip_command(&format!("link set port{host_number} up"));
        host
    }
}
