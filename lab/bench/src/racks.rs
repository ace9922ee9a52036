//! Cost of the controller behind rack controllers, which send real summaries of emulated servers over gRPC.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_api::types::ReportState;
use coreward_controller::Now;
use coreward_fleet::clock::wall_clock;
use coreward_rack::reducer::Reducer;
use coreward_tls::Role;
use coreward_wire::v1;
use coreward_wire::v1::{agent_message, rack_update};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::wrappers::ReceiverStream;

use crate::controller_process::Controller;
use crate::cpus::thread_cpu_time;
use crate::fake_agent::{FakeAgent, server_name};
use crate::report::{Report, Table};
use crate::scale::{WindowResult, add_window_rows, measure_windows};
use crate::test_env::{self, ScaleArgs};

/// Number of different summaries that each rack sends in turn. They are made in advance, because real racks would make
/// them on other machines.
const ROUND_COUNT: usize = 4;
const DETAIL_INTERVAL: Duration = Duration::from_secs(1);

/// Options of `coreward-lab bench racks`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
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
    scale: ScaleArgs,
}

/// Runs the bench. Fails without root, when the controller or the load balancer does not start, or when a rack cannot
/// connect.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    ensure!(args.racks <= args.agents, "{} racks: expected at most one per agent", args.racks);
    let args = args.clone();
    let (agents, scale) = (args.agents, args.scale.clone());
    test_env::measure_at_scale("racks", agents, &scale, async move |controller, interval| {
        measure(&args, controller, interval).await
    })
}

async fn measure(args: &Args, controller: &mut Controller, interval: Duration) -> anyhow::Result<Report> {
    let mut racks = Vec::new();
    for rack in 0..args.racks {
        let part = |rack: u32| (u64::from(rack) * u64::from(args.agents) / u64::from(args.racks)) as u32;
        racks.push(Rack::connect(args, controller, rack, part(rack)..part(rack + 1), interval).await?);
    }
    let costs_us: Vec<f64> = racks.iter().map(|rack| rack.cost_us).collect();
    let bytes: Vec<f64> = racks.iter().map(|rack| rack.rounds[0].encoded_len() as f64).collect();
    let (start, sent) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    for (number, rack) in (0..).zip(racks) {
        tokio::spawn(rack.send_summaries(start + interval * number / args.racks, interval, sent.clone()));
    }
    sleep(3 * DETAIL_INTERVAL).await;
    let windows = measure_windows(&args.scale, controller, &sent).await?;
    let status = controller.status().await?;
    let behind: usize = status.racks.iter().map(|rack| rack.servers.len()).sum();
    ensure!(behind == args.agents as usize, "{behind} of {} agents are behind racks", args.agents);
    let reporting = status.servers.iter().filter(|server| server.reports == ReportState::Fresh).count();
    ensure!(reporting == behind, "{reporting} of {behind} servers report");
    Ok(report(args, &windows, costs_us, bytes))
}

/// Emulated rack controller with its emulated servers.
struct Rack {
    messages: mpsc::Sender<v1::RackMessage>,
    /// Emulated agents of the rack, with their numbers.
    servers: Vec<(u32, FakeAgent)>,
    rounds: Vec<v1::RackMessage>,
    /// Interval of detailed reports (ms), which the controller increases with the number of racks.
    detail_interval: Arc<AtomicU32>,
    cost_us: f64,
}

