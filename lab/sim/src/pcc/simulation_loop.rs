//! Simulation loop, which processes connections and changes of servers and load balancers in order of time.

use super::arrivals::{ConnectionSource, settling_time};
use super::balancer::LoadBalancerSet;
use super::cluster::{Cluster, ClusterChange};
use super::connections::{OpenConnection, OpenConnectionSet};
use super::mix::ConnectionMix;
use super::outcome::{PccSeedResult, PerSecondCounts};
use super::schedule::{ClusterChangeSchedule, max_cluster_size_deviation};
use super::simulated_nanoseconds::{Nanoseconds, seconds_to_nanoseconds};
use super::{PccSimulationConfig, PlannedClusterChanges};

/// Returns the number of servers that are outside the pool at the start.
fn spare_server_count(config: &PccSimulationConfig) -> usize {
    match &config.updates {
        PlannedClusterChanges::PerMinute { .. } => max_cluster_size_deviation(config.server_count),
        PlannedClusterChanges::Scheduled(changes) => {
            changes.iter().filter(|(_, change)| *change == ClusterChange::AddServer).count()
        }
    }
}

/// Returns the total number of servers in a simulation, whether they are in the pool or not.
pub fn total_server_count(config: &PccSimulationConfig) -> usize {
    config.server_count + spare_server_count(config)
}

pub fn simulate_one_seed<B: LoadBalancerSet>(
    config: &PccSimulationConfig,
    mix: &ConnectionMix,
    seed: u64,
    balancer: B,
) -> PccSeedResult {
    PccSimulation::new(config, mix, seed, balancer).run()
}

struct PccSimulation<'a, B> {
    mix: &'a ConnectionMix,
    balancer: B,
    cluster: Cluster,
    connections: OpenConnectionSet,
    connection_source: ConnectionSource,
    change_schedule: ClusterChangeSchedule,
    next_report_at: Option<Nanoseconds>,
    report_interval: Nanoseconds,
    warm_up_duration: Nanoseconds,
    end_time: Nanoseconds,
    seed_result: PccSeedResult,
}

impl<'a, B: LoadBalancerSet> PccSimulation<'a, B> {
    fn new(config: &PccSimulationConfig, mix: &'a ConnectionMix, seed: u64, mut balancer: B) -> Self {
        let warm_up_duration = settling_time(&config.arrivals, mix);
        let end_time = warm_up_duration + seconds_to_nanoseconds(config.measured_minutes * 60.0);
        let cluster =
            Cluster::new(config.server_count, spare_server_count(config), config.load_balancer_count, warm_up_duration);
        balancer.on_servers_changed(&cluster);
        let report_interval = config.report_interval_ms * 1_000_000;
        let second_count = (config.measured_minutes * 60.0).ceil() as usize;
        let per_second_counts =
            vec![
                PerSecondCounts { pool_server_count: config.server_count, ..PerSecondCounts::default() };
                second_count
            ];
        Self {
            mix,
            next_report_at: balancer.uses_reports().then_some(report_interval),
            balancer,
            connections: OpenConnectionSet::new(mix),
            connection_source: ConnectionSource::new(config.arrivals, mix, warm_up_duration, seed),
            change_schedule: ClusterChangeSchedule::new(&config.updates, &cluster, warm_up_duration, seed),
            cluster,
            report_interval,
            warm_up_duration,
            end_time,
            seed_result: PccSeedResult {
                per_second_counts: if config.keeps_per_second_counts { per_second_counts } else { Vec::new() },
                ..PccSeedResult::default()
            },
        }
    }

    fn run(mut self) -> PccSeedResult {
        loop {
            // If several events are simultaneous, connections end first, because an ended connection cannot be broken.
            let next_end_time = self.connections.next_end_time().unwrap_or(Nanoseconds::MAX);
            let next_start_time = self.connection_source.next_start_time();
            let next_change = self.change_schedule.next_change_at().unwrap_or(Nanoseconds::MAX);
            let next_report = self.next_report_at.unwrap_or(Nanoseconds::MAX);
            let now = next_end_time.min(next_start_time).min(next_change).min(next_report);
            if now >= self.end_time {
                break;
            }
            self.cluster.advance_to(now);
            if now == next_end_time {
                self.close_next_connection();
            } else if now == next_change {
                self.apply_next_change();
            } else if now == next_report {
                self.next_report_at = Some(now + self.report_interval);
                self.balancer.process_reports(&self.cluster);
            } else {
                self.open_next_connection();
            }
        }
        self.cluster.advance_to(self.end_time);
        self.into_result()
    }

