//! Forwarder: applies configuration, tables and MAC addresses to the data plane.

mod configuration;
mod metrics;
mod next_hops;
mod refusals;
mod symptoms;
mod table_ages;
mod vlans;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use coreward_dataplane::clock::monotonic;
use coreward_dataplane::device;
use coreward_dataplane::lb::{self, COUNTER_NAMES, Counters, EVENT_NAMES, LoadBalancer, StampedPackets};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::routes::Routes;
use coreward_metrics::latency::LatencyHistogram;
use coreward_model::connection_table::{Connection, Timeouts};
use coreward_model::consistency::{Consistency, Timestamps};
use coreward_model::cookie::FleetKeys;
use coreward_model::health::WhenAllDown;
use coreward_model::placement::{DEFAULT_TABLE_LIFETIME, PlacementTable};
use coreward_model::policy::TelemetryLevel;
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, ServiceAddress};
use coreward_wire::{HealthMessage, Peer, Service, ServiceIndex, TrafficMessage, v1};

use crate::announce::AnnounceState;
use crate::health::{CheckTarget, HealthChecks};
use crate::resolvers::{Neighbour, Resolution, Resolvers};
use crate::routing;
use refusals::Refusals;
use symptoms::Symptoms;
use table_ages::TableAges;

/// Interval of traffic messages before the first configuration.
const DEFAULT_REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// Number of calls of [`Forwarder::sweep_connections`] for the whole connection table, which take one second.
const CALLS_PER_SWEEP: u32 = 10;
/// Maximum number of entries (64 bytes each) that one call sweeps: a table of four million entries takes three seconds.
const MAX_SWEPT_ENTRIES: u32 = 131_072;
/// Time after which an upgrade no longer waits for servers that do not answer ARP.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time of a change that loads another program: on a loaded, emulated machine it takes 10 s.
pub const PROGRAM_LOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after the start of the process within which a controller should have sent a configuration.
const CONFIGURATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of counts of open connections, each of which reads the whole connection table.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);

/// State of the load balancer: its XDP program, and everything that determines how packets are forwarded.
pub struct Forwarder {
    balancer: LoadBalancer,
    attachment: lb::AttachedXdpMode,
    resolvers: Resolvers,
    macs: HashMap<Neighbour, MacAddress>,
    /// Reader of the kernel's routing table.
    routes: Routes,
    /// Next hops of the servers for which packets are encapsulated; servers without a route have no entry.
    next_hops: HashMap<Neighbour, IpAddr>,
    /// Warnings about servers to which the kernel has no route.
    route_warnings: BTreeSet<String>,
    /// Servers (service and position) behind each neighbour, which is the server itself or a router.
    servers_by_neighbour: HashMap<Neighbour, Vec<(ServiceIndex, usize)>>,
    services: BTreeMap<ServiceIndex, (Service, lb::ServiceIndex)>,
    name: String,
    /// All load balancers of the fleet, including this one.
    peers: Vec<Peer>,
    /// Interval of traffic messages to the controller.
    report_interval: Duration,
    /// Lifetime of a table that depends on loads, while no controller is connected.
    table_lifetime: Duration,
    table_ages: TableAges,
    timers: Timeouts,
    /// Time of the last count of open connections.
    last_count_at: Duration,
    /// Newest configuration generation that was confirmed in this stream, or 0 if none was.
    confirmed_generation: u64,
    /// Number of the configuration in force; `None`: there is none, or it could not be applied.
    configuration_number: Option<u64>,
    /// Configuration generation in force, from any controller, or 0 if there is none.
    applied_generation: u64,
    /// Cookie keys in force; `None` before the first configuration.
    keys: Option<FleetKeys>,
    /// Time at which a missing configuration is to be logged; `None`: it was already logged.
    missing_log_due: Option<Duration>,
    /// Whether the configuration in force has not been saved yet.
    is_unsaved: bool,
    /// Whether the next configuration must be complete, because a change did not apply to the one in force.
    needs_configuration: bool,
    interface: String,
    /// VLAN of the VIPs and of the load balancers.
    vlan: Vlan,
    /// Problems of the VLAN devices.
    vlan_problems: BTreeSet<String>,
    /// Problems of this machine, and of servers whose packets are stamped here, as they were last logged.
    problems: BTreeSet<String>,
    table_install_latency: LatencyHistogram,
    /// Number of announced VIPs; `None`: this daemon does not announce VIPs.
    announced_vips: Option<usize>,
    /// Reasons why other VIPs are not announced.
    blocked_reasons: Vec<String>,
    health: HealthChecks,
    /// Servers that are down according to this load balancer's own checks.
    down_targets: BTreeSet<CheckTarget>,
    /// Targets that get no new connections from this load balancer, even if the controller's table has them.
    masked_targets: BTreeSet<CheckTarget>,
    configured_at: Option<Duration>,
    /// Updates that were rejected as unusable.
    refusals: Refusals,
    /// Problems that counters of the last seconds show.
    symptoms: Symptoms,
}

