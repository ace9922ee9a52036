//! Replay of an arrival log in virtual time, on a [`SimulatedCluster`] whose cores serve one request at a time. The
//! demo uses it for the noise floor; the policies' tests compare policies with it.

use crate::ServerId;
use crate::arrivals::{Arrival, ArrivalLog};
use crate::fleet::{FleetPlan, FleetShape, SimulatedCluster, TableDraw};
use crate::load::Alpha;
use crate::placement::BucketCount;
use crate::policy::Policy;
use crate::rss::{RssKey, seeded_rng, uniform_below};
use crate::statistics::{mean, variance_pct};

/// Settings of the replay of an arrival log.
#[derive(Debug, Clone, Copy)]
pub struct ReplaySettings {
    /// Number of servers, whose ids are 1 to this number.
    pub server_count: u16,
    /// Number of cores of each server.
    pub core_count: u16,
    /// Number of buckets of the placement table, and of entries of each indirection table.
    pub buckets: BucketCount,
    /// Time between two reports, and between two placement tables (us).
    pub report_interval_us: u64,
    /// Weight of the newest report in the moving averages of the loads.
    pub alpha: Alpha,
    /// Phase of the agents' reports and of round-robin turns.
    pub report_phase: ReportPhase,
    /// Warm-up time (us): windows that start before it are omitted.
    pub warm_up_us: u64,
    /// Seed from which the fleet's RSS key is drawn.
    pub seed: u64,
}

impl Default for ReplaySettings {
    /// Returns the paper's pool: 4 servers of 4 cores, 128 buckets, reports at 10 Hz (CrossRSS, CoNEXT'20, Sect. 3).
    fn default() -> Self {
        Self {
            server_count: 4,
            core_count: 4,
            buckets: BucketCount::PUBLISHED,
            report_interval_us: 100_000,
            alpha: Alpha::PUBLISHED,
            report_phase: ReportPhase::Aligned,
            warm_up_us: 5_000_000,
            seed: 1,
        }
    }
}

/// Phase of the agents' reports and of round-robin turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportPhase {
    /// All agents measure at the time of the placement table; round robin starts with the first server.
    Aligned,
    /// As in operation: each agent's clock starts at a random time, so its reports are up to a report interval old at a
    /// table. Round robin continues after earlier connections.
    Random,
}

/// Mean variances over the windows of 1 s after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Variances {
    /// Variance of the work of servers (%).
    pub server_pct: f64,
    /// Variance of the work of cores (%).
    pub core_pct: f64,
}

impl ReplaySettings {
    fn bin_us(&self) -> u64 {
        self.report_interval_us / BINS_PER_REPORT
    }
}

/// Method by which connections are placed on cores.
pub enum Placer<'a> {
    /// A policy places connections on servers, and RSS on cores, as in operation.
    Policy(&'a mut dyn Policy),
    /// Each connection goes to the core on which its requests add least to the sum of squares of the work per core and
    /// window. Every future request is known, as in no real balancer: the remaining variance is the noise floor.
    Oracle,
}

const WINDOW_US: u64 = 1_000_000;
/// Number of bins of a report interval in which work is counted: 2 ms of the demo's 100 ms, small compared with a
/// request's 7.5 ms. With bins of 10 ms, reports would be 5 ms too young on average, which the variances of
/// crossrss-plus show.
const BINS_PER_REPORT: u64 = 50;

/// Event in a replay: a server starts or stops taking new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolChange {
    /// Time of the change (us after the log's start).
    pub at_us: u64,
    /// Index of the server, from 0.
    pub server: u16,
    /// Whether the server takes new connections from this time on.
    pub eligible: bool,
}

/// Replays the log, and returns the variances of the work that servers and cores performed.
pub fn replay(log: &ArrivalLog, pools: ReplaySettings, placer: Placer<'_>) -> Variances {
    let id = |number: u16| ServerId::try_from(u64::from(number)).expect("few servers");
    let plan = FleetPlan {
        servers: (1..=pools.server_count).map(id).collect(),
        cores_per_server: pools.core_count,
        buckets: pools.buckets,
        alpha: pools.alpha,
        key: RssKey::random(&mut seeded_rng(pools.seed, RNG_STREAM_RSS_KEY)),
        tables: TableDraw::Balanced,
    };
    run_replay(log, pools, plan, &[], placer).variances(pools)
}

