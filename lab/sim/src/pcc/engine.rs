//! A simulation: events of connections, servers and load balancers in order of time.

use super::arrivals::{ConnectionSource, settling_time};
use super::balancer::Balancer;
use super::clock::{Nanoseconds, from_seconds};
use super::cluster::{Cluster, ClusterChange};
use super::connections::{Connection, Connections};
use super::mix::Mix;
use super::outcome::{SecondCounts, SeedOutcome};
use super::schedule::{ChangeSchedule, max_deviation};
use super::{Config, Updates};

/// Returns the number of servers that are outside of the pool at the start.
fn spare_servers(config: &Config) -> usize {
    match &config.updates {
        Updates::PerMinute { .. } => max_deviation(config.servers),
        Updates::Scheduled(list) => list.iter().filter(|(_, change)| *change == ClusterChange::AddServer).count(),
    }
}

/// Returns the number of all servers in a simulation, whether in the pool or not.
pub fn server_count(config: &Config) -> usize {
    config.servers + spare_servers(config)
}

pub fn simulate<B: Balancer>(config: &Config, mix: &Mix, seed: u64, balancer: B) -> SeedOutcome {
    Simulation::new(config, mix, seed, balancer).run()
}

struct Simulation<'a, B> {
    mix: &'a Mix,
    balancer: B,
    cluster: Cluster,
    connections: Connections,
    source: ConnectionSource,
    schedule: ChangeSchedule,
    next_report: Option<Nanoseconds>,
    report_interval: Nanoseconds,
    warm_up: Nanoseconds,
    end: Nanoseconds,
    run: SeedOutcome,
}

impl<'a, B: Balancer> Simulation<'a, B> {
    fn new(config: &Config, mix: &'a Mix, seed: u64, mut balancer: B) -> Self {
        let warm_up = settling_time(&config.arrivals, mix);
        let end = warm_up + from_seconds(config.minutes * 60.0);
        let cluster = Cluster::new(config.servers, spare_servers(config), config.load_balancers, warm_up);
        balancer.servers_changed(&cluster);
        let report_interval = config.report_ms * 1_000_000;
        let whole_seconds = (config.minutes * 60.0).ceil() as usize;
        let seconds = vec![SecondCounts { servers: config.servers, ..SecondCounts::default() }; whole_seconds];
        Self {
            mix,
            next_report: balancer.takes_reports().then_some(report_interval),
            balancer,
            connections: Connections::new(mix),
            source: ConnectionSource::new(config.arrivals, mix, warm_up, seed),
            schedule: ChangeSchedule::new(&config.updates, &cluster, warm_up, seed),
            cluster,
            report_interval,
            warm_up,
            end,
            run: SeedOutcome {
                second_counts: if config.by_second { seconds } else { Vec::new() },
                ..SeedOutcome::default()
            },
        }
    }

    fn run(mut self) -> SeedOutcome {
        loop {
            // At equal times connections end first, because an ended connection cannot be broken.
            let ends = self.connections.next_end().unwrap_or(Nanoseconds::MAX);
            let begins = self.source.next();
            let changes = self.schedule.next().unwrap_or(Nanoseconds::MAX);
            let reports = self.next_report.unwrap_or(Nanoseconds::MAX);
            let now = ends.min(begins).min(changes).min(reports);
            if now >= self.end {
                break;
            }
            self.cluster.advance(now);
            if now == ends {
                self.close();
            } else if now == changes {
                self.apply_next_change();
            } else if now == reports {
                self.next_report = Some(now + self.report_interval);
                self.balancer.process_reports(&self.cluster);
            } else {
                self.open();
            }
        }
        self.cluster.advance(self.end);
        self.finish()
    }

    fn open(&mut self) {
        let Some((identity, kind)) = self.source.pop_connection() else { return };
        let placed = self.balancer.place(identity, &self.cluster);
        self.cluster.connection_opened(placed.server);
        let connection = Connection {
            identity,
            stored_state: placed.stored_state,
            start: self.cluster.now,
            rerouted_at: None,
            server: placed.server,
            core: placed.core,
            kind,
        };
        self.balancer.connection_opened(&connection, &self.cluster);
        self.connections.open(connection);
    }

    fn close(&mut self) {
        let connection = self.connections.close_next().expect("one ends now");
        let broken = self.balancer.first_break_time(&connection, &self.cluster);
        self.source.connection_ended(connection.kind);
        self.cluster.connection_closed(connection.server);
        self.balancer.connection_closed(&connection, &self.cluster);
        if self.cluster.now < self.warm_up {
            return;
        }
        self.run.ended += 1;
        match broken {
            Some(at) => {
                self.run.broken += 1;
                if !self.run.second_counts.is_empty() {
                    let noticed = self.notice_time(&connection, at);
                    self.update_second(noticed, |second| second.broken += 1);
                }
            }
            None => self.update_second(self.cluster.now, |second| second.completed += 1),
        }
    }

    fn apply_next_change(&mut self) {
        let previous_servers = self.cluster.members().len();
        match self.schedule.apply_next(&mut self.cluster) {
            None => return,
            Some(ClusterChange::AddServer | ClusterChange::RemoveServer) => {
                self.balancer.servers_changed(&self.cluster)
            }
            Some(ClusterChange::AddLoadBalancer | ClusterChange::RemoveLoadBalancer) => {
                self.balancer.load_balancers_changed(&self.cluster, &mut self.connections);
            }
        }
        let servers = self.cluster.members().len();
        if self.cluster.now >= self.warm_up {
            self.run.updates += 1;
        }
        if servers != previous_servers {
            let first = (self.cluster.now.saturating_sub(self.warm_up) / SECOND) as usize;
            self.run.second_counts.iter_mut().skip(first).for_each(|second| second.servers = servers);
        }
    }

    /// Returns the time at which the client notices the break: at its next acknowledgement, at the latest at the
    /// connection's regular end.
    fn notice_time(&self, connection: &Connection, broken_at: Nanoseconds) -> Nanoseconds {
        let kind = self.mix.kinds()[usize::from(connection.kind)];
        let packets = u128::from(kind.packets);
        let passed = u128::from(broken_at - connection.start);
        let next = (passed * packets).div_ceil(kind.duration.into());
        connection.start + (next * u128::from(kind.duration) / packets) as Nanoseconds
    }

    fn update_second(&mut self, at: Nanoseconds, count: impl FnOnce(&mut SecondCounts)) {
        let Some(after) = at.checked_sub(self.warm_up) else { return };
        if let Some(second) = self.run.second_counts.get_mut((after / SECOND) as usize) {
            count(second);
        }
    }

    fn finish(mut self) -> SeedOutcome {
        self.run.imbalance = self.cluster.imbalance.average();
        self.run.open_at_end = self.connections.len();
        if !self.run.second_counts.is_empty() {
            // Open connections may have been broken within a reported second.
            while let Some(connection) = self.connections.close_next() {
                if let Some(at) = self.balancer.first_break_time(&connection, &self.cluster) {
                    let noticed = self.notice_time(&connection, at);
                    self.update_second(noticed, |second| second.broken += 1);
                }
            }
        }
        self.run
    }
}

const SECOND: Nanoseconds = 1_000_000_000;
