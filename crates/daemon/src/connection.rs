//! The way to the controller: which one of several, what is done when it is silent, and when to try again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use coreward_metrics::page::Page;
use coreward_tls::connect::Connector;
use coreward_tls::{Files, Role, Tls, table};
use coreward_wire::{LEADER, TERM};
use rand::TryRng as _;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use crate::controllers::Controllers;

/// Time between two attempts: doubles from the first to the second, once per round of all controllers.
const RETRY_INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// When a controller does not want us: somebody must change a file, or end another daemon.
const REJECTED_RETRY_INTERVAL: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A controller that is silent is pinged (HTTP/2), and given up when it does not answer.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// What a controller may send before it is told that some of it was read (HTTP/2): a table has 13 kB and there are a thousand in a
/// second, so with HTTP/2's 64 kB they would wait for that most of the time. The configuration of ten thousand servers fits, too.
const WINDOW_BYTES: u32 = 1 << 20;

/// A leader of an older term than one that was heard within this time is not believed. The longest lease there is: so long may a
/// machine whose clocks stood still take itself for the leader. Not for ever, as another etcd (`coreward store copy`, a restored
/// snapshot) may count terms from the start.
const TERM_MEMORY: Duration = Duration::from_secs(60);

/// Where a daemon stands with its controllers.
pub struct Connection {
    controllers: Controllers,
    tls: Option<Arc<Tls>>,
    /// Who may be there.
    expected: &'static [Role],
    turns: Turns,
    terms: Terms,
}

impl Connection {
    /// Nothing is tried yet. With `tls` one of the roles of `expected` must answer; without it nobody knows who anybody is. Looks after the certificates from now on, on the
    /// runtime that it is called from.
    ///
    /// # Errors
    /// When the certificates cannot be used.
    pub fn new(controllers: Controllers, tls: Option<&Files>, expected: &'static [Role]) -> anyhow::Result<Self> {
        let tls = table::load(tls)?;
        match &tls {
            Some(tls) => drop(tokio::spawn(tls.clone().maintenance_loop())),
            None if controllers.addresses().iter().all(|address| address.ip().is_loopback()) => {}
            None => tracing::warn!(
                "no `[tls]`: whoever is on the way to {controllers} can read the cookie keys, and change what comes from there"
            ),
        }
        let turns = Turns::new(controllers.addresses().len());
        Ok(Self { turns, terms: Terms::default(), tls, expected, controllers })
    }

    /// What an operator should know: certificates that end soon.
    pub fn warnings(&self) -> Vec<String> {
        self.tls.as_ref().map(|tls| tls.warnings()).unwrap_or_default()
    }

    /// When certificates end.
    pub fn add_metrics(&self, page: &mut Page) {
        self.tls.iter().for_each(|tls| add_expiry(tls, page));
    }

    /// Whose turn it is.
    pub fn controller(&self) -> SocketAddr {
        self.controllers.addresses()[self.turns.current]
    }

    /// Connects to the one whose turn it is.
    ///
    /// # Errors
    /// When it does not answer within two seconds.
    pub fn connect(&self) -> impl Future<Output = anyhow::Result<Channel>> + use<> {
        let address = self.controller();
        let connector = Connector::new(address, self.tls.clone().map(|tls| (tls, self.expected)));
        async move {
            let endpoint = Endpoint::from_shared(format!("http://{address}"))?
                .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
                .keep_alive_timeout(KEEP_ALIVE_INTERVAL)
                .keep_alive_while_idle(true)
                .initial_stream_window_size(WINDOW_BYTES)
                .initial_connection_window_size(WINDOW_BYTES);
            let connected = tokio::time::timeout(CONNECT_TIMEOUT, endpoint.connect_with_connector(connector)).await;
            Ok(connected.map_err(|_| anyhow!("no connection within {CONNECT_TIMEOUT:?}"))??)
        }
    }

    /// The stream that the controller has begun, if it may be believed.
    ///
    /// # Errors
    /// When it led before one that was heard a moment ago: it was stopped, and does not know yet.
    pub fn begun<T>(&mut self, response: Response<T>) -> anyhow::Result<T> {
        let term = response.metadata().get(TERM).and_then(|term| term.to_str().ok()?.parse().ok());
        self.terms.begun(term, Instant::now())?;
        Ok(response.into_inner())
    }

    /// The controller has answered with more than an error: it leads.
    pub fn heard(&mut self) {
        self.turns.heard();
        self.terms.heard(Instant::now());
    }