/// Replays the log on a fleet with random ids while the pool changes. Returns the total busy time of every core (ns) at
/// the beginning of each second and at the end of the last. `changes` are in the order of their times.
pub fn replay_by_second(
    log: &ArrivalLog,
    pools: ReplaySettings,
    changes: &[PoolChange],
    policy: &mut dyn Policy,
) -> Vec<Vec<u64>> {
    let ReplaySettings { server_count, core_count, buckets, alpha, .. } = pools;
    let shape = FleetShape { server_count, cores_per_server: core_count, buckets, alpha, tables: TableDraw::Balanced };
    let plan = shape.draw_plan(&mut seeded_rng(pools.seed, RNG_STREAM_SERVERS));
    let datacentre = run_replay(log, pools, plan, changes, Placer::Policy(policy));
    let bins_per_second = (WINDOW_US / pools.bin_us()) as usize;
    let seconds = (log.duration_us / WINDOW_US) as usize;
    let busy_ns = |bins: &Vec<u64>, second: usize| bins[..second * bins_per_second].iter().sum::<u64>() * 1_000;
    (0..=seconds).map(|second| datacentre.busy_us.iter().map(|bins| busy_ns(bins, second)).collect()).collect()
}

fn run_replay(
    log: &ArrivalLog,
    pools: ReplaySettings,
    plan: FleetPlan,
    changes: &[PoolChange],
    mut placer: Placer<'_>,
) -> ReplayState {
    let mut datacentre = ReplayState::new(log, pools, plan);
    let mut changes = changes.iter().peekable();
    let mut requests: Vec<(u64, usize)> = Vec::new();
    for (connection, arrival) in log.arrivals.iter().enumerate() {
        requests.extend((0..arrival.request_count).map(|index| (arrival.due_us(index), connection)));
    }
    requests.sort_unstable();
    let mut core_of = vec![usize::MAX; log.arrivals.len()];
    let mut next_tick_us = 0;
    for (due_us, connection) in requests {
        while next_tick_us <= due_us {
            while let Some(change) = changes.next_if(|change| change.at_us <= next_tick_us) {
                datacentre.fleet.set_eligible(usize::from(change.server), change.eligible);
            }
            datacentre.tick(next_tick_us, &mut placer);
            next_tick_us += pools.report_interval_us;
        }
        if core_of[connection] == usize::MAX {
            core_of[connection] = datacentre.place(log, connection, &placer);
        }
        datacentre.serve(core_of[connection], due_us, u64::from(log.arrivals[connection].service_us));
    }
    datacentre
}

struct ReplayState {
    settings: ReplaySettings,
    fleet: SimulatedCluster,
    /// Time at which each core (in the fleet's numbering) is free next, and its busy time by bin.
    core_free_at_us: Vec<u64>,
    busy_us: Vec<Vec<u64>>,
    /// Busy time of each core as last reported, and the number of bins that were included.
    reported_busy_us: Vec<u64>,
    reported_bins: Vec<usize>,
    /// Age of each server's report at the time of a table, in bins.
    report_age_bins: Vec<usize>,
    /// Times at which the open connections of each core end (us).
    connection_ends_us: Vec<Vec<u64>>,
    /// Work of all connections placed so far, by core and by the window in which it is due (us).
    planned_work_us: Vec<Vec<u64>>,
}

impl ReplayState {
    fn new(log: &ArrivalLog, settings: ReplaySettings, plan: FleetPlan) -> Self {
        let mut fleet = SimulatedCluster::new(plan).expect("as many entries as buckets");
        let (cores, bins) = (fleet.core_count(), (log.duration_us / settings.bin_us() + 2 * BINS_PER_REPORT) as usize);
        let mut rng = seeded_rng(settings.seed, RNG_STREAM_REPORT_PHASES);
        let report_age_bins = match settings.report_phase {
            ReportPhase::Aligned => vec![0; usize::from(settings.server_count)],
            ReportPhase::Random => {
                fleet.set_round_robin_turn(uniform_below(&mut rng, u32::MAX).into());
                (0..settings.server_count).map(|_| uniform_below(&mut rng, BINS_PER_REPORT as u32) as usize).collect()
            }
        };
        Self {
            report_age_bins,
            reported_bins: vec![0; cores],
            settings,
            fleet,
            core_free_at_us: vec![0; cores],
            busy_us: vec![vec![0; bins]; cores],
            reported_busy_us: vec![0; cores],
            connection_ends_us: vec![Vec::new(); cores],
            planned_work_us: vec![vec![0; (log.duration_us / WINDOW_US + 2) as usize]; cores],
        }
    }

