//! Runs all policies and seeds on a trace, which is read only once for all of them.

use rayon::prelude::*;

use super::cores::{CorePacketCapacity, MAX_QUEUED_PACKETS_PER_CORE};
use super::oracle::ORACLE_POLICY_NAME;
use super::outcome::{LbSeedResult, LbSimulationOutcome, PlacementPolicyOutcome};
use super::simulation::{LbSimulation, build_unknown_policy_error};
use super::{LbSimulationConfig, LbSimulationError};
use crate::par_map_ordered;
use crate::trace::{PacketBatch, PacketSkipCounts, PacketTrace};

/// Busy time that a packet adds to a core of unlimited capacity (ns). Its size is arbitrary, because policies only
/// compare loads. With 1 us, the load of a few packets/s and that of millions can both be represented.
const UNLIMITED_CORE_PACKET_COST_NS: f64 = 1_000.0;

/// Simulates every policy with every seed. Fails with an [`LbSimulationError`] when the configuration or the trace is
/// invalid.
pub fn run(config: &LbSimulationConfig) -> Result<LbSimulationOutcome, LbSimulationError> {
    config.check()?;
    let known_policies = coreward_model::policy::policy_names();
    if let Some(name) =
        config.policies.iter().find(|name| *name != ORACLE_POLICY_NAME && !known_policies.contains(&name.as_str()))
    {
        return Err(build_unknown_policy_error(name).into());
    }
    let runs: Vec<TracePassResults> = if config.trace.varies_with_seed() {
        let simulate_seed = |seed: &u64| TracePassResults::simulate_seeds(config, std::slice::from_ref(seed));
        par_map_ordered(&config.seeds, simulate_seed).into_iter().collect::<Result<_, _>>()?
    } else {
        vec![TracePassResults::simulate_seeds(config, &config.seeds)?]
    };
    Ok(merge_pass_results(config, runs))
}

/// Results of one pass through a trace, for all policies and the given seeds.
struct TracePassResults {
    /// Results of all simulations: one vector per policy, with one result per seed.
    results_by_policy_and_seed: Vec<Vec<LbSeedResult>>,
    packet_count: u64,
    flow_count: u64,
    duration_ns: u64,
    skipped_packet_counts: PacketSkipCounts,
    reordered_packet_count: u64,
}

impl TracePassResults {
    /// Simulates every policy with each of these seeds. All simulations get the traffic that the first seed determines.
    fn simulate_seeds(config: &LbSimulationConfig, seeds: &[u64]) -> Result<Self, LbSimulationError> {
        let mut trace = config.trace.open_overlaid_copies(seeds[0], config.trace_copy_count, config.read_options)?;
        let speed = config.replay_speed;
        let history_duration_ns = to_replay_time_ns(trace.history_duration_ns(), speed);
        let core_capacity = derive_core_capacity(config, trace.as_ref());
        let mut simulations = Vec::new();
        for policy in &config.policies {
            for seed in seeds {
                simulations.push(LbSimulation::new(config, policy, *seed, core_capacity, history_duration_ns)?);
            }
        }
        let (mut batch, mut packets, mut flows, mut last_ns) = (PacketBatch::default(), 0, 0, 0);
        loop {
            trace.read(&mut batch)?;
            if speed != 1.0 {
                convert_to_replay_time(&mut batch, speed);
            }
            let Some(last_packet) = batch.packets.last() else { break };
            last_ns = last_packet.time_ns;
            packets += batch.packets.iter().filter(|packet| packet.event.has_packet()).count() as u64;
            flows +=
                batch.packets.iter().filter(|packet| packet.event.opens_flow() && packet.event.has_packet()).count()
                    as u64;
            simulations.par_iter_mut().map(|simulation| simulation.process_batch(&batch)).collect::<Result<(), _>>()?;
        }
        let (skip_counts, reordered_packet_count) = (trace.skipped_packet_counts(), trace.reordered_packet_count());
        if packets == 0 {
            return Err(LbSimulationError::NoPackets(skip_counts));
        }
        let end_ns = trace.end_ns().map_or(last_ns, |time_ns| to_replay_time_ns(time_ns, speed));
        let seed_results: Option<Vec<LbSeedResult>> =
            simulations.into_par_iter().map(|simulation| simulation.into_result(end_ns)).collect();
        let too_short_error = LbSimulationError::TraceTooShort {
            seconds: (end_ns - history_duration_ns) as f64 / 1e9,
            window_ms: config.window_ms,
        };
        let seed_results =
            seed_results.ok_or(too_short_error)?.chunks(seeds.len()).map(<[LbSeedResult]>::to_vec).collect();
        Ok(Self {
            results_by_policy_and_seed: seed_results,
            packet_count: packets,
            flow_count: flows,
            duration_ns: end_ns - history_duration_ns,
            skipped_packet_counts: skip_counts,
            reordered_packet_count,
        })
    }
}

