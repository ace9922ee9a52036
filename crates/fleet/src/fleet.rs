//! The configuration in force: the fleet's document and the records put together.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::AuditEntry;
use coreward_model::bucket_history::BucketHistory;
use coreward_model::consistency::{ServiceMode, Timestamps, Transfer};
use coreward_model::correction;
use coreward_model::health::{Check, Probe, WhenAllDown};
use coreward_model::load::Alpha;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{Capacity, TrafficWanted, Weight};
use coreward_model::rss::RssKey;
use coreward_model::tuple::ServiceAddress;
use coreward_model::{ServerId, policy};
use coreward_wire::{
    AgentConfiguration, FleetConfiguration, Peer, Server, ServerBefore, Service, ServiceIndex, StampedService,
};

use crate::config::{FleetConfig, OtherBalancer, ServerConfig, ServerState, TableTiming};
use crate::drains::DrainRecord;
use crate::key_ring::KeyRing;
use crate::records::{Document, LoadBalancerRecord, Membership, Records, ServerRecord};

/// Everything the controller decides by, apart from reports.
#[derive(Debug, Clone)]
pub struct Fleet {
    /// Grows with every change.
    pub generation: u64,
    /// Time between two reports.
    pub report_interval: Duration,
    /// When tables are made.
    pub tables: TableTiming,
    /// Time for which load balancers use a table that depends on loads while no controller leads.
    pub table_lifetime: Duration,
    /// Weight of the newest report.
    pub alpha: Alpha,
    /// The cookie keys.
    pub key_ring: KeyRing,
    /// How often they are rotated; `None`: when somebody says so.
    pub key_rotation: Option<Duration>,
    /// How long a cookie may live.
    pub retire_after: Duration,
    /// What agents with `manage_rss = true` set.
    pub rss_key: RssKey,
    /// Those in the file, and those that left but may still have connections.
    pub servers: BTreeMap<ServerId, FleetServer>,
    /// The racks that may connect; `None`: any.
    pub racks: Option<BTreeSet<String>>,
    /// The load balancers that may connect; `None`: any.
    pub allowed_load_balancers: Option<BTreeSet<String>>,
    /// In the order of the file.
    pub services: Vec<FleetService>,
    /// Those that are connected or may come back, by name.
    pub load_balancers: BTreeMap<String, LoadBalancerRecord>,
    /// What the operator wrote.
    pub document: Document,
    /// Who changed what, the oldest first.
    pub audit: Arc<Vec<AuditEntry>>,
    /// The file in which it stands; `None`: it was applied.
    pub file: Option<PathBuf>,
    /// Looked up for each agent of a rack whenever the rack passes something up. Names are the operator's: nobody picks ones that collide.
    ids: HashMap<String, ServerId, foldhash::fast::FixedState>,
}

/// A server.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetServer {
    /// Its name in the file.
    pub name: String,
    /// Where load balancers reach it.
    pub address: IpAddr,
    /// Whether it takes new connections.
    pub admin_state: AdminState,
    /// Its part of new connections.
    pub weight: Weight,
    /// How much it can do; `None`: by its cores.
    pub capacity: Option<Capacity>,
    /// Whether somebody drains it, whatever the document says.
    pub drain: Option<DrainRecord>,
    /// Through which racks its agent may speak; `None`: through the fleet's.
    racks: Option<BTreeSet<String>>,
}

impl FleetServer {
    /// Whether somebody drains it there.
    pub fn is_drained_in(&self, service: &str) -> bool {
        self.drain.as_ref().is_some_and(|drain| drain.covers(service))
    }
}

