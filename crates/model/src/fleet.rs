//! Simulated fleet in virtual time. Agents report loads, the controller computes tables, the load balancer places
//! connections, and RSS selects the core. All decisions are made by the product's code. The caller serves packets or
//! requests ([`crate::replay::replay_for_variances`] for arrival logs, the simulator for traces).
//! The network has no delay, so a report arrives, and its table becomes active, at the time of the measurement. Reports
//! The network has no delay, so a report arrives, and its table becomes active, at the time of the measurement. Reports
//! may be older than the table, because agents do not all report at once
//! ([`SimulatedCluster::install_table_from_timed_reports`]). A table may become active after its creation
//! ([`SimulatedCluster::collect_reports_and_compute_table`]).

use std::sync::Arc;

use crate::load::{CoreBusyTimeReadings, CoreLoadTracker, SmoothingWeight};
use crate::placement::{BucketCount, PlacementTable, PlacementTableState};
use crate::policy::{PlacementPolicy, PoolServer, RackSummary, ServerLoads, ServerPool};
use crate::rss::{IndirectionTable, IndirectionTableError, RssConfig, RssKey, ToeplitzTables, uniform_below};
use crate::{FourTuple, ServerId};

/// Method by which the servers' indirection tables are drawn. The server's id is the seed of its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IndirectionTableFillRule {
    /// Every core has the same number of entries (up to one more or less), as in
    /// [`IndirectionTable::draw_balanced_entries`].
    #[default]
    Balanced,
    /// The core of each entry is drawn independently, as in the CrossRSS paper (see
    /// [`IndirectionTable::draw_independent_entries`]).
    Independent,
}

/// Composition of a simulated fleet. All servers have the same RSS key and the same number of cores.
#[derive(Debug, Clone)]
pub struct SimulatedFleetPlan {
    /// Ids of the servers, in ascending order.
    pub servers: Vec<ServerId>,
    /// Number of cores of each server, at least 1.
    pub cores_per_server: u16,
    /// Number of buckets in the placement table, and of entries in each indirection table.
    pub bucket_count: BucketCount,
    /// Weight of the newest report in the moving averages of the loads.
    pub load_ewma_alpha: SmoothingWeight,
    /// RSS key of all NICs.
    pub rss_key: RssKey,
    /// Method by which the servers' indirection tables are drawn.
    pub indirection_table_draw_method: IndirectionTableFillRule,
}

/// Simulated fleet of servers, with their loads in the controller and the active placement table.
pub struct SimulatedCluster {
    plan: SimulatedFleetPlan,
    rss_configs: Vec<RssConfig>,
    load_trackers: Vec<CoreLoadTracker>,
    placement_table: PlacementTable,
    placement_state: PlacementTableState,
    report_sequence_number: u64,
    /// Number of connections placed since the previous report.
    new_connection_count: u64,
    /// RSS keys used so far, each with its precomputed Toeplitz tables. The first one is the fleet's key.
    rss_hashers: Vec<(RssKey, ToeplitzTables)>,
    /// For each group of the active placement table, the index of its RSS key in `rss_hashers`.
    hasher_index_by_group: Vec<usize>,
    /// Whether each server, by its position in the plan, gets new connections from the next table on.
    is_eligible_by_server_position: Vec<bool>,
    counts_placements_as_requests: bool,
    rack_controllers: Option<RackControllers>,
}

/// Rack controllers, which aggregate the servers' reports for a fleet's controller.
pub struct RackControllers {
    /// One policy for each rack, which smooths the rack's loads. Racks have equally many servers (up to one more or
    /// less).
    pub policy_by_rack: Vec<Box<dyn PlacementPolicy>>,
    /// Maximum number of candidates that a rack sends for each bucket.
    pub max_candidates_per_bucket: usize,
}

/// Size and parameters of a fleet whose ids and RSS key are not drawn yet.
#[derive(Debug, Clone, Copy)]
pub struct SimulatedFleetShape {
    /// Number of servers in the fleet.
    pub server_count: u16,
    /// Number of cores of each server, at least 1.
    pub cores_per_server: u16,
    /// Number of buckets in the placement table, and of entries in each indirection table.
    pub bucket_count: BucketCount,
    /// Weight of the newest report in the moving averages of the loads.
    pub load_ewma_alpha: SmoothingWeight,
    /// Method by which the servers' indirection tables are drawn.
    pub indirection_table_draw_method: IndirectionTableFillRule,
}

