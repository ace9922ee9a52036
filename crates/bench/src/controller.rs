//! What the controller costs: agents that only pretend, each with a TCP connection and a gRPC stream of its own, report
//! to a real controller in a process of its own.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use coreward_api::Role;
use coreward_api::client::Client;
use coreward_api::tokens::token_file;
use coreward_api::types::{Reports, Status};
use coreward_intf::{SERVER_COUNTER_NAMES, STEER_COUNTER_NAMES};
use coreward_model::rss::{IndirectionTable, seeded_rng, uniform_below};
use coreward_wire::v1::control_client::ControlClient;
use coreward_wire::v1::{agent_message, dataplane_update, load_balancer_message};
use coreward_wire::{table, v1};
use rand_xoshiro::Xoshiro256PlusPlus;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::report::{Report, Table};

/// Options of `coreward-bench controller`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Agents, each with a connection of its own
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub(crate) agents: u32,
    /// Cores of each server
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=2048))]
    pub(crate) cores: u16,
    /// Time between two reports of an agent
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(10..=1000))]
    pub(crate) report_interval_ms: u64,
    /// Load balancers that take every table
    #[arg(long, default_value_t = 2)]
    pub(crate) load_balancers: u32,
    /// Services, each with its part of the servers
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) services: u32,
    /// Policy of every service
    #[arg(long, default_value = coreward_model::policy::DEFAULT)]
    pub(crate) policy: String,
    /// How often is measured
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) windows: u32,
    /// How long each time
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) window_seconds: u64,
}

impl Default for Args {
    fn default() -> Self {
        use clap::FromArgMatches as _;
        let command = <Self as clap::Args>::augment_args(clap::Command::new("controller"));
        Self::from_arg_matches(&command.get_matches_from(["controller"])).expect("every option has a default")
    }
}

/// Options of the process that is measured.
#[derive(Debug, Clone, clap::Args)]
pub struct ProcessArgs {
    #[arg(long)]
    config: std::path::PathBuf,
}

/// The process that is measured: the controller as `coreward controller` runs it.
///
/// # Errors
/// As the controller has them.
pub fn run_process(args: &ProcessArgs) -> anyhow::Result<()> {
    coreward_control::server::run(&args.config)
}

/// Measures.
///
/// # Errors
/// When the controller does not start, or an agent cannot connect.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    coreward_control::server::raise_file_limit();
    let directory = Scratch::new()?;
    let mut controller = Controller::start(args, &directory.0)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let measured = runtime.block_on(measure(args, &mut controller))?;
    Ok(report(args, &measured))
}

/// A directory that is removed again.
pub(crate) struct Scratch(pub(crate) std::path::PathBuf);

impl Scratch {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("coreward-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The process that is measured; ends with this value.
pub(crate) struct Controller {
    pub(crate) process: Child,
    pub(crate) address: SocketAddr,
    /// Where its HTTP API is.
    api: SocketAddr,
    /// Of an operator.
    token_file: PathBuf,
    /// Where it serves metrics.
    pub(crate) metrics: SocketAddr,
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Controller {
    pub(crate) fn start(args: &Args, directory: &Path) -> anyhow::Result<Self> {
        std::fs::write(directory.join("fleet.toml"), fleet(args))?;
        Self::spawn("fleet = \"fleet.toml\"\n", directory)
    }

    /// One whose fleet is what is applied.
    pub(crate) fn start_without_fleet(directory: &Path) -> anyhow::Result<Self> {
        Self::spawn("", directory)
    }

    fn spawn(keys: &str, directory: &Path) -> anyhow::Result<Self> {
        // A port that is free now; the controller takes it next.
        let free = || std::net::TcpListener::bind("127.0.0.1:0")?.local_addr();
        let (address, api, metrics) = (free()?, free()?, free()?);
        let store = directory.join("controller.redb");
        let config = directory.join("controller.toml");
        std::fs::write(
            &config,
            format!("listen = \"{address}\"\napi = \"{api}\"\nstore = {store:?}\nmetrics = \"{metrics}\"\n{keys}"),
        )?;
        let mut command = Command::new(std::env::current_exe()?);
        let process = command.arg("controller-process").arg("--config").arg(config).spawn()?;
        let token_file = token_file(directory, Role::Operator);
        Ok(Self { process, address, api, token_file, metrics })
    }

    pub(crate) async fn connect(&mut self) -> anyhow::Result<ControlClient<Channel>> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address))?.tcp_nodelay(true);
        for _ in 0..100 {
            if let Ok(channel) = endpoint.connect().await {
                // The status of ten thousand servers is long.
                return Ok(ControlClient::new(channel).max_decoding_message_size(64 << 20));
            }
            let ended = self.process.try_wait()?;
            ensure!(ended.is_none(), "the controller ended: {ended:?}");
            sleep(Duration::from_millis(50)).await;
        }
        anyhow::bail!("no connection to the controller at {}", self.address)
    }

