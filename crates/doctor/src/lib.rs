//! Implementation of `coreward doctor`, which checks whether a machine is fit for its role.
//!
//! * [`facts`]: facts about the machine, as plain data
//! * [`gather`]: gathering of the facts
//! * [`checks`]: checks, which are pure functions of the facts and listed in [`checks::DOCTOR_CHECKS`]
//! * [`finding`]: findings of checks, with remedies
//! * [`fix`]: execution of safe repairs
//! * [`report`]: output of the findings as text or JSON

pub mod checks;
pub mod command;
pub mod facts;
pub mod finding;
pub mod fix;
pub mod gather;
pub mod nat_rules;
pub mod report;
