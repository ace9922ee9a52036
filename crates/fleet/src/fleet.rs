//! The active configuration, which combines the fleet document and the records.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::AuditEntry;
use coreward_model::bucket_history::BucketHistory;
use coreward_model::consistency::{CookieStamper, ServiceMigration, ServiceSettings};
use coreward_model::health::{AllServersDownTreatment, HealthCheck, HealthProbe};
use coreward_model::lb_stamping;
use coreward_model::load::SmoothingWeight;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{ServerCapacity, ServerWeight, TelemetryLevel};
use coreward_model::rss::RssKey;
use coreward_model::tuple::ServiceAddress;
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, policy};
use coreward_wire::{
    AgentConfiguration, AgentService, FleetConfiguration, PeerLoadBalancer, PreviousServer, Server, Service,
    ServiceIndex,
};

use crate::config::{FleetConfig, FleetServerConfig, MigrationLoadBalancer, PlacementTableTiming, ServerDrainState};
use crate::key_ring::CookieKeyRing;
use crate::records::{DrainRecord, FleetDocument, FleetRecords, LoadBalancerRecord, ServerRecord, ServiceMembership};

/// Active configuration of the fleet, merged from the fleet document and the records. With the agents' reports, it is
/// the input of all decisions by the controller.
#[derive(Debug, Clone)]
pub struct Fleet {
    /// Generation of the configuration, which increases with every change.
    pub generation: u64,
    pub report_interval: Duration,
    pub table_timing: PlacementTableTiming,
    /// Time for which load balancers use placement tables that depend on loads if no controller leads.
    pub table_lifetime: Duration,
    pub load_ewma_alpha: SmoothingWeight,
    pub key_ring: CookieKeyRing,
    /// Interval between key rotations, or `None` if keys are rotated by command only.
    pub key_rotation_interval: Option<Duration>,
    pub max_connection_lifetime: Duration,
    /// RSS key that agents set if they have `manage_rss = true`.
    pub rss_key: RssKey,
    /// Servers in the document, and former ones that may still have connections.
    pub servers: BTreeMap<ServerId, FleetServer>,
    /// Names of the racks that may connect, or `None` if any rack may.
    pub allowed_racks: Option<BTreeSet<String>>,
    /// Names of the load balancers that may connect, or `None` if any load balancer may.
    pub allowed_load_balancers: Option<BTreeSet<String>>,
    /// Services, in the order of the document.
    pub services: Vec<FleetService>,
    pub load_balancer_records: BTreeMap<String, LoadBalancerRecord>,
    /// Fleet document as the operator wrote it.
    pub document: FleetDocument,
    pub audit_log: Arc<Vec<AuditEntry>>,
    /// File that contains the document, or `None` if the document was applied through the API.
    pub document_file: Option<PathBuf>,
    /// Server ids by name, for messages from racks. The hash needs no secret key, because operators choose the names.
    server_ids_by_name: HashMap<String, ServerId, foldhash::fast::FixedState>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct FleetServer {
    pub name: String,
    /// Address at which load balancers reach the server.
    pub address: IpAddr,
    pub admin_state: ServerAdminState,
    /// Relative share of new connections.
    pub weight: ServerWeight,
    /// Capacity in cores, or `None` to use the number of the server's cores.
    pub capacity: Option<ServerCapacity>,
    /// VLAN of the frames that load balancers send to the server.
    pub vlan: Vlan,
    pub drain: Option<DrainRecord>,
    /// Names of the racks that may report for the server, or `None` to use the fleet's `allowed_racks`.
    allowed_racks: Option<BTreeSet<String>>,
}

impl FleetServer {
    pub fn is_drained_in_service(&self, service: &str) -> bool {
        self.drain.as_ref().is_some_and(|drain| drain.covers_service(service))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerAdminState {
    /// The server takes new connections.
    Active,
    /// The server keeps its established connections, but takes no new ones.
    Draining,
    /// The server is draining, and is no longer in the document.
    Left,
}

#[derive(Debug, Clone)]
pub struct FleetService {
    pub name: String,
    pub address: ServiceAddress,
    pub index: ServiceIndex,
    pub settings: ServiceSettings,
    /// Other load balancer of the service's migration, or `None` if the service does not migrate.
    pub other_balancer: Option<MigrationLoadBalancer>,
    /// Name of the placement policy, one of `coreward_model::policy::policy_names()`.
    pub policy_name: &'static str,
    /// Level of detail of the load balancers' counters that the policy needs.
    pub telemetry_level: TelemetryLevel,
    /// Health check of the service's servers, or `None` if they are not checked.
    pub health_check: Option<Arc<HealthCheck>>,
    /// Treatment of new connections when all servers are down.
    pub when_all_down: AllServersDownTreatment,
    pub slow_start_duration: Duration,
    /// Seed of the policy's hash keys, and of the key that masks the time in TSvals if load balancers stamp them.
    pub hash_seed: u64,
    pub bucket_count: BucketCount,
    /// Present and former servers of the service, by id.
    pub members: BTreeMap<ServerId, ServiceMembership>,
    /// Current and previous server of each bucket, from the records.
    pub bucket_history: BucketHistory,
}

impl FleetService {
    /// Returns whether load balancers stamp the cookies of this service.
    pub fn is_lb_stamped(&self) -> bool {
        self.settings.timestamps == CookieStamper::LoadBalancer
    }

    /// Returns the other load balancer of the service's migration, if any, as a `Server` that takes no new connections.
    fn other_balancer_as_server(&self) -> Option<Server> {
        let (migration, other_balancer) = self.settings.migration.zip(self.other_balancer)?;
        Some(Server {
            name: format!("balancer {}", other_balancer.address),
            id: migration.other_balancer_id(),
            address: other_balancer.address,
            is_eligible: false,
            // The other load balancer is never checked, because its packets have no alternative.
            has_left: true,
            weight: ServerWeight::ONE,
            capacity: None,
            // Load balancers send to each other in the VIPs' VLAN.
            vlan: Vlan::UNTAGGED,
        })
    }
}

#[derive(Debug, Default)]
pub struct RackServerCounts<'a> {
    unrestricted_server_count: u32,
    restricted_counts_by_rack: HashMap<&'a str, u32>,
}

impl RackServerCounts<'_> {
    pub fn server_count(&self, rack: &str) -> u32 {
        self.unrestricted_server_count + self.restricted_counts_by_rack.get(rack).copied().unwrap_or(0)
    }
}

impl Fleet {
    /// Returns whether a fleet document has ever been applied.
    pub fn has_document(&self) -> bool {
        self.document.generation > 0
    }

