//! What all callers share.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use coreward_etcd::leadership::Leadership;
use coreward_metrics::latency::Latencies;
use coreward_metrics::page::Page;
use coreward_metrics::parts;
use coreward_metrics::table::Part;
use coreward_wire::{table, v1};
use prost::bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::clock::{RecordClock, wall_now};
use crate::controller::{Controller, Now};
use crate::fleet::Fleet;

use super::keeper::Change;
use super::sockets::Sockets;

/// The controller's decisions, and what they say now.
pub struct Shared {
    controller: Mutex<Controller>,
    newest: watch::Sender<Newest>,
    /// Until when this controller leads; `None`: there is no other.
    leadership: Option<Arc<Leadership>>,
    /// Counts configurations of agents: what they wait for.
    agent_configurations: watch::Sender<u64>,
    /// Who is asked for sockets, and who asks.
    pub sockets: Sockets,
    /// To the keeper.
    changes: mpsc::Sender<WantedChange>,
    /// Whether tables are made: after a restart not at once.
    settled: AtomicBool,
    /// What the newest configurations were made of, beside the fleet.
    told: Mutex<Told>,
    /// From servers' newest reports to the tables that have them.
    report_to_table: Mutex<Latencies>,
    started: Instant,
    clock: RecordClock,
}

/// A change of the records, and who waits for it.
pub struct WantedChange {
    /// What is to be changed.
    pub change: Change,
    /// Told when it is in force, or why it is not.
    pub done: oneshot::Sender<anyhow::Result<()>>,
}

/// Changes that wait for the keeper.
const CHANGES: usize = 64;

#[derive(Default)]
struct Told {
    alive: BTreeSet<String>,
    predecessor_changes: u64,
    /// When the last tables were made.
    ticked: Duration,
}

/// What every load balancer is to have now, encoded once for all of them. Whoever is slow finds the newest here when it
/// comes to look, and nothing queues up.
#[derive(Clone)]
pub struct Newest {
    /// The fleet's configuration.
    pub configuration: Arc<v1::FleetConfiguration>,
    /// A table per service.
    pub tables: Arc<[Bytes]>,
}

impl Shared {
    /// Changes that callers want come out of the receiver.
    pub fn new(
        controller: Controller,
        clock: RecordClock,
        leadership: Option<Arc<Leadership>>,
    ) -> (Self, mpsc::Receiver<WantedChange>) {
        let start = Now { monotonic: Duration::ZERO, wall: wall_now(), record: clock.now() };
        let configuration = Arc::new((&controller.fleet_configuration(start)).into());
        let (changes, receiver) = mpsc::channel(CHANGES);
        let shared = Self {
            newest: watch::Sender::new(Newest { configuration, tables: Arc::new([]) }),
            agent_configurations: watch::Sender::new(0),
            sockets: Sockets::default(),
            leadership,
            changes,
            settled: AtomicBool::new(false),
            told: Mutex::new(Told { alive: controller.alive(start), ..Told::default() }),
            report_to_table: Mutex::default(),
            controller: Mutex::new(controller),
            started: Instant::now(),
            clock,
        };
        (shared, receiver)
    }

    /// Has the keeper change the records; returns when that is in force.
    ///
    /// # Errors
    /// When it cannot be written down.
    pub async fn change(&self, change: Change) -> anyhow::Result<()> {
        let (done, outcome) = oneshot::channel();
        self.changes.send(WantedChange { change, done }).await.context("the controller is ending")?;
        outcome.await.context("the controller is ending")?
    }

    /// Until when this controller leads; `None`: there is no other.
    pub fn leadership(&self) -> Option<&Arc<Leadership>> {
        self.leadership.as_ref()
    }

    /// Whether this controller leads now. Asked before anything is handed out: a process that was stopped does not know how
    /// long.
    pub fn leads(&self) -> bool {
        self.leadership.as_ref().is_none_or(|leadership| leadership.holds())
    }

