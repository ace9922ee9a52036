//! Keeps [`Records`] on disk (redb: one file, transactions that survive SIGKILL and a power cut).
//!
//! Every change is one transaction: after a crash the file holds either all of it or nothing. The file holds the cookie
//! keys, so only its owner can read it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::bucket_history::BucketHistory;
use coreward_model::connection_table::OwnerNumber;
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::rss::RssKey;
use coreward_wire::ServiceIndex;
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use serde::{Deserialize, Serialize};

use crate::key_ring::{KeyPhase, KeyRing};
use crate::records::{Document, LoadBalancerRecord, Membership, Records, ServerRecord, ServiceRecord};

const FLEET: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("fleet");
const SERVICES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("services");
const SERVERS: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("servers");
const LOAD_BALANCERS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("load_balancers");
/// The fleet's document, by its generation; one row.
const DOCUMENT: TableDefinition<'_, u64, &str> = TableDefinition::new("document");

/// The only row of [`FLEET`].
const FLEET_ROW: &str = "fleet";

/// Of the rows' layout. A file of another version is refused, not guessed at; but for those before, to which this one
/// only adds.
const FORMAT: u32 = 3;
const FIRST_FORMAT: u32 = 1;

/// The open file.
pub struct Store {
    path: PathBuf,
    database: Database,
}

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It cannot be opened or made.
    #[error("store {}: {source}: expected a file that can be written, or a directory to make it in", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Another process has it open.
    #[error("store {} is in use: expected one controller per store", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// It is damaged, or no store, or the disk fails.
    #[error("store {}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

#[derive(Serialize, Deserialize)]
struct FleetRow {
    format: u32,
    generation: u64,
    /// k0, k1 of both keys.
    cookie_keys: [[u64; 2]; 2],
    current_key: u8,
    #[serde(default)]
    keys_generation: u64,
    /// Seconds since 1970.
    #[serde(default)]
    current_key_since: u64,
    /// Absent: no rotation is under way; whether it was forced.
    #[serde(default)]
    announced: Option<bool>,
    rss_key: String,
}

#[derive(Serialize, Deserialize)]
struct LoadBalancerRow {
    owner: Option<u8>,
    address: Option<IpAddr>,
    /// Seconds since 1970.
    left_at: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct ServiceRow {
    index: u16,
    seed: u64,
    /// By bucket: whose it is, and whose it was.
    #[serde(default)]
    buckets: Vec<(u16, Option<u16>)>,
}

#[derive(Serialize, Deserialize)]
struct ServerRow {
    name: String,
    address: IpAddr,
    in_file: bool,
    /// By service; a number: left at this second since 1970.
    services: BTreeMap<String, Option<u64>>,
}

impl Store {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// When it cannot be opened, is in use, or is no store.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let file = open_private(path).map_err(|source| StoreError::File { path: path.to_owned(), source })?;
        let database = Database::builder().create_file(file).map_err(|error| match error {
            redb::DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path: path.to_owned() },
            other => StoreError::Content { path: path.to_owned(), problem: other.to_string() },
        })?;
        Ok(Self { path: path.to_owned(), database })
    }

    /// What is on record; `None` in a new file.
    ///
    /// # Errors
    /// When the content makes no sense or cannot be read.
    pub fn load(&self) -> Result<Option<Records>, StoreError> {
        self.try_load().map_err(|problem| self.content(problem))
    }

    /// Replaces everything, in one transaction.
    ///
    /// # Errors
    /// When it cannot be written; then what was there is there still.
    pub fn save(&self, records: &Records) -> Result<(), StoreError> {
        self.try_save(records).map_err(|problem| self.content(problem))
    }

    fn content(&self, problem: anyhow::Error) -> StoreError {
        StoreError::Content { path: self.path.clone(), problem: format!("{problem:#}") }
    }

    fn try_load(&self) -> anyhow::Result<Option<Records>> {
        let transaction = self.database.begin_read()?;
        let fleet = match transaction.open_table(FLEET) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            opened => opened?.get(FLEET_ROW)?.map(|row| serde_json::from_slice::<FleetRow>(row.value())),
        };
        let Some(fleet) = fleet.transpose()? else {
            return Ok(None);
        };
        let mut records = fleet.parse()?;
        for row in transaction.open_table(SERVICES)?.iter()? {
            let (name, row) = row?;
            records
                .services
                .insert(name.value().to_owned(), serde_json::from_slice::<ServiceRow>(row.value())?.parse()?);
        }
        for row in transaction.open_table(SERVERS)?.iter()? {
            let (id, row) = row?;
            let id = ServerId::try_from(u64::from(id.value()))?;
            records.servers.insert(id, serde_json::from_slice::<ServerRow>(row.value())?.parse());
        }
        match transaction.open_table(LOAD_BALANCERS) {
            Err(redb::TableError::TableDoesNotExist(_)) => {}
            opened => {
                for row in opened?.iter()? {
                    let (name, row) = row?;
                    let parsed = serde_json::from_slice::<LoadBalancerRow>(row.value())?.parse()?;
                    records.load_balancers.insert(name.value().to_owned(), parsed);
                }
            }
        }
        match transaction.open_table(DOCUMENT) {
            Err(redb::TableError::TableDoesNotExist(_)) => {}
            opened => {
                if let Some((generation, text)) = opened?.last()? {
                    records.document = Document { generation: generation.value(), text: text.value().into() };
                }
            }
        }
        Ok(Some(records))
    }

    fn try_save(&self, records: &Records) -> anyhow::Result<()> {
        let transaction = self.database.begin_write()?;
        transaction.delete_table(SERVICES)?;
        transaction.delete_table(SERVERS)?;
        transaction.delete_table(LOAD_BALANCERS)?;
        transaction.delete_table(DOCUMENT)?;
        {
            let mut fleet = transaction.open_table(FLEET)?;
            fleet.insert(FLEET_ROW, serde_json::to_vec(&FleetRow::from(records))?.as_slice())?;
            let mut services = transaction.open_table(SERVICES)?;
            for (name, service) in &records.services {
                services.insert(name.as_str(), serde_json::to_vec(&ServiceRow::from(service))?.as_slice())?;
            }
            let mut servers = transaction.open_table(SERVERS)?;
            for (id, server) in &records.servers {
                servers.insert(id.get(), serde_json::to_vec(&ServerRow::from(server))?.as_slice())?;
            }
            let mut load_balancers = transaction.open_table(LOAD_BALANCERS)?;
            for (name, known) in &records.load_balancers {
                load_balancers.insert(name.as_str(), serde_json::to_vec(&LoadBalancerRow::from(known))?.as_slice())?;
            }
            let document = &records.document;
            transaction.open_table(DOCUMENT)?.insert(document.generation, &*document.text)?;
        }
        transaction.commit()?;
        Ok(())
    }
}

