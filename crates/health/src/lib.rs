//! Health checks of servers, from a load balancer's side.
//!
//! * [`checker`]: the thread that checks all targets, each at its own pace, and what it has found
//! * [`probe`]: one check of one server: TCP, HTTP, HTTPS
//! * `connection`: its connection, which ends before the path that it takes
//! * [`trust`]: whose certificates are taken
//!
//! What a row of failures means is decided in `coreward_model::health`; how a connection to a server's own address reaches
//! that server at the VIP is the data plane's affair ([`probe::NatTable`]).

pub mod checker;
mod connection;
pub mod probe;
pub mod trust;