    /// Returns when this controller leads no more.
    pub async fn deposed(&self) -> String {
        match &self.leadership {
            Some(leadership) => leadership.ended().await,
            None => std::future::pending().await,
        }
    }

    /// The moment.
    pub fn now(&self) -> Now {
        Now { monotonic: self.started.elapsed(), wall: wall_now(), record: self.clock.now() }
    }

    /// Held for microseconds; never across an await.
    pub fn controller(&self) -> MutexGuard<'_, Controller> {
        // Every call leaves the state whole, so after a panic in one of them the others can go on.
        self.controller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything there is to see; with whole RSS keys where `rss_keys`.
    pub fn status(&self, rss_keys: bool) -> coreward_api::types::Status {
        let now = self.now();
        self.controller().status(rss_keys, now)
    }

    /// The cookie keys, without the secrets.
    pub fn keys(&self) -> coreward_api::types::Keys {
        let now = self.now();
        self.controller().keys(now)
    }

    /// Whether tables are made.
    pub fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Relaxed)
    }

    /// What Prometheus is told.
    pub fn metrics(&self) -> Page {
        let now = self.now();
        let status = self.controller().status_v1(now);
        let mut page = parts::begin(Part::Controller);
        parts::status(&mut page, &status, now.wall);
        let latencies = *self.report_to_table.lock().unwrap_or_else(PoisonError::into_inner);
        page.add_latencies("coreward_report_to_table_seconds", latencies);
        page
    }

    /// Whether the loads of all servers that take new connections are known.
    pub fn all_report(&self) -> bool {
        let now = self.now();
        self.controller().all_report(now)
    }

    /// New tables to all load balancers. Gives the time until the next tick.
    pub fn tick(&self) -> Duration {
        let now = self.now();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let since = std::mem::replace(&mut told.ticked, now.monotonic);
        let (tables, interval, configuration, predecessor_changes, received) = {
            let mut controller = self.controller();
            let tables = controller.tick(now);
            let alive = controller.alive(now);
            let configuration = (told.alive != alive).then(|| Arc::new((&controller.fleet_configuration(now)).into()));
            told.alive = alive;
            let received: Vec<Duration> = controller.received_after(since).collect();
            (tables, controller.fleet().report_interval, configuration, controller.predecessor_changes(), received)
        };
        let tables: Arc<[Bytes]> = tables.iter().map(|new| table::encode(new.service, &new.table)).collect();
        self.newest.send_modify(|newest| {
            newest.tables = tables;
            newest.configuration = configuration.unwrap_or_else(|| newest.configuration.clone());
        });
        let made = self.started.elapsed();
        let mut latencies = self.report_to_table.lock().unwrap_or_else(PoisonError::into_inner);
        received.into_iter().for_each(|received| latencies.observe(made.saturating_sub(received)));
        drop(latencies);
        if std::mem::replace(&mut told.predecessor_changes, predecessor_changes) != predecessor_changes {
            self.agent_configurations.send_modify(|count| *count += 1);
        }
        interval
    }

    /// Puts another configuration in force.
    pub fn configure(&self, fleet: Fleet) {
        let now = self.now();
        let configuration = {
            let mut controller = self.controller();
            controller.configure(fleet);
            Arc::new((&controller.fleet_configuration(now)).into())
        };
        // Tables of before may name services and servers that are no more: they go first.
        self.newest.send_replace(Newest { configuration, tables: Arc::new([]) });
        self.agent_configurations.send_modify(|count| *count += 1);
        if self.settled.load(Ordering::Relaxed) {
            self.tick();
        }
    }

    /// From now on tables are made.
    pub fn settle(&self) {
        self.settled.store(true, Ordering::Relaxed);
    }

    /// Changes with every tick and configuration.
    pub fn newest(&self) -> watch::Receiver<Newest> {
        self.newest.subscribe()
    }

    /// Changes with every configuration of agents.
    pub fn agent_configurations(&self) -> watch::Receiver<u64> {
        self.agent_configurations.subscribe()
    }
}
