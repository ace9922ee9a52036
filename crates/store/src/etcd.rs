//! Storage of [`Records`] in etcd, written by the leader.
//!
//! Rows are grouped into parts, so that a change writes little: a part per service, one per sixteen servers, the
//! document in pieces. All parts of a change take effect together ([`coreward_etcd::chunked_store`]).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context as _;
use coreward_api::types::AuditEntry;
use coreward_etcd::EtcdError;
use coreward_etcd::chunked_store::{ChunkedStore, Chunks};
use coreward_etcd::cluster::Cluster;
use coreward_etcd::leadership::Leadership;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::StoreError;
use super::rows::Rows;
use coreward_fleet::records::{Document, Records};

const FLEET: &str = "fleet";
const LOAD_BALANCERS: &str = "load_balancers";
const SERVICE: &str = "service/";
const SERVERS: &str = "servers/";
const DOCUMENT: &str = "document/";
const DOCUMENT_GENERATION: &str = "document_generation";

/// Prefix of the parts with audit entries, which are grouped by id.
const AUDIT: &str = "audit/";

const AUDIT_ENTRIES_PER_PART: u64 = 50;
/// Number of servers whose rows are in one part. A part of servers that are in 1,000 services each fits a transaction.
const SERVERS_PER_PART: u16 = 16;
/// Maximum size of a piece of the document, in bytes.
const MAX_PIECE_BYTES: usize = 256 << 10;
/// Maximum size of a value in bytes, as etcd takes requests of 1.5 MiB. Further pieces of a longer row are stored under
/// the row's name, a blank (which no name contains) and a number.
const MAX_VALUE_BYTES: usize = 512 << 10;

/// Store of the leading controller's records in etcd. Its functions block, so asynchronous code must not call them.
pub struct EtcdStore {
    cluster: Arc<Cluster>,
    parts: ChunkedStore,
}

impl EtcdStore {
    pub fn open(cluster: Arc<Cluster>, leadership: Arc<Leadership>, prefix: &str) -> Result<Self, EtcdError> {
        let parts = cluster.block_on(ChunkedStore::open(leadership, prefix))?;
        Ok(Self { cluster, parts })
    }

    /// Returns the records; `None`: etcd contains none.
    pub fn load(&self) -> Result<Option<Records>, StoreError> {
        let parts = self.parts.parts();
        if parts.is_empty() {
            return Ok(None);
        }
        let records = decode(parts).and_then(Rows::parse);
        records.map(Some).map_err(|problem| StoreError::Content {
            store: format!("etcd at {}", self.cluster.endpoints()),
            problem: format!("{problem:#}"),
        })
    }

    /// Replaces all rows that differ, atomically. Fails if this controller no longer leads.
    pub fn save(&mut self, records: &Records) -> Result<(), StoreError> {
        let parts = encode(&records.into())
            .map_err(|problem| StoreError::Content { store: "etcd".to_owned(), problem: format!("{problem:#}") })?;
        Ok(self.cluster.block_on(self.parts.save(parts))?)
    }
}

fn encode(rows: &Rows) -> anyhow::Result<Chunks> {
    let mut parts = Chunks::new();
    add(&mut parts, FLEET.to_owned(), &rows.fleet)?;
    add(&mut parts, LOAD_BALANCERS.to_owned(), &rows.load_balancers)?;
    add(&mut parts, DOCUMENT_GENERATION.to_owned(), &rows.document.generation)?;
    for (name, service) in &rows.services {
        add(&mut parts, format!("{SERVICE}{name}"), service)?;
    }
    let mut groups: BTreeMap<u16, BTreeMap<u16, &_>> = BTreeMap::new();
    for (id, server) in &rows.servers {
        groups.entry(id / SERVERS_PER_PART).or_default().insert(*id, server);
    }
    for (group, servers) in &groups {
        add(&mut parts, format!("{SERVERS}{group:04}"), servers)?;
    }
    for (number, piece) in pieces(&rows.document.text).enumerate() {
        add(&mut parts, format!("{DOCUMENT}{number:06}"), &piece)?;
    }
    for entries in rows.audit.chunk_by(|a, b| a.id / AUDIT_ENTRIES_PER_PART == b.id / AUDIT_ENTRIES_PER_PART) {
        add(&mut parts, format!("{AUDIT}{:012}", entries[0].id / AUDIT_ENTRIES_PER_PART), &entries)?;
    }
    Ok(parts)
}

fn add(parts: &mut Chunks, name: String, row: &impl Serialize) -> anyhow::Result<()> {
    for (number, piece) in serde_json::to_vec(row)?.chunks(MAX_VALUE_BYTES).enumerate() {
        let name = if number == 0 { name.clone() } else { format!("{name} {number:06}") };
        parts.insert(name, piece.to_vec());
    }
    Ok(())
}

/// Returns the content of each row by its name, joined from the pieces.
fn join_rows(parts: &Chunks) -> BTreeMap<&str, Cow<'_, [u8]>> {
    let mut rows: BTreeMap<&str, Cow<'_, [u8]>> = BTreeMap::new();
    for (name, piece) in parts {
        match name.split_once(' ') {
            Some((row, _)) => rows.entry(row).or_default().to_mut().extend_from_slice(piece),
            None => drop(rows.insert(name, Cow::Borrowed(piece))),
        }
    }
    rows
}

