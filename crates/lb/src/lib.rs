//! The load balancer's daemon.

pub mod config;
