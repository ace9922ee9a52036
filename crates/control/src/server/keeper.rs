//! Configuration and records: read, put together, written down. A change is in force whole or not at all.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use coreward_model::bucket_history::BucketHistory;
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;

use crate::config::Config;
use crate::controller::rotation::KeyStep;
use crate::fleet::Fleet;
use crate::records::Records;
use crate::store::Store;

/// The only one that writes the store.
pub struct Keeper {
    path: PathBuf,
    config: Config,
    records: Records,
    store: Store,
    restarted: bool,
}

/// A change of what is on record.
pub enum Change {
    /// The file is to be read again.
    Reload,
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

/// Secrets come from the operating system.
fn random() -> UnwrapErr<SysRng> {
    UnwrapErr(SysRng)
}

fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl Keeper {
    /// Reads the file, opens the store, and takes the one into the other.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let config = Config::load(path)?;
        let store = Store::open(&config.store)?;
        let stored = store.load()?;
        let restarted = stored.is_some();
        let now = unix_now();
        let mut records = stored.unwrap_or_else(|| Records::draw(now, &mut random()));
        records.apply(&config, now, &mut random())?;
        // Who does not come back is away from now on.
        let names: Vec<String> = records.load_balancers.keys().cloned().collect();
        names.iter().for_each(|name| records.departed(name, now));
        store.save(&records)?;
        Ok(Self { path: path.to_owned(), config, records, store, restarted })
    }

    /// Where to listen.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether another process led this fleet before.
    pub fn restarted(&self) -> bool {
        self.restarted
    }

    /// The configuration in force.
    pub fn fleet(&self) -> Fleet {
        Fleet::new(&self.config, &self.records)
    }

    /// Makes the change; the new configuration, if it changes that. On an error everything is as it was.
    pub fn make(&mut self, change: Change) -> anyhow::Result<Option<Fleet>> {
        match change {
            Change::Reload => self.reload().map(Some),
            Change::Retire => {
                let (retire_after, now) = (self.config.retire_after, unix_now());
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

    fn reload(&mut self) -> anyhow::Result<Fleet> {
        let config = Config::load(&self.path)?;
        let mut records = self.records.clone();
        records.apply(&config, unix_now(), &mut random())?;
        self.store.save(&records)?;
        for (key, changed) in
            [("listen", config.listen != self.config.listen), ("store", config.store != self.config.store)]
        {
            if changed {
                tracing::warn!("{}: `{key}` has changed: that needs a restart", self.path.display());
            }
        }
        (self.config, self.records) = (config, records);
        Ok(self.fleet())
    }
}
