//! Reference model of the load balancer, packet by packet. It is a second implementation of `bpf/lb/lb.bpf.c`, follows
//! that file's introduction and docs/design.md, and is as plain as speed allows.
//!
//! [`LoadBalancer::process_frame`] takes a frame and the time and returns the outcome. The frame, the counters and all
//! state are then the same, bit for bit, as the BPF program's. So the two can be compared (`make fuzz`), and results of
//! the model (`make consistency`) hold for the program.
//!
//! * [`mod@packet`], [`mod@ip_packet`], [`mod@packet_ipv6`], [`mod@timestamp_option`]: parsing and rewriting of a frame
//! * [`mod@new_connection_placement`]: new connections
//! * [`mod@flow`]: connections without a cookie
//! * [`mod@stateful`]: connections with an entry in the connection table
//! * [`mod@lb_stamped`]: LB-side stamping
//! * [`mod@mode_decisions`], [`mod@decision`]: decisions on packets
//! * [`mod@encapsulation`]: outer headers
//! * [`mod@fragmentation_needed`]: ICMP errors for packets that do not fit
//! * [`mod@broadcast_rate`]: rate limits of broadcasts
//! * [`mod@vlan`]: tags of frames

mod broadcast_rate;
mod decision;
mod encapsulation;
mod flow;
mod fragmentation_needed;
mod icmp;
mod ip_packet;
mod lb_stamped;
mod mode_decisions;
mod new_connection_placement;
mod packet;
mod packet_ipv6;
mod stateful;
mod timestamp_option;
mod vlan;

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use coreward_intf as intf;

use crate::connection_table::{
    ConnectionEntry, ConnectionIndex, ConnectionTableSize, DecisecondTicks, TableOwnerNumber,
};
use crate::consistency::{ConsistencyMode, CookieStamper, ServiceMigration, ServiceSettings};
use crate::cookie::{CookieKey, FleetCookieKeys};
use crate::placement::PlacementTable;
use crate::vlan::Vlan;
use crate::{ServerId, ServiceAddress};
use broadcast_rate::BroadcastLimiter;
pub use broadcast_rate::{
    BROADCAST_REASON_COUNT, BroadcastRates, BroadcastReason, TokenBucket, TokenBucketRate, TokenBucketSelector,
};
pub use encapsulation::{OuterHeaderFields, TunnelEndpoint};
pub use flow::FlowEntry;
use flow::{FlowTable, FragmentKey};
pub use lb_stamped::LbStampedServer;
use lb_stamped::LbStampingState;
use new_connection_placement::{InstalledPlacementTable, RecentPlacements};
use stateful::ConnectionTableState;
pub use stateful::TableOwnerReachability;
pub use vlan::LoadBalancerVlans;

/// Ethernet address (MAC) in the byte order of frames.
pub type MacAddress = [u8; 6];

/// Return value of the XDP program for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XdpVerdict {
    /// `XDP_DROP`, by which the frame is dropped.
    Drop,
    /// `XDP_PASS`, by which the frame continues to the kernel's network stack.
    Pass,
    /// `XDP_TX`, by which the frame is sent from the device at which it arrived.
    Transmit,
}

impl XdpVerdict {
    /// Returns the verdict's value in `enum xdp_action` (linux/bpf.h).
    pub fn xdp_action(self) -> i32 {
        match self {
            Self::Drop => 1,
            Self::Pass => 2,
            Self::Transmit => 3,
        }
    }
}

/// Outcome of the processing of one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameOutcome {
    /// Counter in which the frame was counted (`enum lb_counter`).
    pub counter: intf::lb_counter,
    /// Slot of the service in whose counters the frame was counted, or `None` if the frame belongs to no service.
    pub service_slot: Option<usize>,
    /// Server to which the frame was sent, if any.
    pub server: Option<ServerId>,
    /// Index of the connection table entry that the TSecr of a SYN carries to the server, if any.
    pub syn_table_entry_index: Option<u32>,
    /// Additional event that was counted for the frame (`enum lb_event`), if any.
    pub event: Option<intf::lb_event>,
}

