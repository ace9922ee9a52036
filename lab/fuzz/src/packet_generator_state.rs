//! State of a harness as the packet generator tracks it, and random changes to that state.

use std::net::{IpAddr, Ipv4Addr};

use coreward_intf as intf;
use coreward_model::connection_table::{ConnectionTableSize, DecisecondTicks, TableOwnerNumber};
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceMigration, ServiceSettings};
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::forwarding::ForwardingMode;
use coreward_model::lb::{
    BROADCAST_REASON_COUNT, BroadcastReason, FrameOutcome, LoadBalancerVlans, MacAddress, OuterHeaderFields,
    ServerMapEntry, TableOwnerReachability, TokenBucketSelector,
};
use coreward_model::lb_stamping;
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::tuple::TransportProtocol;
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, ServiceAddress};

use crate::frame::ETHERNET_HEADER_BYTES;
use crate::fuzz_rng::FuzzRng;
use crate::harness::{FuzzHarnessSetup, LOAD_BALANCER_MAC};
use crate::ipv6_translation;
use crate::server_networks::SERVER_VLAN_IDS;
use crate::state_change::LoadBalancerStateChange;

/// VIPs of generated services. Two of them are placeholders for IPv6 VIPs.
const SERVICE_VIPS: [Ipv4Addr; 5] = [
    Ipv4Addr::new(10, 200, 0, 1),
    Ipv4Addr::new(10, 200, 0, 2),
    Ipv4Addr::new(192, 0, 2, 255),
    ipv6_translation::IPV6_VIP_PLACEHOLDERS[0],
    ipv6_translation::IPV6_VIP_PLACEHOLDERS[1],
];
/// Ports of generated services. There are few of them, so that a packet to another port of a VIP often belongs to
/// another service.
const SERVICE_PORTS: [u16; 4] = [80, 443, 0x5050, 65_535];

/// Consistency modes to choose from. The complicated ones are repeated, so that they are chosen more often.
const WEIGHTED_CONSISTENCY_MODES: [ConsistencyMode; 7] = [
    ConsistencyMode::Stateless,
    ConsistencyMode::Stateless,
    ConsistencyMode::Stateful,
    ConsistencyMode::Stateful,
    ConsistencyMode::None,
    ConsistencyMode::HashTable,
    ConsistencyMode::Beamer,
];
/// Maximum number of recorded connections with a connection-table entry.
const MAX_RECORDED_TABLE_CONNECTIONS: usize = 2048;

/// Connection that has received an entry in the connection table.
#[derive(Debug, Clone, Copy)]
pub struct TableConnection {
    pub service_slot: usize,
    pub client_address: (Ipv4Addr, u16),
    /// Index of the entry, which the connection's cookie contains instead of a server id.
    pub table_index: u16,
}

/// Generated service, with the data from which the generator derives its packets.
#[derive(Debug, Clone)]
pub struct GeneratedService {
    pub address: ServiceAddress,
    /// VIP and port, where an IPv4 placeholder represents an IPv6 VIP.
    pub ipv4_address: (Ipv4Addr, u16),
    pub settings: ServiceSettings,
    pub service_slot: usize,
    /// Ids of the service's present and earlier servers.
    pub server_ids: Vec<ServerId>,
    /// MAC addresses from which the service's present and earlier servers send packets.
    pub server_macs: Vec<MacAddress>,
}

impl GeneratedService {
    /// Returns a change that gives a server a random state, sometimes with another server's MAC address.
    fn random_server_change(&mut self, id: ServerId, rng: &mut FuzzRng) -> LoadBalancerStateChange {
        let mut new_server = random_server(rng);
        if let Some(mac) = &mut new_server.mac {
            if !self.server_macs.is_empty() && rng.random_bool(1, 8) {
                *mac = rng.pick(&self.server_macs);
            }
            self.server_macs.push(*mac);
        }
        LoadBalancerStateChange::SetServer(self.service_slot, id, Some(new_server))
    }

    /// Returns whether load balancers stamp this service's cookies themselves.
    pub fn uses_lb_stamping(&self) -> bool {
        self.settings.timestamps == CookieStamper::LoadBalancer
    }
}

