//! Paths of checks to servers' own addresses.

use std::net::IpAddr;

/// Connection to a server's own address that is sent to the VIP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Path {
    /// The server's own address.
    pub server: IpAddr,
    /// Address that replaces it in the packet, of the same family.
    pub vip: IpAddr,
    pub port: u16,
    /// The load balancer's port.
    pub own_port: u16,
}

/// Address rewriting of health checks.
pub trait NatTable: Send + Sync {
    /// Adds an entry; fails if the table is full.
    fn add(&self, path: &Path) -> anyhow::Result<()>;

    fn remove(&self, path: &Path);
}