impl FrameOutcome {
    /// Returns the XDP verdict of the frame, which its counter determines.
    pub fn verdict(&self) -> XdpVerdict {
        match self.counter {
            intf::LB_COUNTER_PASSED_NOT_SERVICE | intf::LB_COUNTER_REPLY_STAMPED | intf::LB_COUNTER_REPLY_UNCHANGED => {
                XdpVerdict::Pass
            }
            // The frame is an ICMP error to the sender.
            intf::LB_COUNTER_DROP_FRAGMENTATION_NEEDED => XdpVerdict::Transmit,
            counter if counter < intf::LB_COUNTER_DROP_MALFORMED_IPV4 => XdpVerdict::Transmit,
            _ => XdpVerdict::Drop,
        }
    }
}

/// Server in the load balancer's maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerMapEntry {
    /// MAC address of the server, or `None` if it has not been resolved.
    pub mac: Option<MacAddress>,
    /// Whether the server takes new connections.
    pub is_eligible: bool,
}

/// Counters of the traffic from a load balancer to one server since its maps were created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerTraffic {
    /// Number of new connections for which the placement rule selected the server.
    pub opened_connection_count: u64,
    /// Number of packets with a cookie and FIN or RST. Without a connection table, retransmissions are also counted.
    pub closed_connection_count: u64,
    /// Number of packets sent to the server, which are counted only if a policy needs the number.
    pub packet_count: u64,
    /// Number of bytes in the frames sent to the server, counted together with the packets.
    pub frame_bytes: u64,
}

#[derive(Debug)]
struct ServiceState {
    service_address: ServiceAddress,
    settings: ServiceSettings,
    servers: Vec<Option<ServerMapEntry>>,
    /// Servers that are down according to the load balancer's own checks.
    locally_down_servers: HashSet<ServerId>,
    down_servers: HashSet<ServerId>,
    installed_table: Option<InstalledPlacementTable>,
    /// Counter of the placement rule `RoundRobin`, which continues when a new table is installed.
    round_robin_counter: u64,
    /// Whether a SYN has inserted a flow of the service into the flow table.
    has_flows: bool,
}

impl ServiceState {
    fn new(service_address: ServiceAddress, settings: ServiceSettings) -> Self {
        Self {
            service_address,
            settings,
            servers: vec![None; ServerId::COUNT],
            locally_down_servers: HashSet::new(),
            down_servers: HashSet::new(),
            installed_table: None,
            round_robin_counter: 0,
            has_flows: false,
        }
    }

    fn is_stateful(&self) -> bool {
        self.settings.consistency == ConsistencyMode::Stateful
    }

    fn has_cookies(&self) -> bool {
        self.settings.timestamps == CookieStamper::Server
            && matches!(self.settings.consistency, ConsistencyMode::Stateless | ConsistencyMode::Stateful)
    }

    /// Returns the id of the other load balancer of a migration, which has some of the service's connections.
    fn other_balancer_id(&self) -> Option<ServerId> {
        self.settings.migration.map(ServiceMigration::other_balancer_id)
    }

    fn server(&self, id: ServerId) -> Option<ServerMapEntry> {
        self.servers[usize::from(id.get())]
    }

    /// Returns whether a server that the placement table selected can take a new connection.
    fn is_eligible_with_known_mac(&self, id: ServerId) -> bool {
        self.server(id).is_some_and(|server| server.mac.is_some() && server.is_eligible)
    }

    /// Returns whether a server that was found without the placement table takes new connections.
    fn takes_new_connections(&self, id: ServerId) -> bool {
        self.is_eligible_with_known_mac(id) && !self.is_server_down(id)
    }

    fn is_server_down(&self, id: ServerId) -> bool {
        self.locally_down_servers.contains(&id) || self.down_servers.contains(&id)
    }
}

/// Settings of a load balancer, which are table sizes, rate limits, outer headers and VLANs.
#[derive(Debug, Clone, Copy)]
pub struct LoadBalancerSettings {
    /// Rate limits of broadcasts, by the reason for the broadcast.
    pub broadcast_rates: [BroadcastRates; BROADCAST_REASON_COUNT],
    /// Number of sets in the flow table.
    pub flow_set_count: u32,
    /// Number of entries in the connection table.
    pub connection_table_size: ConnectionTableSize,
    /// Whether packets and bytes are counted for each server.
    pub counts_traffic: bool,
    /// Outer header fields that are the same for all servers.
    pub outer_header: OuterHeaderFields,
    /// VLANs of the load balancer.
    pub vlans: LoadBalancerVlans,
}

