//! Simulated controller, which has the desired state and sends updates to load balancers and servers.

use std::net::SocketAddr;
use std::time::Duration;

use coreward_model::connection_table::{DecisecondTicks, TableOwnerNumber};
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::lb::{self as model, TableOwnerReachability};
use coreward_model::placement::{
    BucketCount, CandidateCore, PlacementRule, PlacementTable, PlacementTableMember, ServerCore, rendezvous_table,
};
use coreward_model::rss::RssKey;
use coreward_model::tuple::TransportProtocol;
use coreward_model::{ServerId, ServiceAddress};

use super::report::ConsistencyCheckReport;
use super::server::{self, ServerLifecycle, SimulatedServer};
use super::{
    ConsistencyCheck, ConsistencyCheckConfig, ConsistencyCheckEvent, SimulatedLoadBalancer, load_balancer_mac,
};
use crate::fuzz_rng::FuzzRng;
use crate::harness::{FuzzHarness, FuzzHarnessSetup};
use crate::ipv6_translation;
use crate::state_change::LoadBalancerStateChange;

/// Average number of servers that take new connections.
const MEAN_SERVER_COUNT: usize = 48;
/// Maximum delay of an update on its way to a load balancer or server (ms).
const MAX_UPDATE_DELAY_MS: usize = 1_000;
/// Maximum time until the failure of a server or load balancer is detected (ms).
const MAX_DETECTION_DELAY_MS: usize = 3_000;
/// Time between a new key's distribution and its first use (ms), which exceeds the delay of any update.
const COOKIE_KEY_SWITCH_DELAY_MS: u64 = 2 * MAX_UPDATE_DELAY_MS as u64 + 500;
/// Interval between two scans for connection-table entries that can be freed (ms).
const CONNECTION_TABLE_SWEEP_INTERVAL_MS: u64 = 10_000;
const CORES_PER_SERVER: u16 = 4;

/// State that the controller distributes to all load balancers and servers.
pub(super) struct DesiredFleetState {
    pub cookie_keys: FleetCookieKeys,
    pub placement_table: PlacementTable,
}

/// Returns a random core as a candidate, with a random load.
fn random_candidate(rng: &mut FuzzRng, core_slots: &[ServerCore]) -> CandidateCore {
    let core_slot = rng.random_below(core_slots.len());
    let server = core_slots[core_slot].server;
    CandidateCore { server, fixed_point_load: rng.random_below(1 << 20) as u32, core_slot: core_slot as u16 }
}

impl ConsistencyCheck {
    pub(super) fn new(config: ConsistencyCheckConfig) -> anyhow::Result<Self> {
        let mut rng = FuzzRng::new(config.seed, 2);
        let cookie_keys = FleetCookieKeys {
            keys: [CookieKey::random(&mut rng.0), CookieKey::random(&mut rng.0)],
            current_key_index: CookieKeyIndex::First,
        };
        let mut placement_table = PlacementTable::empty(BucketCount::PAPER_VALUE);
        placement_table.rss_key_by_group = vec![RssKey::random(&mut rng.0)];
        let mut simulation = Self {
            config,
            rng,
            now_ms: 0,
            scheduled_events: Default::default(),
            scheduled_event_count: 0,
            desired_state: DesiredFleetState { cookie_keys, placement_table },
            servers: Vec::new(),
            load_balancers: Vec::new(),
            connections: (0..config.connection_count).map(|_| None).collect(),
            opened_connection_count: 0,
            clients_with_open_connections: Default::default(),
            clients_with_ended_connections: Vec::new(),
            report: ConsistencyCheckReport::new(),
        };
        for _ in 0..MEAN_SERVER_COUNT {
            simulation.add_server();
        }
        simulation.build_next_table();
        for lb_index in 0..config.load_balancer_count {
            let load_balancer = simulation.start_load_balancer(lb_index)?;
            simulation.load_balancers.push(load_balancer);
        }
        for lb_index in 0..config.load_balancer_count {
            simulation.schedule_owner_updates(lb_index, 1);
            simulation.schedule_event(
                CONNECTION_TABLE_SWEEP_INTERVAL_MS,
                ConsistencyCheckEvent::FreeEndedConnections(lb_index),
            );
        }
        simulation.schedule_event(0, ConsistencyCheckEvent::OpenConnection);
        simulation.schedule_event(0, ConsistencyCheckEvent::ChangeFleet);
        simulation.schedule_event(config.key_rotation_interval_ms / 2, ConsistencyCheckEvent::DistributeNewKey);
        Ok(simulation)
    }