/// Whether a server takes new connections, as far as the operator decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminState {
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
    /// How packets find their server.
    pub mode: ServiceMode,
    /// Whom `mode.transfer` means.
    pub other_balancer: Option<OtherBalancer>,
    /// A name out of `coreward_model::policy::names()`.
    pub policy: &'static str,
    /// What the policy wants to hear from load balancers.
    pub traffic: TrafficWanted,
    /// How its servers are checked; `None`: they are not.
    pub check: Option<Arc<Check>>,
    /// What becomes of first packets when all of them are down.
    pub when_all_down: WhenAllDown,
    /// How long the share of a server that joins grows.
    pub slow_start: Duration,
    /// Seeds the policy's hash keys, and the time key where load balancers stamp.
    pub seed: u64,
    /// Number of buckets.
    pub buckets: BucketCount,
    /// Its pool, and those that left it.
    pub members: BTreeMap<ServerId, Membership>,
    /// Whose its buckets were when that was last written down.
    pub bucket_history: BucketHistory,
}

impl FleetService {
    /// Whether load balancers stamp its cookies themselves.
    pub fn is_corrected(&self) -> bool {
        self.mode.timestamps == Timestamps::LoadBalancer
    }

    /// As load balancers and agents meet it: like a server that takes no new connections.
    fn other_balancer_as_server(&self) -> Option<Server> {
        let (transfer, other) = self.mode.transfer.zip(self.other_balancer)?;
        Some(Server {
            name: format!("balancer {}", other.address),
            id: transfer.other_balancer(),
            address: other.address,
            eligible: false,
            // Nobody checks it: what is sent there is not a choice.
            left: true,
            weight: Weight::ONE,
            capacity: None,
        })
    }
}

/// For how many servers racks may speak.
#[derive(Debug, Default)]
pub struct ServersByRack<'a> {
    of_any: u32,
    of_these: HashMap<&'a str, u32>,
}

impl ServersByRack<'_> {
    /// For how many the rack of that name may.
    pub fn of(&self, rack: &str) -> u32 {
        self.of_any + self.of_these.get(rack).copied().unwrap_or(0)
    }
}

impl Fleet {
    /// Whether an operator has ever put a document in force.
    pub fn has_document(&self) -> bool {
        self.document.generation > 0
    }

    /// `records` have taken in `config`.
    pub fn new(config: &FleetConfig, records: &Records) -> Self {
        let listed: HashMap<&str, &ServerConfig> =
            config.servers.iter().map(|server| (server.name.as_str(), server)).collect();
        let servers: BTreeMap<ServerId, FleetServer> = records
            .servers
            .iter()
            .map(|(id, record)| {
                let listed = listed.get(record.name.as_str()).filter(|_| record.in_file);
                (*id, fleet_server(record, listed.copied()))
            })
            .collect();
        let mut ids = HashMap::<String, ServerId, _>::default();
        for (id, server) in &servers {
            // Of two ids with one name (the operator changed it) the one that is in the file.
            if server.admin_state != AdminState::Left || !ids.contains_key(&server.name) {
                ids.insert(server.name.clone(), *id);
            }
        }
        Self {
            generation: records.generation,
            report_interval: config.report_interval,
            tables: config.tables,
            table_lifetime: config.table_lifetime,
            alpha: config.alpha,
            key_ring: records.key_ring.clone(),
            key_rotation: config.key_rotation,
            retire_after: config.retire_after,
            rss_key: records.rss_key.clone(),
            servers,
            racks: config.racks.clone(),
            allowed_load_balancers: config.load_balancers.clone(),
            services: services(config, records),
            load_balancers: records.load_balancers.clone(),
            document: records.document.clone(),
            audit: records.audit.clone(),
            file: None,
            ids,
        }
    }

    /// With what the controller's own file says: where the document stands, and an RSS key in place of the one on record.
    pub fn of_controller(self, file: Option<PathBuf>, rss_key: Option<RssKey>) -> Self {
        Self { file, rss_key: rss_key.unwrap_or(self.rss_key), ..self }
    }

    /// The id of the server with that name, also when it left.
    pub fn id(&self, name: &str) -> Option<ServerId> {
        self.ids.get(name).copied()
    }

    /// The racks through which the server's agent may speak; `None`: any. It may always speak by itself.
    pub fn racks_of(&self, id: ServerId) -> Option<&BTreeSet<String>> {
        self.servers[&id].racks.as_ref().or(self.racks.as_ref())
    }