/// State from which the generator derives packets and changes.
pub struct PacketGeneratorState {
    /// Setup of the harness, in which only the keys change during the epoch.
    pub harness_setup: FuzzHarnessSetup,
    pub services: Vec<GeneratedService>,
    /// Addresses and ports of clients that later packets use again.
    pub client_addresses: Vec<(Ipv4Addr, u16)>,
    /// Present and earlier connections that have received an entry in the connection table.
    pub table_connections: Vec<TableConnection>,
    /// MAC addresses of other load balancers, which own connection tables.
    pub owner_macs: Vec<MacAddress>,
    /// Time that the BPF program reads from its clock while it processes packets.
    pub clock: DecisecondTicks,
    /// Whether user space frees connection-table entries. Otherwise the table fills, and packets reuse expired entries.
    pub frees_connections: bool,
    allowed_vips: Vec<Ipv4Addr>,
    allowed_rules: Vec<PlacementRule>,
    allowed_modes: Vec<ConsistencyMode>,
    allowed_protocols: Vec<TransportProtocol>,
    allowed_forwardings: Vec<ForwardingMode>,
    table_generation: u64,
}

impl PacketGeneratorState {
    /// Returns a state with random setup and clients, but without services.
    pub fn new(rng: &mut FuzzRng) -> Self {
        let client_addresses = (0..512).map(|_| (Ipv4Addr::from(rng.next_u32()), rng.next_u16())).collect();
        let table_size = ConnectionTableSize::try_from(rng.pick(&[1024, 1024, 4096, 65_536])).expect("a power of two");
        let outer_header = FuzzHarnessSetup::new(LOAD_BALANCER_MAC, random_cookie_keys(rng)).outer_header;
        let harness_setup = FuzzHarnessSetup {
            counts_traffic: rng.random_bool(1, 2),
            connection_table_size: table_size,
            connection_key: CookieKey::random(&mut rng.0),
            // In a small table, sets become full. In a large one, most sets have room.
            flow_set_count: rng.pick(&[1, 24, 1 << 10, 1 << 15]),
            // The small MTU makes some frames too long.
            outer_header: OuterHeaderFields { mtu_bytes: rng.pick(&[1500, 90]), ..outer_header },
            vlans: random_vlans(rng),
            ..FuzzHarnessSetup::new(LOAD_BALANCER_MAC, random_cookie_keys(rng))
        };
        let (allowed_rules, allowed_modes) =
            (random_subset(&PlacementRule::ALL, rng), random_subset(&WEIGHTED_CONSISTENCY_MODES, rng));
        let allowed_protocols = rng
            .pick(&[
                &[TransportProtocol::Tcp][..],
                &[TransportProtocol::Tcp, TransportProtocol::Tcp, TransportProtocol::Udp],
            ])
            .to_vec();
        Self {
            harness_setup,
            services: Vec::new(),
            client_addresses,
            table_connections: Vec::new(),
            owner_macs: vec![[2, 0, 0, 2, 0, 1]],
            clock: DecisecondTicks(0),
            frees_connections: rng.random_bool(1, 2),
            // The program contains no code for an address family without a service, so some epochs use only one family.
            allowed_vips: rng.pick(&[&SERVICE_VIPS[..], &SERVICE_VIPS[..3], &SERVICE_VIPS[3..]]).to_vec(),
            allowed_rules,
            allowed_modes,
            allowed_protocols,
            allowed_forwardings: random_subset(&ForwardingMode::ALL, rng),
            table_generation: 0,
        }
    }

    /// Returns a change to a new list of services, in which some present services stay, perhaps with other settings.
    pub fn random_services_change(&mut self, rng: &mut FuzzRng) -> LoadBalancerStateChange {
        let mut services: Vec<(ServiceAddress, ServiceSettings)> = Vec::new();
        for service in &self.services {
            if rng.random_bool(2, 3) {
                let settings = if rng.random_bool(1, 4) {
                    self.random_service_settings(service.address.protocol, rng)
                } else {
                    service.settings
                };
                services.push((service.address, settings));
            }
        }
        let service_count = 1 + rng.random_below(5);
        while services.len() < service_count {
            let socket =
                ipv6_translation::service_socket_address((rng.pick(&self.allowed_vips), rng.pick(&SERVICE_PORTS)));
            let address = ServiceAddress { vip_and_port: socket, protocol: rng.pick(&self.allowed_protocols) };
            if !services.iter().any(|(other_address, _)| *other_address == address) {
                services.push((address, self.random_service_settings(address.protocol, rng)));
            }
        }
        LoadBalancerStateChange::ReplaceServices(services)
    }

