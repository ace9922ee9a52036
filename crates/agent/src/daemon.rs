//! The daemon: tells the controller ten times a second how the server is, and does what it says. Packets go on without
//! it, and without the controller.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_metrics::endpoint::Scrapes;
use coreward_metrics::page::Page;
use coreward_wire::v1::agent_message::Message;
use coreward_wire::v1::agent_update::Update;
use coreward_wire::v1::control_client::ControlClient;
use coreward_wire::{AgentConfiguration, SocketQuery, v1};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::Endpoint;

use crate::agent::Agent;
use crate::config::Config;

/// How often the agent looks after what changes by itself.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two attempts to reach the controller: doubles from the first to the second.
const RETRY_INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// When the controller does not want us: somebody must change its file, or end another agent.
const REFUSED_RETRY_INTERVAL: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A controller that is silent is pinged (HTTP/2), and given up when it does not answer.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT; SIGHUP reads `[dispatch]` again. What packets need is pinned and stays at work; the NIC's RSS is put back.
///
/// # Errors
/// When the file is wrong, the interface does not exist, or the kernel refuses the programs.
pub fn run(config: &Path) -> anyhow::Result<()> {
    let mut agent = Agent::start(Config::load(config)?)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let hangup = signal(SignalKind::hangup())?;
        let scrapes = Scrapes::listen(agent.metrics_address())?;
        let chores = Chores { look: every(LOOK_INTERVAL), reload: Some((hangup, config.to_owned())), scrapes };
        coreward_daemon::until_told(serve_with(&mut agent, chores)).await
    })?;
    agent.leave()
}

/// Follows the controller until this future is dropped.
///
/// # Errors
/// When the controller's address is none.
pub async fn serve(agent: &mut Agent) -> anyhow::Result<()> {
    serve_with(agent, Chores { look: every(LOOK_INTERVAL), reload: None, scrapes: Scrapes::default() }).await
}

async fn serve_with(agent: &mut Agent, mut chores: Chores) -> anyhow::Result<()> {
    let endpoint = endpoint(agent.controller())?;
    match follow_for_ever(&endpoint, agent, &mut chores).await {}
}

/// What is to be done whether there is a controller or not.
struct Chores {
    look: Interval,
    /// SIGHUP, and the file to read then.
    reload: Option<(Signal, PathBuf)>,
    scrapes: Scrapes,
}

enum Chore {
    Look,
    Reload(PathBuf),
    Scrape(oneshot::Sender<Page>),
}

