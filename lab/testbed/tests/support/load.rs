//! A server without a load balancer, and `coreward-lab load` against it.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use coreward_testbed::addresses::{SERVICE, VIP, server_address};
use coreward_testbed::fleet::lab_command;
use coreward_testbed::{Process, Testbed, TestbedOptions};
use serde_json::Value;

/// A testbed whose client sends what is for the VIP to server 1.
pub fn testbed(instance: &str) -> anyhow::Result<Testbed> {
    let options = TestbedOptions { instance: instance.to_owned(), servers: 1, cores: 2, ..TestbedOptions::default() };
    let testbed = Testbed::create(options)?;
    let mut ip = Command::new("ip");
    ip.args(["route", "add", &format!("{VIP}/32"), "via", &server_address(1).to_string()]);
    testbed.run(testbed.client(), ip)?;
    Ok(testbed)
}

pub fn start_load(testbed: &Testbed, options: &str) -> anyhow::Result<Process> {
    let mut command = Command::new(lab_command()?);
    command.args(["load", &SERVICE.to_string(), "--format", "json"]).args(options.split_whitespace());
    command.stdout(Stdio::piped());
    testbed.spawn(testbed.client(), command)
}

pub fn report(mut load: Process) -> anyhow::Result<Value> {
    let status = load.wait(Duration::from_secs(60))?;
    assert!(status.success(), "{status}");
    Ok(serde_json::from_reader(load.child().stdout.take().context("stdout")?)?)
}
