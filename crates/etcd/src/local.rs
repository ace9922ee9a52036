//! An etcd of one's own, for tests: the commands that start its members.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

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

    /// For `endpoints`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.client)
    }

    /// Starts it as one of `members`, with its data in a directory below `directory`: the same one again when it is started
    /// again.
    pub fn command(&self, members: &[Member], directory: &Path) -> Command {
        let initial: Vec<String> =
            members.iter().map(|member| format!("{}=http://{}", member.name, member.peer)).collect();
        let mut command = Command::new("etcd");
        command.args(["--name", &self.name, "--data-dir"]).arg(directory.join(&self.name));
        for (option, address) in [("client-urls", self.client), ("peer-urls", self.peer)] {
            let url = format!("http://{address}");
            let advertise = if option == "client-urls" { "advertise" } else { "initial-advertise" };
            command.args([&format!("--listen-{option}"), &url, &format!("--{advertise}-{option}"), &url]);
        }
        command.args(["--initial-cluster", &initial.join(",")]);
        // Sooner than in earnest: tests wait for it.
        command.args(["--heartbeat-interval", "50", "--election-timeout", "500"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}
