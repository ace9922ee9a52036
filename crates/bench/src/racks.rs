//! What the controller costs with rack controllers before it: real summaries of servers that only pretend, over gRPC.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_api::types::Reports;
use coreward_control::clock::wall_now;
use coreward_control::controller::Now;
use coreward_model::statistics::median;
use coreward_rack::reducer::Reducer;
use coreward_wire::v1;
use coreward_wire::v1::{agent_message, rack_update};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::wrappers::ReceiverStream;

use crate::controller::{self, Controller, PretendedServer, Scratch, Window, name};
use crate::report::{Report, Table};

/// Summaries that each rack has, of different loads, and passes up in turn: making them is the racks' work, and they would share
/// the machine with what is measured.
const ROUNDS: usize = 4;
const DETAIL_INTERVAL: Duration = Duration::from_secs(1);

/// Options of `coreward-bench racks`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    controller: controller::Args,
    /// Racks, each with as many of the agents (+-1)
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u32).range(1..))]
    racks: u32,
    /// Candidates that a rack passes up for each bucket at most
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=8))]
    rack_candidates: u8,
}

/// Measures.
///
/// # Errors
/// When the controller does not start, or a rack cannot connect.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    coreward_control::server::raise_file_limit();
    ensure!(args.racks <= args.controller.agents, "{} racks: expected at most one per agent", args.racks);
    let directory = Scratch::new()?;
    let mut controller = Controller::start(&args.controller, &directory.0)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measure(args, &mut controller))
}

async fn measure(args: &Args, controller: &mut Controller) -> anyhow::Result<Report> {
    let mut tables = Vec::new();
    for balancer in 0..args.controller.load_balancers {
        tables.push(tokio::spawn(controller::take_tables(controller::subscribe(controller, balancer).await?)));
    }
    let interval = Duration::from_millis(args.controller.report_interval_ms);
    let mut racks = Vec::new();
    for rack in 0..args.racks {
        let part = |rack: u32| (u64::from(rack) * u64::from(args.controller.agents) / u64::from(args.racks)) as u32;
        let agents = part(rack)..part(rack + 1);
        racks.push(Rack::connect(args, controller, rack, agents, interval).await?);
    }
    let costs: Vec<f64> = racks.iter().map(|rack| rack.cost_us).collect();
    let bytes: Vec<f64> = racks.iter().map(|rack| rack.rounds[0].encoded_len() as f64).collect();
    let start = Instant::now();
    for (number, rack) in (0..).zip(racks) {
        tokio::spawn(rack.pass_up(start + interval * number / args.racks, interval));
    }
    sleep(3 * DETAIL_INTERVAL).await;
    let mut windows = Vec::new();
    for _ in 0..args.controller.windows {
        windows.push(controller::window(controller, Duration::from_secs(args.controller.window_seconds)).await?);
    }
    let resident_mib = controller.resident_mib()?;
    let status = controller.status().await?;
    let behind: usize = status.racks.iter().map(|rack| rack.servers.len()).sum();
    ensure!(
        behind == args.controller.agents as usize,
        "{behind} of {} agents are behind racks",
        args.controller.agents
    );
    let reporting = status.servers.iter().filter(|server| server.reports == Reports::Fresh).count();
    ensure!(reporting == behind, "{reporting} of {behind} servers report");
    controller.process.kill()?;
    let (mut table_bytes, mut gaps) = (0, Vec::new());
    for taken in tables {
        let (arrivals, bytes) = taken.await?;
        gaps.extend(arrivals.windows(2).skip(20).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3));
        table_bytes = bytes;
    }
    gaps.sort_by(f64::total_cmp);
    Ok(report(args, &Measured { windows, resident_mib, costs, bytes, gaps, table_bytes }))
}

struct Measured {
    windows: Vec<Window>,
    resident_mib: u64,
    /// Of each rack: CPU time in one report interval (us).
    costs: Vec<f64>,
    /// Of each rack: bytes of its summaries.
    bytes: Vec<f64>,
    /// Between two tables (ms), in order.
    gaps: Vec<f64>,
    table_bytes: usize,
}

/// One rack and its servers.
struct Rack {
    messages: mpsc::Sender<v1::RackMessage>,
    /// By the agent's number.
    servers: Vec<(u32, PretendedServer)>,
    rounds: Vec<v1::RackMessage>,
    cost_us: f64,
}

