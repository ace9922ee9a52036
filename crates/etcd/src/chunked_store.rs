//! Store of a state that consists of named parts. The state of 10,000 servers exceeds etcd's limits of 1.5 MB for a
//! request and 128 operations for a transaction. A change therefore first writes its parts under its own number. One
//! transaction then replaces the manifest, which names the current parts. The next leader deletes unnamed parts.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, GetOptions, TxnOp};
use serde::{Deserialize, Serialize};

use crate::EtcdError;
use crate::clock::Deadline;
use crate::leadership::{LeaderWriteOutcome, Leadership};

/// Version of the manifest's JSON format.
const MANIFEST_FORMAT_VERSION: u32 = 1;
/// Maximum number of operations in an etcd transaction. It is below 128, the default of etcd's --max-txn-ops.
const MAX_TXN_OPERATIONS: usize = 100;
/// Maximum size of a request to etcd, in bytes. It is below 1.5 MiB, the default of etcd's --max-request-bytes.
const MAX_ETCD_REQUEST_BYTES: usize = 1_000_000;
/// Maximum number of parts that one range request reads from etcd.
const MAX_PARTS_PER_READ: i64 = 64;
const MAX_ETCD_RESPONSE_BYTES: usize = 256 << 20;
const STORE_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Parts of the stored state: each part's content, by the part's name.
pub type StoredStateParts = BTreeMap<String, Vec<u8>>;

/// Store that keeps a state in etcd, with one key for each part of the state. Only the leader can write the state.
pub struct ChunkedStore {
    leadership: Arc<Leadership>,
    key_prefix: String,
    manifest: StoredStateManifest,
    /// Revision at which the manifest was last modified in etcd, or 0 if there is no manifest yet.
    manifest_revision: i64,
    saved_parts: StoredStateParts,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct StoredStateManifest {
    format: u32,
    number: u64,
    /// Number of the change that last wrote each part, by the part's name.
    parts: BTreeMap<String, u64>,
}

impl ChunkedStore {
    pub async fn open(leadership: Arc<Leadership>, prefix: &str) -> Result<Self, EtcdError> {
        let mut store = Self {
            leadership,
            key_prefix: prefix.to_owned(),
            manifest: StoredStateManifest { format: MANIFEST_FORMAT_VERSION, ..StoredStateManifest::default() },
            manifest_revision: 0,
            saved_parts: StoredStateParts::new(),
        };
        store.load_parts().await?;
        store.delete_unreferenced_parts().await?;
        Ok(store)
    }

    /// Returns the parts of the stored state. There are none before the first change.
    pub fn parts(&self) -> &StoredStateParts {
        &self.saved_parts
    }

    /// Returns the leadership, without which this process cannot write the state.
    pub fn leadership(&self) -> &Arc<Leadership> {
        &self.leadership
    }

    fn manifest_key(&self) -> String {
        format!("{}/manifest", self.key_prefix)
    }

    fn part_key_prefix(&self) -> String {
        format!("{}/parts/", self.key_prefix)
    }

    fn part_key(&self, name: &str, change_number: u64) -> String {
        format!("{}{name}/{change_number}", self.part_key_prefix())
    }

    fn invalid_content_error(&self, key: &str, problem: impl ToString) -> EtcdError {
        EtcdError::InvalidContent { key: key.to_owned(), problem: problem.to_string() }
    }

    async fn load_parts(&mut self) -> Result<(), EtcdError> {
        let manifest_key = self.manifest_key();
        let read_manifest = |mut client: Client| {
            let manifest_key = manifest_key.clone();
            async move { client.get(manifest_key, None).await }
        };
        let response =
            self.leadership.cluster().call_until_deadline(Deadline::now() + STORE_READ_TIMEOUT, read_manifest).await?;
        let Some(manifest_entry) = response.kvs().first() else { return Ok(()) };
        let manifest: StoredStateManifest = serde_json::from_slice(manifest_entry.value())
            .map_err(|error| self.invalid_content_error(&manifest_key, error))?;
        if manifest.format != MANIFEST_FORMAT_VERSION {
            let format_problem = format!("format {}: expected {MANIFEST_FORMAT_VERSION}", manifest.format);
            return Err(self.invalid_content_error(&manifest_key, format_problem));
        }
        // The parts are read at the manifest's revision, because all parts that it names exist then.
        let manifest_read_revision = response.header().map_or(0, etcd_client::ResponseHeader::revision);
        let mut stored_parts = self.read_all_parts(manifest_read_revision, false).await?;
        for (name, number) in &manifest.parts {
            let part_key = self.part_key(name, *number);
            let value = stored_parts
                .remove(&part_key)
                .ok_or_else(|| self.invalid_content_error(&part_key, "it is in force, and not there"))?;
            self.saved_parts.insert(name.clone(), value);
        }
        (self.manifest, self.manifest_revision) = (manifest, manifest_entry.mod_revision());
        Ok(())
    }

