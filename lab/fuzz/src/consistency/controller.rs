//! Controller: the desired state, and its updates to load balancers and servers.

use std::net::SocketAddr;
use std::time::Duration;

use coreward_model::connection_table::{ClockTicks, OwnerNumber};
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::lb::{self as model, Owner};
use coreward_model::placement::{
    BucketCount, Candidate, Member, PlacementRule, PlacementTable, ServerCore, rendezvous_table,
};
use coreward_model::rss::RssKey;
use coreward_model::tuple::Protocol;
use coreward_model::{ServerId, ServiceAddress};

use super::report::Report;
use super::server::{self, Lifecycle, Server};
use super::{Config, Event, LoadBalancer, Simulation, load_balancer_mac};
use crate::change::Change;
use crate::fuzz_rng::FuzzRng;
use crate::harness::{Harness, HarnessSetup};
use crate::ipv6;

/// Mean number of servers that take new connections.
const SERVER_COUNT: usize = 48;
/// Maximum delay of an update on its way to a load balancer or server (ms).
const MAX_UPDATE_DELAY_MS: usize = 1_000;
/// Maximum delay until the failure of a server or load balancer is detected (ms).
const MAX_DETECTION_DELAY_MS: usize = 3_000;
/// Time between the distribution and the first use of a new key (ms), which exceeds the delay of any update.
const KEY_SWITCH_MS: u64 = 2 * MAX_UPDATE_DELAY_MS as u64 + 500;
/// Interval between two scans for entries that can be freed (ms).
const SWEEP_INTERVAL_MS: u64 = 10_000;
const CORE_COUNT: u16 = 4;

/// State that all load balancers and servers should have.
pub(super) struct Controller {
    pub keys: FleetKeys,
    pub table: PlacementTable,
}

impl Simulation {
    pub(super) fn new(config: Config) -> anyhow::Result<Self> {
        let mut rng = FuzzRng::new(config.seed, 2);
        let keys = FleetKeys {
            keys: [CookieKey::random(&mut rng.0), CookieKey::random(&mut rng.0)],
            current: KeyIndex::First,
        };
        let mut table = PlacementTable::empty(BucketCount::PUBLISHED);
        table.groups = vec![RssKey::random(&mut rng.0)];
        let mut simulation = Self {
            config,
            rng,
            now_ms: 0,
            events: Default::default(),
            scheduled_count: 0,
            controller: Controller { keys, table },
            servers: Vec::new(),
            load_balancers: Vec::new(),
            connections: (0..config.connections).map(|_| None).collect(),
            opened_count: 0,
            open_clients: Default::default(),
            ended_clients: Vec::new(),
            report: Report::new(),
        };
        for _ in 0..SERVER_COUNT {
            simulation.add_server();
        }
        simulation.replace_table();
        for number in 0..config.load_balancers {
            let load_balancer = simulation.new_load_balancer(number)?;
            simulation.load_balancers.push(load_balancer);
        }
        for number in 0..config.load_balancers {
            simulation.send_owner(number, 1);
            simulation.schedule(SWEEP_INTERVAL_MS, Event::Sweep(number));
        }
        simulation.schedule(0, Event::Arrival);
        simulation.schedule(0, Event::Change);
        simulation.schedule(config.key_rotation_ms / 2, Event::NewKey);
        Ok(simulation)
    }

    fn random_update_delay_ms(&mut self) -> u64 {
        self.rng.below(MAX_UPDATE_DELAY_MS) as u64
    }

    // ---- servers ----

    fn add_server(&mut self) -> usize {
        let position = self.servers.len();
        // An id is not used again: the earlier server may still have connections.
        let id = loop {
            let id = ServerId::try_from(self.rng.below(ServerId::COUNT) as u64).expect("in range");
            if !self.servers.iter().any(|server| server.id == id) {
                break id;
            }
        };
        let initial_clock_ms = self.rng.u32();
        self.servers.push(Server {
            id,
            mac: server::mac(position),
            life: Lifecycle::Serving,
            healthy: true,
            connections: 0,
            keys: self.controller.keys,
            key_switch_tsval: initial_clock_ms.wrapping_add(self.now_ms as u32),
            initial_clock_ms,
        });
        position
    }

