//! Cost of the controller behind rack controllers, which send real summaries of emulated servers over gRPC.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_api::types::ReportState;
use coreward_controller::ClockReadings;
use coreward_fleet::clock::wall_clock_time;
use coreward_rack::reducer::ReportReducer;
use coreward_tls::FleetRole;
use coreward_wire::v1;
use coreward_wire::v1::{agent_message, rack_update};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::controller_process::ControllerProcess;
use crate::fake_agent::{FakeAgent, server_name_of_agent};
use crate::report::{BenchReport, ReportTable};
use crate::scale::{ScaleMeasurementWindow, add_window_rows, measure_scale_windows};
use crate::test_env::{self, SharedScaleBenchArgs};
use crate::thread_cpus::thread_cpu_time;

/// Number of different summaries that each rack sends in turn. They are made before the measurement, because real rack
/// controllers would make them on other machines.
const DISTINCT_SUMMARY_COUNT: usize = 4;
const MIN_DETAILED_REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Options of `coreward-lab bench racks`.
#[derive(Debug, Clone, clap::Args)]
pub struct RacksBenchArgs {
    /// Number of agents behind racks
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    agents: u32,
    /// Number of racks, each with an equal number of agents (+-1)
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u32).range(1..))]
    racks: u32,
    /// Maximum number of candidates that a rack sends per bucket
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=8))]
    rack_candidates: u8,
    #[command(flatten)]
    scale: SharedScaleBenchArgs,
}

/// Runs the bench of a controller behind rack controllers. Fails without root, when the controller or the load balancer
/// does not start, or when a rack cannot connect.
pub fn run_racks_bench(args: &RacksBenchArgs) -> anyhow::Result<BenchReport> {
    ensure!(args.racks <= args.agents, "{} racks: expected at most one per agent", args.racks);
    let args = args.clone();
    let (agents, scale) = (args.agents, args.scale.clone());
    test_env::measure_in_scale_environment("racks", agents, &scale, async move |controller, interval| {
        measure_controller_behind_racks(&args, controller, interval).await
    })
}

async fn measure_controller_behind_racks(
    args: &RacksBenchArgs,
    controller: &mut ControllerProcess,
    interval: Duration,
) -> anyhow::Result<BenchReport> {
    let mut racks = Vec::new();
    for rack in 0..args.racks {
        let first_agent_of_rack = |rack: u32| (u64::from(rack) * u64::from(args.agents) / u64::from(args.racks)) as u32;
        racks.push(
            EmulatedRackController::connect(
                args,
                controller,
                rack,
                first_agent_of_rack(rack)..first_agent_of_rack(rack + 1),
                interval,
            )
            .await?,
        );
    }
    let rack_cpu_us: Vec<f64> = racks.iter().map(|rack| rack.summary_cpu_us_per_interval).collect();
    let summary_bytes: Vec<f64> = racks.iter().map(|rack| rack.summary_messages[0].encoded_len() as f64).collect();
    let (start, sent_message_count) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    for (rack_index, rack) in (0..).zip(racks) {
        tokio::spawn(rack.send_summaries(
            start + interval * rack_index / args.racks,
            interval,
            sent_message_count.clone(),
        ));
    }
    sleep(3 * MIN_DETAILED_REPORT_INTERVAL).await;
    let windows = measure_scale_windows(&args.scale, controller, &sent_message_count).await?;
    let status = controller.fetch_status().await?;
    let rack_server_count: usize = status.racks.iter().map(|rack| rack.servers.len()).sum();
    ensure!(
        rack_server_count == args.agents as usize,
        "{rack_server_count} of {} agents are behind racks",
        args.agents
    );
    let reporting_server_count =
        status.servers.iter().filter(|server| server.report_state == ReportState::Fresh).count();
    ensure!(
        reporting_server_count == rack_server_count,
        "{reporting_server_count} of {rack_server_count} servers report"
    );
    Ok(build_racks_report(args, &windows, rack_cpu_us, summary_bytes))
}

/// Emulated rack controller with its emulated servers.
struct EmulatedRackController {
    message_sender: mpsc::Sender<v1::RackMessage>,
    /// Emulated agents of the rack, with their numbers.
    agents_by_number: Vec<(u32, FakeAgent)>,
    summary_messages: Vec<v1::RackMessage>,
    /// Interval of detailed reports (ms), which the controller sets and increases with the number of racks.
    detail_interval_ms: Arc<AtomicU32>,
    summary_cpu_us_per_interval: f64,
}

