//! Rows in which every store keeps [`FleetRecords`], as JSON objects. Missing keys have their defaults.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::AuditEntry;
use coreward_model::ServerId;
use coreward_model::bucket_history::BucketHistory;
use coreward_model::connection_table::TableOwnerNumber;
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::rss::RssKey;
use coreward_model::vlan::Vlan;
use coreward_wire::ServiceIndex;
use serde::{Deserialize, Serialize};

use coreward_fleet::key_ring::{CookieKeyRing, KeyRotationPhase};
use coreward_fleet::records::DrainRecord;
use coreward_fleet::records::{
    FleetDocument, FleetRecords, LoadBalancerRecord, ServerRecord, ServiceMembership, ServiceRecord,
};

/// Version of the rows' format. Rows with another version are rejected.
const ROW_FORMAT_VERSION: u32 = 5;

#[derive(Debug)]
pub struct FleetRecordRows {
    pub fleet: FleetRow,
    pub services: BTreeMap<String, ServiceRow>,
    pub servers: BTreeMap<u16, ServerRow>,
    pub load_balancers: BTreeMap<String, LoadBalancerRow>,
    pub document: FleetDocument,
    pub audit_log: Arc<Vec<AuditEntry>>,
}

impl From<&FleetRecords> for FleetRecordRows {
    fn from(records: &FleetRecords) -> Self {
        let service_rows = records.services.iter().map(|(name, service)| (name.clone(), service.into()));
        let server_rows = records.servers.iter().map(|(id, server)| (id.get(), server.into()));
        let load_balancer_rows = records.load_balancers.iter().map(|(name, record)| (name.clone(), record.into()));
        Self {
            fleet: records.into(),
            services: service_rows.collect(),
            servers: server_rows.collect(),
            load_balancers: load_balancer_rows.collect(),
            document: records.document.clone(),
            audit_log: records.audit_log.clone(),
        }
    }
}