    fn random_update_delay_ms(&mut self) -> u64 {
        self.rng.random_below(MAX_UPDATE_DELAY_MS) as u64
    }

    // ---- servers ----

    fn add_server(&mut self) -> usize {
        let server_index = self.servers.len();
        // Ids are not reused, because an earlier server may still have connections.
        let server_id = loop {
            let id = ServerId::try_from(self.rng.random_below(ServerId::COUNT) as u64).expect("in range");
            if !self.servers.iter().any(|server| server.id == id) {
                break id;
            }
        };
        let initial_clock_ms = self.rng.next_u32();
        self.servers.push(SimulatedServer {
            id: server_id,
            mac: server::server_mac(server_index),
            lifecycle: ServerLifecycle::Serving,
            is_healthy: true,
            connection_count: 0,
            cookie_keys: self.desired_state.cookie_keys,
            key_switch_tsval: initial_clock_ms.wrapping_add(self.now_ms as u32),
            initial_clock_ms,
        });
        server_index
    }

    /// Returns the ids of the servers that take new connections, in ascending order.
    fn eligible_server_ids(&self) -> Vec<ServerId> {
        let is_eligible = |server: &&SimulatedServer| server.lifecycle == ServerLifecycle::Serving && server.is_healthy;
        let mut server_ids: Vec<ServerId> = self.servers.iter().filter(is_eligible).map(|server| server.id).collect();
        server_ids.sort();
        server_ids
    }

    fn pick_random_server(&mut self, lifecycle: ServerLifecycle) -> Option<usize> {
        let matching_servers: Vec<usize> =
            (0..self.servers.len()).filter(|index| self.servers[*index].lifecycle == lifecycle).collect();
        (!matching_servers.is_empty()).then(|| self.rng.pick(&matching_servers))
    }

    // ---- tables ----

    /// Builds the next placement table from the eligible servers. If a bucket's server changes, the table also contains
    /// its previous server.
    fn build_next_table(&mut self) {
        let eligible_servers = self.eligible_server_ids();
        let previous_table = &self.desired_state.placement_table;
        let bucket_count = previous_table.bucket_count;
        let consistent_servers = rendezvous_table(&eligible_servers, bucket_count);
        let previous_server_of_bucket = |bucket: usize| match previous_table.consistent_server_by_bucket.get(bucket) {
            Some(previous_server) if *previous_server != consistent_servers[bucket] => Some(*previous_server),
            _ => previous_table.previous_consistent_server_by_bucket.get(bucket).copied().flatten(),
        };
        let previous_consistent_servers = (0..consistent_servers.len()).map(previous_server_of_bucket).collect();
        let core_slots: Vec<ServerCore> = eligible_servers
            .iter()
            .flat_map(|server| (0..CORES_PER_SERVER).map(|core| ServerCore { server: *server, core }))
            .collect();
        let candidates_per_bucket = 4;
        let candidates = (0..bucket_count.get() * candidates_per_bucket)
            .map(|_| random_candidate(&mut self.rng, &core_slots))
            .collect();
        self.desired_state.placement_table = PlacementTable {
            generation: previous_table.generation + 1,
            // With this rule, load balancers place the same connection differently, which the test needs.
            rule: PlacementRule::LeastAssigned,
            bucket_count,
            rss_key_by_group: previous_table.rss_key_by_group.clone(),
            candidates_per_bucket,
            candidates,
            assignment_cost: 1 << 14,
            members: eligible_servers
                .into_iter()
                .map(|server| PlacementTableMember { server, fixed_point_load: 0 })
                .collect(),
            core_slots,
            consistent_server_by_bucket: consistent_servers,
            previous_consistent_server_by_bucket: previous_consistent_servers,
            down_servers: Vec::new(),
            load_age_by_core_slot: Vec::new(),
        };
        self.report.table_count += 1;
    }

    fn rebuild_and_send_table(&mut self) {
        self.build_next_table();
        for lb_index in 0..self.load_balancers.len() {
            // The table arrives after the load balancer's updates about servers.
            let delay_ms = MAX_UPDATE_DELAY_MS as u64 + self.random_update_delay_ms();
            self.schedule_event(delay_ms, ConsistencyCheckEvent::LbReceivesTable(lb_index));
        }
    }

    pub(super) fn deliver_table_to_lb(&mut self, lb_index: usize) -> anyhow::Result<()> {
        let SimulatedLoadBalancer { harness, service_slot, is_running } = &mut self.load_balancers[lb_index];
        if *is_running {
            harness.apply_change(&LoadBalancerStateChange::InstallPlacementTable(
                *service_slot,
                self.desired_state.placement_table.clone(),
            ))?;
        }
        Ok(())
    }

