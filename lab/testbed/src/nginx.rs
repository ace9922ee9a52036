//! Stock nginx on a server, as an application that must not notice coreward.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;

use crate::addresses::{SERVICE_ADDRESS, server_address};
use crate::topology::Testbed;
use crate::{DEFAULT_WAIT_TIMEOUT, TestbedProcess};

/// Size of the file at [`LARGE_FILE_PATH`] (bytes).
pub const LARGE_FILE_BYTES: usize = 1_000_000;
pub const LARGE_FILE_PATH: &str = "/large";
/// Path at which nginx sends the large file at 4 kB/s, which keeps a connection busy for minutes.
pub const SLOW_FILE_PATH: &str = "/slow";
/// Path whose response contains the server's number and the worker's process id.
pub const WORKER_IDENTITY_PATH: &str = "/who";

/// Running nginx processes on a server. Dropping this value ends the processes.
#[derive(Debug)]
pub struct NginxServer {
    master_process: TestbedProcess,
    nginx_directory: PathBuf,
}

impl Testbed {
    /// Starts nginx on server `number` with one `reuseport` worker per core. It listens on port 80 of all VIPs and of
    /// the server's address. Fails when the server does not exist. Fails with nginx's output when nginx does not start.
    pub fn start_nginx(&self, number: u16) -> anyhow::Result<NginxServer> {
        let namespace = self.server(number)?;
        let directory = self.directory().join(format!("nginx-s{number}"));
        fs::create_dir_all(directory.join("www"))?;
        // The contents differ at every offset, so that misplaced bytes are detected.
        let large_file: Vec<u8> =
            (0..LARGE_FILE_BYTES as u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
        fs::write(directory.join("www").join(LARGE_FILE_PATH.trim_start_matches('/')), large_file)?;
        let mut nginx = NginxServer {
            master_process: self.spawn_nginx(namespace, number, &directory)?,
            nginx_directory: directory,
        };
        nginx.wait_for_workers(usize::from(self.options().core_count))?;
        Ok(nginx)
    }

    fn spawn_nginx(
        &self,
        namespace: &crate::NetworkNamespace,
        number: u16,
        directory: &std::path::Path,
    ) -> anyhow::Result<TestbedProcess> {
        let configuration_path = directory.join("nginx.conf");
        fs::write(
            &configuration_path,
            self.build_nginx_configuration_text(number, directory, self.options().core_count),
        )?;
        let mut command = Command::new("nginx");
        command.arg("-c").arg(&configuration_path).arg("-e").arg(directory.join("error.log"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.spawn(namespace, command).context("nginx (Debian package nginx-light)")
    }

    fn build_nginx_configuration_text(&self, number: u16, directory: &std::path::Path, worker_count: u16) -> String {
        let directory = directory.display();
        let listen_addresses = self.vips().chain([self.options().family.host_address(server_address(number))]);
        let listen_sockets = listen_addresses.map(|address| SocketAddr::new(address, SERVICE_ADDRESS.port()));
        let listen_lines: String =
            listen_sockets.map(|address| format!("        listen {address} reuseport;\n")).collect();
        let temporary_path_lines: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("    {kind}_temp_path {directory}/{kind};\n"))
            .concat();
        format!(
            "user root;
daemon off;
worker_processes {worker_count};
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
{temporary_path_lines}    server {{
{listen_lines}        root {directory}/www;
        location = {WORKER_IDENTITY_PATH} {{ return 200 \"{number} $pid\\n\"; }}
        location = {SLOW_FILE_PATH} {{ alias {directory}/www{LARGE_FILE_PATH}; limit_rate 4k; }}
    }}
}}
"
        )
    }
}

impl NginxServer {
    /// Returns the process id of the master process.
    pub fn master_pid(&self) -> u32 {
        self.master_process.pid()
    }

    /// Returns the process ids of the workers.
    pub fn worker_pids(&self) -> Vec<u32> {
        let children_path = format!("/proc/{0}/task/{0}/children", self.master_pid());
        let children_pids = fs::read_to_string(children_path).unwrap_or_default();
        children_pids.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Makes nginx reload its configuration with `worker_count` workers. Fails when the configuration cannot be written
    /// or the master has ended.
    pub fn reload_configuration(&self, testbed: &Testbed, server_number: u16, worker_count: u16) -> anyhow::Result<()> {
        let configuration_text =
            testbed.build_nginx_configuration_text(server_number, &self.nginx_directory, worker_count);
        fs::write(self.nginx_directory.join("nginx.conf"), configuration_text)?;
        self.master_process.send_signal(Signal::SIGHUP)
    }

    fn wait_for_workers(&mut self, worker_count: usize) -> anyhow::Result<()> {
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        // The sockets listen before the first worker is started (ngx_init_cycle).
        while self.worker_pids().len() < worker_count {
            let exit_status = self.master_process.try_wait()?;
            if exit_status.is_some() || Instant::now() > deadline {
                let error_log = fs::read_to_string(self.nginx_directory.join("error.log")).unwrap_or_default();
                bail!("nginx did not start ({exit_status:?}): {}", error_log.trim());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for NginxServer {
    fn drop(&mut self) {
        // Terminate the master regularly, because killing it would leave the workers running.
        let _ = self.master_process.terminate(Duration::from_secs(5));
    }
}
