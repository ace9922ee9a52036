//! Runs the operator's commands against several controllers. Each controller has a timeout, because it may be stopped.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;

use crate::fleet::build_operator_command_at_controllers;
use crate::topology::Testbed;

/// Runner of `coreward` commands that tries the controllers in turn until one answers.
#[derive(Debug)]
pub struct OperatorCli<'a> {
    testbed: &'a Testbed,
    controller_count: u16,
    last_answering_controller_index: AtomicUsize,
    timeout_s: &'static str,
}

impl<'a> OperatorCli<'a> {
    /// Creates a runner for commands to `controller_count` controllers, each of which has `timeout_s` seconds to
    /// answer.
    pub fn new(testbed: &'a Testbed, controller_count: u16, timeout_s: &'static str) -> Self {
        Self { testbed, controller_count, last_answering_controller_index: AtomicUsize::new(0), timeout_s }
    }

    /// Runs `coreward` with these arguments and returns its output. Fails with the last error when no controller
    /// executes the command.
    pub fn run_coreward(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let (first_index, count) =
            (self.last_answering_controller_index.load(Ordering::Relaxed), usize::from(self.controller_count));
        let mut last_result = None;
        for attempt in 0..count {
            let controller_index = (first_index + attempt) % count;
            let command_result = self.run_coreward_at_controller(controller_index as u16 + 1, arguments);
            let is_success = command_result.is_ok();
            last_result = Some(command_result);
            if is_success {
                self.last_answering_controller_index.store(controller_index, Ordering::Relaxed);
                break;
            }
        }
        last_result.context("a fleet without a controller")?
    }

    fn run_coreward_at_controller(&self, controller: u16, arguments: &[&str]) -> anyhow::Result<String> {
        let coreward_command = build_operator_command_at_controllers(self.testbed, [controller], arguments)?;
        let mut command = Command::new("timeout");
        command
            .args(["--signal", "KILL", self.timeout_s])
            .arg(coreward_command.get_program())
            .args(coreward_command.get_args());
        command.envs(coreward_command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Ok(String::from_utf8(self.testbed.run_command(self.testbed.controller(), command)?.stdout)?)
    }
}
