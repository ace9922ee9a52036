//! Guarantees of the documentation, checked on every packet. The code follows docs/design.md and does not use the
//! model's code, so it also finds faults that program and model have in common.
//!
//! * A packet to one server goes to a server of its service, or to a load balancer that owns the connection's entry.
//! * A new connection goes to an eligible server: neither draining, nor down, nor removed.
//! * A UDP flow leaves a server that is down.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use coreward_model::lb::{Mac, Owner};
use coreward_model::{ServerId, ServiceAddress};

use crate::change::{Change, Difference};
use crate::frame::{ETHERNET_HEADER_BYTES, TCP, UDP, hex};
use crate::ipv6;

/// Service as the changes of the state define it, with its known flows.
#[derive(Debug)]
struct Service {
    address: ServiceAddress,
    other_balancer: Option<ServerId>,
    /// Servers of the service, with whether their configuration lets them take new connections (false while draining).
    servers: HashMap<ServerId, bool>,
    /// Servers that are members of the placement table.
    table_servers: HashSet<ServerId>,
    /// Servers that the placement table marks as down.
    down_servers: HashSet<ServerId>,
    /// Clients of UDP flows that have had an earlier packet.
    known_udp_flows: HashSet<SocketAddr>,
}

/// State from which the guarantees of a packet follow.
#[derive(Debug, Default)]
pub struct Guarantees {
    services: HashMap<usize, Service>,
    macs: HashMap<ServerId, Option<Mac>>,
    owners: HashMap<u8, Mac>,
}

struct FrameHeader {
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    /// Source port and destination port; `None` in a later fragment.
    ports: Option<(u16, u16)>,
    /// TCP flags SYN, ACK, FIN and RST; 0 if there is no TCP header.
    flags: u8,
}

fn read(frame: &[u8]) -> Option<FrameHeader> {
    const SYN_ACK_FIN_RST: u8 = 0x17;
    let word = |bytes: &[u8], at: usize| Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
    if let Some(headers) = ipv6::read(frame) {
        let behind = frame.get(headers.transport_offset..).filter(|_| !headers.is_later_fragment).unwrap_or_default();
        let flags = behind.get(13).copied().unwrap_or(0) & SYN_ACK_FIN_RST;
        let ([source, destination], ports) = (headers.ends.map(IpAddr::from), word(behind, 0).zip(word(behind, 2)));
        return Some(FrameHeader { source, destination, protocol: headers.protocol, ports, flags });
    }
    let ip = frame.get(ETHERNET_HEADER_BYTES..)?;
    let address = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(ip.get(at..at + 4)?).ok()?));
    let behind = ip.get(usize::from(*ip.first()? & 0xf) * 4..)?;
    let later = word(ip, 6)? & 0x1fff != 0;
    let ports = if later { None } else { word(behind, 0).zip(word(behind, 2)) };
    let flags = if later { 0 } else { behind.get(13).copied().unwrap_or(0) & SYN_ACK_FIN_RST };
    Some(FrameHeader { source: address(12)?, destination: address(16)?, protocol: *ip.get(9)?, ports, flags })
}

impl Service {
    fn takes_new_connections(&self, id: ServerId) -> bool {
        self.servers.get(&id) == Some(&true) && !self.is_down(id)
    }

    fn is_down(&self, id: ServerId) -> bool {
        self.down_servers.contains(&id)
    }
}

impl Guarantees {
    /// Updates the state by a change. `service_slots` are the slots of the services of a [`Change::Services`].
    pub fn apply(&mut self, change: &Change, service_slots: &[usize]) {
        match change {
            Change::Services(services) => {
                let mut before = std::mem::take(&mut self.services);
                for ((address, mode), service_slot) in services.iter().zip(service_slots) {
                    let kept = before.remove(service_slot).filter(|service| service.address == *address);
                    let mut service = kept.unwrap_or_else(|| Service {
                        address: *address,
                        other_balancer: None,
                        servers: HashMap::new(),
                        table_servers: HashSet::new(),
                        down_servers: HashSet::new(),
                        known_udp_flows: HashSet::new(),
                    });
                    service.other_balancer = mode.migration.map(|transfer| transfer.other_balancer());
                    self.services.insert(*service_slot, service);
                }
            }
            Change::Server(service_slot, id, server) => {
                let Some(service) = self.services.get_mut(service_slot) else { return };
                match server {
                    Some(server) => {
                        service.servers.insert(*id, server.eligible);
                        self.macs.insert(*id, server.mac);
                    }
                    None => {
                        service.servers.remove(id);
                        service.down_servers.remove(id);
                    }
                }
            }
            Change::Table(service_slot, table) => {
                let Some(service) = self.services.get_mut(service_slot) else { return };
                service.table_servers = table.members.iter().map(|member| member.server).collect();
                service.down_servers = table.down_servers.iter().copied().collect();
            }
            Change::Owner(number, Owner::Reachable(mac)) => drop(self.owners.insert(number.get(), *mac)),
            Change::Owner(number, _) => drop(self.owners.remove(&number.get())),
            _ => {}
        }
    }

