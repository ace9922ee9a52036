//! Stock Knot DNS on a server, which is a UDP service with one SO_REUSEPORT socket per worker and unaware of coreward.

use std::fs;
use std::net::{SocketAddrV4, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use coreward_load::dns::{self, DnsQuery};

use crate::addresses::FIRST_IPV4_VIP;
use crate::topology::Testbed;
use crate::{DEFAULT_WAIT_TIMEOUT, TestbedProcess};

/// Address (the first VIP) and port of the DNS service.
pub const DNS_SERVICE_ADDRESS: SocketAddrV4 = SocketAddrV4::new(FIRST_IPV4_VIP, 53);
/// DNS query that knotd answers from memory.
pub const PLAIN_DNS_QUERY: &str = "www.plain.test/A";
/// DNS query whose answer knotd signs on demand (RSA, 2048 bits).
pub const SIGNED_DNS_QUERY: &str = "www.signed.test/A/dnssec";
/// Path of knotd in Debian, which is absolute because PATH may lack `/usr/sbin`.
pub const KNOTD_PATH: &str = "/usr/sbin/knotd";

const ZONE_FILE_TEXT: &str = "$TTL 300
@ SOA ns hostmaster 1 3600 600 86400 300
@ NS ns
ns A 192.0.2.1
www A 192.0.2.2
";

/// Running knotd process on a server. Dropping this value ends the process.
#[derive(Debug)]
pub struct KnotServer {
    process: TestbedProcess,
}

impl Testbed {
    /// Starts knotd on server `number` with `worker_count` UDP workers, and waits until it answers [`PLAIN_DNS_QUERY`]
    /// and [`SIGNED_DNS_QUERY`]. Fails when the server or knotd does not exist. Fails with knotd's output if knotd does
    /// not answer in time.
    pub fn start_knot(&self, number: u16, worker_count: u16) -> anyhow::Result<KnotServer> {
        let directory = self.directory().join(format!("knot-s{number}"));
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("zone"), ZONE_FILE_TEXT)?;
        let configuration_path = directory.join("knot.conf");
        fs::write(&configuration_path, build_knot_configuration_text(&directory, worker_count))?;
        let log_path = directory.join("knot.log");
        let log_file = fs::File::create(&log_path)?;
        let mut command = Command::new(KNOTD_PATH);
        command.arg("-c").arg(&configuration_path).stdin(Stdio::null()).stdout(log_file.try_clone()?).stderr(log_file);
        let process = self.spawn(self.server(number)?, command).context("knotd (Debian package knot)")?;
        let mut knot_server = KnotServer { process };
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        let server = self.server(number)?;
        while !server
            .run_within(|| Ok(does_query_succeed(PLAIN_DNS_QUERY)? && does_query_succeed(SIGNED_DNS_QUERY)?))
            .unwrap_or(false)
        {
            let exit_status = knot_server.process.try_wait()?;
            if exit_status.is_some() || Instant::now() > deadline {
                let log_text = fs::read_to_string(&log_path).unwrap_or_default();
                bail!("knotd does not answer ({exit_status:?}):\n{}", log_text.trim());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(knot_server)
    }
}

/// Sends a DNS query to the server in the calling thread's namespace. Returns whether the server answers without an
/// error code.
fn does_query_succeed(query: &str) -> anyhow::Result<bool> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(DNS_SERVICE_ADDRESS)?;
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    let mut datagram = Vec::new();
    query.parse::<DnsQuery>()?.write_datagram(1, &mut datagram);
    socket.send(&datagram)?;
    let mut buffer = [0; 4096];
    let length = socket.recv(&mut buffer)?;
    Ok(dns::parse_response_id_and_success(&buffer[..length]) == Some((1, true)))
}

fn build_knot_configuration_text(directory: &Path, worker_count: u16) -> String {
    let directory = directory.display();
    format!(
        "server:
    rundir: {directory}
    listen: {}@{}
    udp-workers: {worker_count}
    tcp-workers: 1
    background-workers: 1
log:
  - target: stderr
    any: warning
database:
    storage: {directory}
policy:
  - id: rsa
    algorithm: rsasha256
    ksk-size: 2048
mod-onlinesign:
  - id: rsa
    policy: rsa
template:
  - id: default
    storage: {directory}
    file: zone
zone:
  - domain: plain.test
  - domain: signed.test
    module: mod-onlinesign/rsa
",
        DNS_SERVICE_ADDRESS.ip(),
        DNS_SERVICE_ADDRESS.port()
    )
}