/// Converts a time of the trace to the time at which a replay at `speed` times the recorded speed reaches it (ns).
fn to_replay_time_ns(time_ns: u64, speed: f64) -> u64 {
    if speed == 1.0 { time_ns } else { (time_ns as f64 / speed) as u64 }
}

/// Converts the times and rates of a batch from the recorded speed to a replay at `speed` times that speed.
fn convert_to_replay_time(batch: &mut PacketBatch, speed: f64) {
    for packet in &mut batch.packets {
        packet.time_ns = to_replay_time_ns(packet.time_ns, speed);
    }
    for first_packet in &mut batch.first_packets {
        first_packet.flow_rate_pps = first_packet.flow_rate_pps.map(|rate| rate * speed);
    }
}

/// Returns the capacity of a core. Requests of an arrival log may queue without limit. Packets of other traces are
/// dropped when the queue is full.
fn derive_core_capacity(config: &LbSimulationConfig, trace: &dyn PacketTrace) -> CorePacketCapacity {
    match (config.core_capacity_pps, trace.core_service_rate()) {
        (Some(packets_per_s), None) => CorePacketCapacity::Limited {
            packet_cost_ns: 1e9 / packets_per_s,
            queue_limit: Some(MAX_QUEUED_PACKETS_PER_CORE),
        },
        (Some(packets_per_s), Some(_)) => {
            CorePacketCapacity::Limited { packet_cost_ns: 1e9 / packets_per_s, queue_limit: None }
        }
        (None, Some(service_rate)) => {
            CorePacketCapacity::Limited { packet_cost_ns: 1e9 / service_rate.packets_per_s, queue_limit: None }
        }
        (None, None) => CorePacketCapacity::Unlimited { packet_cost_ns: UNLIMITED_CORE_PACKET_COST_NS },
    }
}

fn merge_pass_results(config: &LbSimulationConfig, runs: Vec<TracePassResults>) -> LbSimulationOutcome {
    let run_count = runs.len() as u64;
    let mean_over_runs = |to_value: fn(&TracePassResults) -> u64| runs.iter().map(to_value).sum::<u64>() / run_count;
    let mut skipped = PacketSkipCounts::new();
    for (reason, packets) in runs.iter().flat_map(|run| &run.skipped_packet_counts) {
        *skipped.entry(*reason).or_default() += packets / run_count;
    }
    let build_policy_outcome = |(position, name): (usize, &String)| {
        let seed_results =
            runs.iter().flat_map(|run| run.results_by_policy_and_seed[position].iter().copied()).collect();
        PlacementPolicyOutcome::new(name, seed_results).expect("at least one seed")
    };
    LbSimulationOutcome {
        policies: config.policies.iter().enumerate().map(build_policy_outcome).collect(),
        packets: mean_over_runs(|run| run.packet_count),
        flows: mean_over_runs(|run| run.flow_count),
        seconds: mean_over_runs(|run| run.duration_ns) as f64 / 1e9,
        skipped,
        reordered: mean_over_runs(|run| run.reordered_packet_count),
    }
}
