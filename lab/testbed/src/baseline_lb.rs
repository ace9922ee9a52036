//! Other load balancers in front of the testbed's servers, for tests that migrate a service to coreward and back.
//!
//! * [`BaselineLbKind::DirectServerReturn`] is IPVS with direct routing where the kernel has it (as LVS and keepalived
//!   use it). Elsewhere nftables treats packets in the same way. A SYN picks a server and creates a table entry. Later
//!   packets follow the entry to the server's MAC address, and answers go straight to the client. The host itself has
//!   the VIP, and refuses packets without an entry.
//! * [`BaselineLbKind::TcpProxy`] is HAProxy. It ends clients' connections itself and opens its own to the servers'
//!   addresses.

use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::addresses::{AddressFamily, HOST_DEVICE, SEGMENT_PREFIX_LENGTH, server_address};
use crate::namespace::{NetworkNamespace, run_ip_batch};
use crate::process::{self, DEFAULT_WAIT_TIMEOUT, TestbedProcess};
use crate::topology::{Testbed, create_namespaces};

/// IPv4 address of the baseline load balancer, which is on the same network segment as the servers.
pub const BASELINE_LB_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 5);
const IPVS_PROC_PATH: &str = "/proc/net/ip_vs";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaselineLbKind {
    /// Load balancer that forwards packets at layer 2. The servers send their answers directly to the client.
    DirectServerReturn,
    /// TCP proxy, which has one connection to the client and a second one to the server.
    TcpProxy,
}

/// Running baseline load balancer. Dropping this value ends its processes and removes its namespace.
#[derive(Debug)]
pub struct BaselineLoadBalancer {
    namespace: NetworkNamespace,
    _proxy_process: Option<TestbedProcess>,
}

impl Testbed {
    /// Starts a baseline load balancer. It gets no packets until [`Testbed::route_vips_to_baseline_lb`] is called.
    /// Fails when a program is missing or a command fails.
    pub fn start_baseline_load_balancer(&self, kind: BaselineLbKind) -> anyhow::Result<BaselineLoadBalancer> {
        let namespace = self.instance_namespace("director");
        create_namespaces(&[&namespace])?;
        self.connect_to_switch(&namespace, "director", 1, 1)?;
        // The host has the VIP without answering ARP for it, so only the router's route directs packets to it.
        namespace.set_sysctls(&[("ipv4/conf/all/arp_ignore", "1"), ("ipv4/conf/all/arp_announce", "2")])?;
        let prefix_length_and_flags = if self.options().family == AddressFamily::Ipv4 { "32" } else { "128 nodad" };
        let vip_address_command =
            format!("address add {}/{prefix_length_and_flags} dev lo\n", self.service_address().ip());
        run_ip_batch(
            Some(&namespace),
            &(self.build_address_commands(BASELINE_LB_ADDRESS, SEGMENT_PREFIX_LENGTH, HOST_DEVICE)
                + &vip_address_command),
        )?;
        let proxy_process = match kind {
            BaselineLbKind::DirectServerReturn if Path::new(IPVS_PROC_PATH).exists() => {
                self.set_up_ipvs_forwarding(&namespace)?;
                None
            }
            BaselineLbKind::DirectServerReturn => {
                self.set_up_nftables_forwarding(&namespace)?;
                None
            }
            BaselineLbKind::TcpProxy => Some(self.start_haproxy(&namespace)?),
        };
        Ok(BaselineLoadBalancer { namespace, _proxy_process: proxy_process })
    }

    /// Routes the VIPs to the baseline load balancer. Fails when the kernel rejects the route.
    pub fn route_vips_to_baseline_lb(&self) -> anyhow::Result<()> {
        self.route_vips_to_hosts(&[BASELINE_LB_ADDRESS])
    }

    fn set_up_ipvs_forwarding(&self, namespace: &NetworkNamespace) -> anyhow::Result<()> {
        let run_ipvsadm = |arguments: String| {
            let mut command = Command::new("ipvsadm");
            command.args(arguments.split_whitespace());
            self.run_command(namespace, command).map(drop)
        };
        let (service, family) = (self.service_address(), self.options().family);
        run_ipvsadm(format!("-A -t {service} -s rr"))?;
        for number in self.server_numbers() {
            let server = SocketAddr::new(family.host_address(server_address(number)), service.port());
            run_ipvsadm(format!("-a -t {service} -r {server} -g"))?;
        }
        Ok(())
    }

