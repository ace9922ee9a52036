//! Environment of the soak test. Server, dispatch and load generator are each a process of the real command.

use std::fs;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_dataplane::dispatch::cgroup2_mount_point;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{Link, MapCore as _, MapFlags, MapHandle};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::addresses::SERVICE_ADDRESS;
use crate::fleet::{coreward_binary_path, lab_binary_path};
use crate::key_value::handle::KeyValueServer;
use crate::process::{DEFAULT_WAIT_TIMEOUT, TestbedProcess};
use crate::topology::Testbed;

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/drop_counter.skel.rs"));
}

pub const WORKER_COUNT: u64 = 4;
/// First source port of the load generator's requests. Spoofed responses are sent to this port.
pub const FIRST_LOAD_PORT: u16 = 20_000;
pub const LOAD_FLOW_COUNT: u16 = 64;
/// Number of requests per second that the load generator sends. With the service time [`LOAD_SERVICE_TIME_ARGUMENT`],
/// they use a third of all workers' capacity. Even without one worker, queues stay short.
const LOAD_RATE_RPS: &str = "1200";
const LOAD_SERVICE_TIME_ARGUMENT: &str = "GET=1000";
/// Size of each worker's receive buffer (bytes). A flood can fill the buffer, but the requests that arrive while a
/// worker is stopped fit into it.
const WORKER_RECEIVE_BUFFER_BYTES: &str = "65536";
/// Timeout of the load generator's requests (s). It exceeds the time for which a worker is stopped, so a request counts
/// as lost only if no worker answers it.
const LOAD_REQUEST_TIMEOUT_S: &str = "6";

#[derive(Debug)]
pub struct SoakTestEnv {
    purged_datagram_counter: MapHandle,
    _purge_link: Link,
    dispatch_daemon: Option<TestbedProcess>,
    key_value_server: KeyValueServer,
    dispatch_config_path: PathBuf,
    testbed: Testbed,
}

impl SoakTestEnv {
    /// Starts the key-value server, its drop counter, and `coreward dispatch`. Fails when a process cannot be started.
    pub fn start(instance: &str) -> anyhow::Result<Self> {
        let testbed = Testbed::create_without_load_balancing(instance)?;
        let worker_count = WORKER_COUNT.to_string();
        let server_options =
            ["--paced", "--restart", "--service-us", LOAD_SERVICE_TIME_ARGUMENT, "--workers", &worker_count];
        let key_value_server = testbed.start_key_value_server(
            1,
            &[&server_options[..], &["--receive-buffer", WORKER_RECEIVE_BUFFER_BYTES]].concat(),
        )?;
        let dispatch_config_path = testbed.directory().join("dispatch.toml");
        // The response timeout is half of the time after which the ledger must be exact.
        let dispatch_config = format!(
            "pin_directory = \"{}\"\n[[service]]\nlisten = \"{SERVICE_ADDRESS}\"\nresponse_timeout = \"500ms\"\n\
             request_id = {{ offset = 4, bytes = 4 }}\n",
            testbed.pin_directory().join("dispatch").display()
        );
        fs::write(&dispatch_config_path, dispatch_config)
            .with_context(|| dispatch_config_path.display().to_string())?;
        let (purged_counter, link) = attach_datagram_drop_counter(&testbed)?;
        let mut env = Self {
            purged_datagram_counter: purged_counter,
            _purge_link: link,
            dispatch_daemon: None,
            key_value_server,
            dispatch_config_path,
            testbed,
        };
        env.attach_dispatch(WORKER_COUNT)?;
        Ok(env)
    }

    pub fn testbed(&self) -> &Testbed {
        &self.testbed
    }

    pub fn key_value_server(&self) -> &KeyValueServer {
        &self.key_value_server
    }

