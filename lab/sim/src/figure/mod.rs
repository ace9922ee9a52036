//! `coreward-lab figure`: simulates experiments of papers and compares them with the published values.
//!
//! The way of the data: a scenario (a TOML file, [`scenario`]) expands into independent runs of a simulation
//! ([`expand`],
//! [`job`]); all CPUs run them ([`run`]); their measures make a [`table`]; the paper's statements are judged on that
//! table ([`claim`]); and the table becomes CSV, JSON, a picture ([`draw`]) and a page ([`page`]). Nothing of a result
//! depends on the number of threads or on the time of day.

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
