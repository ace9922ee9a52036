//! Drains by operators. Drains are not in the fleet's document, so neither a restart nor another document ends one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coreward_model::ServerId;

use crate::clock::whole_seconds;
use crate::config::FleetConfig;
use crate::fleet::{AdminState, Fleet, FleetService};
use crate::records::{DrainRecord, Membership, Records};

/// Request to drain a server in all or some of its services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainRequest {
    pub server: String,
    /// Names of the services in which the server is drained; `None`: all services.
    pub services: Option<BTreeSet<String>>,
    /// Whether even the last server of a service may be drained.
    pub force: bool,
}

/// Reason for which a request to drain a server is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DrainError {
    /// The fleet document has no server with this name.
    #[error("server {0:?} does not exist in the fleet's document")]
    UnknownServer(String),
    /// The server does not belong to the service.
    #[error("server {server:?} is not in service {service:?}: expected {expected}")]
    NotInService {
        server: String,
        service: String,
        /// Names of the services to which the server belongs.
        expected: String,
    },
    /// The server is the last one of these services that takes new connections.
    #[error("no other server of {} takes new connections: expected one, or `force`", services.join(", "))]
    LastServer { services: Vec<String> },
}

impl DrainRequest {
    /// Checks whether the server can be drained. `takes_connections`: returns whether a server takes new connections of
    /// a service now.
    pub fn check(&self, fleet: &Fleet, takes: impl Fn(&FleetService, ServerId) -> bool) -> Result<(), DrainError> {
        let id = find_server(fleet, &self.server)?;
        let member = |service: &&FleetService| service.members.get(&id) == Some(&Membership::Present);
        let services: Vec<&FleetService> = fleet.services.iter().filter(member).collect();
        for name in self.services.iter().flatten() {
            if !services.iter().any(|service| service.name == *name) {
                let names: Vec<&str> = services.iter().map(|service| service.name.as_str()).collect();
                let expected = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                return Err(DrainError::NotInService { server: self.server.clone(), service: name.clone(), expected });
            }
        }
        if self.force {
            return Ok(());
        }
        let covered =
            |service: &&&FleetService| self.services.as_ref().is_none_or(|services| services.contains(&service.name));
        let is_last = |service: &&&FleetService| {
            takes(service, id) && !service.members.keys().any(|other| *other != id && takes(service, *other))
        };
        let last: Vec<String> =
            services.iter().filter(covered).filter(is_last).map(|service| service.name.clone()).collect();
        if last.is_empty() { Ok(()) } else { Err(DrainError::LastServer { services: last }) }
    }
}

pub fn find_server(fleet: &Fleet, server: &str) -> Result<ServerId, DrainError> {
    let id = fleet.server_id(server).filter(|id| fleet.servers[id].admin_state != AdminState::Left);
    id.ok_or_else(|| DrainError::UnknownServer(server.to_owned()))
}

impl Records {
    /// Drains the server, in addition to earlier drains. `generation`: generation of the configuration that contains
    /// this drain. Returns whether the records have changed.
    pub fn drain(&mut self, request: &DrainRequest, generation: u64, now: Duration) -> bool {
        let named = |server: &&mut crate::records::ServerRecord| server.is_in_document && server.name == request.server;
        let Some(server) = self.servers.values_mut().find(named) else { return false };
        let services = match (&server.drain, &request.services) {
            (None, services) => services.clone(),
            (Some(DrainRecord { services: Some(before), .. }), Some(services)) => Some(before | services),
            (Some(_), _) => None,
        };
        if server.drain.as_ref().is_some_and(|drain| drain.services == services) {
            return false;
        }
        server.drain = Some(DrainRecord { since: whole_seconds(now), generation, services });
        true
    }

    /// Ends the drain of the server. Returns whether the server was drained.
    pub fn undrain(&mut self, server: &str) -> bool {
        let named = self.servers.values_mut().filter(|record| record.name == server);
        // At most one server has the name.
        named.filter_map(|record| record.drain.take()).count() > 0
    }

