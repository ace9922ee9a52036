//! Health checks of servers by a load balancer.
//!
//! * [`checker`]: thread that checks all targets
//! * [`probe`]: one check of one server: TCP, HTTP, HTTPS
//! * `connection`: its connection
//! * [`ca`]: verification of certificates
//!
//! `coreward_model::health` judges the results. The data plane provides [`probe::NatTable`].

pub mod ca;
pub mod checker;
mod connection;
pub mod probe;
