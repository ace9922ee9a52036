//! Command `coreward-lab figure`, which simulates experiments of papers and compares them with the published values.
//!
//! Data passes through these modules. A scenario (a TOML file, [`scenario`]) expands into independent simulation runs
//! ([`figure_run_plan`], [`simulation_job`]), which run on all CPUs ([`figure_run`]). The results form a [`table`], on
//! which the paper's statements are judged ([`figure_claim`]). The table is written as CSV, JSON, a picture ([`draw`])
//! and a page ([`page`]). No result depends on the number of threads or the time of day.

mod atomic_file_writes;
pub mod axes;
mod axis_points;
pub mod cli;
pub mod draw;
pub mod embedded;
pub mod figure_claim;
pub mod figure_run;
pub mod figure_run_plan;
pub mod library;
pub mod live;
pub mod page;
pub mod parameters;
pub mod result;
pub mod scenario;
pub mod simulation_job;
pub mod table;