impl SimulatedFleetShape {
    /// Returns a plan with random ids and a random RSS key, as the controller draws them. Ids are sparse and seed the
    /// indirection tables, so each draw has different tables.
    pub fn draw_plan(self, rng: &mut impl rand::Rng) -> SimulatedFleetPlan {
        let Self {
            server_count,
            cores_per_server,
            bucket_count,
            load_ewma_alpha: alpha,
            indirection_table_draw_method: indirection_table_draw,
        } = self;
        let servers = draw_server_ids(server_count, rng);
        SimulatedFleetPlan {
            servers,
            cores_per_server,
            bucket_count,
            load_ewma_alpha: alpha,
            rss_key: RssKey::random(rng),
            indirection_table_draw_method: indirection_table_draw,
        }
    }
}

fn draw_server_ids(server_count: u16, rng: &mut impl rand::Rng) -> Vec<ServerId> {
    let mut ids = std::collections::BTreeSet::new();
    while ids.len() < usize::from(server_count) {
        let id = u64::from(uniform_below(rng, ServerId::COUNT as u32));
        ids.insert(ServerId::try_from(id).expect("below the number of ids"));
    }
    ids.into_iter().collect()
}

impl SimulatedCluster {
    /// Returns a fleet without reports. Fails if there are more buckets than an indirection table can have entries.
    pub fn new(plan: SimulatedFleetPlan) -> Result<Self, IndirectionTableError> {
        let entry_count = plan.bucket_count.get() as usize;
        let draw_indirection_table = match plan.indirection_table_draw_method {
            IndirectionTableFillRule::Balanced => IndirectionTable::draw_balanced_entries,
            IndirectionTableFillRule::Independent => IndirectionTable::draw_independent_entries,
        };
        let rss_config_for = |server: &ServerId| {
            let indirection_table =
                draw_indirection_table(u64::from(server.get()), entry_count, plan.cores_per_server)?;
            Ok(RssConfig { key: plan.rss_key.clone(), indirection_table })
        };
        Ok(Self {
            rss_configs: plan.servers.iter().map(rss_config_for).collect::<Result<_, _>>()?,
            load_trackers: vec![CoreLoadTracker::default(); plan.servers.len()],
            placement_table: PlacementTable::empty(plan.bucket_count),
            placement_state: PlacementTableState::default(),
            report_sequence_number: 0,
            new_connection_count: 0,
            rss_hashers: vec![(plan.rss_key.clone(), plan.rss_key.toeplitz_tables())],
            hasher_index_by_group: Vec::new(),
            is_eligible_by_server_position: vec![true; plan.servers.len()],
            counts_placements_as_requests: false,
            rack_controllers: None,
            plan,
        })
    }

    /// Returns the number of cores of the whole fleet. A core's index is its server's position times the cores per
    /// server, plus its receive queue.
    pub fn core_count(&self) -> usize {
        self.rss_configs.len() * usize::from(self.plan.cores_per_server)
    }

    /// Sets whether the server at position `server_position` takes new connections from the next report on.
    pub fn set_server_eligible(&mut self, server_position: usize, is_eligible: bool) {
        self.is_eligible_by_server_position[server_position] = is_eligible;
    }

    /// Makes each placement count as one request, as [`ServerPool::with_placements_counted_as_requests`] does.
    pub fn enable_counting_placements_as_requests(&mut self) {
        self.counts_placements_as_requests = true;
    }

    /// Makes the servers report to rack controllers from the next report on.
    pub fn set_rack_controllers(&mut self, rack_controllers: RackControllers) {
        self.rack_controllers = Some(rack_controllers);
    }

    /// Sets the counter with which round-robin policies continue.
    pub fn set_round_robin_counter(&mut self, round_robin_counter: u64) {
        self.placement_state.round_robin_counter = round_robin_counter;
    }

    /// Makes every agent report, computes a placement table by `policy`, and installs it. `busy_ns` is each core's
    /// total busy time so far, and `open_connections` is each server's number of open connections. Panics if
    /// `measured_ns` is not later than at the previous report.
    pub fn collect_reports_and_install_table(
        &mut self,
        measured_ns: u64,
        busy_ns: &[u64],
        open_connections: &[u32],
        policy: &mut dyn PlacementPolicy,
    ) {
        let table = self.collect_reports_and_compute_table(measured_ns, busy_ns, open_connections, policy);
        self.install_table(table);
    }

    /// Computes a placement table like [`SimulatedCluster::collect_reports_and_install_table`], with the same panics.
    /// The table becomes active only by [`SimulatedCluster::install_table`].
    pub fn collect_reports_and_compute_table(
        &mut self,
        measured_ns: u64,
        busy_ns: &[u64],
        open_connections: &[u32],
        policy: &mut dyn PlacementPolicy,
    ) -> PlacementTable {
        self.compute_table_from_timed_reports(
            &vec![Some(measured_ns); self.rss_configs.len()],
            busy_ns,
            open_connections,
            policy,
        )
    }

