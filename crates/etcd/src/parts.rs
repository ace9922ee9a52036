//! The state: named parts, of which a change replaces some. etcd takes requests of 1.5 MB and transactions of 128 operations, and
//! the state of 10,000 servers is larger. So a change first writes the parts that are new beside the others, under its number, and
//! then, in one transaction, the manifest that names the parts in force. Whoever reads sees all of a change or nothing; what a
//! leader wrote that died before the manifest is nobody's, and the next leader throws it away.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, GetOptions, TxnOp};
use serde::{Deserialize, Serialize};

use crate::EtcdError;
use crate::clock::Moment;
use crate::leadership::{Guarded, Leadership};

/// Of the manifest's layout.
const FORMAT: u32 = 1;
/// Operations of one transaction (etcd's --max-txn-ops is 128).
const MOST_OPERATIONS: usize = 100;
/// Bytes of one transaction (etcd's --max-request-bytes is 1.5 MiB).
const MOST_BYTES: usize = 1_000_000;
/// Parts that are read at once.
const PAGE: i64 = 64;
/// What one answer may hold.
const LARGEST_ANSWER: usize = 256 << 20;
/// For reading everything.
const PATIENCE: Duration = Duration::from_secs(10);

/// The state, by the names of its parts.
pub type Parts = BTreeMap<String, Vec<u8>>;

/// The state as the one that leads sees it; only that one writes.
pub struct PartStore {
    leadership: Arc<Leadership>,
    prefix: String,
    manifest: Manifest,
    /// Of the manifest's last change; 0: there is none.
    revision: i64,
    saved: Parts,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    /// Of the change.
    number: u64,
    /// By name: which change wrote it.
    parts: BTreeMap<String, u64>,
}

impl PartStore {
    /// Reads what is there.
    ///
    /// # Errors
    /// When etcd does not answer, or what is there makes no sense.
    pub async fn open(leadership: Arc<Leadership>, prefix: &str) -> Result<Self, EtcdError> {
        let mut store = Self {
            leadership,
            prefix: prefix.to_owned(),
            manifest: Manifest { format: FORMAT, ..Manifest::default() },
            revision: 0,
            saved: Parts::new(),
        };
        store.load().await?;
        store.tidy().await?;
        Ok(store)
    }

    /// What is in force; empty: nothing was ever saved.
    pub fn parts(&self) -> &Parts {
        &self.saved
    }

