//! Applies the controller's configuration and tables, and servers' MAC addresses, to the data plane.

mod configuration;
mod lb_stamping;
mod metrics;
mod next_hops;
mod packet_loss_symptoms;
mod rejections;
mod table_ages;
mod vlans;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use coreward_dataplane::clock::monotonic_time;
use coreward_dataplane::device;
use coreward_dataplane::lb::{self, COUNTER_NAMES, EVENT_NAMES, LoadBalancer, PacketCounters};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::routes::RouteSockets;
use coreward_metrics::latency_histogram::LatencyHistogram;
use coreward_model::connection_table::{ConnectionEntry, ConnectionTimeouts};
use coreward_model::consistency::{ConsistencyMode, CookieStamper};
use coreward_model::health::AllServersDownTreatment;
use coreward_model::placement::{DEFAULT_PLACEMENT_TABLE_LIFETIME, PlacementTable};
use coreward_model::policy::TelemetryLevel;
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, ServiceAddress};
use coreward_wire::{HealthCheckResultsMessage, PeerLoadBalancer, Service, ServiceIndex, TrafficCountsMessage, v1};

use crate::health::{HealthCheckTarget, HealthChecks};
use crate::resolvers::{MacResolution, Neighbour, NeighbourResolvers};
use crate::routing;
use crate::vip_announcement::VipAnnouncementState;
use configuration::FleetConfigurationState;
use next_hops::ServerNextHops;
use packet_loss_symptoms::PacketLossSymptoms;
use rejections::RejectedUpdates;
pub use rejections::log_rejection;
use table_ages::PlacementTableAges;

/// Interval between traffic messages until the first configuration sets it.
const DEFAULT_TRAFFIC_MESSAGE_INTERVAL: Duration = Duration::from_millis(100);
/// Number of calls to [`Forwarder::sweep_connections`] that together sweep the whole connection table, which takes one
/// second.
const SWEEP_CALLS_PER_CONNECTION_TABLE: u32 = 10;
/// Maximum number of table entries (64 bytes each) that one call of [`Forwarder::sweep_connections`] sweeps. Four
/// million entries thus take three seconds.
const MAX_ENTRIES_PER_SWEEP_CALL: u32 = 131_072;
/// Time after which an upgrade proceeds although some servers have not answered ARP.
const UPGRADE_ARP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for a configuration change that loads another XDP program. On a busy, emulated machine, loading takes
/// 10 s.
pub const XDP_PROGRAM_LOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between counts of open connections. Each count reads the whole connection table.
const CONNECTION_COUNT_INTERVAL: Duration = Duration::from_secs(10);

/// The load balancer's XDP program, and all state that determines how packets are forwarded.
pub struct Forwarder {
    load_balancer: LoadBalancer,
    attached_xdp_mode: lb::AttachedXdpMode,
    resolvers: NeighbourResolvers,
    mac_addresses: HashMap<Neighbour, MacAddress>,
    next_hops: ServerNextHops,
    /// Servers that are reached through each neighbour, as pairs of a service and a position in its list of servers. A
    /// neighbour is the server itself or a router.
    servers_by_neighbour: HashMap<Neighbour, Vec<(ServiceIndex, usize)>>,
    services_by_index: BTreeMap<ServiceIndex, (Service, lb::ServiceIndex)>,
    own_name: String,
    /// All load balancers of the fleet, including this one.
    fleet_load_balancers: Vec<PeerLoadBalancer>,
    traffic_report_interval: Duration,
    /// Time for which a table that depends on loads stays in use while no controller is connected.
    load_based_table_lifetime: Duration,
    table_ages: PlacementTableAges,
    connection_timeouts: ConnectionTimeouts,
    last_connection_count_at: Duration,
    configuration: FleetConfigurationState,
    interface_name: String,
    /// VLAN in which the VIPs and the load balancers are.
    vip_vlan: Vlan,
    vlan_device_problems: BTreeSet<String>,
    /// Current problems, already logged, of this machine and of the servers for which it stamps packets.
    logged_problems: BTreeSet<String>,
    table_install_latency: LatencyHistogram,
    announced_vips: AnnouncedVips,
    health_checks: HealthChecks,
    /// Servers that this load balancer's own health checks found down.
    down_targets: BTreeSet<HealthCheckTarget>,
    /// Servers that get no new connections from this load balancer, even if the controller's table selects them.
    masked_targets: BTreeSet<HealthCheckTarget>,
    rejections: RejectedUpdates,
    /// Signs of packet loss in the counters of the last seconds.
    symptoms: PacketLossSymptoms,
}