impl EmulatedRackController {
    /// Connects the rack, registers its agents, and makes the summaries for the configuration that the controller
    /// sends.
    async fn connect(
        args: &RacksBenchArgs,
        controller: &mut ControllerProcess,
        rack_index: u32,
        agents: std::ops::Range<u32>,
        interval: Duration,
    ) -> anyhow::Result<Self> {
        let (message_sender, receiver) = mpsc::channel(8);
        let rack_name = format!("rack{rack_index}");
        for message in registration_messages(&rack_name, agents.clone()) {
            message_sender.send(message).await?;
        }
        let mut updates = controller
            .connect_as(FleetRole::Rack, &rack_name)
            .await?
            .rack(ReceiverStream::new(receiver))
            .await?
            .into_inner();
        let configuration = receive_rack_configuration(&mut updates, agents.len()).await?;
        let detail_interval_ms = track_detail_interval_updates(updates, configuration.detail_interval_ms);
        let mut report_reducer = ReportReducer::new(MIN_DETAILED_REPORT_INTERVAL, args.rack_candidates.into());
        agents.clone().for_each(|agent| report_reducer.begin_stream(agent.into()));
        report_reducer.apply_configuration((&configuration).try_into()?);
        let mut agents_by_number: Vec<(u32, FakeAgent)> =
            agents.map(|agent| (agent, FakeAgent::new(agent, args.scale.cores, interval))).collect();
        let (summary_messages, cpu_us_per_interval) =
            make_summary_messages(&mut report_reducer, &mut agents_by_number, interval)?;
        // The detailed reports after this start with the RSS configuration.
        agents_by_number.iter_mut().for_each(|(_, agent)| agent.restart_sequence_numbers());
        Ok(Self {
            message_sender,
            agents_by_number,
            summary_messages,
            detail_interval_ms,
            summary_cpu_us_per_interval: cpu_us_per_interval,
        })
    }

