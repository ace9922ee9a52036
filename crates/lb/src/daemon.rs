//! The daemon: attaches the program, or takes over the one at work, and follows the controller. The data plane goes on
//! without the daemon and without the controller; whoever comes back finds it where it was.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use coreward_dataplane::lb::{self, LoadBalancer};
use coreward_dataplane::neighbour::{Change, Resolver};
use coreward_wire::v1::control_client::ControlClient;
use coreward_wire::v1::dataplane_update::Update;
use coreward_wire::v1::load_balancer_message::Message;
use coreward_wire::{FleetConfiguration, table, v1};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

use crate::config::{Config, XdpMode};
use crate::forwarder::Forwarder;

/// The controller hears this often how things are.
const STATE_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two attempts to reach the controller: doubles from the first to the second.
const RETRY_INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A controller that is silent is pinged (HTTP/2), and given up when it does not answer.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT; what is pinned stays at work.
///
/// # Errors
/// When the file is wrong, the interface does not exist, or the kernel refuses the program.
pub fn run(config: &Path) -> anyhow::Result<()> {
    let config = Config::load(config)?;
    let mut balancer = LoadBalancer::load(options(&config))?;
    let attachment = balancer.attach(&config.interface, config.xdp_mode.into())?;
    let verb = if balancer.taken_over() { "taken over" } else { "attached" };
    tracing::info!("{} {verb} at {} ({attachment:?})", config.name, config.interface);
    let (resolver, changes) = Resolver::start(&config.interface)?;
    let forwarder = Forwarder::new(balancer, attachment, resolver);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(serve(config, forwarder, changes))
}

/// Takes the program from the interface and removes all pins: forwarding ends.
///
/// # Errors
/// When the file is wrong or a pin cannot be removed.
pub fn detach(config: &Path) -> anyhow::Result<()> {
    let config = Config::load(config)?;
    let mut balancer = LoadBalancer::load(options(&config))?;
    if !balancer.taken_over() {
        tracing::info!("nothing was pinned in {}", config.pin_directory.display());
    } else {
        balancer.attach(&config.interface, config.xdp_mode.into())?;
    }
    balancer.detach()
}

fn options(config: &Config) -> lb::Options {
    lb::Options { pin_directory: Some(config.pin_directory.clone()), ..Default::default() }
}

impl From<XdpMode> for lb::XdpMode {
    fn from(mode: XdpMode) -> Self {
        match mode {
            XdpMode::Native => Self::Native,
            XdpMode::Generic => Self::Generic,
            XdpMode::Auto => Self::Auto,
        }
    }
}

async fn serve(
    config: Config,
    mut forwarder: Forwarder,
    changes: std::sync::mpsc::Receiver<Change>,
) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut neighbours = into_async(changes);
    tokio::select! {
        outcome = follow_for_ever(&config, &mut forwarder, &mut neighbours) => outcome,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

/// The resolver's changes where the runtime can wait for them.
fn into_async(changes: std::sync::mpsc::Receiver<Change>) -> mpsc::UnboundedReceiver<Change> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || while changes.recv().is_ok_and(|change| sender.send(change).is_ok()) {});
    receiver
}

type Neighbours = mpsc::UnboundedReceiver<Change>;

async fn follow_for_ever(
    config: &Config,
    forwarder: &mut Forwarder,
    neighbours: &mut Neighbours,
) -> anyhow::Result<()> {
    let endpoint = Endpoint::from_shared(format!("http://{}", config.controller))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_INTERVAL)
        .keep_alive_while_idle(true);
    let mut pause = RETRY_INTERVALS.0;
    loop {
        let mut heard = false;
        let error = follow(config, &endpoint, forwarder, neighbours, &mut heard).await.err();
        if heard {
            pause = RETRY_INTERVALS.0;
        }
        let reason = error.map_or_else(|| "it ended the stream".to_owned(), |error| format!("{error:#}"));
        tracing::warn!("controller {}: {reason}; trying again, what is in force stays", config.controller);
        let retry = tokio::time::sleep(pause);
        tokio::pin!(retry);
        loop {
            tokio::select! {
                () = &mut retry => break,
                change = neighbours.recv() => forwarder.neighbour(change.context("MAC addresses are not resolved")?),
            }
        }
        forwarder.look_after()?;
        pause = (pause * 2).min(RETRY_INTERVALS.1);
    }
}

/// One stream, until it ends. `heard`: whether anything came.
async fn follow(
    config: &Config,
    endpoint: &Endpoint,
    forwarder: &mut Forwarder,
    neighbours: &mut Neighbours,
    heard: &mut bool,
) -> anyhow::Result<()> {
    let mut client = ControlClient::new(endpoint.connect().await?).max_decoding_message_size(64 << 20);
    let (messages, receiver) = mpsc::channel(4);
    let hello = v1::LoadBalancerHello { name: config.name.clone(), version: env!("CARGO_PKG_VERSION").to_owned() };
    messages.send(message(Message::Hello(hello))).await?;
    let mut updates = client.load_balancer(ReceiverStream::new(receiver)).await?.into_inner();
    tracing::info!("connected to controller {}", config.controller);
    let mut tick = tokio::time::interval(STATE_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told_tables = 0;
    loop {
        // Told once a second, and at once when a service got its first table or a server was found or lost.
        let due = tokio::select! {
            update = updates.message() => {
                let Some(update) = update? else { return Ok(()) };
                *heard = true;
                apply(forwarder, update);
                forwarder.tables() != told_tables
            }
            change = neighbours.recv() => {
                forwarder.neighbour(change.context("MAC addresses are not resolved")?);
                true
            }
            _ = tick.tick() => {
                forwarder.look_after()?;
                true
            }
        };
        if due {
            told_tables = forwarder.tables();
            // A controller that does not read misses a state; the next one has it all.
            let _ = messages.try_send(message(Message::State(forwarder.state())));
        }
    }
}

fn message(message: Message) -> v1::LoadBalancerMessage {
    v1::LoadBalancerMessage { message: Some(message) }
}

/// An update that cannot be used is logged; what is in force stays.
fn apply(forwarder: &mut Forwarder, update: v1::DataplaneUpdate) {
    let applied = match update.update {
        Some(Update::Configuration(configuration)) => FleetConfiguration::try_from(&configuration)
            .map_err(anyhow::Error::from)
            .and_then(|configuration| forwarder.configure(configuration)),
        Some(Update::Table(bytes)) => table::decode(bytes)
            .map_err(anyhow::Error::from)
            .and_then(|(service, table)| forwarder.install(service, &table)),
        None => Err(anyhow::anyhow!("an update of a kind that this version does not know")),
    };
    if let Err(error) = applied {
        tracing::error!("the controller's update cannot be used: {error:#}");
    }
}