impl Rack {
    /// Connects with all its agents, and makes its summaries by what the controller says of them.
    async fn connect(
        args: &Args,
        controller: &mut Controller,
        number: u32,
        agents: std::ops::Range<u32>,
        interval: Duration,
    ) -> anyhow::Result<Self> {
        let (messages, receiver) = mpsc::channel(8);
        let hello = v1::RackHello { name: format!("rack{number}"), version: "bench".into() };
        let hellos = agents.clone().map(|agent| {
            let hello = v1::AgentHello { server: name(agent), version: "bench".into() };
            said(agent, agent_message::Message::Hello(hello))
        });
        let first = v1::RackMessage { hello: Some(hello), agents: hellos.collect(), summaries: Vec::new() };
        messages.send(first).await?;
        let mut updates = controller.connect().await?.rack(ReceiverStream::new(receiver)).await?.into_inner();
        let configuration = loop {
            let update = updates.message().await?.context("the controller ended the stream")?.update;
            if let Some(rack_update::Update::Configuration(configuration)) = update
                && configuration.servers.len() == agents.len()
            {
                break configuration;
            }
        };
        tokio::spawn(async move { while let Ok(Some(_)) = updates.message().await {} });
        let mut reducer = Reducer::new(DETAIL_INTERVAL, args.rack_candidates.into());
        agents.clone().for_each(|agent| reducer.begin(agent.into()));
        reducer.configure((&configuration).try_into()?);
        let mut servers: Vec<PretendedServer> =
            agents.clone().map(|agent| PretendedServer::new(agent, args.controller.cores, interval)).collect();
        let (mut rounds, mut cost_us) = (Vec::new(), 0.0);
        // The first reports are no loads yet.
        for round in 0..=ROUNDS {
            let reports: Vec<v1::Report> = servers.iter_mut().map(PretendedServer::report).collect();
            let wall = wall_now();
            let now = Now { monotonic: interval * round as u32, wall, record: wall };
            let begun = cpu_time()?;
            for (agent, report) in agents.clone().zip(reports) {
                let (_, outcome) = reducer.report(agent.into(), report, now);
                outcome.context("a report of a pretended server")?;
            }
            let summaries = reducer.summaries(now);
            cost_us = (cpu_time()? - begun).as_secs_f64() * 1e6;
            if round > 0 {
                rounds.push(v1::RackMessage { summaries, ..Default::default() });
            }
        }
        // What goes up whole begins with the RSS.
        servers.iter_mut().for_each(PretendedServer::begin_stream);
        Ok(Self { messages, servers: agents.zip(servers).collect(), rounds, cost_us })
    }

    /// A summary at every interval, and each agent's whole report once in a detail interval, until the controller ends.
    async fn pass_up(mut self, start: Instant, interval: Duration) {
        let per_detail = (DETAIL_INTERVAL.as_secs_f64() / interval.as_secs_f64()).round().max(1.0) as usize;
        let mut due = start;
        for round in 0.. {
            sleep_until(due).await;
            due = (due + interval).max(Instant::now());
            let mut message = self.rounds[round % ROUNDS].clone();
            for (agent, server) in self.servers.iter_mut().skip(round % per_detail).step_by(per_detail) {
                message.agents.push(said(*agent, agent_message::Message::Report(server.report())));
            }
            if self.messages.send(message).await.is_err() {
                return;
            }
        }
    }
}

fn said(agent: u32, message: agent_message::Message) -> v1::FromAgent {
    v1::FromAgent { stream: agent.into(), message: Some(v1::AgentMessage { message: Some(message) }) }
}

/// Of this thread.
fn cpu_time() -> anyhow::Result<Duration> {
    Ok(nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

fn report(args: &Args, measured: &Measured) -> Report {
    let mut table = Table::new(&["", "median", "least", "most"]);
    let mut row = |what: &str, mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        let (least, most) = (values.first().copied().unwrap_or(0.0), values.last().copied().unwrap_or(0.0));
        table.row([what.into(), median(&values).unwrap_or(0.0).into(), least.into(), most.into()]);
    };
    let of_windows = |of: fn(&Window) -> f64| measured.windows.iter().map(of).collect();
    row("CPU of the controller, % of one", of_windows(|window| window.user_pct + window.system_pct));
    row("  of it in the kernel (TCP), %", of_windows(|window| window.system_pct));
    row("whole reports taken per second", of_windows(|window| window.reports_per_second));
    row("time between two tables at the load balancers, ms", measured.gaps.clone());
    row("a summary, bytes", measured.bytes.clone());
    row("CPU of a rack for the reports and the summary of one interval, us", measured.costs.clone());
    Report {
        name: "racks",
        title: "The controller behind racks",
        about: format!(
            "{} racks pass up {} candidates per bucket of {} servers of {} cores every {} ms ({}), each by a gRPC stream \
             of its own (loopback), and every server's whole report once a second; {} load balancers take the tables ({} \
             bytes). CPU by /proc/PID/stat in {} windows of {} s; resident memory {} MiB. A rack's CPU is without gRPC.",
            args.racks,
            args.rack_candidates,
            args.controller.agents,
            args.controller.cores,
            args.controller.report_interval_ms,
            args.controller.policy,
            args.controller.load_balancers,
            measured.table_bytes,
            args.controller.windows,
            args.controller.window_seconds,
            measured.resident_mib,
        ),
        tables: vec![table],
    }
}
