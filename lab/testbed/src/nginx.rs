//! Stock nginx on a server: an application that must not notice coreward.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;

use crate::addresses::{SERVICE_ADDRESS, server_address};
use crate::topology::Testbed;
use crate::{Process, TIMEOUT};

/// Size of the file at [`LARGE_FILE`] (bytes).
pub const LARGE_FILE_BYTES: usize = 1_000_000;
pub const LARGE_FILE: &str = "/large";
/// Path by which the file at [`LARGE_FILE`] is sent at 4 kB/s, which keeps a connection busy for minutes.
pub const SLOW_FILE: &str = "/slow";
/// Path whose response contains the server's number and the worker's process id.
pub const WORKER_PATH: &str = "/who";

/// Running nginx on a server; dropping it ends the processes.
#[derive(Debug)]
pub struct Nginx {
    master: Process,
    directory: PathBuf,
}

impl Testbed {
    /// Starts nginx on server `number` with one `reuseport` worker per core. It listens on port 80 of all VIPs and of
    /// the server's address. Fails without the server, or when nginx does not start; the error has its output.
    pub fn start_nginx(&self, number: u16) -> anyhow::Result<Nginx> {
        let namespace = self.server(number)?;
        let directory = self.directory().join(format!("nginx-s{number}"));
        fs::create_dir_all(directory.join("www"))?;
        // Content that differs at every offset, so that misplaced bytes are detected.
        let large: Vec<u8> = (0..LARGE_FILE_BYTES as u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
        fs::write(directory.join("www").join(LARGE_FILE.trim_start_matches('/')), large)?;
        let mut nginx = Nginx { master: self.spawn_nginx(namespace, number, &directory)?, directory };
        nginx.wait_for_workers(usize::from(self.options().cores))?;
        Ok(nginx)
    }

    fn spawn_nginx(
        &self,
        namespace: &crate::Namespace,
        number: u16,
        directory: &std::path::Path,
    ) -> anyhow::Result<Process> {
        let configuration = directory.join("nginx.conf");
        fs::write(&configuration, self.nginx_configuration(number, directory, self.options().cores))?;
        let mut command = Command::new("nginx");
        command.arg("-c").arg(&configuration).arg("-e").arg(directory.join("error.log"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.spawn(namespace, command).context("nginx (Debian package nginx-light)")
    }

    fn nginx_configuration(&self, number: u16, directory: &std::path::Path, workers: u16) -> String {
        let directory = directory.display();
        let addresses = self.vips().chain([self.options().family.address(server_address(number))]);
        let listen = addresses.map(|address| SocketAddr::new(address, SERVICE_ADDRESS.port()));
        let listen: String = listen.map(|address| format!("        listen {address} reuseport;\n")).collect();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("    {kind}_temp_path {directory}/{kind};\n"))
            .concat();
        format!(
            "user root;
daemon off;
worker_processes {workers};
pid {directory}/nginx.pid;
error_log {directory}/error.log warn;
lock_file {directory}/nginx.lock;
events {{ worker_connections 16384; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_timeout 600s;
    keepalive_requests 100000000;
{temporary}    server {{
{listen}        root {directory}/www;
        location = {WORKER_PATH} {{ return 200 \"{number} $pid\\n\"; }}
        location = {SLOW_FILE} {{ alias {directory}/www{LARGE_FILE}; limit_rate 4k; }}
    }}
}}
"
        )
    }
}

impl Nginx {
    /// Returns the process id of the master process.
    pub fn pid(&self) -> u32 {
        self.master.pid()
    }

    /// Returns the process ids of the workers.
    pub fn workers(&self) -> Vec<u32> {
        let children = format!("/proc/{0}/task/{0}/children", self.pid());
        let children = fs::read_to_string(children).unwrap_or_default();
        children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Reloads nginx with `workers` workers. Fails when the configuration cannot be written or the master has ended.
    pub fn reload(&self, testbed: &Testbed, number: u16, workers: u16) -> anyhow::Result<()> {
        let configuration = testbed.nginx_configuration(number, &self.directory, workers);
        fs::write(self.directory.join("nginx.conf"), configuration)?;
        self.master.signal(Signal::SIGHUP)
    }

    fn wait_for_workers(&mut self, count: usize) -> anyhow::Result<()> {
        let end = Instant::now() + *TIMEOUT;
        // The sockets listen before the first worker is started (ngx_init_cycle).
        while self.workers().len() < count {
            let ended = self.master.try_wait()?;
            if ended.is_some() || Instant::now() > end {
                let log = fs::read_to_string(self.directory.join("error.log")).unwrap_or_default();
                bail!("nginx did not start ({ended:?}): {}", log.trim());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // Killing the master would leave the workers running.
        let _ = self.master.terminate(Duration::from_secs(5));
    }
}
