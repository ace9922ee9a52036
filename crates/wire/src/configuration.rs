//! Configurations of load balancers and agents, with members, ids and keys.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::connection_table::TableOwnerNumber;
use coreward_model::consistency::{CookieStamper, ServiceSettings};
use coreward_model::cookie::{CookieKey, FleetCookieKeys};
use coreward_model::health::{AllServersDownTreatment, HealthCheck};
use coreward_model::placement::DEFAULT_PLACEMENT_TABLE_LIFETIME;
use coreward_model::policy::{ServerCapacity, ServerWeight, TelemetryLevel};
use coreward_model::rss::RssKey;
use coreward_model::tuple::ServiceAddress;
use coreward_model::vlan::Vlan;
use prost::Message as _;
use prost::bytes::Bytes;

use crate::address::{address_to_bytes, parse_address, parse_optional_address, parse_server_id};
use crate::{WireError, WireErrorContext as _, v1};

/// Index of a service in placement tables, from 0 to 1,023. The data plane's arrays may use another index for the same
/// service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceIndex(u16);

impl ServiceIndex {
    /// Number of services that the data plane can hold.
    pub const COUNT: usize = coreward_intf::MAX_SERVICES as usize;

    /// Lowest service index, which is 0.
    pub const FIRST: Self = Self(0);

    /// Returns the service index `index`, or `None` if it is not below [`ServiceIndex::COUNT`].
    pub fn new(index: u32) -> Option<Self> {
        ((index as usize) < Self::COUNT).then_some(Self(index as u16))
    }

    /// Returns the index as a number.
    pub fn get(self) -> u16 {
        self.0
    }

    /// Parses the index of a service from the message's field `field`. Fails if it is out of range.
    pub fn parse(field: &str, index: u32) -> Result<Self, WireError> {
        let expected_range_text = || format!("service index {index}: expected 0 to {}", Self::COUNT - 1);
        Self::new(index).ok_or_else(|| WireError::new(field, expected_range_text()))
    }
}

/// Configuration by which load balancers forward packets of established connections. Placement tables for new
/// connections are separate messages.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetConfiguration {
    /// Generation of the configuration, which grows with every change except for [`PeerLoadBalancer::is_alive`].
    pub generation: u64,
    /// Cookie keys of the fleet.
    pub cookie_keys: FleetCookieKeys,
    /// Services, each with a unique address and index.
    pub services: Vec<Service>,
    /// All load balancers of the fleet, each with a unique name and number.
    pub load_balancers: Vec<PeerLoadBalancer>,
    /// Time between two traffic messages of a load balancer.
    pub report_interval: Duration,
    /// Time for which a placement table that depends on loads stays active without a controller.
    pub table_lifetime: Duration,
}

/// Description of one load balancer, which every load balancer of the fleet receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerLoadBalancer {
    /// Name of the load balancer in its configuration file.
    pub name: String,
    /// Number that identifies the load balancer's connection table in cookies, or `None` if it has no table.
    pub owner_number: Option<TableOwnerNumber>,
    /// Address of the load balancer in the servers' network, or `None` if it is unknown.
    pub address: Option<IpAddr>,
    /// Whether the controller has received a message from the load balancer within the last
    /// [`LOAD_BALANCER_LOSS_TIMEOUT`].
    pub is_alive: bool,
}

/// Time without a message after which a load balancer counts as lost. A daemon restarts in less time. TCP retransmits
/// after 0.2, 0.6, 1.4 and 3.0 s, and the last of these packets should already take another path.
pub const LOAD_BALANCER_LOSS_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval between a load balancer's state messages, which is a quarter of [`LOAD_BALANCER_LOSS_TIMEOUT`].
pub const LB_STATE_MESSAGE_INTERVAL: Duration = Duration::from_millis(500);

/// Service and its servers.
#[derive(Debug, Clone, PartialEq)]
pub struct Service {
    /// Name of the service in the fleet document.
    pub name: String,
    /// VIP, port and protocol of the service.
    pub address: ServiceAddress,
    /// Index of the service in placement tables.
    pub index: ServiceIndex,
    /// Consistency mode of the service.
    pub settings: ServiceSettings,
    /// Name of the service's placement policy.
    pub policy_name: String,
    /// Level of telemetry about each server that the placement policy needs.
    pub telemetry_level: TelemetryLevel,
    /// Key that masks the time part of the service's cookies, or `None` if load balancers do not stamp the service.
    pub time_key: Option<CookieKey>,
    /// Health check of the servers, or `None` for no check.
    pub health_check: Option<Arc<HealthCheck>>,
    /// Treatment of the service's new connections when all its servers are down.
    pub when_all_down: AllServersDownTreatment,
    /// Servers of the service, with distinct ids.
    pub servers: Vec<Server>,
}

