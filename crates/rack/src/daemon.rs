//! The daemon: follows the controller, and serves agents while it does.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use coreward_daemon::Connection;
use coreward_listener::message_size::SizedControl;
use coreward_listener::security::Security;
use coreward_metrics::endpoint;
use coreward_metrics::parts;
use coreward_metrics::table::Part;
use coreward_tls::{Limits, Role};
use coreward_wire::v1;
use coreward_wire::v1::control_client::ControlClient;
use futures_util::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use crate::agents::{Service, Shared};
use crate::config::Config;
use crate::reducer::Reducer;

/// Messages that wait for the controller. Agents wait where there is no room; summaries are left out.
const QUEUED: usize = 64;

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// When the file is wrong or the address cannot be listened on.
pub fn run(config: &Path) -> anyhow::Result<()> {
    coreward_daemon::raise_file_limit();
    let path = config;
    let config = Config::load(path)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let hangup = signal(SignalKind::hangup())?;
        let rack = Rack::bind(config.clone()).await?;
        tracing::info!("listening on {}", rack.address());
        let security = rack.security.clone();
        coreward_daemon::run_until_shutdown(async {
            tokio::select! {
                outcome = rack.serve() => outcome,
                never = reload_when_told(hangup, path, config, &security) => match never {},
            }
        })
        .await
    })
}

/// Whose certificates are refused may change; all else takes a restart, which costs agents a second.
async fn reload_when_told(mut hangup: Signal, path: &Path, begun: Config, security: &Security) -> Infallible {
    loop {
        hangup.recv().await;
        match Config::load(path) {
            Ok(config) => {
                security.revoked.set(config.revoked_certificates.iter().copied());
                let unchanged = Config { revoked_certificates: begun.revoked_certificates.clone(), ..config } == begun;
                match unchanged {
                    true => tracing::info!("`revoked_certificates` is in force"),
                    false => tracing::warn!("`revoked_certificates` is in force, other keys after a restart only"),
                }
            }
            Err(mistakes) => tracing::error!("what stood in the file before stays in force: {mistakes}"),
        }
    }
}

/// A rack controller that listens.
pub struct Rack {
    config: Config,
    listener: TcpListener,
    address: SocketAddr,
    security: Arc<Security>,
}

impl Rack {
    /// Listens; agents are refused until there is a controller.
    ///
    /// # Errors
    /// When the address cannot be listened on, or certificates cannot be used.
    ///
    /// Boxed, so that callers do not compile the rack controller once more.
    pub fn bind(config: Config) -> BoxFuture<'static, anyhow::Result<Self>> {
        Box::pin(Self::open(config))
    }

    async fn open(config: Config) -> anyhow::Result<Self> {
        let security = Arc::new(Security::of(&config.listener_config())?);
        let expected = "expected a free port and an address of this host (`listen`)";
        let listener = TcpListener::bind(config.listen)
            .await
            .with_context(|| format!("cannot listen on {}: {expected}", config.listen))?;
        let address = listener.local_addr()?;
        Ok(Self { config, listener, address, security })
    }

    /// Where it listens (the port that the system chose where `listen` names port 0).
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves for ever.
    ///
    /// # Errors
    /// When the listening socket fails.
    pub fn serve(self) -> BoxFuture<'static, anyhow::Result<()>> {
        Box::pin(self.run())
    }

    async fn run(self) -> anyhow::Result<()> {
        let shared = Arc::new(Shared::default());
        let (asked, protected) = (shared.clone(), self.security.clone());
        endpoint::serve(
            self.config.metrics,
            || (),
            move || {
                let counts = asked.counts();
                let mut page = parts::begin(Part::Rack);
                page.add("coreward_rack_controller_connected", &[], f64::from(u8::from(counts.connected)));
                page.add("coreward_rack_agents", &[], counts.agents as f64);
                protected.add_metrics(&mut page);
                page
            },
        )?;
        let service = coreward_listener::builder()
            .add_service(SizedControl::new(Service { shared: shared.clone(), security: self.security.clone() }))
            .serve_with_incoming(self.security.gate(&[Role::Agent], Limits::default()).admit(self.listener));
        tokio::select! {
            outcome = service => outcome.context("the rack's socket failed"),
            never = run_sessions(&self.config, &shared) => match never? {},
            never = self.security.maintenance_loop() => match never {},
        }
    }
}

async fn run_sessions(config: &Config, shared: &Shared) -> anyhow::Result<Infallible> {
    let mut connection = Connection::new(config.controllers.clone(), config.tls.as_ref(), &[Role::Controller])?;
    loop {
        let outcome = run_session(config, &mut connection, shared).await;
        shared.disconnected();
        let pause = connection.ended(outcome.err().as_ref());
        tokio::time::sleep(pause).await;
    }
}

/// One stream to the controller, until it ends.
async fn run_session(config: &Config, connection: &mut Connection, shared: &Shared) -> anyhow::Result<()> {
    let mut client = ControlClient::new(connection.connect().await?);
    let (messages, receiver) = mpsc::channel(QUEUED);
    let registration =
        v1::RackRegistration { name: config.name.clone(), version: env!("CARGO_PKG_VERSION").to_owned() };
    messages.send(v1::RackMessage { registration: Some(registration), ..Default::default() }).await?;
    let begun = client.rack(ReceiverStream::new(receiver)).await?;
    let mut updates = connection.begun(begun)?;
    let mut due = Instant::now();
    loop {
        tokio::select! {
            update = updates.message() => {
                let Some(update) = update? else { return Ok(()) };
                connection.heard();
                if shared.report_interval().is_none() && !shared.counts().connected {
                    // The first: the controller takes us.
                    tracing::info!("connected to controller {}", connection.controller());
                    shared.connected(messages.clone(), Reducer::new(config.detail_interval, config.candidates));
                }
                shared.update(update)?;
            }
            () = tokio::time::sleep_until(due) => {
                let interval = shared.report_interval().unwrap_or(std::time::Duration::from_millis(10));
                due = (due + interval).max(Instant::now());
                if messages.capacity() > 0 {
                    for message in shared.summaries() {
                        // Where they are many each of the rest waits for its place: none is always left out.
                        if messages.send(message).await.is_err() {
                            // The stream is over: its end says why.
                            break;
                        }
                    }
                }
            }
        }
    }
}
