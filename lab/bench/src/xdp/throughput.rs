//! Command `coreward-lab bench throughput`. It sends live frames through the load balancer's native XDP hook, and for
//! comparison through a program that only swaps MAC addresses.

mod generator;
pub mod veth_pair;

use std::collections::HashSet;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use coreward_dataplane::lb::PacketCounters;
use coreward_intf as intf;
use coreward_model::connection_table::{ConnectionIndex, ConnectionTableSize};
use coreward_model::consistency::ConsistencyMode;
use coreward_model::placement::PlacementRule;

use super::balancer::{CONNECTION_TABLE_ENTRIES, MeasuredLoadBalancer, PlacementSetup};
use super::flood::first_two_allowed_cpus;
use super::interleaved::{NsByRound, interleave_measurements, median_of_rounds, quartile_range_text_with_decimals};
use super::workload::{PacketCase, syn_frame_template};
use crate::namespace;
use crate::report::{BenchReport, MeasurementGoal, ReportTable, ReportTableCell, goal_and_verdict_cells};
use crate::thread_cpus::{self, CALLING_THREAD_PID};
use generator::{FrameGenerator, GeneratedTraffic, LIVE_PACKET_COUNT, LiveBaselineProgram};
use veth_pair::{NapiThread, NapiUsage, VethPair, raise_thread_priority};

/// Number of rounds and frames of the throughput measurement.
#[derive(Debug, Clone, clap::Args)]
pub struct ThroughputBenchArgs {
    /// Number of rounds; in each, the baselines and all kinds of traffic are measured one after the other
    #[arg(long, default_value_t = Self::default().rounds, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of frames per kind of traffic and round
    #[arg(long, default_value_t = Self::default().frames, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    frames: u32,
}

impl Default for ThroughputBenchArgs {
    fn default() -> Self {
        Self { rounds: 15, frames: 1 << 20 }
    }
}

/// Kind of traffic that is measured, with the mode of its service.
#[derive(Debug, Clone, Copy)]
struct ServiceTraffic {
    name: &'static str,
    consistency: ConsistencyMode,
    placement_rule: PlacementRule,
    /// Number of new clients' SYNs among 16 packets. The other packets belong to open connections.
    syns_per_16_packets: usize,
    /// Goal for the ratio of the first baseline's CPU time per frame to this traffic's CPU time per frame.
    cpu_time_ratio_goal: Option<MeasurementGoal>,
    /// Baseline program that is measured instead of a load balancer.
    baseline: Option<LiveBaselineProgram>,
}

impl ServiceTraffic {
    const SWAP_MACS_BASELINE: ServiceTraffic = ServiceTraffic {
        name: "swap MACs",
        consistency: ConsistencyMode::None,
        placement_rule: PlacementRule::Table,
        syns_per_16_packets: 0,
        cpu_time_ratio_goal: None,
        baseline: Some(LiveBaselineProgram::SwapMacs),
    };

    /// All kinds of traffic, with the baselines first.
    const ALL: [ServiceTraffic; 11] = [
        Self::SWAP_MACS_BASELINE,
        ServiceTraffic {
            name: "swap MACs, read the returned timestamp",
            baseline: Some(LiveBaselineProgram::ReadTsecr),
            ..Self::SWAP_MACS_BASELINE
        },
        Self::with_table_placement(
            "established, stateless",
            ConsistencyMode::Stateless,
            0,
            Some(MeasurementGoal::AtLeast(0.97)),
        ),
        Self::with_table_placement("established, stateful", ConsistencyMode::Stateful, 0, None),
        Self::with_table_placement("established, hash-table", ConsistencyMode::HashTable, 0, None),
        Self::with_table_placement(
            "new, stateless, hash or crossrss",
            ConsistencyMode::Stateless,
            16,
            Some(MeasurementGoal::AtLeast(0.90)),
        ),
        ServiceTraffic {
            placement_rule: PlacementRule::LeastAssigned,
            ..Self::with_table_placement(
                "new, stateless, crossrss-plus",
                ConsistencyMode::Stateless,
                16,
                Some(MeasurementGoal::AtLeast(0.87)),
            )
        },
        Self::with_table_placement(
            "new, stateful",
            ConsistencyMode::Stateful,
            16,
            Some(MeasurementGoal::AtLeast(0.75)),
        ),
        Self::with_table_placement(
            "new, hash-table",
            ConsistencyMode::HashTable,
            16,
            Some(MeasurementGoal::AtLeast(0.6)),
        ),
        Self::with_table_placement("mixed: 15 established, 1 new; stateless", ConsistencyMode::Stateless, 1, None),
        Self::with_table_placement("mixed: 15 established, 1 new; stateful", ConsistencyMode::Stateful, 1, None),
    ];

