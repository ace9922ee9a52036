//! Configuration and records: read, put together, written down. A change is in force whole or not at all.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use coreward_config::{Mistakes, Source};
use coreward_model::bucket_history::BucketHistory;
use coreward_tls::verify::Denied;
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;

use crate::clock::RecordClock;
use crate::config::{ControllerConfig, FleetConfig};
use crate::controller::rotation::KeyStep;
use crate::drains::{self, WantedDrain};
use crate::fleet::Fleet;
use crate::records::{Document, Records, whole_seconds};
use crate::store::{Store, StoreError};

/// The only one that writes the store.
pub struct Keeper {
    path: PathBuf,
    config: ControllerConfig,
    fleet: FleetConfig,
    records: Records,
    store: Store,
    clock: RecordClock,
    restarted: bool,
    denied: Denied,
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
    /// A server is to take no new connections.
    Drain(WantedDrain),
    /// That of this name may take them again.
    Undrain(String),
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

impl Keeper {
    /// Reads the fleet's file, opens the store, and takes the one into the other. `config`: what stands in `path`;
    /// `denied`: where its list of certificates goes.
    pub fn open(
        path: &Path,
        config: ControllerConfig,
        denied: Denied,
        open: impl FnOnce() -> anyhow::Result<Store>,
    ) -> anyhow::Result<Self> {
        // Before the store is made: a fleet that is wrong leaves nothing behind.
        let file = config.fleet.as_deref().map(FleetConfig::load).transpose()?;
        let mut store = open()?;
        let stored = store.load()?;
        let restarted = stored.is_some();
        let clock = RecordClock::from(stored.as_ref().and_then(|records| records.clock));
        let now = clock.now();
        let mut records = stored.clone().unwrap_or_else(|| Records::draw(now, &mut random()));
        let fleet = match file {
            Some(fleet) => fleet,
            None => applied(&records.document).context("the fleet that was applied last cannot be read any more")?,
        };
        records.apply(&fleet, now, &mut random())?;
        // Who does not come back is away from now on.
        let names: Vec<String> = records.load_balancers.keys().cloned().collect();
        names.iter().for_each(|name| records.departed(name, now));
        records.clock = Some(whole_seconds(now));
        let records = match (store.save(&records), stored) {
            (Ok(()), _) => records,
            // On a disk that is full a controller goes on by what is on record, and changes nothing.
            (Err(error), Some(stored))
                if stored.document.text == records.document.text && !matches!(error, StoreError::Etcd(_)) =>
            {
                tracing::error!("what is on record stays in force, nothing can be changed: {error}");
                stored
            }
            (Err(error), _) => return Err(error.into()),
        };
        denied.set(config.denied_certificates.iter().copied());
        Ok(Self { path: path.to_owned(), config, fleet, records, store, clock, restarted, denied })
    }

    /// Whether another process led this fleet before.
    pub fn restarted(&self) -> bool {
        self.restarted
    }

    /// By which everything is written down.
    pub fn clock(&self) -> RecordClock {
        self.clock
    }

    /// The configuration in force.
    pub fn fleet(&self) -> Fleet {
        let rss_key = self.config.rss_key.as_ref().map(|key| key.expose().clone());
        Fleet::new(&self.fleet, &self.records).of_controller(self.config.fleet.clone(), rss_key)
    }

    /// Of the fleet's document in force.
    pub fn document_generation(&self) -> u64 {
        self.records.document.generation
    }