    /// Returns random settings that a service of this protocol may have.
    fn random_service_settings(&self, protocol: TransportProtocol, rng: &mut FuzzRng) -> ServiceSettings {
        if protocol == TransportProtocol::Udp {
            let consistency = rng.pick(&[ConsistencyMode::HashTable, ConsistencyMode::None]);
            let default_settings = ServiceSettings::default_for_protocol(TransportProtocol::Udp);
            return ServiceSettings {
                consistency,
                forwarding: rng.pick(&self.allowed_forwardings),
                ..default_settings
            };
        }
        let consistency = rng.pick(&self.allowed_modes);
        let timestamps = match rng.random_below(15) {
            0..3 => CookieStamper::Off,
            3..7 if consistency == ConsistencyMode::Stateless => CookieStamper::LoadBalancer,
            _ => CookieStamper::Server,
        };
        let forwarding = match timestamps {
            CookieStamper::LoadBalancer => ForwardingMode::L2,
            _ => rng.pick(&self.allowed_forwardings),
        };
        let settings = ServiceSettings { consistency, timestamps, migration: None, forwarding };
        let is_migrating = settings.can_migrate() && rng.random_bool(1, 3);
        ServiceSettings { migration: is_migrating.then(|| self.random_service_migration(rng)), ..settings }
    }

    /// Returns a random migration to or from another load balancer. That load balancer's id is mostly also the id of a
    /// server, whose MAC address is known.
    fn random_service_migration(&self, rng: &mut FuzzRng) -> ServiceMigration {
        let known_server_ids: Vec<ServerId> =
            self.services.iter().flat_map(|service| service.server_ids.iter().copied()).collect();
        let other_balancer_id = match known_server_ids.is_empty() || rng.random_bool(1, 8) {
            true => ServerId::try_from(rng.random_below(intf::SERVER_ID_COUNT as usize) as u64).expect("in range"),
            false => rng.pick(&known_server_ids),
        };
        if rng.random_bool(1, 2) {
            ServiceMigration::AdoptedFrom(other_balancer_id)
        } else {
            ServiceMigration::HandedOverTo(other_balancer_id)
        }
    }

    /// Records the services of a [`LoadBalancerStateChange::ReplaceServices`], and the slots that the reference model
    /// has assigned to them.
    pub fn record_service_slots(&mut self, services: &[(ServiceAddress, ServiceSettings)], service_slots: &[usize]) {
        let previous_services = std::mem::take(&mut self.services);
        let new_services = services.iter().zip(service_slots).map(|((address, settings), service_slot)| {
            let previous_service = previous_services.iter().find(|service| service.address == *address);
            let vip = match address.vip_and_port.ip() {
                IpAddr::V4(vip) => vip,
                IpAddr::V6(vip) => ipv6_translation::ipv4_for_ipv6(vip),
            };
            let (server_ids, server_macs) = previous_service
                .map_or_else(Default::default, |service| (service.server_ids.clone(), service.server_macs.clone()));
            GeneratedService {
                address: *address,
                ipv4_address: (vip, address.vip_and_port.port()),
                settings: *settings,
                service_slot: *service_slot,
                server_ids,
                server_macs,
            }
        });
        self.services = new_services.collect();
    }

    /// Returns changes that assign servers and a placement table to a new service.
    pub fn changes_to_fill_service(&mut self, service_index: usize, rng: &mut FuzzRng) -> Vec<LoadBalancerStateChange> {
        // Some services have no server, some have thousands, some have the smallest and the largest id.
        let server_count = match rng.random_below(20) {
            0 => 0,
            1 => 1 + rng.random_below(5000),
            _ => 1 + rng.random_below(40),
        };
        let mut changes: Vec<LoadBalancerStateChange> =
            (0..server_count).map(|_| self.random_new_server_change(service_index, rng)).collect();
        let service = &mut self.services[service_index];
        if let Some(migration) = service.settings.migration
            && !rng.random_bool(1, 8)
        {
            changes.push(service.random_server_change(migration.other_balancer_id(), rng));
        }
        if !rng.random_bool(1, 16) {
            changes.extend(self.random_table_change(service_index, rng));
        }
        changes
    }

    fn random_new_server_change(&mut self, service_index: usize, rng: &mut FuzzRng) -> LoadBalancerStateChange {
        let service = &mut self.services[service_index];
        let random_id = match rng.random_below(40) {
            0 => 0,
            1 => intf::SERVER_ID_COUNT as usize - 1,
            // Cookies with LB-side stamping can contain nearly all ids, so most ids are such ones.
            2..39 if service.uses_lb_stamping() => rng.random_below(lb_stamping::STAMPABLE_SERVER_ID_COUNT as usize),
            _ => rng.random_below(intf::SERVER_ID_COUNT as usize),
        };
        let id = ServerId::try_from(random_id as u64).expect("in range");
        service.server_ids.push(id);
        service.random_server_change(id, rng)
    }