    /// Whether the server's agent may speak through the rack, and the rack for its server.
    pub fn may_speak_through(&self, id: ServerId, rack: &str) -> bool {
        self.racks_of(id).is_none_or(|racks| racks.contains(rack))
    }

    /// For how many servers racks may speak. One pass, as there are thousands of servers and hundreds of racks.
    pub fn servers_by_rack(&self) -> ServersByRack<'_> {
        let mut servers = ServersByRack::default();
        for id in self.servers.keys() {
            match self.racks_of(*id) {
                None => servers.of_any += 1,
                Some(racks) => racks.iter().for_each(|rack| *servers.of_these.entry(rack).or_default() += 1),
            }
        }
        servers
    }

    /// Whether the server takes the service's new connections, as far as the operator decides.
    pub fn eligible(&self, service: &FleetService, id: ServerId) -> bool {
        let server = &self.servers[&id];
        service.members.get(&id) == Some(&Membership::Present)
            && server.admin_state == AdminState::Active
            && server.weight.get() > 0
            && !server.is_drained_in(&service.name)
    }

    /// Whether the server takes no new connections of any service, or of one out of which somebody drains it; people may wait for
    /// those that remain.
    pub fn drains(&self, id: ServerId) -> bool {
        let mut services = self.services.iter().filter(|service| service.members.contains_key(&id)).peekable();
        self.servers[&id].drain.is_some()
            || services.peek().is_some() && !services.any(|service| self.eligible(service, id))
    }

    /// Whether the server is in the service, or in the fleet, no more.
    pub fn has_left(&self, service: &FleetService, id: ServerId) -> bool {
        service.members.get(&id) != Some(&Membership::Present) || self.servers[&id].admin_state == AdminState::Left
    }

    /// Whether the server puts cookies into timestamps.
    pub fn stamps(&self, id: ServerId) -> bool {
        let by_servers = |service: &&FleetService| service.mode.timestamps == Timestamps::Server;
        self.services.iter().filter(by_servers).any(|service| service.members.contains_key(&id))
    }

    /// What every load balancer must know. `alive`: which load balancers are, by name.
    pub fn for_load_balancers(&self, alive: impl Fn(&str) -> bool) -> FleetConfiguration {
        let server = |service: &FleetService, id: ServerId| {
            let server = &self.servers[&id];
            let eligible = self.eligible(service, id);
            let left = self.has_left(service, id);
            let FleetServer { address, weight, capacity, .. } = *server;
            Server { name: server.name.clone(), id, address, eligible, left, weight, capacity }
        };
        let service = |service: &FleetService| Service {
            name: service.name.clone(),
            address: service.address,
            index: service.index,
            mode: service.mode,
            policy: service.policy.to_owned(),
            traffic: service.traffic,
            // The controller looks after agents itself.
            check: service.check.clone().filter(|check| check.probe != Probe::Agent),
            when_all_down: service.when_all_down,
            time_key: service.is_corrected().then(|| correction::time_key(service.seed)),
            servers: service
                .members
                .keys()
                .map(|id| server(service, *id))
                .chain(service.other_balancer_as_server())
                .collect(),
        };
        let peer = |(name, record): (&String, &LoadBalancerRecord)| Peer {
            name: name.clone(),
            owner: record.owner,
            address: record.address,
            alive: alive(name),
        };
        FleetConfiguration {
            generation: self.generation,
            keys: self.key_ring.keys,
            services: self.services.iter().map(service).collect(),
            load_balancers: self.load_balancers.iter().map(peer).collect(),
            report_interval: self.report_interval,
            table_lifetime: self.table_lifetime,
        }
    }

    /// What one server's agent must know; `before`: which servers had its buckets before it. A server that left a service
    /// still stamps its connections there.
    pub fn for_agent(&self, id: ServerId, before: &BTreeSet<ServerId>) -> AgentConfiguration {
        let services = self.services.iter().filter(|service| service.members.contains_key(&id));
        let stamped = |service: &FleetService| StampedService {
            name: service.name.clone(),
            address: service.address,
            server_id: id,
            mode: service.mode,
        };
        let server_before = |id: &ServerId| Some(ServerBefore { id: *id, address: self.servers.get(id)?.address });
        let others = services.clone().filter_map(FleetService::other_balancer_as_server);
        let others: BTreeMap<ServerId, IpAddr> = others.map(|other| (other.id, other.address)).collect();
        let others = others.into_iter().map(|(id, address)| ServerBefore { id, address });
        AgentConfiguration {
            generation: self.generation,
            services: services.map(stamped).collect(),
            keys: self.key_ring.keys,
            report_interval: self.report_interval,
            fleet_rss_key: self.rss_key.clone(),
            server_id: id,
            servers_before: before.iter().filter_map(server_before).chain(others).collect(),
            draining: self.drains(id),
        }
    }
}

