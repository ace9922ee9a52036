//! Benches, which measure the cost of the packet path, the agent and the controller. The live figures use some of them.

mod agent;
mod certificates;
pub mod cli;
mod conn_count;
mod controller;
mod controller_process;
mod cpu_load;
mod default_args;
mod dispatch;
pub mod environment;
mod fake_agent;
pub mod figure;
mod idle_connections_bench;
pub mod namespace;
mod orchestrate;
mod page;
mod placement;
mod racks;
pub mod report;
pub mod run_time;
mod scale;
mod sim;
mod startup;
mod test_env;
pub mod thread_cpus;
pub mod xdp;
