//! What the benches and the live figures share: measuring the packet path, and what was found.

pub mod cpus;
pub mod environment;
pub mod figure;
pub mod namespace;
pub mod report;
pub mod run_time;
pub mod xdp;
