//! Configuration and records: read, put together, written down. A change is in force whole or not at all.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use coreward_config::{Mistakes, Source};
use coreward_model::bucket_history::BucketHistory;
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;

use crate::config::{ControllerConfig, FleetConfig};
use crate::controller::rotation::KeyStep;
use crate::fleet::Fleet;
use crate::records::{Document, Records};
use crate::store::Store;

/// The only one that writes the store.
pub struct Keeper {
    path: PathBuf,
    config: ControllerConfig,
    fleet: FleetConfig,
    records: Records,
    store: Store,
    restarted: bool,
}

/// A change of what is on record.
pub enum Change {
    /// The files are to be read again.
    Reload,
    /// There is another document of the fleet.
    Apply(WantedDocument),
    /// Time has passed.
    Retire,
    /// A load balancer has connected.
    Enrol {
        /// Its name.
        name: String,
        /// Where others reach it.
        address: Option<IpAddr>,
    },
    /// A load balancer has disconnected.
    Departed {
        /// Its name.
        name: String,
    },
    /// The cookie keys.
    Keys(KeyStep),
    /// Buckets of these services have changed hands.
    Buckets(Vec<(String, BucketHistory)>),
}

/// A document that somebody wants to be in force.
pub struct WantedDocument {
    /// What mistakes call it.
    pub name: String,
    /// The document.
    pub text: String,
    /// Of the document that it is to replace.
    pub generation: u64,
    /// Only whether it could be in force.
    pub dry_run: bool,
}

/// Why a document is not in force.
#[derive(Debug, thiserror::Error)]
pub enum NotApplied {
    /// The operator keeps it in a file.
    #[error(
        "the fleet of this controller is what stands in {} (`fleet` in {}): expected changes there, then SIGHUP",
        file.display(),
        controller.display()
    )]
    FileIsTheTruth {
        /// The fleet's file.
        file: PathBuf,
        /// The controller's own.
        controller: PathBuf,
    },
    /// Somebody else was faster.
    #[error("generation {0} is in force, not {1}, with which this was compared: expected a new look at the difference")]
    Moved(u64, u64),
    /// Something in it is wrong.
    #[error(transparent)]
    Wrong(#[from] Mistakes),
}

/// Secrets come from the operating system.
fn random() -> UnwrapErr<SysRng> {
    UnwrapErr(SysRng)
}

fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl Keeper {
    /// Reads the fleet's file, opens the store, and takes the one into the other. `config`: what stands in `path`.
    pub fn open(
        path: &Path,
        config: ControllerConfig,
        open: impl FnOnce() -> anyhow::Result<Store>,
    ) -> anyhow::Result<Self> {
        // Before the store is made: a fleet that is wrong leaves nothing behind.
        let file = config.fleet.as_deref().map(FleetConfig::load).transpose()?;
        let mut store = open()?;
        let stored = store.load()?;
        let restarted = stored.is_some();
        let now = unix_now();
        let mut records = stored.unwrap_or_else(|| Records::draw(now, &mut random()));
        let fleet = match file {
            Some(fleet) => fleet,
            None => applied(&records.document).context("the fleet that was applied last cannot be read any more")?,
        };
        records.apply(&fleet, now, &mut random())?;
        // Who does not come back is away from now on.
        let names: Vec<String> = records.load_balancers.keys().cloned().collect();
        names.iter().for_each(|name| records.departed(name, now));
        store.save(&records)?;
        Ok(Self { path: path.to_owned(), config, fleet, records, store, restarted })
    }

    /// Whether another process led this fleet before.
    pub fn restarted(&self) -> bool {
        self.restarted
    }

    /// The configuration in force.
    pub fn fleet(&self) -> Fleet {
        let rss_key = self.config.rss_key.as_ref().map(|key| key.expose().clone());
        Fleet::new(&self.fleet, &self.records).of_controller(self.config.fleet.clone(), rss_key)
    }

    /// Makes the change; the new configuration, if it changes that. On an error everything is as it was.
    pub fn make(&mut self, change: Change) -> anyhow::Result<Option<Fleet>> {
        match change {
            Change::Reload => self.reload().map(Some),
            Change::Apply(wanted) => self.apply(&wanted),
            Change::Retire => {
                let (retire_after, now) = (self.fleet.retire_after, unix_now());
                self.change(|records| records.retire(retire_after, now))
            }
            Change::Enrol { name, address } => self.change(|records| records.enrol(&name, address)),
            Change::Departed { name } => self.change(|records| {
                records.departed(&name, unix_now());
                false
            }),
            Change::Keys(step) => self.change(|records| {
                let generation = records.generation + 1;
                match step {
                    KeyStep::Announce { forced } => records.key_ring.announce(forced, generation, &mut random()),
                    KeyStep::Switch => records.key_ring.switch(unix_now(), generation),
                }
                true
            }),
            Change::Buckets(histories) => self.change(|records| {
                for (name, history) in histories {
                    if let Some(service) = records.services.get_mut(&name) {
                        service.buckets = history;
                    }
                }
                false
            }),
        }
    }

    /// Changes the records; true from `change`: that is a new configuration.
    fn change(&mut self, change: impl FnOnce(&mut Records) -> bool) -> anyhow::Result<Option<Fleet>> {
        let mut records = self.records.clone();
        let is_new = change(&mut records);
        records.generation += u64::from(is_new);
        if records != self.records {
            self.store.save(&records).context("the change is not on record, and not in force")?;
            self.records = records;
        }
        Ok(is_new.then(|| self.fleet()))
    }

    fn apply(&mut self, wanted: &WantedDocument) -> anyhow::Result<Option<Fleet>> {
        if let Some(file) = self.config.fleet.clone() {
            return Err(NotApplied::FileIsTheTruth { file, controller: self.path.clone() }.into());
        }
        let in_force = self.records.document.generation;
        if wanted.generation != in_force {
            return Err(NotApplied::Moved(in_force, wanted.generation).into());
        }
        let source = Source::from_text(&wanted.name, &wanted.text);
        let fleet = FleetConfig::parse(&source).map_err(NotApplied::Wrong)?;
        let mut records = self.records.clone();
        records.apply(&fleet, unix_now(), &mut random()).map_err(NotApplied::Wrong)?;
        if wanted.dry_run {
            return Ok(None);
        }
        self.store.save(&records).context("the fleet is not on record, and not in force")?;
        (self.fleet, self.records) = (fleet, records);
        Ok(Some(self.fleet()))
    }

    fn reload(&mut self) -> anyhow::Result<Fleet> {
        let config = ControllerConfig::load(&self.path)?;
        let fleet = match &config.fleet {
            Some(file) => FleetConfig::load(file)?,
            None => self.fleet.clone(),
        };
        let mut records = self.records.clone();
        records.apply(&fleet, unix_now(), &mut random())?;
        self.store.save(&records)?;
        for (key, changed) in [
            ("listen", config.listen != self.config.listen),
            ("api", config.api != self.config.api),
            ("store", config.store != self.config.store),
        ] {
            if changed {
                tracing::warn!("{}: `{key}` has changed: that needs a restart", self.path.display());
            }
        }
        (self.config, self.fleet, self.records) = (config, fleet, records);
        Ok(self.fleet())
    }
}

/// The fleet as the store keeps it.
fn applied(document: &Document) -> Result<FleetConfig, Mistakes> {
    let name = format!("the applied fleet (generation {})", document.generation);
    FleetConfig::parse(&Source::from_text(&name, &document.text))
}
