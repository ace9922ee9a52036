//! Servers of the services: addresses, flags and traffic.

use std::collections::BTreeSet;
use std::mem::offset_of;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::lb::ServerTraffic;

use super::program::Maps;
use super::services::service_name;
use super::variant::Variant;
use super::{LoadBalancer, SERVER_FLAGS_SHIFT, Server, ServiceIndex, entry_offset};
use crate::mac::MacAddress;

/// Flags of a server that are set by the configuration.
const CONFIGURED_FLAGS: u32 = intf::SERVER_KNOWN | intf::SERVER_ELIGIBLE;

/// Returns the MAC address in a `struct server_entry`; `None`: the address is not resolved.
pub(super) fn resolved_mac(entry: u64) -> Option<MacAddress> {
    let flags = (entry >> SERVER_FLAGS_SHIFT) as u32;
    (flags & intf::SERVER_RESOLVED != 0).then(|| MacAddress::from_word(entry))
}

/// Returns the offset of the word with the flags of a service's server, and the position of the lowest flag in it.
fn member_flags_position(service: ServiceIndex, id: u16) -> (usize, u32) {
    let word = usize::from(service.0) * intf::MEMBERSHIP_WORDS as usize
        + usize::from(id) / intf::SERVER_MEMBERS_PER_WORD as usize;
    let shift = u32::from(id) % intf::SERVER_MEMBERS_PER_WORD * intf::SERVER_MEMBER_BITS;
    (word * size_of::<u64>(), shift)
}

/// Returns the entry of a service's server as a word, as server_at() of `bpf/lb/placement.h` does for packets.
pub(super) fn server_entry(maps: &Maps, service: ServiceIndex, id: ServerId) -> u64 {
    let (word, shift) = member_flags_position(service, id.get());
    let flags = maps.membership.load(word) >> shift & u64::from(intf::SERVER_MEMBER_MASK);
    maps.servers.load(entry_offset::<intf::server_entry>(id.get())) | flags << SERVER_FLAGS_SHIFT
}

pub(super) fn members(maps: &Maps, service: ServiceIndex) -> Vec<ServerId> {
    servers_with_flag(maps, service, intf::SERVER_KNOWN)
}

pub(super) fn servers_with_flag(maps: &Maps, service: ServiceIndex, flag: u32) -> Vec<ServerId> {
    let first = usize::from(service.0) * intf::MEMBERSHIP_WORDS as usize;
    let mut ids = Vec::new();
    for position in 0..intf::MEMBERSHIP_WORDS as usize {
        let word = maps.membership.load((first + position) * size_of::<u64>());
        let known = |member: &u32| word >> (member * intf::SERVER_MEMBER_BITS) & u64::from(flag) != 0;
        let of_word = if word == 0 { 0..0 } else { 0..intf::SERVER_MEMBERS_PER_WORD };
        let id = |member: u32| position as u64 * u64::from(intf::SERVER_MEMBERS_PER_WORD) + u64::from(member);
        ids.extend(of_word.filter(known).filter_map(|member| ServerId::try_from(id(member)).ok()));
    }
    ids
}

impl LoadBalancer {
    /// Sets the flags in `mask` of a service's server. The write is not atomic, as only this process writes flags.
    fn set_member_flags(&mut self, service: ServiceIndex, id: ServerId, mask: u32, flags: u32) {
        let (at, shift) = member_flags_position(service, id.get());
        let word = self.maps.membership.load(at);
        let new = word & !(u64::from(mask) << shift) | u64::from(flags) << shift;
        if new != word {
            self.maps.membership.store(at, new);
        }
    }

    /// Marks the servers in `down`, which the service's placement table lists, as down, and its other servers as up.
    pub(super) fn set_down(&mut self, service: ServiceIndex, down: &[ServerId]) {
        let down: BTreeSet<ServerId> = down.iter().copied().collect();
        for up in servers_with_flag(&self.maps, service, intf::SERVER_DOWN).into_iter().filter(|id| !down.contains(id))
        {
            self.set_member_flags(service, up, intf::SERVER_DOWN, 0);
        }
        down.into_iter().for_each(|id| self.set_member_flags(service, id, intf::SERVER_DOWN, intf::SERVER_DOWN));
    }

