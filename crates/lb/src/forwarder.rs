//! The data plane as the controller wants it: configuration, tables and MAC addresses put together.

mod configuration;
mod metrics;
mod refusals;
mod symptoms;
mod table_ages;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use coreward_dataplane::clock::monotonic;
use coreward_dataplane::device;
use coreward_dataplane::lb::{self, COUNTER_NAMES, Counters, EVENT_NAMES, LoadBalancer};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::neighbour::{Change, Resolver};
use coreward_metrics::latency::LatencyHistogram;
use coreward_model::connection_table::{Connection, Timers};
use coreward_model::consistency::{Consistency, Timestamps};
use coreward_model::cookie::FleetKeys;
use coreward_model::health::WhenAllDown;
use coreward_model::placement::{DEFAULT_TABLE_LIFETIME, PlacementTable};
use coreward_model::policy::TelemetryLevel;
use coreward_model::{ServerId, ServiceAddress};
use coreward_wire::{HealthMessage, Peer, Service, ServiceIndex, TrafficMessage, v1};

use crate::announce::AnnounceState;
use crate::health::{Health, Target};
use crate::routing;
use refusals::Refusals;
use symptoms::Symptoms;
use table_ages::TableAges;

/// Until a configuration says otherwise.
const DEFAULT_REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// In so many calls of [`Forwarder::sweep`] the whole connection table is looked through: in a second.
const SWEEP_BEATS: u32 = 10;
/// But at most so many entries in one call, of 64 bytes each: a table of four million takes three seconds.
const SWEPT_AT_ONCE: u32 = 131_072;
/// Servers that have not answered ARP in this time are not waited for before this version's program goes to work.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(5);
/// Counting connections reads the whole table.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);

/// The load balancer's program and what is known for it.
pub struct Forwarder {
    balancer: LoadBalancer,
    attachment: lb::Attachment,
    resolver: Resolver,
    macs: HashMap<Ipv4Addr, MacAddress>,
    /// By address: which servers of which services are there.
    at_address: HashMap<Ipv4Addr, Vec<(ServiceIndex, usize)>>,
    services: BTreeMap<ServiceIndex, (Service, lb::ServiceIndex)>,
    /// Its own name.
    name: String,
    /// All load balancers, itself among them.
    peers: Vec<Peer>,
    /// Time between two messages of traffic.
    report_interval: Duration,
    /// Time for which a table that depends on loads is in force without a controller.
    table_lifetime: Duration,
    table_ages: TableAges,
    timers: Timers,
    /// When the connections in the table were counted.
    counted: Duration,
    /// Generation of the newest configuration of this stream that is in force; 0: none yet.
    confirmed: u64,
    /// Its number; `None`: none yet, or what came cannot be in force.
    number: Option<u64>,
    /// Generation of the configuration in force, whichever controller sent it; 0: none came.
    in_force: u64,
    /// The cookie keys in force; `None`: no configuration came.
    keys: Option<FleetKeys>,
    /// The configuration in force is not saved yet.
    is_unsaved: bool,
    /// A change came of another configuration than the one in force.
    lacks_configuration: bool,
    /// The device's name.
    interface: String,
    /// What is wrong with this machine or with servers that it stamps for, as it was last logged.
    problems: BTreeSet<String>,
    table_to_kernel: LatencyHistogram,
    /// VIPs that are announced; `None`: not by this daemon.
    announced: Option<usize>,
    /// Why VIPs are not announced.
    blocked: Vec<String>,
    /// Checks of servers.
    health: Health,
    /// The servers that are down by these checks.
    down: BTreeSet<Target>,
    /// Those of them that get no new connections from here, whatever the controller says.
    masked: BTreeSet<Target>,
    configured_at: Option<Duration>,
    /// What of the controller's updates cannot be used.
    refusals: Refusals,
    /// Faults that counters of the last seconds show.
    symptoms: Symptoms,
}

