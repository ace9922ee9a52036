//! Figures measured at the cores of real servers under `coreward dispatch` and `coreward orchestrate`, such as
//! `turbo-9-live` and `ringleader-bimodal-live`. They show the simulator's results for the same scenario next to them.
//!
//! * [`dispatcher`]: `coreward dispatch` on a server of a testbed
//! * [`orchestrator`]: `coreward orchestrate` on a server of a testbed
//! * [`requests`]: one measurement by `coreward-lab load`
//! * [`server_figure`]: figures of one server
//! * [`cores_figure`]: figures of one server with a batch
//! * [`path_figure`]: figures of several servers behind the load balancer
//! * [`points`]: measurements that a scenario needs, and their order

pub mod cores_figure;
pub mod dispatcher;
pub mod orchestrator;
pub mod path_figure;
mod points;
pub mod requests;
pub mod server_figure;

use std::path::PathBuf;
use std::process::Command;

use crate::interrupt_flag;

/// Interrupts the measurement that is running at present.
pub fn interrupt_measurement() {
    interrupt_flag::request_interruption();
}

/// Returns a command that runs `program` with real-time priority, as if it had a separate machine or more CPUs.
fn build_real_time_priority_command(program: PathBuf) -> Command {
    let mut command = Command::new("chrt");
    command.args(["--fifo", "1"]).arg(program);
    command
}
