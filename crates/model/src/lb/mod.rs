//! The load balancer, packet by packet: what `bpf/lb/lb.bpf.c` does, written a second time from its essay and from
//! docs/design.md, and as plainly as speed allows.
//!
//! [`LoadBalancer::receive`] takes a frame and the time and says what becomes of it; what the frame is then, the counters
//! and all state are the same, bit for bit, as the BPF program's. So two instances can be run against each other
//! (`make fuzz`), and what is shown here (`make consistency`) holds there.
//!
//! * [`mod@packet`]: reading a frame, and what is changed in it
//! * [`mod@place`]: first packets
//! * [`mod@flow`]: connections that carry no cookie
//! * [`mod@stateful`]: connections that have an entry in the connection table
//! * [`mod@corrected`]: services that the load balancer itself stamps
//! * [`mod@decide`]: where a packet goes
//! * [`mod@rate`]: how often packets go to all servers

mod corrected;
mod decide;
mod flow;
mod packet;
mod place;
mod rate;
mod stateful;

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;

use coreward_intf as intf;

use crate::connection_table::{Clock, Connection, ConnectionIndex, OwnerNumber, TableSize};
use crate::consistency::{Consistency, ServiceMode, Timestamps, Transfer};
use crate::cookie::{CookieKey, FleetKeys};
use crate::placement::PlacementTable;
use crate::{ServerId, ServiceAddress};
pub use corrected::Corrected;
use corrected::Correction;
pub use flow::FlowEntry;
use flow::{Datagram, FlowTable};
use place::{Placement, RecentFirstPackets};
use rate::Broadcast;
pub use rate::{BroadcastRates, Bucket, Buckets, REASONS, Rate, Reason};
pub use stateful::Owner;
use stateful::Stateful;

/// An Ethernet address as it stands in a frame.
pub type Mac = [u8; 6];

/// What the kernel is told to do with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// `XDP_DROP`.
    Drop,
    /// `XDP_PASS`: on to the kernel's own network stack.
    Pass,
    /// `XDP_TX`: out by the device it came on.
    Transmit,
}

/// What became of one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Value of `enum lb_counter`.
    pub counter: intf::lb_counter,
    /// Place of the service under which it was counted; `None`: it is not known.
    pub service: Option<usize>,
    /// The server that it was sent to, if it was sent to one.
    pub server: Option<ServerId>,
    /// What a first packet's TSecr tells the server, if it is an entry of the connection table.
    pub told: Option<u32>,
    /// What else happened (`enum lb_event`).
    pub event: Option<intf::lb_event>,
}

impl Outcome {
    /// What follows from the counter: those of `enum lb_counter` stand in this order.
    pub fn verdict(&self) -> Verdict {
        match self.counter {
            intf::LB_COUNTER_PASSED_NOT_SERVICE | intf::LB_COUNTER_REPLY_STAMPED | intf::LB_COUNTER_REPLY_UNCHANGED => {
                Verdict::Pass
            }
            counter if counter < intf::LB_COUNTER_DROP_MALFORMED_IPV4 => Verdict::Transmit,
            _ => Verdict::Drop,
        }
    }
}

/// A server as the load balancer knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Server {
    /// `None`: not resolved.
    pub mac: Option<Mac>,
    /// Takes new connections.
    pub eligible: bool,
}

/// What a load balancer sent to one server since its maps were made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerTraffic {
    /// New connections that the placement rule sent to it.
    pub opened: u64,
    /// Packets with a cookie, and FIN or RST. (Without a connection table a retransmission counts again.)
    pub closed: u64,
    /// All packets, while they are counted: where a policy asks for them.
    pub packets: u64,
    /// Their frames' bytes.
    pub bytes: u64,
}

/// One service.
#[derive(Debug)]
struct Service {
    address: ServiceAddress,
    mode: ServiceMode,
    servers: Vec<Option<Server>>,
    /// Down by the load balancer's own checks.
    masked: HashSet<ServerId>,
    /// Down by its placement table.
    down: HashSet<ServerId>,
    placement: Option<Placement>,
    /// The counter of rule `RoundRobin`: it goes on from table to table.
    round_robin: u64,
    /// A SYN has entered a flow into the flow table.
    has_flows: bool,
}

impl Service {
    fn new(address: ServiceAddress, mode: ServiceMode) -> Self {
        Self {
            address,
            mode,
            servers: vec![None; ServerId::COUNT],
            masked: HashSet::new(),
            down: HashSet::new(),
            placement: None,
            round_robin: 0,
            has_flows: false,
        }
    }

    fn is_stateful(&self) -> bool {
        self.mode.consistency == Consistency::Stateful
    }

    /// Whether the timestamps of its packets carry a cookie.
    fn has_cookies(&self) -> bool {
        self.mode.timestamps == Timestamps::Server
            && matches!(self.mode.consistency, Consistency::Stateless | Consistency::Stateful)
    }

