//! `coreward doctor`: checks whether a machine is fit for its role.
//!
//! * [`facts`]: facts about the machine, as plain data
//! * [`gather`]: gathering of facts
//! * [`checks`]: pure functions of the facts, listed in [`checks::CHECKS`]
//! * [`finding`]: results of checks
//! * [`fix`]: safe repairs
//! * [`report`]: findings as text and JSON

pub mod checks;
pub mod command;
pub mod facts;
pub mod finding;
pub mod fix;
pub mod gather;
pub mod nat_rules;
pub mod report;