    /// Acts like [`SimulatedCluster::collect_reports_and_install_table`], with one time of measurement per server.
    /// `None` is for a server that has not reported yet. Panics if a time is not later than the server's previous one.
    pub fn install_table_from_timed_reports(
        &mut self,
        measured_ns_by_server: &[Option<u64>],
        busy_ns: &[u64],
        open_connections: &[u32],
        policy: &mut dyn PlacementPolicy,
    ) {
        let table = self.compute_table_from_timed_reports(measured_ns_by_server, busy_ns, open_connections, policy);
        self.install_table(table);
    }

    fn compute_table_from_timed_reports(
        &mut self,
        measured_ns_by_server: &[Option<u64>],
        busy_ns: &[u64],
        open_connections: &[u32],
        policy: &mut dyn PlacementPolicy,
    ) -> PlacementTable {
        self.report_sequence_number += 1;
        let busy_ns_by_server = busy_ns.chunks(usize::from(self.plan.cores_per_server));
        for ((tracker, busy_ns), measured_ns) in
            self.load_trackers.iter_mut().zip(busy_ns_by_server).zip(measured_ns_by_server)
        {
            let Some(measured_ns) = *measured_ns else { continue };
            let readings = CoreBusyTimeReadings {
                report_sequence_number: self.report_sequence_number,
                measured_at_ns: measured_ns,
                busy_ns_by_core: busy_ns.to_vec(),
            };
            tracker.record_report(readings, self.plan.load_ewma_alpha).expect("reports are in order");
        }
        let servers = self.plan.servers.iter().enumerate().map(|(position, id)| PoolServer {
            is_eligible: self.is_eligible_by_server_position[position],
            loads: self.load_trackers[position].smoothed_loads().cloned().map(ServerLoads::Local),
            rss: Some(self.rss_configs[position].clone()),
            open_connection_count: open_connections[position],
            ..PoolServer::new(*id)
        });
        let servers: Vec<PoolServer> = servers.collect();
        let pool = match &mut self.rack_controllers {
            Some(rack_controllers) => rack_controllers.build_pool(servers, self.plan.bucket_count),
            None => ServerPool::new(servers, 1),
        };
        let pool = pool.with_opened_connection_count(std::mem::take(&mut self.new_connection_count));
        let pool = if self.counts_placements_as_requests { pool.with_placements_counted_as_requests() } else { pool };
        policy.compute_table(&pool, self.plan.bucket_count, self.report_sequence_number)
    }

    /// Activates a placement table as the data plane does. Its counts of assigned connections start at 0, and the
    /// round-robin counter continues.
    pub fn install_table(&mut self, table: PlacementTable) {
        self.placement_state = PlacementTableState {
            round_robin_counter: self.placement_state.round_robin_counter,
            ..PlacementTableState::for_table(&table)
        };
        self.hasher_index_by_group.clear();
        for key in &table.rss_key_by_group {
            let known_hasher_index = self.rss_hashers.iter().position(|(known_key, _)| known_key == key);
            let hasher_index = known_hasher_index.unwrap_or_else(|| {
                self.rss_hashers.push((key.clone(), key.toeplitz_tables()));
                self.rss_hashers.len() - 1
            });
            self.hasher_index_by_group.push(hasher_index);
        }
        self.placement_table = table;
    }

    /// Places a new connection and returns the index of its core. The load balancer selects the server, whose RSS
    /// selects the core. Panics before the first report, because no table is active.
    pub fn place_connection(&mut self, connection: &FourTuple) -> usize {
        self.new_connection_count += 1;
        let bytes = connection.bytes();
        let (hashers, hasher_index_by_group) = (&self.rss_hashers, &self.hasher_index_by_group);
        let hash_for_group = |group: usize| hashers[hasher_index_by_group[group]].1.hash_four_tuple(&bytes);
        let server = self
            .placement_table
            .select_server_by_hash(&mut self.placement_state, hash_for_group)
            .expect("a table in which all are eligible");
        let position = self.plan.servers.binary_search(&server).expect("a server of the fleet");
        self.core_index_for_hash(position, self.rss_hashers[0].1.hash_four_tuple(&bytes))
    }

    /// Returns, for each server in order, the index of the core that the connection would reach on it.
    pub fn reachable_core_indexes(&self, connection: &FourTuple) -> impl Iterator<Item = usize> {
        let hash = self.rss_hashers[0].1.hash_four_tuple(&connection.bytes());
        (0..self.rss_configs.len()).map(move |position| self.core_index_for_hash(position, hash))
    }

