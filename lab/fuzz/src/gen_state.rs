//! State of a harness as the generator tracks it, and changes of that state.

use std::net::{IpAddr, Ipv4Addr};

use coreward_intf as intf;
use coreward_model::connection_table::{ClockTicks, OwnerNumber, TableSize};
use coreward_model::consistency::{Consistency, ServiceMigration, ServiceMode, Timestamps};
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::forwarding::Forwarding;
use coreward_model::lb::{
    BroadcastReason, Mac, Outcome, OuterHeader, Owner, REASON_COUNT, Server, TokenBucketSelector, Vlans,
};
use coreward_model::lb_stamping;
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::tuple::Protocol;
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, ServiceAddress};

use crate::change::Change;
use crate::frame::ETHERNET_HEADER_BYTES;
use crate::fuzz_rng::FuzzRng;
use crate::harness::{HarnessSetup, OWN_MAC, SERVER_VLANS};
use crate::ipv6;

/// VIPs of generated services, of which two represent IPv6 VIPs.
const VIPS: [Ipv4Addr; 5] = [
    Ipv4Addr::new(10, 200, 0, 1),
    Ipv4Addr::new(10, 200, 0, 2),
    Ipv4Addr::new(192, 0, 2, 255),
    ipv6::IPV6_PLACEHOLDERS[0],
    ipv6::IPV6_PLACEHOLDERS[1],
];
/// Ports of generated services. They are few, so that packets to other ports of a VIP often belong to another service.
const PORTS: [u16; 4] = [80, 443, 0x5050, 65_535];

/// Consistency modes to choose from. The complicated ones are repeated, so that they are chosen more often.
const MODES: [Consistency; 7] = [
    Consistency::Stateless,
    Consistency::Stateless,
    Consistency::Stateful,
    Consistency::Stateful,
    Consistency::None,
    Consistency::HashTable,
    Consistency::Beamer,
];
/// Maximum number of recorded connections that have an entry of the connection table.
const MAX_TABLE_CONNECTIONS: usize = 2048;

/// Connection that has got an entry of the connection table.
#[derive(Debug, Clone, Copy)]
pub struct TableConnection {
    pub service_slot: usize,
    /// Address and port of the connection's client.
    pub client: (Ipv4Addr, u16),
    /// Index of the entry, which cookies of kind 1 contain.
    pub table_index: u16,
}

/// Service as the generator knows it.
#[derive(Debug, Clone)]
pub struct GeneratedService {
    /// VIP, port and protocol of the service.
    pub address: ServiceAddress,
    /// VIP and port, where an IPv4 placeholder represents an IPv6 VIP.
    pub vip: (Ipv4Addr, u16),
    pub mode: ServiceMode,
    pub service_slot: usize,
    /// Ids of the present servers and of earlier ones.
    pub servers: Vec<ServerId>,
    /// Source MAC addresses of the present servers' packets, and of earlier servers' packets.
    pub server_macs: Vec<Mac>,
}

impl GeneratedService {
    /// Returns a change that gives a server a random state, sometimes with the MAC address of another server.
    fn server_change(&mut self, id: ServerId, rng: &mut FuzzRng) -> Change {
        let mut server = server(rng);
        if let Some(mac) = &mut server.mac {
            if !self.server_macs.is_empty() && rng.chance(1, 8) {
                *mac = rng.pick(&self.server_macs);
            }
            self.server_macs.push(*mac);
        }
        Change::Server(self.service_slot, id, Some(server))
    }

    /// Returns whether load balancers stamp the cookies of this service themselves.
    pub fn is_lb_stamped(&self) -> bool {
        self.mode.timestamps == Timestamps::LoadBalancer
    }
}

/// State of the generator, from which it derives packets and changes.
pub struct GenState {
    /// Setup of the harness. Only its keys change during the epoch.
    pub setup: HarnessSetup,
    pub services: Vec<GeneratedService>,
    /// Addresses and ports of clients that later packets use again.
    pub clients: Vec<(Ipv4Addr, u16)>,
    /// Present and earlier connections that have got an entry of the connection table.
    pub table_connections: Vec<TableConnection>,
    /// MAC addresses of other load balancers, which own connection tables.
    pub owner_macs: Vec<Mac>,
    /// Time that the program reads while it processes packets.
    pub clock: ClockTicks,
    /// Whether user space frees entries of the connection table. Otherwise the table fills, and packets reuse expired
    /// entries.
    pub frees_connections: bool,
    vips: Vec<Ipv4Addr>,
    rules: Vec<PlacementRule>,
    modes: Vec<Consistency>,
    protocols: Vec<Protocol>,
    forwardings: Vec<Forwarding>,
    generation: u64,
}