impl Forwarder {
    /// Around a program that is attached.
    pub fn new(
        name: String,
        interface: String,
        balancer: LoadBalancer,
        attachment: lb::Attachment,
        resolver: Resolver,
        timers: Timers,
        health: Health,
    ) -> Self {
        Self {
            balancer,
            attachment,
            resolver,
            macs: HashMap::new(),
            at_address: HashMap::new(),
            services: BTreeMap::new(),
            name,
            peers: Vec::new(),
            report_interval: DEFAULT_REPORT_INTERVAL,
            table_lifetime: DEFAULT_TABLE_LIFETIME,
            table_ages: TableAges::new(monotonic()),
            timers,
            counted: monotonic(),
            confirmed: 0,
            number: None,
            in_force: 0,
            keys: None,
            is_unsaved: false,
            lacks_configuration: false,
            interface,
            problems: BTreeSet::new(),
            table_to_kernel: LatencyHistogram::default(),
            announced: None,
            blocked: Vec::new(),
            health,
            down: BTreeSet::new(),
            masked: BTreeSet::new(),
            configured_at: None,
            refusals: Refusals::default(),
            symptoms: Symptoms::default(),
        }
    }

    /// A new stream to a controller has begun. What an earlier one said says nothing about this one's configurations: it
    /// may be another controller's.
    pub fn begin_stream(&mut self) {
        self.confirmed = 0;
        self.number = None;
        self.lacks_configuration = false;
        self.refusals.clear();
        self.health.begin_stream();
    }

    /// What the controller is to be told of servers' health now, if anything.
    pub fn health_news(&mut self) -> Option<HealthMessage> {
        self.health.news()
    }

    /// Generation of the configuration in force, whichever controller sent it; 0: none came.
    pub fn in_force(&self) -> u64 {
        self.in_force
    }

    /// Whether another version's program forwards until this one's tables are there.
    pub fn is_upgrade_pending(&self) -> bool {
        self.balancer.is_upgrade_pending()
    }

    /// Generation of the newest configuration of this stream that is in force; 0: none yet.
    pub fn confirmed(&self) -> u64 {
        self.confirmed
    }

    fn mac_of(&self, peer: &Peer) -> Option<MacAddress> {
        self.macs.get(&ipv4(peer.address?)?).copied()
    }

    fn peer_moved(&mut self, change: Change) {
        let moved = |peer: &&Peer| peer.address == Some(change.address.into()) && peer.name != self.name;
        for peer in self.peers.iter().filter(moved) {
            match change.mac {
                Some(mac) => {
                    tracing::info!(event = "peer-resolved", load_balancer = peer.name, %mac, "peer answers ARP");
                }
                None => tracing::warn!(
                    event = "peer-unresolved",
                    load_balancer = peer.name,
                    address = %change.address,
                    "load balancer does not answer ARP"
                ),
            }
            if let Some(owner) = peer.owner.filter(|_| peer.alive) {
                self.balancer.set_owner_mac(owner, change.mac);
            }
        }
    }

    /// Tells packets the time, and takes over what checks have found; to be called ten times a second, whether there is a
    /// controller or not.
    pub fn tick(&mut self) {
        self.balancer.tick(monotonic());
        self.balancer.guard_connection_table();
        if let Some(down) = self.health.newly_down() {
            let before = std::mem::replace(&mut self.down, down);
            let changed: BTreeSet<ServiceIndex> =
                before.symmetric_difference(&self.down).map(|(service, _)| *service).collect();
            changed.into_iter().for_each(|service| self.set_servers(service));
        }
        self.choose_for_expired_tables();
    }

    /// Masks the servers of a service that are down by this load balancer's own checks: it acts at once, also without a
    /// controller, and where it alone does not reach a server. Where it reaches none of those that the controller gives new
    /// connections it goes by `when_all_down`: with "fail-open" it masks none, as its own network may have failed.
    fn mask(&mut self, index: ServiceIndex) {
        let Some((service, place)) = self.services.get(&index) else { return };
        let is_down = |server: &&coreward_wire::Server| self.down.contains(&(index, server.id));
        let (down, up): (Vec<_>, Vec<_>) = service.servers.iter().filter(|server| server.eligible).partition(is_down);
        let fails_open = up.is_empty() && service.when_all_down == WhenAllDown::FailOpen;
        let masked: BTreeSet<Target> =
            if fails_open { BTreeSet::new() } else { down.iter().map(|server| (index, server.id)).collect() };
        for server in &service.servers {
            let target = (index, server.id);
            self.balancer.set_masked(*place, server.id, masked.contains(&target));
            match (self.masked.contains(&target), masked.contains(&target)) {
                (false, true) => tracing::warn!(
                    event = "server-masked",
                    server = server.name,
                    service = service.name,
                    "server is down by this load balancer's checks: it gets no new connections from here"
                ),
                (true, false) => tracing::info!(
                    event = "server-unmasked",
                    server = server.name,
                    service = service.name,
                    "server gets new connections from here again"
                ),
                _ => {}
            }
        }
        self.masked.retain(|(service, _)| *service != index);
        self.masked.extend(masked);
    }