    /// Makes the agents report, computes a placement table and installs it.
    fn tick(&mut self, now_us: u64, placer: &mut Placer<'_>) {
        let bin_us = self.settings.bin_us();
        let bin = (now_us / bin_us) as usize;
        for core in 0..self.core_free_at_us.len() {
            let reported_end = bin.saturating_sub(self.report_age_bins[core / usize::from(self.settings.core_count)]);
            let new = self.busy_us[core].iter().take(reported_end).skip(self.reported_bins[core]);
            self.reported_busy_us[core] += new.sum::<u64>();
            self.reported_bins[core] = reported_end;
            self.connection_ends_us[core].retain(|end_us| *end_us > now_us);
        }
        let Placer::Policy(policy) = placer else { return };
        let measured_ns = |age: &usize| bin.checked_sub(*age).map(|bin| bin as u64 * bin_us * 1_000);
        let measured_ns: Vec<Option<u64>> = self.report_age_bins.iter().map(measured_ns).collect();
        let busy_ns: Vec<u64> = self.reported_busy_us.iter().map(|us| us * 1_000).collect();
        let of_servers = self.connection_ends_us.chunks(usize::from(self.settings.core_count));
        let open: Vec<u32> = of_servers.map(|cores| cores.iter().map(|open| open.len() as u32).sum()).collect();
        self.fleet.report_measured_at(&measured_ns, &busy_ns, &open, *policy);
    }

    fn place(&mut self, log: &ArrivalLog, connection: usize, placer: &Placer<'_>) -> usize {
        let arrival = &log.arrivals[connection];
        let core = match placer {
            Placer::Policy(_) => self.fleet.place(&arrival.four_tuple()),
            Placer::Oracle => self.least_added_square(arrival),
        };
        for index in 0..arrival.request_count {
            self.planned_work_us[core][(arrival.due_us(index) / WINDOW_US) as usize] += u64::from(arrival.service_us);
        }
        self.connection_ends_us[core].push(arrival.last_due_us() + u64::from(arrival.service_us));
        core
    }

    /// Returns the core on which the connection adds least to the sum of squares. Adding w to a core's x adds 2xw +
    /// w^2; w^2 is the same on every core.
    fn least_added_square(&self, arrival: &Arrival) -> usize {
        let windows: Vec<usize> =
            (0..arrival.request_count).map(|index| (arrival.due_us(index) / WINDOW_US) as usize).collect();
        let added = |core: &usize| -> u64 { windows.iter().map(|window| self.planned_work_us[*core][*window]).sum() };
        (0..self.connection_ends_us.len()).min_by_key(added).expect("at least one core")
    }

    fn serve(&mut self, core: usize, due_us: u64, service_us: u64) {
        let start_us = self.core_free_at_us[core].max(due_us);
        let end_us = start_us + service_us;
        self.core_free_at_us[core] = end_us;
        let bin_us = self.settings.bin_us();
        let mut from_us = start_us;
        while from_us < end_us {
            let bin = from_us / bin_us;
            let until_us = end_us.min((bin + 1) * bin_us);
            if let Some(busy_us) = self.busy_us[core].get_mut(bin as usize) {
                *busy_us += until_us - from_us;
            }
            from_us = until_us;
        }
    }

    fn variances(&self, pools: ReplaySettings) -> Variances {
        let bins_per_window = (WINDOW_US / pools.bin_us()) as usize;
        let first = (pools.warm_up_us / pools.bin_us()) as usize;
        let last = self.busy_us.first().map_or(0, Vec::len) - 2 * BINS_PER_REPORT as usize;
        let (mut servers_pct, mut cores_pct) = (Vec::new(), Vec::new());
        for start in (first..(last + 1).saturating_sub(bins_per_window)).step_by(bins_per_window) {
            let work: Vec<f64> = self
                .busy_us
                .iter()
                .map(|bins| bins[start..start + bins_per_window].iter().sum::<u64>() as f64)
                .collect();
            let of_servers: Vec<f64> =
                work.chunks(usize::from(pools.core_count)).map(|cores| cores.iter().sum()).collect();
            servers_pct.extend(variance_pct(&of_servers));
            cores_pct.extend(variance_pct(&work));
        }
        Variances { server_pct: mean(&servers_pct).unwrap_or(0.0), core_pct: mean(&cores_pct).unwrap_or(0.0) }
    }
}

