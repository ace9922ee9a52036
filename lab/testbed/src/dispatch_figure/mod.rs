//! Requests at the workers of real servers under `coreward dispatch`, as figures: `turbo-9-live`,
//! `ringleader-classes-live` and `path-live`, next to the simulator's results for the same scenario.
//!
//! * [`dispatcher`]: `coreward dispatch` on a server of a testbed
//! * [`requests`]: one measurement by `coreward-lab load`
//! * [`server_figure`]: one server; [`path_figure`]: several behind the load balancer
//! * [`points`]: which measurements a scenario asks for, and in which order

pub mod dispatcher;
pub mod path_figure;
mod points;
pub mod requests;
pub mod server_figure;

use crate::interrupt;

/// Ends a measurement that is going on, in order.
pub fn interrupt() {
    interrupt::request();
}