    // ---- load balancers ----

    fn start_load_balancer(&mut self, lb_index: usize) -> anyhow::Result<SimulatedLoadBalancer> {
        let harness_setup = FuzzHarnessSetup::new(load_balancer_mac(lb_index), self.desired_state.cookie_keys);
        let mut harness = FuzzHarness::new(harness_setup, self.config.runs_bpf_program)?;
        let service_address = ServiceAddress {
            vip_and_port: ipv6_translation::service_socket_address(self.config.service_address()),
            protocol: TransportProtocol::Tcp,
        };
        let service_slot = harness.apply_change(&LoadBalancerStateChange::ReplaceServices(vec![(
            service_address,
            self.config.service_settings(),
        )]))?[0];
        for server in self.servers.iter().filter(|server| server.lifecycle != ServerLifecycle::Gone) {
            harness.apply_change(&LoadBalancerStateChange::SetServer(
                service_slot,
                server.id,
                Some(to_model_server(server)),
            ))?;
        }
        harness.apply_change(&LoadBalancerStateChange::InstallPlacementTable(
            service_slot,
            self.desired_state.placement_table.clone(),
        ))?;
        harness.apply_change(&LoadBalancerStateChange::SetLocalOwnerNumber(Some(table_owner_number(lb_index))))?;
        Ok(SimulatedLoadBalancer { harness, service_slot, is_running: true })
    }

    pub(super) fn restart_load_balancer(&mut self, lb_index: usize) -> anyhow::Result<()> {
        self.load_balancers[lb_index] = self.start_load_balancer(lb_index)?;
        self.schedule_owner_updates(lb_index, MAX_UPDATE_DELAY_MS);
        for owner_index in 0..self.load_balancers.len() {
            self.deliver_owner_update_to_lb(lb_index, owner_index)?;
        }
        Ok(())
    }

    /// Schedules updates that inform all load balancers whether the load balancer `owner_index` is alive.
    fn schedule_owner_updates(&mut self, owner_index: usize, max_delay_ms: usize) {
        for lb_index in 0..self.config.load_balancer_count {
            let delay_ms = self.rng.random_below(max_delay_ms) as u64;
            self.schedule_event(delay_ms, ConsistencyCheckEvent::LbReceivesOwnerUpdate(lb_index, owner_index));
        }
    }

    pub(super) fn deliver_owner_update_to_lb(&mut self, lb_index: usize, owner_index: usize) -> anyhow::Result<()> {
        let is_owner_running = self.load_balancers[owner_index].is_running;
        let SimulatedLoadBalancer { harness, is_running, .. } = &mut self.load_balancers[lb_index];
        if *is_running && lb_index != owner_index {
            let owner = if is_owner_running {
                TableOwnerReachability::Reachable(load_balancer_mac(owner_index))
            } else {
                TableOwnerReachability::Lost
            };
            harness.apply_change(&LoadBalancerStateChange::SetTableOwner(table_owner_number(owner_index), owner))?;
        }
        Ok(())
    }

    /// Frees the connection-table entries of ended connections at load balancer `lb_index`, as the daemon's timers do.
    pub(super) fn free_ended_connections(&mut self, lb_index: usize) -> anyhow::Result<()> {
        let SimulatedLoadBalancer { harness, is_running, .. } = &mut self.load_balancers[lb_index];
        if *is_running {
            harness.apply_change(&LoadBalancerStateChange::SetClock(DecisecondTicks::from_monotonic_time(
                Duration::from_millis(self.now_ms),
            )))?;
            harness.apply_change(&LoadBalancerStateChange::SweepExpiredEntries)?;
            let open_clients = &self.clients_with_open_connections;
            let has_client_ended = |client| match client {
                SocketAddr::V4(client) => !open_clients.contains(&(*client.ip(), client.port())),
                SocketAddr::V6(client) => {
                    !open_clients.contains(&(ipv6_translation::ipv4_for_ipv6(*client.ip()), client.port()))
                }
            };
            let ended_entries: Vec<_> = harness
                .model
                .connections()
                .filter(|entry| has_client_ended(entry.client))
                .map(|entry| entry.index)
                .collect();
            harness.apply_change(&LoadBalancerStateChange::FreeConnectionEntries(ended_entries))?;
        }
        if self.now_ms < self.arrivals_end_ms() {
            self.schedule_event(
                CONNECTION_TABLE_SWEEP_INTERVAL_MS,
                ConsistencyCheckEvent::FreeEndedConnections(lb_index),
            );
        }
        Ok(())
    }

