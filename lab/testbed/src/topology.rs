//! Testbed's hosts and network, with a client, load balancers, a controller, servers, and a switch between them.
//!
//! ```text
//!   cwX-client 10.1.0.7 ..  --+                     +-- cwX-s1 10.1.1.1  (VIP on lo)
//!   cwX-lb1    10.1.2.1  -----+-- cwX-switch: br0 --+-- cwX-s2 10.1.1.2
//!   cwX-controller 10.1.0.2 --+                     +-- ...
//!   cwX-rack1  10.1.3.1    ---+
//! ```
//!
//! Every host is a namespace with one device, `eth0`. Its peer in the switch has the host's name and is a port of the
//! bridge. All hosts are in one segment, 10.1.0.0/16. The client sends packets to VIPs (10.200.0.0/24) via a load
//! balancer, which its kernel selects by a hash of the 4-tuple (ECMP). Servers have the VIPs on `lo` and answer the
//! client directly. With [`TestbedOptions::router_mtu`] a router in front of the client selects the load balancer (see
//! [`crate::uplink`]).

mod options;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::{Context as _, bail};
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey, seeded_rng};

use crate::addresses::{
    AddressFamily, CONTROLLER_ADDRESS, FIRST_IPV4_VIP, HOST_DEVICE, IPV6_VIP_PREFIX, Ipv4Prefix, ROUTED_CLIENTS_PREFIX,
    ROUTER_ADDRESS, SEGMENT_PREFIX_LENGTH, SERVICE_ADDRESS, host_ipv6_address, load_balancer_address,
    load_balancer_name, rack_controller_address, rack_controller_name, server_address, to_ipv6_prefix_text,
};
use crate::instance::TestbedInstance;
use crate::namespace::{NetworkNamespace, run_ip_batch};
use crate::process::{self, TestbedProcess};
use crate::rss_emulation;
use options::{MAX_LOAD_BALANCER_COUNT, MAX_SERVER_COUNT};
pub use options::{TestbedOptions, TestbedVlans};

/// Number of the [`seeded_rng`] stream from which the initial RSS keys of emulated NICs are drawn.
const RNG_STREAM_NIC_KEY: u64 = 3;

/// Running testbed. Dropping this value removes its processes, namespaces, pins and files. After a SIGKILL, the next
/// testbed with the same name removes them.
#[derive(Debug)]
pub struct Testbed {
    options: TestbedOptions,
    instance: TestbedInstance,
    client: NetworkNamespace,
    client_router: Option<NetworkNamespace>,
    server_router: Option<NetworkNamespace>,
    controller: NetworkNamespace,
    switch: NetworkNamespace,
    /// Namespace of load balancer K at index K - 1, or `None` after its removal.
    load_balancers: Vec<Option<NetworkNamespace>>,
    /// Namespace of rack controller K at index K - 1.
    rack_controllers: Vec<NetworkNamespace>,
    /// Namespace of server K at index K - 1, or `None` after its removal.
    servers: Vec<Option<NetworkNamespace>>,
}

/// Returns the reason why this process cannot create a testbed, as one sentence, or `None` if it can.
pub fn find_missing_privilege() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some(
            "the testbed needs root, for network namespaces and BPF programs; without it `make build` and the \
             unprivileged part of `make test` still work"
                .to_owned(),
        );
    }
    // Try this in a new thread, because the new namespace ends with it.
    let namespace_result = std::thread::spawn(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)).join();
    if !matches!(namespace_result, Ok(Ok(()))) {
        return Some("the testbed needs the right to make network namespaces (CAP_SYS_ADMIN)".to_owned());
    }
    let options = libbpf_rs::libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_rs::libbpf_sys::bpf_map_create_opts>() as _,
        ..Default::default()
    };
    let map_result = libbpf_rs::MapHandle::create(libbpf_rs::MapType::Array, None::<&str>, 4, 4, 1, &options);
    map_result.err().map(|error| format!("the testbed needs the right to load BPF programs (CAP_BPF): {error}"))
}