/// Reference model of a load balancer's BPF program.
#[derive(Debug)]
pub struct LoadBalancer {
    settings: LoadBalancerSettings,
    own_mac: MacAddress,
    cookie_keys: FleetCookieKeys,
    services: Vec<Option<ServiceState>>,
    service_slot_by_address: HashMap<(IpAddr, u16, u8), usize>,
    vips: HashSet<IpAddr>,
    recent_placements: RecentPlacements,
    flow_table: FlowTable,
    broadcast_limiter: BroadcastLimiter,
    slot_and_server_by_fragment: HashMap<FragmentKey, (usize, ServerId)>,
    tunnel_by_server: HashMap<ServerId, TunnelEndpoint>,
    vlan_by_server: HashMap<ServerId, Vlan>,
    /// VLAN in which packets of each service are broadcast, by service slot.
    broadcast_vlan_by_slot: HashMap<usize, Option<Vlan>>,
    connection_table_state: ConnectionTableState,
    lb_stamping_state: LbStampingState,
    traffic_by_server: HashMap<ServerId, ServerTraffic>,
    /// Number of new connections by service slot.
    opened_connection_count_by_slot: HashMap<usize, u64>,
}

impl LoadBalancer {
    /// Returns a load balancer without services.
    pub fn new(settings: LoadBalancerSettings, own_mac: MacAddress, cookie_keys: FleetCookieKeys) -> Self {
        let zero_key = CookieKey { k0: 0, k1: 0 };
        let mut lb_stamping_state = LbStampingState::default();
        lb_stamping_state.set_cookie_keys(FleetCookieKeys { keys: [zero_key; 2], ..cookie_keys }, &cookie_keys, 0);
        Self {
            settings,
            own_mac,
            cookie_keys,
            services: (0..intf::MAX_SERVICES).map(|_| None).collect(),
            service_slot_by_address: HashMap::new(),
            vips: HashSet::new(),
            recent_placements: RecentPlacements::default(),
            flow_table: FlowTable::new(settings.flow_set_count),
            broadcast_limiter: BroadcastLimiter::default(),
            slot_and_server_by_fragment: HashMap::new(),
            tunnel_by_server: HashMap::new(),
            vlan_by_server: HashMap::new(),
            broadcast_vlan_by_slot: HashMap::new(),
            connection_table_state: ConnectionTableState::new(settings.connection_table_size),
            lb_stamping_state,
            traffic_by_server: HashMap::new(),
            opened_connection_count_by_slot: HashMap::new(),
        }
    }

    /// Sets the keys of the fleet's cookies.
    pub fn set_cookie_keys(&mut self, keys: FleetCookieKeys) {
        let now_ms = self.now_ms();
        self.lb_stamping_state.set_cookie_keys(self.cookie_keys, &keys, now_ms);
        self.cookie_keys = keys;
    }

    /// Sets the outer header fields that are the same for all servers.
    pub fn set_outer_header(&mut self, outer_header: OuterHeaderFields) {
        self.settings.outer_header = outer_header;
    }

    /// Sets the VLANs of the load balancer.
    pub fn set_vlans(&mut self, vlans: LoadBalancerVlans) {
        self.settings.vlans = vlans;
    }

    /// Sets whether packets and bytes are counted for each server.
    pub fn set_server_traffic_counting(&mut self, is_enabled: bool) {
        self.settings.counts_traffic = is_enabled;
    }

