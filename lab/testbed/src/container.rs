//! nginx in its own network namespace behind a bridge and nftables' DNAT, like a container of Docker or Kubernetes.

use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::ensure;

use crate::DEFAULT_WAIT_TIMEOUT;
use crate::addresses::SERVICE_ADDRESS;
use crate::process::TestbedProcess;
use crate::topology::Testbed;

const CONTAINER_ADDRESS: Ipv4Addr = Ipv4Addr::new(172, 17, 0, 2);
const CONTAINER_PORT: u16 = 8080;
/// Body of the container's HTTP responses.
pub const CONTAINER_RESPONSE_BODY: &str = "contained";

/// Container that serves the testbed's service on one server. Its network namespace ends with its process.
#[derive(Debug)]
pub struct ServiceContainer {
    server_number: u16,
    nginx_process: TestbedProcess,
}

impl Testbed {
    /// Starts a container at server number `server`, which forwards the service's packets to it. Fails when the server
    /// does not exist, or when a command fails.
    pub fn start_container(&self, server: u16) -> anyhow::Result<ServiceContainer> {
        let directory = self.directory().join(format!("container-s{server}"));
        fs::create_dir_all(&directory)?;
        let directory_path = directory.display();
        let temporary_path_options: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {directory_path}/{kind}; "))
            .concat();
        let nginx_config = format!(
            "user root; daemon off; worker_processes 1; pid {directory_path}/nginx.pid; error_log \
             {directory_path}/error.log; lock_file {directory_path}/lock; events {{ }} http {{ access_log off; \
             {temporary_path_options} server {{ listen {CONTAINER_PORT}; location / {{ return 200 \
             \"{CONTAINER_RESPONSE_BODY}\"; }} }} }}"
        );
        fs::write(directory.join("nginx.conf"), nginx_config)?;
        let mut command = Command::new("unshare");
        command.args(["--net", "nginx", "-c"]).arg(directory.join("nginx.conf"));
        command.arg("-e").arg(directory.join("error.log"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let nginx_process = self.spawn(self.server(server)?, command)?;
        let container = ServiceContainer { server_number: server, nginx_process };
        self.server(server)?.run_within(|| container.wait_for_namespace())?;
        let mut connect_command = Command::new("sh");
        connect_command.args(["-c", &container.build_network_setup_script()]);
        self.run_command(self.server(server)?, connect_command)?;
        Ok(container)
    }
}

impl ServiceContainer {
    fn wait_for_namespace(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        let host_namespaces = [fs::read_link("/proc/self/ns/net")?, fs::read_link("/proc/thread-self/ns/net")?];
        while host_namespaces.contains(&fs::read_link(format!("/proc/{}/ns/net", self.nginx_process.pid()))?) {
            ensure!(
                Instant::now() < deadline,
                "the container of server {} has no network namespace",
                self.server_number
            );
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn build_network_setup_script(&self) -> String {
        let (pid, vip, port) = (self.nginx_process.pid(), SERVICE_ADDRESS.ip(), SERVICE_ADDRESS.port());
        format!(
            "set -e
            ip link add br0 type bridge
            ip address add 172.17.0.1/16 dev br0
            ip link set br0 up
            ip link add port type veth peer name eth0 netns {pid}
            ip link set port master br0 up
            nsenter --net=/proc/{pid}/ns/net sh -c 'ip link set lo up
                ip address add {CONTAINER_ADDRESS}/16 dev eth0; ip link set eth0 up; ip route add default via \
             172.17.0.1'
            sysctl -q -w net.ipv4.ip_forward=1
            nft add table ip nat
            nft 'add chain ip nat prerouting {{ type nat hook prerouting priority dstnat; }}'
            nft add rule ip nat prerouting ip daddr {vip} tcp dport {port} dnat to {CONTAINER_ADDRESS}:{CONTAINER_PORT}"
        )
    }

    /// Sets a sysctl in the container's network namespace. Fails when nsenter(1) or the command in it fails.
    pub fn set_sysctl(&self, testbed: &Testbed, name: &str, value: u32) -> anyhow::Result<()> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.nginx_process.pid()));
        command.args(["sysctl", "-q", "-w", &format!("{name}={value}")]);
        testbed.run_command(testbed.server(self.server_number)?, command).map(drop)
    }
}
