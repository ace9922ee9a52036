//! What the controller tells load balancers and agents: who is there, under which ids, with which keys.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::cookie::FleetKeys;
use coreward_model::rss::RssKey;
use coreward_model::tuple::ServiceAddress;

use crate::address::{address_bytes, parse_address, parse_server_id};
use crate::{Context as _, WireError, v1};

/// What names a service in tables: 0 to 63. (Where in its arrays the data plane puts it is its own affair.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceIndex(u16);

impl ServiceIndex {
    /// How many services the data plane holds.
    pub const COUNT: usize = coreward_intf::MAX_SERVICES as usize;

    /// `None` when `index` is not below [`ServiceIndex::COUNT`].
    pub fn new(index: u32) -> Option<Self> {
        ((index as usize) < Self::COUNT).then_some(Self(index as u16))
    }

    /// The number.
    pub fn get(self) -> u16 {
        self.0
    }

    /// # Errors
    /// When the data plane does not hold so many.
    pub fn parse(field: &str, index: u32) -> Result<Self, WireError> {
        let expected = || format!("service index {index}: expected 0 to {}", Self::COUNT - 1);
        Self::new(index).ok_or_else(|| WireError::new(field, expected()))
    }
}

/// What a load balancer must know to recognise established connections; tables for new ones come apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetConfiguration {
    /// Grows with every change.
    pub generation: u64,
    /// The cookie keys.
    pub keys: FleetKeys,
    /// Each with its own address and index.
    pub services: Vec<Service>,
}

/// A service and its pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Its name in the controller's file.
    pub name: String,
    /// What clients connect to.
    pub address: ServiceAddress,
    /// What names it in tables.
    pub index: ServiceIndex,
    /// The policy's name.
    pub policy: String,
    /// Its pool, each with an id of its own.
    pub servers: Vec<Server>,
}

/// A server of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Its name in the controller's file.
    pub name: String,
    /// What cookies carry.
    pub id: ServerId,
    /// Where it is reached, in the load balancer's own network.
    pub address: IpAddr,
    /// Whether it takes new connections; established ones reach it in any case.
    pub eligible: bool,
}

/// What an agent must know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentConfiguration {
    /// Grows with every change.
    pub generation: u64,
    /// The services that this server serves.
    pub services: Vec<StampedService>,
    /// The cookie keys.
    pub keys: FleetKeys,
    /// Time between two reports.
    pub report_interval: Duration,
    /// What to set where `manage_rss = true`.
    pub fleet_rss_key: RssKey,
    /// Seeds this server's indirection table.
    pub server_id: ServerId,
}

/// A service as one of its servers knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StampedService {
    /// Its name in the controller's file.
    pub name: String,
    /// What clients connect to.
    pub address: ServiceAddress,
    /// What this server stamps into cookies.
    pub server_id: ServerId,
}

impl From<&FleetConfiguration> for v1::FleetConfiguration {
    fn from(configuration: &FleetConfiguration) -> Self {
        Self {
            generation: configuration.generation,
            keys: Some((&configuration.keys).into()),
            services: configuration.services.iter().map(v1::Service::from).collect(),
        }
    }
}

impl From<&Service> for v1::Service {
    fn from(service: &Service) -> Self {
        Self {
            name: service.name.clone(),
            address: Some(service.address.into()),
            index: service.index.get().into(),
            policy: service.policy.clone(),
            servers: service.servers.iter().map(v1::Server::from).collect(),
        }
    }
}

impl From<&Server> for v1::Server {
    fn from(server: &Server) -> Self {
        Self {
            name: server.name.clone(),
            id: server.id.get().into(),
            address: address_bytes(server.address),
            eligible: server.eligible,
        }
    }
}

impl From<&AgentConfiguration> for v1::AgentConfiguration {
    fn from(configuration: &AgentConfiguration) -> Self {
        let stamped = |service: &StampedService| v1::StampedService {
            name: service.name.clone(),
            address: Some(service.address.into()),
            server_id: service.server_id.get().into(),
        };
        Self {
            generation: configuration.generation,
            services: configuration.services.iter().map(stamped).collect(),
            keys: Some((&configuration.keys).into()),
            report_interval_ms: configuration.report_interval.as_millis() as u32,
            fleet_rss_key: configuration.fleet_rss_key.bytes().to_vec(),
            server_id: configuration.server_id.get().into(),
        }
    }
}

fn parse_keys(keys: Option<&v1::FleetKeys>) -> Result<FleetKeys, WireError> {
    keys.ok_or_else(|| WireError::missing("keys"))?.try_into().within("keys")
}

fn parse_service_address(address: Option<&v1::ServiceAddress>) -> Result<ServiceAddress, WireError> {
    address.ok_or_else(|| WireError::missing("address"))?.try_into().within("address")
}

/// Parses every element and says at which position one is wrong.
fn parse_each<'a, T, U: TryFrom<&'a T, Error = WireError>>(field: &str, list: &'a [T]) -> Result<Vec<U>, WireError> {
    list.iter().enumerate().map(|(position, one)| U::try_from(one).within(format!("{field}[{position}]"))).collect()
}