    /// Returns traffic to a service whose new connections are placed by the placement table.
    const fn with_table_placement(
        name: &'static str,
        consistency: ConsistencyMode,
        syns_per_16_packets: usize,
        cpu_time_ratio_goal: Option<MeasurementGoal>,
    ) -> Self {
        Self {
            name,
            consistency,
            placement_rule: PlacementRule::Table,
            syns_per_16_packets,
            cpu_time_ratio_goal,
            baseline: None,
        }
    }

    /// Returns the case for this traffic's packets of open connections.
    fn established_case(&self) -> PacketCase {
        PacketCase::EstablishedConnections(self.consistency, LIVE_PACKET_COUNT)
    }

    fn placement_setup(&self) -> anyhow::Result<PlacementSetup> {
        let connection_table_entries = match self.consistency {
            ConsistencyMode::Stateful => CONNECTION_TABLE_ENTRIES,
            _ => u64::from(intf::CONNECTIONS_PER_PARTITION),
        };
        let flow_table_entries = match self.consistency {
            ConsistencyMode::HashTable => intf::DEFAULT_FLOW_TABLE_ENTRIES,
            _ => intf::FLOW_SET_ENTRIES,
        };
        Ok(PlacementSetup {
            placement_rule: self.placement_rule,
            rss_group_count: 1,
            connection_table_size: ConnectionTableSize::try_from(connection_table_entries)?,
            flow_table_entry_count: flow_table_entries,
        })
    }

    fn is_syn(&self, packet_index: usize) -> bool {
        // Odd steps visit each number below 16 once, without a pattern that repeats within a batch.
        (packet_index * 7 + packet_index / 16 * 5) % 16 < self.syns_per_16_packets
    }
}

/// Load balancer or baseline program on its own pair of devices.
struct TrafficTestEnv {
    service_traffic: ServiceTraffic,
    balancer: Option<MeasuredLoadBalancer>,
    /// Indices of the connection-table entries that are used before the first round.
    open_connection_indices: HashSet<ConnectionIndex>,
    generator: FrameGenerator,
    tested_napi_thread: NapiThread,
    sink_napi_thread: NapiThread,
}

/// Measured values of one kind of traffic in one round.
struct TrafficRoundResult {
    /// CPU time per frame (ns) of the NAPI thread in which the tested program runs.
    cpu_ns_per_frame: f64,
    /// Rate of frames by wall-clock time, in millions per second.
    million_frames_per_second: f64,
    /// Fraction of the wall-clock time in which the tested end's thread ran.
    tested_thread_busy_fraction: f64,
    /// Fraction of the sent frames that returned to the generator's end.
    returned_frame_fraction: f64,
}

impl TrafficTestEnv {
    /// Sets up devices and programs for one kind of traffic. `cpus` are the generator's CPU and the tested end's CPU.
    fn new(service_traffic: ServiceTraffic, pair_number: usize, cpus: [usize; 2]) -> anyhow::Result<Self> {
        let veth_pair = VethPair::new(pair_number)?;
        // The baselines also get frames of open connections.
        let established_balancer =
            MeasuredLoadBalancer::with_setup(service_traffic.established_case(), service_traffic.placement_setup()?)?;
        let balancer = service_traffic.baseline.is_none().then_some(established_balancer);
        Self::set_up(veth_pair, service_traffic, balancer, cpus)
    }

    fn set_up(
        veth_pair: VethPair,
        service_traffic: ServiceTraffic,
        balancer: Option<MeasuredLoadBalancer>,
        cpus: [usize; 2],
    ) -> anyhow::Result<Self> {
        let established_case = service_traffic.established_case();
        let packets = match &balancer {
            Some(balancer) => balancer.shuffled_packet_variations()?,
            None => vec![Default::default(); LIVE_PACKET_COUNT],
        };
        let (established_frame, syn_frame) = (established_case.frame_template(), syn_frame_template());
        let traffic = GeneratedTraffic {
            frame_templates: [&established_frame, &syn_frame],
            open_connection_packets: &packets,
            is_syn: &|packet_index| service_traffic.is_syn(packet_index),
        };
        let generator = FrameGenerator::new(&veth_pair, &traffic, service_traffic.baseline)?;
        let open_connections = balancer
            .as_ref()
            .map(|balancer| balancer.connection_indexes_by_client().into_values().collect())
            .unwrap_or_default();
        if let Some(balancer) = &balancer {
            balancer.attach(&veth_pair.tested_device_name)?;
        }
        Ok(Self {
            service_traffic,
            open_connection_indices: open_connections,
            generator,
            tested_napi_thread: NapiThread::start(&veth_pair.tested_device_name, cpus[1])?,
            sink_napi_thread: NapiThread::start(&veth_pair.generator_device_name, cpus[0])?,
            balancer,
        })
    }

