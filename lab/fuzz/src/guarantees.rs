//! Checks the documentation's guarantees on every packet. The code follows docs/design.md and does not use the model's
//! code, so it also finds faults that the program and the model have in common.
//!
//! * A packet that is not broadcast goes to a server of its service, or to a load balancer that owns its table entry.
//! * A new connection goes to an eligible server, which is neither draining, nor down, nor removed.
//! * A UDP flow moves away from a server that is down.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use coreward_model::lb::{MacAddress, TableOwnerReachability};
use coreward_model::{ServerId, ServiceAddress};

use crate::frame::{ETHERNET_HEADER_BYTES, PROTOCOL_TCP, PROTOCOL_UDP, format_hex};
use crate::ipv6_translation;
use crate::state_change::{LoadBalancerStateChange, ModelDifference};

/// Expected state of a service after all changes so far, with its known UDP flows.
#[derive(Debug)]
struct ServiceExpectations {
    address: ServiceAddress,
    migration_balancer_id: Option<ServerId>,
    /// Servers of the service. The value is true if the configuration lets the server take new connections (false while
    /// draining).
    eligibility_by_server: HashMap<ServerId, bool>,
    /// Servers that are members of the placement table.
    placement_table_servers: HashSet<ServerId>,
    /// Servers that the placement table marks as down.
    down_servers: HashSet<ServerId>,
    /// Clients of UDP flows that have already sent a packet.
    known_udp_clients: HashSet<SocketAddr>,
}

/// Checker of forwarding guarantees, with the state that decides which guarantees apply to a packet.
#[derive(Debug, Default)]
pub struct ForwardingGuaranteeChecker {
    services: HashMap<usize, ServiceExpectations>,
    server_macs: HashMap<ServerId, Option<MacAddress>>,
    owner_macs: HashMap<u8, MacAddress>,
}

struct FrameHeader {
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    /// Source port and destination port, or `None` in a later fragment.
    source_and_destination_ports: Option<(u16, u16)>,
    /// TCP flags SYN, ACK, FIN and RST, or 0 if there is no TCP header.
    tcp_flags: u8,
}

impl FrameHeader {
    fn has_ports(&self) -> bool {
        self.source_and_destination_ports.is_some() && [PROTOCOL_TCP, PROTOCOL_UDP].contains(&self.protocol)
    }
}

fn read_frame_header(frame: &[u8]) -> Option<FrameHeader> {
    const SYN_ACK_FIN_RST_MASK: u8 = 0x17;
    let read_u16_at =
        |bytes: &[u8], offset: usize| Some(u16::from_be_bytes([*bytes.get(offset)?, *bytes.get(offset + 1)?]));
    if let Some(headers) = ipv6_translation::parse_frame(frame) {
        let transport_header =
            frame.get(headers.transport_offset..).filter(|_| !headers.is_later_fragment).unwrap_or_default();
        let tcp_flags = transport_header.get(13).copied().unwrap_or(0) & SYN_ACK_FIN_RST_MASK;
        let ([source, destination], ports) = (
            headers.source_and_destination.map(IpAddr::from),
            read_u16_at(transport_header, 0).zip(read_u16_at(transport_header, 2)),
        );
        return Some(FrameHeader {
            source,
            destination,
            protocol: headers.protocol,
            source_and_destination_ports: ports,
            tcp_flags,
        });
    }
    let ip_packet = frame.get(ETHERNET_HEADER_BYTES..)?;
    let read_address_at =
        |offset: usize| Some(IpAddr::from(<[u8; 4]>::try_from(ip_packet.get(offset..offset + 4)?).ok()?));
    let transport_header = ip_packet.get(usize::from(*ip_packet.first()? & 0xf) * 4..)?;
    let is_later_fragment = read_u16_at(ip_packet, 6)? & 0x1fff != 0;
    let ports =
        if is_later_fragment { None } else { read_u16_at(transport_header, 0).zip(read_u16_at(transport_header, 2)) };
    let tcp_flags =
        if is_later_fragment { 0 } else { transport_header.get(13).copied().unwrap_or(0) & SYN_ACK_FIN_RST_MASK };
    Some(FrameHeader {
        source: read_address_at(12)?,
        destination: read_address_at(16)?,
        protocol: *ip_packet.get(9)?,
        source_and_destination_ports: ports,
        tcp_flags,
    })
}