    /// Whether a server gets new connections from here.
    fn is_eligible(&self, service: ServiceIndex, server: &coreward_wire::Server) -> bool {
        server.eligible && !self.masked.contains(&(service, server.id))
    }

    /// Looks through the next part of the connection table: frees what may be freed at once, and returns what may be
    /// freed if it has no socket. Fails when the kernel offers no grace period.
    pub fn sweep(&mut self) -> anyhow::Result<Vec<(Connection, ServiceAddress)>> {
        // Before the first configuration the table may have entries of a daemon before this one.
        let is_stateful = |(service, _): &(Service, _)| service.mode.consistency == Consistency::Stateful;
        if self.configured_at.is_some() && !self.services.values().any(is_stateful) {
            return Ok(Vec::new());
        }
        let entries = self.balancer.connection_table_size().entries().div_ceil(SWEEP_BEATS).min(SWEPT_AT_ONCE);
        let due = self.balancer.due_connections(&self.timers, entries);
        let (ask, free): (Vec<_>, Vec<_>) = due.into_iter().partition(|(_, due)| due.must_ask());
        self.free(&free.into_iter().map(|(connection, _)| connection).collect::<Vec<_>>())?;
        let services: BTreeMap<u16, ServiceAddress> =
            self.services.values().map(|(service, index)| (index.get(), service.address)).collect();
        let with_service = |(connection, _): (Connection, _)| {
            services.get(&connection.identity.service).map(|service| (connection, *service))
        };
        Ok(ask.into_iter().filter_map(with_service).collect())
    }

    /// Frees these entries, as far as nothing has happened to them since. Fails when the kernel offers no grace period.
    pub fn free(&mut self, connections: &[Connection]) -> anyhow::Result<()> {
        let freed = if connections.is_empty() { 0 } else { self.balancer.free_connections(connections)? };
        tracing::debug!(event = "connections-freed", freed, checked = connections.len(), "connections are freed");
        Ok(())
    }

    /// Time between two messages of traffic.
    pub fn report_interval(&self) -> Duration {
        self.report_interval
    }

    /// What was sent to servers; `None`: no policy wants to know. Counts of servers are of all services, so all services are in it.
    pub fn traffic(&self) -> Option<TrafficMessage> {
        if self.services.values().all(|(service, _)| service.traffic == TelemetryLevel::Nothing) {
            return None;
        }
        let services = self.services.values();
        let opened = services.clone().map(|(service, index)| (service.index, self.balancer.opened(*index))).collect();
        let ids: BTreeSet<ServerId> =
            services.flat_map(|(service, _)| service.servers.iter().map(|server| server.id)).collect();
        let ids: Vec<ServerId> = ids.into_iter().collect();
        let traffic = self.balancer.traffic_of(&ids);
        Some(TrafficMessage { servers: ids.into_iter().zip(traffic).collect(), opened })
    }

    /// A neighbour's MAC address became known, changed or was lost.
    pub fn neighbour(&mut self, change: Change) {
        match change.mac {
            Some(mac) => self.macs.insert(change.address, mac),
            None => self.macs.remove(&change.address),
        };
        self.peer_moved(change);
        let servers = self.at_address.get(&change.address).into_iter().flatten();
        for (nth, (service_index, position)) in servers.enumerate() {
            let (service, index) = &self.services[service_index];
            let server = &service.servers[*position];
            match change.mac {
                _ if nth > 0 => {}
                Some(mac) => {
                    tracing::info!(event = "server-resolved", server = server.name, %mac, "server answers ARP")
                }
                None => tracing::warn!(
                    event = "server-unresolved",
                    server = server.name,
                    address = %server.address,
                    "server does not answer ARP"
                ),
            }
            let server_now = lb::Server { mac: change.mac, eligible: self.is_eligible(*service_index, server) };
            self.balancer.set_server(*index, server.id, server_now);
        }
    }