    /// The load balancer that has some of its connections.
    fn other_balancer(&self) -> Option<ServerId> {
        self.mode.transfer.map(Transfer::other_balancer)
    }

    fn server(&self, id: ServerId) -> Option<Server> {
        self.servers[usize::from(id.get())]
    }

    /// Whether a server that the placement table names can take a new connection.
    fn takes_first_packets(&self, id: ServerId) -> bool {
        self.server(id).is_some_and(|server| server.mac.is_some() && server.eligible)
    }

    /// Whether a server that something else than the placement rule names takes new connections.
    fn takes_new_connections(&self, id: ServerId) -> bool {
        self.takes_first_packets(id) && !self.is_down(id)
    }

    fn is_down(&self, id: ServerId) -> bool {
        self.masked.contains(&id) || self.down.contains(&id)
    }
}

/// What is fixed when the program is loaded.
#[derive(Debug, Clone, Copy)]
pub struct Constants {
    /// How often packets may go to all servers, by reason.
    pub broadcast: [BroadcastRates; REASONS],
    /// Sets of the flow table.
    pub flow_sets: u32,
    /// Room for connections of stateful services.
    pub connection_table: TableSize,
    /// Whether packets and bytes are counted by server.
    pub count_traffic: bool,
}

/// A load balancer.
#[derive(Debug)]
pub struct LoadBalancer {
    constants: Constants,
    own_mac: Mac,
    keys: FleetKeys,
    services: Vec<Option<Service>>,
    by_address: HashMap<(Ipv4Addr, u16, u8), usize>,
    vips: HashSet<Ipv4Addr>,
    recent: RecentFirstPackets,
    flows: FlowTable,
    broadcast: Broadcast,
    /// Service and server.
    fragments: HashMap<Datagram, (usize, ServerId)>,
    stateful: Stateful,
    correction: Correction,
    traffic: HashMap<ServerId, ServerTraffic>,
    /// New connections by place of the service.
    opened: HashMap<usize, u64>,
}

impl LoadBalancer {
    /// One that knows no service.
    pub fn new(constants: Constants, own_mac: Mac, keys: FleetKeys) -> Self {
        let no_key = CookieKey { k0: 0, k1: 0 };
        let mut correction = Correction::default();
        correction.set_keys(FleetKeys { keys: [no_key; 2], ..keys }, &keys, 0);
        Self {
            constants,
            own_mac,
            keys,
            services: (0..intf::MAX_SERVICES).map(|_| None).collect(),
            by_address: HashMap::new(),
            vips: HashSet::new(),
            recent: RecentFirstPackets::default(),
            flows: FlowTable::new(constants.flow_sets),
            broadcast: Broadcast::default(),
            fragments: HashMap::new(),
            stateful: Stateful::new(constants.connection_table),
            correction,
            traffic: HashMap::new(),
            opened: HashMap::new(),
        }
    }

    /// Sets the cookie's keys.
    pub fn set_keys(&mut self, keys: FleetKeys) {
        let now_ms = self.now_ms();
        self.correction.set_keys(self.keys, &keys, now_ms);
        self.keys = keys;
    }

    /// Sets which services there are, and returns the place of each: one that was there keeps its place with all that is
    /// known of it, a new one gets the lowest that is free. Only IPv4 services count.
    ///
    /// # Panics
    /// With more services than there are places.
    pub fn set_services(&mut self, services: &[(ServiceAddress, ServiceMode)]) -> Vec<usize> {
        let stateful = self.stateful_places();
        for place in &mut self.services {
            let kept = |service: &Service| services.iter().any(|(address, _)| *address == service.address);
            *place = place.take().filter(kept);
        }
        for (address, mode) in services {
            let known = self.services.iter_mut().flatten().find(|service| service.address == *address);
            if let Some(service) = known {
                service.mode = *mode;
            }
        }
        let still = self.stateful_places();
        let not_any_more: Vec<usize> = stateful.into_iter().filter(|place| !still.contains(place)).collect();
        self.stateful.free_services(&not_any_more);
        let places: Vec<usize> = services.iter().map(|(address, mode)| self.place_of(*address, *mode)).collect();
        self.by_address.clear();
        self.vips.clear();
        for ((address, _), place) in services.iter().zip(&places) {
            if let std::net::SocketAddr::V4(vip) = address.socket {
                self.by_address.insert((*vip.ip(), vip.port(), address.protocol.number()), *place);
                self.vips.insert(*vip.ip());
            }
        }
        places
    }

    fn stateful_places(&self) -> Vec<usize> {
        let stateful = |place: &usize| self.services[*place].as_ref().is_some_and(Service::is_stateful);
        (0..self.services.len()).filter(stateful).collect()
    }

