//! Runs `coreward-lab load` against a server without a load balancer.

use std::process::{Command, Stdio};
use std::time::Duration;

use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::lab_binary_path;
use coreward_testbed::{Testbed, TestbedProcess};
use serde_json::Value;

pub fn start_load_generator(testbed: &Testbed, options: &str) -> anyhow::Result<TestbedProcess> {
    let mut command = Command::new(lab_binary_path()?);
    command.args(["load", &SERVICE_ADDRESS.to_string(), "--format", "json"]).args(options.split_whitespace());
    command.stdout(Stdio::piped());
    testbed.spawn(testbed.client(), command)
}

pub fn wait_for_load_report(load_process: TestbedProcess) -> anyhow::Result<Value> {
    load_process.wait_for_json(Duration::from_secs(60))
}
