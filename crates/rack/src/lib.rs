//! A rack controller: agents connect to it as to the fleet's controller; it reduces what they report to the least loaded cores of
//! each bucket, and passes that up. docs/design.md says why nothing is lost.
//!
//! It decides nothing and keeps nothing. Without its controller it refuses agents, so that they try the next address in their
//! files.
//!
//! * [`config`]: its file
//! * [`daemon`]: its connection to the controller
//! * [`reducer`]: reports in, summaries out
//! * [`agents`]: its side towards agents

pub mod agents;
pub mod config;
pub mod daemon;
pub mod reducer;