/// Describes the rights that a test needs to create a testbed but lacks, or returns `None` if it has all. scripts/test
/// sets `COREWARD_WITHOUT_RIGHTS` when scripts/capabilities reports missing rights.
pub fn find_missing_testbed_rights() -> Option<String> {
    let reported_missing_rights = std::env::var_os("COREWARD_WITHOUT_RIGHTS");
    reported_missing_rights
        .map(|_| "scripts/capabilities names what is missing".to_owned())
        .or_else(find_missing_privilege)
}

impl Testbed {
    /// Creates a testbed, after removing the remains of a killed one with the same name. Fails without root, when a
    /// running process uses the name, or when a command fails.
    pub fn create(options: TestbedOptions) -> anyhow::Result<Self> {
        options.check_options()?;
        if let Some(privilege_error) = find_missing_privilege() {
            bail!(privilege_error);
        }
        let instance = TestbedInstance::acquire(&options.instance_name)?;
        let mut testbed = Self {
            client: instance.namespace("client"),
            client_router: options.router_mtu.map(|_| instance.namespace("router")),
            server_router: options.has_server_router.then(|| instance.namespace("server-router")),
            controller: instance.namespace("controller"),
            switch: instance.namespace("switch"),
            load_balancers: Vec::new(),
            rack_controllers: Vec::new(),
            servers: Vec::new(),
            options,
            instance,
        };
        testbed.create_switch()?;
        testbed.create_hosts()?;
        for number in 1..=testbed.options.rack_controller_count {
            testbed.add_rack_controller(number)?;
        }
        for _ in 0..testbed.options.load_balancer_count {
            testbed.add_load_balancer()?;
        }
        testbed.route_vips_to_load_balancers(&testbed.load_balancer_numbers())?;
        for _ in 0..testbed.options.server_count {
            testbed.add_server()?;
        }
        Ok(testbed)
    }

    fn create_switch(&self) -> anyhow::Result<()> {
        create_namespaces(&[&self.switch])?;
        // Without spanning tree and snooping, a port forwards immediately, and only the testbed's hosts send packets.
        run_ip_batch(
            Some(&self.switch),
            "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0\nlink set br0 up\n",
        )
    }

    fn create_hosts(&self) -> anyhow::Result<()> {
        create_namespaces(&[&self.controller])?;
        self.connect_to_switch(&self.controller, "controller", 1, 1)?;
        self.set_up_access_port("controller", 0)?;
        let server_subnet_routes = self.build_server_subnet_route_commands();
        run_ip_batch(
            Some(&self.controller),
            &(self.build_address_commands(CONTROLLER_ADDRESS, SEGMENT_PREFIX_LENGTH, HOST_DEVICE)
                + &server_subnet_routes),
        )?;
        self.create_server_router()?;
        self.create_client_and_router()?;
        self.set_up_access_port("client", self.vip_vlan())
    }

    fn add_rack_controller(&mut self, number: u16) -> anyhow::Result<()> {
        let name = rack_controller_name(number);
        let namespace = self.instance.namespace(&name);
        create_namespaces(&[&namespace])?;
        self.connect_to_switch(&namespace, &name, 1, 1)?;
        run_ip_batch(
            Some(&namespace),
            &self.build_address_commands(rack_controller_address(number), SEGMENT_PREFIX_LENGTH, HOST_DEVICE),
        )?;
        self.rack_controllers.push(namespace);
        Ok(())
    }