    /// Combines a fleet document with `records`, to which the document must already have been applied.
    pub fn new(config: &FleetConfig, records: &FleetRecords) -> Self {
        let listed_servers: HashMap<&str, &FleetServerConfig> =
            config.servers.iter().map(|server| (server.name.as_str(), server)).collect();
        let servers: BTreeMap<ServerId, FleetServer> = records
            .servers
            .iter()
            .map(|(id, record)| {
                let listed_server = listed_servers.get(record.name.as_str()).filter(|_| record.is_in_document);
                (*id, build_fleet_server(record, listed_server.copied()))
            })
            .collect();
        let mut server_ids_by_name = HashMap::<String, ServerId, _>::default();
        for (id, server) in &servers {
            // If two ids have one name (the operator changed the id), the id in the document counts.
            if server.admin_state != ServerAdminState::Left || !server_ids_by_name.contains_key(&server.name) {
                server_ids_by_name.insert(server.name.clone(), *id);
            }
        }
        Self {
            generation: records.generation,
            report_interval: config.report_interval,
            table_timing: config.table_timing,
            table_lifetime: config.table_lifetime,
            load_ewma_alpha: config.load_ewma_alpha,
            key_ring: records.key_ring.clone(),
            key_rotation_interval: config.key_rotation_interval,
            max_connection_lifetime: config.max_connection_lifetime,
            rss_key: records.rss_key.clone(),
            servers,
            allowed_racks: config.allowed_racks.clone(),
            allowed_load_balancers: config.allowed_load_balancers.clone(),
            services: build_fleet_services(config, records),
            load_balancer_records: records.load_balancers.clone(),
            document: records.document.clone(),
            audit_log: records.audit_log.clone(),
            document_file: None,
            server_ids_by_name,
        }
    }

    /// Sets the values from the controller's configuration file: the path of the fleet document, and an RSS key that
    /// replaces the stored one.
    pub fn with_controller_settings(self, document_file: Option<PathBuf>, rss_key: Option<RssKey>) -> Self {
        Self { document_file, rss_key: rss_key.unwrap_or(self.rss_key), ..self }
    }

    pub fn server_id(&self, name: &str) -> Option<ServerId> {
        self.server_ids_by_name.get(name).copied()
    }

    /// Returns the racks through which the server's agent may connect, or `None` if it may use any rack. The agent may
    /// always connect directly.
    pub fn racks_allowed_for_server(&self, id: ServerId) -> Option<&BTreeSet<String>> {
        self.servers[&id].allowed_racks.as_ref().or(self.allowed_racks.as_ref())
    }

