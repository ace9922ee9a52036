//! Storage of [`FleetRecords`] in etcd, written by the leader.
//!
//! Rows are grouped into parts, so that a change writes little. There is a part for each service and for every sixteen
//! servers, and the document is split into pieces. All parts of a change take effect together
//! ([`coreward_etcd::chunked_store`]).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context as _;
use coreward_api::types::AuditEntry;
use coreward_etcd::EtcdError;
use coreward_etcd::chunked_store::{ChunkedStore, StoredStateParts};
use coreward_etcd::cluster::EtcdClusterClient;
use coreward_etcd::leadership::Leadership;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::FleetStoreError;
use super::rows::FleetRecordRows;
use coreward_fleet::records::{FleetDocument, FleetRecords};

const FLEET_PART_NAME: &str = "fleet";
const LOAD_BALANCERS_PART_NAME: &str = "load_balancers";
const SERVICE_PART_PREFIX: &str = "service/";
const SERVERS_PART_PREFIX: &str = "servers/";
const DOCUMENT_PART_PREFIX: &str = "document/";
const DOCUMENT_GENERATION_PART_NAME: &str = "document_generation";

/// Name prefix of the parts that store audit entries. Each part stores the entries of one range of ids.
const AUDIT_PART_PREFIX: &str = "audit/";

const AUDIT_ENTRIES_PER_PART: u64 = 50;
/// Number of server rows in one part, which fits into one transaction even if each server is in 1,000 services.
const SERVERS_PER_PART: u16 = 16;
/// Maximum size of a piece of the fleet document, in bytes.
const MAX_DOCUMENT_PIECE_BYTES: usize = 256 << 10;
/// Maximum size of a stored value in bytes, because etcd accepts requests of at most 1.5 MiB. A longer row is split.
/// Its further pieces have keys that consist of the row's name, a blank (which no name contains) and a number.
const MAX_ETCD_VALUE_BYTES: usize = 512 << 10;

/// Store of the fleet's records in etcd, for the leading controller. Asynchronous code must not call its functions,
/// because they block.
pub struct EtcdStore {
    cluster: Arc<EtcdClusterClient>,
    chunked_store: ChunkedStore,
}

impl EtcdStore {
    pub fn open(cluster: Arc<EtcdClusterClient>, leadership: Arc<Leadership>, prefix: &str) -> Result<Self, EtcdError> {
        let chunked_store = cluster.block_on(ChunkedStore::open(leadership, prefix))?;
        Ok(Self { cluster, chunked_store })
    }

    /// Returns the fleet's records, or `None` if etcd contains none.
    pub fn load_records(&self) -> Result<Option<FleetRecords>, FleetStoreError> {
        let parts = self.chunked_store.parts();
        if parts.is_empty() {
            return Ok(None);
        }
        let decode_result = decode_rows(parts).and_then(FleetRecordRows::into_records);
        decode_result.map(Some).map_err(|problem| FleetStoreError::UnreadableContent {
            store: format!("etcd at {}", self.cluster.joined_endpoints()),
            problem: format!("{problem:#}"),
        })
    }

    /// Stores the records in one atomic step, which writes only the parts that changed. Fails if this controller no
    /// longer leads.
    pub fn save_records(&mut self, records: &FleetRecords) -> Result<(), FleetStoreError> {
        let parts = encode_parts(&records.into()).map_err(|problem| FleetStoreError::UnreadableContent {
            store: "etcd".to_owned(),
            problem: format!("{problem:#}"),
        })?;
        Ok(self.cluster.block_on(self.chunked_store.save(parts))?)
    }
}

