//! Loads `bpf/health/health.bpf.c` at a load balancer's device. It rewrites the addresses of health checks, so that a
//! check that connects to a server's own address reaches that server at the VIP.

use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::tuple::address_to_words;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use zerocopy::IntoBytes as _;

use crate::skeleton::health::HealthSkelBuilder;
use crate::tc::{self, PacketDirection, TemporaryTcAttachment};

/// Maximum number of concurrent health check connections. Each connection needs two entries of the NAT table.
pub const MAX_NAT_CONNECTIONS: usize = intf::MAX_NAT_ENTRIES as usize / 2;

/// TCP connection of a health check, whose addresses the BPF programs rewrite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NatConnection {
    /// The server's own address, to which the load balancer connects.
    pub server_address: IpAddr,
    /// VIP that the server sees as the destination address. It has the same address family as `server_address`.
    pub vip: IpAddr,
    /// Port of the server to which the health check connects.
    pub server_port: u16,
    /// Source port from which the load balancer connects.
    pub source_port: u16,
}

impl NatConnection {
    /// Returns the NAT table's key and value for each direction of the connection, in network byte order.
    fn nat_table_entries(&self) -> [(intf::nat_entry, intf::nat_address); 2] {
        let nat_entry_key = |address: IpAddr| intf::nat_entry {
            address: to_nat_address(address),
            port: self.server_port.to_be(),
            own_port: self.source_port.to_be(),
        };
        [
            (nat_entry_key(self.server_address), to_nat_address(self.vip)),
            (nat_entry_key(self.vip), to_nat_address(self.server_address)),
        ]
    }
}

/// Converts an IP address to the BPF programs' layout.
fn to_nat_address(address: IpAddr) -> intf::nat_address {
    intf::nat_address { word: address_to_words(address) }
}

/// BPF programs that rewrite the addresses of health check connections. They are attached to a device until the value
/// is dropped.
#[derive(Debug)]
pub struct HealthCheckNatPrograms {
    nat_table: Arc<NatTable>,
    _attachments: [TemporaryTcAttachment; 2],
}

/// Table of the connections whose addresses the BPF programs rewrite.
#[derive(Debug)]
pub struct NatTable(MapHandle);

impl HealthCheckNatPrograms {
    /// Loads the programs and attaches them to an interface. Fails when the interface does not exist, or the kernel
    /// rejects a program.
    pub fn attach(interface: &str) -> anyhow::Result<Self> {
        let interface_index = nix::net::if_::if_nametoindex(interface)
            .with_context(|| format!("interface {interface:?} does not exist here"))?;
        let mut object_storage = MaybeUninit::uninit();
        let open_skeleton =
            HealthSkelBuilder::default().open(&mut object_storage).context("bpf/health/health.bpf.c")?;
        let loaded_skeleton = open_skeleton.load().context("the kernel rejected bpf/health/health.bpf.c")?;
        let attachments = [
            tc::attach_until_drop(
                loaded_skeleton.progs.health_ingress.as_fd(),
                interface_index,
                PacketDirection::Ingress,
            )?,
            tc::attach_until_drop(
                loaded_skeleton.progs.health_egress.as_fd(),
                interface_index,
                PacketDirection::Egress,
            )?,
        ];
        Ok(Self {
            nat_table: Arc::new(NatTable(MapHandle::try_from(&loaded_skeleton.maps.checked_paths)?)),
            _attachments: attachments,
        })
    }

    /// Returns the table of rewritten connections, which any thread may use.
    pub fn nat_table(&self) -> &Arc<NatTable> {
        &self.nat_table
    }
}

impl NatTable {
    /// Adds a connection, whose packets then reach the server with the VIP as destination address. Fails above
    /// [`MAX_NAT_CONNECTIONS`] connections.
    pub fn add_connection(&self, connection: &NatConnection) -> anyhow::Result<()> {
        for (key, translated_address) in connection.nat_table_entries() {
            self.0
                .update(key.as_bytes(), translated_address.as_bytes(), MapFlags::ANY)
                .context("a path for a health check")?;
        }
        Ok(())
    }

    /// Removes a connection from the table.
    pub fn remove_connection(&self, connection: &NatConnection) {
        for (key, _) in connection.nat_table_entries() {
            if let Err(error) = self.0.delete(key.as_bytes()) {
                tracing::debug!(
                    event = "nat-entry-not-removed",
                    entry = ?connection,
                    %error,
                    "the load balancer cannot remove the NAT entry of a finished health check"
                );
            }
        }
    }
}