    /// Adds the host of a load balancer and returns its number, which counts from 1 and is never reused.
    /// [`Testbed::route_vips_to_load_balancers`] can then make the host a next hop for the VIPs. Fails when `ip` or the
    /// kernel rejects a setting.
    pub fn add_load_balancer(&mut self) -> anyhow::Result<u16> {
        let number = self.load_balancers.len() as u16 + 1;
        if number > MAX_LOAD_BALANCER_COUNT {
            bail!("{number} load balancers in a testbed: expected at most {MAX_LOAD_BALANCER_COUNT}");
        }
        let name = load_balancer_name(number);
        let namespace = self.instance.namespace(&name);
        create_namespaces(&[&namespace])?;
        self.connect_to_switch(&namespace, &name, 1, 1)?;
        let ipv4_address = load_balancer_address(number);
        let mut server_subnet_routes = self.build_server_subnet_route_commands();
        if self.options.routes_answers_via_load_balancer {
            server_subnet_routes += &self.build_route_commands(ROUTED_CLIENTS_PREFIX, ROUTER_ADDRESS);
        }
        if self.options.family == AddressFamily::Ipv6 {
            // Without this route and without an XDP program, the kernel would route packets for VIPs
            // (docs/deployment.md).
            server_subnet_routes += &format!("route add blackhole {IPV6_VIP_PREFIX}\n");
        }
        run_ip_batch(
            Some(&namespace),
            &(self.build_address_commands(ipv4_address, SEGMENT_PREFIX_LENGTH, HOST_DEVICE) + &server_subnet_routes),
        )?;
        if self.options.routes_answers_via_load_balancer {
            self.enable_forwarding(&namespace)?;
            namespace.set_sysctls(&[
                ("ipv4/conf/all/send_redirects", "0"),
                (&format!("ipv4/conf/{HOST_DEVICE}/send_redirects"), "0"),
            ])?;
        }
        self.load_balancers.push(Some(namespace));
        rss_emulation::attach_xdp_pass_program(&self.switch, &name)?;
        // veth leaves checksums to a NIC, so a packet that XDP_TX returns would have an incomplete checksum.
        self.set_device_offloads(&self.switch, &name, &["tx", "off"])?;
        self.set_up_trunk_port(number, &name)?;
        Ok(number)
    }

    /// Kills a load balancer's processes and removes its host with all its pins, as in a power failure. Packets to it
    /// are lost until [`Testbed::route_vips_to_load_balancers`] is called. Fails when the load balancer does not exist.
    pub fn remove_load_balancer(&mut self, number: u16) -> anyhow::Result<()> {
        self.load_balancer(number)?;
        // Delete the device first, because a namespace's devices outlive it by some milliseconds.
        run_ip_batch(Some(&self.switch), &format!("link delete {}\n", load_balancer_name(number)))?;
        let removed_host = self.load_balancers[usize::from(number) - 1].take();
        removed_host.expect("just found").remove()?;
        self.remove_load_balancer_pins(number)
    }