fn encode_parts(rows: &FleetRecordRows) -> anyhow::Result<StoredStateParts> {
    let mut parts = StoredStateParts::new();
    add_row_as_parts(&mut parts, FLEET_PART_NAME.to_owned(), &rows.fleet)?;
    add_row_as_parts(&mut parts, LOAD_BALANCERS_PART_NAME.to_owned(), &rows.load_balancers)?;
    add_row_as_parts(&mut parts, DOCUMENT_GENERATION_PART_NAME.to_owned(), &rows.document.generation)?;
    for (name, service) in &rows.services {
        add_row_as_parts(&mut parts, format!("{SERVICE_PART_PREFIX}{name}"), service)?;
    }
    let mut servers_by_part: BTreeMap<u16, BTreeMap<u16, &_>> = BTreeMap::new();
    for (id, server) in &rows.servers {
        servers_by_part.entry(id / SERVERS_PER_PART).or_default().insert(*id, server);
    }
    for (group, servers) in &servers_by_part {
        add_row_as_parts(&mut parts, format!("{SERVERS_PART_PREFIX}{group:04}"), servers)?;
    }
    for (number, text_piece) in split_into_pieces(&rows.document.text).enumerate() {
        add_row_as_parts(&mut parts, format!("{DOCUMENT_PART_PREFIX}{number:06}"), &text_piece)?;
    }
    for entries in rows.audit_log.chunk_by(|a, b| a.id / AUDIT_ENTRIES_PER_PART == b.id / AUDIT_ENTRIES_PER_PART) {
        add_row_as_parts(
            &mut parts,
            format!("{AUDIT_PART_PREFIX}{:012}", entries[0].id / AUDIT_ENTRIES_PER_PART),
            &entries,
        )?;
    }
    Ok(parts)
}

fn add_row_as_parts(parts: &mut StoredStateParts, name: String, row: &impl Serialize) -> anyhow::Result<()> {
    for (number, chunk) in serde_json::to_vec(row)?.chunks(MAX_ETCD_VALUE_BYTES).enumerate() {
        let part_name = if number == 0 { name.clone() } else { format!("{name} {number:06}") };
        parts.insert(part_name, chunk.to_vec());
    }
    Ok(())
}

/// Returns the content of each row by row name. A row's content is joined from its pieces.
fn join_row_pieces(parts: &StoredStateParts) -> BTreeMap<&str, Cow<'_, [u8]>> {
    let mut rows_by_name: BTreeMap<&str, Cow<'_, [u8]>> = BTreeMap::new();
    for (name, chunk) in parts {
        match name.split_once(' ') {
            Some((row, _)) => rows_by_name.entry(row).or_default().to_mut().extend_from_slice(chunk),
            None => drop(rows_by_name.insert(name, Cow::Borrowed(chunk))),
        }
    }
    rows_by_name
}

fn decode_rows(parts: &StoredStateParts) -> anyhow::Result<FleetRecordRows> {
    let rows_by_name = join_row_pieces(parts);
    let mut rows = FleetRecordRows {
        fleet: decode_part(&rows_by_name, FLEET_PART_NAME)?,
        services: BTreeMap::new(),
        servers: BTreeMap::new(),
        load_balancers: decode_part(&rows_by_name, LOAD_BALANCERS_PART_NAME)?,
        document: FleetDocument::default(),
        audit_log: Arc::default(),
    };
    let (mut text, mut audit) = (String::new(), Vec::new());
    // Pieces follow each other, because their names sort in this order.
    for (name, value) in &rows_by_name {
        let describe_row = || format!("part {name}");
        if let Some(service) = name.strip_prefix(SERVICE_PART_PREFIX) {
            rows.services.insert(service.to_owned(), serde_json::from_slice(value).with_context(describe_row)?);
        } else if name.starts_with(SERVERS_PART_PREFIX) {
            rows.servers.extend(serde_json::from_slice::<BTreeMap<u16, _>>(value).with_context(describe_row)?);
        } else if name.starts_with(DOCUMENT_PART_PREFIX) {
            text.push_str(&serde_json::from_slice::<String>(value).with_context(describe_row)?);
        } else if name.starts_with(AUDIT_PART_PREFIX) {
            audit.extend(serde_json::from_slice::<Vec<AuditEntry>>(value).with_context(describe_row)?);
        }
    }
    rows.audit_log = Arc::new(audit);
    rows.document =
        FleetDocument { generation: decode_part(&rows_by_name, DOCUMENT_GENERATION_PART_NAME)?, text: text.into() };
    Ok(rows)
}

fn decode_part<Row: DeserializeOwned>(rows_by_name: &BTreeMap<&str, Cow<'_, [u8]>>, name: &str) -> anyhow::Result<Row> {
    let row_content = rows_by_name.get(name).with_context(|| format!("part {name} is not there"))?;
    serde_json::from_slice(row_content).with_context(|| format!("part {name}"))
}

