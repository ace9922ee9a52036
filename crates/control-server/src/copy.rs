//! Copies the records from one store to another, for a change from one controller to several on etcd, or back.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use coreward_etcd::cluster::EtcdClusterClient;
use coreward_etcd::leadership::Leadership;

use coreward_store::FleetStore;
use coreward_store::embedded::EmbeddedStore;
use coreward_store::etcd::EtcdStore;

use crate::config::{ControllerConfig, StoreLocation};
use crate::server::leader_election;

/// Copies all records from the store that the controller file `source_file` configures to the store of `target_file`,
/// and returns a summary. No controller may use either store meanwhile. Fails if a file is invalid, a store is in use
/// or the source is empty. Also fails if the destination is not empty and `may_replace` is false.
pub fn copy_store(source_file: &Path, target_file: &Path, may_replace: bool) -> anyhow::Result<String> {
    let [source, target] =
        [source_file, target_file].map(|file| ControllerConfig::load(file).map(|config| config.store));
    let (source, target) = (source?, target?);
    ensure!(
        source != target,
        "{} and {} name the same store: expected two",
        source_file.display(),
        target_file.display()
    );
    let (source, mut target) = (StoreOpenForCopy::open(&source)?, StoreOpenForCopy::open(&target)?);
    let mut records = source
        .store
        .load_records()?
        .with_context(|| format!("the store of {} has no records", source_file.display()))?;
    if let Some(previous_records) = target.store.load_records()? {
        ensure!(
            may_replace,
            "a fleet of generation {} is on record by {} already: expected nothing there, or --replace",
            previous_records.generation,
            target_file.display()
        );
        // The new generation is higher, so that peers of the replaced fleet take this configuration for a newer one.
        records.generation = records.generation.max(previous_records.generation + 1);
    }
    target.store.save_records(&records)?;
    let (servers, services) = (records.servers.len(), records.services.len());
    Ok(format!("copied: {servers} servers, {services} services, generation {}", records.generation))
}

/// Store that is open only during the copy.
struct StoreOpenForCopy {
    store: FleetStore,
    cluster_and_leadership: Option<(Arc<EtcdClusterClient>, Arc<Leadership>)>,
}

impl StoreOpenForCopy {
    fn open(location: &StoreLocation) -> anyhow::Result<Self> {
        match location {
            StoreLocation::Embedded(file) => {
                Ok(Self { store: FleetStore::Embedded(EmbeddedStore::open(file)?), cluster_and_leadership: None })
            }
            StoreLocation::Etcd(config) => {
                let cluster = leader_election::connect_cluster(config)?;
                let leadership = cluster
                    .block_on(leader_election::build_candidate(config)?.campaign_once(cluster.clone()))
                    .context("a controller uses this store: expected all of them to be stopped")?;
                let leadership = Arc::new(leadership);
                let store = EtcdStore::open(cluster.clone(), leadership.clone(), &config.key_prefix)?;
                Ok(Self { store: FleetStore::Etcd(store), cluster_and_leadership: Some((cluster, leadership)) })
            }
        }
    }
}

impl Drop for StoreOpenForCopy {
    fn drop(&mut self) {
        if let Some((cluster, leadership)) = &self.cluster_and_leadership
            && let Err(error) = cluster.block_on(leadership.resign())
        {
            tracing::warn!(
                event = "lease-not-revoked",
                %error,
                "`coreward store copy` cannot revoke its lease in etcd: controllers wait until the lease expires"
            );
        }
    }
}