    fn set_up_nftables_forwarding(&self, namespace: &NetworkNamespace) -> anyhow::Result<()> {
        let servers = self.server_numbers();
        let server_count = servers.len();
        let balancer_mac = read_mac_address(namespace)?;
        let service = self.service_address();
        // nft has too few registers for an IPv6 address, a port and a MAC address, so the key omits the client's
        // address.
        let (ip, flow, key) = match service.is_ipv4() {
            true => ("ip", "ip saddr . tcp sport", "ipv4_addr . inet_service"),
            false => ("ip6", "tcp sport", "inet_service"),
        };
        let service_packet_match = format!("{ip} daddr {} tcp dport {}", service.ip(), service.port());
        let mut rules = String::new();
        for (position, number) in servers.into_iter().enumerate() {
            let mac = read_mac_address(self.server(number)?)?;
            writeln!(
                rules,
                "    {service_packet_match} tcp flags & (syn | ack) == syn jhash {flow} mod {server_count} seed 1 \
                 {position} add @connections {{ {flow} : {mac} }}"
            )?;
        }
        let ruleset = format!(
            "table netdev director {{
  map connections {{ type {key} : ether_addr; flags dynamic; size 65536; }}
  chain arrives {{
    type filter hook ingress device \"{HOST_DEVICE}\" priority 0;
{rules}    {service_packet_match} ether saddr set {balancer_mac} ether daddr set {flow} map @connections fwd to \
             \"{HOST_DEVICE}\"
  }}
}}
"
        );
        let ruleset_path = self.directory().join("director.nft");
        fs::write(&ruleset_path, &ruleset)?;
        let mut nft = Command::new("nft");
        nft.arg("-f").arg(ruleset_path);
        self.run_command(namespace, nft).map(drop).with_context(|| ruleset)
    }

    fn start_haproxy(&self, namespace: &NetworkNamespace) -> anyhow::Result<TestbedProcess> {
        let service = self.service_address();
        let mut haproxy_config = format!(
            "global\n    nbthread 1\n    maxconn 4000\ndefaults\n    mode tcp\n    timeout connect 5s\n    \
             timeout client 10m\n    timeout server 10m\nfrontend web\n    bind {service}\n    default_backend \
             servers\n\
             backend servers\n    balance roundrobin\n"
        );
        for number in self.server_numbers() {
            writeln!(haproxy_config, "    server s{number} {}:{}", server_address(number), service.port())?;
        }
        let configuration_path = self.directory().join("haproxy.cfg");
        fs::write(&configuration_path, haproxy_config)?;
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(configuration_path);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut haproxy = self.spawn(namespace, command).context("haproxy (Debian package haproxy)")?;
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        while namespace.run_within(|| Ok(std::net::TcpStream::connect(service).is_err()))? {
            if haproxy.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("haproxy does not listen on {service}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(haproxy)
    }
}

impl BaselineLoadBalancer {
    pub fn namespace(&self) -> &NetworkNamespace {
        &self.namespace
    }
}

impl Drop for BaselineLoadBalancer {
    fn drop(&mut self) {
        // The namespace's devices outlive it by some milliseconds, during which the switch's port name stays occupied.
        let link_deletion = run_ip_batch(Some(&self.namespace), &format!("link delete {HOST_DEVICE}\n"));
        if let Err(error) = link_deletion.and(self.namespace.remove()) {
            tracing::warn!(
                event = "namespace-left",
                namespace = self.namespace.name(),
                error = format!("{error:#}"),
                "cannot remove the baseline load balancer's network namespace"
            );
        }
    }
}

fn read_mac_address(namespace: &NetworkNamespace) -> anyhow::Result<String> {
    let mut ip = Command::new("ip");
    ip.args(["-json", "link", "show", HOST_DEVICE]);
    let output = process::run_command_in_namespace(namespace, ip)?;
    let links: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    Ok(links[0]["address"].as_str().context("ip names no MAC address")?.to_owned())
}