    fn has_address(&self, id: ServerId, mac: Mac) -> bool {
        self.macs.get(&id).copied().flatten() == Some(mac)
    }

    /// Returns the guarantee that the program breaks by turning `frame` into `after`, if any.
    pub fn find_violation(&mut self, frame: &[u8], after: &[u8]) -> Option<Difference> {
        let seen = read(frame)?;
        let destination: Mac = after.get(..6)?.try_into().ok()?;
        if destination == [0xff; 6] {
            return None;
        }
        let of_vip = |service: &&Service| service.address.socket.ip() == seen.destination;
        let exactly = |service: &&Service| {
            seen.ports.is_some_and(|(_, port)| port == service.address.socket.port())
                && service.address.protocol.number() == seen.protocol
        };
        let with_ports = seen.ports.is_some() && [TCP, UDP].contains(&seen.protocol);
        let services: Vec<&Service> =
            self.services.values().filter(of_vip).filter(|service| !with_ports || exactly(service)).collect();
        let any = |fits: &dyn Fn(&Service, ServerId) -> bool| {
            services.iter().any(|service| {
                service.servers.keys().any(|id| fits(service, *id) && self.has_address(*id, destination))
            })
        };
        let other_balancer =
            services.iter().any(|service| service.other_balancer.is_some_and(|id| self.has_address(id, destination)));
        let opens = seen.protocol == TCP && seen.flags == 0x02;
        let to_owner = !opens && seen.protocol != UDP && self.owners.values().any(|owner| *owner == destination);
        let guarantee = if other_balancer || to_owner {
            None
        } else if !any(&|_, _| true) {
            Some("a packet goes to a server of its service")
        } else if opens && !any(&Service::takes_new_connections) {
            Some("a new connection goes to a server that takes new ones")
        } else if seen.protocol == UDP && with_ports {
            self.find_flow_violation(&services, &seen, destination)
        } else {
            None
        };
        self.remember_flow(&seen);
        guarantee.map(|guarantee| Difference {
            subject: format!("a guarantee of docs/design.md: {guarantee}"),
            expected: hex(frame),
            actual: hex(after),
        })
    }

    /// Records the flow of a datagram that was dropped after its placement, because its outer header makes it too long.
    pub fn record_dropped_datagram(&mut self, frame: &[u8]) {
        if let Some(seen) = read(frame) {
            self.remember_flow(&seen);
        }
    }

    fn remember_flow(&mut self, seen: &FrameHeader) {
        let Some((source, port)) = seen.ports.filter(|_| seen.protocol == UDP) else { return };
        let of_flow = |service: &&mut Service| {
            service.address.socket == SocketAddr::new(seen.destination, port)
                && service.address.protocol.number() == seen.protocol
        };
        if let Some(service) = self.services.values_mut().find(of_flow) {
            service.known_udp_flows.insert(SocketAddr::new(seen.source, source));
        }
    }

    /// Returns the guarantee of UDP flows that is broken by sending a datagram to this server of its service, if any.
    fn find_flow_violation(&self, services: &[&Service], seen: &FrameHeader, destination: Mac) -> Option<&'static str> {
        let [service] = services else { return None };
        let (port, _) = seen.ports?;
        let there: Vec<ServerId> =
            service.servers.keys().copied().filter(|id| self.has_address(*id, destination)).collect();
        let takes =
            |id: &ServerId| service.takes_new_connections(*id) && self.macs.get(id).copied().flatten().is_some();
        if there.iter().any(takes) {
            return None;
        }
        if !service.known_udp_flows.contains(&SocketAddr::new(seen.source, port)) {
            return Some("a new UDP flow goes to a server that takes new ones");
        }
        // The placement rule tries only some members, so it may miss the few eligible ones.
        let eligible_count = service.table_servers.iter().filter(|id| takes(id)).count();
        let all_down = there.iter().all(|id| service.is_down(*id));
        (all_down && eligible_count > 0 && eligible_count * 2 >= service.table_servers.len())
            .then_some("a UDP flow leaves a server that is down")
    }
}