    /// Returns the RSS hash of the connection, which is the same at every NIC of the fleet.
    pub fn rss_hash(&self, connection: &FourTuple) -> u32 {
        self.rss_hashers[0].1.hash_four_tuple(&connection.bytes())
    }

    /// Returns the indirection table of the server at position `server_position`.
    pub fn indirection_table(&self, server_position: usize) -> &IndirectionTable {
        &self.rss_configs[server_position].indirection_table
    }

    fn core_index_for_hash(&self, server_position: usize, rss_hash: u32) -> usize {
        server_position * usize::from(self.plan.cores_per_server)
            + usize::from(self.rss_configs[server_position].indirection_table.queue_for_hash(rss_hash))
    }
}

impl RackControllers {
    /// Returns the controller's pool of servers, with a summary of each rack.
    fn build_pool(&mut self, servers: Vec<PoolServer>, bucket_count: BucketCount) -> ServerPool {
        let rack_count = self.policy_by_rack.len();
        let first_server_position = |rack: usize| rack * servers.len() / rack_count;
        let summaries = self.policy_by_rack.iter_mut().enumerate().map(|(rack, policy)| {
            let pool =
                ServerPool::new(servers[first_server_position(rack)..first_server_position(rack + 1)].to_vec(), 1);
            Arc::new(RackSummary::from_pool(&pool, policy.as_mut(), bucket_count, self.max_candidates_per_bucket))
        });
        let summaries = summaries.collect();
        let servers = servers.into_iter().map(|server| PoolServer { loads: None, ..server });
        ServerPool::new(servers.collect(), 1).with_rack_summaries(summaries)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::policy::create_policy_by_name;
    use crate::rss::seeded_rng;

    fn three_server_fleet(indirection_table_draw: IndirectionTableFillRule) -> SimulatedCluster {
        let servers = [3u64, 70, 9_000].map(|id| ServerId::try_from(id).unwrap()).to_vec();
        let key = RssKey::random(&mut seeded_rng(5, 5));
        let (bucket_count, alpha) = (BucketCount::PAPER_VALUE, SmoothingWeight::PAPER_VALUE);
        SimulatedCluster::new(SimulatedFleetPlan {
            servers,
            cores_per_server: 4,
            bucket_count,
            load_ewma_alpha: alpha,
            rss_key: key,
            indirection_table_draw_method: indirection_table_draw,
        })
        .unwrap()
    }

    fn build_four_tuple(port: u16) -> FourTuple {
        FourTuple::ipv4((Ipv4Addr::new(10, 1, 0, 7), port), (Ipv4Addr::new(10, 200, 0, 1), 80))
    }

    #[test]
    fn connections_reach_the_core_that_placement_table_and_rss_select() {
        for name in ["hash", "rr", "pow2", "crossrss", "crossrss-plus"] {
            let (mut fleet, mut policy) =
                (three_server_fleet(IndirectionTableFillRule::Independent), create_policy_by_name(name, 1).unwrap());
            for (report_index, busy_ms) in [0u64, 50].into_iter().enumerate() {
                let busy_ns: Vec<u64> = (0..12).map(|core| busy_ms * core * 1_000_000).collect();
                fleet.collect_reports_and_install_table(
                    report_index as u64 * 100_000_000,
                    &busy_ns,
                    &[5, 5, 5],
                    policy.as_mut(),
                );
            }
            let (table, mut state) =
                (fleet.placement_table.clone(), PlacementTableState::for_table(&fleet.placement_table));
            for port in 1..500 {
                let expected_server = table.select_server(&mut state, &build_four_tuple(port)).unwrap();
                let position = fleet.plan.servers.iter().position(|server| *server == expected_server).unwrap();
                let expected_core_index = fleet.reachable_core_indexes(&build_four_tuple(port)).nth(position).unwrap();
                assert_eq!(fleet.place_connection(&build_four_tuple(port)), expected_core_index, "{name}, port {port}");
            }
        }
    }

    #[test]
    fn busy_cores_get_no_new_connections() {
        let (mut fleet, mut policy) =
            (three_server_fleet(IndirectionTableFillRule::Balanced), create_policy_by_name("crossrss", 1).unwrap());
        let mut busy_ns = vec![100_000_000; 12];
        fleet.collect_reports_and_install_table(0, &[0; 12], &[0; 3], policy.as_mut());
        busy_ns[4..8].fill(0);
        fleet.collect_reports_and_install_table(100_000_000, &busy_ns, &[0; 3], policy.as_mut());
        assert!((1..200).all(|port| (4..8).contains(&fleet.place_connection(&build_four_tuple(port)))));
    }
}