impl GenState {
    /// Returns a state with random setup and clients, but without services.
    pub fn new(rng: &mut FuzzRng) -> Self {
        let clients = (0..512).map(|_| (Ipv4Addr::from(rng.u32()), rng.u16())).collect();
        let size = TableSize::try_from(rng.pick(&[1024, 1024, 4096, 65_536])).expect("a power of two");
        let outer = HarnessSetup::new(OWN_MAC, keys(rng)).outer;
        let setup = HarnessSetup {
            count_traffic: rng.chance(1, 2),
            connection_table: size,
            connection_key: CookieKey::random(&mut rng.0),
            // Small sizes fill sets; large sizes leave most sets with room.
            flow_set_count: rng.pick(&[1, 24, 1 << 10, 1 << 15]),
            // The small MTU makes some frames too long.
            outer: OuterHeader { mtu: rng.pick(&[1500, 90]), ..outer },
            vlans: vlans(rng),
            ..HarnessSetup::new(OWN_MAC, keys(rng))
        };
        let (rules, modes) = (pick_subset(&PlacementRule::ALL, rng), pick_subset(&MODES, rng));
        let protocols = rng.pick(&[&[Protocol::Tcp][..], &[Protocol::Tcp, Protocol::Tcp, Protocol::Udp]]).to_vec();
        Self {
            setup,
            services: Vec::new(),
            clients,
            table_connections: Vec::new(),
            owner_macs: vec![[2, 0, 0, 2, 0, 1]],
            clock: ClockTicks(0),
            frees_connections: rng.chance(1, 2),
            // An address family without a service is not compiled into the program.
            vips: rng.pick(&[&VIPS[..], &VIPS[..3], &VIPS[3..]]).to_vec(),
            rules,
            modes,
            protocols,
            forwardings: pick_subset(&Forwarding::ALL, rng),
            generation: 0,
        }
    }

    /// Returns a change to new services, of which some are present ones, perhaps with another mode.
    pub fn new_services(&mut self, rng: &mut FuzzRng) -> Change {
        let mut services: Vec<(ServiceAddress, ServiceMode)> = Vec::new();
        for planned in &self.services {
            if rng.chance(2, 3) {
                let mode = if rng.chance(1, 4) { self.mode(planned.address.protocol, rng) } else { planned.mode };
                services.push((planned.address, mode));
            }
        }
        let count = 1 + rng.below(5);
        while services.len() < count {
            let socket = ipv6::socket((rng.pick(&self.vips), rng.pick(&PORTS)));
            let address = ServiceAddress { socket, protocol: rng.pick(&self.protocols) };
            if !services.iter().any(|(other, _)| *other == address) {
                services.push((address, self.mode(address.protocol, rng)));
            }
        }
        Change::Services(services)
    }

    /// Returns a random mode that a service of this protocol may have.
    fn mode(&self, protocol: Protocol, rng: &mut FuzzRng) -> ServiceMode {
        if protocol == Protocol::Udp {
            let consistency = rng.pick(&[Consistency::HashTable, Consistency::None]);
            let default = ServiceMode::default_for(Protocol::Udp);
            return ServiceMode { consistency, forwarding: rng.pick(&self.forwardings), ..default };
        }
        let consistency = rng.pick(&self.modes);
        let timestamps = match rng.below(15) {
            0..3 => Timestamps::Off,
            3..7 if consistency == Consistency::Stateless => Timestamps::LoadBalancer,
            _ => Timestamps::Server,
        };
        let forwarding = match timestamps {
            Timestamps::LoadBalancer => Forwarding::L2,
            _ => rng.pick(&self.forwardings),
        };
        let mode = ServiceMode { consistency, timestamps, migration: None, forwarding };
        let transfer = mode.can_migrate() && rng.chance(1, 3);
        ServiceMode { migration: transfer.then(|| self.transfer(rng)), ..mode }
    }

    /// Returns a migration, mostly with a server's id for the other load balancer, so that its MAC address is known.
    fn transfer(&self, rng: &mut FuzzRng) -> ServiceMigration {
        let known: Vec<ServerId> = self.services.iter().flat_map(|service| service.servers.iter().copied()).collect();
        let other = match known.is_empty() || rng.chance(1, 8) {
            true => ServerId::try_from(rng.below(intf::SERVER_ID_COUNT as usize) as u64).expect("in range"),
            false => rng.pick(&known),
        };
        if rng.chance(1, 2) { ServiceMigration::AdoptedFrom(other) } else { ServiceMigration::HandedOverTo(other) }
    }

