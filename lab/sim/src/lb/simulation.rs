//! Simulation of one policy and seed, in which the packets of a trace reach a fleet like a live system's.

use coreward_model::fleet::{RackControllers, SimulatedCluster, SimulatedFleetShape};
use coreward_model::placement::PlacementTable;
use coreward_model::policy::{self, PlacementPolicy};
use coreward_model::rss::seeded_rng;
use coreward_model::statistics::{mean, variance_pct};

use super::cores::{CorePacketCapacity, SimulatedCores};
use super::history::TraceHistoryLoad;
use super::oracle::{ORACLE_POLICY_NAME, PlacementOracle};
use super::outcome::LbSeedResult;
use super::{LbSimulationConfig, LbSimulationError};
use crate::trace::{PacketBatch, TracePacket};
use crate::unknown_name::UnknownName;

/// Random stream of [`seeded_rng`] from which server ids and the fleet's RSS key are drawn.
const RNG_STREAM_SERVERS: u64 = 21;

/// Maximum number of reports processed in a pause of the trace. By then, all smoothed loads are 0 (0.5^1000), so
/// further reports have no effect and are skipped. Otherwise a capture with a gap of a year would take a day.
const MAX_REPORTS_PER_GAP: u64 = 1_000;

/// Policy or oracle that places new connections.
enum SimulatedPlacementMethod {
    Policy(Box<dyn PlacementPolicy>),
    Oracle(PlacementOracle),
}

impl SimulatedPlacementMethod {
    /// Returns the policy or oracle with this name. Fails when there is none.
    fn new(name: &str, seed: u64, core_count: usize) -> Result<Self, LbSimulationError> {
        match name {
            ORACLE_POLICY_NAME => Ok(Self::Oracle(PlacementOracle::new(core_count))),
            name => Ok(Self::Policy(
                policy::create_policy_by_name(name, seed).map_err(|_| build_unknown_policy_error(name))?,
            )),
        }
    }
}

/// Results of the windows measured so far. Each field has one value per window.
#[derive(Debug, Default)]
struct MeasuredWindowResults {
    server_variance_pct: Vec<f64>,
    core_variance_pct: Vec<f64>,
    max_over_mean: Vec<f64>,
}

#[derive(Debug, Clone)]
struct CoreCounterSnapshot {
    arrived_packet_counts: Vec<u64>,
    served_packet_counts: Vec<u64>,
    dropped_packet_count: u64,
    accepted_bytes: u64,
    time_ns: u64,
}

impl CoreCounterSnapshot {
    fn with_zero_counters(core_count: usize) -> Self {
        Self {
            arrived_packet_counts: vec![0; core_count],
            served_packet_counts: vec![0; core_count],
            dropped_packet_count: 0,
            accepted_bytes: 0,
            time_ns: 0,
        }
    }
}

/// Simulated fleet and load balancer under one policy and seed.
pub struct LbSimulation {
    placement_method: SimulatedPlacementMethod,
    fleet: SimulatedCluster,
    cores_per_server: usize,
    cores: SimulatedCores,
    history: TraceHistoryLoad,
    history_duration_ns: u64,
    core_by_flow: Vec<u16>,
    open_connection_counts_by_server: Vec<u32>,
    report_interval_ns: u64,
    window_ns: u64,
    next_report_ns: u64,
    /// Delay from the reports until the load balancer uses the table computed from them (ns).
    table_delay_ns: u64,
    pending_table: Option<(u64, PlacementTable)>,
    window_end_ns: u64,
    /// Counters at the end of the newest window.
    last_window_counters: CoreCounterSnapshot,
    /// Counters at the end of the first window, which is not measured, or `None` during this window.
    first_window_counters: Option<CoreCounterSnapshot>,
    window_results: MeasuredWindowResults,
}

fn build_random_fleet(config: &LbSimulationConfig, seed: u64) -> SimulatedCluster {
    let shape = SimulatedFleetShape {
        server_count: config.server_count,
        cores_per_server: config.cores_per_server,
        bucket_count: config.bucket_count,
        load_ewma_alpha: config.smoothing_weight,
        indirection_table_draw_method: config.indirection_table_fill_rule,
    };
    let plan = shape.draw_plan(&mut seeded_rng(seed, RNG_STREAM_SERVERS));
    SimulatedCluster::new(plan).expect("as many entries as buckets")
}

