//! Requests at the workers of real servers, with `coreward dispatch` at work, as figures: `turbo-9-live`,
//! `ringleader-classes-live` and `path-live`. What the simulator gives for the same scenario stands beside it there.
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