    async fn read_all_parts(&self, revision: i64, keys_only: bool) -> Result<StoredStateParts, EtcdError> {
        let mut parts_by_key = StoredStateParts::new();
        let mut next_key = self.part_key_prefix().into_bytes();
        // '0' is the character after '/', so this key ends the range.
        let range_end = format!("{}/parts0", self.key_prefix);
        loop {
            let mut options =
                GetOptions::new().with_range(range_end.clone()).with_limit(MAX_PARTS_PER_READ).with_revision(revision);
            if keys_only {
                options = options.with_keys_only();
            }
            let read_page = |client: Client| {
                let (next_key, options) = (next_key.clone(), options.clone());
                let mut client = client.kv_client().max_decoding_message_size(MAX_ETCD_RESPONSE_BYTES);
                async move { client.get(next_key, Some(options)).await }
            };
            let mut page =
                self.leadership.cluster().call_until_deadline(Deadline::now() + STORE_READ_TIMEOUT, read_page).await?;
            let has_more_pages = page.more();
            for key_value in page.take_kvs() {
                let (key, value) = key_value.into_key_value();
                next_key = [key.as_slice(), b"\0"].concat();
                parts_by_key.insert(String::from_utf8_lossy(&key).into_owned(), value);
            }
            if !has_more_pages {
                return Ok(parts_by_key);
            }
        }
    }

    /// Deletes the keys of parts that the manifest does not name.
    async fn delete_unreferenced_parts(&self) -> Result<(), EtcdError> {
        let stored_parts = self.read_all_parts(0, true).await?;
        let referenced_keys: HashSet<String> =
            self.manifest.parts.iter().map(|(name, number)| self.part_key(name, *number)).collect();
        let delete_operations: Vec<TxnOp> = stored_parts
            .keys()
            .filter(|key| !referenced_keys.contains(*key))
            .map(|key| TxnOp::delete(key.clone(), None))
            .collect();
        for batch in delete_operations.chunks(MAX_TXN_OPERATIONS) {
            self.leadership.write_if_leading(None, batch).await?;
        }
        Ok(())
    }

    /// Replaces the stored state, and writes only the parts that have changed. If etcd does not answer, retries until
    /// the lease ends. The outcome is then unknown, and this process is no longer the leader.
    pub async fn save(&mut self, parts: StoredStateParts) -> Result<(), EtcdError> {
        let mut next_manifest = StoredStateManifest { number: self.manifest.number + 1, ..self.manifest.clone() };
        let mut delete_operations = Vec::new();
        for (name, number) in &self.manifest.parts {
            if parts.get(name) != self.saved_parts.get(name) {
                delete_operations.push(TxnOp::delete(self.part_key(name, *number), None));
                next_manifest.parts.remove(name);
            }
        }
        let mut put_batches = TransactionBatches::default();
        for (name, value) in parts.iter().filter(|(name, value)| self.saved_parts.get(*name) != Some(*value)) {
            put_batches
                .add_operation(TxnOp::put(self.part_key(name, next_manifest.number), value.clone(), None), value.len());
            next_manifest.parts.insert(name.clone(), next_manifest.number);
        }
        let manifest_json =
            serde_json::to_vec(&next_manifest).map_err(|error| self.invalid_content_error("manifest", error))?;
        put_batches.add_operation(TxnOp::put(self.manifest_key(), manifest_json.clone(), None), manifest_json.len());
        let mut batches = put_batches.batches;
        let mut last_batch = batches.pop().unwrap_or_default();
        for batch in &batches {
            self.leadership.write_if_leading(None, batch).await?;
        }
        let deferred_delete_operations = delete_operations
            .split_off(delete_operations.len().min(MAX_TXN_OPERATIONS.saturating_sub(last_batch.len())));
        last_batch.extend(delete_operations);
        self.manifest_revision = self.write_manifest(&last_batch, &manifest_json).await?;
        (self.manifest, self.saved_parts) = (next_manifest, parts);
        for batch in deferred_delete_operations.chunks(MAX_TXN_OPERATIONS) {
            // The change is already complete. If this fails, the next leader deletes the remaining parts.
            if let Err(error) = self.leadership.write_if_leading(None, batch).await {
                tracing::warn!(
                    event = "old-parts-left",
                    prefix = self.key_prefix,
                    %error,
                    "the controller cannot delete replaced parts of its state in etcd: the next leader deletes them"
                );
            }
        }
        Ok(())
    }

    /// Writes the manifest and executes `operations` in one transaction. Returns the manifest's new revision.
    async fn write_manifest(&self, operations: &[TxnOp], manifest: &[u8]) -> Result<i64, EtcdError> {
        let manifest_key = self.manifest_key();
        match self.leadership.write_if_leading(Some((&manifest_key, self.manifest_revision)), operations).await? {
            LeaderWriteOutcome::Written { revision } => Ok(revision),
            // An earlier attempt has succeeded, but its answer was lost.
            LeaderWriteOutcome::Conflict(Some(manifest_entry)) if manifest_entry.value() == manifest => {
                Ok(manifest_entry.mod_revision())
            }
            LeaderWriteOutcome::Conflict(_) => Err(self
                .invalid_content_error(&manifest_key, "something else has changed it: expected one fleet per prefix")),
        }
    }
}

/// etcd operations, divided into batches that each fit into one transaction.
#[derive(Default)]
struct TransactionBatches {
    batches: Vec<Vec<TxnOp>>,
    last_batch_bytes: usize,
}

impl TransactionBatches {
    fn add_operation(&mut self, operation: TxnOp, operation_bytes: usize) {
        let is_batch_full = |batch: &Vec<TxnOp>| {
            batch.len() == MAX_TXN_OPERATIONS || self.last_batch_bytes + operation_bytes > MAX_ETCD_REQUEST_BYTES
        };
        match self.batches.last_mut() {
            Some(batch) if !is_batch_full(batch) => {
                batch.push(operation);
                self.last_batch_bytes += operation_bytes;
            }
            _ => {
                self.batches.push(vec![operation]);
                self.last_batch_bytes = operation_bytes;
            }
        }
    }
}
