//! Store of a state that consists of named parts. The state of 10,000 servers exceeds etcd's limits of 1.5 MB for a
//! request and 128 operations for a transaction. So a change first writes its parts under its own number. One
//! transaction then replaces the manifest, which names the current parts. The next leader deletes unnamed parts.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, GetOptions, TxnOp};
use serde::{Deserialize, Serialize};

use crate::EtcdError;
use crate::clock::Deadline;
use crate::leadership::{Leadership, WriteOutcome};

/// Version of the manifest's format.
const FORMAT: u32 = 1;
/// Maximum number of operations in a transaction. It is below 128, the default of etcd's --max-txn-ops.
const MAX_TXN_OPERATIONS: usize = 100;
/// Maximum size of a request, in bytes. It is below 1.5 MiB, the default of etcd's --max-request-bytes.
const MAX_REQUEST_BYTES: usize = 1_000_000;
/// Maximum number of parts that one request reads.
const CHUNKS_PER_READ: i64 = 64;
const MAX_ANSWER_BYTES: usize = 256 << 20;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Parts of the stored state, by name.
pub type Chunks = BTreeMap<String, Vec<u8>>;

/// Store of a state whose parts have one key in etcd each. Only the leader can write it.
pub struct ChunkedStore {
    leadership: Arc<Leadership>,
    prefix: String,
    manifest: Manifest,
    /// Revision at which the manifest was last modified in etcd, or 0 if there is no manifest yet.
    revision: i64,
    saved_parts: Chunks,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    number: u64,
    /// Number of the change that last wrote each part, by the part's name.
    parts: BTreeMap<String, u64>,
}

impl ChunkedStore {
    pub async fn open(leadership: Arc<Leadership>, prefix: &str) -> Result<Self, EtcdError> {
        let mut store = Self {
            leadership,
            prefix: prefix.to_owned(),
            manifest: Manifest { format: FORMAT, ..Manifest::default() },
            revision: 0,
            saved_parts: Chunks::new(),
        };
        store.load().await?;
        store.delete_unreferenced_parts().await?;
        Ok(store)
    }

    /// Returns the parts of the current state, which is empty before the first change.
    pub fn parts(&self) -> &Chunks {
        &self.saved_parts
    }

    /// Returns the leadership that is required for writing the state.
    pub fn leadership(&self) -> &Arc<Leadership> {
        &self.leadership
    }

    fn manifest_key(&self) -> String {
        format!("{}/manifest", self.prefix)
    }

    fn all_parts_key(&self) -> String {
        format!("{}/parts/", self.prefix)
    }

    fn part_key(&self, name: &str, number: u64) -> String {
        format!("{}{name}/{number}", self.all_parts_key())
    }

    fn content_error(&self, key: &str, problem: impl ToString) -> EtcdError {
        EtcdError::Content { key: key.to_owned(), problem: problem.to_string() }
    }

    async fn load(&mut self) -> Result<(), EtcdError> {
        let key = self.manifest_key();
        let request = |mut client: Client| {
            let key = key.clone();
            async move { client.get(key, None).await }
        };
        let found = self.leadership.cluster().call(Deadline::now() + TIMEOUT, request).await?;
        let Some(written) = found.kvs().first() else { return Ok(()) };
        let manifest: Manifest =
            serde_json::from_slice(written.value()).map_err(|error| self.content_error(&key, error))?;
        if manifest.format != FORMAT {
            let problem = format!("format {}: expected {FORMAT}", manifest.format);
            return Err(self.content_error(&key, problem));
        }
        // The parts are read at the manifest's revision, because all parts that it names exist then.
        let at = found.header().map_or(0, etcd_client::ResponseHeader::revision);
        let mut values = self.read_all(at, false).await?;
        for (name, number) in &manifest.parts {
            let key = self.part_key(name, *number);
            let value = values.remove(&key).ok_or_else(|| self.content_error(&key, "it is in force, and not there"))?;
            self.saved_parts.insert(name.clone(), value);
        }
        (self.manifest, self.revision) = (manifest, written.mod_revision());
        Ok(())
    }

    async fn read_all(&self, at: i64, keys_only: bool) -> Result<Chunks, EtcdError> {
        let mut all = Chunks::new();
        let mut from = self.all_parts_key().into_bytes();
        // '0' is the character after '/', so this key ends the range.
        let end = format!("{}/parts0", self.prefix);
        loop {
            let mut options = GetOptions::new().with_range(end.clone()).with_limit(CHUNKS_PER_READ).with_revision(at);
            if keys_only {
                options = options.with_keys_only();
            }
            let request = |client: Client| {
                let (from, options) = (from.clone(), options.clone());
                let mut client = client.kv_client().max_decoding_message_size(MAX_ANSWER_BYTES);
                async move { client.get(from, Some(options)).await }
            };
            let mut page = self.leadership.cluster().call(Deadline::now() + TIMEOUT, request).await?;
            let more = page.more();
            for pair in page.take_kvs() {
                let (key, value) = pair.into_key_value();
                from = [key.as_slice(), b"\0"].concat();
                all.insert(String::from_utf8_lossy(&key).into_owned(), value);
            }
            if !more {
                return Ok(all);
            }
        }
    }

