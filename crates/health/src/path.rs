//! Paths of checks to servers' own addresses.

use std::net::IpAddr;

/// Addresses and ports of a connection whose packets are rewritten from the server's own address to the VIP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NatPath {
    /// The server's own address, to which packets are sent.
    pub server: IpAddr,
    /// Address of the same family that replaces the server's in packets.
    pub vip: IpAddr,
    pub port: u16,
    /// Source port of the load balancer's connection.
    pub source_port: u16,
}

/// Table of the address rewriting of health checks at the VIP.
pub trait NatTable: Send + Sync {
    /// Adds an entry. Fails if the table is full.
    fn add(&self, path: &NatPath) -> anyhow::Result<()>;

    fn remove(&self, path: &NatPath);
}