    /// Sets the services, and returns the slot of each. A known service keeps its slot with its state, and a new one
    /// gets the lowest free slot. Panics if there are more services than slots.
    pub fn set_services(&mut self, services: &[(ServiceAddress, ServiceSettings)]) -> Vec<usize> {
        let old_stateful_slots = self.stateful_service_slots();
        for service_slot in &mut self.services {
            let has_kept_address =
                |service: &ServiceState| services.iter().any(|(address, _)| *address == service.service_address);
            *service_slot = service_slot.take().filter(has_kept_address);
        }
        for (address, mode) in services {
            let known_service = self.services.iter_mut().flatten().find(|service| service.service_address == *address);
            if let Some(service) = known_service {
                service.settings = *mode;
            }
        }
        let new_stateful_slots = self.stateful_service_slots();
        let formerly_stateful_slots: Vec<usize> =
            old_stateful_slots.into_iter().filter(|service_slot| !new_stateful_slots.contains(service_slot)).collect();
        self.connection_table_state.free_entries_of_services(&formerly_stateful_slots);
        let service_slots: Vec<usize> =
            services.iter().map(|(address, mode)| self.find_or_allocate_service_slot(*address, *mode)).collect();
        self.service_slot_by_address.clear();
        self.vips.clear();
        for ((address, _), service_slot) in services.iter().zip(&service_slots) {
            let vip_socket = address.vip_and_port;
            self.service_slot_by_address
                .insert((vip_socket.ip(), vip_socket.port(), address.protocol.iana_number()), *service_slot);
            self.vips.insert(vip_socket.ip());
        }
        service_slots
    }

    fn stateful_service_slots(&self) -> Vec<usize> {
        let is_stateful_slot =
            |service_slot: &usize| self.services[*service_slot].as_ref().is_some_and(ServiceState::is_stateful);
        (0..self.services.len()).filter(is_stateful_slot).collect()
    }

    fn find_or_allocate_service_slot(&mut self, address: ServiceAddress, mode: ServiceSettings) -> usize {
        let has_address =
            |service: &Option<ServiceState>| service.as_ref().is_some_and(|service| service.service_address == address);
        if let Some(service_slot) = self.services.iter().position(has_address) {
            return service_slot;
        }
        let free_slot = self.services.iter().position(Option::is_none).expect("at most as many services as slots");
        self.services[free_slot] = Some(ServiceState::new(address, mode));
        // Remove the flows of the service that previously had the slot.
        self.flow_table.remove_flows_of_service(free_slot);
        self.slot_and_server_by_fragment.retain(|_, (service_slot, _)| *service_slot != free_slot);
        self.lb_stamping_state.remove_state_of_service(free_slot);
        self.opened_connection_count_by_slot.remove(&free_slot);
        free_slot
    }

    /// Sets whether a server of the service in slot `service_slot` is down according to the load balancer's own checks.
    pub fn set_server_locally_down(&mut self, service_slot: usize, id: ServerId, is_down: bool) {
        let locally_down_servers = &mut self.service_in_slot_mut(service_slot).locally_down_servers;
        if is_down {
            locally_down_servers.insert(id)
        } else {
            locally_down_servers.remove(&id)
        };
    }

    /// Adds, changes or (with `None`) removes a server of a service. All services of the server share its MAC address.
    pub fn set_server(&mut self, service_slot: usize, id: ServerId, server: Option<ServerMapEntry>) {
        self.update_lb_stamped_server(service_slot, id, server);
        self.service_in_slot_mut(service_slot).servers[usize::from(id.get())] = server;
        let Some(ServerMapEntry { mac, .. }) = server else {
            self.service_in_slot_mut(service_slot).locally_down_servers.remove(&id);
            self.service_in_slot_mut(service_slot).down_servers.remove(&id);
            return;
        };
        for service in self.services.iter_mut().flatten() {
            if let Some(server) = &mut service.servers[usize::from(id.get())] {
                server.mac = mac;
            }
        }
    }

    /// Installs a placement table for the service in slot `service_slot`.
    pub fn install_table(&mut self, service_slot: usize, table: PlacementTable) {
        let service = self.service_in_slot_mut(service_slot);
        service.down_servers = table.down_servers.iter().copied().collect();
        service.installed_table = Some(InstalledPlacementTable::new(table));
    }

    /// Sets the time (ns) at which the taken tokens of the selected token buckets will be refilled.
    pub fn set_token_bucket_paid_until(&mut self, buckets: TokenBucketSelector, paid_until_ns: u64) {
        self.broadcast_limiter.set_token_bucket_paid_until(buckets, paid_until_ns);
    }

