//! Health checks of servers, which a load balancer performs.
//!
//! * [`checker`]: thread that checks all servers
//! * [`probe`]: one check of one server by TCP, HTTP or HTTPS
//! * `connection`: TCP connection of one check
//! * [`nat_path`]: address rewriting for a connection
//! * [`ca`]: verification of servers' certificates
//!
//! `coreward_model::health` judges the results. The data plane provides [`nat_path::NatTable`].

pub mod ca;
pub mod checker;
mod connection;
pub mod nat_path;
pub mod probe;