    fn build_dispatch_command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(coreward_binary_path()?);
        command.args(["dispatch", "--config"]).arg(&self.dispatch_config_path);
        Ok(command)
    }

    /// Starts `coreward dispatch` and waits until `worker_count` workers get requests. Fails when it cannot be started,
    /// or does not find all workers in time.
    pub fn attach_dispatch(&mut self, worker_count: u64) -> anyhow::Result<()> {
        let mut command = self.build_dispatch_command()?;
        command.env("RUST_LOG", "error");
        self.dispatch_daemon = Some(self.testbed.spawn(self.testbed.server(1)?, command)?);
        let attach_start = Instant::now();
        loop {
            let dispatch_status = self.query_dispatch_status().unwrap_or_default();
            // The status may still come from an older poll by the previous process.
            let ms_since_last_poll = dispatch_status["since_last_poll_ms"].as_u64();
            let is_polled_by_new_daemon = ms_since_last_poll
                .is_some_and(|poll_age_ms| u128::from(poll_age_ms) < attach_start.elapsed().as_millis());
            if is_polled_by_new_daemon && count_eligible_workers(&dispatch_status) >= Some(worker_count) {
                return Ok(());
            }
            ensure!(
                attach_start.elapsed() < *DEFAULT_WAIT_TIMEOUT,
                "coreward dispatch has no {worker_count} workers in time: {dispatch_status}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills the daemon `coreward dispatch`. Its BPF program continues to dispatch requests. Fails when the daemon is
    /// not running.
    pub fn kill_dispatch_daemon(&mut self) -> anyhow::Result<()> {
        let mut daemon = self.dispatch_daemon.take().context("no daemon")?;
        daemon.send_signal(Signal::SIGKILL)?;
        daemon.wait_for_exit(*DEFAULT_WAIT_TIMEOUT).map(drop)
    }

    /// Detaches the BPF program of `coreward dispatch`, after which the kernel selects workers. Fails when the command
    /// fails.
    pub fn detach_dispatch(&mut self) -> anyhow::Result<()> {
        let exit_status = self.dispatch_daemon.take().context("no daemon")?.terminate(*DEFAULT_WAIT_TIMEOUT)?;
        ensure!(exit_status.success(), "coreward dispatch: {exit_status}");
        let mut command = self.build_dispatch_command()?;
        command.arg("--detach");
        self.testbed.run_command(self.testbed.server(1)?, command).map(drop)
    }

    /// Returns the service's entry in `coreward dispatch --status`. Fails when no service is dispatched.
    pub fn query_dispatch_status(&self) -> anyhow::Result<Value> {
        let mut command = self.build_dispatch_command()?;
        command.args(["--status", "--format", "json"]);
        let output = self.testbed.run_command(self.testbed.server(1)?, command)?;
        let mut status: Value = serde_json::from_slice(&output.stdout)?;
        Ok(status["services"][0].take())
    }

    /// Returns the number of datagrams that were still queued at sockets when the sockets were closed. Fails when the
    /// BPF program's counter cannot be read.
    pub fn read_purged_datagram_count(&self) -> anyhow::Result<u64> {
        let counter_bytes =
            self.purged_datagram_counter.lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?.context("no counter")?;
        Ok(u64::from_ne_bytes(counter_bytes[..8].try_into()?))
    }

    /// Starts the load generator, which sends requests for `duration`. Fails when it cannot be started.
    pub fn start_load_generator(&self, duration: Duration, seed: u64) -> anyhow::Result<TestbedProcess> {
        let mut command = Command::new(lab_binary_path()?);
        command.args([
            "load",
            &SERVICE_ADDRESS.to_string(),
            "--format",
            "json",
            "--warm-up",
            "0",
            "--rate",
            LOAD_RATE_RPS,
        ]);
        command.args([
            "--timeout",
            LOAD_REQUEST_TIMEOUT_S,
            "--flows",
            &LOAD_FLOW_COUNT.to_string(),
            "--seed",
            &seed.to_string(),
        ]);
        command.args(["--first-port", &FIRST_LOAD_PORT.to_string(), "--seconds", &duration.as_secs_f64().to_string()]);
        command.stdout(Stdio::piped());
        self.testbed.spawn(self.testbed.client(), command)
    }
}

/// Returns the number of workers that get requests, according to `coreward dispatch --status`.
pub fn count_eligible_workers(dispatch_status: &Value) -> Option<u64> {
    let workers = dispatch_status["workers"].as_array()?;
    Some(workers.iter().filter(|worker| worker["eligible"] == true).count() as u64)
}

fn attach_datagram_drop_counter(testbed: &Testbed) -> anyhow::Result<(MapHandle, Link)> {
    let mut storage = MaybeUninit::uninit();
    let mut open_skeleton = skeleton::DropCounterSkelBuilder::default().open(&mut storage)?;
    let program_constants =
        open_skeleton.maps.rodata_data.as_deref_mut().context("drop_counter.bpf.o has no constants")?;
    program_constants.port = SERVICE_ADDRESS.port();
    program_constants.network_namespace = testbed.server(1)?.run_within(read_namespace_cookie)?;
    let loaded_skeleton = open_skeleton.load().context("the kernel does not load drop_counter.bpf.c")?;
    let root_cgroup = fs::File::open(cgroup2_mount_point()?)?;
    let link = loaded_skeleton
        .progs
        .release
        .attach_cgroup(root_cgroup.as_raw_fd())
        .context("seeing sockets that are closed")?;
    Ok(((&loaded_skeleton.maps.bss).try_into()?, link))
}

/// Returns the cookie of this thread's network namespace, by which BPF programs identify the namespace.
fn read_namespace_cookie() -> anyhow::Result<u64> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut cookie = 0u64;
    let mut length = size_of_val(&cookie) as libc::socklen_t;
    let socket_fd = socket.as_raw_fd();
    // SAFETY: both pointers are of variables that live until the call returns, and the length is the first's.
    let result = unsafe {
        let cookie_pointer = (&raw mut cookie).cast();
        libc::getsockopt(socket_fd, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, cookie_pointer, &raw mut length)
    };
    nix::errno::Errno::result(result).context("SO_NETNS_COOKIE")?;
    Ok(cookie)
}