    /// Sets the key of the connection hash of the connection table. Callers set it before the first connection.
    pub fn set_connection_key(&mut self, key: CookieKey) {
        self.connection_table_state.connection_key = key;
    }

    /// Sets this load balancer's own number among the load balancers with a connection table.
    pub fn set_owner_number(&mut self, owner: Option<TableOwnerNumber>) {
        self.connection_table_state.owner_number = owner;
    }

    /// Sets the maximum number of connection table entries of one source prefix, or `None` for no limit.
    pub fn set_max_entries_per_source(&mut self, max_entry_count: Option<u32>) {
        self.connection_table_state.max_entries_per_source = max_entry_count;
    }

    /// Sets the reachability of another load balancer that has a connection table.
    pub fn set_other_owner_reachability(&mut self, number: TableOwnerNumber, owner: TableOwnerReachability) {
        self.connection_table_state.reachability_by_owner[usize::from(number.get())] = owner;
    }

    /// Sets the time of the clock that timestamps the entries of the connection table.
    pub fn set_current_time(&mut self, now: DecisecondTicks) {
        self.connection_table_state.now = now;
    }

    /// Records that user space has swept the connection table at the current time.
    pub fn record_connection_table_sweep(&mut self) {
        self.connection_table_state.last_sweep = self.connection_table_state.now;
    }

    /// Returns all connections that have an entry in the connection table.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionEntry> + '_ {
        self.connection_table_state.connections()
    }

    /// Returns the connection in the entry at `index`, or `None` if the entry is free.
    pub fn connection_at(&self, index: ConnectionIndex) -> Option<ConnectionEntry> {
        self.connection_table_state.connection_at(index)
    }

    /// Frees the entries of these connections. Entries that belong to another connection by now, or got a packet,
    /// remain.
    pub fn free_unchanged_connections(&mut self, connections: &[ConnectionEntry]) {
        self.connection_table_state.free_unchanged_connections(connections);
    }

    /// Returns whether a service has the slot `service_slot`.
    pub fn has_service(&self, service_slot: usize) -> bool {
        self.services[service_slot].is_some()
    }

    /// Returns the number of connections assigned to each core since the service's placement table was installed.
    pub fn assigned_connections_by_core_slot(&self, service_slot: usize) -> &[u32] {
        self.service_in_slot(service_slot)
            .installed_table
            .as_ref()
            .map_or(&[], |placement| &placement.state.assigned_connections_by_core_slot)
    }

    /// Returns the service's counter of the placement rule `RoundRobin`.
    pub fn round_robin_counter(&self, service_slot: usize) -> u64 {
        self.service_in_slot(service_slot).round_robin_counter
    }

    /// Returns the traffic counters of each server that got a packet.
    pub fn traffic_by_server(&self) -> &HashMap<ServerId, ServerTraffic> {
        &self.traffic_by_server
    }

    /// Returns the address of the service in slot `service_slot`, if there is one.
    pub fn service_address(&self, service_slot: usize) -> Option<ServiceAddress> {
        self.services.get(service_slot)?.as_ref().map(|service| service.service_address)
    }

    /// Returns the number of new connections to the service in slot `service_slot`.
    pub fn opened_connection_count(&self, service_slot: usize) -> u64 {
        self.opened_connection_count_by_slot.get(&service_slot).copied().unwrap_or_default()
    }

    /// Returns the words of the flow table, in the layout of `struct flow_set`.
    pub fn flow_table_words(&self) -> &[u64] {
        self.flow_table.table_words()
    }

    /// Returns the words of the BPF map `recent_placements`.
    pub fn recent_placement_words(&self) -> &[u64] {
        self.recent_placements.cache_words()
    }

    fn service_in_slot(&self, service_slot: usize) -> &ServiceState {
        self.services[service_slot].as_ref().expect("a slot that set_services returned")
    }

    fn service_in_slot_mut(&mut self, service_slot: usize) -> &mut ServiceState {
        self.services[service_slot].as_mut().expect("a slot that set_services returned")
    }
}