/// Server of a service.
#[derive(Debug, Clone, PartialEq)]
pub struct Server {
    /// Name of the server in the fleet document.
    pub name: String,
    /// Id of the server in cookies.
    pub id: ServerId,
    /// Address of the server in the servers' network.
    pub address: IpAddr,
    /// Whether the server takes new connections. Packets of established connections always reach it.
    pub is_eligible: bool,
    /// Whether the server has left the service and therefore needs no health checks.
    pub has_left: bool,
    /// Weight of the server.
    pub weight: ServerWeight,
    /// Capacity of the server if the operator configured one.
    pub capacity: Option<ServerCapacity>,
    /// VLAN of frames to the server.
    pub vlan: Vlan,
}

/// Configuration of a server's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentConfiguration {
    /// Generation of the configuration, which grows with every change except for
    /// [`AgentConfiguration::previous_servers`].
    pub generation: u64,
    /// Services to which this server belongs.
    pub services: Vec<AgentService>,
    /// Cookie keys of the fleet.
    pub keys: FleetCookieKeys,
    /// Time between two reports of the agent.
    pub report_interval: Duration,
    /// RSS key that the agent sets if `manage_rss = true`.
    pub fleet_rss_key: RssKey,
    /// Id of this server, which is also the seed of its indirection table.
    pub server_id: ServerId,
    /// Servers to which this server's buckets belonged before. This server may forward packets to them if it does not
    /// have the packets' connections. The list may change without a new generation.
    pub previous_servers: Vec<PreviousServer>,
    /// Whether an operator drains the server. If so, the agent counts open connections more often.
    pub is_draining: bool,
    /// Address of this server to which load balancers send packets, or `None` if the controller has an older version.
    pub address: Option<IpAddr>,
}

/// Previous server of a bucket, to which packets of the bucket's connections may be forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreviousServer {
    /// Id of the previous server in forwarded packets.
    pub id: ServerId,
    /// Address of the previous server in the servers' network.
    pub address: IpAddr,
}

/// Service of a server, in the configuration of the server's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentService {
    /// Name of the service in the fleet document.
    pub name: String,
    /// VIP, port and protocol of the service.
    pub address: ServiceAddress,
    /// Id of this server in the service's cookies.
    pub server_id: ServerId,
    /// Consistency mode of the service.
    pub settings: ServiceSettings,
}

impl From<&FleetConfiguration> for v1::FleetConfiguration {
    fn from(configuration: &FleetConfiguration) -> Self {
        Self {
            generation: configuration.generation,
            keys: Some((&configuration.cookie_keys).into()),
            services: configuration.services.iter().map(v1::Service::from).collect(),
            load_balancers: configuration.load_balancers.iter().map(v1::LoadBalancer::from).collect(),
            report_interval_ms: configuration.report_interval.as_millis() as u32,
            number: 0,
            table_lifetime_ms: configuration.table_lifetime.as_millis() as u32,
        }
    }
}

impl From<&PeerLoadBalancer> for v1::LoadBalancer {
    fn from(peer: &PeerLoadBalancer) -> Self {
        Self {
            name: peer.name.clone(),
            owner: peer.owner_number.map(|owner| owner.get().into()),
            address: peer.address.map(address_to_bytes).unwrap_or_default(),
            alive: peer.is_alive,
        }
    }
}

impl From<&Service> for v1::Service {
    fn from(service: &Service) -> Self {
        Self {
            name: service.name.clone(),
            address: Some(service.address.into()),
            index: service.index.get().into(),
            mode: Some(service.settings.into()),
            policy: service.policy_name.clone(),
            traffic: service.telemetry_level.name().to_owned(),
            time_key: service.time_key.map(Into::into),
            health_check: service.health_check.as_deref().map(v1::HealthCheck::from),
            when_all_down: service.when_all_down.name().to_owned(),
            servers: service.servers.iter().map(v1::Server::from).collect(),
        }
    }
}

impl From<&Server> for v1::Server {
    fn from(server: &Server) -> Self {
        Self {
            name: server.name.clone(),
            id: server.id.get().into(),
            address: address_to_bytes(server.address),
            eligible: server.is_eligible,
            has_left: server.has_left,
            weight: server.weight.get(),
            capacity: server.capacity.map_or(0.0, ServerCapacity::get),
            vlan: server.vlan.id_or_zero().into(),
        }
    }
}