impl LbSimulation {
    /// Creates the simulation. Fails when no policy has the name `policy`.
    pub fn new(
        config: &LbSimulationConfig,
        policy: &str,
        seed: u64,
        capacity: CorePacketCapacity,
        history_ns: u64,
    ) -> Result<Self, LbSimulationError> {
        let mut fleet = build_random_fleet(config, seed);
        let core_count = fleet.core_count();
        let placement_method = SimulatedPlacementMethod::new(policy, seed, core_count)?;
        if let (Some(racks), SimulatedPlacementMethod::Policy(_)) = (config.rack_controller_count, &placement_method) {
            let policies =
                (0..racks).map(|_| policy::create_policy_by_name(policy, seed).expect("the controller has one"));
            fleet.set_rack_controllers(RackControllers {
                policy_by_rack: policies.collect(),
                max_candidates_per_bucket: config.rack_candidates_per_bucket.into(),
            });
        }
        Ok(Self {
            placement_method,
            fleet,
            cores_per_server: usize::from(config.cores_per_server),
            cores: SimulatedCores::new(core_count, capacity),
            history: TraceHistoryLoad::new(core_count, capacity, history_ns),
            history_duration_ns: history_ns,
            core_by_flow: Vec::new(),
            open_connection_counts_by_server: vec![0; usize::from(config.server_count)],
            report_interval_ns: u64::from(config.report_interval_ms) * 1_000_000,
            window_ns: u64::from(config.window_ms) * 1_000_000,
            next_report_ns: 0,
            table_delay_ns: u64::from(config.table_delay_ms) * 1_000_000,
            pending_table: None,
            window_end_ns: history_ns + u64::from(config.window_ms) * 1_000_000,
            last_window_counters: CoreCounterSnapshot::with_zero_counters(core_count),
            first_window_counters: None,
            window_results: MeasuredWindowResults::default(),
        })
    }

    /// Processes a batch of packets. Fails when the oracle does not know the rate of a flow.
    pub fn process_batch(&mut self, batch: &PacketBatch) -> Result<(), LbSimulationError> {
        let mut first_packets = batch.first_packets.iter();
        for packet in &batch.packets {
            if packet.time_ns >= self.next_report_ns.min(self.window_end_ns) {
                self.advance_to(packet.time_ns);
            }
            self.install_due_table(packet.time_ns);
            if packet.event.opens_flow() {
                self.open_flow(packet, first_packets.next().expect("one for each flow that opens"))?;
            }
            let core = usize::from(self.core_by_flow[packet.flow_number as usize]);
            if packet.event.has_packet() {
                self.cores.process_arrival(core, packet.time_ns, packet.wire_bytes);
            }
            if packet.event.closes_flow() {
                self.close_flow(packet, core);
            }
        }
        Ok(())
    }

    fn open_flow(
        &mut self,
        packet: &TracePacket,
        first_packet: &crate::trace::FlowFirstPacket,
    ) -> Result<(), LbSimulationError> {
        let core = match &mut self.placement_method {
            SimulatedPlacementMethod::Policy(_) => self.fleet.place_connection(&first_packet.tuple),
            SimulatedPlacementMethod::Oracle(oracle) => {
                let reachable_cores = self.fleet.reachable_core_indexes(&first_packet.tuple);
                oracle
                    .place_flow(packet.flow_number, first_packet, reachable_cores)
                    .ok_or(LbSimulationError::OracleNeedsRates)?
            }
        };
        let flow = packet.flow_number as usize;
        if self.core_by_flow.len() <= flow {
            self.core_by_flow.resize(flow + 1, 0);
        }
        self.core_by_flow[flow] = core as u16;
        self.open_connection_counts_by_server[core / self.cores_per_server] += 1;
        if packet.time_ns < self.history_duration_ns {
            let rate_pps = first_packet.flow_rate_pps.expect("a history knows rates");
            self.history.begin_flow(packet.flow_number, core, rate_pps, packet.time_ns);
        }
        Ok(())
    }

    fn close_flow(&mut self, packet: &TracePacket, core: usize) {
        self.open_connection_counts_by_server[core / self.cores_per_server] -= 1;
        if let SimulatedPlacementMethod::Oracle(oracle) = &mut self.placement_method {
            oracle.remove_flow(packet.flow_number, core);
        }
        if packet.time_ns < self.history_duration_ns {
            self.history.end_flow(packet.flow_number, core, packet.time_ns);
        }
    }

    /// Processes all reports and window ends that are due by `now_ns`.
    fn advance_to(&mut self, now_ns: u64) {
        let mut remaining_reports = MAX_REPORTS_PER_GAP;
        while self.next_report_ns.min(self.window_end_ns) <= now_ns {
            if self.next_report_ns <= self.window_end_ns {
                self.process_reports(self.next_report_ns);
                self.next_report_ns += self.report_interval_ns;
                remaining_reports = remaining_reports.saturating_sub(1);
                if remaining_reports == 0 {
                    // The remaining reports have no effect, so this skips to the last one that is due.
                    self.next_report_ns +=
                        now_ns.saturating_sub(self.next_report_ns) / self.report_interval_ns * self.report_interval_ns;
                }
            } else {
                self.close_window(self.window_end_ns);
                self.window_end_ns += self.window_ns;
                // A window without packets is not measured, so the windows of a long pause can be skipped.
                let empty_window_count = now_ns.saturating_sub(self.window_end_ns) / self.window_ns;
                if empty_window_count > MAX_REPORTS_PER_GAP {
                    self.window_end_ns += empty_window_count * self.window_ns;
                }
            }
        }
    }

