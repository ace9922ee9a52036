//! Health checks of servers by a load balancer.
//!
//! * [`checker`]: thread that checks all targets
//! * [`probe`]: one check of one server: TCP, HTTP, HTTPS
//! * `connection`: its connection
//! * [`trust`]: verification of certificates
//!
//! `coreward_model::health` judges the results. The data plane provides [`probe::NatTable`].

pub mod checker;
mod connection;
pub mod probe;
pub mod trust;