fn decode(parts: &Chunks) -> anyhow::Result<Rows> {
    let parts = join_rows(parts);
    let mut rows = Rows {
        fleet: decode_part(&parts, FLEET)?,
        services: BTreeMap::new(),
        servers: BTreeMap::new(),
        load_balancers: decode_part(&parts, LOAD_BALANCERS)?,
        document: Document::default(),
        audit: Arc::default(),
    };
    let (mut text, mut audit) = (String::new(), Vec::new());
    // Pieces follow each other, because their names sort in this order.
    for (name, value) in &parts {
        let row = || format!("part {name}");
        if let Some(service) = name.strip_prefix(SERVICE) {
            rows.services.insert(service.to_owned(), serde_json::from_slice(value).with_context(row)?);
        } else if name.starts_with(SERVERS) {
            rows.servers.extend(serde_json::from_slice::<BTreeMap<u16, _>>(value).with_context(row)?);
        } else if name.starts_with(DOCUMENT) {
            text.push_str(&serde_json::from_slice::<String>(value).with_context(row)?);
        } else if name.starts_with(AUDIT) {
            audit.extend(serde_json::from_slice::<Vec<AuditEntry>>(value).with_context(row)?);
        }
    }
    rows.audit = Arc::new(audit);
    rows.document = Document { generation: decode_part(&parts, DOCUMENT_GENERATION)?, text: text.into() };
    Ok(rows)
}

fn decode_part<Row: DeserializeOwned>(parts: &BTreeMap<&str, Cow<'_, [u8]>>, name: &str) -> anyhow::Result<Row> {
    let value = parts.get(name).with_context(|| format!("part {name} is not there"))?;
    serde_json::from_slice(value).with_context(|| format!("part {name}"))
}

/// Splits the text into pieces of at most [`MAX_DOCUMENT_PIECE_BYTES`], at character boundaries.
fn pieces(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let end = (0..=MAX_PIECE_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        let (piece, rest) = text.split_at(end);
        text = rest;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coreward_config::Source;

    use super::super::tests::records;
    use super::*;
    use coreward_fleet::audit::{Author, ChangeDescription, describe_changes};
    use coreward_fleet::config::difference;

    #[test]
    fn parts_contain_all_records() {
        let mut records = records();
        let text = "# \u{e4}\n".repeat(3 * MAX_PIECE_BYTES / 5);
        records.document.text = text.into();
        let parts = encode(&(&records).into()).unwrap();
        assert!(parts.keys().filter(|name| name.starts_with(DOCUMENT)).count() > 2);
        assert_eq!(decode(&parts).and_then(Rows::parse).unwrap(), records);
    }

    /// Maximum size of a request to etcd, in bytes.
    const REQUEST_LIMIT: usize = 3 << 19;

    fn largest(parts: &Chunks) -> usize {
        parts.values().map(Vec::len).max().unwrap_or_default()
    }

    /// Returns a fleet whose services list 1,000 servers, except the one with the number `missing_server`.
    fn fleet_without(without: usize) -> Source {
        let names: Vec<String> = (0..1000).filter(|n| *n != without).map(|n| format!("server-{n:04}")).collect();
        let service = |port: u16| format!("[[service]]\nname = \"s{port}\"\nservers = {names:?}\n");
        Source::from_text("fleet.toml", &(service(80) + &service(443)))
    }

    #[test]
    fn edits_of_long_lists_fit_into_etcd() {
        let mut records = records();
        for edit in 0..60 {
            let changes: Vec<String> =
                difference(&fleet_without(edit), &fleet_without(edit + 1)).iter().map(ToString::to_string).collect();
            assert_eq!(changes.len(), 2);
            let after = describe_changes(&changes);
            let note = ChangeDescription { action: "apply", target: String::new(), before: String::new(), after };
            records.record_change(&Author::signal(), note, Duration::from_secs(1));
            let parts = encode(&(&records).into()).unwrap();
            assert!(largest(&parts) < REQUEST_LIMIT, "after {} edits: {} bytes", edit + 1, largest(&parts));
        }
    }

    #[test]
    fn long_rows_are_stored_in_pieces() {
        let mut records = records();
        let known = records.load_balancers["lb1"];
        records.load_balancers.extend((0..20_000).map(|number| (format!("{number:064}"), known)));
        let parts = encode(&(&records).into()).unwrap();
        assert!(largest(&parts) < REQUEST_LIMIT, "{} bytes", largest(&parts));
        assert!(parts.contains_key("load_balancers 000003"), "{:?}", parts.keys());
        assert_eq!(decode(&parts).and_then(Rows::parse).unwrap(), records);
    }

    #[test]
    fn change_of_one_server_changes_one_part() {
        let (before, mut after) = (records(), records());
        after.servers.last_entry().unwrap().get_mut().address = [10, 2, 0, 99].into();
        let [before, after] = [before, after].map(|records| encode(&(&records).into()).unwrap());
        let changed: Vec<&String> =
            after.iter().filter(|(name, value)| before.get(*name) != Some(*value)).map(|(name, _)| name).collect();
        assert_eq!(changed, ["servers/1023"]);
    }

    #[test]
    fn missing_part_is_reported() {
        let mut parts = encode(&(&records()).into()).unwrap();
        parts.remove(FLEET);
        assert_eq!(decode(&parts).unwrap_err().to_string(), "part fleet is not there");
    }
}