    fn schedule_server_updates(&mut self, server_index: usize, max_delay_ms: usize) {
        for lb_index in 0..self.load_balancers.len() {
            let delay_ms = self.rng.random_below(max_delay_ms) as u64;
            self.schedule_event(delay_ms, ConsistencyCheckEvent::LbReceivesServerUpdate(lb_index, server_index));
        }
    }

    pub(super) fn deliver_server_update_to_lb(&mut self, lb_index: usize, server_index: usize) -> anyhow::Result<()> {
        let SimulatedLoadBalancer { harness, service_slot, is_running } = &mut self.load_balancers[lb_index];
        let server = &self.servers[server_index];
        if *is_running {
            let new_server_state = (server.lifecycle != ServerLifecycle::Gone).then(|| to_model_server(server));
            harness.apply_change(&LoadBalancerStateChange::SetServer(*service_slot, server.id, new_server_state))?;
        }
        Ok(())
    }

    // ---- keys ----

    pub(super) fn distribute_new_key(&mut self) -> anyhow::Result<()> {
        let idle_key_index = self.desired_state.cookie_keys.current_key_index.other_index().get();
        self.desired_state.cookie_keys.keys[idle_key_index] = CookieKey::random(&mut self.rng.0);
        self.schedule_key_updates();
        self.schedule_event(COOKIE_KEY_SWITCH_DELAY_MS, ConsistencyCheckEvent::SwitchKey);
        Ok(())
    }

    pub(super) fn switch_cookie_key(&mut self) -> anyhow::Result<()> {
        let cookie_keys = &mut self.desired_state.cookie_keys;
        cookie_keys.current_key_index = cookie_keys.current_key_index.other_index();
        self.schedule_key_updates();
        self.report.key_switches += 1;
        if self.now_ms < self.arrivals_end_ms() {
            self.schedule_event(self.config.key_rotation_interval_ms, ConsistencyCheckEvent::DistributeNewKey);
        }
        Ok(())
    }

    fn schedule_key_updates(&mut self) {
        for lb_index in 0..self.load_balancers.len() {
            let delay_ms = self.random_update_delay_ms();
            self.schedule_event(delay_ms, ConsistencyCheckEvent::LbReceivesKeys(lb_index));
        }
        for server_index in 0..self.servers.len() {
            let delay_ms = self.random_update_delay_ms() + self.random_update_delay_ms();
            self.schedule_event(delay_ms, ConsistencyCheckEvent::ServerReceivesKeys(server_index));
        }
    }

    pub(super) fn deliver_keys_to_lb(&mut self, lb_index: usize) -> anyhow::Result<()> {
        let SimulatedLoadBalancer { harness, is_running, .. } = &mut self.load_balancers[lb_index];
        if *is_running {
            harness.apply_change(&LoadBalancerStateChange::SetCookieKeys(self.desired_state.cookie_keys))?;
        }
        Ok(())
    }

    // ---- changes ----

    pub(super) fn apply_random_change(&mut self) -> anyhow::Result<()> {
        if self.now_ms >= self.arrivals_end_ms() {
            return Ok(());
        }
        while !self.try_random_change()? {}
        // Each change happens at a random time within its own, equal part of a minute.
        let ms_per_change = 60_000 / u64::from(self.config.changes_per_minute);
        let next_change_ms =
            self.report.change_count() * ms_per_change + self.rng.random_below(ms_per_change as usize) as u64;
        self.schedule_event(next_change_ms.saturating_sub(self.now_ms), ConsistencyCheckEvent::ChangeFleet);
        Ok(())
    }

    /// Applies a random change to the fleet. Returns whether the chosen change was possible.
    fn try_random_change(&mut self) -> anyhow::Result<bool> {
        let serving_server_count =
            self.servers.iter().filter(|server| server.lifecycle == ServerLifecycle::Serving).count();
        match self.rng.random_below(20) {
            0..6 if serving_server_count < 2 * MEAN_SERVER_COUNT => {
                let server_index = self.add_server();
                self.report.servers_joined += 1;
                self.schedule_server_updates(server_index, MAX_UPDATE_DELAY_MS);
                self.rebuild_and_send_table();
                Ok(true)
            }
            6..9 if serving_server_count > MEAN_SERVER_COUNT / 2 => Ok(self.drain_random_server()),
            9..12 if serving_server_count > MEAN_SERVER_COUNT / 2 => Ok(self.fail_random_server()),
            12..14 => Ok(self.stop_random_load_balancer()),
            14..17 => Ok(self.change_random_server_health()),
            17..20 => self.remove_random_server_mac(),
            _ => Ok(false),
        }
    }

