//! Replay of an arrival log in virtual time, on a [`SimulatedCluster`] whose cores serve one request at a time. The
//! demo uses it for the noise floor, and the policies' tests compare policies with it.

use crate::ServerId;
use crate::arrival_log::{ArrivalLog, ConnectionArrival};
use crate::fleet::{IndirectionTableFillRule, SimulatedCluster, SimulatedFleetPlan, SimulatedFleetShape};
use crate::load::SmoothingWeight;
use crate::placement::BucketCount;
use crate::policy::PlacementPolicy;
use crate::rss::{RssKey, seeded_rng, uniform_below};
use crate::statistics::{mean, variance_pct};

/// Settings of a simulated replay of an arrival log.
#[derive(Debug, Clone, Copy)]
pub struct ArrivalReplaySettings {
    /// Number of servers. Their ids are 1 to `server_count`.
    pub server_count: u16,
    /// Number of cores of each server.
    pub cores_per_server: u16,
    /// Number of buckets in the placement table, and of entries in each indirection table.
    pub bucket_count: BucketCount,
    /// Time between two reports, and between two placement tables (us).
    pub report_interval_us: u64,
    /// Weight of the newest report in the moving averages of the loads.
    pub load_ewma_alpha: SmoothingWeight,
    /// Phase of the agents' reports and of round robin, relative to the placement tables.
    pub report_phase: ReplayReportPhase,
    /// Warm-up time (us). Variance windows that start earlier are omitted.
    pub warm_up_time_us: u64,
    /// Seed from which the fleet's RSS key is drawn.
    pub seed: u64,
}

impl Default for ArrivalReplaySettings {
    /// Returns the pool of the CrossRSS paper (CoNEXT'20, Sect. 3), with 4 servers of 4 cores, 128 buckets and reports
    /// at 10 Hz.
    fn default() -> Self {
        Self {
            server_count: 4,
            cores_per_server: 4,
            bucket_count: BucketCount::PAPER_VALUE,
            report_interval_us: 100_000,
            load_ewma_alpha: SmoothingWeight::PAPER_VALUE,
            report_phase: ReplayReportPhase::Aligned,
            warm_up_time_us: 5_000_000,
            seed: 1,
        }
    }
}

/// Phase of the agents' reports and of round robin relative to the placement tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayReportPhase {
    /// All agents measure at the time of the placement table, and round robin starts with the first server.
    Aligned,
    /// Each agent starts at a random time, as in operation. When a table is computed, its newest report is up to a
    /// report interval old. Round robin continues after earlier connections.
    Random,
}

/// Mean variances of the work in windows of 1 s after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WorkVariances {
    /// Variance of the work per server (%).
    pub across_servers_pct: f64,
    /// Variance of the work per core (%).
    pub across_cores_pct: f64,
}

impl ArrivalReplaySettings {
    fn bin_duration_us(&self) -> u64 {
        self.report_interval_us / TIME_BINS_PER_REPORT_INTERVAL
    }
}

/// Method by which connections are placed on cores.
pub enum ReplayPlacementMethod<'a> {
    /// A policy places connections on servers, and RSS places them on cores, as in operation.
    Policy(&'a mut dyn PlacementPolicy),
    /// Each connection goes to the core on which its requests add least to the sum of squares of the work per core and
    /// window. Unlike in a real load balancer, all future requests are known, so the remaining variance is the noise
    /// floor.
    Oracle,
}

const LOAD_VARIANCE_WINDOW_US: u64 = 1_000_000;
/// Number of time bins per report interval, in which work is counted. At the demo's interval of 100 ms, a bin is 2 ms,
/// which is small compared with a request's work of 7.5 ms. With bins of 10 ms, reports would be 5 ms too young on
/// average, which would affect the variances of crossrss-plus.
const TIME_BINS_PER_REPORT_INTERVAL: u64 = 50;

/// Change of the pool during a replay, at which a server starts or stops taking new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayPoolChange {
    /// Time of the change (us after the log's start).
    pub time_us: u64,
    /// Index of the server, from 0.
    pub server_index: u16,
    /// Whether the server takes new connections from this time on.
    pub is_eligible: bool,
}

