//! `coreward dispatch` on a server: the real command, with a file like a user's.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use coreward_load::key_value::{ID_OFFSET, TYPE_OFFSET};
use coreward_load::request_type::RequestType;
use coreward_sim::rpc::{Policy, ServiceTimeDistribution};
use serde_json::Value;

use crate::addresses::SERVICE_ADDRESS;
use crate::fleet::coreward_command;
use crate::process::{Process, TIMEOUT};
use crate::topology::Testbed;

/// Running `coreward dispatch` for one service on one server. Dropping it detaches the dispatch.
#[derive(Debug)]
pub struct Dispatcher<'a> {
    testbed: &'a Testbed,
    server: u16,
    pin_directory: PathBuf,
    daemon: Process,
}

/// Returns the dispatch configuration for a key-value server: the simulator's policy in the terms of docs/dispatch.md.
/// Requests of class K have the type WORKK. `unit_us`: unit of service time (us). Fails when `coreward dispatch` has no
/// such policy.
pub fn key_value_service(policy: &Policy, service: &ServiceTimeDistribution, unit_us: f64) -> anyhow::Result<String> {
    let name = match policy {
        Policy::ClassBoundedQueue(_) => "jbsrq".to_owned(),
        Policy::Random | Policy::RoundRobin | Policy::ShortestQueue | Policy::LightestQueue => policy.to_string(),
        other => bail!("coreward dispatch has no policy {other}: expected random, rr, jsq, jlq or jbsrq-fifo"),
    };
    let mut text = format!("listen = \"{SERVICE_ADDRESS}\"\npolicy = \"{name}\"\n");
    if let Policy::ClassBoundedQueue(options) = policy {
        let bounds = (options.reserved, options.bound, options.reserved_bound);
        writeln!(text, "reserved = {}\nbound = {}\nreserved_bound = {}", bounds.0, bounds.1, bounds.2)?;
    }
    writeln!(text, "request_id = {{ offset = {ID_OFFSET}, bytes = 4 }}")?;
    writeln!(text, "type_field = {{ offset = {TYPE_OFFSET}, bytes = 1 }}")?;
    for (class, time) in (0..).zip(service.class_times()) {
        let value = RequestType::work(class).context("more classes than the protocol has")?.byte();
        let class = class.min(1);
        let expected_ns = (time * unit_us * 1e3).round() as u64;
        writeln!(text, "[[service.type]]\nvalue = {value}\nclass = {class}\nexpected = \"{expected_ns}ns\"")?;
    }
    Ok(text)
}

impl<'a> Dispatcher<'a> {
    /// Starts `coreward dispatch` on a server and waits until it has found all `workers`. `service`: configuration of
    /// the one service, without the heading. Fails when it does not start, or does not find all workers in time; the
    /// error contains its log.
    pub fn start(testbed: &'a Testbed, server: u16, service: &str, workers: u16) -> anyhow::Result<Self> {
        let pin_directory = testbed.pin_directory().join(format!("dispatch-s{server}"));
        let path = testbed.directory().join(format!("dispatch-s{server}.toml"));
        fs::write(&path, format!("pin_directory = {pin_directory:?}\n\n[[service]]\n{service}"))?;
        let log_path = testbed.directory().join(format!("dispatch-s{server}.log"));
        let log = File::create(&log_path)?;
        let mut command = Command::new(coreward_command()?);
        command.args(["dispatch", "--config"]).arg(&path).stdin(Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        let daemon = testbed.spawn(testbed.server(server)?, command)?;
        let mut dispatcher = Self { testbed, server, pin_directory, daemon };
        let end = Instant::now() + *TIMEOUT;
        loop {
            let known = dispatcher.workers().map(|workers| workers.len()).unwrap_or(0);
            if known == usize::from(workers) {
                return Ok(dispatcher);
            }
            let ended = dispatcher.daemon.try_wait()?;
            if ended.is_some() || Instant::now() > end {
                let log = fs::read_to_string(&log_path).unwrap_or_default();
                bail!("coreward dispatch on server {server} knows {known} of {workers} workers:\n{}", log.trim());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn run_command(&self, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
        let mut command = Command::new(coreward_command()?);
        command.arg("dispatch").args(arguments).arg("--pin-directory").arg(&self.pin_directory);
        Ok(self.testbed.run(self.testbed.server(self.server)?, command)?.stdout)
    }

    fn status(&self) -> anyhow::Result<Value> {
        let status: Value = serde_json::from_slice(&self.run_command(&["--status", "--format", "json"])?)?;
        status["services"].get(0).cloned().context("a status without a service")
    }

    /// Returns the workers listed by `coreward dispatch --status`. Fails when it prints no JSON.
    pub fn workers(&self) -> anyhow::Result<Vec<Value>> {
        self.status()?["workers"].as_array().cloned().context("a status without workers")
    }

    /// Returns the number of requests dispatched so far. Fails when the status is not available.
    pub fn dispatched_count(&self) -> anyhow::Result<u64> {
        self.workers()?.iter().map(|worker| worker["dispatched"].as_u64().context("dispatched")).sum()
    }

    /// Stops the daemon and detaches the dispatch, so that the kernel selects workers again. Fails when either step
    /// fails.
    pub fn stop(mut self) -> anyhow::Result<()> {
        let status = self.daemon.terminate(*TIMEOUT)?;
        ensure!(status.success(), "coreward dispatch ended with {status}");
        self.run_command(&["--detach"]).map(drop)
    }
}

impl Drop for Dispatcher<'_> {
    fn drop(&mut self) {
        // After a failure or `stop`; remaining pins are removed with the testbed.
        let _ = self.daemon.terminate(Duration::from_secs(1));
        let _ = self.run_command(&["--detach"]);
    }
}
