//! `coreward dispatch` on a server of the testbed, run as the real command with a configuration file like a user's.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use coreward_load::key_value::{REQUEST_ID_OFFSET, REQUEST_TYPE_OFFSET};
use coreward_load::request_type::RequestType;
use coreward_sim::rpc::{CoreSelectionPolicy, ServiceTimeDistribution};
use serde_json::Value;

use crate::addresses::SERVICE_ADDRESS;
use crate::fleet::coreward_binary_path;
use crate::process::{DEFAULT_WAIT_TIMEOUT, TestbedProcess};
use crate::topology::Testbed;

/// Running `coreward dispatch` process for one service on one server. Dropping this value detaches the BPF program.
#[derive(Debug)]
pub struct RunningDispatcher<'a> {
    testbed: &'a Testbed,
    server_number: u16,
    pin_directory: PathBuf,
    dispatch_daemon: TestbedProcess,
}

/// Returns the configuration (docs/dispatch.md) with which `coreward dispatch` applies the simulator's `policy` to a
/// key-value service. Requests of class K have the type WORKK. `unit_us` is the unit of service times (us). Fails when
/// `coreward dispatch` has no such policy.
pub fn build_key_value_service_config(
    policy: &CoreSelectionPolicy,
    service: &ServiceTimeDistribution,
    unit_us: f64,
) -> anyhow::Result<String> {
    let policy_name = match policy {
        CoreSelectionPolicy::ClassBoundedQueue(_) => "jbsrq".to_owned(),
        CoreSelectionPolicy::Random
        | CoreSelectionPolicy::RoundRobin
        | CoreSelectionPolicy::ShortestQueue
        | CoreSelectionPolicy::LightestQueue => policy.to_string(),
        other => bail!("coreward dispatch has no policy {other}: expected random, rr, jsq, jlq or jbsrq-fifo"),
    };
    let mut text = format!("listen = \"{SERVICE_ADDRESS}\"\npolicy = \"{policy_name}\"\n");
    if let CoreSelectionPolicy::ClassBoundedQueue(options) = policy {
        let core_limits =
            (options.reserved_core_count, options.outstanding_request_bound, options.reserved_core_request_bound);
        writeln!(text, "reserved = {}\nbound = {}\nreserved_bound = {}", core_limits.0, core_limits.1, core_limits.2)?;
    }
    writeln!(text, "request_id = {{ offset = {REQUEST_ID_OFFSET}, bytes = 4 }}")?;
    writeln!(text, "type_field = {{ offset = {REQUEST_TYPE_OFFSET}, bytes = 1 }}")?;
    for (class, time) in (0..).zip(service.class_service_times()) {
        let type_byte = RequestType::with_work_class(class).context("more classes than the protocol has")?.as_byte();
        let class_index = class.min(1);
        let expected_ns = (time * unit_us * 1e3).round() as u64;
        writeln!(text, "[[service.type]]\nvalue = {type_byte}\nclass = {class_index}\nexpected = \"{expected_ns}ns\"")?;
    }
    Ok(text)
}

impl<'a> RunningDispatcher<'a> {
    /// Starts `coreward dispatch` on a server and waits until it has found `worker_count` workers. `service_config`
    /// contains the configuration of the only service, without the heading `[[service]]`. Fails with the command's log
    /// when it does not start, or does not find all workers in time.
    pub fn start(testbed: &'a Testbed, server: u16, service_config: &str, worker_count: u16) -> anyhow::Result<Self> {
        let pin_directory = testbed.pin_directory().join(format!("dispatch-s{server}"));
        let config_path = testbed.directory().join(format!("dispatch-s{server}.toml"));
        fs::write(&config_path, format!("pin_directory = {pin_directory:?}\n\n[[service]]\n{service_config}"))?;
        let log_path = testbed.directory().join(format!("dispatch-s{server}.log"));
        let log = File::create(&log_path)?;
        let mut command = Command::new(coreward_binary_path()?);
        command.args(["dispatch", "--config"]).arg(&config_path).stdin(Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        let dispatch_daemon = testbed.spawn(testbed.server(server)?, command)?;
        let mut dispatcher = Self { testbed, server_number: server, pin_directory, dispatch_daemon };
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        loop {
            let known_worker_count = dispatcher.query_workers().map(|workers| workers.len()).unwrap_or(0);
            if known_worker_count == usize::from(worker_count) {
                return Ok(dispatcher);
            }
            let exit_status = dispatcher.dispatch_daemon.try_wait()?;
            if exit_status.is_some() || Instant::now() > deadline {
                let log_text = fs::read_to_string(&log_path).unwrap_or_default();
                bail!(
                    "coreward dispatch on server {server} knows {known_worker_count} of {worker_count} workers:\n{}",
                    log_text.trim()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn run_dispatch_command(&self, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
        let mut command = Command::new(coreward_binary_path()?);
        command.arg("dispatch").args(arguments).arg("--pin-directory").arg(&self.pin_directory);
        Ok(self.testbed.run_command(self.testbed.server(self.server_number)?, command)?.stdout)
    }

    fn query_status(&self) -> anyhow::Result<Value> {
        let status: Value = serde_json::from_slice(&self.run_dispatch_command(&["--status", "--format", "json"])?)?;
        status["services"].get(0).cloned().context("a status without a service")
    }

    /// Returns the entries of all workers from the output of `coreward dispatch --status`. Fails when it prints no
    /// JSON.
    pub fn query_workers(&self) -> anyhow::Result<Vec<Value>> {
        self.query_status()?["workers"].as_array().cloned().context("a status without workers")
    }

    /// Returns the number of requests that were dispatched so far. Fails when the status cannot be queried.
    pub fn query_dispatched_request_count(&self) -> anyhow::Result<u64> {
        self.query_workers()?.iter().map(|worker| worker["dispatched"].as_u64().context("dispatched")).sum()
    }

    /// Stops the daemon and detaches its BPF program, after which the kernel selects workers again. Fails when either
    /// step fails.
    pub fn stop(mut self) -> anyhow::Result<()> {
        let exit_status = self.dispatch_daemon.terminate(*DEFAULT_WAIT_TIMEOUT)?;
        ensure!(exit_status.success(), "coreward dispatch ended with {exit_status}");
        self.run_dispatch_command(&["--detach"]).map(drop)
    }
}

impl Drop for RunningDispatcher<'_> {
    fn drop(&mut self) {
        // This cleans up after a failure, and does nothing after `stop`. Remaining pins are removed with the testbed.
        let _ = self.dispatch_daemon.terminate(Duration::from_secs(1));
        let _ = self.run_dispatch_command(&["--detach"]);
    }
}