    fn drain_random_server(&mut self) -> bool {
        let Some(server_index) = self.pick_random_server(ServerLifecycle::Serving) else { return false };
        self.servers[server_index].lifecycle = ServerLifecycle::Draining;
        self.schedule_server_updates(server_index, MAX_UPDATE_DELAY_MS);
        self.rebuild_and_send_table();
        self.report.servers_drained += 1;
        self.remove_server_if_drained(server_index);
        true
    }

    /// Removes a draining server once it has no connections. It then rejects new connections that load balancers with
    /// an old table still send to it.
    pub(super) fn remove_server_if_drained(&mut self, server_index: usize) {
        if self.servers[server_index].lifecycle == ServerLifecycle::Draining
            && self.servers[server_index].connection_count == 0
        {
            self.servers[server_index].lifecycle = ServerLifecycle::Gone;
            self.schedule_server_updates(server_index, MAX_UPDATE_DELAY_MS);
        }
    }

    fn fail_random_server(&mut self) -> bool {
        let Some(server_index) = self.pick_random_server(ServerLifecycle::Serving) else { return false };
        self.servers[server_index].lifecycle = ServerLifecycle::Gone;
        self.report.servers_failed += 1;
        self.schedule_server_updates(server_index, MAX_DETECTION_DELAY_MS);
        self.rebuild_and_send_table();
        true
    }

    fn change_random_server_health(&mut self) -> bool {
        let Some(server_index) = self.pick_random_server(ServerLifecycle::Serving) else { return false };
        let unhealthy_server_count = self.servers.iter().filter(|server| !server.is_healthy).count();
        self.servers[server_index].is_healthy =
            !self.servers[server_index].is_healthy || unhealthy_server_count > MEAN_SERVER_COUNT / 4;
        self.report.server_state_changes += 1;
        self.schedule_server_updates(server_index, MAX_UPDATE_DELAY_MS);
        self.rebuild_and_send_table();
        true
    }

    /// Removes the MAC address of a random server from one load balancer for a short time.
    fn remove_random_server_mac(&mut self) -> anyhow::Result<bool> {
        let Some(server_index) = self.pick_random_server(ServerLifecycle::Serving) else { return Ok(false) };
        let lb_index = self.rng.random_below(self.load_balancers.len());
        let SimulatedLoadBalancer { harness, service_slot, is_running } = &mut self.load_balancers[lb_index];
        let is_change_applied = *is_running;
        if is_change_applied {
            let server_without_mac =
                model::ServerMapEntry { mac: None, ..to_model_server(&self.servers[server_index]) };
            harness.apply_change(&LoadBalancerStateChange::SetServer(
                *service_slot,
                self.servers[server_index].id,
                Some(server_without_mac),
            ))?;
            self.report.server_state_changes += 1;
            let delay_ms = 100 + self.random_update_delay_ms();
            self.schedule_event(delay_ms, ConsistencyCheckEvent::LbReceivesServerUpdate(lb_index, server_index));
        }
        Ok(is_change_applied)
    }

    /// Stops a random load balancer, which later returns with empty tables. Does nothing if only one is running.
    fn stop_random_load_balancer(&mut self) -> bool {
        let running_load_balancers: Vec<usize> =
            (0..self.load_balancers.len()).filter(|index| self.load_balancers[*index].is_running).collect();
        if running_load_balancers.len() < 2 {
            return false;
        }
        let lb_index = self.rng.pick(&running_load_balancers);
        self.load_balancers[lb_index].is_running = false;
        self.schedule_owner_updates(lb_index, MAX_DETECTION_DELAY_MS);
        let downtime_ms = 2_000 + self.rng.random_below(20_000) as u64;
        self.report.load_balancers_restarted += 1;
        self.schedule_event(downtime_ms, ConsistencyCheckEvent::RestartLoadBalancer(lb_index));
        true
    }
}

fn table_owner_number(lb_index: usize) -> TableOwnerNumber {
    TableOwnerNumber::try_from(lb_index as u64).expect("at most 16 load balancers")
}

/// Returns a server's state as load balancers receive it in updates.
fn to_model_server(server: &SimulatedServer) -> model::ServerMapEntry {
    model::ServerMapEntry {
        mac: Some(server.mac),
        is_eligible: server.lifecycle == ServerLifecycle::Serving && server.is_healthy,
    }
}