    fn process_reports(&mut self, now_ns: u64) {
        // Connections assigned until now count for the previous table, so a due table is installed before new reports.
        self.install_due_table(now_ns);
        let SimulatedPlacementMethod::Policy(policy) = &mut self.placement_method else { return };
        let history_busy_ns = self.history.core_busy_ns(now_ns).iter();
        let busy_ns: Vec<u64> = self
            .cores
            .core_busy_ns(now_ns)
            .zip(history_busy_ns)
            .map(|(trace_ns, history_ns)| trace_ns + *history_ns as u64)
            .collect();
        let table = self.fleet.collect_reports_and_compute_table(
            now_ns,
            &busy_ns,
            &self.open_connection_counts_by_server,
            policy.as_mut(),
        );
        // The first table is used at once, because there is no earlier one.
        let active_from_ns = if now_ns == 0 { 0 } else { now_ns + self.table_delay_ns };
        self.pending_table = Some((active_from_ns, table));
        self.install_due_table(now_ns);
    }

    fn install_due_table(&mut self, now_ns: u64) {
        if let Some((_, table)) = self.pending_table.take_if(|(active_from_ns, _)| *active_from_ns <= now_ns) {
            self.fleet.install_table(table);
        }
    }

    fn close_window(&mut self, now_ns: u64) {
        let counters = CoreCounterSnapshot {
            arrived_packet_counts: self.cores.arrived_packet_counts().to_vec(),
            served_packet_counts: self.cores.served_packet_counts(now_ns).collect(),
            dropped_packet_count: self.cores.dropped_packet_count(),
            accepted_bytes: self.cores.accepted_bytes(),
            time_ns: now_ns,
        };
        let subtract_counters = |new: &[u64], old: &[u64]| -> Vec<f64> {
            new.iter().zip(old).map(|(new, old)| (new - old) as f64).collect()
        };
        if self.first_window_counters.is_some() {
            let arrived_packets =
                subtract_counters(&counters.arrived_packet_counts, &self.last_window_counters.arrived_packet_counts);
            let served_packets =
                subtract_counters(&counters.served_packet_counts, &self.last_window_counters.served_packet_counts);
            let server_packets: Vec<f64> =
                arrived_packets.chunks(self.cores_per_server).map(|cores| cores.iter().sum()).collect();
            self.window_results.server_variance_pct.extend(variance_pct(&server_packets));
            self.window_results.core_variance_pct.extend(variance_pct(&served_packets));
            let max_served_packets = served_packets.iter().copied().fold(0.0, f64::max);
            self.window_results
                .max_over_mean
                .extend(mean(&served_packets).filter(|mean| *mean > 0.0).map(|mean| max_served_packets / mean));
        } else {
            self.first_window_counters = Some(counters.clone());
        }
        self.last_window_counters = counters;
    }

    /// Ends the simulation at the end of the trace and returns its results, or `None` if no window was measured.
    pub fn into_result(mut self, end_ns: u64) -> Option<LbSeedResult> {
        self.advance_to(end_ns);
        // A capture of n seconds ends slightly before the n-th window does.
        if end_ns >= self.window_end_ns - self.window_ns / 20 {
            self.close_window(end_ns);
        }
        let first_window_counters = self.first_window_counters?;
        let sum_over_cores = |counters: &[u64]| counters.iter().sum::<u64>() as f64;
        let measured_seconds = (self.last_window_counters.time_ns - first_window_counters.time_ns) as f64 / 1e9;
        let arrived_packets = sum_over_cores(&self.last_window_counters.arrived_packet_counts)
            - sum_over_cores(&first_window_counters.arrived_packet_counts);
        Some(LbSeedResult {
            server_variance_pct: mean(&self.window_results.server_variance_pct)?,
            core_variance_pct: mean(&self.window_results.core_variance_pct)?,
            max_over_mean: mean(&self.window_results.max_over_mean)?,
            dropped_pct: (self.last_window_counters.dropped_packet_count - first_window_counters.dropped_packet_count)
                as f64
                / arrived_packets
                * 100.0,
            throughput_pps: (sum_over_cores(&self.last_window_counters.served_packet_counts)
                - sum_over_cores(&first_window_counters.served_packet_counts))
                / measured_seconds,
            throughput_gbps: (self.last_window_counters.accepted_bytes - first_window_counters.accepted_bytes) as f64
                * 8.0
                / measured_seconds
                / 1e9,
        })
    }
}

pub fn build_unknown_policy_error(name: &str) -> UnknownName {
    UnknownName::new("policy", name, policy::policy_names().into_iter().chain([ORACLE_POLICY_NAME]))
}