    /// Returns the ids of the servers that take new connections, in ascending order.
    fn eligible(&self) -> Vec<ServerId> {
        let takes = |server: &&Server| server.life == Lifecycle::Serving && server.healthy;
        let mut ids: Vec<ServerId> = self.servers.iter().filter(takes).map(|server| server.id).collect();
        ids.sort();
        ids
    }

    fn pick_server(&mut self, life: Lifecycle) -> Option<usize> {
        let candidates: Vec<usize> = (0..self.servers.len()).filter(|at| self.servers[*at].life == life).collect();
        (!candidates.is_empty()).then(|| self.rng.pick(&candidates))
    }

    // ---- tables ----

    /// Creates the next table from the eligible servers. Buckets whose server changes record the previous one.
    fn replace_table(&mut self) {
        let servers = self.eligible();
        let before = &self.controller.table;
        let bucket_count = before.bucket_count;
        let consistent_servers = rendezvous_table(&servers, bucket_count);
        let of_bucket = |bucket: usize| match before.consistent_servers.get(bucket) {
            Some(old) if *old != consistent_servers[bucket] => Some(*old),
            _ => before.previous_consistent_servers.get(bucket).copied().flatten(),
        };
        let previous_consistent_servers = (0..consistent_servers.len()).map(of_bucket).collect();
        let core_slots: Vec<ServerCore> = servers
            .iter()
            .flat_map(|server| (0..CORE_COUNT).map(|core| ServerCore { server: *server, core }))
            .collect();
        let rng = &mut self.rng;
        let mut candidate = || {
            let core_slot = rng.below(core_slots.len());
            let server = core_slots[core_slot].server;
            Candidate { server, load: rng.below(1 << 20) as u32, core_slot: core_slot as u16 }
        };
        let candidates_per_bucket = 4;
        let candidates = (0..bucket_count.get() * candidates_per_bucket).map(|_| candidate()).collect();
        self.controller.table = PlacementTable {
            generation: before.generation + 1,
            // This rule makes load balancers place differently, which the test needs.
            rule: PlacementRule::LeastAssigned,
            bucket_count,
            groups: before.groups.clone(),
            candidates_per_bucket,
            candidates,
            assignment_cost: 1 << 14,
            members: servers.iter().map(|server| Member { server: *server, load: 0 }).collect(),
            core_slots,
            consistent_servers,
            previous_consistent_servers,
            down_servers: Vec::new(),
            core_slot_ages: Vec::new(),
        };
        self.report.tables += 1;
    }

    fn send_new_table(&mut self) {
        self.replace_table();
        for number in 0..self.load_balancers.len() {
            // Sent after the load balancer's updates of servers.
            let delay = MAX_UPDATE_DELAY_MS as u64 + self.random_update_delay_ms();
            self.schedule(delay, Event::SendTable(number));
        }
    }

    pub(super) fn send_table_to(&mut self, number: usize) -> anyhow::Result<()> {
        let LoadBalancer { harness, service_slot, alive } = &mut self.load_balancers[number];
        if *alive {
            harness.change(&Change::Table(*service_slot, self.controller.table.clone()))?;
        }
        Ok(())
    }

    // ---- load balancers ----

    fn new_load_balancer(&mut self, number: usize) -> anyhow::Result<LoadBalancer> {
        let setup = HarnessSetup::new(load_balancer_mac(number), self.controller.keys);
        let mut harness = Harness::new(setup, self.config.with_program)?;
        let address = ServiceAddress { socket: ipv6::socket(self.config.vip()), protocol: Protocol::Tcp };
        let service_slot = harness.change(&Change::Services(vec![(address, self.config.mode())]))?[0];
        for server in self.servers.iter().filter(|server| server.life != Lifecycle::Gone) {
            harness.change(&Change::Server(service_slot, server.id, Some(model_server(server))))?;
        }
        harness.change(&Change::Table(service_slot, self.controller.table.clone()))?;
        harness.change(&Change::LocalOwnerNumber(Some(owner_number(number))))?;
        Ok(LoadBalancer { harness, service_slot, alive: true })
    }

    pub(super) fn start_load_balancer(&mut self, number: usize) -> anyhow::Result<()> {
        self.load_balancers[number] = self.new_load_balancer(number)?;
        self.send_owner(number, MAX_UPDATE_DELAY_MS);
        for other in 0..self.load_balancers.len() {
            self.send_owner_to(number, other)?;
        }
        Ok(())
    }

