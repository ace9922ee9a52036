//! Cost of the controller: emulated agents, each with its own TCP connection and gRPC stream, report to a real
//! controller in another process.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_api::types::{ReportState, Status};
use coreward_http::client::Client;
use coreward_http::tokens::token_file;
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::connect::Connector;
use coreward_tls::{Role, Tls};
use coreward_wire::v1::{dataplane_update, load_balancer_message};
use coreward_wire::{table, v1};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::certificates::Certificates;
use crate::cli::default_args;
use crate::fake_agent::{self, name};
use crate::report::{Cell, Goal, Report, Table, goal_cells, summarize};

/// Options of `coreward-lab bench controller`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Number of agents, each with its own connection
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub(crate) agents: u32,
    /// Number of cores of each server
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=2048))]
    pub(crate) cores: u16,
    /// Interval of an agent's reports (ms)
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(10..=1000))]
    pub(crate) report_interval_ms: u64,
    /// Number of load balancers that get every table
    #[arg(long, default_value_t = 2)]
    pub(crate) load_balancers: u32,
    /// Number of services, each with an equal share of the servers
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) services: u32,
    /// Policy of every service
    #[arg(long, default_value = coreward_model::policy::DEFAULT)]
    pub(crate) policy: String,
    /// Number of measured windows
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) windows: u32,
    /// Length of a window (s)
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) window_seconds: u64,
}

impl Default for Args {
    fn default() -> Self {
        default_args()
    }
}

/// Options of the measured process.
#[derive(Debug, Clone, clap::Args)]
pub struct ProcessArgs {
    #[arg(long)]
    config: std::path::PathBuf,
}

/// Runs the measured process: the controller as `coreward controller` runs it. Fails as the controller does.
pub fn run_process(args: &ProcessArgs) -> anyhow::Result<()> {
    coreward_control_server::server::run(&args.config)
}

/// Runs the bench. Fails when the controller does not start, or an agent cannot connect.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    coreward_control_server::server::raise_file_limit();
    let directory = Scratch::new()?;
    let mut controller = Controller::start(args, None, &directory.0)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let measured = runtime.block_on(measure(args, &mut controller))?;
    Ok(report(args, &measured))
}

/// Temporary directory; removed when dropped.
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

/// Process of the measured controller; killed when dropped.
pub(crate) struct Controller {
    pub(crate) process: Child,
    pub(crate) address: SocketAddr,
    /// Address of the controller's HTTP API.
    api: SocketAddr,
    /// Token of an operator.
    token_file: PathBuf,
    /// Address of the controller's metrics.
    pub(crate) metrics: SocketAddr,
    /// Certificates of all parts; `None`: connections without TLS.
    certificates: Option<Certificates>,
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Controller {
    pub(crate) fn start(args: &Args, certificates: Option<Certificates>, directory: &Path) -> anyhow::Result<Self> {
        std::fs::write(directory.join("fleet.toml"), fleet(args))?;
        Self::spawn("fleet = \"fleet.toml\"\n", certificates, directory)
    }

    pub(crate) fn start_without_fleet(directory: &Path) -> anyhow::Result<Self> {
        Self::spawn("", None, directory)
    }

    fn spawn(keys: &str, certificates: Option<Certificates>, directory: &Path) -> anyhow::Result<Self> {
        // A free port, which the controller binds shortly afterwards.
        let free = || std::net::TcpListener::bind("127.0.0.1:0")?.local_addr();
        let (address, api, metrics) = (free()?, free()?, free()?);
        let store = directory.join("controller.redb");
        let config = directory.join("controller.toml");
        let tls = certificates.as_ref().map(|all| all.table(Role::Controller, "controller")).transpose()?;
        std::fs::write(
            &config,
            format!(
                "listen = \"{address}\"\napi = \"{api}\"\nstore = {store:?}\nmetrics = \"{metrics}\"\n{keys}{}",
                tls.unwrap_or_default()
            ),
        )?;
        let mut command = Command::new(std::env::current_exe()?);
        let process = command.args(["bench", "controller-process"]).arg("--config").arg(config).spawn()?;
        let token_file = token_file(directory, coreward_api::Role::Operator);
        Ok(Self { process, address, api, token_file, metrics, certificates })
    }

    /// Waits until the controller accepts connections.
    pub(crate) async fn wait_until_listening(&mut self) -> anyhow::Result<()> {
        for _ in 0..100 {
            if TcpStream::connect(self.address).await.is_ok() {
                return Ok(());
            }
            let ended = self.process.try_wait()?;
            ensure!(ended.is_none(), "the controller ended: {ended:?}");
            sleep(Duration::from_millis(50)).await;
        }
        anyhow::bail!("no connection to the controller at {}", self.address)
    }

    /// Returns the table `[tls]` for the file of another part; empty without TLS.
    pub(crate) fn tls_table(&self, role: Role, name: &str) -> anyhow::Result<String> {
        Ok(self.certificates.as_ref().map(|all| all.table(role, name)).transpose()?.unwrap_or_default())
    }

    /// Connects with this role and name, once the controller listens.
    pub(crate) async fn connect_as(&mut self, role: Role, name: &str) -> anyhow::Result<ControlClient<Channel>> {
        self.wait_until_listening().await?;
        let files = self.certificates.as_ref().map(|all| all.issue(role, name)).transpose()?;
        let tls = files.map(Tls::load).transpose()?;
        let connector = Connector::new(self.address, tls.map(|tls| (tls, &[Role::Controller][..])));
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address))?;
        Ok(ControlClient::new(endpoint.connect_with_connector(connector).await?))
    }

    /// Returns a client with an operator's token, once the API answers.
    pub(crate) async fn operator_client(&mut self) -> anyhow::Result<Client> {
        self.wait_until_listening().await?;
        Client::new(self.api.into(), &self.token_file)
    }

    /// Returns the controller's status of everything.
    pub(crate) async fn status(&mut self) -> anyhow::Result<Status> {
        self.operator_client().await?.status(false).await
    }

    /// CPU time of the controller's process so far (s), in user and in kernel mode: fields 14 and 15 of proc(5).
    pub(crate) fn cpu_seconds(&self) -> anyhow::Result<(f64, f64)> {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        let (_, fields) = text.rsplit_once(") ").context("a stat file without a name in brackets")?;
        let field = |number: usize| -> anyhow::Result<f64> {
            Ok(fields.split(' ').nth(number - 3).context("a short stat file")?.parse::<f64>()?)
        };
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no clock ticks")? as f64;
        Ok((field(14)? / ticks, field(15)? / ticks))
    }

    pub(crate) fn resident_mib(&self) -> anyhow::Result<u64> {
        self.memory_mib("VmRSS:")
    }

    /// Returns the value of a line of proc(5)'s status file (MiB).
    pub(crate) fn memory_mib(&self, name: &str) -> anyhow::Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? / 1024)
    }
}

