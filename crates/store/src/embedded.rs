//! Storage of [`FleetRecords`] in a redb file. A change is one transaction, which survives SIGKILL and power cuts. The
//! file contains the cookie keys, so only its owner can read it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use redb::backends::InMemoryBackend;
use redb::{
    Database, Key, ReadOnlyTable, ReadTransaction, ReadableDatabase as _, ReadableTable as _, StorageBackend as _,
    TableDefinition, Value, WriteTransaction,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::FleetStoreError;
use super::rows::{FleetRecordRows, FleetRow};
use coreward_fleet::records::{FleetDocument, FleetRecords};

const FLEET_TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("fleet");
const SERVICES_TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("services");
const SERVERS_TABLE: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("servers");
const LOAD_BALANCERS_TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("load_balancers");
/// Table with one row for the fleet document, whose key is the document's generation.
const FLEET_DOCUMENT_TABLE: TableDefinition<'_, u64, &str> = TableDefinition::new("document");

/// Table with the audit log's entries by id.
const AUDIT_LOG_TABLE: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("audit");
const FLEET_ROW_KEY: &str = "fleet";

pub struct EmbeddedStore {
    path: PathBuf,
    /// Open database. It is `None` after opening or writing has failed, until the next write opens the file again.
    database: Option<Database>,
    /// In-memory copy of the database, if the file could not be opened for writing.
    read_only_copy: Option<Database>,
}

impl EmbeddedStore {
    /// Opens or creates the database file. If the file cannot be opened for writing, the store reads its content, and
    /// rejects changes until a write succeeds.
    pub fn open(path: &Path) -> Result<Self, FleetStoreError> {
        let (database, copy) = match open_database(path) {
            Ok(database) => (Some(database), None),
            Err(error @ FleetStoreError::FileInUse { .. }) => return Err(error),
            Err(error) => {
                let Ok(copy) = open_in_memory_copy(path) else { return Err(error) };
                tracing::warn!(
                    event = "store-read-only",
                    file = %path.display(),
                    %error,
                    "the controller cannot open its store for writing: it rejects changes until it can"
                );
                (None, Some(copy))
            }
        };
        Ok(Self { path: path.to_owned(), database, read_only_copy: copy })
    }

    /// Returns the fleet's records, or `None` if the file is new.
    pub fn load_records(&self) -> Result<Option<FleetRecords>, FleetStoreError> {
        self.try_load_records().map_err(|problem| self.invalid_content_error(problem))
    }

    /// Replaces the fleet's records in one transaction. If it fails, the file keeps the previous records.
    pub fn save_records(&mut self, records: &FleetRecords) -> Result<(), FleetStoreError> {
        let Err(problem) = self.try_save_rows(&records.into()) else { return Ok(()) };
        // After a failed write, redb rejects everything until the file is opened again (`StorageError::PreviousIo`).
        self.database = None;
        if self.reopen_if_closed().is_ok() && self.load_records().ok().flatten().as_ref() == Some(records) {
            return Ok(());
        }
        Err(self.invalid_content_error(problem))
    }

    fn reopen_if_closed(&mut self) -> Result<(), FleetStoreError> {
        if self.database.is_none() {
            self.database = Some(open_database(&self.path)?);
            self.read_only_copy = None;
        }
        Ok(())
    }

    fn database(&self) -> anyhow::Result<&Database> {
        self.database
            .as_ref()
            .or(self.read_only_copy.as_ref())
            .context("it could not be opened again after its disk failed")
    }

    fn invalid_content_error(&self, problem: anyhow::Error) -> FleetStoreError {
        FleetStoreError::UnreadableContent { store: self.path.display().to_string(), problem: format!("{problem:#}") }
    }

    fn try_load_records(&self) -> anyhow::Result<Option<FleetRecords>> {
        let transaction = self.database()?.begin_read()?;
        let Some(fleet) =
            decode_rows::<_, _, FleetRow>(&transaction, FLEET_TABLE, str::to_owned)?.remove(FLEET_ROW_KEY)
        else {
            return Ok(None);
        };
        let mut document = FleetDocument::default();
        if let Some(table) = open_table_if_present(&transaction, FLEET_DOCUMENT_TABLE)?
            && let Some((generation, text)) = table.last()?
        {
            document = FleetDocument { generation: generation.value(), text: text.value().into() };
        }
        let rows = FleetRecordRows {
            fleet,
            services: decode_rows(&transaction, SERVICES_TABLE, str::to_owned)?,
            servers: decode_rows(&transaction, SERVERS_TABLE, |id| id)?,
            load_balancers: decode_rows(&transaction, LOAD_BALANCERS_TABLE, str::to_owned)?,
            document,
            audit_log: Arc::new(decode_rows(&transaction, AUDIT_LOG_TABLE, |id| id)?.into_values().collect()),
        };
        rows.into_records().map(Some)
    }

    fn try_save_rows(&mut self, rows: &FleetRecordRows) -> anyhow::Result<()> {
        self.reopen_if_closed()?;
        let transaction = self.database()?.begin_write()?;
        transaction.delete_table(SERVICES_TABLE)?;
        transaction.delete_table(SERVERS_TABLE)?;
        transaction.delete_table(LOAD_BALANCERS_TABLE)?;
        transaction.delete_table(FLEET_DOCUMENT_TABLE)?;
        {
            let mut fleet_table = transaction.open_table(FLEET_TABLE)?;
            fleet_table.insert(FLEET_ROW_KEY, encode_row(&rows.fleet)?.as_slice())?;
            let mut services_table = transaction.open_table(SERVICES_TABLE)?;
            for (name, service) in &rows.services {
                services_table.insert(name.as_str(), encode_row(service)?.as_slice())?;
            }
            let mut servers_table = transaction.open_table(SERVERS_TABLE)?;
            for (id, server) in &rows.servers {
                servers_table.insert(id, encode_row(server)?.as_slice())?;
            }
            let mut load_balancers_table = transaction.open_table(LOAD_BALANCERS_TABLE)?;
            for (name, record) in &rows.load_balancers {
                load_balancers_table.insert(name.as_str(), encode_row(record)?.as_slice())?;
            }
            transaction.open_table(FLEET_DOCUMENT_TABLE)?.insert(rows.document.generation, &*rows.document.text)?;
            sync_table_with_rows(&transaction, AUDIT_LOG_TABLE, rows.audit_log.iter().map(|entry| (entry.id, entry)))?;
        }
        transaction.commit()?;
        Ok(())
    }
}

/// Makes the table contain exactly `rows`. Only inserts and removes rows, because the content under a key never
/// changes.
fn sync_table_with_rows<'a, Row: Serialize + 'a>(
    transaction: &WriteTransaction,
    definition: TableDefinition<'_, u64, &'static [u8]>,
    rows: impl Iterator<Item = (u64, &'a Row)>,
) -> anyhow::Result<()> {
    let mut table = transaction.open_table(definition)?;
    let mut removed_keys: BTreeSet<u64> =
        table.iter()?.map(|row| row.map(|(key, _)| key.value())).collect::<Result<_, _>>()?;
    for (key, row) in rows {
        if !removed_keys.remove(&key) {
            table.insert(key, encode_row(row)?.as_slice())?;
        }
    }
    for key in removed_keys {
        table.remove(key)?;
    }
    Ok(())
}

fn encode_row(row: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(row)
}

/// Opens a table for reading, or returns `None` if an older version created the file without this table.
fn open_table_if_present<K: Key + 'static, V: Value + 'static>(
    transaction: &ReadTransaction,
    definition: TableDefinition<'_, K, V>,
) -> anyhow::Result<Option<ReadOnlyTable<K, V>>> {
    match transaction.open_table(definition) {
        Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
        opened => Ok(Some(opened?)),
    }
}

fn decode_rows<K: Key + 'static, Owned: Ord, Row: DeserializeOwned>(
    transaction: &ReadTransaction,
    definition: TableDefinition<'_, K, &'static [u8]>,
    to_owned_key: impl Fn(K::SelfType<'_>) -> Owned,
) -> anyhow::Result<BTreeMap<Owned, Row>> {
    let mut decoded_rows = BTreeMap::new();
    let Some(table) = open_table_if_present(transaction, definition)? else { return Ok(decoded_rows) };
    for row in table.iter()? {
        let (key, row) = row?;
        decoded_rows.insert(to_owned_key(key.value()), serde_json::from_slice(row.value())?);
    }
    Ok(decoded_rows)
}

fn open_database(path: &Path) -> Result<Database, FleetStoreError> {
    let file =
        open_private_file(path).map_err(|source| FleetStoreError::UnusableFile { path: path.to_owned(), source })?;
    Database::builder().create_file(file).map_err(|error| match error {
        redb::DatabaseError::DatabaseAlreadyOpen => FleetStoreError::FileInUse { path: path.to_owned() },
        other => FleetStoreError::UnreadableContent { store: path.display().to_string(), problem: other.to_string() },
    })
}

/// Opens a copy of the file in memory. The copy is writable, because opening repairs the database after a crash.
fn open_in_memory_copy(path: &Path) -> anyhow::Result<Database> {
    let bytes = std::fs::read(path)?;
    anyhow::ensure!(!bytes.is_empty(), "nothing in it");
    let memory_backend = InMemoryBackend::new();
    memory_backend.set_len(bytes.len() as u64)?;
    memory_backend.write(0, &bytes)?;
    Ok(Database::builder().create_with_backend(memory_backend)?)
}

/// Opens or creates a file that only its owner can read and write.
fn open_private_file(path: &Path) -> std::io::Result<File> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::tests::records_for_every_table;
    use super::*;

    #[test]
    fn saved_records_are_loaded() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("made/controller.redb");
        let mut store = EmbeddedStore::open(&path).unwrap();
        assert_eq!(store.load_records().unwrap(), None);
        store.save_records(&records_for_every_table()).unwrap();
        let mut changed_records = records_for_every_table();
        changed_records.servers.pop_first();
        changed_records.services.clear();
        store.save_records(&changed_records).unwrap();
        drop(store);
        assert_eq!(EmbeddedStore::open(&path).unwrap().load_records().unwrap(), Some(changed_records));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn second_controller_cannot_open_the_store() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("controller.redb");
        let _first_store = EmbeddedStore::open(&path).unwrap();
        let error = EmbeddedStore::open(&path).err().unwrap().to_string();
        assert_eq!(error, format!("store {} is in use: expected one controller per store", path.display()));
    }

    #[test]
    fn file_of_another_program_is_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("controller.redb");
        let file_content = vec![b'x'; 10_000];
        std::fs::write(&path, &file_content).unwrap();
        let error = EmbeddedStore::open(&path).err().unwrap().to_string();
        assert!(error.starts_with(&format!("store {}: ", path.display())), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), file_content);
    }
}