/// Replays the log, and returns the variances of the work that servers and cores performed.
pub fn replay_for_variances(
    log: &ArrivalLog,
    settings: ArrivalReplaySettings,
    placement_method: ReplayPlacementMethod<'_>,
) -> WorkVariances {
    let server_id = |number: u16| ServerId::try_from(u64::from(number)).expect("few servers");
    let plan = SimulatedFleetPlan {
        servers: (1..=settings.server_count).map(server_id).collect(),
        cores_per_server: settings.cores_per_server,
        bucket_count: settings.bucket_count,
        load_ewma_alpha: settings.load_ewma_alpha,
        rss_key: RssKey::random(&mut seeded_rng(settings.seed, RSS_KEY_RNG_STREAM)),
        indirection_table_draw_method: IndirectionTableFillRule::Balanced,
    };
    replay_log(log, settings, plan, &[], placement_method).compute_variances(settings)
}

/// Replays the log on a fleet with random ids while the pool changes. Returns the total busy time of every core (ns) at
/// the beginning of each second and at the end of the last second. `changes` are sorted by time.
pub fn replay_for_busy_times(
    log: &ArrivalLog,
    settings: ArrivalReplaySettings,
    changes: &[ReplayPoolChange],
    policy: &mut dyn PlacementPolicy,
) -> Vec<Vec<u64>> {
    let ArrivalReplaySettings { server_count, cores_per_server, bucket_count, load_ewma_alpha: alpha, .. } = settings;
    let fleet_shape = SimulatedFleetShape {
        server_count,
        cores_per_server,
        bucket_count,
        load_ewma_alpha: alpha,
        indirection_table_draw_method: IndirectionTableFillRule::Balanced,
    };
    let plan = fleet_shape.draw_plan(&mut seeded_rng(settings.seed, DRAWN_FLEET_RNG_STREAM));
    let state = replay_log(log, settings, plan, changes, ReplayPlacementMethod::Policy(policy));
    let bins_per_second = (LOAD_VARIANCE_WINDOW_US / settings.bin_duration_us()) as usize;
    let second_count = (log.duration_us / LOAD_VARIANCE_WINDOW_US) as usize;
    let busy_ns_before_second =
        |bins: &Vec<u64>, second: usize| bins[..second * bins_per_second].iter().sum::<u64>() * 1_000;
    (0..=second_count)
        .map(|second| state.busy_us_by_core_and_bin.iter().map(|bins| busy_ns_before_second(bins, second)).collect())
        .collect()
}

fn replay_log(
    log: &ArrivalLog,
    settings: ArrivalReplaySettings,
    plan: SimulatedFleetPlan,
    changes: &[ReplayPoolChange],
    mut placement_method: ReplayPlacementMethod<'_>,
) -> ReplayState {
    let mut state = ReplayState::new(log, settings, plan);
    let mut changes = changes.iter().peekable();
    let mut due_times_and_connections: Vec<(u64, usize)> = Vec::new();
    for (connection, arrival) in log.arrivals.iter().enumerate() {
        due_times_and_connections
            .extend((0..arrival.request_count).map(|index| (arrival.request_due_us(index), connection)));
    }
    due_times_and_connections.sort_unstable();
    let mut core_by_connection = vec![usize::MAX; log.arrivals.len()];
    let mut next_report_us = 0;
    for (due_us, connection) in due_times_and_connections {
        while next_report_us <= due_us {
            while let Some(change) = changes.next_if(|change| change.time_us <= next_report_us) {
                state.cluster.set_server_eligible(usize::from(change.server_index), change.is_eligible);
            }
            state.collect_reports_and_install_table(next_report_us, &mut placement_method);
            next_report_us += settings.report_interval_us;
        }
        if core_by_connection[connection] == usize::MAX {
            core_by_connection[connection] = state.place_connection(log, connection, &placement_method);
        }
        state.serve_request(core_by_connection[connection], due_us, u64::from(log.arrivals[connection].service_us));
    }
    state
}

struct ReplayState {
    settings: ArrivalReplaySettings,
    cluster: SimulatedCluster,
    /// Time at which each core has finished its work (us), by the core's number in the fleet.
    idle_from_us_by_core: Vec<u64>,
    busy_us_by_core_and_bin: Vec<Vec<u64>>,
    /// Busy time of each core in its server's last report (us).
    reported_busy_us_by_core: Vec<u64>,
    reported_bin_count_by_core: Vec<usize>,
    /// Age of each server's report when a table is computed, as a number of bins.
    report_age_bins_by_server: Vec<usize>,
    /// Times at which the open connections of each core end (us).
    connection_end_us_by_core: Vec<Vec<u64>>,
    /// Work of all connections placed so far (us), by core and by the variance window in which the work is due.
    planned_work_us_by_core: Vec<Vec<u64>>,
}