/// Splits the text into pieces of at most [`MAX_DOCUMENT_PIECE_BYTES`], at character boundaries.
fn split_into_pieces(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let piece_end =
            (0..=MAX_DOCUMENT_PIECE_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        let (text_piece, rest) = text.split_at(piece_end);
        text = rest;
        (!text_piece.is_empty()).then_some(text_piece)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coreward_config::TomlSource;

    use super::super::tests::records_for_every_table;
    use super::*;
    use coreward_fleet::audit::{FleetChangeAuthor, FleetChangeDescription, describe_changes};
    use coreward_fleet::config::list_changes;

    #[test]
    fn parts_contain_all_records() {
        let mut records = records_for_every_table();
        let text = "# \u{e4}\n".repeat(3 * MAX_DOCUMENT_PIECE_BYTES / 5);
        records.document.text = text.into();
        let parts = encode_parts(&(&records).into()).unwrap();
        assert!(parts.keys().filter(|name| name.starts_with(DOCUMENT_PART_PREFIX)).count() > 2);
        assert_eq!(decode_rows(&parts).and_then(FleetRecordRows::into_records).unwrap(), records);
    }

    /// Maximum size of a request to etcd, in bytes.
    const MAX_ETCD_REQUEST_BYTES: usize = 3 << 19;

    fn largest_value_bytes(parts: &StoredStateParts) -> usize {
        parts.values().map(Vec::len).max().unwrap_or_default()
    }

    /// Returns a fleet document whose services list 1,000 servers except the server with the number `missing_server`.
    fn fleet_document_without_server(missing_server: usize) -> TomlSource {
        let server_names: Vec<String> =
            (0..1000).filter(|n| *n != missing_server).map(|n| format!("server-{n:04}")).collect();
        let service_section = |port: u16| format!("[[service]]\nname = \"s{port}\"\nservers = {server_names:?}\n");
        TomlSource::from_text("fleet.toml", &(service_section(80) + &service_section(443)))
    }

    #[test]
    fn changes_of_long_lists_fit_into_requests_to_etcd() {
        let mut records = records_for_every_table();
        for edit in 0..60 {
            let change_texts: Vec<String> =
                list_changes(&fleet_document_without_server(edit), &fleet_document_without_server(edit + 1))
                    .iter()
                    .map(ToString::to_string)
                    .collect();
            assert_eq!(change_texts.len(), 2);
            let description = describe_changes(&change_texts);
            let change_description = FleetChangeDescription {
                action: "apply",
                target: String::new(),
                state_before: String::new(),
                state_after: description,
            };
            records.append_audit_entry(&FleetChangeAuthor::sighup(), change_description, Duration::from_secs(1));
            let parts = encode_parts(&(&records).into()).unwrap();
            assert!(
                largest_value_bytes(&parts) < MAX_ETCD_REQUEST_BYTES,
                "after {} edits: {} bytes",
                edit + 1,
                largest_value_bytes(&parts)
            );
        }
    }

    #[test]
    fn long_rows_are_stored_in_several_pieces() {
        let mut records = records_for_every_table();
        let load_balancer_record = records.load_balancers["lb1"];
        records.load_balancers.extend((0..20_000).map(|number| (format!("{number:064}"), load_balancer_record)));
        let parts = encode_parts(&(&records).into()).unwrap();
        assert!(largest_value_bytes(&parts) < MAX_ETCD_REQUEST_BYTES, "{} bytes", largest_value_bytes(&parts));
        assert!(parts.contains_key("load_balancers 000003"), "{:?}", parts.keys());
        assert_eq!(decode_rows(&parts).and_then(FleetRecordRows::into_records).unwrap(), records);
    }

    #[test]
    fn change_of_one_server_changes_one_part_only() {
        let (old_records, mut new_records) = (records_for_every_table(), records_for_every_table());
        new_records.servers.last_entry().unwrap().get_mut().address = [10, 2, 0, 99].into();
        let [old_parts, new_parts] =
            [old_records, new_records].map(|records| encode_parts(&(&records).into()).unwrap());
        let changed_parts: Vec<&String> = new_parts
            .iter()
            .filter(|(name, value)| old_parts.get(*name) != Some(*value))
            .map(|(name, _)| name)
            .collect();
        assert_eq!(changed_parts, ["servers/1023"]);
    }

    #[test]
    fn missing_part_is_reported() {
        let mut parts = encode_parts(&(&records_for_every_table()).into()).unwrap();
        parts.remove(FLEET_PART_NAME);
        assert_eq!(decode_rows(&parts).unwrap_err().to_string(), "part fleet is not there");
    }
}