impl Forwarder {
    pub fn new(
        name: String,
        (interface, vlan): (String, Vlan),
        balancer: LoadBalancer,
        attachment: lb::AttachedXdpMode,
        (resolvers, routes): (Resolvers, Routes),
        timers: Timeouts,
        health: HealthChecks,
    ) -> Self {
        Self {
            balancer,
            attachment,
            resolvers,
            macs: HashMap::new(),
            routes,
            next_hops: HashMap::new(),
            route_warnings: BTreeSet::new(),
            servers_by_neighbour: HashMap::new(),
            services: BTreeMap::new(),
            name,
            peers: Vec::new(),
            report_interval: DEFAULT_REPORT_INTERVAL,
            table_lifetime: DEFAULT_TABLE_LIFETIME,
            missing_log_due: Some(monotonic() + CONFIGURATION_TIMEOUT),
            table_ages: TableAges::new(monotonic()),
            timers,
            last_count_at: monotonic(),
            confirmed_generation: 0,
            configuration_number: None,
            applied_generation: 0,
            keys: None,
            is_unsaved: false,
            needs_configuration: false,
            interface,
            vlan,
            vlan_problems: BTreeSet::new(),
            problems: BTreeSet::new(),
            table_install_latency: LatencyHistogram::default(),
            announced_vips: None,
            blocked_reasons: Vec::new(),
            health,
            down_targets: BTreeSet::new(),
            masked_targets: BTreeSet::new(),
            configured_at: None,
            refusals: Refusals::default(),
            symptoms: Symptoms::default(),
        }
    }

    /// Begins a stream to a controller. Forgets confirmations in earlier streams, which may be of another controller.
    pub fn begin_stream(&mut self) {
        self.confirmed_generation = 0;
        self.configuration_number = None;
        self.needs_configuration = false;
        self.refusals.clear();
        self.health.begin_stream();
    }

    /// Returns the next message about servers' health, if one is due.
    pub fn next_health_message(&mut self) -> Option<HealthMessage> {
        self.health.next_message()
    }

    pub fn applied_generation(&self) -> u64 {
        self.applied_generation
    }

    pub fn is_upgrade_pending(&self) -> bool {
        self.balancer.is_upgrade_pending()
    }

    pub fn confirmed_generation(&self) -> u64 {
        self.confirmed_generation
    }

    fn peer_mac(&self, peer: &Peer) -> Option<MacAddress> {
        self.macs.get(&self.peer_neighbour(peer)?).copied()
    }

    fn update_peer(&mut self, change: Resolution) {
        let Neighbour { vlan, address } = change.neighbour;
        let moved = |peer: &&Peer| peer.address == Some(address) && vlan == self.vlan && peer.name != self.name;
        for peer in self.peers.iter().filter(moved) {
            match change.mac {
                Some(mac) => {
                    tracing::info!(
                        event = "peer-resolved",
                        load_balancer = peer.name,
                        %address,
                        %mac,
                        "another load balancer answers ARP or neighbour discovery"
                    );
                }
                None => tracing::warn!(
                    event = "peer-unresolved",
                    load_balancer = peer.name,
                    %address,
                    "no packets go to the other load balancer, which does not answer ARP or neighbour discovery"
                ),
            }
            if let Some(owner) = peer.owner.filter(|_| peer.is_alive) {
                self.balancer.set_owner_mac(owner, change.mac);
            }
        }
    }