impl ReplayState {
    fn new(log: &ArrivalLog, settings: ArrivalReplaySettings, plan: SimulatedFleetPlan) -> Self {
        let mut cluster = SimulatedCluster::new(plan).expect("as many entries as buckets");
        let (core_count, bin_count) = (
            cluster.core_count(),
            (log.duration_us / settings.bin_duration_us() + 2 * TIME_BINS_PER_REPORT_INTERVAL) as usize,
        );
        let mut rng = seeded_rng(settings.seed, REPORT_PHASE_RNG_STREAM);
        let report_age_bins_by_server = match settings.report_phase {
            ReplayReportPhase::Aligned => vec![0; usize::from(settings.server_count)],
            ReplayReportPhase::Random => {
                cluster.set_round_robin_counter(uniform_below(&mut rng, u32::MAX).into());
                (0..settings.server_count)
                    .map(|_| uniform_below(&mut rng, TIME_BINS_PER_REPORT_INTERVAL as u32) as usize)
                    .collect()
            }
        };
        Self {
            report_age_bins_by_server,
            reported_bin_count_by_core: vec![0; core_count],
            settings,
            cluster,
            idle_from_us_by_core: vec![0; core_count],
            busy_us_by_core_and_bin: vec![vec![0; bin_count]; core_count],
            reported_busy_us_by_core: vec![0; core_count],
            connection_end_us_by_core: vec![Vec::new(); core_count],
            planned_work_us_by_core: vec![
                vec![0; (log.duration_us / LOAD_VARIANCE_WINDOW_US + 2) as usize];
                core_count
            ],
        }
    }

    fn collect_reports_and_install_table(&mut self, now_us: u64, placement_method: &mut ReplayPlacementMethod<'_>) {
        let bin_duration_us = self.settings.bin_duration_us();
        let bin_index = (now_us / bin_duration_us) as usize;
        for core in 0..self.idle_from_us_by_core.len() {
            let reported_bin_count = bin_index
                .saturating_sub(self.report_age_bins_by_server[core / usize::from(self.settings.cores_per_server)]);
            let new_busy_us = self.busy_us_by_core_and_bin[core]
                .iter()
                .take(reported_bin_count)
                .skip(self.reported_bin_count_by_core[core]);
            self.reported_busy_us_by_core[core] += new_busy_us.sum::<u64>();
            self.reported_bin_count_by_core[core] = reported_bin_count;
            self.connection_end_us_by_core[core].retain(|end_us| *end_us > now_us);
        }
        let ReplayPlacementMethod::Policy(policy) = placement_method else { return };
        let measured_ns_at_age =
            |age: &usize| bin_index.checked_sub(*age).map(|bin| bin as u64 * bin_duration_us * 1_000);
        let measured_ns_by_server: Vec<Option<u64>> =
            self.report_age_bins_by_server.iter().map(measured_ns_at_age).collect();
        let busy_ns_by_core: Vec<u64> = self.reported_busy_us_by_core.iter().map(|us| us * 1_000).collect();
        let end_times_by_server = self.connection_end_us_by_core.chunks(usize::from(self.settings.cores_per_server));
        let open_connection_count_by_server: Vec<u32> = end_times_by_server
            .map(|cores| cores.iter().map(|connection_ends| connection_ends.len() as u32).sum())
            .collect();
        self.cluster.install_table_from_timed_reports(
            &measured_ns_by_server,
            &busy_ns_by_core,
            &open_connection_count_by_server,
            *policy,
        );
    }

    fn place_connection(
        &mut self,
        log: &ArrivalLog,
        connection_index: usize,
        placement_method: &ReplayPlacementMethod<'_>,
    ) -> usize {
        let arrival = &log.arrivals[connection_index];
        let core = match placement_method {
            ReplayPlacementMethod::Policy(_) => self.cluster.place_connection(&arrival.four_tuple()),
            ReplayPlacementMethod::Oracle => self.choose_oracle_core(arrival),
        };
        for index in 0..arrival.request_count {
            self.planned_work_us_by_core[core][(arrival.request_due_us(index) / LOAD_VARIANCE_WINDOW_US) as usize] +=
                u64::from(arrival.service_us);
        }
        self.connection_end_us_by_core[core].push(arrival.last_request_due_us() + u64::from(arrival.service_us));
        core
    }

    /// Returns the core on which the connection adds least to the sum of squared work. Work w increases the square of a
    /// core's work x by 2xw + w^2, where w^2 is the same for every core.
    fn choose_oracle_core(&self, arrival: &ConnectionArrival) -> usize {
        let window_indexes: Vec<usize> = (0..arrival.request_count)
            .map(|index| (arrival.request_due_us(index) / LOAD_VARIANCE_WINDOW_US) as usize)
            .collect();
        let planned_work_in_windows = |core: &usize| -> u64 {
            window_indexes.iter().map(|window| self.planned_work_us_by_core[*core][*window]).sum()
        };
        (0..self.connection_end_us_by_core.len()).min_by_key(planned_work_in_windows).expect("at least one core")
    }