    /// An operator, once it answers.
    pub(crate) async fn asking(&mut self) -> anyhow::Result<Client> {
        self.connect().await?;
        Client::new(self.api.into(), &self.token_file)
    }

    /// Everything there is to see.
    pub(crate) async fn status(&mut self) -> anyhow::Result<Status> {
        self.asking().await?.status(false).await
    }

    /// CPU time of all its threads so far, in user and in kernel mode (proc(5): fields 14 and 15, in clock ticks).
    pub(crate) fn cpu_seconds(&self) -> anyhow::Result<(f64, f64)> {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        let (_, fields) = text.rsplit_once(") ").context("a stat file without a name in brackets")?;
        let field = |number: usize| -> anyhow::Result<f64> {
            Ok(fields.split(' ').nth(number - 3).context("a short stat file")?.parse::<f64>()?)
        };
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no clock ticks")? as f64;
        Ok((field(14)? / ticks, field(15)? / ticks))
    }

    /// Its process's id.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn resident_mib(&self) -> anyhow::Result<u64> {
        self.memory_mib("VmRSS:")
    }

    /// A line of proc(5)'s status file.
    pub(crate) fn memory_mib(&self, name: &str) -> anyhow::Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? / 1024)
    }
}

/// The fleet's file: services, each with its part of the servers, on a VIP of its own.
pub(crate) fn fleet(args: &Args) -> String {
    let mut text = format!("report_interval = \"{}ms\"\n", args.report_interval_ms);
    for agent in 0..args.agents {
        let octets = agent.to_be_bytes();
        text += &format!("[[server]]\nname = \"{}\"\naddress = \"10.2.{}.{}\"\n", name(agent), octets[2], octets[3]);
    }
    for service in 0..args.services {
        let part = (0..args.agents).filter(|agent| agent % args.services == service).map(name).collect::<Vec<_>>();
        let (vip, policy) = (vip(service), &args.policy);
        text += &format!(
            "[[service]]\nname = \"web{service}\"\nvip = \"{vip}\"\npolicy = {policy:?}\nservers = {part:?}\n"
        );
    }
    text
}

/// Of a service.
pub(crate) fn vip(service: u32) -> std::net::SocketAddrV4 {
    let octets = service.to_be_bytes();
    std::net::SocketAddrV4::new([10, 200, octets[2], octets[3]].into(), 80)
}

pub(crate) fn name(agent: u32) -> String {
    format!("s{agent}")
}

/// What one window showed.
pub(crate) struct Window {
    pub(crate) user_pct: f64,
    pub(crate) system_pct: f64,
    per_report_us: f64,
    pub(crate) reports_per_second: f64,
}

struct Measured {
    windows: Vec<Window>,
    resident_mib: u64,
    /// How much later or earlier than one interval after its predecessor each table came.
    table_jitter_ms: Vec<f64>,
    table_bytes: usize,
}