    fn measure_round(&self, frame_count: u32) -> anyhow::Result<TrafficRoundResult> {
        let counters_before = self.balancer.as_ref().map(MeasuredLoadBalancer::case_packet_counters);
        let (tested_usage_before, sink_usage_before) =
            (self.tested_napi_thread.read_usage_when_idle()?, self.sink_napi_thread.read_usage_when_idle()?);
        let start = Instant::now();
        self.generator.send_frames(frame_count)?;
        let tested_usage = self.tested_napi_thread.read_usage_when_idle()?.difference_since(tested_usage_before);
        let elapsed_seconds = start.elapsed().as_secs_f64();
        let sink_usage = self.sink_napi_thread.read_usage_when_idle()?.difference_since(sink_usage_before);
        if let (Some(counters_before), Some(balancer)) = (counters_before, &self.balancer) {
            self.check_frame_counters(&tested_usage, &counters_before, &balancer.case_packet_counters())?;
            if self.service_traffic.consistency == ConsistencyMode::Stateful {
                balancer.free_connections_except(&self.open_connection_indices)?;
            }
        }
        ensure!(tested_usage.received_frame_count > 0, "{}: no frame arrived", self.service_traffic.name);
        Ok(TrafficRoundResult {
            cpu_ns_per_frame: tested_usage.cpu_ns as f64 / tested_usage.received_frame_count as f64,
            million_frames_per_second: tested_usage.received_frame_count as f64 / elapsed_seconds / 1e6,
            tested_thread_busy_fraction: tested_usage.cpu_ns as f64 / 1e9 / elapsed_seconds,
            returned_frame_fraction: sink_usage.received_frame_count as f64 / tested_usage.received_frame_count as f64,
        })
    }

    /// Checks by the counters that each frame was forwarded as the service's mode demands.
    fn check_frame_counters(
        &self,
        tested_usage: &NapiUsage,
        counters_before: &PacketCounters,
        counters_after: &PacketCounters,
    ) -> anyhow::Result<()> {
        let counted_packet_count =
            |counter: usize| counters_after.packets_by_outcome[counter] - counters_before.packets_by_outcome[counter];
        let (new_count, established_count) = (
            counted_packet_count(intf::LB_COUNTER_NEW_CONNECTION as usize),
            counted_packet_count(self.service_traffic.established_case().expected_counter_index()),
        );
        let name = self.service_traffic.name;
        ensure!(
            new_count + established_count == tested_usage.received_frame_count,
            "{name}: {new_count} new and {established_count} others of {} frames",
            tested_usage.received_frame_count
        );
        ensure!(
            (new_count > 0, established_count > 0)
                == (self.service_traffic.syns_per_16_packets > 0, self.service_traffic.syns_per_16_packets < 16),
            "{name}: {new_count} new, {established_count} others"
        );
        let table_full_event = intf::LB_EVENT_CONNECTION_TABLE_FULL as usize;
        let syns_without_entry =
            counters_after.event_counts[table_full_event] - counters_before.event_counts[table_full_event];
        ensure!(syns_without_entry == 0, "{name}: {syns_without_entry} new connections found no free entry");
        Ok(())
    }
}

/// Measures live frames in a thread with its own network namespace. Fails without root, with fewer than two CPUs, or
/// when a frame is not treated as expected.
pub fn run_throughput_bench(args: &ThroughputBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::run_measurement_in_new_thread("throughput", args, measure_live_traffic)
}