    /// Switches to a service's new table. Fails when the service is not configured, or the data plane cannot hold the
    /// table: the one before stays then.
    pub fn install(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        let Some((configuration, index)) = self.services.get(&service) else {
            anyhow::bail!("a table for service index {}, which is not configured", service.get());
        };
        self.balancer.install_table(*index, table)?;
        if self.table_ages.renew(service) {
            tracing::info!(
                event = "table-renewed",
                service = configuration.name,
                generation = table.generation,
                "a new table replaces an expired one"
            );
        }
        Ok(())
    }

    /// Takes the place of another version's program once this one can do as well: all tables are there, and all servers are
    /// found, or do not answer.
    fn switch_when_ready(&mut self) -> anyhow::Result<()> {
        let Some(configured) = self.configured_at.filter(|_| self.balancer.is_upgrade_pending()) else { return Ok(()) };
        let waited = monotonic().saturating_sub(configured);
        let ready = self.tables() == self.services.len() && self.unresolved().is_empty();
        if ready || waited > UPGRADE_TIMEOUT {
            self.balancer.switch_over()?;
            tracing::info!(event = "upgrade-finished", ?waited, "this version's program replaces the other one");
        }
        Ok(())
    }

    /// Looks after what may change without being told: the device's own MAC address. Fails when the device is gone.
    pub fn maintain(&mut self) -> anyhow::Result<()> {
        anyhow::ensure!(self.resolver.is_alive(), "the thread that resolves MAC addresses has ended");
        let now = monotonic();
        if now.saturating_sub(self.counted) >= COUNT_INTERVAL {
            self.balancer.count_connections();
            self.counted = now;
        }
        self.log_problems();
        self.update_symptoms();
        self.balancer.refresh_own_mac()?;
        self.switch_when_ready()
    }

    fn stamps(&self) -> bool {
        self.services.values().any(|(service, _)| service.mode.timestamps == Timestamps::LoadBalancer)
    }

    /// What this machine's kernel does not do that it must.
    fn routing_problems(&self) -> Vec<String> {
        if self.stamps() { routing::problems(&self.interface) } else { Vec::new() }
    }

    /// What is wrong with this machine.
    fn problems(&self) -> Vec<String> {
        let mut problems = self.routing_problems();
        problems.extend(self.blocked.iter().cloned());
        problems.extend(self.health.problem().map(str::to_owned));
        problems.extend(self.symptoms.list().cloned());
        problems.extend(self.expired_tables());
        problems
    }

    /// Each once, when it is first seen.
    fn log_problems(&mut self) {
        let clocks = self.server_clocks().into_iter().filter(|clock| !clock.problem.is_empty());
        // Without the numbers, which grow.
        let server = |clock: v1::ServerClock| {
            format!("{} of service {} is not stamped ({}; `coreward status`)", clock.server, clock.service, clock.state)
        };
        let problems: BTreeSet<String> = self.routing_problems().into_iter().chain(clocks.map(server)).collect();
        for problem in problems.difference(&self.problems) {
            tracing::warn!(event = "routing-problem", "{problem}");
        }
        self.problems = problems;
    }

    /// What was seen of the clocks of servers that are stamped for here. Nothing of a service whose clocks cannot be read:
    /// the log has it.
    fn server_clocks(&self) -> Vec<v1::ServerClock> {
        let stamped = self.services.values().filter(|(service, _)| service.mode.timestamps == Timestamps::LoadBalancer);
        stamped.flat_map(|(service, index)| self.server_clocks_of(service, *index)).collect()
    }

    fn server_clocks_of(&self, service: &Service, index: lb::ServiceIndex) -> Vec<v1::ServerClock> {
        let clocks = self.balancer.server_clocks(index).unwrap_or_else(|error| {
            tracing::warn!(
                event = "clocks-unreadable",
                service = service.name,
                error = format!("{error:#}"),
                "cannot read the servers' clocks"
            );
            Vec::new()
        });
        let named = |(id, clock): (ServerId, lb::ServerClock)| {
            let server = service.servers.iter().find(|server| server.id == id)?;
            Some(v1::ServerClock {
                service: service.name.clone(),
                server: server.name.clone(),
                state: clock.state().name().to_owned(),
                syn_acks: clock.syn_acks,
                with_timestamps: clock.with_timestamps,
                disagreed: clock.disagreed,
                problem: clock.problem().unwrap_or_default(),
            })
        };
        clocks.into_iter().filter_map(named).collect()
    }