    fn serve_request(&mut self, core: usize, due_us: u64, service_us: u64) {
        let start_us = self.idle_from_us_by_core[core].max(due_us);
        let end_us = start_us + service_us;
        self.idle_from_us_by_core[core] = end_us;
        let bin_duration_us = self.settings.bin_duration_us();
        let mut part_start_us = start_us;
        while part_start_us < end_us {
            let bin_index = part_start_us / bin_duration_us;
            let part_end_us = end_us.min((bin_index + 1) * bin_duration_us);
            if let Some(busy_us) = self.busy_us_by_core_and_bin[core].get_mut(bin_index as usize) {
                *busy_us += part_end_us - part_start_us;
            }
            part_start_us = part_end_us;
        }
    }

    fn compute_variances(&self, settings: ArrivalReplaySettings) -> WorkVariances {
        let bins_per_window = (LOAD_VARIANCE_WINDOW_US / settings.bin_duration_us()) as usize;
        let first_bin_index = (settings.warm_up_time_us / settings.bin_duration_us()) as usize;
        let last_bin_index =
            self.busy_us_by_core_and_bin.first().map_or(0, Vec::len) - 2 * TIME_BINS_PER_REPORT_INTERVAL as usize;
        let (mut servers_pct, mut cores_pct) = (Vec::new(), Vec::new());
        for start in (first_bin_index..(last_bin_index + 1).saturating_sub(bins_per_window)).step_by(bins_per_window) {
            let work_by_core: Vec<f64> = self
                .busy_us_by_core_and_bin
                .iter()
                .map(|bins| bins[start..start + bins_per_window].iter().sum::<u64>() as f64)
                .collect();
            let work_by_server: Vec<f64> =
                work_by_core.chunks(usize::from(settings.cores_per_server)).map(|cores| cores.iter().sum()).collect();
            servers_pct.extend(variance_pct(&work_by_server));
            cores_pct.extend(variance_pct(&work_by_core));
        }
        WorkVariances {
            across_servers_pct: mean(&servers_pct).unwrap_or(0.0),
            across_cores_pct: mean(&cores_pct).unwrap_or(0.0),
        }
    }
}

