//! Rack controller: reduces the reports of its agents to the least loaded cores of each bucket, for the controller.
//! docs/design.md gives the reasons why nothing is lost.
//!
//! A rack controller stores nothing. Without a controller it rejects agents, so that they try the next address.
//!
//! * [`config`]: the configuration file
//! * [`daemon`]: the connection to the controller
//! * [`reducer`]: reports to summaries
//! * [`agents`]: the gRPC service

pub mod agents;
pub mod config;
pub mod daemon;
#[cfg(test)]
mod grpc_tests;
pub mod reducer;
#[cfg(test)]
mod tls_tests;