    /// How many services have a table.
    pub fn tables(&self) -> usize {
        self.services.values().filter(|(_, index)| self.balancer.table_generation(*index).is_some()).count()
    }

    /// What this load balancer can do for its VIPs; `None`: no configuration has come yet, and what is pinned goes on. A VIP
    /// can be served when one of its services can: its table is in force, and the MAC address of one of its servers is known.
    pub fn announce_state(&self) -> Option<AnnounceState> {
        if self.services.is_empty() && self.confirmed == 0 {
            return None;
        }
        let program = nix::net::if_::if_nametoindex(self.interface.as_str()).ok().and_then(|index| {
            let xdp = device::xdp(index).ok()?;
            xdp.native.or(xdp.generic)
        });
        if program.is_none() {
            let blocked = vec![format!("no VIP is announced: no XDP program is at {}", self.interface)];
            return Some(AnnounceState { blocked, ..AnnounceState::default() });
        }
        let mut state = AnnounceState::default();
        let mut blocked = BTreeMap::new();
        for (service, index) in self.services.values() {
            let Some(vip) = ipv4(service.address.socket.ip()) else { continue };
            if self.balancer.table_generation(*index).is_none() {
                blocked.insert(vip, "its services have no table yet");
            } else if self.balancer.servers(*index).iter().all(|(_, server)| server.mac.is_none()) {
                blocked.insert(vip, "the MAC address of none of its servers is known");
            } else {
                state.announceable.insert(vip);
            }
        }
        let blocked = blocked.into_iter().filter(|(vip, _)| !state.announceable.contains(vip));
        state.blocked = blocked.map(|(vip, reason)| format!("VIP {vip} is not announced: {reason}")).collect();
        Some(state)
    }

    /// How many VIPs are announced, and why others are not; for those who ask.
    pub fn announced(&mut self, count: usize, blocked: Vec<String>) {
        (self.announced, self.blocked) = (Some(count), blocked);
    }

    /// Servers without a MAC address, by name.
    fn unresolved(&self) -> BTreeSet<String> {
        let mut unresolved = BTreeSet::new();
        for (service, index) in self.services.values() {
            let known = |id: ServerId| self.balancer.server(*index, id).and_then(|server| server.mac);
            let missing = |server: &&coreward_wire::Server| known(server.id).is_none();
            unresolved.extend(service.servers.iter().filter(missing).map(|server| server.name.clone()));
        }
        unresolved
    }

    /// What the controller is told.
    pub fn state(&self) -> v1::LoadBalancerState {
        let generations = self.services.values().filter_map(|(service, index)| {
            let generation = self.balancer.table_generation(*index)?;
            Some((service.name.clone(), generation))
        });
        let Counters { packets, events, .. } = self.balancer.total_counters();
        let unresolved = |peer: &&Peer| peer.name != self.name && peer.owner.is_some() && self.mac_of(peer).is_none();
        let unresolved_load_balancers = self.peers.iter().filter(unresolved).map(|peer| peer.name.clone()).collect();
        let mode = match self.attachment {
            lb::Attachment::Native => "native",
            lb::Attachment::Generic => "generic",
        };
        v1::LoadBalancerState {
            table_generations: generations.collect(),
            unresolved_servers: self.unresolved().into_iter().collect(),
            counters: COUNTER_NAMES.iter().map(|name| (*name).to_owned()).zip(packets).collect(),
            xdp_mode: mode.to_owned(),
            configuration_generation: self.confirmed,
            events: EVENT_NAMES.iter().map(|name| (*name).to_owned()).zip(events).collect(),
            connections: self.balancer.occupancy(),
            unresolved_load_balancers,
            server_clocks: self.server_clocks(),
            warnings: self.problems(),
            refused: self.refusals.list(),
        }
    }
}

/// IPv6 servers cannot be configured yet: the data plane refuses their services.
fn ipv4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}