/// Opens or makes a file that only its owner can read.
fn open_private(path: &Path) -> std::io::Result<File> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

impl From<&Records> for FleetRow {
    fn from(records: &Records) -> Self {
        Self {
            format: FORMAT,
            generation: records.generation,
            cookie_keys: records.key_ring.keys.keys.map(|key| [key.k0, key.k1]),
            current_key: records.key_ring.keys.current.get() as u8,
            keys_generation: records.key_ring.generation,
            current_key_since: records.key_ring.current_since.as_secs(),
            announced: match records.key_ring.phase {
                KeyPhase::Steady => None,
                KeyPhase::Announced { forced } => Some(forced),
            },
            rss_key: records.rss_key.to_string(),
        }
    }
}

impl FleetRow {
    fn parse(self) -> anyhow::Result<Records> {
        let known = (FIRST_FORMAT..=FORMAT).contains(&self.format);
        anyhow::ensure!(known, "format {}: expected {FORMAT}", self.format);
        let current = if self.current_key == 0 { KeyIndex::First } else { KeyIndex::Second };
        Ok(Records {
            generation: self.generation,
            key_ring: KeyRing {
                keys: FleetKeys { keys: self.cookie_keys.map(|[k0, k1]| CookieKey { k0, k1 }), current },
                generation: self.keys_generation,
                current_since: Duration::from_secs(self.current_key_since),
                phase: self.announced.map_or(KeyPhase::Steady, |forced| KeyPhase::Announced { forced }),
            },
            rss_key: self.rss_key.parse::<RssKey>()?,
            services: BTreeMap::new(),
            servers: BTreeMap::new(),
            load_balancers: BTreeMap::new(),
            document: Document::default(),
        })
    }
}

impl From<&ServiceRecord> for ServiceRow {
    fn from(service: &ServiceRecord) -> Self {
        let history = service.buckets.now().iter().zip(service.buckets.before());
        let buckets = history.map(|(now, before)| (now.get(), before.map(ServerId::get))).collect();
        Self { index: service.index.get(), seed: service.seed, buckets }
    }
}

impl ServiceRow {
    fn parse(self) -> anyhow::Result<ServiceRecord> {
        let id = |number: u16| ServerId::try_from(u64::from(number));
        let now = self.buckets.iter().map(|(now, _)| id(*now)).collect::<Result<_, _>>()?;
        let before = self.buckets.iter().map(|(_, before)| before.map(id).transpose()).collect::<Result<_, _>>()?;
        Ok(ServiceRecord {
            index: ServiceIndex::parse("index", self.index.into())?,
            seed: self.seed,
            buckets: BucketHistory::restored(now, before).unwrap_or_default(),
        })
    }
}

impl From<&LoadBalancerRecord> for LoadBalancerRow {
    fn from(known: &LoadBalancerRecord) -> Self {
        Self {
            owner: known.owner.map(OwnerNumber::get),
            address: known.address,
            left_at: known.left_at.map(|moment| moment.as_secs()),
        }
    }
}