impl From<&AgentConfiguration> for v1::AgentConfiguration {
    fn from(configuration: &AgentConfiguration) -> Self {
        let to_stamped_service = |service: &AgentService| v1::StampedService {
            name: service.name.clone(),
            address: Some(service.address.into()),
            server_id: service.server_id.get().into(),
            mode: Some(service.settings.into()),
        };
        let to_previous_server = |server: &PreviousServer| v1::PreviousServer {
            id: server.id.get().into(),
            address: address_to_bytes(server.address),
        };
        Self {
            generation: configuration.generation,
            services: configuration.services.iter().map(to_stamped_service).collect(),
            keys: Some((&configuration.keys).into()),
            report_interval_ms: configuration.report_interval.as_millis() as u32,
            fleet_rss_key: configuration.fleet_rss_key.key_bytes().to_vec(),
            server_id: configuration.server_id.get().into(),
            previous_servers: configuration.previous_servers.iter().map(to_previous_server).collect(),
            draining: configuration.is_draining,
            address: configuration.address.map(address_to_bytes).unwrap_or_default(),
        }
    }
}

fn parse_cookie_keys(keys: Option<&v1::FleetKeys>) -> Result<FleetCookieKeys, WireError> {
    keys.ok_or_else(|| WireError::missing("keys"))?.try_into().with_field_prefix("keys")
}

fn parse_service_address(address: Option<&v1::ServiceAddress>) -> Result<ServiceAddress, WireError> {
    address.ok_or_else(|| WireError::missing("address"))?.try_into().with_field_prefix("address")
}

fn parse_owner_number(field: &str, number: u32) -> Result<TableOwnerNumber, WireError> {
    u64::from(number).try_into().map_err(|error| WireError::new(field, error))
}

fn parse_service_settings(mode: Option<&v1::ServiceSettings>) -> Result<ServiceSettings, WireError> {
    mode.ok_or_else(|| WireError::missing("mode"))?.try_into().with_field_prefix("mode")
}

/// Parses a service's time key. Stamping by load balancers requires it, so that all of them stamp alike.
fn parse_time_key(mode: ServiceSettings, key: Option<v1::CookieKey>) -> Result<Option<CookieKey>, WireError> {
    match (mode.timestamps == CookieStamper::LoadBalancer, key) {
        (true, None) => Err(WireError::missing("time_key")),
        (true, Some(key)) => Ok(Some(key.into())),
        (false, _) => Ok(None),
    }
}

/// Parses a text that must be the name of one of `all_values`.
fn parse_named_value<T: Copy, const N: usize>(
    field: &str,
    text: &str,
    all_values: [T; N],
    value_name: fn(T) -> &'static str,
) -> Result<T, WireError> {
    all_values.into_iter().find(|value| value_name(*value) == text).ok_or_else(|| {
        WireError::new(field, format!("{text:?}: expected one of {}", all_values.map(value_name).join(", ")))
    })
}

fn parse_report_interval(milliseconds: u32) -> Result<Duration, WireError> {
    match milliseconds {
        0 => Err(WireError::new("report_interval_ms", "0: expected at least 1")),
        _ => Ok(Duration::from_millis(milliseconds.into())),
    }
}

fn parse_when_all_down(name: &str) -> Result<AllServersDownTreatment, WireError> {
    if name.is_empty() {
        return Ok(AllServersDownTreatment::default());
    }
    parse_named_value("when_all_down", name, AllServersDownTreatment::ALL, AllServersDownTreatment::name)
}

/// Parses the lifetime of placement tables. A value of 0 selects the default, because older controllers do not send
/// this field.
fn parse_table_lifetime(milliseconds: u32) -> Duration {
    if milliseconds == 0 { DEFAULT_PLACEMENT_TABLE_LIFETIME } else { Duration::from_millis(milliseconds.into()) }
}

fn parse_server_weight(weight: u32) -> Result<ServerWeight, WireError> {
    ServerWeight::new(weight.max(1).into()).map_err(|error| WireError::new("weight", error))
}

fn parse_server_capacity(capacity: f64) -> Result<Option<ServerCapacity>, WireError> {
    let parsed_capacity = (capacity != 0.0).then(|| ServerCapacity::new(capacity)).transpose();
    parsed_capacity.map_err(|error| WireError::new("capacity", error))
}

/// Parses every element of a list. An error includes the position of the invalid element.
pub(crate) fn parse_message_list<'a, T, U: TryFrom<&'a T, Error = WireError>>(
    field: &str,
    list: &'a [T],
) -> Result<Vec<U>, WireError> {
    list.iter()
        .enumerate()
        .map(|(position, element)| U::try_from(element).with_field_prefix(format!("{field}[{position}]")))
        .collect()
}