impl ServiceExpectations {
    fn new(address: ServiceAddress) -> Self {
        Self {
            address,
            migration_balancer_id: None,
            eligibility_by_server: HashMap::new(),
            placement_table_servers: HashSet::new(),
            down_servers: HashSet::new(),
            known_udp_clients: HashSet::new(),
        }
    }

    fn takes_new_connections(&self, id: ServerId) -> bool {
        self.eligibility_by_server.get(&id) == Some(&true) && !self.is_server_down(id)
    }

    fn is_server_down(&self, id: ServerId) -> bool {
        self.down_servers.contains(&id)
    }
}

impl ForwardingGuaranteeChecker {
    /// Updates the state after a change. `service_slots` are the slots of the services in a
    /// [`LoadBalancerStateChange::ReplaceServices`].
    pub fn apply_change(&mut self, change: &LoadBalancerStateChange, service_slots: &[usize]) {
        match change {
            LoadBalancerStateChange::ReplaceServices(services) => {
                let mut previous_services = std::mem::take(&mut self.services);
                for ((address, mode), service_slot) in services.iter().zip(service_slots) {
                    let previous_service =
                        previous_services.remove(service_slot).filter(|service| service.address == *address);
                    let mut service = previous_service.unwrap_or_else(|| ServiceExpectations::new(*address));
                    service.migration_balancer_id = mode.migration.map(|migration| migration.other_balancer_id());
                    self.services.insert(*service_slot, service);
                }
            }
            LoadBalancerStateChange::SetServer(service_slot, id, server) => {
                let Some(service) = self.services.get_mut(service_slot) else { return };
                match server {
                    Some(server) => {
                        service.eligibility_by_server.insert(*id, server.is_eligible);
                        self.server_macs.insert(*id, server.mac);
                    }
                    None => {
                        service.eligibility_by_server.remove(id);
                        service.down_servers.remove(id);
                    }
                }
            }
            LoadBalancerStateChange::InstallPlacementTable(service_slot, table) => {
                let Some(service) = self.services.get_mut(service_slot) else { return };
                service.placement_table_servers = table.members.iter().map(|member| member.server).collect();
                service.down_servers = table.down_servers.iter().copied().collect();
            }
            LoadBalancerStateChange::SetTableOwner(owner_number, TableOwnerReachability::Reachable(mac)) => {
                _ = self.owner_macs.insert(owner_number.get(), *mac)
            }
            LoadBalancerStateChange::SetTableOwner(owner_number, _) => {
                self.owner_macs.remove(&owner_number.get());
            }
            _ => {}
        }
    }

    fn has_server_mac(&self, id: ServerId, mac: MacAddress) -> bool {
        self.server_macs.get(&id).copied().flatten() == Some(mac)
    }

    /// Returns the guarantee that the program breaks by turning `frame` into `processed_frame`, if any.
    pub fn find_violation(&mut self, frame: &[u8], processed_frame: &[u8]) -> Option<ModelDifference> {
        let frame_header = read_frame_header(frame)?;
        let destination_mac: MacAddress = processed_frame.get(..6)?.try_into().ok()?;
        if destination_mac == [0xff; 6] {
            return None;
        }
        let broken_guarantee = self.find_broken_guarantee(&frame_header, destination_mac);
        self.record_udp_flow(&frame_header);
        broken_guarantee.map(|guarantee| ModelDifference {
            compared_item: format!("a guarantee of docs/design.md: {guarantee}"),
            reference_model_result: format_hex(frame),
            bpf_program_result: format_hex(processed_frame),
        })
    }