/// Number of the random-number stream ([`seeded_rng`]) from which the replayed fleet's RSS key is drawn.
const RSS_KEY_RNG_STREAM: u64 = 4;
/// Number of the random-number stream ([`seeded_rng`]) from which a replayed fleet's ids and RSS key are drawn.
const DRAWN_FLEET_RNG_STREAM: u64 = 5;
/// Number of the random-number stream ([`seeded_rng`]) from which report phases are drawn
/// ([`ReplayReportPhase::Random`]).
const REPORT_PHASE_RNG_STREAM: u64 = 7;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival_log::ConnectionWorkload;
    use crate::statistics::median;

    /// Seeds of the replays, which were chosen before any result was known.
    const REPLAY_SEEDS: std::ops::RangeInclusive<u64> = 1..=7;

    fn median_variances(policy_name: &str) -> WorkVariances {
        let variances_for_seed = |seed| {
            let settings = ArrivalReplaySettings { seed, ..ArrivalReplaySettings::default() };
            let mut policy = crate::policy::create_policy_by_name(policy_name, seed).unwrap();
            replay_for_variances(
                &ConnectionWorkload::default().generate(seed),
                settings,
                ReplayPlacementMethod::Policy(policy.as_mut()),
            )
        };
        let variances_by_seed: Vec<WorkVariances> = REPLAY_SEEDS.map(variances_for_seed).collect();
        let median_variance = |value: fn(&WorkVariances) -> f64| {
            median(&variances_by_seed.iter().map(value).collect::<Vec<_>>()).unwrap()
        };
        WorkVariances {
            across_servers_pct: median_variance(|v| v.across_servers_pct),
            across_cores_pct: median_variance(|v| v.across_cores_pct),
        }
    }

    #[test]
    fn core_aware_policies_have_less_variance_than_others() {
        let [hash, rr, crossrss, plus] = ["hash", "rr", "crossrss", "crossrss-plus"].map(median_variances);
        let oracle = replay_for_variances(
            &ConnectionWorkload::default().generate(1),
            ArrivalReplaySettings::default(),
            ReplayPlacementMethod::Oracle,
        );
        println!("hash {hash:?}\nrr {rr:?}\ncrossrss {crossrss:?}\ncrossrss-plus {plus:?}\noracle {oracle:?}");
        assert!(crossrss.across_cores_pct * 5.0 <= hash.across_cores_pct, "crossrss {crossrss:?}, hash {hash:?}");
        assert!(crossrss.across_servers_pct <= rr.across_servers_pct, "crossrss {crossrss:?}, rr {rr:?}");
        assert!(plus.across_cores_pct <= crossrss.across_cores_pct, "crossrss-plus {plus:?}, crossrss {crossrss:?}");
        assert!(oracle.across_cores_pct <= plus.across_cores_pct, "oracle {oracle:?}, crossrss-plus {plus:?}");
    }

    #[test]
    fn server_that_left_the_pool_still_serves_its_open_connections() {
        let log = ConnectionWorkload { duration_us: 8_000_000, ..ConnectionWorkload::default() }.generate(3);
        let pool_change = |second: u64, server, is_eligible| ReplayPoolChange {
            time_us: second * 1_000_000,
            server_index: server,
            is_eligible,
        };
        let changes = [pool_change(0, 4, false), pool_change(3, 4, true), pool_change(4, 0, false)];
        let settings = ArrivalReplaySettings { server_count: 5, ..ArrivalReplaySettings::default() };
        let mut policy = crate::policy::create_policy_by_name("rr", 1).unwrap();
        let busy_ns_by_second = replay_for_busy_times(&log, settings, &changes, policy.as_mut());
        assert_eq!(busy_ns_by_second.len(), 9);
        let served_ns = |server: usize, first_second: usize, last_second: usize| -> u64 {
            (server * 4..server * 4 + 4)
                .map(|core| busy_ns_by_second[last_second][core] - busy_ns_by_second[first_second][core])
                .sum()
        };
        assert_eq!(served_ns(4, 0, 3), 0);
        assert!(served_ns(4, 3, 8) > 1_000_000_000, "{}", served_ns(4, 3, 8));
        // Elephant flows stay, so server 0 continues to serve, but less than the other servers.
        assert!((1..served_ns(1, 5, 8)).contains(&served_ns(0, 5, 8)), "{} {}", served_ns(0, 5, 8), served_ns(1, 5, 8));
    }

    #[test]
    fn report_age_equals_the_report_phase_of_its_agent() {
        let log = ConnectionWorkload { duration_us: 8_000_000, ..ConnectionWorkload::default() }.generate(3);
        let settings =
            ArrivalReplaySettings { report_phase: ReplayReportPhase::Random, ..ArrivalReplaySettings::default() };
        let plan = SimulatedFleetShape {
            server_count: settings.server_count,
            cores_per_server: settings.cores_per_server,
            bucket_count: settings.bucket_count,
            load_ewma_alpha: settings.load_ewma_alpha,
            indirection_table_draw_method: IndirectionTableFillRule::Balanced,
        };
        let plan = plan.draw_plan(&mut seeded_rng(1, DRAWN_FLEET_RNG_STREAM));
        let mut state = ReplayState::new(&log, settings, plan);
        state.report_age_bins_by_server = vec![0, 15, 45, 25];
        (0..4).for_each(|server| state.serve_request(server * 4, 0, 150_000));
        let mut policy = crate::policy::create_policy_by_name("crossrss", 1).unwrap();
        let mut placement_method = ReplayPlacementMethod::Policy(policy.as_mut());
        let mut reported_busy_us_at = |now_us| {
            state.collect_reports_and_install_table(now_us, &mut placement_method);
            [0, 4, 8, 12].map(|core| state.reported_busy_us_by_core[core])
        };
        assert_eq!(reported_busy_us_at(0), [0; 4]);
        assert_eq!(reported_busy_us_at(100_000), [100_000, 70_000, 10_000, 50_000]);
        assert_eq!(reported_busy_us_at(200_000), [150_000, 150_000, 110_000, 150_000]);
    }

    #[test]
    fn replays_of_equal_logs_give_equal_variances() {
        let log = ConnectionWorkload { duration_us: 8_000_000, ..ConnectionWorkload::default() }.generate(3);
        let replay_once = || {
            let mut policy = crate::policy::create_policy_by_name("crossrss-plus", 1).unwrap();
            replay_for_variances(&log, ArrivalReplaySettings::default(), ReplayPlacementMethod::Policy(policy.as_mut()))
        };
        assert_eq!(replay_once(), replay_once());
    }
}
