//! Addresses, flags and traffic of the services' servers.

use std::collections::BTreeSet;
use std::mem::offset_of;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::lb::ServerTraffic;

use super::program::LoadBalancerMaps;
use super::program_variant::ProgramVariant;
use super::services::service_name;
use super::{LoadBalancer, SERVER_FLAGS_SHIFT, Server, ServiceIndex, server_entry_offset};
use crate::mac::MacAddress;

/// Mask of the server flags that the configuration determines.
const CONFIGURED_SERVER_FLAGS: u32 = intf::SERVER_KNOWN | intf::SERVER_ELIGIBLE;

/// Returns the MAC address in a `struct server_entry`, or `None` if the address is not resolved.
pub(super) fn resolved_mac_of_entry(entry: u64) -> Option<MacAddress> {
    let server_flags = (entry >> SERVER_FLAGS_SHIFT) as u32;
    (server_flags & intf::SERVER_RESOLVED != 0).then(|| MacAddress::from_word(entry))
}

/// Returns the offset of the word with a server's flags in a service, and the position of the server's lowest flag in
/// that word.
fn member_flags_offset_and_shift(service: ServiceIndex, id: u16) -> (usize, u32) {
    let word_index = usize::from(service.0) * intf::MEMBERSHIP_WORDS as usize
        + usize::from(id) / intf::SERVER_MEMBERS_PER_WORD as usize;
    let flags_shift = u32::from(id) % intf::SERVER_MEMBERS_PER_WORD * intf::SERVER_MEMBER_BITS;
    (word_index * size_of::<u64>(), flags_shift)
}

/// Returns a server's MAC address and its flags in a service as one word, as server_at() in `bpf/lb/placement.h` does.
pub(super) fn server_entry(maps: &LoadBalancerMaps, service: ServiceIndex, id: ServerId) -> u64 {
    let (word_offset, flags_shift) = member_flags_offset_and_shift(service, id.get());
    let member_flags = maps.service_member_flags.load(word_offset) >> flags_shift & u64::from(intf::SERVER_MEMBER_MASK);
    maps.server_entries.load(server_entry_offset::<intf::server_entry>(id.get())) | member_flags << SERVER_FLAGS_SHIFT
}

pub(super) fn member_server_ids(maps: &LoadBalancerMaps, service: ServiceIndex) -> Vec<ServerId> {
    server_ids_with_flag(maps, service, intf::SERVER_KNOWN)
}

pub(super) fn server_ids_with_flag(maps: &LoadBalancerMaps, service: ServiceIndex, flag: u32) -> Vec<ServerId> {
    let first_word_index = usize::from(service.0) * intf::MEMBERSHIP_WORDS as usize;
    let mut server_ids = Vec::new();
    for word_index in 0..intf::MEMBERSHIP_WORDS as usize {
        let member_flags_word = maps.service_member_flags.load((first_word_index + word_index) * size_of::<u64>());
        let has_flag = |member: &u32| member_flags_word >> (member * intf::SERVER_MEMBER_BITS) & u64::from(flag) != 0;
        let members_of_word = if member_flags_word == 0 { 0..0 } else { 0..intf::SERVER_MEMBERS_PER_WORD };
        let server_number =
            |member: u32| word_index as u64 * u64::from(intf::SERVER_MEMBERS_PER_WORD) + u64::from(member);
        server_ids.extend(
            members_of_word.filter(has_flag).filter_map(|member| ServerId::try_from(server_number(member)).ok()),
        );
    }
    server_ids
}

impl LoadBalancer {
    /// Sets those flags of a service's server that are in `mask`. The write need not be atomic, as only this process
    /// writes flags.
    fn set_member_flags(&mut self, service: ServiceIndex, id: ServerId, mask: u32, flags: u32) {
        let (word_offset, flags_shift) = member_flags_offset_and_shift(service, id.get());
        let present_flags_word = self.maps.service_member_flags.load(word_offset);
        let changed_flags_word =
            present_flags_word & !(u64::from(mask) << flags_shift) | u64::from(flags) << flags_shift;
        if changed_flags_word != present_flags_word {
            self.maps.service_member_flags.store(word_offset, changed_flags_word);
        }
    }

    /// Marks the servers in `down_servers` as down, and the other servers of the service as up. `down_servers` is from
    /// the service's placement table.
    pub(super) fn set_down_servers(&mut self, service: ServiceIndex, down_servers: &[ServerId]) {
        let down_ids: BTreeSet<ServerId> = down_servers.iter().copied().collect();
        for recovered_id in
            server_ids_with_flag(&self.maps, service, intf::SERVER_DOWN).into_iter().filter(|id| !down_ids.contains(id))
        {
            self.set_member_flags(service, recovered_id, intf::SERVER_DOWN, 0);
        }
        down_ids.into_iter().for_each(|id| self.set_member_flags(service, id, intf::SERVER_DOWN, intf::SERVER_DOWN));
    }

