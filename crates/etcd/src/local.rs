//! Local etcd processes for tests.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalEtcdMember {
    pub name: String,
    pub client_address: SocketAddr,
    /// Address at which the member accepts connections from other members.
    pub peer_address: SocketAddr,
}

/// TLS files (PEM) for a member's connections with clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientTlsFiles {
    /// Path of the file with the certificates of the authorities that may sign clients' certificates.
    pub ca_file: PathBuf,
    pub certificate_file: PathBuf,
    pub key_file: PathBuf,
}

impl LocalEtcdMember {
    /// Returns the `count` members of an etcd cluster at `address`. Each uses two ports, and all ports are consecutive.
    pub fn local_cluster_members(count: u16, address: IpAddr, first_port: u16) -> Vec<Self> {
        let member_with_number = |number: u16| Self {
            name: format!("etcd{}", number + 1),
            client_address: (address, first_port + 2 * number).into(),
            peer_address: (address, first_port + 2 * number + 1).into(),
        };
        (0..count).map(member_with_number).collect()
    }

    /// Returns the only member of a new cluster, which uses free ports of this host.
    pub fn single_member() -> std::io::Result<Self> {
        let [client_address, peer_address] = [find_free_address()?, find_free_address()?];
        Ok(Self { name: "etcd1".to_owned(), client_address, peer_address })
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.client_address)
    }

    pub fn secure_endpoint(&self) -> String {
        format!("https://{}", self.client_address)
    }

    /// Returns the command that starts this member of a cluster. Its data persists below `directory`.
    pub fn build_start_command(&self, cluster_members: &[LocalEtcdMember], directory: &Path) -> Command {
        self.build_start_command_at_endpoint(cluster_members, directory, &self.endpoint())
    }

    pub fn build_secure_start_command(
        &self,
        cluster_members: &[LocalEtcdMember],
        directory: &Path,
        tls: &ClientTlsFiles,
    ) -> Command {
        let mut command = self.build_start_command_at_endpoint(cluster_members, directory, &self.secure_endpoint());
        command.arg("--client-cert-auth");
        for (option, file) in
            [("--trusted-ca-file", &tls.ca_file), ("--cert-file", &tls.certificate_file), ("--key-file", &tls.key_file)]
        {
            command.arg(option).arg(file);
        }
        command
    }

    fn build_start_command_at_endpoint(
        &self,
        cluster_members: &[LocalEtcdMember],
        directory: &Path,
        endpoint: &str,
    ) -> Command {
        let initial_cluster: Vec<String> =
            cluster_members.iter().map(|member| format!("{}=http://{}", member.name, member.peer_address)).collect();
        let mut command = Command::new("etcd");
        command.args(["--name", &self.name, "--data-dir"]).arg(directory.join(&self.name));
        command.args(["--listen-client-urls", endpoint, "--advertise-client-urls", endpoint]);
        let peer_url = format!("http://{}", self.peer_address);
        command.args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url]);
        command.args(["--initial-cluster", &initial_cluster.join(",")]);
        // Tests kill processes only, so data in the page cache is not lost.
        command.arg("--unsafe-no-fsync");
        // The intervals are short because tests wait for elections.
        command.args(["--heartbeat-interval", "50", "--election-timeout", "500"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

/// Ports outside of `ip_local_port_range` (32768 to 60999), so that the kernel does not assign them to other processes.
const TEST_ETCD_PORT_RANGE: std::ops::Range<u16> = 12_000..32_000;

/// Returns a loopback address with a free port that this process has not returned before. Processes search from
/// different first ports.
fn find_free_address() -> std::io::Result<SocketAddr> {
    static NEXT_MEMBER_PORT_OFFSET: AtomicU32 = AtomicU32::new(0);
    let port_count = TEST_ETCD_PORT_RANGE.len() as u32;
    for _ in TEST_ETCD_PORT_RANGE {
        let port_offset =
            std::process::id().wrapping_mul(16) % port_count + NEXT_MEMBER_PORT_OFFSET.fetch_add(1, Ordering::Relaxed);
        let port = TEST_ETCD_PORT_RANGE.start + (port_offset % port_count) as u16;
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            return listener.local_addr();
        }
    }
    Err(std::io::Error::new(std::io::ErrorKind::AddrInUse, format!("no port of {TEST_ETCD_PORT_RANGE:?} is free")))
}