    /// Records the services of a [`Change::Services`], and the slots that the reference model has given them.
    pub fn record_service_slots(&mut self, services: &[(ServiceAddress, ServiceMode)], service_slots: &[usize]) {
        let before = std::mem::take(&mut self.services);
        let placed = services.iter().zip(service_slots).map(|((address, mode), service_slot)| {
            let kept = before.iter().find(|service| service.address == *address);
            let vip = match address.socket.ip() {
                IpAddr::V4(vip) => vip,
                IpAddr::V6(vip) => ipv6::placeholder(vip),
            };
            let (servers, server_macs) =
                kept.map_or_else(Default::default, |service| (service.servers.clone(), service.server_macs.clone()));
            GeneratedService {
                address: *address,
                vip: (vip, address.socket.port()),
                mode: *mode,
                service_slot: *service_slot,
                servers,
                server_macs,
            }
        });
        self.services = placed.collect();
    }

    /// Returns changes that give a new service servers and a placement table.
    pub fn fill_service(&mut self, service: usize, rng: &mut FuzzRng) -> Vec<Change> {
        // Some services have no server, some have thousands, some have the smallest and the largest id.
        let count = match rng.below(20) {
            0 => 0,
            1 => 1 + rng.below(5000),
            _ => 1 + rng.below(40),
        };
        let mut changes: Vec<Change> = (0..count).map(|_| self.new_server(service, rng)).collect();
        let planned = &mut self.services[service];
        if let Some(transfer) = planned.mode.migration
            && !rng.chance(1, 8)
        {
            changes.push(planned.server_change(transfer.other_balancer(), rng));
        }
        if !rng.chance(1, 16) {
            changes.extend(self.new_table(service, rng));
        }
        changes
    }

    fn new_server(&mut self, service: usize, rng: &mut FuzzRng) -> Change {
        let planned = &mut self.services[service];
        let number = match rng.below(40) {
            0 => 0,
            1 => intf::SERVER_ID_COUNT as usize - 1,
            // LB-side cookies can name nearly all ids.
            2..39 if planned.is_lb_stamped() => rng.below(lb_stamping::SERVER_ID_COUNT as usize),
            _ => rng.below(intf::SERVER_ID_COUNT as usize),
        };
        let id = ServerId::try_from(number as u64).expect("in range");
        planned.servers.push(id);
        planned.server_change(id, rng)
    }

    fn new_table(&mut self, service: usize, rng: &mut FuzzRng) -> Option<Change> {
        self.generation += 1 + rng.below(3) as u64 * 0x7ff;
        let planned = &self.services[service];
        let mut servers = planned.servers.clone();
        servers.sort();
        servers.dedup();
        servers.truncate(400);
        if servers.is_empty() {
            return None;
        }
        let groups = 1 + rng.below(intf::MAX_RSS_GROUPS as usize);
        let rule = rng.pick(&self.rules);
        let mut table = PlacementTable::random(rule, self.generation, groups, &servers, &mut rng.0);
        if rng.chance(1, 20) {
            // A placement table without an eligible server.
            table.members.clear();
            table.consistent_servers.clear();
            table.previous_consistent_servers.clear();
        }
        let is_member = |id: &ServerId| table.members.iter().any(|member| member.server == *id);
        table.down_servers = servers.into_iter().filter(|id| !is_member(id) && rng.chance(2, 3)).collect();
        Some(Change::Table(planned.service_slot, table))
    }

    /// Records the entry that a new connection has got. `frame` is the packet before the program changed it.
    pub fn observe(&mut self, outcome: &Outcome, frame: &[u8]) {
        let (Some(reported), Some(service_slot)) = (outcome.reported_entry, outcome.service) else { return };
        let bytes = |at: usize| <[u8; 4]>::try_from(&frame[at..at + 4]).expect("four bytes");
        let (client, transport) = match ipv6::read(frame) {
            Some(headers) => (ipv6::placeholder(headers.ends[0]), headers.transport_offset),
            None => (
                Ipv4Addr::from(bytes(ETHERNET_HEADER_BYTES + 12)),
                ETHERNET_HEADER_BYTES + usize::from(frame[ETHERNET_HEADER_BYTES] & 0xf) * 4,
            ),
        };
        let port = u16::from_be_bytes([frame[transport], frame[transport + 1]]);
        let new = TableConnection {
            service_slot,
            client: (client, port),
            table_index: (reported & intf::COOKIE_ID_MASK) as u16,
        };
        // Makes room by removing an old connection.
        if self.table_connections.len() == MAX_TABLE_CONNECTIONS {
            self.table_connections.swap_remove(reported as usize % MAX_TABLE_CONNECTIONS);
        }
        self.table_connections.push(new);
    }