    fn random_table_change(&mut self, service_index: usize, rng: &mut FuzzRng) -> Option<LoadBalancerStateChange> {
        self.table_generation += 1 + rng.random_below(3) as u64 * 0x7ff;
        let service = &self.services[service_index];
        let mut server_ids = service.server_ids.clone();
        server_ids.sort();
        server_ids.dedup();
        server_ids.truncate(400);
        if server_ids.is_empty() {
            return None;
        }
        let rss_group_count = 1 + rng.random_below(intf::MAX_RSS_GROUPS as usize);
        let placement_rule = rng.pick(&self.allowed_rules);
        let mut table =
            PlacementTable::random(placement_rule, self.table_generation, rss_group_count, &server_ids, &mut rng.0);
        if rng.random_bool(1, 20) {
            // This placement table has no eligible server.
            table.members.clear();
            table.consistent_server_by_bucket.clear();
            table.previous_consistent_server_by_bucket.clear();
        }
        let is_table_member = |id: &ServerId| table.members.iter().any(|member| member.server == *id);
        table.down_servers =
            server_ids.into_iter().filter(|id| !is_table_member(id) && rng.random_bool(2, 3)).collect();
        Some(LoadBalancerStateChange::InstallPlacementTable(service.service_slot, table))
    }

    /// Records the table entry that a new connection has received. `frame` is the packet before the program changed it.
    pub fn record_table_connection(&mut self, outcome: &FrameOutcome, frame: &[u8]) {
        let (Some(reported_cookie), Some(service_slot)) = (outcome.syn_table_entry_index, outcome.service_slot) else {
            return;
        };
        let read_address_bytes = |offset: usize| <[u8; 4]>::try_from(&frame[offset..offset + 4]).expect("four bytes");
        let (client_ip, transport_offset) = match ipv6_translation::parse_frame(frame) {
            Some(headers) => {
                (ipv6_translation::ipv4_for_ipv6(headers.source_and_destination[0]), headers.transport_offset)
            }
            None => (
                Ipv4Addr::from(read_address_bytes(ETHERNET_HEADER_BYTES + 12)),
                ETHERNET_HEADER_BYTES + usize::from(frame[ETHERNET_HEADER_BYTES] & 0xf) * 4,
            ),
        };
        let client_port = u16::from_be_bytes([frame[transport_offset], frame[transport_offset + 1]]);
        let table_connection = TableConnection {
            service_slot,
            client_address: (client_ip, client_port),
            table_index: (reported_cookie & intf::COOKIE_ID_MASK) as u16,
        };
        // Makes room by removing an older connection.
        if self.table_connections.len() == MAX_RECORDED_TABLE_CONNECTIONS {
            self.table_connections.swap_remove(reported_cookie as usize % MAX_RECORDED_TABLE_CONNECTIONS);
        }
        self.table_connections.push(table_connection);
    }

    fn random_table_owner_change(&mut self, rng: &mut FuzzRng) -> LoadBalancerStateChange {
        // There are few owner numbers, so that forged and old indexes often match an owner.
        let owner_number = TableOwnerNumber::try_from(rng.random_below(4) as u64).expect("in range");
        match rng.random_below(4) {
            0 if rng.random_bool(1, 4) => {
                LoadBalancerStateChange::SetLocalOwnerNumber(rng.random_bool(3, 4).then_some(owner_number))
            }
            1 => LoadBalancerStateChange::SetTableOwner(owner_number, TableOwnerReachability::Lost),
            2 => LoadBalancerStateChange::SetTableOwner(owner_number, TableOwnerReachability::Unknown),
            _ => {
                let mac = [2, 0, 0, 2, 0, rng.next_u8()];
                self.owner_macs.push(mac);
                LoadBalancerStateChange::SetTableOwner(owner_number, TableOwnerReachability::Reachable(mac))
            }
        }
    }

    fn random_clock_change(&mut self, rng: &mut FuzzRng) -> LoadBalancerStateChange {
        // Small steps in both directions put some flows over the idle limit, but not others. Some steps are arbitrary.
        let tick_step = rng.random_below(2 * intf::FLOW_IDLE_UDP_TICKS as usize) as u32;
        self.clock = match rng.random_below(8) {
            0 => DecisecondTicks(rng.next_u32()),
            1 => DecisecondTicks(self.clock.0.wrapping_sub(tick_step)),
            _ => DecisecondTicks(self.clock.0.wrapping_add(tick_step)),
        };
        LoadBalancerStateChange::SetClock(self.clock)
    }

