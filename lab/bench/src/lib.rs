//! Benches: cost of the packet path, the agent and the controller. The live figures use some of them.

mod agent;
mod certificates;
pub mod cli;
mod controller;
mod counting;
mod cpu_load;
pub mod cpus;
mod dispatch;
pub mod environment;
pub mod figure;
mod idle;
pub mod namespace;
mod placement;
mod pretend;
mod racks;
pub mod report;
pub mod run_time;
mod scale;
mod sim;
mod site;
mod start;
pub mod xdp;