fn check_unique_values<T: std::hash::Hash + Eq + std::fmt::Display>(
    field: &str,
    values: impl Iterator<Item = T>,
) -> Result<(), WireError> {
    let mut used_values = HashSet::new();
    for (position, value) in values.enumerate() {
        let duplicate_problem = format!("{value} is used twice: expected each once");
        if !used_values.insert(value) {
            return Err(WireError::new(format!("{field}[{position}]"), duplicate_problem));
        }
    }
    Ok(())
}

impl FleetConfiguration {
    /// Returns the encoded message, which is shared by the streams of all load balancers. The next change refers to
    /// `number` as its [`crate::FleetConfigurationChange::base_configuration_number`].
    pub fn encode(&self, number: u64) -> Bytes {
        v1::FleetConfiguration { number, ..self.into() }.encode_to_vec().into()
    }

    /// Parses a message and returns its number, the configuration and the services that this version cannot use. Fails
    /// if another part of `bytes` is invalid.
    pub fn decode(bytes: Bytes) -> Result<(u64, Self, Vec<UnusableService>), WireError> {
        let message = v1::FleetConfiguration::decode(bytes).map_err(|error| WireError::new("configuration", error))?;
        let number = message.number;
        let (configuration, unusable_services) = Self::parse_message(message)?;
        Ok((number, configuration, unusable_services))
    }

    pub(crate) fn parse_message(
        mut message: v1::FleetConfiguration,
    ) -> Result<(Self, Vec<UnusableService>), WireError> {
        // Services are checked one by one only if the whole configuration is not valid.
        match Self::try_from(&message) {
            Ok(configuration) => Ok((configuration, Vec::new())),
            Err(_) => {
                let unusable_services = split_off_unusable_services(&mut message);
                Ok(((&message).try_into()?, unusable_services))
            }
        }
    }
}

impl TryFrom<&v1::FleetConfiguration> for FleetConfiguration {
    type Error = WireError;

    fn try_from(message: &v1::FleetConfiguration) -> Result<Self, WireError> {
        let services: Vec<Service> = parse_message_list("services", &message.services)?;
        check_unique_values("services", services.iter().map(|service| service.address))?;
        check_unique_values("services", services.iter().map(|service| format!("index {}", service.index.get())))?;
        let load_balancers: Vec<PeerLoadBalancer> = parse_message_list("load_balancers", &message.load_balancers)?;
        check_unique_values("load_balancers", load_balancers.iter().map(|peer| &peer.name))?;
        let owner_numbers = load_balancers.iter().filter_map(|peer| peer.owner_number);
        check_unique_values("load_balancers", owner_numbers.map(|owner| format!("owner number {}", owner.get())))?;
        Ok(Self {
            generation: message.generation,
            cookie_keys: parse_cookie_keys(message.keys.as_ref())?,
            services,
            load_balancers,
            report_interval: parse_report_interval(message.report_interval_ms)?,
            table_lifetime: parse_table_lifetime(message.table_lifetime_ms),
        })
    }
}

impl TryFrom<&v1::LoadBalancer> for PeerLoadBalancer {
    type Error = WireError;

    fn try_from(message: &v1::LoadBalancer) -> Result<Self, WireError> {
        Ok(Self {
            name: message.name.clone(),
            owner_number: message.owner.map(|number| parse_owner_number("owner", number)).transpose()?,
            address: parse_optional_address("address", &message.address)?,
            is_alive: message.alive,
        })
    }
}

impl TryFrom<&v1::Service> for Service {
    type Error = WireError;

    fn try_from(message: &v1::Service) -> Result<Self, WireError> {
        let servers: Vec<Server> = parse_message_list("servers", &message.servers)?;
        check_unique_values("servers", servers.iter().map(|server| format!("server id {}", server.id)))?;
        let mode = parse_service_settings(message.mode.as_ref())?;
        Ok(Self {
            name: message.name.clone(),
            address: parse_service_address(message.address.as_ref())?,
            index: ServiceIndex::parse("index", message.index)?,
            settings: mode,
            time_key: parse_time_key(mode, message.time_key)?,
            policy_name: message.policy.clone(),
            telemetry_level: parse_named_value("traffic", &message.traffic, TelemetryLevel::ALL, TelemetryLevel::name)?,
            health_check: message
                .health_check
                .as_ref()
                .map(HealthCheck::try_from)
                .transpose()
                .with_field_prefix("health_check")?
                .map(Arc::new),
            when_all_down: parse_when_all_down(&message.when_all_down)?,
            servers,
        })
    }
}