    fn owner_change(&mut self, rng: &mut FuzzRng) -> Change {
        // Few numbers, so that forged and old indexes often match an owner.
        let number = OwnerNumber::try_from(rng.below(4) as u64).expect("in range");
        match rng.below(4) {
            0 if rng.chance(1, 4) => Change::LocalOwnerNumber(rng.chance(3, 4).then_some(number)),
            1 => Change::Owner(number, Owner::Lost),
            2 => Change::Owner(number, Owner::Unknown),
            _ => {
                let mac = [2, 0, 0, 2, 0, rng.u8()];
                self.owner_macs.push(mac);
                Change::Owner(number, Owner::Reachable(mac))
            }
        }
    }

    /// Returns a random change that needs no RCU grace period.
    pub fn small_change(&mut self, rng: &mut FuzzRng) -> Change {
        let service = rng.below(self.services.len());
        let planned = &self.services[service];
        match rng.below(16) {
            15 => Change::Sweep,
            14 => Change::LimitEntries(rng.chance(1, 2).then(|| 1 + rng.below(3) as u32)),
            10..12 => self.owner_change(rng),
            12 => {
                let reason = rng.below(REASON_COUNT) as BroadcastReason;
                let buckets = match rng.below(2) {
                    0 => TokenBucketSelector::Total(reason),
                    _ => TokenBucketSelector::Sources(rng.below(8)),
                };
                Change::BroadcastTokens(buckets, rng.chance(3, 4))
            }
            13 => {
                // Small steps in both directions put some flows over the idle limit, others not; some steps are
                // arbitrary.
                let step = rng.below(2 * intf::FLOW_IDLE_UDP_TICKS as usize) as u32;
                self.clock = match rng.below(8) {
                    0 => ClockTicks(rng.u32()),
                    1 => ClockTicks(self.clock.0.wrapping_sub(step)),
                    _ => ClockTicks(self.clock.0.wrapping_add(step)),
                };
                Change::Clock(self.clock)
            }
            0 => {
                self.setup.keys = keys(rng);
                Change::Keys(self.setup.keys)
            }
            // Key rotation keeps one key.
            1 => {
                self.setup.keys.keys[rng.below(2)] = CookieKey::random(&mut rng.0);
                Change::Keys(self.setup.keys)
            }
            2..4 => {
                let reason = rng.below(REASON_COUNT) as BroadcastReason;
                Change::BroadcastTokens(TokenBucketSelector::Service(planned.service_slot, reason), rng.chance(1, 2))
            }
            4 if !planned.servers.is_empty() => Change::Server(planned.service_slot, rng.pick(&planned.servers), None),
            5 if !planned.servers.is_empty() => {
                Change::Masked(planned.service_slot, rng.pick(&planned.servers), rng.chance(2, 3))
            }
            6..10 if !planned.servers.is_empty() => {
                let id = rng.pick(&planned.servers);
                self.services[service].server_change(id, rng)
            }
            _ => self.new_server(service, rng),
        }
    }

    /// Returns a random change for which the load balancer waits for an RCU grace period.
    pub fn table_change(&mut self, rng: &mut FuzzRng) -> Option<Change> {
        let service = rng.below(self.services.len());
        self.new_table(service, rng)
    }
}

/// Returns all of `all`, or one or two random ones. A feature that is not in use is not compiled into the program.
fn pick_subset<T: Copy>(all: &[T], rng: &mut FuzzRng) -> Vec<T> {
    match rng.below(3) {
        0 => all.to_vec(),
        1 => vec![rng.pick(all)],
        _ => vec![rng.pick(all), rng.pick(all)],
    }
}

/// Returns random VLANs for an epoch; two epochs of three have none.
fn vlans(rng: &mut FuzzRng) -> Vlans {
    let is_tagging_enabled = rng.chance(1, 3);
    let vip = if is_tagging_enabled { rng.pick(&SERVER_VLANS) } else { 0 };
    Vlans { is_tagging_enabled, vip: Vlan::from_id(vip.into()).expect("in range") }
}

fn keys(rng: &mut FuzzRng) -> FleetKeys {
    FleetKeys {
        keys: [CookieKey::random(&mut rng.0), CookieKey::random(&mut rng.0)],
        current: rng.pick(&[KeyIndex::First, KeyIndex::Second]),
    }
}

fn server(rng: &mut FuzzRng) -> Server {
    let mut mac = [0; 6];
    rng.fill(&mut mac);
    Server { mac: rng.chance(5, 6).then_some(mac), eligible: rng.chance(5, 6) }
}
