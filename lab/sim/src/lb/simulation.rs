//! Simulation of one policy and seed: the fleet of a live system, with packets of a trace.

use coreward_model::fleet::{FleetShape, Racks, SimulatedCluster};
use coreward_model::placement::PlacementTable;
use coreward_model::policy::{self, Policy};
use coreward_model::rss::seeded_rng;
use coreward_model::statistics::{mean, variance_pct};

use super::cores::{Capacity, Cores};
use super::history::HistoryLoad;
use super::oracle::{ORACLE, Oracle};
use super::outcome::SeedResult;
use super::{Config, Error};
use crate::names::UnknownName;
use crate::trace::{Batch, Packet};

/// Stream of [`seeded_rng`] that draws the server ids and the fleet's RSS key.
const RNG_STREAM_SERVERS: u64 = 21;

/// Maximum number of reports in a pause of the trace, after which the remaining ones are skipped: all loads are then 0
/// (0.5^1000), so reports have no effect. A capture with a gap of a year would otherwise take a day.
const MAX_REPORTS_PER_GAP: u64 = 1_000;

/// How new connections are placed: by a policy or by the oracle.
enum Placer {
    Policy(Box<dyn Policy>),
    Oracle(Oracle),
}

/// Results of the measured windows so far, with one value per window.
#[derive(Debug, Default)]
struct Windows {
    server_variance_pct: Vec<f64>,
    core_variance_pct: Vec<f64>,
    max_over_mean: Vec<f64>,
}

#[derive(Debug, Clone)]
struct Counters {
    entered: Vec<u64>,
    served: Vec<u64>,
    dropped: u64,
    bytes: u64,
    time_ns: u64,
}

/// Simulation of a fleet under one policy and seed.
pub struct Simulation {
    placer: Placer,
    fleet: SimulatedCluster,
    cores_of_server: usize,
    cores: Cores,
    history: HistoryLoad,
    history_ns: u64,
    core_of_flow: Vec<u16>,
    open_connections: Vec<u32>,
    report_interval_ns: u64,
    window_ns: u64,
    next_report_ns: u64,
    /// Time from the reports until the table computed from them is in force (ns).
    table_delay_ns: u64,
    pending_table: Option<(u64, PlacementTable)>,
    next_window_ns: u64,
    /// Counters at the end of the newest window, and of the first, unmeasured window.
    last_counters: Counters,
    first_counters: Option<Counters>,
    windows: Windows,
}

impl Simulation {
    /// Creates the simulation. Fails when the policy does not exist.
    pub fn new(config: &Config, policy: &str, seed: u64, capacity: Capacity, history_ns: u64) -> Result<Self, Error> {
        let mut rng = seeded_rng(seed, RNG_STREAM_SERVERS);
        let Config { servers, cores, buckets, alpha, tables, .. } = *config;
        let plan =
            FleetShape { server_count: servers, cores_per_server: cores, buckets, alpha, tables }.draw_plan(&mut rng);
        let mut fleet = SimulatedCluster::new(plan).expect("as many entries as buckets");
        let core_count = fleet.core_count();
        let placer = match policy {
            ORACLE => Placer::Oracle(Oracle::new(core_count)),
            name => Placer::Policy(policy::policy_by_name(name, seed).map_err(|_| unknown_policy(name))?),
        };
        if let (Some(racks), Placer::Policy(_)) = (config.racks, &placer) {
            let policies = (0..racks).map(|_| policy::policy_by_name(policy, seed).expect("the controller has one"));
            fleet.set_racks(Racks { policies: policies.collect(), candidates: config.rack_candidates.into() });
        }
        let last_counters =
            Counters { entered: vec![0; core_count], served: vec![0; core_count], dropped: 0, bytes: 0, time_ns: 0 };
        Ok(Self {
            placer,
            fleet,
            cores_of_server: usize::from(config.cores),
            cores: Cores::new(core_count, capacity),
            history: HistoryLoad::new(core_count, capacity, history_ns),
            history_ns,
            core_of_flow: Vec::new(),
            open_connections: vec![0; usize::from(config.servers)],
            report_interval_ns: u64::from(config.report_ms) * 1_000_000,
            window_ns: u64::from(config.window_ms) * 1_000_000,
            next_report_ns: 0,
            table_delay_ns: u64::from(config.table_delay_ms) * 1_000_000,
            pending_table: None,
            next_window_ns: history_ns + u64::from(config.window_ms) * 1_000_000,
            last_counters,
            first_counters: None,
            windows: Windows::default(),
        })
    }

    /// Processes a batch of packets. Fails when the oracle does not know a flow's rate.
    pub fn process_batch(&mut self, batch: &Batch) -> Result<(), Error> {
        let mut openings = batch.openings.iter();
        for packet in &batch.packets {
            if packet.time_ns >= self.next_report_ns.min(self.next_window_ns) {
                self.advance(packet.time_ns);
            }
            self.install_due_table(packet.time_ns);
            if packet.event.opens() {
                self.open_flow(packet, openings.next().expect("one for each flow that opens"))?;
            }
            let core = usize::from(self.core_of_flow[packet.flow as usize]);
            if packet.event.is_packet() {
                self.cores.enter(core, packet.time_ns, packet.bytes);
            }
            if packet.event.closes() {
                self.close_flow(packet, core);
            }
        }
        Ok(())
    }