impl LoadBalancerRow {
    fn parse(self) -> anyhow::Result<LoadBalancerRecord> {
        Ok(LoadBalancerRecord {
            owner: self.owner.map(|number| OwnerNumber::try_from(u64::from(number))).transpose()?,
            address: self.address,
            left_at: self.left_at.map(Duration::from_secs),
        })
    }
}

impl From<&ServerRecord> for ServerRow {
    fn from(server: &ServerRecord) -> Self {
        let left_at = |membership: &Membership| match membership {
            Membership::Present => None,
            Membership::LeftAt(moment) => Some(moment.as_secs()),
        };
        Self {
            name: server.name.clone(),
            address: server.address,
            in_file: server.in_file,
            services: server.services.iter().map(|(name, membership)| (name.clone(), left_at(membership))).collect(),
        }
    }
}

impl ServerRow {
    fn parse(self) -> ServerRecord {
        let membership = |left: Option<u64>| {
            left.map_or(Membership::Present, |seconds| Membership::LeftAt(Duration::from_secs(seconds)))
        };
        ServerRecord {
            name: self.name,
            address: self.address,
            in_file: self.in_file,
            services: self.services.into_iter().map(|(name, left)| (name, membership(left))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use coreward_model::rss::seeded_rng;

    use super::*;

    fn records() -> Records {
        let mut records = Records::draw(Duration::from_secs(5), &mut seeded_rng(3, 0));
        records.generation = 17;
        records.document = Document { generation: 4, text: "# The first.\nalpha = 0.5\n".into() };
        records.key_ring.announce(true, 16, &mut seeded_rng(4, 0));
        records.enrol("lb1", Some([10, 2, 0, 1].into()));
        records.enrol("lb2", None);
        records.departed("lb2", Duration::from_secs(1_700_000_000));
        let mut buckets = BucketHistory::default();
        for pool in [[1u64, 1], [1, 2]] {
            buckets.follow(&pool.map(|id| ServerId::try_from(id).unwrap()));
        }
        let service = ServiceRecord { index: ServiceIndex::new(63).unwrap(), seed: u64::MAX, buckets };
        records.services.insert("web".into(), service);
        for (id, left) in [(0u64, None), (16_383, Some(1_700_000_000))] {
            let membership = left.map_or(Membership::Present, |s| Membership::LeftAt(Duration::from_secs(s)));
            let server = ServerRecord {
                name: format!("s{id}"),
                address: [10, 2, 0, 11].into(),
                in_file: left.is_none(),
                services: [("web".to_owned(), membership)].into(),
            };
            records.servers.insert(id.try_into().unwrap(), server);
        }
        records
    }

    #[test]
    fn what_was_saved_is_loaded() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("made/controller.redb");
        let store = Store::open(&path).unwrap();
        assert_eq!(store.load().unwrap(), None);
        store.save(&records()).unwrap();
        let mut changed = records();
        changed.servers.pop_first();
        changed.services.clear();
        store.save(&changed).unwrap();
        drop(store);
        assert_eq!(Store::open(&path).unwrap().load().unwrap(), Some(changed));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    /// A fleet keeps its ids and keys when the controller becomes this version.
    #[test]
    fn the_first_format_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("controller.redb");
        let store = Store::open(&path).unwrap();
        let rss_key = RssKey::microsoft().to_string();
        let rows = [
            format!(
                r#"{{"format":1,"generation":9,"cookie_keys":[[1,2],[3,4]],"current_key":1,"rss_key":"{rss_key}"}}"#
            ),
            r#"{"index":5,"seed":6}"#.to_owned(),
        ];
        let transaction = store.database.begin_write().unwrap();
        transaction.open_table(FLEET).unwrap().insert(FLEET_ROW, rows[0].as_bytes()).unwrap();
        transaction.open_table(SERVICES).unwrap().insert("web", rows[1].as_bytes()).unwrap();
        transaction.open_table(SERVERS).unwrap();
        transaction.commit().unwrap();
        let records = store.load().unwrap().unwrap();
        assert_eq!((records.generation, records.key_ring.keys.keys[1].k0, records.services["web"].seed), (9, 3, 6));
        assert_eq!((records.key_ring.phase, records.key_ring.generation), (KeyPhase::Steady, 0));
        store.save(&records).unwrap();
        assert_eq!(store.load().unwrap(), Some(records));
    }

    #[test]
    fn one_controller_per_store() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("controller.redb");
        let _first = Store::open(&path).unwrap();
        let error = Store::open(&path).err().unwrap().to_string();
        assert_eq!(error, format!("store {} is in use: expected one controller per store", path.display()));
    }

    #[test]
    fn what_is_no_store_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("controller.redb");
        let text = vec![b'x'; 10_000];
        std::fs::write(&path, &text).unwrap();
        let error = Store::open(&path).err().unwrap().to_string();
        assert!(error.starts_with(&format!("store {}: ", path.display())), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), text);
    }
}
