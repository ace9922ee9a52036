//! Runs the operator's commands with a timeout for each controller, because a controller may be stopped.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;

use crate::fleet::operator_command_for;
use crate::topology::Testbed;

/// Runs `coreward` commands as an operator of several controllers.
#[derive(Debug)]
pub struct OperatorCli<'a> {
    testbed: &'a Testbed,
    controller_count: u16,
    /// Index of the controller that answered the last command, counted from 0.
    last_responder: AtomicUsize,
    timeout_s: &'static str,
}

impl<'a> OperatorCli<'a> {
    /// Creates an operator for `controller_count` controllers; `timeout_s`: timeout of each controller (s).
    pub fn new(testbed: &'a Testbed, controller_count: u16, timeout_s: &'static str) -> Self {
        Self { testbed, controller_count, last_responder: AtomicUsize::new(0), timeout_s }
    }

    /// Runs `coreward ARGUMENTS` and returns its output. Fails with the last error when no controller executes it.
    pub fn run_coreward(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let (first, count) = (self.last_responder.load(Ordering::Relaxed), usize::from(self.controller_count));
        let mut outcome = None;
        for turn in 0..count {
            let number = (first + turn) % count;
            let answer = self.run_command(number as u16 + 1, arguments);
            let is_answered = answer.is_ok();
            outcome = Some(answer);
            if is_answered {
                self.last_responder.store(number, Ordering::Relaxed);
                break;
            }
        }
        outcome.context("a fleet without a controller")?
    }

    fn run_command(&self, controller: u16, arguments: &[&str]) -> anyhow::Result<String> {
        let asking = operator_command_for(self.testbed, [controller], arguments)?;
        let mut command = Command::new("timeout");
        command.args(["--signal", "KILL", self.timeout_s]).arg(asking.get_program()).args(asking.get_args());
        command.envs(asking.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Ok(String::from_utf8(self.testbed.run(self.testbed.controller(), command)?.stdout)?)
    }
}