/// VIPs that this daemon announces to the routers.
#[derive(Default)]
struct AnnouncedVips {
    /// Number of announced VIPs, or `None` if the daemon runs without an announcer.
    vip_count: Option<usize>,
    /// Reasons why configured VIPs are not announced.
    obstacles: Vec<String>,
}

impl Forwarder {
    pub fn new(
        own_name: String,
        (interface_name, vip_vlan): (String, Vlan),
        load_balancer: LoadBalancer,
        attached_xdp_mode: lb::AttachedXdpMode,
        (resolvers, kernel_routes): (NeighbourResolvers, RouteSockets),
        connection_timeouts: ConnectionTimeouts,
        health_checks: HealthChecks,
    ) -> Self {
        Self {
            load_balancer,
            attached_xdp_mode,
            resolvers,
            mac_addresses: HashMap::new(),
            next_hops: ServerNextHops::new(kernel_routes),
            servers_by_neighbour: HashMap::new(),
            services_by_index: BTreeMap::new(),
            own_name,
            fleet_load_balancers: Vec::new(),
            traffic_report_interval: DEFAULT_TRAFFIC_MESSAGE_INTERVAL,
            load_based_table_lifetime: DEFAULT_PLACEMENT_TABLE_LIFETIME,
            table_ages: PlacementTableAges::new(monotonic_time()),
            connection_timeouts,
            last_connection_count_at: monotonic_time(),
            configuration: FleetConfigurationState::new(),
            interface_name,
            vip_vlan,
            vlan_device_problems: BTreeSet::new(),
            logged_problems: BTreeSet::new(),
            table_install_latency: LatencyHistogram::default(),
            announced_vips: AnnouncedVips::default(),
            health_checks,
            down_targets: BTreeSet::new(),
            masked_targets: BTreeSet::new(),
            rejections: RejectedUpdates::default(),
            symptoms: PacketLossSymptoms::default(),
        }
    }

    /// Starts a stream to a controller. Forgets the configuration that was confirmed on the previous stream, because
    /// that may have been to another controller.
    pub fn begin_controller_stream(&mut self) {
        self.configuration.confirmed_generation = 0;
        self.configuration.configuration_number = None;
        self.configuration.needs_complete = false;
        self.rejections.clear();
        self.health_checks.begin_controller_stream();
    }

    pub fn take_due_health_message(&mut self) -> Option<HealthCheckResultsMessage> {
        self.health_checks.take_due_health_message()
    }

    pub fn applied_generation(&self) -> u64 {
        self.configuration.applied_generation
    }

    pub fn is_upgrade_pending(&self) -> bool {
        self.load_balancer.is_upgrade_pending()
    }

    pub fn confirmed_generation(&self) -> u64 {
        self.configuration.confirmed_generation
    }

    fn peer_mac(&self, peer: &PeerLoadBalancer) -> Option<MacAddress> {
        self.mac_addresses.get(&self.peer_neighbour(peer)?).copied()
    }

    fn update_peer_mac(&mut self, resolution: MacResolution) {
        let Neighbour { vlan, address } = resolution.neighbour;
        let is_affected_peer = |peer: &&PeerLoadBalancer| {
            peer.address == Some(address) && vlan == self.vip_vlan && peer.name != self.own_name
        };
        for peer in self.fleet_load_balancers.iter().filter(is_affected_peer) {
            match resolution.mac {
                Some(mac) => {
                    tracing::info!(
                        event = "peer-resolved",
                        load_balancer = peer.name,
                        %address,
                        %mac,
                        "the other load balancer answers ARP or neighbour discovery: packets can be forwarded to it"
                    );
                }
                None => tracing::warn!(
                    event = "peer-unresolved",
                    load_balancer = peer.name,
                    %address,
                    "the other load balancer does not answer ARP or neighbour discovery: no packets are forwarded to it"
                ),
            }
            if let Some(owner) = peer.owner_number.filter(|_| peer.is_alive) {
                self.load_balancer.set_owner_mac(owner, resolution.mac);
            }
        }
    }