/// Stream of [`seeded_rng`] from which the replayed fleet's RSS key is drawn.
const RNG_STREAM_RSS_KEY: u64 = 4;
/// Stream of [`seeded_rng`] from which ids and RSS key of a replayed fleet are drawn.
const RNG_STREAM_SERVERS: u64 = 5;
/// Stream of [`seeded_rng`] from which the phases of [`ReportPhase::Random`] are drawn.
const RNG_STREAM_REPORT_PHASES: u64 = 7;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrivals::Workload;
    use crate::statistics::median;

    /// Seeds of the replays, fixed before any result was known.
    const SEEDS: std::ops::RangeInclusive<u64> = 1..=7;

    fn medians(policy: &str) -> Variances {
        let of_seed = |seed| {
            let pools = ReplaySettings { seed, ..ReplaySettings::default() };
            let mut policy = crate::policy::policy_by_name(policy, seed).unwrap();
            replay(&Workload::default().generate(seed), pools, Placer::Policy(policy.as_mut()))
        };
        let all: Vec<Variances> = SEEDS.map(of_seed).collect();
        let median_of = |value: fn(&Variances) -> f64| median(&all.iter().map(value).collect::<Vec<_>>()).unwrap();
        Variances { server_pct: median_of(|v| v.server_pct), core_pct: median_of(|v| v.core_pct) }
    }

    #[test]
    fn core_aware_policies_have_less_variance() {
        let [hash, rr, crossrss, plus] = ["hash", "rr", "crossrss", "crossrss-plus"].map(medians);
        let oracle = replay(&Workload::default().generate(1), ReplaySettings::default(), Placer::Oracle);
        println!("hash {hash:?}\nrr {rr:?}\ncrossrss {crossrss:?}\ncrossrss-plus {plus:?}\noracle {oracle:?}");
        assert!(crossrss.core_pct * 5.0 <= hash.core_pct, "crossrss {crossrss:?}, hash {hash:?}");
        assert!(crossrss.server_pct <= rr.server_pct, "crossrss {crossrss:?}, rr {rr:?}");
        assert!(plus.core_pct <= crossrss.core_pct, "crossrss-plus {plus:?}, crossrss {crossrss:?}");
        assert!(oracle.core_pct <= plus.core_pct, "oracle {oracle:?}, crossrss-plus {plus:?}");
    }

    #[test]
    fn removed_server_serves_its_open_connections() {
        let log = Workload { duration_us: 8_000_000, ..Workload::default() }.generate(3);
        let change = |second: u64, server, eligible| PoolChange { at_us: second * 1_000_000, server, eligible };
        let changes = [change(0, 4, false), change(3, 4, true), change(4, 0, false)];
        let pools = ReplaySettings { server_count: 5, ..ReplaySettings::default() };
        let mut policy = crate::policy::policy_by_name("rr", 1).unwrap();
        let busy = replay_by_second(&log, pools, &changes, policy.as_mut());
        assert_eq!(busy.len(), 9);
        let served = |server: usize, from: usize, to: usize| -> u64 {
            (server * 4..server * 4 + 4).map(|core| busy[to][core] - busy[from][core]).sum()
        };
        assert_eq!(served(4, 0, 3), 0);
        assert!(served(4, 3, 8) > 1_000_000_000, "{}", served(4, 3, 8));
        // Elephant flows stay: server 0 continues to serve, but less than the other servers.
        assert!((1..served(1, 5, 8)).contains(&served(0, 5, 8)), "{} {}", served(0, 5, 8), served(1, 5, 8));
    }

    #[test]
    fn agents_with_random_phase_are_read_at_their_times() {
        let log = Workload { duration_us: 8_000_000, ..Workload::default() }.generate(3);
        let pools = ReplaySettings { report_phase: ReportPhase::Random, ..ReplaySettings::default() };
        let plan = FleetShape {
            server_count: pools.server_count,
            cores_per_server: pools.core_count,
            buckets: pools.buckets,
            alpha: pools.alpha,
            tables: TableDraw::Balanced,
        };
        let plan = plan.draw_plan(&mut seeded_rng(1, RNG_STREAM_SERVERS));
        let mut datacentre = ReplayState::new(&log, pools, plan);
        datacentre.report_age_bins = vec![0, 15, 45, 25];
        (0..4).for_each(|server| datacentre.serve(server * 4, 0, 150_000));
        let mut policy = crate::policy::policy_by_name("crossrss", 1).unwrap();
        let mut placer = Placer::Policy(policy.as_mut());
        let mut reported = |now_us| {
            datacentre.tick(now_us, &mut placer);
            [0, 4, 8, 12].map(|core| datacentre.reported_busy_us[core])
        };
        assert_eq!(reported(0), [0; 4]);
        assert_eq!(reported(100_000), [100_000, 70_000, 10_000, 50_000]);
        assert_eq!(reported(200_000), [150_000, 150_000, 110_000, 150_000]);
    }

    #[test]
    fn equal_logs_give_equal_results() {
        let log = Workload { duration_us: 8_000_000, ..Workload::default() }.generate(3);
        let run = || {
            let mut policy = crate::policy::policy_by_name("crossrss-plus", 1).unwrap();
            replay(&log, ReplaySettings::default(), Placer::Policy(policy.as_mut()))
        };
        assert_eq!(run(), run());
    }
}