    /// The stream has ended, by `error` or in order: logged, and whose turn is next is chosen. Gives the time to wait
    /// before that; it is drawn anew each time, so that a fleet does not come back in one moment.
    pub fn ended(&mut self, error: Option<&anyhow::Error>) -> Duration {
        let (controller, end) = (self.controller(), self.end(error));
        let pause = self.turns.ended(&end);
        let next = self.controller();
        let then = if next == controller { "trying again".to_owned() } else { format!("trying {next}") };
        match (end, error) {
            (End::Rejected, Some(error)) => {
                tracing::error!("controller {controller} refuses this daemon: {}; {then}", reason(error));
            }
            (_, Some(error)) => {
                tracing::warn!("controller {controller}: {}; {then}, what is in force stays", reason(error));
            }
            (_, None) => {
                tracing::warn!("controller {controller} ended the stream; {then}, what is in force stays");
            }
        }
        jittered(pause)
    }

    fn end(&self, error: Option<&anyhow::Error>) -> End {
        let Some(status) = error.and_then(|error| error.downcast_ref::<Status>()) else { return End::Lost };
        match status.code() {
            Code::NotFound | Code::AlreadyExists | Code::PermissionDenied | Code::Unauthenticated => End::Rejected,
            Code::Unavailable => {
                let named = status.metadata().get(LEADER).and_then(|leader| leader.to_str().ok()?.parse().ok());
                let place = |leader| self.controllers.addresses().iter().position(|address| *address == leader);
                // An address that is not in our file is nobody we know.
                named.and_then(place).map_or(End::Lost, End::NotTheLeader)
            }
            _ => End::Lost,
        }
    }
}

/// What somebody can act on: of an error below gRPC its cause.
fn reason(error: &anyhow::Error) -> String {
    match error.downcast_ref::<Status>() {
        Some(status) if std::error::Error::source(status).is_some() => error.root_cause().to_string(),
        Some(status) if status.message().is_empty() => status.code().to_string(),
        Some(status) => status.message().to_owned(),
        None => error.root_cause().to_string(),
    }
}

/// When a process's certificates end, for Prometheus.
pub fn add_expiry(tls: &Tls, page: &mut Page) {
    let mut ends = std::collections::BTreeMap::new();
    for (which, certificate) in tls.certificates() {
        let end = certificate.not_after.as_secs_f64();
        ends.entry(which).and_modify(|first: &mut f64| *first = first.min(end)).or_insert(end);
    }
    ends.into_iter().for_each(|(which, end)| page.add("coreward_certificate_expiry_seconds", &[which], end));
}

/// Why a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The controller is away, went, or does not lead.
    Lost,
    /// It does not know who we are, or somebody else is who we say we are.
    Rejected,
    /// It names the one that leads.
    NotTheLeader(usize),
}

/// Who is tried when. Without clock and chance.
struct Turns {
    count: usize,
    current: usize,
    /// Attempts since a controller answered.
    failed: usize,
    answered: bool,
    pause: Duration,
}

impl Turns {
    fn new(count: usize) -> Self {
        Self { count, current: 0, failed: 0, answered: false, pause: RETRY_INTERVALS.0 }
    }

    fn heard(&mut self) {
        (self.answered, self.failed, self.pause) = (true, 0, RETRY_INTERVALS.0);
    }

    /// How long to wait for the next attempt.
    fn ended(&mut self, end: &End) -> Duration {
        let answered = std::mem::take(&mut self.answered);
        self.failed += usize::from(!answered);
        match end {
            End::NotTheLeader(leader) => self.current = *leader,
            // Who answered last is most likely back first, and has what we know.
            _ if answered => {}
            _ => self.current = (self.current + 1) % self.count,
        }
        let round_is_over = self.failed > 0 && self.failed.is_multiple_of(self.count);
        match end {
            End::Rejected => REJECTED_RETRY_INTERVAL,
            _ if round_is_over => {
                let pause = self.pause;
                self.pause = (pause * 2).min(RETRY_INTERVALS.1);
                pause
            }
            _ => RETRY_INTERVALS.0,
        }
    }
}

/// Which term was heard last. Without clock.
#[derive(Default)]
struct Terms {
    /// And when.
    newest: Option<(u64, Instant)>,
}

impl Terms {
    /// `term`: of whom there is a stream now; `None`: it does not say.
    fn begun(&mut self, term: Option<u64>, now: Instant) -> anyhow::Result<()> {
        match (term, self.newest) {
            (Some(term), Some((newest, heard))) if term < newest && now.duration_since(heard) < TERM_MEMORY => Err(
                anyhow!("it led before the controller that was heard last (term {term}, expected {newest} or more)"),
            ),
            _ => {
                self.newest = term.map(|term| (term, now));
                Ok(())
            }
        }
    }

    /// By the stream that there is.
    fn heard(&mut self, now: Instant) {
        if let Some((_, heard)) = &mut self.newest {
            *heard = now;
        }
    }
}

/// Between half of the interval and all of it.
fn jittered(interval: Duration) -> Duration {
    // Without the system's randomness all wait as long as each other, no worse.
    let part = rand::rngs::SysRng.try_next_u32().unwrap_or(u32::MAX);
    interval.mul_f64(0.5 + 0.5 * f64::from(part) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests;