impl Rack {
    /// Connects the rack, registers its agents, and makes summaries as the controller's configuration demands.
    async fn connect(
        args: &Args,
        controller: &mut Controller,
        number: u32,
        agents: std::ops::Range<u32>,
        interval: Duration,
    ) -> anyhow::Result<Self> {
        let (messages, receiver) = mpsc::channel(8);
        let rack = format!("rack{number}");
        let registration = v1::RackRegistration { name: rack.clone(), version: "bench".into() };
        let registrations = agents.clone().map(|agent| {
            let registration = v1::AgentRegistration { server: server_name(agent), version: "bench".into() };
            wrap_agent_message(agent, agent_message::Message::Registration(registration))
        });
        messages.send(v1::RackMessage { registration: Some(registration), ..Default::default() }).await?;
        messages.send(v1::RackMessage { agents: registrations.collect(), ..Default::default() }).await?;
        let mut updates =
            controller.connect_as(Role::Rack, &rack).await?.rack(ReceiverStream::new(receiver)).await?.into_inner();
        let configuration = loop {
            let update = updates.message().await?.context("the controller ended the stream")?.update;
            if let Some(rack_update::Update::Configuration(configuration)) = update
                && configuration.servers.len() == agents.len()
            {
                break configuration;
            }
        };
        let detail_interval = Arc::new(AtomicU32::new(configuration.detail_interval_ms));
        let reported = detail_interval.clone();
        tokio::spawn(async move {
            while let Ok(Some(update)) = updates.message().await {
                if let Some(rack_update::Update::Configuration(configuration)) = update.update {
                    reported.store(configuration.detail_interval_ms, Ordering::Relaxed);
                }
            }
        });
        let mut reducer = Reducer::new(DETAIL_INTERVAL, args.rack_candidates.into());
        agents.clone().for_each(|agent| reducer.begin(agent.into()));
        reducer.configure((&configuration).try_into()?);
        let mut servers: Vec<FakeAgent> =
            agents.clone().map(|agent| FakeAgent::new(agent, args.scale.cores, interval)).collect();
        let (mut rounds, mut cost_us) = (Vec::new(), 0.0);
        // The first reports contain no loads yet.
        for round in 0..=ROUND_COUNT {
            let reports: Vec<v1::Report> = servers.iter_mut().map(FakeAgent::report).collect();
            let wall = wall_clock();
            let now = Now { monotonic: interval * round as u32, wall, record: wall };
            let begun = thread_cpu_time();
            for (agent, report) in agents.clone().zip(reports) {
                let (_, outcome) = reducer.report(agent.into(), report, now);
                outcome.context("a report of a pretended server")?;
            }
            let summaries = reducer.summaries(now);
            cost_us = (thread_cpu_time() - begun).as_secs_f64() * 1e6;
            if round > 0 {
                rounds.push(v1::RackMessage { summaries, ..Default::default() });
            }
        }
        // The detailed reports after this start with the RSS configuration.
        servers.iter_mut().for_each(FakeAgent::begin_stream);
        Ok(Self { messages, servers: agents.zip(servers).collect(), rounds, detail_interval, cost_us })
    }

    /// Sends one summary per interval until the controller ends. Once per detail interval, adds each agent's detailed
    /// report.
    async fn send_summaries(mut self, start: Instant, interval: Duration, sent: Arc<AtomicU64>) {
        let mut due = start;
        for round in 0.. {
            sleep_until(due).await;
            due = (due + interval).max(Instant::now());
            let mut message = self.rounds[round % ROUND_COUNT].clone();
            let requested = Duration::from_millis(self.detail_interval.load(Ordering::Relaxed).into());
            let per_detail = (DETAIL_INTERVAL.max(requested).as_secs_f64() / interval.as_secs_f64()).round() as usize;
            // The first report of each agent has its RSS configuration and is sent immediately.
            let (first, step) = if round == 0 { (0, 1) } else { (round % per_detail, per_detail) };
            for (agent, server) in self.servers.iter_mut().skip(first).step_by(step) {
                message
                    .agents
                    .push(wrap_agent_message(*agent, agent_message::Message::Report(server.detailed_report())));
            }
            if self.messages.send(message).await.is_err() {
                return;
            }
            sent.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn wrap_agent_message(agent: u32, message: agent_message::Message) -> v1::FromAgent {
    v1::FromAgent { stream: agent.into(), message: Some(v1::AgentMessage { message: Some(message) }) }
}

fn report(args: &Args, windows: &[WindowResult], rack_cpu_us: Vec<f64>, summary_bytes: Vec<f64>) -> Report {
    let mut table = Table::new(&["", "median", "least", "most"]);
    add_window_rows(&mut table, "summaries", windows);
    table.add_summary_row("a summary, bytes", summary_bytes, []);
    table.add_summary_row("CPU of a rack for the reports and the summary of one interval, us", rack_cpu_us, []);
    Report {
        name: "racks",
        heading: "The controller behind racks",
        method: format!(
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