    /// Deletes the keys of parts that the manifest does not name.
    async fn delete_unreferenced_parts(&self) -> Result<(), EtcdError> {
        let there = self.read_all(0, true).await?;
        let needed: HashSet<String> =
            self.manifest.parts.iter().map(|(name, number)| self.part_key(name, *number)).collect();
        let left: Vec<TxnOp> =
            there.keys().filter(|key| !needed.contains(*key)).map(|key| TxnOp::delete(key.clone(), None)).collect();
        for batch in left.chunks(MAX_TXN_OPERATIONS) {
            self.leadership.write_if_leading(None, batch).await?;
        }
        Ok(())
    }

    /// Replaces the state, but writes only the changed parts. Retries until the lease ends if etcd does not answer. The
    /// outcome is then unknown, and this process no longer leads.
    pub async fn save(&mut self, parts: Chunks) -> Result<(), EtcdError> {
        let mut next = Manifest { number: self.manifest.number + 1, ..self.manifest.clone() };
        let mut superseded = Vec::new();
        for (name, number) in &self.manifest.parts {
            if parts.get(name) != self.saved_parts.get(name) {
                superseded.push(TxnOp::delete(self.part_key(name, *number), None));
                next.parts.remove(name);
            }
        }
        let mut puts = Batches::default();
        for (name, value) in parts.iter().filter(|(name, value)| self.saved_parts.get(*name) != Some(*value)) {
            puts.add(TxnOp::put(self.part_key(name, next.number), value.clone(), None), value.len());
            next.parts.insert(name.clone(), next.number);
        }
        let encoded = serde_json::to_vec(&next).map_err(|error| self.content_error("manifest", error))?;
        puts.add(TxnOp::put(self.manifest_key(), encoded.clone(), None), encoded.len());
        let mut batches = puts.batches;
        let mut last = batches.pop().unwrap_or_default();
        for batch in &batches {
            self.leadership.write_if_leading(None, batch).await?;
        }
        let later = superseded.split_off(superseded.len().min(MAX_TXN_OPERATIONS.saturating_sub(last.len())));
        last.extend(superseded);
        self.revision = self.write_manifest(&last, &encoded).await?;
        (self.manifest, self.saved_parts) = (next, parts);
        for batch in later.chunks(MAX_TXN_OPERATIONS) {
            // The change is already complete. If this fails, the next leader deletes the remaining parts.
            if let Err(error) = self.leadership.write_if_leading(None, batch).await {
                tracing::warn!(
                    event = "chunks-left",
                    prefix = self.prefix,
                    %error,
                    "the controller cannot delete unused chunks in etcd: the next leader deletes them"
                );
            }
        }
        Ok(())
    }

    /// Writes the manifest and executes `operations` in one transaction. Returns the manifest's new revision.
    async fn write_manifest(&self, operations: &[TxnOp], manifest: &[u8]) -> Result<i64, EtcdError> {
        let key = self.manifest_key();
        match self.leadership.write_if_leading(Some((&key, self.revision)), operations).await? {
            WriteOutcome::Written { revision } => Ok(revision),
            // An earlier attempt has succeeded, but its answer was lost.
            WriteOutcome::Conflict(Some(found)) if found.value() == manifest => Ok(found.mod_revision()),
            WriteOutcome::Conflict(_) => {
                Err(self.content_error(&key, "something else has changed it: expected one fleet per prefix"))
            }
        }
    }
}

/// Operations in batches, each of which fits into one transaction.
#[derive(Default)]
struct Batches {
    batches: Vec<Vec<TxnOp>>,
    last_batch_bytes: usize,
}

impl Batches {
    fn add(&mut self, operation: TxnOp, bytes: usize) {
        let is_full =
            |batch: &Vec<TxnOp>| batch.len() == MAX_TXN_OPERATIONS || self.last_batch_bytes + bytes > MAX_REQUEST_BYTES;
        match self.batches.last_mut() {
            Some(batch) if !is_full(batch) => {
                batch.push(operation);
                self.last_batch_bytes += bytes;
            }
            _ => {
                self.batches.push(vec![operation]);
                self.last_batch_bytes = bytes;
            }
        }
    }
}