fn all_different<T: std::hash::Hash + Eq + std::fmt::Display>(
    field: &str,
    values: impl Iterator<Item = T>,
) -> Result<(), WireError> {
    let mut seen = HashSet::new();
    for (position, value) in values.enumerate() {
        let twice = format!("{value} is used twice: expected each once");
        if !seen.insert(value) {
            return Err(WireError::new(format!("{field}[{position}]"), twice));
        }
    }
    Ok(())
}

impl TryFrom<&v1::FleetConfiguration> for FleetConfiguration {
    type Error = WireError;

    fn try_from(message: &v1::FleetConfiguration) -> Result<Self, WireError> {
        let services: Vec<Service> = parse_each("services", &message.services)?;
        all_different("services", services.iter().map(|service| service.address))?;
        all_different("services", services.iter().map(|service| format!("index {}", service.index.get())))?;
        Ok(Self { generation: message.generation, keys: parse_keys(message.keys.as_ref())?, services })
    }
}

impl TryFrom<&v1::Service> for Service {
    type Error = WireError;

    fn try_from(message: &v1::Service) -> Result<Self, WireError> {
        let servers: Vec<Server> = parse_each("servers", &message.servers)?;
        all_different("servers", servers.iter().map(|server| format!("server id {}", server.id)))?;
        Ok(Self {
            name: message.name.clone(),
            address: parse_service_address(message.address.as_ref())?,
            index: ServiceIndex::parse("index", message.index)?,
            policy: message.policy.clone(),
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
            eligible: message.eligible,
        })
    }
}

impl TryFrom<&v1::StampedService> for StampedService {
    type Error = WireError;

    fn try_from(message: &v1::StampedService) -> Result<Self, WireError> {
        Ok(Self {
            name: message.name.clone(),
            address: parse_service_address(message.address.as_ref())?,
            server_id: parse_server_id("server_id", message.server_id)?,
        })
    }
}

impl TryFrom<&v1::AgentConfiguration> for AgentConfiguration {
    type Error = WireError;

    fn try_from(message: &v1::AgentConfiguration) -> Result<Self, WireError> {
        if message.report_interval_ms == 0 {
            return Err(WireError::new("report_interval_ms", "0: expected at least 1"));
        }
        Ok(Self {
            generation: message.generation,
            services: parse_each("services", &message.services)?,
            keys: parse_keys(message.keys.as_ref())?,
            report_interval: Duration::from_millis(message.report_interval_ms.into()),
            fleet_rss_key: RssKey::new(&message.fleet_rss_key)
                .map_err(|error| WireError::new("fleet_rss_key", error))?,
            server_id: parse_server_id("server_id", message.server_id)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::cookie::{CookieKey, KeyIndex};
    use coreward_model::tuple::Protocol;

    use super::*;

    fn keys() -> FleetKeys {
        FleetKeys { keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }], current: KeyIndex::First }
    }

    fn fleet() -> FleetConfiguration {
        let server = |id: u64| Server {
            name: format!("s{id}"),
            id: id.try_into().unwrap(),
            address: IpAddr::from([10, 2, 0, id as u8]),
            eligible: id != 2,
        };
        let service = |index: u32| Service {
            name: format!("web{index}"),
            address: ServiceAddress {
                socket: format!("10.200.0.{index}:80").parse().unwrap(),
                protocol: Protocol::Tcp,
            },
            index: ServiceIndex::new(index).unwrap(),
            policy: "crossrss".into(),
            servers: vec![server(1), server(2)],
        };
        FleetConfiguration { generation: 3, keys: keys(), services: vec![service(0), service(63)] }
    }

    #[test]
    fn configurations_come_back() {
        assert_eq!(FleetConfiguration::try_from(&v1::FleetConfiguration::from(&fleet())), Ok(fleet()));
        let agent = AgentConfiguration {
            generation: 3,
            services: vec![StampedService {
                name: "web".into(),
                address: fleet().services[0].address,
                server_id: 7.try_into().unwrap(),
            }],
            keys: keys(),
            report_interval: Duration::from_millis(100),
            fleet_rss_key: RssKey::microsoft(),
            server_id: 7.try_into().unwrap(),
        };
        assert_eq!(AgentConfiguration::try_from(&v1::AgentConfiguration::from(&agent)), Ok(agent));
    }

    #[test]
    fn errors_say_where() {
        let error = |change: fn(&mut v1::FleetConfiguration)| {
            let mut message = v1::FleetConfiguration::from(&fleet());
            change(&mut message);
            FleetConfiguration::try_from(&message).unwrap_err().to_string()
        };
        assert_eq!(
            error(|m| m.services[1].servers[0].id = 16_384),
            "services[1].servers[0].id: server id 16384 is out of range: expected 0 to 16383, the 14 bits that a \
             cookie holds"
        );
        assert_eq!(
            error(|m| m.services[1].servers[1].id = 1),
            "services[1].servers[1]: server id 1 is used twice: expected each once"
        );
        assert_eq!(error(|m| m.services[0].index = 64), "services[0].index: service index 64: expected 0 to 63");
        assert_eq!(error(|m| m.services[1].index = 0), "services[1]: index 0 is used twice: expected each once");
        assert_eq!(error(|m| m.services[1].address = None), "services[1].address: missing");
        assert_eq!(
            error(|m| m.services[1].address = m.services[0].address.clone()),
            "services[1]: 10.200.0.0:80/tcp is used twice: expected each once"
        );
        assert_eq!(error(|m| m.keys = None), "keys: missing");
    }
}
