//! The servers of the services: where they are, and what went to each.

use std::mem::offset_of;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::lb::ServerTraffic;

use super::program::Variant;
use super::{LoadBalancer, SERVER_FLAGS_SHIFT, Server, ServiceIndex, entry_at};
use crate::mac::MacAddress;

/// The MAC address in a `struct server_entry`, if it is resolved.
pub(super) fn mac_in(entry: u64) -> Option<MacAddress> {
    let flags = (entry >> SERVER_FLAGS_SHIFT) as u32;
    (flags & intf::SERVER_RESOLVED != 0).then(|| MacAddress::from_word(entry))
}

impl LoadBalancer {
    /// Makes a server known, or changes what is known of it.
    pub fn set_server(&mut self, service: ServiceIndex, id: ServerId, server: Server) {
        let flags = intf::SERVER_KNOWN
            | if server.mac.is_some() { intf::SERVER_RESOLVED } else { 0 }
            | if server.eligible { intf::SERVER_ELIGIBLE } else { 0 };
        let mac = server.mac.map_or(0, MacAddress::word);
        if let Err(error) = self.move_corrected_server(service, id, server.mac, server.eligible) {
            tracing::warn!("server id {id}: what it answers is not stamped: {error:#}");
        }
        let at = entry_at::<intf::server_entry>(service, id.get());
        self.maps.servers.store(at, mac | u64::from(flags) << SERVER_FLAGS_SHIFT);
    }

    /// Forgets a server: its connections' packets then go to all servers, rate-limited.
    pub fn remove_server(&mut self, service: ServiceIndex, id: ServerId) {
        if let Err(error) = self.forget_corrected_server(service, id) {
            tracing::warn!("server id {id}: {error:#}");
        }
        self.maps.servers.store(entry_at::<intf::server_entry>(service, id.get()), 0);
    }

    /// The servers known of a service, by id: after a take-over those of the process before.
    pub fn servers(&self, service: ServiceIndex) -> Vec<(ServerId, Server)> {
        let known = |id: u16| {
            let word = self.maps.servers.load(entry_at::<intf::server_entry>(service, id));
            let flags = (word >> SERVER_FLAGS_SHIFT) as u32;
            let server = Server { mac: mac_in(word), eligible: flags & intf::SERVER_ELIGIBLE != 0 };
            (flags & intf::SERVER_KNOWN != 0).then(|| (ServerId::try_from(u64::from(id)).expect("in range"), server))
        };
        (0..ServerId::COUNT as u16).filter_map(known).collect()
    }

    /// Whether packets and bytes are counted by server, which costs each packet two atomic additions. Off at first.
    ///
    /// # Errors
    /// When the kernel refuses the program.
    pub fn count_traffic(&mut self, wanted: bool) -> anyhow::Result<()> {
        self.change_variant(Variant { traffic: wanted, ..self.variant })
    }

    /// What was sent to a server.
    pub fn traffic(&self, service: ServiceIndex, id: ServerId) -> ServerTraffic {
        let start = entry_at::<intf::server_traffic>(service, id.get());
        let load = |field| self.maps.traffic.load(start + field);
        ServerTraffic {
            opened: load(offset_of!(intf::server_traffic, opened)),
            closed: load(offset_of!(intf::server_traffic, closed)),
            packets: load(offset_of!(intf::server_traffic, packets)),
            bytes: load(offset_of!(intf::server_traffic, bytes)),
        }
    }
}