    fn open_flow(&mut self, packet: &Packet, opening: &crate::trace::FirstPacket) -> Result<(), Error> {
        let core = match &mut self.placer {
            Placer::Policy(_) => self.fleet.place(&opening.tuple),
            Placer::Oracle(oracle) => {
                let reachable = self.fleet.reachable_cores(&opening.tuple);
                oracle.place(packet.flow, opening, reachable).ok_or(Error::OracleNeedsRates)?
            }
        };
        let flow = packet.flow as usize;
        if self.core_of_flow.len() <= flow {
            self.core_of_flow.resize(flow + 1, 0);
        }
        self.core_of_flow[flow] = core as u16;
        self.open_connections[core / self.cores_of_server] += 1;
        if packet.time_ns < self.history_ns {
            let rate = opening.rate_pps.expect("a history knows rates");
            self.history.begin(packet.flow, core, rate, packet.time_ns);
        }
        Ok(())
    }

    fn close_flow(&mut self, packet: &Packet, core: usize) {
        self.open_connections[core / self.cores_of_server] -= 1;
        if let Placer::Oracle(oracle) = &mut self.placer {
            oracle.close(packet.flow, core);
        }
        if packet.time_ns < self.history_ns {
            self.history.end(packet.flow, core, packet.time_ns);
        }
    }

    /// Processes reports and ends of windows up to `now_ns`.
    fn advance(&mut self, now_ns: u64) {
        let mut reports_left = MAX_REPORTS_PER_GAP;
        while self.next_report_ns.min(self.next_window_ns) <= now_ns {
            if self.next_report_ns <= self.next_window_ns {
                self.process_reports(self.next_report_ns);
                self.next_report_ns += self.report_interval_ns;
                reports_left = reports_left.saturating_sub(1);
                if reports_left == 0 {
                    // Skips to the last report that is due.
                    self.next_report_ns +=
                        now_ns.saturating_sub(self.next_report_ns) / self.report_interval_ns * self.report_interval_ns;
                }
            } else {
                self.close_window(self.next_window_ns);
                self.next_window_ns += self.window_ns;
                // A window without packets is not measured, so a long pause skips its windows.
                let empty = now_ns.saturating_sub(self.next_window_ns) / self.window_ns;
                if empty > MAX_REPORTS_PER_GAP {
                    self.next_window_ns += empty * self.window_ns;
                }
            }
        }
    }

    fn process_reports(&mut self, now_ns: u64) {
        // Before the next reports, whose assigned connections belong to the previous table.
        self.install_due_table(now_ns);
        let Placer::Policy(policy) = &mut self.placer else { return };
        let in_history = self.history.busy_ns(now_ns).iter();
        let busy_ns: Vec<u64> =
            self.cores.busy_ns(now_ns).zip(in_history).map(|(new, old)| new + *old as u64).collect();
        let table = self.fleet.prepare(now_ns, &busy_ns, &self.open_connections, policy.as_mut());
        // The first table is in force immediately, because no table precedes it.
        let in_force_ns = if now_ns == 0 { 0 } else { now_ns + self.table_delay_ns };
        self.pending_table = Some((in_force_ns, table));
        self.install_due_table(now_ns);
    }

    /// Installs the pending table if it is due.
    fn install_due_table(&mut self, now_ns: u64) {
        if let Some((_, table)) = self.pending_table.take_if(|(in_force_ns, _)| *in_force_ns <= now_ns) {
            self.fleet.install_table(table);
        }
    }

    fn close_window(&mut self, now_ns: u64) {
        let counters = Counters {
            entered: self.cores.arrived_packets().to_vec(),
            served: self.cores.served_packets(now_ns).collect(),
            dropped: self.cores.dropped_packets(),
            bytes: self.cores.bytes(),
            time_ns: now_ns,
        };
        let since = |new: &[u64], old: &[u64]| -> Vec<f64> {
            new.iter().zip(old).map(|(new, old)| (new - old) as f64).collect()
        };
        if self.first_counters.is_some() {
            let entered = since(&counters.entered, &self.last_counters.entered);
            let served = since(&counters.served, &self.last_counters.served);
            let of_servers: Vec<f64> = entered.chunks(self.cores_of_server).map(|cores| cores.iter().sum()).collect();
            self.windows.server_variance_pct.extend(variance_pct(&of_servers));
            self.windows.core_variance_pct.extend(variance_pct(&served));
            let largest = served.iter().copied().fold(0.0, f64::max);
            self.windows.max_over_mean.extend(mean(&served).filter(|mean| *mean > 0.0).map(|mean| largest / mean));
        } else {
            self.first_counters = Some(counters.clone());
        }
        self.last_counters = counters;
    }

    /// Ends the simulation at the end of the trace and returns its results; `None` if no window was measured.
    pub fn finish(mut self, end_ns: u64) -> Option<SeedResult> {
        self.advance(end_ns);
        // A capture of n seconds ends slightly before the n-th window.
        if end_ns >= self.next_window_ns - self.window_ns / 20 {
            self.close_window(end_ns);
        }
        let first = self.first_counters?;
        let sum = |counters: &[u64]| counters.iter().sum::<u64>() as f64;
        let seconds = (self.last_counters.time_ns - first.time_ns) as f64 / 1e9;
        let entered = sum(&self.last_counters.entered) - sum(&first.entered);
        Some(SeedResult {
            server_variance_pct: mean(&self.windows.server_variance_pct)?,
            core_variance_pct: mean(&self.windows.core_variance_pct)?,
            max_over_mean: mean(&self.windows.max_over_mean)?,
            dropped_pct: (self.last_counters.dropped - first.dropped) as f64 / entered * 100.0,
            throughput_pps: (sum(&self.last_counters.served) - sum(&first.served)) / seconds,
            throughput_gbps: (self.last_counters.bytes - first.bytes) as f64 * 8.0 / seconds / 1e9,
        })
    }
}

pub fn unknown_policy(name: &str) -> UnknownName {
    UnknownName::new("policy", name, policy::names().into_iter().chain([ORACLE]))
}