    fn place_of(&mut self, address: ServiceAddress, mode: ServiceMode) -> usize {
        let kept = |service: &Option<Service>| service.as_ref().is_some_and(|service| service.address == address);
        if let Some(place) = self.services.iter().position(kept) {
            return place;
        }
        let free = self.services.iter().position(Option::is_none).expect("no more services than places");
        self.services[free] = Some(Service::new(address, mode));
        // Of the service that had the place before.
        self.flows.forget(free);
        self.fragments.retain(|_, (place, _)| *place != free);
        self.correction.forget_service(free);
        self.opened.remove(&free);
        free
    }

    /// Marks a server as down by the load balancer's own checks, or takes that back.
    pub fn set_masked(&mut self, service: usize, id: ServerId, is_masked: bool) {
        let masked = &mut self.service_mut(service).masked;
        if is_masked {
            masked.insert(id)
        } else {
            masked.remove(&id)
        };
    }

    /// Makes a server known, or changes what is known of it; `None`: the service forgets it. Its MAC address is the same for
    /// all services.
    pub fn set_server(&mut self, service: usize, id: ServerId, server: Option<Server>) {
        self.move_corrected(service, id, server);
        self.service_mut(service).servers[usize::from(id.get())] = server;
        let Some(Server { mac, .. }) = server else {
            self.service_mut(service).masked.remove(&id);
            self.service_mut(service).down.remove(&id);
            return;
        };
        for service in self.services.iter_mut().flatten() {
            if let Some(server) = &mut service.servers[usize::from(id.get())] {
                server.mac = mac;
            }
        }
    }

    /// Switches to another table.
    pub fn install_table(&mut self, service: usize, table: PlacementTable) {
        let service = self.service_mut(service);
        service.down = table.down.iter().copied().collect();
        service.placement = Some(Placement::new(table));
    }

    /// Sets until when the tokens taken for deliveries to all servers are paid for (ns).
    pub fn set_paid_until(&mut self, buckets: Buckets, paid_until: u64) {
        self.broadcast.set_paid_until(buckets, paid_until);
    }

    /// Sets what places connections in the connection table; before the first one.
    pub fn set_connection_key(&mut self, key: CookieKey) {
        self.stateful.key = key;
    }

    /// Sets this load balancer's number among those with a connection table.
    pub fn set_owner(&mut self, owner: Option<OwnerNumber>) {
        self.stateful.owner = owner;
    }

    /// Sets how many entries of the connection table one source prefix may hold; `None`: any number.
    pub fn limit_entries(&mut self, per_source: Option<u32>) {
        self.stateful.entries_per_source = per_source;
    }

    /// Sets what is known of another load balancer with a connection table.
    pub fn set_owner_at(&mut self, number: OwnerNumber, owner: Owner) {
        self.stateful.owners[usize::from(number.get())] = owner;
    }

    /// Sets the time as packets see it.
    pub fn set_clock(&mut self, clock: Clock) {
        self.stateful.clock = clock;
    }

    /// The connections that have an entry.
    pub fn connections(&self) -> impl Iterator<Item = Connection> + '_ {
        self.stateful.connections()
    }

    /// The connection that has an entry.
    pub fn connection(&self, index: ConnectionIndex) -> Option<Connection> {
        self.stateful.connection(index)
    }

    /// Frees entries that are still of these connections.
    pub fn free_connections(&mut self, connections: &[Connection]) {
        self.stateful.free(connections);
    }

    /// Whether a service has that place.
    pub fn has_service(&self, place: usize) -> bool {
        self.services[place].is_some()
    }

    /// Connections assigned to each core since the table was switched in.
    pub fn assigned(&self, service: usize) -> &[u32] {
        self.service(service).placement.as_ref().map_or(&[], |placement| &placement.state.assigned)
    }

    /// The counter of rule `RoundRobin`.
    pub fn round_robin(&self, service: usize) -> u64 {
        self.service(service).round_robin
    }

    /// What was sent to each server that anything was sent to.
    pub fn traffic(&self) -> &HashMap<ServerId, ServerTraffic> {
        &self.traffic
    }

    /// The service that has this place.
    pub fn address_of_service(&self, place: usize) -> Option<ServiceAddress> {
        self.services.get(place)?.as_ref().map(|service| service.address)
    }

    /// New connections of the service that has this place.
    pub fn opened(&self, service: usize) -> u64 {
        self.opened.get(&service).copied().unwrap_or_default()
    }

    /// The flow table, as `struct flow_set` lays it out.
    pub fn flow_words(&self) -> &[u64] {
        self.flows.words()
    }

    /// The words of `recent_first_packets`.
    pub fn recent_first_packets(&self) -> &[u64] {
        self.recent.words()
    }

    fn service(&self, place: usize) -> &Service {
        self.services[place].as_ref().expect("a place that set_services returned")
    }

    fn service_mut(&mut self, place: usize) -> &mut Service {
        self.services[place].as_mut().expect("a place that set_services returned")
    }
}