    /// Sends one summary per interval until the controller ends. Adds a detailed report of each agent once per detail
    /// interval.
    async fn send_summaries(mut self, start: Instant, interval: Duration, sent_message_count: Arc<AtomicU64>) {
        let mut next_summary_time = start;
        for round in 0.. {
            sleep_until(next_summary_time).await;
            next_summary_time = (next_summary_time + interval).max(Instant::now());
            let mut message = self.summary_messages[round % DISTINCT_SUMMARY_COUNT].clone();
            let requested_detail_interval =
                Duration::from_millis(self.detail_interval_ms.load(Ordering::Relaxed).into());
            let rounds_per_detailed_report = (MIN_DETAILED_REPORT_INTERVAL.max(requested_detail_interval).as_secs_f64()
                / interval.as_secs_f64())
            .round() as usize;
            // The first report of each agent has its RSS configuration and is sent immediately.
            let (first_agent, agent_step) =
                if round == 0 { (0, 1) } else { (round % rounds_per_detailed_report, rounds_per_detailed_report) };
            for (agent, server) in self.agents_by_number.iter_mut().skip(first_agent).step_by(agent_step) {
                message.agents.push(relayed_agent_message(
                    *agent,
                    agent_message::Message::Report(server.create_detailed_report()),
                ));
            }
            if self.message_sender.send(message).await.is_err() {
                return;
            }
            sent_message_count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn relayed_agent_message(agent: u32, message: agent_message::Message) -> v1::FromAgent {
    v1::FromAgent { stream: agent.into(), message: Some(v1::AgentMessage { message: Some(message) }) }
}

/// Returns the messages that register a rack and then its agents.
fn registration_messages(rack_name: &str, agents: std::ops::Range<u32>) -> [v1::RackMessage; 2] {
    let registration = v1::RackRegistration { name: rack_name.to_owned(), version: "bench".into() };
    let agent_registrations = agents.map(|agent| {
        let registration = v1::AgentRegistration { server: server_name_of_agent(agent), version: "bench".into() };
        relayed_agent_message(agent, agent_message::Message::Registration(registration))
    });
    [
        v1::RackMessage { registration: Some(registration), ..Default::default() },
        v1::RackMessage { agents: agent_registrations.collect(), ..Default::default() },
    ]
}

/// Reads updates until a configuration has `agent_count` servers, and returns that configuration. Fails when the stream
/// ends.
async fn receive_rack_configuration(
    updates: &mut Streaming<v1::RackUpdate>,
    agent_count: usize,
) -> anyhow::Result<v1::RackConfiguration> {
    loop {
        let update = updates.message().await?.context("the controller ended the stream")?.update;
        if let Some(rack_update::Update::Configuration(configuration)) = update
            && configuration.servers.len() == agent_count
        {
            return Ok(configuration);
        }
    }
}

/// Reads the stream of updates in a new task until it ends. Returns the interval of detailed reports (ms), which the
/// task keeps up to date.
fn track_detail_interval_updates(mut updates: Streaming<v1::RackUpdate>, first_interval_ms: u32) -> Arc<AtomicU32> {
    let detail_interval_ms = Arc::new(AtomicU32::new(first_interval_ms));
    let shared_detail_interval = detail_interval_ms.clone();
    tokio::spawn(async move {
        while let Ok(Some(update)) = updates.message().await {
            if let Some(rack_update::Update::Configuration(configuration)) = update.update {
                shared_detail_interval.store(configuration.detail_interval_ms, Ordering::Relaxed);
            }
        }
    });
    detail_interval_ms
}

/// Returns the rack's summaries of its agents' reports, and the CPU time for summarizing the last interval's reports
/// (us).
fn make_summary_messages(
    report_reducer: &mut ReportReducer,
    agents_by_number: &mut [(u32, FakeAgent)],
    interval: Duration,
) -> anyhow::Result<(Vec<v1::RackMessage>, f64)> {
    let (mut summary_messages, mut cost_us) = (Vec::new(), 0.0);
    // The first reports contain no loads yet.
    for round in 0..=DISTINCT_SUMMARY_COUNT {
        let reports: Vec<(u32, v1::Report)> =
            agents_by_number.iter_mut().map(|(number, agent)| (*number, agent.create_next_report())).collect();
        let unix_time = wall_clock_time();
        let report_time = ClockReadings {
            monotonic_time: interval * round as u32,
            wall_time: unix_time,
            record_clock_time: unix_time,
        };
        let cpu_time_before = thread_cpu_time();
        for (agent, report) in reports {
            let (_, outcome) = report_reducer.record_report(agent.into(), report, report_time);
            outcome.context("a report of a pretended server")?;
        }
        let summaries = report_reducer.compute_summaries(report_time);
        cost_us = (thread_cpu_time() - cpu_time_before).as_secs_f64() * 1e6;
        if round > 0 {
            summary_messages.push(v1::RackMessage { summaries, ..Default::default() });
        }
    }
    Ok((summary_messages, cost_us))
}

fn build_racks_report(
    args: &RacksBenchArgs,
    windows: &[ScaleMeasurementWindow],
    rack_cpu_us: Vec<f64>,
    summary_bytes: Vec<f64>,
) -> BenchReport {
    let mut table = ReportTable::new(&["", "median", "least", "most"]);
    add_window_rows(&mut table, "summaries", windows);
    table.add_summary_row("a summary, bytes", summary_bytes, []);
    table.add_summary_row("CPU of a rack for the reports and the summary of one interval, us", rack_cpu_us, []);
    BenchReport {
        name: "racks",
        heading: "The controller behind racks",
        method_description: format!(
            "{} racks send {} candidates per bucket of {} servers of {} cores every 100 ms, each by a gRPC stream of \
             its own (loopback{}), and every server's whole report as often as the controller requests it, to a \
             controller that has CPU 0; racks and a load balancer, which puts the tables of {} services in force and \
             reports each, share CPU 1. {} windows of {} s; percentiles are interpolated in classes. A rack's CPU is \
             without gRPC.",
            args.racks,
            args.rack_candidates,
            args.agents,
            args.scale.cores,
            if args.scale.plain { "" } else { ", TLS" },
            args.scale.services,
            args.scale.windows,
            args.scale.window_seconds,
        ),
        tables: vec![table],
    }
}
