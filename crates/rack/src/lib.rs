//! The rack controller, which reduces its agents' reports to the least loaded cores of each bucket, and sends these to
//! the controller. docs/design.md explains why this loses no accuracy.
//!
//! A rack controller stores nothing. Without a controller it rejects agents, so that they try the next address.
//!
//! * [`config`]: the configuration file
//! * [`daemon`]: connection to the controller, and start of the gRPC service
//! * [`reducer`]: reduction of reports to summaries
//! * [`agents`]: gRPC service for agents

pub mod agents;
pub mod config;
pub mod daemon;
#[cfg(test)]
mod grpc_tests;
pub mod reducer;
#[cfg(test)]
mod tls_tests;