    /// Sets the data plane's time and applies check results. Called ten times a second, also without a controller.
    pub fn tick(&mut self) {
        self.balancer.tick(monotonic());
        self.balancer.update_source_limit();
        if self.routes.has_changed() {
            self.refresh_next_hops();
        }
        if let Some(down) = self.health.servers_down_if_changed() {
            let before = std::mem::replace(&mut self.down_targets, down);
            let changed: BTreeSet<ServiceIndex> =
                before.symmetric_difference(&self.down_targets).map(|(service, _)| *service).collect();
            changed.into_iter().for_each(|service| self.set_servers(service));
        }
        self.choose_for_expired_tables();
        self.log_missing_configuration();
    }

    /// Masks the servers of a service that are down by this load balancer's own checks, at once and also without a
    /// controller. If it reaches none of the eligible servers, `when_all_down` decides: with "fail-open" it masks none,
    /// because its own network may have failed.
    fn mask_down_servers(&mut self, index: ServiceIndex) {
        let Some((service, place)) = self.services.get(&index) else { return };
        let is_down = |server: &&coreward_wire::Server| self.down_targets.contains(&(index, server.id));
        let (down, up): (Vec<_>, Vec<_>) =
            service.servers.iter().filter(|server| server.is_eligible).partition(is_down);
        let fails_open = up.is_empty() && service.when_all_down == WhenAllDown::FailOpen;
        let masked: BTreeSet<CheckTarget> =
            if fails_open { BTreeSet::new() } else { down.iter().map(|server| (index, server.id)).collect() };
        for server in &service.servers {
            let target = (index, server.id);
            self.balancer.set_masked(*place, server.id, masked.contains(&target));
            match (self.masked_targets.contains(&target), masked.contains(&target)) {
                (false, true) => tracing::warn!(
                    event = "server-masked",
                    server = server.name,
                    service = service.name,
                    "the server fails the health checks of this load balancer, which sends no new connections there"
                ),
                (true, false) => tracing::info!(
                    event = "server-unmasked",
                    server = server.name,
                    service = service.name,
                    "this load balancer sends the server new connections again"
                ),
                _ => {}
            }
        }
        self.masked_targets.retain(|(service, _)| *service != index);
        self.masked_targets.extend(masked);
    }

    /// Returns whether this load balancer may select a server for new connections.
    fn is_eligible(&self, service: ServiceIndex, server: &coreward_wire::Server) -> bool {
        server.is_eligible && !self.masked_targets.contains(&(service, server.id))
    }

    /// Sweeps the next section of the connection table. Frees entries that need no query, and returns entries that may
    /// be freed if their server has no socket. Fails when the kernel offers no grace period.
    pub fn sweep(&mut self) -> anyhow::Result<Vec<(Connection, ServiceAddress)>> {
        // Until the first configuration the table may have entries of an earlier daemon.
        let is_stateful = |(service, _): &(Service, _)| service.mode.consistency == Consistency::Stateful;
        if self.configured_at.is_some() && !self.services.values().any(is_stateful) {
            return Ok(Vec::new());
        }
        let entries =
            self.balancer.connection_table_size().entry_count().div_ceil(CALLS_PER_SWEEP).min(MAX_SWEPT_ENTRIES);
        let due = self.balancer.due_connections(&self.timers, entries);
        let (ask, free): (Vec<_>, Vec<_>) = due.into_iter().partition(|(_, due)| due.needs_server_query());
        self.free_connections(&free.into_iter().map(|(connection, _)| connection).collect::<Vec<_>>())?;
        let services: BTreeMap<u16, ServiceAddress> =
            self.services.values().map(|(service, index)| (index.get(), service.address)).collect();
        let with_service = |(connection, _): (Connection, _)| {
            services.get(&connection.identity.service).map(|service| (connection, *service))
        };
        Ok(ask.into_iter().filter_map(with_service).collect())
    }