    /// Who writes.
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
        let found = self.leadership.cluster().call(Moment::now() + PATIENCE, request).await?;
        let Some(written) = found.kvs().first() else { return Ok(()) };
        let manifest: Manifest =
            serde_json::from_slice(written.value()).map_err(|error| self.content_error(&key, error))?;
        if manifest.format != FORMAT {
            let problem = format!("format {}: expected {FORMAT}", manifest.format);
            return Err(self.content_error(&key, problem));
        }
        // At the manifest's own revision: what is in force has been there then.
        let at = found.header().map_or(0, etcd_client::ResponseHeader::revision);
        let mut values = self.read_all(at, false).await?;
        for (name, number) in &manifest.parts {
            let key = self.part_key(name, *number);
            let value = values.remove(&key).ok_or_else(|| self.content_error(&key, "it is in force, and not there"))?;
            self.saved.insert(name.clone(), value);
        }
        (self.manifest, self.revision) = (manifest, written.mod_revision());
        Ok(())
    }

    /// All that stands under `parts`, by key.
    async fn read_all(&self, at: i64, keys_only: bool) -> Result<Parts, EtcdError> {
        let mut all = Parts::new();
        let mut from = self.all_parts_key().into_bytes();
        // `/` + 1.
        let end = format!("{}/parts0", self.prefix);
        loop {
            let mut options = GetOptions::new().with_range(end.clone()).with_limit(PAGE).with_revision(at);
            if keys_only {
                options = options.with_keys_only();
            }
            let request = |client: Client| {
                let (from, options) = (from.clone(), options.clone());
                let mut client = client.kv_client().max_decoding_message_size(LARGEST_ANSWER);
                async move { client.get(from, Some(options)).await }
            };
            let mut page = self.leadership.cluster().call(Moment::now() + PATIENCE, request).await?;
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

    /// Throws away what no manifest names.
    async fn tidy(&self) -> Result<(), EtcdError> {
        let there = self.read_all(0, true).await?;
        let needed: HashSet<String> =
            self.manifest.parts.iter().map(|(name, number)| self.part_key(name, *number)).collect();
        let left: Vec<TxnOp> =
            there.keys().filter(|key| !needed.contains(*key)).map(|key| TxnOp::delete(key.clone(), None)).collect();
        for batch in left.chunks(MOST_OPERATIONS) {
            self.leadership.guarded(None, batch).await?;
        }
        Ok(())
    }

    /// Replaces everything. Only what differs is written.
    ///
    /// # Errors
    /// When this process leads no more, or etcd does not take it. When etcd does not answer it is not known whether the
    /// change was made; the process leads no more then, as this is tried until its lease ends.
    pub async fn save(&mut self, parts: Parts) -> Result<(), EtcdError> {
        let mut next = Manifest { number: self.manifest.number + 1, ..self.manifest.clone() };
        let mut superseded = Vec::new();
        for (name, number) in &self.manifest.parts {
            if parts.get(name) != self.saved.get(name) {
                superseded.push(TxnOp::delete(self.part_key(name, *number), None));
                next.parts.remove(name);
            }
        }
        let mut puts = Batches::default();
        for (name, value) in parts.iter().filter(|(name, value)| self.saved.get(*name) != Some(*value)) {
            puts.add(TxnOp::put(self.part_key(name, next.number), value.clone(), None), value.len());
            next.parts.insert(name.clone(), next.number);
        }
        let encoded = serde_json::to_vec(&next).map_err(|error| self.content_error("manifest", error))?;
        puts.add(TxnOp::put(self.manifest_key(), encoded.clone(), None), encoded.len());
        let mut batches = puts.batches;
        let mut last = batches.pop().unwrap_or_default();
        for batch in &batches {
            self.leadership.guarded(None, batch).await?;
        }
        let later = superseded.split_off(superseded.len().min(MOST_OPERATIONS.saturating_sub(last.len())));
        last.extend(superseded);
        self.revision = self.switch(&last, &encoded).await?;
        (self.manifest, self.saved) = (next, parts);
        for batch in later.chunks(MOST_OPERATIONS) {
            // It is done; what is left over is in nobody's way, and the next leader throws it away.
            if let Err(error) = self.leadership.guarded(None, batch).await {
                tracing::warn!("parts that are of no use any more stay in etcd: {error}");
            }
        }
        Ok(())
    }

    /// Puts the manifest in force; gives its revision.
    async fn switch(&self, operations: &[TxnOp], manifest: &[u8]) -> Result<i64, EtcdError> {
        let key = self.manifest_key();
        match self.leadership.guarded(Some((&key, self.revision)), operations).await? {
            Guarded::Done { revision } => Ok(revision),
            // The answer to an attempt before this one was lost.
            Guarded::Differs(Some(found)) if found.value() == manifest => Ok(found.mod_revision()),
            Guarded::Differs(_) => {
                Err(self.content_error(&key, "something else has changed it: expected one fleet per prefix"))
            }
        }
    }
}

/// Operations, as many together as one transaction takes.
#[derive(Default)]
struct Batches {
    batches: Vec<Vec<TxnOp>>,
    bytes: usize,
}

impl Batches {
    fn add(&mut self, operation: TxnOp, bytes: usize) {
        let full = |batch: &Vec<TxnOp>| batch.len() == MOST_OPERATIONS || self.bytes + bytes > MOST_BYTES;
        match self.batches.last_mut() {
            Some(batch) if !full(batch) => {
                batch.push(operation);
                self.bytes += bytes;
            }
            _ => {
                self.batches.push(vec![operation]);
                self.bytes = bytes;
            }
        }
    }
}