    /// Returns a random change that needs no RCU grace period.
    pub fn random_change_without_grace_period(&mut self, rng: &mut FuzzRng) -> LoadBalancerStateChange {
        let service_index = rng.random_below(self.services.len());
        let service = &self.services[service_index];
        match rng.random_below(16) {
            15 => LoadBalancerStateChange::SweepExpiredEntries,
            14 => LoadBalancerStateChange::LimitEntriesPerPrefix(
                rng.random_bool(1, 2).then(|| 1 + rng.random_below(3) as u32),
            ),
            10..12 => self.random_table_owner_change(rng),
            12 => random_token_bucket_change(rng),
            13 => self.random_clock_change(rng),
            0 => {
                self.harness_setup.cookie_keys = random_cookie_keys(rng);
                LoadBalancerStateChange::SetCookieKeys(self.harness_setup.cookie_keys)
            }
            // Key rotation replaces one key and keeps the other one.
            1 => {
                self.harness_setup.cookie_keys.keys[rng.random_below(2)] = CookieKey::random(&mut rng.0);
                LoadBalancerStateChange::SetCookieKeys(self.harness_setup.cookie_keys)
            }
            2..4 => {
                let token_buckets =
                    TokenBucketSelector::ServiceSlot(service.service_slot, random_broadcast_reason(rng));
                LoadBalancerStateChange::SetHasBroadcastTokens(token_buckets, rng.random_bool(1, 2))
            }
            4 if !service.server_ids.is_empty() => {
                LoadBalancerStateChange::SetServer(service.service_slot, rng.pick(&service.server_ids), None)
            }
            5 if !service.server_ids.is_empty() => LoadBalancerStateChange::SetServerMasked(
                service.service_slot,
                rng.pick(&service.server_ids),
                rng.random_bool(2, 3),
            ),
            6..10 if !service.server_ids.is_empty() => {
                let id = rng.pick(&service.server_ids);
                self.services[service_index].random_server_change(id, rng)
            }
            _ => self.random_new_server_change(service_index, rng),
        }
    }

    /// Returns a random change for which the load balancer waits for an RCU grace period.
    pub fn random_change_with_grace_period(&mut self, rng: &mut FuzzRng) -> Option<LoadBalancerStateChange> {
        let service_index = rng.random_below(self.services.len());
        self.random_table_change(service_index, rng)
    }
}

fn random_broadcast_reason(rng: &mut FuzzRng) -> BroadcastReason {
    rng.random_below(BROADCAST_REASON_COUNT) as BroadcastReason
}

/// Returns a random change of a token bucket that limits broadcasts of several services.
fn random_token_bucket_change(rng: &mut FuzzRng) -> LoadBalancerStateChange {
    let reason = random_broadcast_reason(rng);
    let token_buckets = match rng.random_below(2) {
        0 => TokenBucketSelector::WholeLoadBalancer(reason),
        _ => TokenBucketSelector::EveryEighthSourceFrom(rng.random_below(8)),
    };
    LoadBalancerStateChange::SetHasBroadcastTokens(token_buckets, rng.random_bool(3, 4))
}

/// Returns all `elements`, or only one or two of them. The program is then compiled without the features of the missing
/// elements.
fn random_subset<T: Copy>(elements: &[T], rng: &mut FuzzRng) -> Vec<T> {
    match rng.random_below(3) {
        0 => elements.to_vec(),
        1 => vec![rng.pick(elements)],
        _ => vec![rng.pick(elements), rng.pick(elements)],
    }
}

/// Returns random VLANs for an epoch. On average, two of three epochs have no VLANs.
fn random_vlans(rng: &mut FuzzRng) -> LoadBalancerVlans {
    let is_tagging_enabled = rng.random_bool(1, 3);
    let vip_vlan_id = if is_tagging_enabled { rng.pick(&SERVER_VLAN_IDS) } else { 0 };
    LoadBalancerVlans { is_tagging_enabled, vip_vlan: Vlan::from_id_or_untagged(vip_vlan_id.into()).expect("in range") }
}

fn random_cookie_keys(rng: &mut FuzzRng) -> FleetCookieKeys {
    FleetCookieKeys {
        keys: [CookieKey::random(&mut rng.0), CookieKey::random(&mut rng.0)],
        current_key_index: rng.pick(&[CookieKeyIndex::First, CookieKeyIndex::Second]),
    }
}

fn random_server(rng: &mut FuzzRng) -> ServerMapEntry {
    let mut mac = [0; 6];
    rng.fill_bytes(&mut mac);
    ServerMapEntry { mac: rng.random_bool(5, 6).then_some(mac), is_eligible: rng.random_bool(5, 6) }
}