impl FleetRecordRows {
    /// Converts the rows to records. Fails if a value is invalid or the rows have another version of the format.
    pub fn into_records(self) -> anyhow::Result<FleetRecords> {
        let mut records = self.fleet.into_records()?;
        for (name, row) in self.services {
            records.services.insert(name, row.into_record()?);
        }
        for (id, row) in self.servers {
            records.servers.insert(ServerId::try_from(u64::from(id))?, row.into_record()?);
        }
        for (name, row) in self.load_balancers {
            records.load_balancers.insert(name, row.into_record()?);
        }
        records.document = self.document;
        records.audit_log = self.audit_log;
        Ok(records)
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub struct FleetRow {
    format: u32,
    generation: u64,
    /// Both cookie keys, each as its 64-bit halves k0 and k1.
    cookie_keys: [[u64; 2]; 2],
    current_key: u8,
    keys_generation: u64,
    /// Time at which the current key came into use, in seconds since 1970.
    current_key_since: u64,
    /// Whether the rotation in progress is forced, or absent if there is no rotation.
    announced: Option<bool>,
    rss_key: String,
    /// Time of the last write (s since 1970) by the records' clock, which stops while no controller runs. If it is
    /// absent, the clock starts with the wall clock's time.
    clock: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct LoadBalancerRow {
    owner: Option<u8>,
    address: Option<IpAddr>,
    /// Time at which the load balancer disconnected, in seconds since 1970, or absent while it is connected.
    left_at: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ServiceRow {
    index: u16,
    seed: u64,
    /// Ids of the current server and the previous server (if any) of each bucket.
    buckets: Vec<(u16, Option<u16>)>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ServerRow {
    name: String,
    address: IpAddr,
    in_file: bool,
    /// Services of the server by name, with the time it left each (s since 1970), or null if it has not.
    services: BTreeMap<String, Option<u64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drain: Option<DrainRow>,
    /// Names of the racks that may report for the server. If they are absent, the fleet's list of racks applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    racks: Option<BTreeSet<String>>,
    /// VLAN of the frames to the server, or absent if they are untagged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vlan: Option<u16>,
}

#[derive(Debug, Serialize, Deserialize)]
struct DrainRow {
    /// Time at which the drain was last changed, in seconds since 1970.
    since: u64,
    generation: u64,
    /// Names of the services in which the server is drained, or absent for all services.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    services: Option<BTreeSet<String>>,
}

impl From<&FleetRecords> for FleetRow {
    fn from(records: &FleetRecords) -> Self {
        Self {
            format: ROW_FORMAT_VERSION,
            generation: records.generation,
            cookie_keys: records.key_ring.keys.keys.map(|key| [key.k0, key.k1]),
            current_key: records.key_ring.keys.current_key_index.get() as u8,
            keys_generation: records.key_ring.generation,
            current_key_since: records.key_ring.current_key_since.as_secs(),
            announced: match records.key_ring.phase {
                KeyRotationPhase::Steady => None,
                KeyRotationPhase::Announced { is_forced } => Some(is_forced),
            },
            rss_key: records.rss_key.to_string(),
            clock: records.last_write_at.map(|time| time.as_secs()),
        }
    }
}

impl FleetRow {
    fn into_records(self) -> anyhow::Result<FleetRecords> {
        anyhow::ensure!(self.format == ROW_FORMAT_VERSION, "format {}: expected {ROW_FORMAT_VERSION}", self.format);
        let current_key = if self.current_key == 0 { CookieKeyIndex::First } else { CookieKeyIndex::Second };
        Ok(FleetRecords {
            generation: self.generation,
            key_ring: CookieKeyRing {
                keys: FleetCookieKeys {
                    keys: self.cookie_keys.map(|[k0, k1]| CookieKey { k0, k1 }),
                    current_key_index: current_key,
                },
                generation: self.keys_generation,
                current_key_since: Duration::from_secs(self.current_key_since),
                phase: self
                    .announced
                    .map_or(KeyRotationPhase::Steady, |is_forced| KeyRotationPhase::Announced { is_forced }),
            },
            rss_key: self.rss_key.parse::<RssKey>()?,
            services: BTreeMap::new(),
            servers: BTreeMap::new(),
            load_balancers: BTreeMap::new(),
            document: FleetDocument::default(),
            audit_log: Arc::default(),
            last_write_at: self.clock.map(Duration::from_secs),
        })
    }
}

impl From<&ServiceRecord> for ServiceRow {
    fn from(service: &ServiceRecord) -> Self {
        let server_pairs =
            service.bucket_history.current_servers().iter().zip(service.bucket_history.previous_servers());
        let bucket_servers = server_pairs
            .map(|(current_server, previous_server)| (current_server.get(), previous_server.map(ServerId::get)))
            .collect();
        Self { index: service.index.get(), seed: service.hash_seed, buckets: bucket_servers }
    }
}

impl ServiceRow {
    fn into_record(self) -> anyhow::Result<ServiceRecord> {
        let parse_server_id = |number: u16| ServerId::try_from(u64::from(number));
        let current_servers = self.buckets.iter().map(|(now, _)| parse_server_id(*now)).collect::<Result<_, _>>()?;
        let previous_servers = self
            .buckets
            .iter()
            .map(|(_, previous_number)| previous_number.map(parse_server_id).transpose())
            .collect::<Result<_, _>>()?;
        Ok(ServiceRecord {
            index: ServiceIndex::parse("index", self.index.into())?,
            hash_seed: self.seed,
            bucket_history: BucketHistory::from_stored_servers(current_servers, previous_servers).unwrap_or_default(),
        })
    }
}

impl From<&LoadBalancerRecord> for LoadBalancerRow {
    fn from(record: &LoadBalancerRecord) -> Self {
        Self {
            owner: record.owner_number.map(TableOwnerNumber::get),
            address: record.address,
            left_at: record.disconnected_at.map(|time| time.as_secs()),
        }
    }
}

impl LoadBalancerRow {
    fn into_record(self) -> anyhow::Result<LoadBalancerRecord> {
        Ok(LoadBalancerRecord {
            owner_number: self.owner.map(|number| TableOwnerNumber::try_from(u64::from(number))).transpose()?,
            address: self.address,
            disconnected_at: self.left_at.map(Duration::from_secs),
        })
    }
}

impl From<&ServerRecord> for ServerRow {
    fn from(server: &ServerRecord) -> Self {
        let left_at_seconds = |membership: &ServiceMembership| match membership {
            ServiceMembership::Present => None,
            ServiceMembership::LeftAt(moment) => Some(moment.as_secs()),
        };
        Self {
            name: server.name.clone(),
            address: server.address,
            in_file: server.is_in_document,
            services: server
                .memberships
                .iter()
                .map(|(name, membership)| (name.clone(), left_at_seconds(membership)))
                .collect(),
            drain: server.drain.as_ref().map(|drain| DrainRow {
                since: drain.changed_at.as_secs(),
                generation: drain.generation,
                services: drain.services.clone(),
            }),
            racks: server.allowed_racks.clone(),
            vlan: server.vlan.is_tagged().then(|| server.vlan.id_or_zero()),
        }
    }
}

impl ServerRow {
    fn into_record(self) -> anyhow::Result<ServerRecord> {
        let to_membership = |left_at_s: Option<u64>| {
            left_at_s
                .map_or(ServiceMembership::Present, |seconds| ServiceMembership::LeftAt(Duration::from_secs(seconds)))
        };
        Ok(ServerRecord {
            name: self.name,
            address: self.address,
            is_in_document: self.in_file,
            memberships: self.services.into_iter().map(|(name, left_at_s)| (name, to_membership(left_at_s))).collect(),
            drain: self.drain.map(|drain| DrainRecord {
                changed_at: Duration::from_secs(drain.since),
                generation: drain.generation,
                services: drain.services,
            }),
            allowed_racks: self.racks,
            vlan: Vlan::from_id_or_untagged(self.vlan.unwrap_or(0).into())?,
        })
    }
}
