//! What all callers share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coreward_wire::{table, v1};
use prost::bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::controller::{Controller, Now};
use crate::fleet::Fleet;

/// The controller's decisions, and what they say now.
pub struct Shared {
    controller: Mutex<Controller>,
    newest: watch::Sender<Newest>,
    /// Generation of the configuration in force: what agents wait for.
    generation: watch::Sender<u64>,
    started: Instant,
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
    pub fn new(controller: Controller) -> Self {
        let configuration = Arc::new((&controller.fleet().for_load_balancers()).into());
        Self {
            newest: watch::Sender::new(Newest { configuration, tables: Arc::new([]) }),
            generation: watch::Sender::new(controller.fleet().generation),
            controller: Mutex::new(controller),
            started: Instant::now(),
        }
    }

    /// The moment.
    pub fn now(&self) -> Now {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Now { monotonic: self.started.elapsed(), wall }
    }

    /// Held for microseconds; never across an await.
    pub fn controller(&self) -> MutexGuard<'_, Controller> {
        // Every call leaves the state whole, so after a panic in one of them the others can go on.
        self.controller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the loads of all servers that take new connections are known.
    pub fn all_report(&self) -> bool {
        let now = self.now();
        self.controller().all_report(now)
    }

    /// New tables to all load balancers. Gives the time until the next tick.
    pub fn tick(&self) -> Duration {
        let (tables, interval) = {
            let mut controller = self.controller();
            (controller.tick(self.now()), controller.fleet().report_interval)
        };
        let tables: Arc<[Bytes]> = tables.iter().map(|new| table::encode(new.service, &new.table)).collect();
        self.newest.send_modify(|newest| newest.tables = tables);
        interval
    }

    /// Puts another configuration in force.
    pub fn configure(&self, fleet: Fleet) {
        let configuration = Arc::new((&fleet.for_load_balancers()).into());
        let generation = fleet.generation;
        self.controller().configure(fleet);
        // Tables of before may name services and servers that are no more: they go first.
        self.newest.send_replace(Newest { configuration, tables: Arc::new([]) });
        self.generation.send_replace(generation);
        self.tick();
    }

    /// Changes with every tick and configuration.
    pub fn newest(&self) -> watch::Receiver<Newest> {
        self.newest.subscribe()
    }

    /// Changes with every configuration.
    pub fn generation(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }
}