async fn measure(args: &Args, controller: &mut Controller) -> anyhow::Result<Measured> {
    let mut tables = Vec::new();
    for balancer in 0..args.load_balancers {
        tables.push(tokio::spawn(take_tables(subscribe(controller, balancer).await?)));
    }
    let mut clients = Vec::new();
    for _ in 0..args.agents {
        clients.push(controller.connect().await?);
    }
    let sent = Arc::new(AtomicU64::new(0));
    let (start, interval) = (Instant::now(), Duration::from_millis(args.report_interval_ms));
    for (agent, client) in (0..).zip(clients) {
        // Spread evenly over the interval, as agents that know nothing of each other are.
        let phase = interval * agent / args.agents;
        tokio::spawn(pretend(client, agent, args.cores, start + phase, interval, sent.clone()));
    }
    // The first reports bring RSS keys and tables.
    sleep(Duration::from_secs(2)).await;
    let mut windows = Vec::new();
    for _ in 0..args.windows {
        windows.push(window(controller, Duration::from_secs(args.window_seconds)).await?);
    }
    let resident_mib = controller.resident_mib()?;
    let status = controller.status().await?;
    let reporting = status.servers.iter().filter(|server| server.reports == Reports::Fresh).count();
    ensure!(reporting == args.agents as usize, "{reporting} of {} agents report", args.agents);
    let refused: u64 = status.refused_reports.values().sum();
    ensure!(refused == 0, "{refused} reports were refused: {:?}", status.refused_reports);
    controller.process.kill()?;
    let mut measured = Measured { windows, resident_mib, table_jitter_ms: Vec::new(), table_bytes: 0 };
    for taken in tables {
        let (arrivals, bytes) = taken.await?;
        let expected = args.report_interval_ms as f64;
        let gaps = arrivals.windows(2).skip(20).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3 - expected);
        measured.table_jitter_ms.extend(gaps.map(f64::abs));
        measured.table_bytes = bytes;
    }
    measured.table_jitter_ms.sort_by(f64::total_cmp);
    Ok(measured)
}

pub(crate) async fn window(controller: &mut Controller, length: Duration) -> anyhow::Result<Window> {
    let asking = controller.asking().await?;
    let accepted = async || anyhow::Ok((asking.status(false).await?.accepted_reports as f64, Instant::now()));
    let (reports_before, first) = accepted().await?;
    let (before, start) = (controller.cpu_seconds()?, Instant::now());
    sleep(length).await;
    let (after, elapsed) = (controller.cpu_seconds()?, start.elapsed().as_secs_f64());
    let (reports_after, last) = accepted().await?;
    let rate = (reports_after - reports_before) / (last - first).as_secs_f64();
    let (user, system) = (after.0 - before.0, after.1 - before.1);
    Ok(Window {
        user_pct: user / elapsed * 100.0,
        system_pct: system / elapsed * 100.0,
        per_report_us: (user + system) / elapsed / rate * 1e6,
        reports_per_second: rate,
    })
}

pub(crate) async fn subscribe(
    controller: &mut Controller,
    balancer: u32,
) -> anyhow::Result<Streaming<v1::DataplaneUpdate>> {
    let (sender, receiver) = mpsc::channel(1);
    let hello = v1::LoadBalancerHello {
        name: format!("lb{balancer}"),
        version: "bench".into(),
        address: Vec::new(),
        takes_changes: true,
    };
    let message = Some(load_balancer_message::Message::Hello(hello));
    sender.send(v1::LoadBalancerMessage { message }).await?;
    let updates = controller.connect().await?.load_balancer(ReceiverStream::new(receiver)).await?.into_inner();
    // The stream lives as long as somebody could still say something.
    tokio::spawn(async move {
        sender.closed().await;
    });
    Ok(updates)
}

/// When each table came, and the size of the last, until the controller ends.
pub(crate) async fn take_tables(mut updates: Streaming<v1::DataplaneUpdate>) -> (Vec<Instant>, usize) {
    let (mut arrivals, mut size) = (Vec::new(), 0);
    while let Ok(Some(update)) = updates.message().await {
        if let Some(dataplane_update::Update::Table(bytes)) = update.update {
            size = bytes.len();
            table::decode(bytes).expect("the controller sends tables that can be read");
            arrivals.push(Instant::now());
        }
    }
    (arrivals, size)
}

/// One agent, until the controller ends. `sent`: reports of all agents.
pub(crate) async fn pretend(
    mut client: ControlClient<Channel>,
    agent: u32,
    cores: u16,
    start: Instant,
    interval: Duration,
    sent: Arc<AtomicU64>,
) {
    let (sender, receiver) = mpsc::channel(2);
    let hello = v1::AgentHello { server: name(agent), version: "bench".into() };
    let hello = v1::AgentMessage { message: Some(agent_message::Message::Hello(hello)) };
    if sender.send(hello).await.is_err() {
        return;
    }
    let Ok(answers) = client.agent(ReceiverStream::new(receiver)).await else { return };
    let mut answers = answers.into_inner();
    tokio::spawn(async move { while let Ok(Some(_)) = answers.message().await {} });
    let mut server = PretendedServer::new(agent, cores, interval);
    let mut due = start;
    loop {
        sleep_until(due).await;
        // One that is late does not send twice.
        due = (due + interval).max(Instant::now());
        let report = agent_message::Message::Report(server.report());
        if sender.send(v1::AgentMessage { message: Some(report) }).await.is_err() {
            return;
        }
        sent.fetch_add(1, Ordering::Relaxed);
    }
}