    /// Makes the change; the new configuration, if it changes that. On an error everything is as it was, but for certificates that
    /// are refused from now on. What changes no configuration is made also when it cannot be written down now.
    pub fn make(&mut self, change: Change) -> anyhow::Result<Option<Fleet>> {
        let now = self.clock.now();
        match change {
            Change::Reload => self.reload().map(Some),
            Change::Apply(wanted) => self.apply(&wanted),
            Change::Retire => {
                let retire_after = self.fleet.retire_after;
                self.change(|records| {
                    // So that no more than the time between two of these is not counted after a crash.
                    records.clock = Some(whole_seconds(now));
                    records.retire(retire_after, now)
                })
            }
            Change::Enrol { name, address } => self.change(|records| records.enrol(&name, address)),
            Change::Departed { name } => self.change(|records| {
                records.departed(&name, now);
                false
            }),
            Change::Drain(wanted) => {
                let fleet = self.fleet();
                wanted.check(&fleet, |service, id| fleet.eligible(service, id))?;
                self.change(|records| records.drain(&wanted, records.generation + 1, now))
            }
            Change::Undrain(server) => {
                drains::present(&self.fleet(), &server)?;
                self.change(|records| records.undrain(&server))
            }
            Change::Keys(step) => self.change(|records| {
                let generation = records.generation + 1;
                match step {
                    KeyStep::Announce { forced } => records.key_ring.announce(forced, generation, &mut random()),
                    KeyStep::Switch => records.key_ring.switch(now, generation),
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
            records.clock = Some(whole_seconds(self.clock.now()));
            match self.store.save(&records) {
                Ok(()) => {}
                // When who came and went is no configuration: it goes on record with the next change. A load balancer that
                // comes back while the disk is full gets its tables.
                Err(error) if !is_new && !matches!(error, StoreError::Etcd(_)) => {
                    tracing::error!("not on record yet: {error}")
                }
                Err(error) => return Err(error).context("the change is not on record, and not in force"),
            }
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
        let now = self.clock.now();
        records.apply(&fleet, now, &mut random()).map_err(NotApplied::Wrong)?;
        records.clock = Some(whole_seconds(now));
        if wanted.dry_run {
            return Ok(None);
        }
        self.store.save(&records).context("the fleet is not on record, and not in force")?;
        (self.fleet, self.records) = (fleet, records);
        Ok(Some(self.fleet()))
    }

    fn reload(&mut self) -> anyhow::Result<Fleet> {
        let config = ControllerConfig::load(&self.path)?;
        // Also where the rest cannot be in force: a key that was lost does not wait for room on a disk.
        self.denied.set(config.denied_certificates.iter().copied());
        let fleet = match &config.fleet {
            Some(file) => FleetConfig::load(file)?,
            None => self.fleet.clone(),
        };
        let mut records = self.records.clone();
        let now = self.clock.now();
        records.apply(&fleet, now, &mut random())?;
        records.clock = Some(whole_seconds(now));
        self.store.save(&records)?;
        for (key, changed) in [
            ("listen", config.listen != self.config.listen),
            ("api", config.api != self.config.api),
            ("store", config.store != self.config.store),
            ("tls", config.tls != self.config.tls),
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
    FleetConfig::on_record(&Source::from_text(&name, &document.text))
}

#[cfg(test)]
mod tests {
    use coreward_tls::certificate::Fingerprint;

    use super::*;
    use crate::store::embedded::EmbeddedStore;

    #[test]
    fn certificates_are_denied_also_where_the_fleet_is_wrong() {
        let directory = tempfile::tempdir().unwrap();
        let [path, fleet, store] = ["controller.toml", "fleet.toml", "store"].map(|name| directory.path().join(name));
        let text = format!("listen = \"127.0.0.1:0\"\nstore = {store:?}\nfleet = {fleet:?}\n");
        std::fs::write(&path, &text).unwrap();
        std::fs::write(&fleet, "alpha = 0.5").unwrap();
        let denied = Denied::default();
        let open = || Ok(Store::Embedded(EmbeddedStore::open(&store)?));
        let mut keeper = Keeper::open(&path, ControllerConfig::load(&path).unwrap(), denied.clone(), open).unwrap();
        let lost = "AB".repeat(32);
        std::fs::write(&path, format!("denied_certificates = [\"{lost}\"]\n{text}")).unwrap();
        std::fs::write(&fleet, "alpha = 7").unwrap();
        assert!(keeper.make(Change::Reload).is_err());
        assert!(denied.contains(&lost.parse::<Fingerprint>().unwrap()));
    }
}