    /// Frees those of the entries that have not changed since the sweep. Fails when the kernel offers no grace period.
    pub fn free_connections(&mut self, connections: &[Connection]) -> anyhow::Result<()> {
        let freed = if connections.is_empty() { 0 } else { self.balancer.free_connections(connections)? };
        tracing::debug!(
            event = "connections-freed",
            freed,
            checked = connections.len(),
            "the load balancer has freed idle entries of its connection table"
        );
        Ok(())
    }

    /// Returns the interval of traffic messages to the controller.
    pub fn report_interval(&self) -> Duration {
        self.report_interval
    }

    /// Returns the traffic to servers, or `None` if no policy needs it. A server's counts are sums over services, so
    /// all services are in the message.
    pub fn traffic_message(&self) -> Option<TrafficMessage> {
        if self.services.values().all(|(service, _)| service.telemetry_level == TelemetryLevel::Nothing) {
            return None;
        }
        let services = self.services.values();
        let opened_connections = services
            .clone()
            .map(|(service, index)| (service.index, self.balancer.opened_connections(*index)))
            .collect();
        let ids: BTreeSet<ServerId> =
            services.flat_map(|(service, _)| service.servers.iter().map(|server| server.id)).collect();
        let ids: Vec<ServerId> = ids.into_iter().collect();
        let traffic = self.balancer.traffic_of(&ids);
        Some(TrafficMessage { servers: ids.into_iter().zip(traffic).collect(), opened_connections })
    }

    /// Applies a change of a neighbour's MAC address.
    pub fn apply_resolution(&mut self, change: Resolution) {
        match change.mac {
            Some(mac) => self.macs.insert(change.neighbour, mac),
            None => self.macs.remove(&change.neighbour),
        };
        self.update_peer(change);
        let servers = self.servers_by_neighbour.get(&change.neighbour).into_iter().flatten();
        for (nth, (service_index, position)) in servers.enumerate() {
            let (service, index) = &self.services[service_index];
            let server = &service.servers[*position];
            match change.mac {
                _ if nth > 0 => {}
                Some(mac) => {
                    tracing::info!(
                        event = "server-resolved",
                        server = server.name,
                        address = %change.neighbour.address,
                        %mac,
                        "the server, or the router to the server, answers ARP or neighbour discovery"
                    );
                }
                None => tracing::warn!(
                    event = "server-unresolved",
                    server = server.name,
                    address = %change.neighbour.address,
                    "the server, or the router to it, does not answer ARP or neighbour discovery: check both addresses"
                ),
            }
            let server_now = lb::Server { mac: change.mac, is_eligible: self.is_eligible(*service_index, server) };
            self.balancer.set_server(*index, server.id, server_now);
        }
    }

    /// Installs a table of a service. Fails when the service is not configured, or the data plane cannot hold the
    /// table; the previous table then stays in force.
    pub fn install_table(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        let Some((configuration, index)) = self.services.get(&service) else {
            anyhow::bail!(
                "the table is for service index {}: expected the index of a configured service",
                service.get()
            );
        };
        let index = *index;
        if self.balancer.changes_rule(index, table) {
            coreward_daemon::run_with_watchdog_limit(PROGRAM_LOAD_TIMEOUT, || {
                self.balancer.install_table(index, table)
            })?;
        } else {
            self.balancer.install_table(index, table)?;
        }
        if self.table_ages.renew(service) {
            tracing::info!(
                event = "table-renewed",
                service = configuration.name,
                generation = table.generation,
                "a new table of the controller replaces the expired table"
            );
        }
        Ok(())
    }

    /// Completes an upgrade as soon as all tables are installed, and all servers are resolved or do not answer.
    fn switch_when_ready(&mut self) -> anyhow::Result<()> {
        let Some(configured) = self.configured_at.filter(|_| self.balancer.is_upgrade_pending()) else { return Ok(()) };
        let waited = monotonic().saturating_sub(configured);
        let ready = self.table_count() == self.services.len() && self.unresolved_servers().is_empty();
        if ready || waited > UPGRADE_TIMEOUT {
            self.balancer.commit_upgrade()?;
            tracing::info!(
                event = "upgrade-finished",
                ?waited,
                all_resolved = ready,
                "this version's program has replaced the program of another version"
            );
        }
        Ok(())
    }