impl TryFrom<&v1::Server> for Server {
    type Error = WireError;

    fn try_from(message: &v1::Server) -> Result<Self, WireError> {
        Ok(Self {
            name: message.name.clone(),
            id: parse_server_id("id", message.id)?,
            address: parse_address("address", &message.address)?,
            is_eligible: message.eligible,
            has_left: message.has_left,
            weight: parse_server_weight(message.weight)?,
            capacity: parse_server_capacity(message.capacity)?,
            vlan: Vlan::from_id_or_untagged(message.vlan.into()).map_err(|error| WireError::new("vlan", error))?,
        })
    }
}

impl TryFrom<&v1::StampedService> for AgentService {
    type Error = WireError;

    fn try_from(message: &v1::StampedService) -> Result<Self, WireError> {
        Ok(Self {
            name: message.name.clone(),
            address: parse_service_address(message.address.as_ref())?,
            server_id: parse_server_id("server_id", message.server_id)?,
            settings: parse_service_settings(message.mode.as_ref())?,
        })
    }
}

impl TryFrom<&v1::PreviousServer> for PreviousServer {
    type Error = WireError;

    fn try_from(message: &v1::PreviousServer) -> Result<Self, WireError> {
        Ok(Self { id: parse_server_id("id", message.id)?, address: parse_address("address", &message.address)? })
    }
}

impl AgentConfiguration {
    /// Parses a message and returns the configuration and the services that this version cannot use. Fails if another
    /// part of the message is invalid.
    pub fn from_message(mut message: v1::AgentConfiguration) -> Result<(Self, Vec<UnusableService>), WireError> {
        let unusable_services = split_off_unusable_agent_services(&mut message);
        Ok(((&message).try_into()?, unusable_services))
    }
}

impl TryFrom<&v1::AgentConfiguration> for AgentConfiguration {
    type Error = WireError;

    fn try_from(message: &v1::AgentConfiguration) -> Result<Self, WireError> {
        Ok(Self {
            generation: message.generation,
            services: parse_message_list("services", &message.services)?,
            keys: parse_cookie_keys(message.keys.as_ref())?,
            report_interval: parse_report_interval(message.report_interval_ms)?,
            fleet_rss_key: RssKey::new(&message.fleet_rss_key)
                .map_err(|error| WireError::new("fleet_rss_key", error))?,
            server_id: parse_server_id("server_id", message.server_id)?,
            previous_servers: parse_message_list("previous_servers", &message.previous_servers)?,
            is_draining: message.draining,
            address: parse_optional_address("address", &message.address)?,
        })
    }
}

/// Service that this version of coreward cannot use, for example because of an unknown setting.
#[derive(Debug, Clone, PartialEq)]
pub struct UnusableService {
    /// Name of the service.
    pub name: String,
    /// Index of the service in the message, or 0 in an agent's message, which has no indexes.
    pub index: u32,
    /// Reason for which the service is unusable.
    pub reason: WireError,
    /// Servers of the service, or `None` if they are also unusable.
    pub servers: Option<Vec<Server>>,
}

impl UnusableService {
    /// Returns `previous_service` with this service's servers, if they are usable, so that drains still take effect.
    pub fn replace_servers_in(&self, previous_service: &Service) -> Service {
        Service {
            servers: self.servers.clone().unwrap_or_else(|| previous_service.servers.clone()),
            ..previous_service.clone()
        }
    }

    /// Returns a message to the controller, which reports that version `generation` of this service is rejected.
    pub fn to_rejected_update(&self, generation: u64) -> v1::RejectedUpdate {
        v1::RejectedUpdate { service: self.name.clone(), generation, reason: self.reason.to_string(), table: false }
    }
}

fn split_off_unusable_services(message: &mut v1::FleetConfiguration) -> Vec<UnusableService> {
    let mut unusable_services = Vec::new();
    message.services.retain(|service| {
        let Err(reason) = Service::try_from(service) else { return true };
        let servers = parse_message_list("servers", &service.servers).ok();
        unusable_services.push(UnusableService { name: service.name.clone(), index: service.index, reason, servers });
        false
    });
    unusable_services
}

fn split_off_unusable_agent_services(message: &mut v1::AgentConfiguration) -> Vec<UnusableService> {
    let mut unusable_services = Vec::new();
    message.services.retain(|service| {
        let Err(reason) = AgentService::try_from(service) else { return true };
        unusable_services.push(UnusableService { name: service.name.clone(), index: 0, reason, servers: None });
        false
    });
    unusable_services
}

#[cfg(test)]
mod tests;
