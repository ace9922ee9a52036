//! Simulator that runs the daemons' policies (`coreward-model`) on traces and random arrivals.
//!
//! A simulation is single-threaded and deterministic, so the same configuration and seed yield the same bytes. Seeds,
//! policies and the points of a sweep run in parallel, and their results are in the requested order
//! ([`par_map_ordered`]).

pub mod cli;
pub mod figure;
pub mod lb;
pub mod output;
pub mod path;
pub mod pcc;
pub mod random;
pub mod rpc;
pub mod seed_summary;
pub mod trace;
pub mod unknown_name;
pub mod value_range;

use rayon::prelude::*;

/// Runs `simulate` for every input, in parallel on all CPUs, and returns the results in the order of the inputs.
pub fn par_map_ordered<I: Sync, O: Send>(inputs: &[I], simulate: impl Fn(&I) -> O + Sync + Send) -> Vec<O> {
    inputs.par_iter().map(simulate).collect()
}
