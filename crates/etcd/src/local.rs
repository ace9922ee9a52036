//! An etcd of one's own, for tests: the commands that start its members.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Where one member listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Different for each.
    pub name: String,
    /// For clients.
    pub client: SocketAddr,
    /// For the other members.
    pub peer: SocketAddr,
}

/// What a member shows to clients, and whom it lets in (PEM).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientTls {
    /// Without a certificate that one of these authorities has signed nobody comes in.
    pub ca: PathBuf,
    /// Its own.
    pub certificate: PathBuf,
    /// The key to it.
    pub key: PathBuf,
}

impl Member {
    /// `count` members at this address; each has two ports, from `port` on.
    pub fn several(count: u16, address: IpAddr, port: u16) -> Vec<Self> {
        let member = |number: u16| Self {
            name: format!("etcd{}", number + 1),
            client: (address, port + 2 * number).into(),
            peer: (address, port + 2 * number + 1).into(),
        };
        (0..count).map(member).collect()
    }

    /// The only one, on ports of this host that are free now.
    ///
    /// # Errors
    /// When there is no free port.
    pub fn alone() -> std::io::Result<Self> {
        let [client, peer] = [free_port()?, free_port()?];
        Ok(Self { name: "etcd1".to_owned(), client, peer })
    }

    /// For `endpoints`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.client)
    }

    /// For `endpoints`, of one that speaks TLS.
    pub fn secure_endpoint(&self) -> String {
        format!("https://{}", self.client)
    }

    /// Starts it as one of `members`, with its data in a directory below `directory`: the same one again when it is started
    /// again.
    pub fn command(&self, members: &[Member], directory: &Path) -> Command {
        self.command_for(members, directory, &self.endpoint())
    }

    /// The same, with TLS for clients.
    pub fn secure_command(&self, members: &[Member], directory: &Path, tls: &ClientTls) -> Command {
        let mut command = self.command_for(members, directory, &self.secure_endpoint());
        command.arg("--client-cert-auth");
        for (option, file) in
            [("--trusted-ca-file", &tls.ca), ("--cert-file", &tls.certificate), ("--key-file", &tls.key)]
        {
            command.arg(option).arg(file);
        }
        command
    }

    fn command_for(&self, members: &[Member], directory: &Path, endpoint: &str) -> Command {
        let initial: Vec<String> =
            members.iter().map(|member| format!("{}=http://{}", member.name, member.peer)).collect();
        let mut command = Command::new("etcd");
        command.args(["--name", &self.name, "--data-dir"]).arg(directory.join(&self.name));
        command.args(["--listen-client-urls", endpoint, "--advertise-client-urls", endpoint]);
        let peer = format!("http://{}", self.peer);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &initial.join(",")]);
        // Members are killed, never the machine: what they wrote stays in the page cache, and no disk delays them.
        command.arg("--unsafe-no-fsync");
        // Sooner than in earnest: tests wait for it.
        command.args(["--heartbeat-interval", "50", "--election-timeout", "500"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

/// What [`free_port`] hands out: the kernel gives none of these to whoever asks for any port (`ip_local_port_range`, 32768 to
/// 60999 if nobody has set it), so that until etcd listens nobody takes them.
const PORTS: std::ops::Range<u16> = 12_000..32_000;

/// A port that is free, and that this process has not handed out before. Where the next process begins is elsewhere.
fn free_port() -> std::io::Result<SocketAddr> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let count = PORTS.len() as u32;
    for _ in PORTS {
        let position = std::process::id().wrapping_mul(16) % count + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + (position % count) as u16;
        if let Ok(free) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            return free.local_addr();
        }
    }
    Err(std::io::Error::new(std::io::ErrorKind::AddrInUse, format!("no port of {PORTS:?} is free")))
}