    /// Returns the guarantee that is broken if the packet goes to this destination, if any.
    fn find_broken_guarantee(&self, frame_header: &FrameHeader, destination_mac: MacAddress) -> Option<&'static str> {
        let matching_services = self.find_matching_services(frame_header);
        let goes_to_matching_server = |is_match: &dyn Fn(&ServiceExpectations, ServerId) -> bool| {
            matching_services.iter().any(|service| {
                service
                    .eligibility_by_server
                    .keys()
                    .any(|id| is_match(service, *id) && self.has_server_mac(*id, destination_mac))
            })
        };
        let goes_to_other_balancer = matching_services
            .iter()
            .any(|service| service.migration_balancer_id.is_some_and(|id| self.has_server_mac(id, destination_mac)));
        let is_new_connection = frame_header.protocol == PROTOCOL_TCP && frame_header.tcp_flags == 0x02;
        let goes_to_owner = !is_new_connection
            && frame_header.protocol != PROTOCOL_UDP
            && self.owner_macs.values().any(|owner_mac| *owner_mac == destination_mac);
        if goes_to_other_balancer || goes_to_owner {
            None
        } else if !goes_to_matching_server(&|_, _| true) {
            Some("a packet goes to a server of its service")
        } else if is_new_connection && !goes_to_matching_server(&ServiceExpectations::takes_new_connections) {
            Some("a new connection goes to a server that takes new ones")
        } else if frame_header.protocol == PROTOCOL_UDP && frame_header.has_ports() {
            self.find_udp_flow_violation(&matching_services, frame_header, destination_mac)
        } else {
            None
        }
    }

    /// Returns the services with the packet's VIP. If the packet has ports, port and protocol must match, too.
    fn find_matching_services(&self, frame_header: &FrameHeader) -> Vec<&ServiceExpectations> {
        let has_destination_vip =
            |service: &&ServiceExpectations| service.address.vip_and_port.ip() == frame_header.destination;
        let has_port_and_protocol = |service: &&ServiceExpectations| {
            frame_header
                .source_and_destination_ports
                .is_some_and(|(_, port)| port == service.address.vip_and_port.port())
                && service.address.protocol.iana_number() == frame_header.protocol
        };
        self.services
            .values()
            .filter(has_destination_vip)
            .filter(|service| !frame_header.has_ports() || has_port_and_protocol(service))
            .collect()
    }

    /// Records the flow of a datagram that was placed, but then dropped because its outer header makes it too long.
    pub fn record_dropped_datagram_flow(&mut self, frame: &[u8]) {
        if let Some(frame_header) = read_frame_header(frame) {
            self.record_udp_flow(&frame_header);
        }
    }

    fn record_udp_flow(&mut self, frame_header: &FrameHeader) {
        let Some((source_port, destination_port)) =
            frame_header.source_and_destination_ports.filter(|_| frame_header.protocol == PROTOCOL_UDP)
        else {
            return;
        };
        let is_destination_service = |service: &&mut ServiceExpectations| {
            service.address.vip_and_port == SocketAddr::new(frame_header.destination, destination_port)
                && service.address.protocol.iana_number() == frame_header.protocol
        };
        if let Some(service) = self.services.values_mut().find(is_destination_service) {
            service.known_udp_clients.insert(SocketAddr::new(frame_header.source, source_port));
        }
    }

    /// Returns the guarantee for UDP flows that is broken if a datagram goes to this server, if any.
    fn find_udp_flow_violation(
        &self,
        services: &[&ServiceExpectations],
        frame_header: &FrameHeader,
        destination_mac: MacAddress,
    ) -> Option<&'static str> {
        let [service] = services else { return None };
        let (source_port, _) = frame_header.source_and_destination_ports?;
        let servers_with_mac: Vec<ServerId> = service
            .eligibility_by_server
            .keys()
            .copied()
            .filter(|id| self.has_server_mac(*id, destination_mac))
            .collect();
        let can_take_new_flows =
            |id: &ServerId| service.takes_new_connections(*id) && self.server_macs.get(id).copied().flatten().is_some();
        if servers_with_mac.iter().any(can_take_new_flows) {
            return None;
        }
        if !service.known_udp_clients.contains(&SocketAddr::new(frame_header.source, source_port)) {
            return Some("a new UDP flow goes to a server that takes new ones");
        }
        // The placement rule tries only some members of the table, so it may miss the eligible ones if they are few.
        let eligible_server_count = service.placement_table_servers.iter().filter(|id| can_take_new_flows(id)).count();
        let are_all_down = servers_with_mac.iter().all(|id| service.is_server_down(*id));
        (are_all_down
            && eligible_server_count > 0
            && eligible_server_count * 2 >= service.placement_table_servers.len())
        .then_some("a UDP flow leaves a server that is down")
    }
}