    /// Removes all pins of a load balancer, as a restart of its machine does. It then forwards no packets. Fails when a
    /// pin cannot be removed.
    pub fn remove_load_balancer_pins(&self, number: u16) -> anyhow::Result<()> {
        match std::fs::remove_dir_all(self.load_balancer_pin_directory(number)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Adds the host of a server and returns its number, which counts from 1 and is never reused. Fails when a command
    /// fails.
    pub fn add_server(&mut self) -> anyhow::Result<u16> {
        let number = self.servers.len() as u16 + 1;
        if number > MAX_SERVER_COUNT {
            bail!("{number} servers in a testbed: expected at most {MAX_SERVER_COUNT}");
        }
        let server_name = format!("s{number}");
        let namespace = self.instance.namespace(&server_name);
        create_namespaces(&[&namespace])?;
        // Only the load balancer may answer for the VIP, so a server neither answers ARP for the VIP nor uses it as a
        // source. For IPv6 the kernel does neither with an address of another device.
        namespace.set_sysctls(&[("ipv4/conf/all/arp_ignore", "1"), ("ipv4/conf/all/arp_announce", "2")])?;
        // The port needs one more queue than there are cores (see "Why + 2" in rss_emulation.bpf.c).
        let port_queue_count = self.options.core_count + 1;
        if self.options.has_receive_rings {
            self.connect_to_switch(&namespace, &server_name, port_queue_count, port_queue_count)?;
            self.enable_receive_rings(&namespace, &server_name)?;
        } else {
            self.connect_to_switch(&namespace, &server_name, self.options.core_count, port_queue_count)?;
        }
        let mut ip_commands = self.build_server_ip_commands(server_address(number));
        for vip in self.vips() {
            let prefix_length_and_flags = if vip.is_ipv4() { "32" } else { "128 nodad" };
            ip_commands += &format!("address add {vip}/{prefix_length_and_flags} dev lo\n");
        }
        run_ip_batch(Some(&namespace), &ip_commands)?;
        self.servers.push(Some(namespace));
        rss_emulation::attach_rss_emulation(
            &self.switch,
            &server_name,
            &self.emulated_rss_pin_path(number),
            &self.default_nic_rss_config(number)?,
        )?;
        self.set_up_access_port(&server_name, self.server_vlan(number))?;
        Ok(number)
    }

    /// Kills a server's processes and removes its host, as in a power failure. Fails when the server does not exist.
    pub fn remove_server(&mut self, number: u16) -> anyhow::Result<()> {
        self.server(number)?;
        let removed_host = self.servers[usize::from(number) - 1].take();
        removed_host.expect("just found").remove()?;
        Ok(std::fs::remove_dir_all(self.server_pin_directory(number))?)
    }

    /// Connects a host to the switch port `port` by a veth, which has `queues` receive queues at the host. For native
    /// XDP at the host, they must be as many as the port's transmit queues (veth_xdp_set() in drivers/net/veth.c).
    pub(crate) fn connect_to_switch(
        &self,
        host: &NetworkNamespace,
        port: &str,
        queues: u16,
        port_transmit_queues: u16,
    ) -> anyhow::Result<()> {
        self.enable_ipv6(host)?;
        let (host_name, switch) = (host.name(), self.switch.name());
        run_ip_batch(
            None,
            &format!(
                "link add {HOST_DEVICE} netns {host_name} numrxqueues {queues} numtxqueues {queues} type veth \
                 peer name {port} netns {switch} numrxqueues {queues} numtxqueues {port_transmit_queues}\n"
            ),
        )?;
        let is_server = port.strip_prefix('s').is_some_and(|number| number.parse::<u16>().is_ok());
        let bridge_name = if is_server { self.server_bridge_name() } else { "br0" };
        run_ip_batch(Some(&self.switch), &format!("link set {port} master {bridge_name} up\n"))?;
        run_ip_batch(Some(host), &format!("link set lo up\nlink set {HOST_DEVICE} up\n"))
    }

    /// Sets up the receive rings of [`TestbedOptions::has_receive_rings`]. A veth has rings if it has GRO on and its
    /// peer has TSO off (veth_skb_is_eligible_for_gro() in drivers/net/veth.c). The backlog without rings has 1000
    /// packets (net.core.netdev_max_backlog), so that about 40 packets to each of 31 servers overflow it.
    fn enable_receive_rings(&self, host: &NetworkNamespace, port: &str) -> anyhow::Result<()> {
        self.set_device_offloads(&self.switch, port, &["tso", "off"])?;
        self.set_device_offloads(host, HOST_DEVICE, &["gro", "on"])
    }

    pub(crate) fn set_device_offloads(
        &self,
        namespace: &NetworkNamespace,
        device: &str,
        settings: &[&str],
    ) -> anyhow::Result<()> {
        let mut ethtool = Command::new("ethtool");
        ethtool.args(["-K", device]).args(settings);
        self.run_command(namespace, ethtool).map(drop)
    }

    /// Returns the initial RSS settings of a NIC under Linux: a random key, and queue `i mod cores` in entry `i` of the
    /// indirection table (ethtool_rxfh_indir_default() in include/linux/ethtool.h).
    fn default_nic_rss_config(&self, number: u16) -> anyhow::Result<RssConfig> {
        let core_count = u32::from(self.options.core_count);
        let table_queues: Vec<u32> =
            (0..self.options.indirection_entry_count as u32).map(|entry| entry % core_count).collect();
        let rss_key =
            RssKey::random(&mut seeded_rng(self.options.rss_key_seed << 16 | u64::from(number), RNG_STREAM_NIC_KEY));
        Ok(RssConfig { key: rss_key, indirection_table: IndirectionTable::new(&table_queues)? })
    }

    pub fn options(&self) -> &TestbedOptions {
        &self.options
    }

    /// Returns the namespace of the client's host.
    pub fn client(&self) -> &NetworkNamespace {
        &self.client
    }

    /// Returns the namespace of the router in front of the servers, if the testbed has one.
    pub fn server_router(&self) -> Option<&NetworkNamespace> {
        self.server_router.as_ref()
    }

    /// Returns the namespace of the router in front of the client, if the testbed has one.
    pub fn client_router(&self) -> Option<&NetworkNamespace> {
        self.client_router.as_ref()
    }

    /// Returns the namespace of load balancer `number`, counted from 1. Fails when it does not exist or was removed.
    pub fn load_balancer(&self, number: u16) -> anyhow::Result<&NetworkNamespace> {
        let load_balancer_host = find_host_by_number(&self.load_balancers, number);
        load_balancer_host.with_context(|| format!("testbed {} has no load balancer {number}", self.instance.name()))
    }

    pub fn load_balancer_numbers(&self) -> Vec<u16> {
        existing_host_numbers(&self.load_balancers)
    }

    /// Returns the namespace of the controllers' host.
    pub fn controller(&self) -> &NetworkNamespace {
        &self.controller
    }

    /// Returns the namespace of rack controller `number`, counted from 1. Fails when it does not exist.
    pub fn rack_controller(&self, number: u16) -> anyhow::Result<&NetworkNamespace> {
        let rack_controller_host =
            usize::from(number).checked_sub(1).and_then(|position| self.rack_controllers.get(position));
        rack_controller_host.with_context(|| format!("testbed {} has no rack {number}", self.instance.name()))
    }

    pub fn switch(&self) -> &NetworkNamespace {
        &self.switch
    }

    /// Returns the namespace of server `number`, counted from 1. Fails when it does not exist or was removed.
    pub fn server(&self, number: u16) -> anyhow::Result<&NetworkNamespace> {
        find_host_by_number(&self.servers, number)
            .with_context(|| format!("testbed {} has no server {number}", self.instance.name()))
    }

    pub fn server_numbers(&self) -> Vec<u16> {
        existing_host_numbers(&self.servers)
    }

    /// Returns the VIPs of the testbed. Every server has all VIPs.
    pub fn vips(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let family = self.options.family;
        (0..self.options.vip_count).map(move |index| family.nth_vip(index))
    }

    pub fn service_address(&self) -> SocketAddr {
        SocketAddr::new(self.options.family.nth_vip(0), SERVICE_ADDRESS.port())
    }

    /// Returns whether hosts have IPv6 addresses in addition to IPv4 addresses.
    fn has_ipv6(&self) -> bool {
        self.options.family == AddressFamily::Ipv6 || self.options.has_server_router
    }

    /// Returns `ip` commands that add a host's addresses to a device, with an IPv4 prefix of `prefix_length` bits.
    pub(crate) fn build_address_commands(&self, address: Ipv4Addr, prefix_length: u8, device: &str) -> String {
        let ipv4_command = format!("address add {address}/{prefix_length} dev {device}\n");
        match self.has_ipv6() {
            false => ipv4_command,
            true => {
                ipv4_command
                    + &format!("address add {} dev {device} nodad\n", to_ipv6_prefix_text((address, prefix_length)))
            }
        }
    }

    /// Returns `ip` commands that add a route to `prefix` via `router`.
    pub(crate) fn build_route_commands(&self, prefix: Ipv4Prefix, router: Ipv4Addr) -> String {
        let ipv4_command = format!("route add {}/{} via {router}\n", prefix.0, prefix.1);
        match self.has_ipv6() {
            false => ipv4_command,
            true => {
                ipv4_command + &format!("route add {} via {}\n", to_ipv6_prefix_text(prefix), host_ipv6_address(router))
            }
        }
    }

    pub(crate) fn enable_forwarding(&self, host: &NetworkNamespace) -> anyhow::Result<()> {
        host.set_sysctls(&[("ipv4/ip_forward", "1")])?;
        if self.has_ipv6() { host.set_sysctls(&[("ipv6/conf/all/forwarding", "1")]) } else { Ok(()) }
    }

    /// If the testbed uses IPv6, enables it for the devices that a host will get. Link-local addresses are usable
    /// immediately, and router advertisements are ignored.
    pub(crate) fn enable_ipv6(&self, host: &NetworkNamespace) -> anyhow::Result<()> {
        if !self.has_ipv6() {
            return Ok(());
        }
        for device in ["all", "default"] {
            for (setting, value) in [("disable_ipv6", "0"), ("accept_dad", "0"), ("accept_ra", "0"), ("autoconf", "0")]
            {
                host.set_sysctls(&[(&format!("ipv6/conf/{device}/{setting}"), value)])?;
            }
        }
        Ok(())
    }

    /// Returns the directory for the testbed's configurations, logs and results, which is removed with the testbed.
    pub fn directory(&self) -> PathBuf {
        self.instance.directory()
    }

    /// Returns the testbed's directory in the BPF file system, which is removed with the testbed.
    pub fn pin_directory(&self) -> PathBuf {
        self.instance.pin_directory()
    }

    fn server_pin_directory(&self, number: u16) -> PathBuf {
        self.pin_directory().join(format!("s{number}"))
    }

    pub fn load_balancer_pin_directory(&self, number: u16) -> PathBuf {
        self.pin_directory().join(load_balancer_name(number))
    }

    /// Returns the path of the registers in a server's emulated NIC, a pinned map of `struct emulated_rss`.
    pub fn emulated_rss_pin_path(&self, number: u16) -> PathBuf {
        self.server_pin_directory(number).join("emulated_rss")
    }

    pub(crate) fn instance_namespace(&self, role: &str) -> NetworkNamespace {
        self.instance.namespace(role)
    }

    /// Creates a testbed without load balancing, in which the client routes the VIP to the only server. Fails like
    /// [`Testbed::create`].
    pub fn create_without_load_balancing(instance: &str) -> anyhow::Result<Self> {
        let instance = instance.to_owned();
        let testbed = Self::create(TestbedOptions {
            instance_name: instance,
            server_count: 1,
            core_count: 2,
            ..TestbedOptions::default()
        })?;
        testbed.route_vip_to_server_1(testbed.client())?;
        Ok(testbed)
    }

    /// Adds a route on `host` that sends packets for the VIP to server 1. Fails when `ip` fails.
    pub fn route_vip_to_server_1(&self, host: &NetworkNamespace) -> anyhow::Result<()> {
        let mut ip = Command::new("ip");
        ip.args(["route", "add", &format!("{FIRST_IPV4_VIP}/32"), "via", &server_address(1).to_string()]);
        self.run_command(host, ip).map(drop)
    }

    /// Starts a process in the namespace of a host. [`TestbedProcess::spawn`] describes when it is killed. Fails when
    /// the program cannot be started.
    pub fn spawn(&self, namespace: &NetworkNamespace, command: Command) -> anyhow::Result<TestbedProcess> {
        TestbedProcess::spawn(namespace, command)
    }

    /// Runs a program in the namespace of a host until it ends. Fails when the program cannot be started. Fails with
    /// the program's stderr when the program fails.
    pub fn run_command(&self, namespace: &NetworkNamespace, command: Command) -> anyhow::Result<Output> {
        process::run_command_in_namespace(namespace, command)
    }
}

fn find_host_by_number(hosts: &[Option<NetworkNamespace>], number: u16) -> Option<&NetworkNamespace> {
    hosts.get(usize::from(number).checked_sub(1)?)?.as_ref()
}

fn existing_host_numbers(hosts: &[Option<NetworkNamespace>]) -> Vec<u16> {
    (1..).zip(hosts).filter_map(|(number, host)| host.as_ref().map(|_| number)).collect()
}

/// Creates network namespaces that send no unsolicited packets. IPv6 is disabled in them, because it would send
/// neighbour and multicast messages.
pub(crate) fn create_namespaces(namespaces: &[&NetworkNamespace]) -> anyhow::Result<()> {
    let commands: String = namespaces.iter().map(|namespace| format!("netns add {}\n", namespace.name())).collect();
    run_ip_batch(None, &commands)?;
    for namespace in namespaces {
        namespace.set_sysctls(&[
            ("ipv6/conf/all/disable_ipv6", "1"),
            ("ipv6/conf/default/disable_ipv6", "1"),
            ("ipv4/conf/all/rp_filter", "0"),
            ("ipv4/conf/default/rp_filter", "0"),
        ])?;
    }
    Ok(())
}