/// Cores with random loads that have been up for weeks: busy times are numbers of eight bytes.
pub(crate) struct PretendedServer {
    sequence: u64,
    random: Xoshiro256PlusPlus,
    busy_ns: Vec<u64>,
    interval: Duration,
    rss: v1::Rss,
}

impl PretendedServer {
    pub(crate) fn new(agent: u32, cores: u16, interval: Duration) -> Self {
        let table = IndirectionTable::balanced(agent.into(), 128, cores).expect("128 is a power of two");
        let indirection_table = table.queues().iter().map(|queue| u32::from(*queue)).collect();
        let rss = v1::Rss { source: "ethtool".into(), key: vec![0x6d; 40], indirection_table };
        let busy_ns = vec![1_000_000_000_000_000; usize::from(cores)];
        Self { sequence: 0, random: seeded_rng(agent.into(), 0), busy_ns, interval, rss }
    }

    /// The next report will begin a stream.
    pub(crate) fn begin_stream(&mut self) {
        self.sequence = 0;
    }

    pub(crate) fn report(&mut self) -> v1::Report {
        self.sequence += 1;
        let interval_ns = self.interval.as_nanos() as u32;
        for busy in &mut self.busy_ns {
            *busy += u64::from(uniform_below(&mut self.random, interval_ns));
        }
        let names = SERVER_COUNTER_NAMES.iter().chain(&STEER_COUNTER_NAMES);
        let counters: HashMap<String, u64> = names.map(|name| ((*name).to_owned(), self.sequence * 1000)).collect();
        v1::Report {
            sequence: self.sequence,
            sent_unix_ns: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64,
            time_to_live_ms: 10_000,
            measured_ns: 2_000_000_000_000_000 + self.sequence * u64::from(interval_ns),
            core_busy_ns: self.busy_ns.clone(),
            open_connections: 1000,
            rss_generation: 1,
            rss: (self.sequence == 1).then(|| self.rss.clone()),
            rss_matched: self.sequence * 100,
            rss_mismatched: 0,
            counters,
            warnings: Vec::new(),
            dispatch: Vec::new(),
            connections: None,
            configuration_generation: 1,
        }
    }
}

fn report(args: &Args, measured: &Measured) -> Report {
    let mut table = Table::new(&["", "median", "least", "most"]);
    let mut row = |what: &str, of: fn(&Window) -> f64| {
        let mut values: Vec<f64> = measured.windows.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        let median = coreward_model::statistics::median(&values).unwrap_or(0.0);
        let (least, most) = (values.first().copied().unwrap_or(0.0), values.last().copied().unwrap_or(0.0));
        table.row([what.into(), median.into(), least.into(), most.into()]);
    };
    row("CPU of the controller, % of one", |window| window.user_pct + window.system_pct);
    row("  of it in the kernel (TCP), %", |window| window.system_pct);
    row("CPU per report (its share of tables included), us", |window| window.per_report_us);
    row("reports taken per second", |window| window.reports_per_second);
    let jitter = &measured.table_jitter_ms;
    let at = |part: f64| jitter.get(((jitter.len() as f64 * part) as usize).min(jitter.len().saturating_sub(1)));
    let (median, most) = (at(0.5).copied().unwrap_or(0.0), at(1.0).copied().unwrap_or(0.0));
    let least = at(0.0).copied().unwrap_or(0.0);
    table.row(["tables early or late at the load balancers, ms".into(), median.into(), least.into(), most.into()]);
    Report {
        name: "controller",
        title: "The controller",
        about: format!(
            "{} agents of {} cores report every {} ms, each by a gRPC stream over a TCP connection of its own \
             (loopback); {} load balancers take a table of {} ({} bytes) at the same rate. CPU by /proc/PID/stat in {} \
             windows of {} s; resident memory {} MiB. To reach: less than 50 % of one CPU.",
            args.agents,
            args.cores,
            args.report_interval_ms,
            args.load_balancers,
            args.policy,
            measured.table_bytes,
            args.windows,
            args.window_seconds,
            measured.resident_mib,
        ),
        tables: vec![table],
    }
}