    pub fn may_connect_through_rack(&self, id: ServerId, rack: &str) -> bool {
        self.racks_allowed_for_server(id).is_none_or(|racks| racks.contains(rack))
    }

    /// Counts the servers that may connect through each rack, in one pass over the servers.
    pub fn server_counts_by_rack(&self) -> RackServerCounts<'_> {
        let mut server_counts = RackServerCounts::default();
        for id in self.servers.keys() {
            match self.racks_allowed_for_server(*id) {
                None => server_counts.unrestricted_server_count += 1,
                Some(racks) => {
                    racks.iter().for_each(|rack| *server_counts.restricted_counts_by_rack.entry(rack).or_default() += 1)
                }
            }
        }
        server_counts
    }

    /// Returns whether the server's administrative state permits new connections to the service.
    pub fn is_server_eligible(&self, service: &FleetService, id: ServerId) -> bool {
        let server = &self.servers[&id];
        service.members.get(&id) == Some(&ServiceMembership::Present)
            && server.admin_state == ServerAdminState::Active
            && server.weight.get() > 0
            && !server.is_drained_in_service(&service.name)
    }

    /// Returns whether the server takes no new connections to any service, or is drained in a service. In both cases,
    /// an operator may be waiting for its connections to end.
    pub fn is_server_draining(&self, id: ServerId) -> bool {
        let mut member_services = self.services.iter().filter(|service| service.members.contains_key(&id)).peekable();
        self.servers[&id].drain.is_some()
            || member_services.peek().is_some() && !member_services.any(|service| self.is_server_eligible(service, id))
    }

    pub fn has_left_service(&self, service: &FleetService, id: ServerId) -> bool {
        service.members.get(&id) != Some(&ServiceMembership::Present)
            || self.servers[&id].admin_state == ServerAdminState::Left
    }

    pub fn is_stamping_server(&self, id: ServerId) -> bool {
        let is_stamped_by_servers = |service: &&FleetService| service.settings.timestamps == CookieStamper::Server;
        self.services.iter().filter(is_stamped_by_servers).any(|service| service.members.contains_key(&id))
    }

    pub fn load_balancer_configuration(&self, is_alive: impl Fn(&str) -> bool) -> FleetConfiguration {
        let to_peer = |(name, record): (&String, &LoadBalancerRecord)| PeerLoadBalancer {
            name: name.clone(),
            owner_number: record.owner_number,
            address: record.address,
            is_alive: is_alive(name),
        };
        FleetConfiguration {
            generation: self.generation,
            cookie_keys: self.key_ring.keys,
            services: self.services.iter().map(|service| self.load_balancer_service(service)).collect(),
            load_balancers: self.load_balancer_records.iter().map(to_peer).collect(),
            report_interval: self.report_interval,
            table_lifetime: self.table_lifetime,
        }
    }

    /// Returns the service's part of the configuration for load balancers.
    fn load_balancer_service(&self, service: &FleetService) -> Service {
        let to_server = |id: ServerId| {
            let fleet_server = &self.servers[&id];
            let is_eligible = self.is_server_eligible(service, id);
            let has_left = self.has_left_service(service, id);
            let FleetServer { address, weight, capacity, vlan, .. } = *fleet_server;
            Server { name: fleet_server.name.clone(), id, address, is_eligible, has_left, weight, capacity, vlan }
        };
        Service {
            name: service.name.clone(),
            address: service.address,
            index: service.index,
            settings: service.settings,
            policy_name: service.policy_name.to_owned(),
            telemetry_level: service.telemetry_level,
            // Checks of agents are left out, because the controller makes them itself.
            health_check: service.health_check.clone().filter(|check| check.probe != HealthProbe::Agent),
            when_all_down: service.when_all_down,
            time_key: service.is_lb_stamped().then(|| lb_stamping::draw_time_key(service.hash_seed)),
            servers: service.members.keys().copied().map(to_server).chain(service.other_balancer_as_server()).collect(),
        }
    }

