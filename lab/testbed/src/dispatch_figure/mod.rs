//! Requests at the cores of real servers under `coreward dispatch` and `coreward orchestrate`, as figures such as
//! `turbo-9-live` and `ringleader-bimodal-live`, next to the simulator's results for the same scenario.
//!
//! * [`dispatcher`]: `coreward dispatch` on a server of a testbed; [`orchestrator`]: `coreward orchestrate`
//! * [`requests`]: one measurement by `coreward-lab load`
//! * [`server_figure`]: one server; [`cores_figure`]: with a batch; [`path_figure`]: several behind the load balancer
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

use crate::interrupt;

/// Interrupts the measurement that is running.
pub fn interrupt_measurement() {
    interrupt::request();
}

/// Returns a command that runs with real-time priority: it represents another machine, or CPUs that this one lacks.
fn real_time_command(program: PathBuf) -> Command {
    let mut command = Command::new("chrt");
    command.args(["--fifo", "1"]).arg(program);
    command
}