    fn open_next_connection(&mut self) {
        let Some((identity, kind)) = self.connection_source.pop_connection() else { return };
        let placement = self.balancer.place_connection(identity, &self.cluster);
        self.cluster.add_connection(placement.server);
        let connection = OpenConnection {
            identity,
            stored_state: placement.stored_state,
            started_at: self.cluster.now,
            rerouted_at: None,
            server: placement.server,
            core: placement.core,
            kind_index: kind,
        };
        self.balancer.on_connection_opened(&connection, &self.cluster);
        self.connections.open(connection);
    }

    fn close_next_connection(&mut self) {
        let connection = self.connections.close_next().expect("one ends now");
        let first_break_time = self.balancer.first_break_time(&connection, &self.cluster);
        self.connection_source.on_connection_ended(connection.kind_index);
        self.cluster.remove_connection(connection.server);
        self.balancer.on_connection_closed(&connection, &self.cluster);
        if self.cluster.now < self.warm_up_duration {
            return;
        }
        self.seed_result.ended_connections += 1;
        match first_break_time {
            Some(broken_at) => {
                self.seed_result.broken_connections += 1;
                if !self.seed_result.per_second_counts.is_empty() {
                    let break_noticed_at = self.client_notice_time(&connection, broken_at);
                    self.update_per_second_counts(break_noticed_at, |second| second.broken_connections += 1);
                }
            }
            None => self.update_per_second_counts(self.cluster.now, |second| second.completed_connections += 1),
        }
    }

    fn apply_next_change(&mut self) {
        let previous_server_count = self.cluster.pool_members().len();
        match self.change_schedule.apply_next_change(&mut self.cluster) {
            None => return,
            Some(ClusterChange::AddServer | ClusterChange::RemoveServer) => {
                self.balancer.on_servers_changed(&self.cluster)
            }
            Some(ClusterChange::AddLoadBalancer | ClusterChange::RemoveLoadBalancer) => {
                self.balancer.on_load_balancers_changed(&self.cluster, &mut self.connections);
            }
        }
        let server_count = self.cluster.pool_members().len();
        if self.cluster.now >= self.warm_up_duration {
            self.seed_result.cluster_update_count += 1;
        }
        if server_count != previous_server_count {
            let first_second =
                (self.cluster.now.saturating_sub(self.warm_up_duration) / NANOSECONDS_PER_SECOND) as usize;
            self.seed_result
                .per_second_counts
                .iter_mut()
                .skip(first_second)
                .for_each(|second| second.pool_server_count = server_count);
        }
    }

    /// Returns the time at which the client notices that the connection is broken. This is its next acknowledgement, at
    /// the latest the connection's regular end.
    fn client_notice_time(&self, connection: &OpenConnection, broken_at: Nanoseconds) -> Nanoseconds {
        let kind = self.mix.kinds()[usize::from(connection.kind_index)];
        let packet_count = u128::from(kind.packet_count);
        let elapsed_ns = u128::from(broken_at - connection.started_at);
        let next_packet_number = (elapsed_ns * packet_count).div_ceil(kind.duration.into());
        connection.started_at + (next_packet_number * u128::from(kind.duration) / packet_count) as Nanoseconds
    }

    fn update_per_second_counts(&mut self, time: Nanoseconds, update: impl FnOnce(&mut PerSecondCounts)) {
        let Some(since_warm_up) = time.checked_sub(self.warm_up_duration) else { return };
        if let Some(second) =
            self.seed_result.per_second_counts.get_mut((since_warm_up / NANOSECONDS_PER_SECOND) as usize)
        {
            update(second);
        }
    }

    fn into_result(mut self) -> PccSeedResult {
        self.seed_result.mean_connection_imbalance = self.cluster.imbalance.average_imbalance();
        self.seed_result.open_connections_at_end = self.connections.len();
        if !self.seed_result.per_second_counts.is_empty() {
            // Connections that are still open may have been broken within a reported second.
            while let Some(connection) = self.connections.close_next() {
                if let Some(broken_at) = self.balancer.first_break_time(&connection, &self.cluster) {
                    let break_noticed_at = self.client_notice_time(&connection, broken_at);
                    self.update_per_second_counts(break_noticed_at, |second| second.broken_connections += 1);
                }
            }
        }
        self.seed_result
    }
}

const NANOSECONDS_PER_SECOND: Nanoseconds = 1_000_000_000;