    /// Adds a server to a service, or changes it. All services of the server share its MAC address.
    pub fn set_server(&mut self, service: ServiceIndex, id: ServerId, server: Server) {
        let server_flags = intf::SERVER_KNOWN | if server.is_eligible { intf::SERVER_ELIGIBLE } else { 0 };
        let encode_resolved_entry =
            |mac: MacAddress| mac.to_word() | u64::from(intf::SERVER_RESOLVED) << SERVER_FLAGS_SHIFT;
        if let Err(error) = self.move_server_clock_to_mac(service, id, server.mac, server.is_eligible) {
            tracing::warn!(
                event = "server-not-stamped",
                service = service_name(&self.maps, service),
                server_id = %id,
                error = format!("{error:#}"),
                "the load balancer cannot stamp replies of the server, whose service has `timestamps = \"lb\"`"
            );
        }
        self.maps
            .server_entries
            .store(server_entry_offset::<intf::server_entry>(id.get()), server.mac.map_or(0, encode_resolved_entry));
        self.set_member_flags(service, id, CONFIGURED_SERVER_FLAGS, server_flags);
    }

    /// Sets whether the server is down according to this load balancer's health checks. If it is, it gets no new
    /// connections from this load balancer, and its UDP flows move to other servers.
    pub fn set_server_masked(&mut self, service: ServiceIndex, id: ServerId, is_masked: bool) {
        self.set_member_flags(service, id, intf::SERVER_MASKED, if is_masked { intf::SERVER_MASKED } else { 0 });
    }

    /// Removes a server from a service. Packets of its connections are then broadcast at a limited rate.
    pub fn remove_server(&mut self, service: ServiceIndex, id: ServerId) {
        if let Err(error) = self.remove_lb_stamped_server(service, id) {
            tracing::warn!(
                event = "server-not-removed",
                service = service_name(&self.maps, service),
                server_id = %id,
                error = format!("{error:#}"),
                "the load balancer cannot delete the map entry of a removed server, whose service has `timestamps = \
                 \"lb\"`"
            );
        }
        self.set_member_flags(service, id, intf::SERVER_MEMBER_MASK, 0);
    }

    /// Returns a service's servers, sorted by id. After a take-over, they are the servers of the previous process.
    pub fn servers(&self, service: ServiceIndex) -> Vec<(ServerId, Server)> {
        member_server_ids(&self.maps, service)
            .into_iter()
            .filter_map(|id| Some((id, self.server(service, id)?)))
            .collect()
    }

    /// Returns the ids of a service's servers.
    pub fn member_server_ids(&self, service: ServiceIndex) -> Vec<ServerId> {
        member_server_ids(&self.maps, service)
    }

    /// Returns the state of a service's server, or `None` if the service has no such server.
    pub fn server(&self, service: ServiceIndex, id: ServerId) -> Option<Server> {
        let entry_word = server_entry(&self.maps, service, id);
        let server_flags = (entry_word >> SERVER_FLAGS_SHIFT) as u32;
        let server =
            Server { mac: resolved_mac_of_entry(entry_word), is_eligible: server_flags & intf::SERVER_ELIGIBLE != 0 };
        (server_flags & intf::SERVER_KNOWN != 0).then_some(server)
    }

    /// Sets whether packets and bytes are counted for each server. It is off by default, because it costs two additions
    /// per packet.
    pub fn set_server_traffic_counting(&mut self, is_enabled: bool) -> anyhow::Result<()> {
        self.load_variant(ProgramVariant { counts_server_traffic: is_enabled, ..self.variant })
    }

    /// Returns the numbers of packets and bytes sent to a server, summed over all services.
    pub fn server_traffic(&self, id: ServerId) -> ServerTraffic {
        let [sum] = self.traffic_of_servers(&[id])[..] else { unreachable!("one of each") };
        sum
    }

    /// Returns the traffic of each server in `ids`, in the same order. Counters are read row by row, because reading
    /// them server by server would cause a cache miss for each server.
    pub fn traffic_of_servers(&self, ids: &[ServerId]) -> Vec<ServerTraffic> {
        let mut traffic_sums = vec![ServerTraffic::default(); ids.len()];
        for row in 0..self.maps.counter_row_count() {
            for (id, sum) in ids.iter().zip(&mut traffic_sums) {
                let entry_index = row * ServerId::COUNT + usize::from(id.get());
                let load_field =
                    |field| self.maps.server_traffic.load(entry_index * size_of::<intf::server_traffic>() + field);
                sum.opened_connection_count += load_field(offset_of!(intf::server_traffic, opened));
                sum.closed_connection_count += load_field(offset_of!(intf::server_traffic, closed));
                sum.packet_count += load_field(offset_of!(intf::server_traffic, packets));
                sum.frame_bytes += load_field(offset_of!(intf::server_traffic, bytes));
            }
        }
        traffic_sums
    }
}