/// Returns the fleet document: services with one VIP and an equal share of the servers each.
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

pub(crate) fn vip(service: u32) -> std::net::SocketAddrV4 {
    let octets = service.to_be_bytes();
    std::net::SocketAddrV4::new([10, 200, octets[2], octets[3]].into(), 80)
}

/// Results of one window.
pub(crate) struct Window {
    pub(crate) user_pct: f64,
    pub(crate) system_pct: f64,
    per_report_us: f64,
    pub(crate) reports_per_second: f64,
}

struct Measured {
    windows: Vec<Window>,
    resident_mib: u64,
    /// Deviation of each table from one interval after its predecessor.
    table_jitter_ms: Vec<f64>,
    table_bytes: usize,
}

async fn measure(args: &Args, controller: &mut Controller) -> anyhow::Result<Measured> {
    let mut tables = Vec::new();
    for balancer in 0..args.load_balancers {
        tables.push(tokio::spawn(take_tables(subscribe(controller, balancer).await?)));
    }
    let interval = Duration::from_millis(args.report_interval_ms);
    fake_agent::start_all(controller, args.agents, args.cores, interval).await?;
    // The first reports carry RSS keys and tables.
    sleep(Duration::from_secs(2)).await;
    let mut windows = Vec::new();
    for _ in 0..args.windows {
        windows.push(window(controller, Duration::from_secs(args.window_seconds)).await?);
    }
    let resident_mib = controller.resident_mib()?;
    let status = controller.status().await?;
    let reporting = status.servers.iter().filter(|server| server.reports == ReportState::Fresh).count();
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
    Ok(measured)
}

pub(crate) async fn window(controller: &mut Controller, length: Duration) -> anyhow::Result<Window> {
    let asking = controller.operator_client().await?;
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
    let registration = v1::LoadBalancerRegistration {
        name: format!("lb{balancer}"),
        version: "bench".into(),
        address: Vec::new(),
        configuration_generation: 0,
    };
    let message = Some(load_balancer_message::Message::Registration(registration));
    sender.send(v1::LoadBalancerMessage { message }).await?;
    let updates = controller
        .connect_as(Role::Lb, &format!("lb{balancer}"))
        .await?
        .load_balancer(ReceiverStream::new(receiver))
        .await?
        .into_inner();
    // The stream ends when no sender is left.
    tokio::spawn(async move {
        sender.closed().await;
    });
    Ok(updates)
}

/// Returns the arrival times of the tables, and the size of the last one, once the controller ends.
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

fn report(args: &Args, measured: &Measured) -> Report {
    let mut table = Table::new(&["", "median", "least", "most", "goal", "verdict"]);
    let mut row = |what: &str, of: fn(&Window) -> f64, goal: Option<Goal>| {
        let summary = summarize(measured.windows.iter().map(of));
        table.row([what.into()].into_iter().chain(summary.map(Cell::Number)).chain(goal_cells(goal, summary[0])));
    };
    let half_a_cpu = Some(Goal::AtMost(50.0));
    row("CPU of the controller, % of one", |window| window.user_pct + window.system_pct, half_a_cpu);
    row("  of it in the kernel (TCP), %", |window| window.system_pct, None);
    row("CPU per report (its share of tables included), us", |window| window.per_report_us, None);
    row("reports taken per second", |window| window.reports_per_second, None);
    let name = "tables early or late at the load balancers, ms";
    table.summary(name, measured.table_jitter_ms.iter().copied(), goal_cells(None, 0.0));
    Report {
        name: "controller",
        title: "The controller",
        about: format!(
            "{} agents of {} cores report every {} ms, each over its own connection (loopback); {} load balancers \
             receive a table of {} ({} bytes) at the same rate. CPU by /proc/PID/stat in {} windows of {} s; resident \
             memory {} MiB.",
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
