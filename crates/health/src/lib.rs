//! Health checks of servers by a load balancer.
//!
//! * [`checker`]: thread that checks all targets
//! * [`probe`]: one check of one server: TCP, HTTP, HTTPS
//! * `connection`: the connection of a check
//! * [`path`]: address rewriting for a connection
//! * [`ca`]: verification of certificates
//!
//! `coreward_model::health` judges the results. The data plane provides [`path::NatTable`].

pub mod ca;
pub mod checker;
mod connection;
pub mod path;
pub mod probe;
