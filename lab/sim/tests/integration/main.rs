//! Tests that need neither root nor a network namespace, in one executable.

mod figure_interrupted;
mod figure_live;
mod figure_runs;
mod lb_captures;
mod lb_simulation;
mod path_tiers;
mod pcc_published;
mod rpc_policies;
mod rpc_reference;
mod rpc_theory;
mod rpc_turbo;
