//! `coreward doctor`: whether a machine is fit for its role, and what mends it.
//!
//! * [`facts`]: what there is to know of a machine, as plain data
//! * [`gather`]: finds it, once
//! * [`checks`]: what to make of it: pure, one function per check, all of them in [`checks::CHECKS`]
//! * [`finding`]: what a check says
//! * [`fix`]: does what is safe
//! * [`report`]: findings as text and JSON
//! * [`command`]: the command line

pub mod checks;
pub mod command;
pub mod facts;
pub mod finding;
pub mod fix;
pub mod gather;
pub mod report;