    /// Schedules updates to all load balancers on whether load balancer `number` is alive.
    fn send_owner(&mut self, number: usize, within_ms: usize) {
        for other in 0..self.config.load_balancers {
            let delay = self.rng.below(within_ms) as u64;
            self.schedule(delay, Event::SendOwner(other, number));
        }
    }

    pub(super) fn send_owner_to(&mut self, number: usize, other: usize) -> anyhow::Result<()> {
        let there = self.load_balancers[other].alive;
        let LoadBalancer { harness, alive, .. } = &mut self.load_balancers[number];
        if *alive && number != other {
            let owner = if there { Owner::Reachable(load_balancer_mac(other)) } else { Owner::Lost };
            harness.change(&Change::Owner(owner_number(other), owner))?;
        }
        Ok(())
    }

    /// Frees the entries of connections that have ended, as the timers of the daemon do.
    pub(super) fn sweep(&mut self, number: usize) -> anyhow::Result<()> {
        let LoadBalancer { harness, alive, .. } = &mut self.load_balancers[number];
        if *alive {
            harness.change(&Change::Clock(ClockTicks::at(Duration::from_millis(self.now_ms))))?;
            harness.change(&Change::Sweep)?;
            let open = &self.open_clients;
            let ended = |client| match client {
                SocketAddr::V4(client) => !open.contains(&(*client.ip(), client.port())),
                SocketAddr::V6(client) => !open.contains(&(ipv6::placeholder(*client.ip()), client.port())),
            };
            let ended: Vec<_> =
                harness.model.connections().filter(|entry| ended(entry.client)).map(|entry| entry.index).collect();
            harness.change(&Change::Free(ended))?;
        }
        if self.now_ms < self.end_ms() {
            self.schedule(SWEEP_INTERVAL_MS, Event::Sweep(number));
        }
        Ok(())
    }

    fn send_server(&mut self, server: usize, within_ms: usize) {
        for number in 0..self.load_balancers.len() {
            let delay = self.rng.below(within_ms) as u64;
            self.schedule(delay, Event::SendServer(number, server));
        }
    }

    pub(super) fn send_server_to(&mut self, number: usize, server: usize) -> anyhow::Result<()> {
        let LoadBalancer { harness, service_slot, alive } = &mut self.load_balancers[number];
        let server = &self.servers[server];
        if *alive {
            let known = (server.life != Lifecycle::Gone).then(|| model_server(server));
            harness.change(&Change::Server(*service_slot, server.id, known))?;
        }
        Ok(())
    }

    // ---- keys ----

    pub(super) fn distribute_new_key(&mut self) -> anyhow::Result<()> {
        let idle = self.controller.keys.current.other().get();
        self.controller.keys.keys[idle] = CookieKey::random(&mut self.rng.0);
        self.send_keys();
        self.schedule(KEY_SWITCH_MS, Event::SwitchKey);
        Ok(())
    }

    pub(super) fn switch_key(&mut self) -> anyhow::Result<()> {
        let keys = &mut self.controller.keys;
        keys.current = keys.current.other();
        self.send_keys();
        self.report.key_switches += 1;
        if self.now_ms < self.end_ms() {
            self.schedule(self.config.key_rotation_ms, Event::NewKey);
        }
        Ok(())
    }

    fn send_keys(&mut self) {
        for number in 0..self.load_balancers.len() {
            let delay = self.random_update_delay_ms();
            self.schedule(delay, Event::SendKeys(number));
        }
        for server in 0..self.servers.len() {
            let delay = self.random_update_delay_ms() + self.random_update_delay_ms();
            self.schedule(delay, Event::SendServerKeys(server));
        }
    }

    pub(super) fn send_keys_to(&mut self, number: usize) -> anyhow::Result<()> {
        let LoadBalancer { harness, alive, .. } = &mut self.load_balancers[number];
        if *alive {
            harness.change(&Change::Keys(self.controller.keys))?;
        }
        Ok(())
    }

    // ---- changes ----

    pub(super) fn change(&mut self) -> anyhow::Result<()> {
        if self.now_ms >= self.end_ms() {
            return Ok(());
        }
        while !self.try_random_change()? {}
        // Each change of a minute is due at a random time of its slot.
        let part = 60_000 / u64::from(self.config.changes_per_minute);
        let next = self.report.changes() * part + self.rng.below(part as usize) as u64;
        self.schedule(next.saturating_sub(self.now_ms), Event::Change);
        Ok(())
    }