    /// Returns the drains that continue with this document, by server name, without the services that the server no
    /// longer has.
    pub fn remaining_drains(&self, config: &FleetConfig) -> BTreeMap<String, DrainRecord> {
        let listed: BTreeSet<&str> = config.services.iter().map(|service| service.name.as_str()).collect();
        let goes_on = |drain: &DrainRecord| {
            let mut drain = drain.clone();
            if let Some(services) = &mut drain.services {
                services.retain(|service| listed.contains(service.as_str()));
            }
            drain.services.as_ref().is_none_or(|services| !services.is_empty()).then_some(drain)
        };
        let servers = self.servers.values().filter(|server| server.is_in_document);
        servers.filter_map(|server| Some((server.name.clone(), goes_on(server.drain.as_ref()?)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use coreward_config::Source;
    use coreward_model::rss::seeded_rng;

    use super::*;

    fn config(servers: &[&str], more: &str) -> FleetConfig {
        let mut text = String::new();
        for server in servers {
            text += &format!("[[server]]\nname = \"{server}\"\naddress = \"10.2.0.{}\"\n", &server[1..]);
        }
        text += "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
        FleetConfig::parse(&Source::from_text("fleet.toml", &format!("{text}{more}"))).unwrap()
    }

    const API: &str = "[[service]]\nname = \"api\"\nvip = \"10.200.0.1:81\"\nservers = [\"s1\"]\n";

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn request(server: &str, services: &[&str]) -> DrainRequest {
        let services: BTreeSet<String> = services.iter().map(|service| (*service).to_owned()).collect();
        DrainRequest { server: server.into(), services: (!services.is_empty()).then_some(services), force: false }
    }

    fn drain<'a>(records: &'a Records, server: &str) -> Option<&'a DrainRecord> {
        records.servers.values().find(|record| record.name == server && record.is_in_document)?.drain.as_ref()
    }

    /// Returns new records after this document has been applied.
    fn records(config: &FleetConfig) -> Records {
        let random = &mut seeded_rng(1, 0);
        let mut records = Records::generate(at(0), random);
        records.apply(config, at(0), random).unwrap();
        records
    }

    #[test]
    fn drain_survives_documents_that_name_the_server() {
        let (both, first) = (config(&["s1", "s2"], API), config(&["s1"], ""));
        let mut records = records(&both);
        assert!(records.drain(&request("s1", &[]), 7, at(10)));
        assert!(!records.drain(&request("s1", &[]), 8, at(20)), "it is so already");
        assert_eq!(drain(&records, "s1"), Some(&DrainRecord { since: at(10), generation: 7, services: None }));
        let random = &mut seeded_rng(2, 0);
        records.apply(&first, at(30), random).unwrap();
        assert_eq!(drain(&records, "s1").map(|drain| drain.since), Some(at(10)));
        // A server that leaves and returns is not drained.
        records.apply(&config(&["s2"], ""), at(40), random).unwrap();
        records.apply(&first, at(50), random).unwrap();
        assert_eq!(drain(&records, "s1"), None);
        assert!(!records.undrain("s1"));
    }

    #[test]
    fn drain_may_be_limited_to_services() {
        let both = config(&["s1", "s2"], API);
        let mut records = records(&both);
        assert!(records.drain(&request("s1", &["api"]), 2, at(10)));
        let fleet = Fleet::new(&both, &records);
        let id = fleet.server_id("s1").unwrap();
        let eligible: Vec<bool> = fleet.services.iter().map(|service| fleet.is_eligible(service, id)).collect();
        assert_eq!(eligible, [true, false]);
        assert!(fleet.is_draining(id) && !fleet.is_draining(fleet.server_id("s2").unwrap()));
        assert!(!records.drain(&request("s1", &["api"]), 3, at(20)));
        assert!(records.drain(&request("s1", &["web"]), 3, at(20)));
        let services = drain(&records, "s1").unwrap().services.clone();
        assert_eq!(services, request("", &["api", "web"]).services);
        // A removed service ends its part of the drain.
        let random = &mut seeded_rng(2, 0);
        records.apply(&config(&["s1", "s2"], ""), at(30), random).unwrap();
        assert_eq!(drain(&records, "s1").unwrap().services, request("", &["web"]).services);
        assert!(records.drain(&request("s1", &[]), 9, at(40)));
        assert_eq!(drain(&records, "s1"), Some(&DrainRecord { since: at(40), generation: 9, services: None }));
        assert!(records.undrain("s1"));
        assert!(records.drain(&request("s1", &["web"]), 10, at(50)));
        let other =
            "[[server]]\nname = \"s1\"\naddress = \"10.2.0.1\"\n[[service]]\nname = \"new\"\nvip = \"10.200.0.1:82\"\n";
        let other = FleetConfig::parse(&Source::from_text("fleet.toml", other)).unwrap();
        records.apply(&other, at(60), random).unwrap();
        assert_eq!(drain(&records, "s1"), None);
    }

    #[test]
    fn unknown_or_last_server_cannot_be_drained() {
        let both = config(&["s1", "s2"], API);
        let mut records = records(&both);
        let check = |records: &Records, request: DrainRequest| {
            let fleet = Fleet::new(&both, records);
            let outcome = request.check(&fleet, |service, id| fleet.is_eligible(service, id));
            outcome.map_err(|refused| refused.to_string())
        };
        assert_eq!(
            check(&records, request("s3", &[])).unwrap_err(),
            "server \"s3\" does not exist in the fleet's document"
        );
        assert_eq!(
            check(&records, request("s2", &["api"])).unwrap_err(),
            "server \"s2\" is not in service \"api\": expected web"
        );
        let last = "no other server of api takes new connections: expected one, or `force`";
        assert_eq!(check(&records, request("s1", &[])).unwrap_err(), last);
        assert_eq!(check(&records, request("s1", &["web"])), Ok(()));
        assert_eq!(check(&records, DrainRequest { force: true, ..request("s1", &[]) }), Ok(()));
        records.drain(&request("s1", &[]), 2, at(1));
        // It takes none already, so draining it again is allowed.
        assert_eq!(check(&records, request("s1", &[])), Ok(()));
        let last = "no other server of web takes new connections: expected one, or `force`";
        assert_eq!(check(&records, request("s2", &[])).unwrap_err(), last);
    }
}
