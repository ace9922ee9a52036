//! Configuration and records: read, put together, written down. A change is in force whole or not at all.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;

use crate::config::Config;
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
        let mut records = stored.unwrap_or_else(|| Records::draw(&mut random()));
        records.apply(&config, unix_now(), &mut random())?;
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

    /// Reads the file again. On an error everything is as it was.
    pub fn reload(&mut self) -> anyhow::Result<Fleet> {
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

    /// Forgets servers that left long ago; a new configuration when there was one.
    pub fn retire(&mut self) -> anyhow::Result<Option<Fleet>> {
        let mut records = self.records.clone();
        if !records.retire(self.config.retire_after, unix_now()) {
            return Ok(None);
        }
        records.generation += 1;
        self.store.save(&records).context("servers that left long ago are kept on")?;
        self.records = records;
        Ok(Some(self.fleet()))
    }
}