/// `listed`: its entry in the file, when it has one.
fn fleet_server(record: &ServerRecord, listed: Option<&ServerConfig>) -> FleetServer {
    FleetServer {
        name: record.name.clone(),
        address: record.address,
        admin_state: match listed.map(|server| server.state) {
            Some(ServerState::Active) => AdminState::Active,
            Some(ServerState::Draining) => AdminState::Draining,
            None => AdminState::Left,
        },
        weight: listed.map_or(Weight::ONE, |server| server.weight),
        capacity: listed.and_then(|server| server.capacity),
        drain: record.drain.clone().filter(|_| listed.is_some()),
        racks: record.racks.clone(),
    }
}

/// Other load balancers get the highest ids that no server has or had lately. No cookie carries them, so nobody need
/// remember whose they were: it is enough that load balancers and agents are told the same.
fn services(config: &FleetConfig, records: &Records) -> Vec<FleetService> {
    let mut free = (0..ServerId::COUNT as u64).rev().filter_map(|id| ServerId::try_from(id).ok());
    let mut ids: BTreeMap<IpAddr, ServerId> = BTreeMap::new();
    let mut members = members(records);
    let mut with_transfer = |service: &crate::config::ServiceConfig| {
        let transfer = service.other_balancer.and_then(|other| {
            let id = match ids.get(&other.address) {
                Some(id) => *id,
                // None: the fleet has all ids in use.
                None => free.find(|id| !records.servers.contains_key(id))?,
            };
            ids.insert(other.address, id);
            Some(if other.handed_over { Transfer::HandedOverTo(id) } else { Transfer::AdoptedFrom(id) })
        });
        let service = fleet_service(service, records, members.remove(service.name.as_str()).unwrap_or_default());
        FleetService { mode: ServiceMode { transfer, ..service.mode }, ..service }
    };
    config.services.iter().map(&mut with_transfer).collect()
}

/// By service's name. In one pass over the servers: a thousand services would be a thousand passes.
fn members(records: &Records) -> HashMap<&str, BTreeMap<ServerId, Membership>> {
    let mut members: HashMap<&str, BTreeMap<ServerId, Membership>> = HashMap::new();
    for (id, server) in &records.servers {
        for (service, membership) in &server.services {
            members.entry(service).or_default().insert(*id, *membership);
        }
    }
    members
}

fn fleet_service(
    service: &crate::config::ServiceConfig,
    records: &Records,
    members: BTreeMap<ServerId, Membership>,
) -> FleetService {
    let record = &records.services[&service.name];
    FleetService {
        name: service.name.clone(),
        address: service.address,
        index: record.index,
        mode: service.mode,
        other_balancer: service.other_balancer,
        policy: service.policy,
        traffic: policy::traffic_wanted(service.policy),
        check: service.check.clone().map(Arc::new),
        when_all_down: service.when_all_down,
        slow_start: service.slow_start,
        seed: record.seed,
        buckets: service.buckets,
        members,
        bucket_history: record.buckets.clone(),
    }
}