    /// Reads the MAC address of the own device again. Fails when the device does not exist any more.
    pub fn maintain(&mut self) -> anyhow::Result<()> {
        anyhow::ensure!(self.resolvers.are_alive(), "a thread that resolves MAC addresses has ended");
        let now = monotonic();
        if now.saturating_sub(self.last_count_at) >= COUNT_INTERVAL {
            self.balancer.count_connections();
            self.last_count_at = now;
        }
        self.log_problems();
        self.update_symptoms();
        self.balancer.refresh_own_mac()?;
        self.check_vlans();
        self.switch_when_ready()
    }

    /// Returns warnings about settings of this machine's kernel that prevent forwarding.
    fn routing_problems(&self) -> Vec<String> {
        let stamped = self.services.values().map(|(service, _)| service);
        let mut stamped = stamped.filter(|service| service.mode.timestamps == Timestamps::LoadBalancer);
        let mut problems = Vec::new();
        if stamped.clone().any(|service| service.address.socket.is_ipv4()) {
            problems = self.devices().values().flat_map(|device| routing::ipv4_problems(device)).collect();
        }
        if stamped.any(|service| service.address.socket.is_ipv6()) {
            problems.extend(routing::ipv6_problem());
        }
        problems
    }

    /// Returns the problems of this machine.
    fn problems(&self) -> Vec<String> {
        let mut problems = self.routing_problems();
        problems.extend(self.blocked_reasons.iter().cloned());
        problems.extend(self.health.problem().map(str::to_owned));
        problems.extend(self.symptoms.list().cloned());
        problems.extend(self.encapsulation_warnings());
        problems.extend(self.vlan_problems.iter().cloned());
        problems.extend(self.expired_tables());
        problems.extend(self.missing_configuration().map(str::to_owned));
        problems
    }

    /// Logs each problem once, when it appears.
    fn log_problems(&mut self) {
        let clocks = self.server_clocks().into_iter().filter(|clock| !clock.problem.is_empty());
        // Without numbers that grow: each change would be logged again.
        let server = |clock: v1::ServerClock| {
            format!("{} of service {} is not stamped ({}; `coreward status`)", clock.server, clock.service, clock.state)
        };
        let problems: BTreeSet<String> = self.routing_problems().into_iter().chain(clocks.map(server)).collect();
        for problem in problems.difference(&self.problems) {
            tracing::warn!(
                event = "routing-problem",
                %problem,
                "this load balancer cannot stamp or forward packets of services with `timestamps = \"lb\"`"
            );
        }
        self.problems = problems;
    }

    /// Returns the clocks of servers with LB-side stamping. Omits and logs a service whose clocks cannot be read.
    fn server_clocks(&self) -> Vec<v1::ServerClock> {
        self.lb_stamped_services().flat_map(|(service, index)| self.clocks_of_service(service, *index)).collect()
    }

    fn clocks_of_service(&self, service: &Service, index: lb::ServiceIndex) -> Vec<v1::ServerClock> {
        let clocks = self.balancer.server_clocks(index).unwrap_or_else(|error| {
            tracing::warn!(
                event = "clocks-unreadable",
                service = service.name,
                error = format!("{error:#}"),
                "the load balancer cannot read the clocks of the service's servers: `coreward status` omits them"
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
                disagreed: clock.disagreeing_replies,
                problem: clock.problem().unwrap_or_default(),
            })
        };
        clocks.into_iter().filter_map(named).collect()
    }

    /// Returns the number of services that have a table.
    pub fn table_count(&self) -> usize {
        self.services.values().filter(|(_, index)| self.balancer.table_generation(*index).is_some()).count()
    }