fn measure_live_traffic(args: &ThroughputBenchArgs) -> anyhow::Result<BenchReport> {
    let cpus = first_two_allowed_cpus("coreward-lab bench throughput")?;
    namespace::enter_new_network_namespace()?;
    let traffic_kinds = ServiceTraffic::ALL.into_iter().enumerate();
    let traffic_envs = traffic_kinds.map(|(pair_number, service_traffic)| {
        TrafficTestEnv::new(service_traffic, pair_number, cpus).context(service_traffic.name)
    });
    let envs: Vec<TrafficTestEnv> = traffic_envs.collect::<anyhow::Result<_>>()?;
    thread_cpus::bind_to_cpu(CALLING_THREAD_PID, cpus[0])?;
    raise_thread_priority(nix::unistd::gettid())?;
    let results_by_traffic = interleave_measurements(envs.len(), args.rounds, |env_index| {
        let traffic_env = &envs[env_index];
        traffic_env.measure_round(args.frames).context(traffic_env.service_traffic.name)
    })?;
    let measurements: Vec<(ServiceTraffic, Vec<TrafficRoundResult>)> =
        envs.iter().map(|env| env.service_traffic).zip(results_by_traffic).collect();
    Ok(build_throughput_report(&measurements, args, cpus))
}

fn build_throughput_report(
    measurements: &[(ServiceTraffic, Vec<TrafficRoundResult>)],
    args: &ThroughputBenchArgs,
    cpus: [usize; 2],
) -> BenchReport {
    let mut table = ReportTable::new(&[
        "traffic",
        "rate / floor",
        "quartiles",
        "goal",
        "verdict",
        "CPU time per frame, ns",
        "above the floor, ns",
        "millions of frames per second",
        "busy, %",
        "returned, %",
    ]);
    let baseline_rounds = &measurements[0].1;
    for (service_traffic, round_results) in measurements {
        table.add_row(traffic_table_row(service_traffic, round_results, baseline_rounds));
    }
    BenchReport {
        name: "throughput",
        heading: "Live frames",
        method_description: describe_measurement_method(args, cpus),
        tables: vec![table],
    }
}

fn traffic_table_row(
    service_traffic: &ServiceTraffic,
    rounds: &[TrafficRoundResult],
    baseline_rounds: &[TrafficRoundResult],
) -> [ReportTableCell; 10] {
    let collect_round_values = |round_results: &[TrafficRoundResult],
                                to_value: fn(&TrafficRoundResult) -> f64|
     -> NsByRound { round_results.iter().map(to_value).collect() };
    let values_by_round = |combine: fn(&TrafficRoundResult, &TrafficRoundResult) -> f64| -> NsByRound {
        rounds
            .iter()
            .zip(baseline_rounds)
            .map(|(round_result, baseline_result)| combine(round_result, baseline_result))
            .collect()
    };
    let cpu_time_ratios = values_by_round(|round_result, baseline_result| {
        baseline_result.cpu_ns_per_frame / round_result.cpu_ns_per_frame
    });
    let [goal_cell, verdict_cell] =
        goal_and_verdict_cells(service_traffic.cpu_time_ratio_goal, median_of_rounds(&cpu_time_ratios));
    [
        service_traffic.name.into(),
        ReportTableCell::Text(format!("{:.2}", median_of_rounds(&cpu_time_ratios))),
        quartile_range_text_with_decimals(&cpu_time_ratios, 2).into(),
        goal_cell,
        verdict_cell,
        median_of_rounds(&collect_round_values(rounds, |round_result| round_result.cpu_ns_per_frame)).into(),
        median_of_rounds(&values_by_round(|round_result, baseline_result| {
            round_result.cpu_ns_per_frame - baseline_result.cpu_ns_per_frame
        }))
        .into(),
        median_of_rounds(&collect_round_values(rounds, |round_result| round_result.million_frames_per_second)).into(),
        (median_of_rounds(&collect_round_values(rounds, |round_result| round_result.tested_thread_busy_fraction))
            * 100.0)
            .into(),
        (median_of_rounds(&collect_round_values(rounds, |round_result| round_result.returned_frame_fraction)) * 100.0)
            .into(),
    ]
}

fn describe_measurement_method(args: &ThroughputBenchArgs, cpus: [usize; 2]) -> String {
    format!(
        "A thread on CPU {0} redirects live frames (BPF_F_TEST_XDP_LIVE_FRAMES) into one end of a veth pair. At the \
         other end a NAPI thread on CPU {1} runs the measured program as native XDP. Frames that the program returns \
         are dropped at the first end, on CPU {0}. Values are medians of {2} interleaved rounds of {3} frames per kind \
         of traffic. CPU time is that of the NAPI thread, including veth's receive path, XDP_TX and wake-ups. The row \
         `swap MACs` is the floor. The column `rate / floor` is the floor's CPU time per frame divided by the row's \
         CPU time per frame, computed per round. {4} connections are open, and each SYN is of a new client. CPU {0} \
         has written the frames, which behind a NIC are in the shared cache.",
        cpus[0], cpus[1], args.rounds, args.frames, LIVE_PACKET_COUNT,
    )
}
