//! Storage of [`FleetRecords`](coreward_fleet::records::FleetRecords), in a file for one controller ([`embedded`]) or
//! in etcd for several ([`etcd`]). Both store the same rows ([`rows`]).

pub mod embedded;
pub mod etcd;
mod rows;

use std::path::PathBuf;

use coreward_etcd::EtcdError;

use coreward_fleet::records::FleetRecords;
use embedded::EmbeddedStore;
use etcd::EtcdStore;

pub enum FleetStore {
    Embedded(EmbeddedStore),
    Etcd(EtcdStore),
}

impl FleetStore {
    /// Returns the fleet's records, or `None` if the store is empty.
    pub fn load_records(&self) -> Result<Option<FleetRecords>, FleetStoreError> {
        match self {
            Self::Embedded(store) => store.load_records(),
            Self::Etcd(store) => store.load_records(),
        }
    }

    /// Replaces the fleet's records in one transaction. If it fails, the store keeps the previous records.
    pub fn save_records(&mut self, records: &FleetRecords) -> Result<(), FleetStoreError> {
        match self {
            Self::Embedded(store) => store.save_records(records),
            Self::Etcd(store) => store.save_records(records),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum FleetStoreError {
    /// The store's file cannot be opened or created.
    #[error("store {}: {source}: expected a file that can be written, or a directory to make it in", path.display())]
    UnusableFile { path: PathBuf, source: std::io::Error },
    #[error("store {} is in use: expected one controller per store", path.display())]
    FileInUse { path: PathBuf },
    /// The content of the store is damaged or has another format, or the disk fails.
    #[error("store {store}: {problem}")]
    UnreadableContent {
        /// Path of the store's file, or endpoints of etcd.
        store: String,
        problem: String,
    },
    /// etcd does not answer or rejects the request, or another controller leads.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coreward_model::ServerId;
    use coreward_model::bucket_history::BucketHistory;
    use coreward_model::rss::seeded_rng;
    use coreward_model::vlan::Vlan;
    use coreward_wire::ServiceIndex;

    use coreward_fleet::audit::{FleetChangeAuthor, FleetChangeDescription};
    use coreward_fleet::records::DrainRecord;
    use coreward_fleet::records::{FleetDocument, FleetRecords, ServerRecord, ServiceMembership, ServiceRecord};

    /// Returns the record of a drained server, or of one that left its service and the fleet document at `left_at_s` (s
    /// since 1970).
    fn server_record(id: u64, left_at_s: Option<u64>) -> ServerRecord {
        let membership =
            left_at_s.map_or(ServiceMembership::Present, |s| ServiceMembership::LeftAt(Duration::from_secs(s)));
        ServerRecord {
            name: format!("s{id}"),
            address: [10, 2, 0, 11].into(),
            is_in_document: left_at_s.is_none(),
            memberships: [("web".to_owned(), membership)].into(),
            drain: left_at_s.is_none().then(|| DrainRecord {
                changed_at: Duration::from_secs(1_700_000_000),
                generation: 16,
                services: Some(["web".to_owned()].into()),
            }),
            allowed_racks: left_at_s.is_some().then(|| ["r1".to_owned()].into()),
            vlan: if left_at_s.is_some() { Vlan::new(4094).unwrap() } else { Vlan::UNTAGGED },
        }
    }

    /// Returns records with content for every table of the store.
    pub fn records_for_every_table() -> FleetRecords {
        let mut records = FleetRecords::generate(Duration::from_secs(5), &mut seeded_rng(3, 0));
        records.generation = 17;
        records.document = FleetDocument { generation: 4, text: "# The first.\nload_ewma_alpha = 0.5\n".into() };
        records.key_ring.announce_next_key(true, 16, &mut seeded_rng(4, 0));
        records.register_load_balancer("lb1", Some([10, 2, 0, 1].into()));
        records.register_load_balancer("lb2", None);
        records.record_load_balancer_disconnect("lb2", Duration::from_secs(1_700_000_000));
        let mut bucket_history = BucketHistory::default();
        for pool in [[1u64, 1], [1, 2]] {
            bucket_history.update_bucket_servers(&pool.map(|id| ServerId::try_from(id).unwrap()));
        }
        let service_record =
            ServiceRecord { index: ServiceIndex::new(63).unwrap(), hash_seed: u64::MAX, bucket_history };
        records.services.insert("web".into(), service_record);
        for (id, left_at_s) in [(0u64, None), (16_383, Some(1_700_000_000))] {
            records.servers.insert(id.try_into().unwrap(), server_record(id, left_at_s));
        }
        for n in 0..120 {
            let change_description = FleetChangeDescription {
                action: "drain",
                target: format!("s{n}"),
                state_before: "active".into(),
                state_after: "drained".into(),
            };
            records.append_audit_entry(&FleetChangeAuthor::sighup(), change_description, Duration::from_secs(n));
        }
        records
    }
}
