//! The configuration in force: the operator's file and the records put together.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::cookie::FleetKeys;
use coreward_model::load::Alpha;
use coreward_model::placement::BucketCount;
use coreward_model::rss::RssKey;
use coreward_model::tuple::ServiceAddress;
use coreward_wire::{AgentConfiguration, FleetConfiguration, Server, Service, ServiceIndex, StampedService};

use crate::config::{Config, ServerState};
use crate::records::{Membership, Records};

/// Everything the controller decides by, apart from reports.
#[derive(Debug, Clone)]
pub struct Fleet {
    /// Grows with every change.
    pub generation: u64,
    /// Time between two reports, and between two tables.
    pub report_interval: Duration,
    /// Weight of the newest report.
    pub alpha: Alpha,
    /// The cookie keys.
    pub keys: FleetKeys,
    /// What agents with `manage_rss = true` set.
    pub rss_key: RssKey,
    /// Those in the file, and those that left but may still have connections.
    pub servers: BTreeMap<ServerId, FleetServer>,
    /// In the order of the file.
    pub services: Vec<FleetService>,
    ids: HashMap<String, ServerId>,
}

/// A server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetServer {
    /// Its name in the file.
    pub name: String,
    /// Where load balancers reach it.
    pub address: IpAddr,
    /// Whether it takes new connections.
    pub standing: Standing,
}

/// Whether a server takes new connections, as far as the operator decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It does.
    Active,
    /// It keeps what it has.
    Draining,
    /// The same, and it is in the file no more.
    Left,
}

/// A service.
#[derive(Debug, Clone)]
pub struct FleetService {
    /// Its name in the file.
    pub name: String,
    /// What clients connect to.
    pub address: ServiceAddress,
    /// What names it in tables.
    pub index: ServiceIndex,
    /// A name out of `coreward_model::policy::names()`.
    pub policy: &'static str,
    /// Seeds the policy's hash keys.
    pub seed: u64,
    /// Number of buckets.
    pub buckets: BucketCount,
    /// Its pool, and those that left it.
    pub members: BTreeMap<ServerId, Membership>,
}

impl Fleet {
    /// `records` have taken in `config`.
    pub fn new(config: &Config, records: &Records) -> Self {
        let states: HashMap<&str, ServerState> =
            config.servers.iter().map(|server| (server.name.as_str(), server.state)).collect();
        let standing = |name: &str, in_file: bool| match states.get(name) {
            Some(ServerState::Active) if in_file => Standing::Active,
            Some(ServerState::Draining) if in_file => Standing::Draining,
            _ => Standing::Left,
        };
        let servers: BTreeMap<ServerId, FleetServer> = records
            .servers
            .iter()
            .map(|(id, record)| {
                let standing = standing(&record.name, record.in_file);
                (*id, FleetServer { name: record.name.clone(), address: record.address, standing })
            })
            .collect();
        let mut ids: HashMap<String, ServerId> = HashMap::new();
        for (id, server) in &servers {
            // Of two ids with one name (the operator changed it) the one that is in the file.
            if server.standing != Standing::Left || !ids.contains_key(&server.name) {
                ids.insert(server.name.clone(), *id);
            }
        }
        Self {
            generation: records.generation,
            report_interval: config.report_interval,
            alpha: config.alpha,
            keys: records.keys,
            rss_key: config.rss_key.clone().unwrap_or_else(|| records.rss_key.clone()),
            servers,
            services: config.services.iter().map(|service| fleet_service(service, records)).collect(),
            ids,
        }
    }

    /// The id of the server with that name, also when it left.
    pub fn id(&self, name: &str) -> Option<ServerId> {
        self.ids.get(name).copied()
    }

    /// Whether the server takes the service's new connections, as far as the operator decides.
    pub fn eligible(&self, service: &FleetService, id: ServerId) -> bool {
        service.members.get(&id) == Some(&Membership::Present) && self.servers[&id].standing == Standing::Active
    }

    /// What every load balancer must know.
    pub fn for_load_balancers(&self) -> FleetConfiguration {
        let server = |service: &FleetService, id: ServerId| {
            let server = &self.servers[&id];
            let eligible = self.eligible(service, id);
            Server { name: server.name.clone(), id, address: server.address, eligible }
        };
        let service = |service: &FleetService| Service {
            name: service.name.clone(),
            address: service.address,
            index: service.index,
            policy: service.policy.to_owned(),
            servers: service.members.keys().map(|id| server(service, *id)).collect(),
        };
        FleetConfiguration {
            generation: self.generation,
            keys: self.keys,
            services: self.services.iter().map(service).collect(),
        }
    }

    /// What one server's agent must know. A server that left a service still stamps its connections there.
    pub fn for_agent(&self, id: ServerId) -> AgentConfiguration {
        let services = self.services.iter().filter(|service| service.members.contains_key(&id));
        let stamped = |service: &FleetService| StampedService {
            name: service.name.clone(),
            address: service.address,
            server_id: id,
        };
        AgentConfiguration {
            generation: self.generation,
            services: services.map(stamped).collect(),
            keys: self.keys,
            report_interval: self.report_interval,
            fleet_rss_key: self.rss_key.clone(),
            server_id: id,
        }
    }
}

fn fleet_service(service: &crate::config::ServiceConfig, records: &Records) -> FleetService {
    let record = &records.services[&service.name];
    let membership = |(id, server): (&ServerId, &crate::records::ServerRecord)| {
        server.services.get(&service.name).map(|membership| (*id, *membership))
    };
    FleetService {
        name: service.name.clone(),
        address: service.address,
        index: record.index,
        policy: service.policy,
        seed: record.seed,
        buckets: service.buckets,
        members: records.servers.iter().filter_map(membership).collect(),
    }
}