    /// Applies a random change of the fleet. Returns whether that change was possible.
    fn try_random_change(&mut self) -> anyhow::Result<bool> {
        let serving = self.servers.iter().filter(|server| server.life == Lifecycle::Serving).count();
        match self.rng.below(20) {
            0..6 if serving < 2 * SERVER_COUNT => {
                let server = self.add_server();
                self.report.servers_joined += 1;
                self.send_server(server, MAX_UPDATE_DELAY_MS);
                self.send_new_table();
                Ok(true)
            }
            6..9 if serving > SERVER_COUNT / 2 => Ok(self.drain()),
            9..12 if serving > SERVER_COUNT / 2 => Ok(self.fail_server()),
            12..14 => Ok(self.restart_load_balancer()),
            14..17 => Ok(self.change_health()),
            17..20 => self.lose_mac(),
            _ => Ok(false),
        }
    }

    fn drain(&mut self) -> bool {
        let Some(server) = self.pick_server(Lifecycle::Serving) else { return false };
        self.servers[server].life = Lifecycle::Draining;
        self.send_server(server, MAX_UPDATE_DELAY_MS);
        self.send_new_table();
        self.report.servers_drained += 1;
        self.leave_if_empty(server);
        true
    }

    /// Removes a draining server once it has no connections. It rejects new connections that an old table still sends
    /// to it.
    pub(super) fn leave_if_empty(&mut self, server: usize) {
        if self.servers[server].life == Lifecycle::Draining && self.servers[server].connections == 0 {
            self.servers[server].life = Lifecycle::Gone;
            self.send_server(server, MAX_UPDATE_DELAY_MS);
        }
    }

    fn fail_server(&mut self) -> bool {
        let Some(server) = self.pick_server(Lifecycle::Serving) else { return false };
        self.servers[server].life = Lifecycle::Gone;
        self.report.servers_failed += 1;
        self.send_server(server, MAX_DETECTION_DELAY_MS);
        self.send_new_table();
        true
    }

    fn change_health(&mut self) -> bool {
        let Some(server) = self.pick_server(Lifecycle::Serving) else { return false };
        let unhealthy = self.servers.iter().filter(|server| !server.healthy).count();
        self.servers[server].healthy = !self.servers[server].healthy || unhealthy > SERVER_COUNT / 4;
        self.report.other_changes += 1;
        self.send_server(server, MAX_UPDATE_DELAY_MS);
        self.send_new_table();
        true
    }

    /// Removes the MAC address of a random server from one load balancer for a short time.
    fn lose_mac(&mut self) -> anyhow::Result<bool> {
        let Some(server) = self.pick_server(Lifecycle::Serving) else { return Ok(false) };
        let number = self.rng.below(self.load_balancers.len());
        let LoadBalancer { harness, service_slot, alive } = &mut self.load_balancers[number];
        let reported = *alive;
        if reported {
            let unresolved = model::Server { mac: None, ..model_server(&self.servers[server]) };
            harness.change(&Change::Server(*service_slot, self.servers[server].id, Some(unresolved)))?;
            self.report.other_changes += 1;
            let delay = 100 + self.random_update_delay_ms();
            self.schedule(delay, Event::SendServer(number, server));
        }
        Ok(reported)
    }

    /// Stops a random load balancer, which later returns with empty tables. Does nothing if only one is running.
    fn restart_load_balancer(&mut self) -> bool {
        let alive: Vec<usize> =
            (0..self.load_balancers.len()).filter(|number| self.load_balancers[*number].alive).collect();
        if alive.len() < 2 {
            return false;
        }
        let number = self.rng.pick(&alive);
        self.load_balancers[number].alive = false;
        self.send_owner(number, MAX_DETECTION_DELAY_MS);
        let away = 2_000 + self.rng.below(20_000) as u64;
        self.report.load_balancers_restarted += 1;
        self.schedule(away, Event::Return(number));
        true
    }
}

fn owner_number(load_balancer: usize) -> OwnerNumber {
    OwnerNumber::try_from(load_balancer as u64).expect("at most 16 load balancers")
}

/// Returns a server's state as load balancers receive it in updates.
fn model_server(server: &Server) -> model::Server {
    model::Server { mac: Some(server.mac), eligible: server.life == Lifecycle::Serving && server.healthy }
}