impl Chores {
    /// Nothing is lost when the future is dropped.
    async fn next(&mut self) -> Chore {
        let reload = async {
            match &mut self.reload {
                Some((hangup, path)) => {
                    hangup.recv().await;
                    path.clone()
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.look.tick() => Chore::Look,
            path = reload => Chore::Reload(path),
            scrape = self.scrapes.next() => Chore::Scrape(scrape),
        }
    }
}

impl Chore {
    fn perform(self, agent: &mut Agent) {
        let path = match self {
            Self::Look => return agent.look_after(),
            // Who asked may have gone.
            Self::Scrape(scrape) => return drop(scrape.send(agent.metrics())),
            Self::Reload(path) => path,
        };
        let outcome = Config::load(&path).map_err(anyhow::Error::from).and_then(|config| agent.reload(config));
        match outcome {
            Ok(()) => tracing::info!("{}: [dispatch] is in force", path.display()),
            Err(error) => tracing::error!("what was in force stays: {error:#}"),
        }
    }
}

/// Takes everything off that an agent has put on and puts everything back; stamped connections break.
///
/// # Errors
/// When the file is wrong or something cannot be taken off.
pub fn detach(config: &Path) -> anyhow::Result<()> {
    Agent::start(Config::load(config)?)?.detach()
}

fn endpoint(controller: SocketAddr) -> anyhow::Result<Endpoint> {
    Ok(Endpoint::from_shared(format!("http://{controller}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_INTERVAL)
        .keep_alive_while_idle(true))
}

fn every(period: Duration) -> Interval {
    let mut interval = tokio::time::interval_at(Instant::now() + period, period);
    // Values are absolute: of two reports that are due at once, one is enough.
    interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
    interval
}

/// Why a stream ended.
enum End {
    /// The controller is away, or went.
    Lost(anyhow::Error),
    /// It does not know this server, or another agent speaks for it.
    Refused(String),
}

impl<E: Into<anyhow::Error>> From<E> for End {
    fn from(error: E) -> Self {
        let error = error.into();
        match error.downcast_ref::<tonic::Status>() {
            Some(status) if matches!(status.code(), Code::NotFound | Code::AlreadyExists) => {
                End::Refused(status.message().to_owned())
            }
            _ => End::Lost(error),
        }
    }
}

async fn follow_for_ever(endpoint: &Endpoint, agent: &mut Agent, chores: &mut Chores) -> std::convert::Infallible {
    let mut pause = RETRY_INTERVALS.0;
    loop {
        let mut heard = false;
        let end = follow(endpoint, agent, chores, &mut heard).await;
        if heard {
            pause = RETRY_INTERVALS.0;
        }
        let wait = match end {
            Ok(()) => {
                tracing::warn!("the controller ended the stream; trying again");
                pause
            }
            Err(End::Lost(error)) => {
                tracing::warn!("controller {}: {error:#}; trying again, what is in force stays", endpoint.uri());
                pause
            }
            Err(End::Refused(reason)) => {
                tracing::error!("the controller refuses {}: {reason}", agent.server());
                REFUSED_RETRY_INTERVAL
            }
        };
        let retry = tokio::time::sleep(wait);
        tokio::pin!(retry);
        loop {
            tokio::select! {
                () = &mut retry => break,
                chore = chores.next() => chore.perform(agent),
            }
        }
        pause = (pause * 2).min(RETRY_INTERVALS.1);
    }
}

/// One stream, until it ends. `heard`: whether anything came.
async fn follow(endpoint: &Endpoint, agent: &mut Agent, chores: &mut Chores, heard: &mut bool) -> Result<(), End> {
    let mut client = ControlClient::new(endpoint.connect().await?);
    let (messages, receiver) = mpsc::channel(4);
    let hello = v1::AgentHello { server: agent.server().to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
    messages.send(message(Message::Hello(hello))).await?;
    let mut updates = client.agent(ReceiverStream::new(receiver)).await?.into_inner();
    agent.begin_stream();
    tracing::info!("connected to controller {}", endpoint.uri());
    let mut tick = every(agent.report_interval());
    let mut rss_generation_told = 0;
    loop {
        tokio::select! {
            update = updates.message() => {
                let Some(update) = update? else { return Ok(()) };
                *heard = true;
                match update.update {
                    Some(Update::Configuration(configuration)) => match AgentConfiguration::try_from(&configuration) {
                        Ok(configuration) => agent.configure(configuration),
                        Err(error) => tracing::error!("the controller's configuration cannot be used: {error}"),
                    },
                    Some(Update::SocketQuery(query)) => {
                        // A controller that does not read gets no answer; who asked, asks again.
                        if let Some(answer) = answer(agent, &query) {
                            let _ = messages.try_send(message(Message::SocketAnswer(answer)));
                        }
                    }
                    None => tracing::error!("the controller's update is of a kind that this version does not know"),
                }
                if tick.period() != agent.report_interval() {
                    tick = every(agent.report_interval());
                }
            }
            _ = tick.tick() => {
                let Some(report) = agent.report(rss_generation_told) else { continue };
                let generation = report.rss_generation;
                // A controller that does not read misses a report; the next one has it all.
                if messages.try_send(message(Message::Report(report))).is_ok() {
                    rss_generation_told = generation;
                }
            }
            chore = chores.next() => chore.perform(agent),
        }
    }
}

fn answer(agent: &Agent, query: &v1::SocketQuery) -> Option<v1::SocketAnswer> {
    let answer = SocketQuery::try_from(query).map_err(anyhow::Error::from).and_then(|query| agent.answer(&query));
    match answer {
        Ok(answer) => Some(answer.into()),
        Err(error) => {
            tracing::error!("a question for sockets cannot be answered: {error:#}");
            None
        }
    }
}

fn message(message: Message) -> v1::AgentMessage {
    v1::AgentMessage { message: Some(message) }
}