    /// Sets the data plane's clock and applies the results of health checks. Called ten times a second, even without a
    /// controller.
    pub fn tick(&mut self) {
        self.load_balancer.tick_packet_clock(monotonic_time());
        self.load_balancer.update_source_prefix_limit();
        if self.next_hops.route_sockets.have_routes_changed() {
            self.refresh_next_hops();
        }
        if let Some(down_targets) = self.health_checks.take_changed_down_servers() {
            let previous_down_targets = std::mem::replace(&mut self.down_targets, down_targets);
            let affected_services: BTreeSet<ServiceIndex> =
                previous_down_targets.symmetric_difference(&self.down_targets).map(|(service, _)| *service).collect();
            affected_services.into_iter().for_each(|service| self.set_servers_of_service(service));
        }
        self.replace_expired_candidates();
        self.log_missing_configuration();
    }

    /// Excludes servers that this load balancer's own checks found down from a service's new connections. Needs no
    /// controller. If no eligible server is up, the service's `when_all_down` decides. With "fail-open", no server is
    /// excluded, because the load balancer's own network may have failed.
    fn mask_down_servers(&mut self, index: ServiceIndex) {
        let Some((service, lb_service_index)) = self.services_by_index.get(&index) else { return };
        let is_server_down = |server: &&coreward_wire::Server| self.down_targets.contains(&(index, server.id));
        let (down_servers, up_servers): (Vec<_>, Vec<_>) =
            service.servers.iter().filter(|server| server.is_eligible).partition(is_server_down);
        let fails_open = up_servers.is_empty() && service.when_all_down == AllServersDownTreatment::FailOpen;
        let masked_targets: BTreeSet<HealthCheckTarget> =
            if fails_open { BTreeSet::new() } else { down_servers.iter().map(|server| (index, server.id)).collect() };
        for server in &service.servers {
            let check_target = (index, server.id);
            self.load_balancer.set_server_masked(*lb_service_index, server.id, masked_targets.contains(&check_target));
            match (self.masked_targets.contains(&check_target), masked_targets.contains(&check_target)) {
                (false, true) => tracing::warn!(
                    event = "server-masked",
                    server = server.name,
                    service = service.name,
                    "the server fails this load balancer's health checks, and gets no new connections from it"
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
        self.masked_targets.extend(masked_targets);
    }

    /// Returns whether this load balancer may select the server for a service's new connections.
    fn may_get_new_connections(&self, service: ServiceIndex, server: &coreward_wire::Server) -> bool {
        server.is_eligible && !self.masked_targets.contains(&(service, server.id))
    }

    /// Sweeps the next section of the connection table. Frees entries whose server need not be queried, and returns
    /// those that may be freed if their server has no socket. Fails when waiting for an RCU grace period fails.
    pub fn sweep_connections(&mut self) -> anyhow::Result<Vec<(ConnectionEntry, ServiceAddress)>> {
        // Until the first configuration, the table may have entries of an earlier daemon's services.
        let is_stateful_service =
            |(service, _): &(Service, _)| service.settings.consistency == ConsistencyMode::Stateful;
        if self.configuration.first_applied_at.is_some() && !self.services_by_index.values().any(is_stateful_service) {
            return Ok(Vec::new());
        }
        let entries_per_call = self
            .load_balancer
            .connection_table_size()
            .entry_count()
            .div_ceil(SWEEP_CALLS_PER_CONNECTION_TABLE)
            .min(MAX_ENTRIES_PER_SWEEP_CALL);
        let expired_connections =
            self.load_balancer.scan_expired_connections(&self.connection_timeouts, entries_per_call);
        let (connections_to_query, connections_to_free): (Vec<_>, Vec<_>) =
            expired_connections.into_iter().partition(|(_, expiry_reason)| expiry_reason.must_query_server());
        self.free_connections(&connections_to_free.into_iter().map(|(connection, _)| connection).collect::<Vec<_>>())?;
        let service_addresses: BTreeMap<u16, ServiceAddress> =
            self.services_by_index.values().map(|(service, index)| (index.as_u16(), service.address)).collect();
        let with_service_address = |(connection, _): (ConnectionEntry, _)| {
            service_addresses.get(&connection.identity.service_slot).map(|service| (connection, *service))
        };
        Ok(connections_to_query.into_iter().filter_map(with_service_address).collect())
    }

    /// Frees the table entries of those connections that have not changed since the sweep. Fails when waiting for an
    /// RCU grace period fails.
    pub fn free_connections(&mut self, connections: &[ConnectionEntry]) -> anyhow::Result<()> {
        let freed = if connections.is_empty() { 0 } else { self.load_balancer.free_connections(connections)? };
        tracing::debug!(
            event = "connections-freed",
            freed,
            checked = connections.len(),
            "the load balancer has freed idle entries of its connection table"
        );
        Ok(())
    }

    pub fn traffic_report_interval(&self) -> Duration {
        self.traffic_report_interval
    }

    /// Returns the traffic to each server, or `None` if no policy needs it. A server's counts are sums over its
    /// services, so the message covers all services.
    pub fn build_traffic_message(&self) -> Option<TrafficCountsMessage> {
        if self.services_by_index.values().all(|(service, _)| service.telemetry_level == TelemetryLevel::Nothing) {
            return None;
        }
        let services = self.services_by_index.values();
        let opened_connections = services
            .clone()
            .map(|(service, index)| (service.index, self.load_balancer.opened_connection_count(*index)))
            .collect();
        let server_ids: BTreeSet<ServerId> =
            services.flat_map(|(service, _)| service.servers.iter().map(|server| server.id)).collect();
        let server_ids: Vec<ServerId> = server_ids.into_iter().collect();
        let traffic = self.load_balancer.traffic_of_servers(&server_ids);
        Some(TrafficCountsMessage {
            traffic_by_server: server_ids.into_iter().zip(traffic).collect(),
            opened_connection_count_by_service: opened_connections,
        })
    }

    pub fn apply_mac_resolution(&mut self, resolution: MacResolution) {
        match resolution.mac {
            Some(mac) => self.mac_addresses.insert(resolution.neighbour, mac),
            None => self.mac_addresses.remove(&resolution.neighbour),
        };
        self.update_peer_mac(resolution);
        let affected_servers = self.servers_by_neighbour.get(&resolution.neighbour).into_iter().flatten();
        for (nth, (service_index, position)) in affected_servers.enumerate() {
            let (service, lb_service_index) = &self.services_by_index[service_index];
            let wire_server = &service.servers[*position];
            match resolution.mac {
                _ if nth > 0 => {}
                Some(mac) => {
                    tracing::info!(
                        event = "server-resolved",
                        server = wire_server.name,
                        address = %resolution.neighbour.address,
                        %mac,
                        "the server, or the router to the server, answers ARP or neighbour discovery"
                    );
                }
                None => tracing::warn!(
                    event = "server-unresolved",
                    server = wire_server.name,
                    address = %resolution.neighbour.address,
                    "the server, or the router to it, does not answer ARP or neighbour discovery: check both machines"
                ),
            }
            let updated_server = lb::Server {
                mac: resolution.mac,
                is_eligible: self.may_get_new_connections(*service_index, wire_server),
            };
            self.load_balancer.set_server(*lb_service_index, wire_server.id, updated_server);
        }
    }

    /// Installs a service's placement table. Fails when the service is not configured or the data plane cannot hold the
    /// table. On failure, the previous table remains.
    pub fn install_table(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        let Some((configured_service, index)) = self.services_by_index.get(&service) else {
            anyhow::bail!(
                "the table is for service index {}: expected the index of a configured service",
                service.get()
            );
        };
        let lb_service_index = *index;
        if self.load_balancer.table_changes_placement_rule(lb_service_index, table) {
            coreward_daemon::run_with_raised_watchdog_limit(XDP_PROGRAM_LOAD_TIMEOUT, || {
                self.load_balancer.install_table(lb_service_index, table)
            })?;
        } else {
            self.load_balancer.install_table(lb_service_index, table)?;
        }
        if self.table_ages.record_new_table(service) {
            tracing::info!(
                event = "table-renewed",
                service = configured_service.name,
                generation = table.generation,
                "the controller has sent a new placement table, which replaces the service's expired table"
            );
        }
        Ok(())
    }

    /// Completes an upgrade, which replaces an earlier version's XDP program. Does nothing until all tables are
    /// installed and all servers' MAC addresses are known, or until ARP timed out.
    fn switch_program_when_ready(&mut self) -> anyhow::Result<()> {
        let Some(configured_at) =
            self.configuration.first_applied_at.filter(|_| self.load_balancer.is_upgrade_pending())
        else {
            return Ok(());
        };
        let waited = monotonic_time().saturating_sub(configured_at);
        let is_ready =
            self.installed_table_count() == self.services_by_index.len() && self.unresolved_server_names().is_empty();
        if is_ready || waited > UPGRADE_ARP_TIMEOUT {
            self.load_balancer.commit_upgrade()?;
            tracing::info!(
                event = "upgrade-finished",
                waited_for_tables_and_macs = ?waited,
                has_all_tables_and_macs = is_ready,
                "this version's program has replaced the program of another version"
            );
        }
        Ok(())
    }

    /// Performs the periodic checks and updates: connection counts, logged problems, symptoms, addresses and VLANs of
    /// the network device, and a pending upgrade. Fails when a resolver thread has ended, the device no longer exists,
    /// or the upgrade cannot be completed.
    pub fn run_periodic_checks(&mut self) -> anyhow::Result<()> {
        anyhow::ensure!(self.resolvers.are_threads_running(), "a thread that resolves MAC addresses has ended");
        let now = monotonic_time();
        if now.saturating_sub(self.last_connection_count_at) >= CONNECTION_COUNT_INTERVAL {
            self.load_balancer.recount_connections();
            self.last_connection_count_at = now;
        }
        self.log_problems();
        self.update_symptoms();
        self.load_balancer.refresh_interface_addresses()?;
        self.update_vlan_devices();
        self.switch_program_when_ready()
    }

    /// Returns warnings about kernel settings of this machine that prevent forwarding.
    fn routing_problems(&self) -> Vec<String> {
        let lb_stamped_services = self.services_by_index.values().map(|(service, _)| service);
        let mut lb_stamped_services =
            lb_stamped_services.filter(|service| service.settings.timestamps == CookieStamper::LoadBalancer);
        let mut problems = Vec::new();
        if lb_stamped_services.clone().any(|service| service.address.vip_and_port.is_ipv4()) {
            problems = self
                .device_names_by_vlan()
                .values()
                .flat_map(|device| routing::ipv4_routing_problems(device))
                .collect();
        }
        if lb_stamped_services.any(|service| service.address.vip_and_port.is_ipv6()) {
            problems.extend(routing::ipv6_routing_problem());
        }
        problems
    }

    fn machine_problems(&self) -> Vec<String> {
        let mut problems = self.routing_problems();
        problems.extend(self.announced_vips.obstacles.iter().cloned());
        problems.extend(self.health_checks.nat_setup_problem().map(str::to_owned));
        problems.extend(self.symptoms.symptom_descriptions().cloned());
        problems.extend(self.encapsulation_warnings());
        problems.extend(self.vlan_device_problems.iter().cloned());
        problems.extend(self.expired_table_warnings());
        problems.extend(self.missing_configuration_warning().map(str::to_owned));
        problems
    }

    /// Logs each problem when it first appears.
    fn log_problems(&mut self) {
        let problem_clocks = self.clocks_of_lb_stamped_servers().into_iter().filter(|clock| !clock.problem.is_empty());
        // The texts contain no changing numbers, because each change would be logged again.
        let describe_server_clock = |clock: v1::ServerClock| {
            format!("{} of service {} is not stamped ({}; `coreward status`)", clock.server, clock.service, clock.state)
        };
        let problems: BTreeSet<String> =
            self.routing_problems().into_iter().chain(problem_clocks.map(describe_server_clock)).collect();
        for problem in problems.difference(&self.logged_problems) {
            tracing::warn!(
                event = "routing-problem",
                %problem,
                "this load balancer cannot stamp or forward packets of services with `timestamps = \"lb\"`"
            );
        }
        self.logged_problems = problems;
    }

    /// Returns the number of services that have a table.
    pub fn installed_table_count(&self) -> usize {
        self.services_by_index
            .values()
            .filter(|(_, index)| self.load_balancer.placement_table_generation(*index).is_some())
            .count()
    }

    /// Returns the VIPs that can be announced: those with a service that has a table and a server with known MAC
    /// address. Returns `None` before the first configuration, while an earlier daemon's pinned state is in use.
    pub fn vip_announcement_state(&self) -> Option<VipAnnouncementState> {
        if self.services_by_index.is_empty() && self.configuration.confirmed_generation == 0 {
            return None;
        }
        let xdp_program_id = nix::net::if_::if_nametoindex(self.interface_name.as_str()).ok().and_then(|index| {
            let xdp_state = device::query_xdp_state(index).ok()?;
            xdp_state.native_program_id.or(xdp_state.generic_program_id)
        });
        if xdp_program_id.is_none() {
            let no_program_reason = vec![format!("no VIP is announced: no XDP program is at {}", self.interface_name)];
            return Some(VipAnnouncementState { obstacles: no_program_reason, ..VipAnnouncementState::default() });
        }
        let mut announce_state = VipAnnouncementState::default();
        let mut reasons_by_vip = BTreeMap::new();
        for (service, index) in self.services_by_index.values() {
            let vip = service.address.vip_and_port.ip();
            if self.load_balancer.placement_table_generation(*index).is_none() {
                reasons_by_vip.insert(vip, "its services have no table yet");
            } else if self.load_balancer.servers(*index).iter().all(|(_, server)| server.mac.is_none()) {
                reasons_by_vip.insert(vip, "the MAC address of none of its servers is known");
            } else {
                announce_state.announceable_vips.insert(vip);
            }
        }
        let reasons_of_blocked_vips =
            reasons_by_vip.into_iter().filter(|(vip, _)| !announce_state.announceable_vips.contains(vip));
        announce_state.obstacles =
            reasons_of_blocked_vips.map(|(vip, reason)| format!("VIP {vip} is not announced: {reason}")).collect();
        Some(announce_state)
    }

    /// Stores the number of announced VIPs, and the reasons why other VIPs are not announced, for reports to the
    /// controller.
    pub fn record_vip_announcement(&mut self, announced_count: usize, blocked_reasons: Vec<String>) {
        (self.announced_vips.vip_count, self.announced_vips.obstacles) = (Some(announced_count), blocked_reasons);
    }

    fn unresolved_server_names(&self) -> BTreeSet<String> {
        let mut unresolved_names = BTreeSet::new();
        for (service, index) in self.services_by_index.values() {
            let known_server_mac = |id: ServerId| self.load_balancer.server(*index, id).and_then(|server| server.mac);
            let has_no_mac = |server: &&coreward_wire::Server| known_server_mac(server.id).is_none();
            unresolved_names.extend(service.servers.iter().filter(has_no_mac).map(|server| server.name.clone()));
        }
        unresolved_names
    }

    pub fn build_state_message(&self) -> v1::LoadBalancerState {
        let table_generations = self.services_by_index.values().filter_map(|(service, index)| {
            let generation = self.load_balancer.placement_table_generation(*index)?;
            Some((service.name.clone(), generation))
        });
        let PacketCounters { packets_by_outcome: packets, event_counts: events, .. } =
            self.load_balancer.total_counters();
        let is_unresolved_peer = |peer: &&PeerLoadBalancer| {
            peer.name != self.own_name && peer.owner_number.is_some() && self.peer_mac(peer).is_none()
        };
        let unresolved_load_balancers =
            self.fleet_load_balancers.iter().filter(is_unresolved_peer).map(|peer| peer.name.clone()).collect();
        let xdp_mode_name = match self.attached_xdp_mode {
            lb::AttachedXdpMode::Native => "native",
            lb::AttachedXdpMode::Generic => "generic",
        };
        v1::LoadBalancerState {
            table_generations: table_generations.collect(),
            unresolved_servers: self.unresolved_server_names().into_iter().collect(),
            counters: COUNTER_NAMES.iter().map(|name| (*name).to_owned()).zip(packets).collect(),
            xdp_mode: xdp_mode_name.to_owned(),
            configuration_generation: self.configuration.confirmed_generation,
            events: EVENT_NAMES.iter().map(|name| (*name).to_owned()).zip(events).collect(),
            connections: self.load_balancer.used_entry_count(),
            unresolved_load_balancers,
            server_clocks: self.clocks_of_lb_stamped_servers(),
            warnings: self.machine_problems(),
            rejected: self.rejections.rejected_updates(),
            stamped_services: self.stamped_packet_counts(),
            vlan: self.vip_vlan.id_or_zero().into(),
        }
    }
}