    /// Adds a server to a service, or changes it. The MAC address applies to all services that have the server.
    pub fn set_server(&mut self, service: ServiceIndex, id: ServerId, server: Server) {
        let flags = intf::SERVER_KNOWN | if server.is_eligible { intf::SERVER_ELIGIBLE } else { 0 };
        let resolved = |mac: MacAddress| mac.word() | u64::from(intf::SERVER_RESOLVED) << SERVER_FLAGS_SHIFT;
        if let Err(error) = self.move_lb_stamped_server(service, id, server.mac, server.is_eligible) {
            tracing::warn!(
                event = "server-not-stamped",
                service = service_name(&self.maps, service),
                server_id = %id,
                error = format!("{error:#}"),
                "the load balancer cannot stamp replies of the server, whose service has `timestamps = \"lb\"`"
            );
        }
        self.maps.servers.store(entry_offset::<intf::server_entry>(id.get()), server.mac.map_or(0, resolved));
        self.set_member_flags(service, id, CONFIGURED_FLAGS, flags);
    }

    /// Sets whether the health checks of this load balancer found the server down. If so, UDP flows move to other
    /// servers; the server still gets new connections as long as it is eligible.
    pub fn set_masked(&mut self, service: ServiceIndex, id: ServerId, is_masked: bool) {
        self.set_member_flags(service, id, intf::SERVER_MASKED, if is_masked { intf::SERVER_MASKED } else { 0 });
    }

    /// Removes a server from a service. Packets of its connections are then broadcast at a limited rate.
    pub fn remove_server(&mut self, service: ServiceIndex, id: ServerId) {
        if let Err(error) = self.forget_lb_stamped_server(service, id) {
            tracing::warn!(
                event = "server-not-removed",
                service = service_name(&self.maps, service),
                server_id = %id,
                error = format!("{error:#}"),
                "the load balancer cannot forget the MAC address of a removed server with LB-side stamping"
            );
        }
        self.set_member_flags(service, id, intf::SERVER_MEMBER_MASK, 0);
    }

    /// Returns the servers of a service, sorted by id. After a take-over these are the servers of the previous process.
    pub fn servers(&self, service: ServiceIndex) -> Vec<(ServerId, Server)> {
        members(&self.maps, service).into_iter().filter_map(|id| Some((id, self.server(service, id)?))).collect()
    }

    /// Returns the ids of a service's servers.
    pub fn members(&self, service: ServiceIndex) -> Vec<ServerId> {
        members(&self.maps, service)
    }

    /// Returns the state of a service's server; `None`: the service has no such server.
    pub fn server(&self, service: ServiceIndex, id: ServerId) -> Option<Server> {
        let word = server_entry(&self.maps, service, id);
        let flags = (word >> SERVER_FLAGS_SHIFT) as u32;
        let server = Server { mac: resolved_mac(word), is_eligible: flags & intf::SERVER_ELIGIBLE != 0 };
        (flags & intf::SERVER_KNOWN != 0).then_some(server)
    }

    /// Sets whether packets and bytes are counted by server (off by default), which costs two additions per packet.
    pub fn count_traffic(&mut self, is_enabled: bool) -> anyhow::Result<()> {
        self.change_variant(Variant { counts_traffic: is_enabled, ..self.variant })
    }

    /// Returns the packets and bytes sent to a server, summed over all services.
    pub fn traffic(&self, id: ServerId) -> ServerTraffic {
        let [sum] = self.traffic_of(&[id])[..] else { unreachable!("one of each") };
        sum
    }

    /// Returns the traffic of each server of `ids`, in that order. Counters are read row by row, because reading them
    /// server by server would miss the cache for each server.
    pub fn traffic_of(&self, ids: &[ServerId]) -> Vec<ServerTraffic> {
        let mut sums = vec![ServerTraffic::default(); ids.len()];
        for row in 0..self.maps.counter_rows() {
            for (id, sum) in ids.iter().zip(&mut sums) {
                let position = row * ServerId::COUNT + usize::from(id.get());
                let load = |field| self.maps.traffic.load(position * size_of::<intf::server_traffic>() + field);
                sum.opened += load(offset_of!(intf::server_traffic, opened));
                sum.closed += load(offset_of!(intf::server_traffic, closed));
                sum.packets += load(offset_of!(intf::server_traffic, packets));
                sum.bytes += load(offset_of!(intf::server_traffic, bytes));
            }
        }
        sums
    }
}
