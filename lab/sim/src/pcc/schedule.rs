//! Times at which servers and load balancers are added and removed.

use coreward_model::rss::{seeded_rng, uniform_below};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::cluster::{Cluster, ClusterChange};
use super::simulated_nanoseconds::{Nanoseconds, seconds_to_nanoseconds};
use crate::random::{draw_exponential, draw_uniform_below_one};

/// Random stream of [`seeded_rng`] for the changes of servers and load balancers.
const RNG_STREAM_CHANGES: u64 = 201;

/// Additions and removals of servers and load balancers during a run.
#[derive(Debug, Clone, PartialEq)]
pub enum PlannedClusterChanges {
    /// Random changes as a Poisson process. Additions and removals are equally likely. A change that would leave the
    /// range of nominal size +- 10 % is replaced by its opposite.
    PerMinute {
        /// Mean number of servers added or removed per minute.
        servers: f64,
        load_balancers: f64,
    },
    /// Predefined changes, each with its time after the warm-up (s), in ascending order of time.
    Scheduled(Vec<(f64, ClusterChange)>),
}

/// Returns the largest allowed difference between the actual and the nominal number of servers or load balancers.
pub fn max_cluster_size_deviation(nominal: usize) -> usize {
    (nominal / 10).max(1)
}

/// Schedule of the server and load balancer changes in one simulation.
#[derive(Debug)]
pub struct ClusterChangeSchedule {
    updates: PlannedClusterChanges,
    rng: Xoshiro256PlusPlus,
    next_change_at: Option<Nanoseconds>,
    /// Index of the next change in [`PlannedClusterChanges::Scheduled`].
    next_scheduled_change_index: usize,
    nominal_server_and_lb_counts: (usize, usize),
    warm_up_duration: Nanoseconds,
}

impl ClusterChangeSchedule {
    /// Creates the schedule for a cluster that starts with its nominal size.
    pub fn new(updates: &PlannedClusterChanges, cluster: &Cluster, warm_up_duration: Nanoseconds, seed: u64) -> Self {
        let nominal_server_and_lb_counts = (cluster.pool_members().len(), cluster.load_balancers().len());
        let rng = seeded_rng(seed, RNG_STREAM_CHANGES);
        let mut schedule = Self {
            updates: updates.clone(),
            rng,
            next_change_at: None,
            next_scheduled_change_index: 0,
            nominal_server_and_lb_counts,
            warm_up_duration,
        };
        schedule.schedule_next_change(0);
        schedule
    }

    pub fn next_change_at(&self) -> Option<Nanoseconds> {
        self.next_change_at
    }

    /// Applies the next change and returns it. Returns `None` if it is impossible, such as an addition without a spare
    /// server.
    pub fn apply_next_change(&mut self, cluster: &mut Cluster) -> Option<ClusterChange> {
        let change = match &self.updates {
            PlannedClusterChanges::Scheduled(changes) => changes[self.next_scheduled_change_index].1,
            PlannedClusterChanges::PerMinute { servers, load_balancers } => {
                let total_rate = servers + load_balancers;
                let changes_servers =
                    load_balancers == &0.0 || draw_uniform_below_one(&mut self.rng) * total_rate < *servers;
                let is_addition = uniform_below(&mut self.rng, 2) == 1;
                choose_change_within_bounds(changes_servers, is_addition, cluster, self.nominal_server_and_lb_counts)
            }
        };
        self.next_scheduled_change_index += 1;
        self.schedule_next_change(cluster.now);
        cluster.apply_change(change, &mut self.rng).then_some(change)
    }

    fn schedule_next_change(&mut self, now: Nanoseconds) {
        self.next_change_at = match &self.updates {
            PlannedClusterChanges::Scheduled(changes) => changes
                .get(self.next_scheduled_change_index)
                .map(|(at, _)| self.warm_up_duration + seconds_to_nanoseconds(*at)),
            PlannedClusterChanges::PerMinute { servers, load_balancers } => {
                let changes_per_second = (servers + load_balancers) / 60.0;
                let unit_gap = draw_exponential(&mut self.rng);
                (changes_per_second > 0.0).then(|| now + seconds_to_nanoseconds(unit_gap / changes_per_second))
            }
        };
    }
}

fn choose_change_within_bounds(
    changes_servers: bool,
    is_addition: bool,
    cluster: &Cluster,
    nominal_counts: (usize, usize),
) -> ClusterChange {
    let (count, nominal) = if changes_servers {
        (cluster.pool_members().len(), nominal_counts.0)
    } else {
        (cluster.load_balancers().len(), nominal_counts.1)
    };
    let min_count = nominal.saturating_sub(max_cluster_size_deviation(nominal)).max(1);
    let is_addition = (is_addition || count <= min_count) && count < nominal + max_cluster_size_deviation(nominal);
    match (changes_servers, is_addition) {
        (true, true) => ClusterChange::AddServer,
        (true, false) => ClusterChange::RemoveServer,
        (false, true) => ClusterChange::AddLoadBalancer,
        (false, false) => ClusterChange::RemoveLoadBalancer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_changes_have_configured_rate_and_keep_cluster_size() {
        let mut cluster = Cluster::new(40, max_cluster_size_deviation(40), 4, 0);
        let updates = PlannedClusterChanges::PerMinute { servers: 60.0, load_balancers: 20.0 };
        let mut schedule = ClusterChangeSchedule::new(&updates, &cluster, 0, 1);
        let (mut server_changes, mut load_balancer_changes) = (0, 0);
        while schedule.next_change_at().unwrap() < seconds_to_nanoseconds(6_000.0) {
            cluster.advance_to(schedule.next_change_at().unwrap());
            match schedule.apply_next_change(&mut cluster) {
                Some(ClusterChange::AddServer | ClusterChange::RemoveServer) => server_changes += 1,
                Some(_) => load_balancer_changes += 1,
                None => panic!("a random change can be made"),
            }
            assert!(
                (36..=44).contains(&cluster.pool_members().len()) && (3..=5).contains(&cluster.load_balancers().len())
            );
        }
        // The expected counts are 6,000 and 2,000, with standard deviations of 77 and 45.
        assert!((5_700..6_300).contains(&server_changes), "{server_changes}");
        assert!((1_800..2_200).contains(&load_balancer_changes), "{load_balancer_changes}");
    }

    #[test]
    fn scheduled_changes_come_after_the_warm_up() {
        let mut cluster = Cluster::new(2, 1, 1, 0);
        let updates = PlannedClusterChanges::Scheduled(vec![
            (1.0, ClusterChange::AddServer),
            (1.0, ClusterChange::AddServer),
            (2.5, ClusterChange::RemoveServer),
        ]);
        let mut schedule = ClusterChangeSchedule::new(&updates, &cluster, seconds_to_nanoseconds(10.0), 1);
        assert_eq!(schedule.next_change_at(), Some(11_000_000_000));
        assert_eq!(schedule.apply_next_change(&mut cluster), Some(ClusterChange::AddServer));
        assert_eq!(schedule.apply_next_change(&mut cluster), None);
        assert_eq!(schedule.next_change_at(), Some(12_500_000_000));
        assert_eq!(schedule.apply_next_change(&mut cluster), Some(ClusterChange::RemoveServer));
        assert_eq!(schedule.next_change_at(), None);
    }
}
