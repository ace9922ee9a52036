//! Command `coreward-lab figure`, which simulates experiments of papers and compares them with the published values.
//!
//! Data passes through these modules. A scenario (a TOML file, [`scenario`]) expands into independent simulation runs
//! ([`expand`], [`job`]), which run on all CPUs ([`run`]). The results form a [`table`], on which the paper's
//! statements are judged ([`claim`]). The table is written as CSV, JSON, a picture ([`draw`]) and a page ([`page`]). No
//! result depends on the number of threads or the time of day.

pub mod axes;
pub mod claim;
pub mod cli;
pub mod draw;
pub mod embedded;
pub mod expand;
pub mod job;
pub mod library;
pub mod live;
pub mod page;
pub mod parameters;
mod point;
pub mod result;
pub mod run;
pub mod scenario;
pub mod table;
mod write;