    /// Returns which VIPs can be announced, or `None` before the first configuration, when the pinned state continues.
    /// A VIP is announceable when one of its services has a table in force and the MAC address of a server.
    pub fn announce_state(&self) -> Option<AnnounceState> {
        if self.services.is_empty() && self.confirmed_generation == 0 {
            return None;
        }
        let program = nix::net::if_::if_nametoindex(self.interface.as_str()).ok().and_then(|index| {
            let xdp = device::query_xdp_state(index).ok()?;
            xdp.native_program_id.or(xdp.generic_program_id)
        });
        if program.is_none() {
            let blocked_reasons = vec![format!("no VIP is announced: no XDP program is at {}", self.interface)];
            return Some(AnnounceState { blocked_reasons, ..AnnounceState::default() });
        }
        let mut state = AnnounceState::default();
        let mut blocked_reasons = BTreeMap::new();
        for (service, index) in self.services.values() {
            let vip = service.address.socket.ip();
            if self.balancer.table_generation(*index).is_none() {
                blocked_reasons.insert(vip, "its services have no table yet");
            } else if self.balancer.servers(*index).iter().all(|(_, server)| server.mac.is_none()) {
                blocked_reasons.insert(vip, "the MAC address of none of its servers is known");
            } else {
                state.announceable_vips.insert(vip);
            }
        }
        let blocked_reasons = blocked_reasons.into_iter().filter(|(vip, _)| !state.announceable_vips.contains(vip));
        state.blocked_reasons =
            blocked_reasons.map(|(vip, reason)| format!("VIP {vip} is not announced: {reason}")).collect();
        Some(state)
    }

    /// Stores the number of announced VIPs, and the reasons why others are blocked, for reports.
    pub fn set_announced_vips(&mut self, count: usize, blocked: Vec<String>) {
        (self.announced_vips, self.blocked_reasons) = (Some(count), blocked);
    }

    fn unresolved_servers(&self) -> BTreeSet<String> {
        let mut unresolved = BTreeSet::new();
        for (service, index) in self.services.values() {
            let known = |id: ServerId| self.balancer.server(*index, id).and_then(|server| server.mac);
            let missing = |server: &&coreward_wire::Server| known(server.id).is_none();
            unresolved.extend(service.servers.iter().filter(missing).map(|server| server.name.clone()));
        }
        unresolved
    }

    pub fn state(&self) -> v1::LoadBalancerState {
        let generations = self.services.values().filter_map(|(service, index)| {
            let generation = self.balancer.table_generation(*index)?;
            Some((service.name.clone(), generation))
        });
        let Counters { packets, events, .. } = self.balancer.total_counters();
        let unresolved = |peer: &&Peer| peer.name != self.name && peer.owner.is_some() && self.peer_mac(peer).is_none();
        let unresolved_load_balancers = self.peers.iter().filter(unresolved).map(|peer| peer.name.clone()).collect();
        let mode = match self.attachment {
            lb::AttachedXdpMode::Native => "native",
            lb::AttachedXdpMode::Generic => "generic",
        };
        v1::LoadBalancerState {
            table_generations: generations.collect(),
            unresolved_servers: self.unresolved_servers().into_iter().collect(),
            counters: COUNTER_NAMES.iter().map(|name| (*name).to_owned()).zip(packets).collect(),
            xdp_mode: mode.to_owned(),
            configuration_generation: self.confirmed_generation,
            events: EVENT_NAMES.iter().map(|name| (*name).to_owned()).zip(events).collect(),
            connections: self.balancer.occupancy(),
            unresolved_load_balancers,
            server_clocks: self.server_clocks(),
            warnings: self.problems(),
            refused: self.refusals.list(),
            stamped_services: self.stamped_services(),
            vlan: self.vlan.get().into(),
        }
    }

    fn lb_stamped_services(&self) -> impl Iterator<Item = &(Service, lb::ServiceIndex)> {
        self.services.values().filter(|(service, _)| service.mode.timestamps == Timestamps::LoadBalancer)
    }

    fn stamped_services(&self) -> Vec<v1::StampedPackets> {
        let counted = |(service, index): &(Service, lb::ServiceIndex)| {
            let StampedPackets { by_cookie, by_flow_table } = self.balancer.stamped_packets(*index);
            v1::StampedPackets { service: service.name.clone(), by_cookie, by_flow_table }
        };
        self.lb_stamped_services().map(counted).collect()
    }
}
