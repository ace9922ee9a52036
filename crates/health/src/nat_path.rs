//! Address rewriting for checks whose packets are sent to a server's own address, but must arrive at the VIP.

use std::net::IpAddr;

/// Addresses and ports of a health check's connection. In packets to the server, the data plane replaces the server's
/// own address by the VIP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HealthCheckNatPath {
    /// Server's own address, to which the load balancer sends packets.
    pub server_address: IpAddr,
    /// VIP that replaces the server's own address in packets. Both addresses have the same family.
    pub vip: IpAddr,
    pub server_port: u16,
    /// Source port of the connection, at the load balancer.
    pub source_port: u16,
}

/// NAT table of the data plane. Each entry is a health check's connection in whose packets addresses are rewritten.
pub trait NatTable: Send + Sync {
    /// Adds an entry. Fails if the table is full.
    fn add_entry(&self, path: &HealthCheckNatPath) -> anyhow::Result<()>;

    fn remove_entry(&self, path: &HealthCheckNatPath);
}