    /// Returns the configuration for a server's agent. `previous_owners` contains the servers that previously had this
    /// server's buckets. A server that has left a service still stamps the service's connections.
    pub fn agent_configuration(&self, id: ServerId, previous_owners: &BTreeSet<ServerId>) -> AgentConfiguration {
        let member_services = self.services.iter().filter(|service| service.members.contains_key(&id));
        let to_stamped_service = |service: &FleetService| AgentService {
            name: service.name.clone(),
            address: service.address,
            server_id: id,
            settings: service.settings,
        };
        let to_previous_server =
            |id: &ServerId| Some(PreviousServer { id: *id, address: self.servers.get(id)?.address });
        let other_balancers = member_services.clone().filter_map(FleetService::other_balancer_as_server);
        let addresses_by_id: BTreeMap<ServerId, IpAddr> =
            other_balancers.map(|other| (other.id, other.address)).collect();
        let previous_balancers = addresses_by_id.into_iter().map(|(id, address)| PreviousServer { id, address });
        AgentConfiguration {
            generation: self.generation,
            services: member_services.map(to_stamped_service).collect(),
            keys: self.key_ring.keys,
            report_interval: self.report_interval,
            fleet_rss_key: self.rss_key.clone(),
            server_id: id,
            previous_servers: previous_owners.iter().filter_map(to_previous_server).chain(previous_balancers).collect(),
            is_draining: self.is_server_draining(id),
            address: self.servers.get(&id).map(|server| server.address),
        }
    }
}

/// Combines the record of a server with the server's entry in the fleet document, if there is one.
fn build_fleet_server(record: &ServerRecord, listed_server: Option<&FleetServerConfig>) -> FleetServer {
    FleetServer {
        name: record.name.clone(),
        address: record.address,
        admin_state: match listed_server.map(|server| server.drain_state) {
            Some(ServerDrainState::Active) => ServerAdminState::Active,
            Some(ServerDrainState::Draining) => ServerAdminState::Draining,
            None => ServerAdminState::Left,
        },
        weight: listed_server.map_or(ServerWeight::ONE, |server| server.weight),
        capacity: listed_server.and_then(|server| server.capacity),
        vlan: record.vlan,
        drain: record.drain.clone().filter(|_| listed_server.is_some()),
        allowed_racks: record.allowed_racks.clone(),
    }
}

/// Returns all services of the fleet. In a migration, the other load balancer gets the highest free server id. No
/// cookie contains this id, so it need not be stored.
fn build_fleet_services(config: &FleetConfig, records: &FleetRecords) -> Vec<FleetService> {
    let mut free_ids = (0..ServerId::COUNT as u64).rev().filter_map(|id| ServerId::try_from(id).ok());
    let mut ids_by_address: BTreeMap<IpAddr, ServerId> = BTreeMap::new();
    let mut members_by_service = members_by_service(records);
    let mut to_service_with_migration = |service: &crate::config::FleetServiceConfig| {
        let migration = service.other_balancer.and_then(|other| {
            let id = match ids_by_address.get(&other.address) {
                Some(id) => *id,
                // If all ids are in use, the service has no migration.
                None => free_ids.find(|id| !records.servers.contains_key(id))?,
            };
            ids_by_address.insert(other.address, id);
            Some(if other.takes_new_connections {
                ServiceMigration::HandedOverTo(id)
            } else {
                ServiceMigration::AdoptedFrom(id)
            })
        });
        let service =
            build_fleet_service(service, records, members_by_service.remove(service.name.as_str()).unwrap_or_default());
        FleetService { settings: ServiceSettings { migration, ..service.settings }, ..service }
    };
    config.services.iter().map(&mut to_service_with_migration).collect()
}

fn members_by_service(records: &FleetRecords) -> HashMap<&str, BTreeMap<ServerId, ServiceMembership>> {
    let mut members_by_service: HashMap<&str, BTreeMap<ServerId, ServiceMembership>> = HashMap::new();
    for (id, server) in &records.servers {
        for (service, membership) in &server.memberships {
            members_by_service.entry(service).or_default().insert(*id, *membership);
        }
    }
    members_by_service
}

fn build_fleet_service(
    service: &crate::config::FleetServiceConfig,
    records: &FleetRecords,
    members: BTreeMap<ServerId, ServiceMembership>,
) -> FleetService {
    let service_record = &records.services[&service.name];
    FleetService {
        name: service.name.clone(),
        address: service.address,
        index: service_record.index,
        settings: service.settings,
        other_balancer: service.other_balancer,
        policy_name: service.policy_name,
        telemetry_level: policy::required_telemetry_level(service.policy_name),
        health_check: service.health_check.clone().map(Arc::new),
        when_all_down: service.when_all_down,
        slow_start_duration: service.slow_start_duration,
        hash_seed: service_record.hash_seed,
        bucket_count: service.bucket_count,
        members,
        bucket_history: service_record.bucket_history.clone(),
    }
}
