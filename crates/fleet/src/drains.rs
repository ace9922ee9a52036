//! Drains of servers by operators. Neither a restart nor another fleet document ends a drain, because the records
//! contain the drains.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coreward_model::ServerId;

use crate::clock::round_down_to_seconds;
use crate::config::FleetConfig;
use crate::fleet::{Fleet, FleetService, ServerAdminState};
use crate::records::{DrainRecord, FleetRecords, ServiceMembership};

/// Request to drain a server in all or some of its services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerDrainRequest {
    pub server_name: String,
    /// Names of the services in which the server is drained, or `None` for all services.
    pub services: Option<BTreeSet<String>>,
    /// Whether even the last server of a service may be drained.
    pub may_drain_last_server: bool,
}

/// Reason why a request to drain a server is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServerDrainError {
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
    /// No other server takes new connections to these services.
    #[error("no other server of {} takes new connections: expected one, or `force`", services.join(", "))]
    LastServer { services: Vec<String> },
}

impl ServerDrainRequest {
    /// Checks whether the server can be drained. `takes_connections` returns whether a server currently takes new
    /// connections to a service.
    pub fn check(
        &self,
        fleet: &Fleet,
        takes_connections: impl Fn(&FleetService, ServerId) -> bool,
    ) -> Result<(), ServerDrainError> {
        let id = find_server_id(fleet, &self.server_name)?;
        let is_member = |service: &&FleetService| service.members.get(&id) == Some(&ServiceMembership::Present);
        let services: Vec<&FleetService> = fleet.services.iter().filter(is_member).collect();
        self.check_membership(&services)?;
        if self.may_drain_last_server {
            return Ok(());
        }
        let is_covered =
            |service: &&&FleetService| self.services.as_ref().is_none_or(|services| services.contains(&service.name));
        let is_last_server = |service: &&&FleetService| {
            takes_connections(service, id)
                && !service.members.keys().any(|other_id| *other_id != id && takes_connections(service, *other_id))
        };
        let services_without_server: Vec<String> =
            services.iter().filter(is_covered).filter(is_last_server).map(|service| service.name.clone()).collect();
        if services_without_server.is_empty() {
            Ok(())
        } else {
            Err(ServerDrainError::LastServer { services: services_without_server })
        }
    }

    /// Checks that all requested services are among the `member_services`, to which the server belongs.
    fn check_membership(&self, member_services: &[&FleetService]) -> Result<(), ServerDrainError> {
        for name in self.services.iter().flatten() {
            if !member_services.iter().any(|service| service.name == *name) {
                let service_names: Vec<&str> = member_services.iter().map(|service| service.name.as_str()).collect();
                let expected_services =
                    if service_names.is_empty() { "none".to_owned() } else { service_names.join(", ") };
                return Err(ServerDrainError::NotInService {
                    server: self.server_name.clone(),
                    service: name.clone(),
                    expected: expected_services,
                });
            }
        }
        Ok(())
    }
}

pub fn find_server_id(fleet: &Fleet, server_name: &str) -> Result<ServerId, ServerDrainError> {
    let id = fleet.server_id(server_name).filter(|id| fleet.servers[id].admin_state != ServerAdminState::Left);
    id.ok_or_else(|| ServerDrainError::UnknownServer(server_name.to_owned()))
}

impl FleetRecords {
    /// Records a drain of the server, in addition to earlier drains. `generation` is the generation of the
    /// configuration that will contain the drain. Returns whether the records have changed.
    pub fn drain_server(&mut self, request: &ServerDrainRequest, generation: u64, now: Duration) -> bool {
        let is_requested_server =
            |server: &&mut crate::records::ServerRecord| server.is_in_document && server.name == request.server_name;
        let Some(server) = self.servers.values_mut().find(is_requested_server) else { return false };
        let drained_services = match (&server.drain, &request.services) {
            (None, services) => services.clone(),
            (Some(DrainRecord { services: Some(previous_services), .. }), Some(services)) => {
                Some(previous_services | services)
            }
            (Some(_), _) => None,
        };
        if server.drain.as_ref().is_some_and(|drain| drain.services == drained_services) {
            return false;
        }
        server.drain =
            Some(DrainRecord { changed_at: round_down_to_seconds(now), generation, services: drained_services });
        true
    }

    /// Ends the drain of the server. Returns whether the server was drained.
    pub fn undrain_server(&mut self, server: &str) -> bool {
        let matching_records = self.servers.values_mut().filter(|record| record.name == server);
        // At most one server has the name.
        matching_records.filter_map(|record| record.drain.take()).count() > 0
    }

    /// Returns the drains that remain after `config` has been applied, by server name. Services that no longer exist
    /// are omitted.
    pub fn remaining_drains(&self, config: &FleetConfig) -> BTreeMap<String, DrainRecord> {
        let existing_services: BTreeSet<&str> = config.services.iter().map(|service| service.name.as_str()).collect();
        let to_remaining_drain = |drain: &DrainRecord| {
            let mut drain = drain.clone();
            if let Some(services) = &mut drain.services {
                services.retain(|service| existing_services.contains(service.as_str()));
            }
            drain.services.as_ref().is_none_or(|services| !services.is_empty()).then_some(drain)
        };
        let servers_in_document = self.servers.values().filter(|server| server.is_in_document);
        servers_in_document
            .filter_map(|server| Some((server.name.clone(), to_remaining_drain(server.drain.as_ref()?)?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use coreward_config::TomlSource;
    use coreward_model::rss::seeded_rng;

    use super::*;

    fn fleet_config_with_servers(servers: &[&str], additional_text: &str) -> FleetConfig {
        let mut text = String::new();
        for server in servers {
            text += &format!("[[server]]\nname = \"{server}\"\naddress = \"10.2.0.{}\"\n", &server[1..]);
        }
        text += "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
        FleetConfig::parse(&TomlSource::from_text("fleet.toml", &format!("{text}{additional_text}"))).unwrap()
    }

    const API_SERVICE_TOML: &str = "[[service]]\nname = \"api\"\nvip = \"10.200.0.1:81\"\nservers = [\"s1\"]\n";

    fn time_from_seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn drain_request(server: &str, services: &[&str]) -> ServerDrainRequest {
        let services: BTreeSet<String> = services.iter().map(|service| (*service).to_owned()).collect();
        ServerDrainRequest {
            server_name: server.into(),
            services: (!services.is_empty()).then_some(services),
            may_drain_last_server: false,
        }
    }

    fn drain_record<'a>(records: &'a FleetRecords, server: &str) -> Option<&'a DrainRecord> {
        records.servers.values().find(|record| record.name == server && record.is_in_document)?.drain.as_ref()
    }

    /// Returns new records to which `config` has been applied.
    fn records_with_applied_config(config: &FleetConfig) -> FleetRecords {
        let random_source = &mut seeded_rng(1, 0);
        let mut records = FleetRecords::generate(time_from_seconds(0), random_source);
        records.apply_document(config, time_from_seconds(0), random_source).unwrap();
        records
    }

    #[test]
    fn drain_remains_while_documents_contain_the_server() {
        let (config_with_both, config_with_first) =
            (fleet_config_with_servers(&["s1", "s2"], API_SERVICE_TOML), fleet_config_with_servers(&["s1"], ""));
        let mut records = records_with_applied_config(&config_with_both);
        assert!(records.drain_server(&drain_request("s1", &[]), 7, time_from_seconds(10)));
        assert!(!records.drain_server(&drain_request("s1", &[]), 8, time_from_seconds(20)), "it is so already");
        assert_eq!(
            drain_record(&records, "s1"),
            Some(&DrainRecord { changed_at: time_from_seconds(10), generation: 7, services: None })
        );
        let random_source = &mut seeded_rng(2, 0);
        records.apply_document(&config_with_first, time_from_seconds(30), random_source).unwrap();
        assert_eq!(drain_record(&records, "s1").map(|drain| drain.changed_at), Some(time_from_seconds(10)));
        // A server that leaves and returns is not drained.
        records.apply_document(&fleet_config_with_servers(&["s2"], ""), time_from_seconds(40), random_source).unwrap();
        records.apply_document(&config_with_first, time_from_seconds(50), random_source).unwrap();
        assert_eq!(drain_record(&records, "s1"), None);
        assert!(!records.undrain_server("s1"));
    }

    #[test]
    fn drain_of_chosen_services_leaves_others_active() {
        let config_with_both = fleet_config_with_servers(&["s1", "s2"], API_SERVICE_TOML);
        let mut records = records_with_applied_config(&config_with_both);
        assert!(records.drain_server(&drain_request("s1", &["api"]), 2, time_from_seconds(10)));
        let fleet = Fleet::new(&config_with_both, &records);
        let id = fleet.server_id("s1").unwrap();
        let eligibilities: Vec<bool> =
            fleet.services.iter().map(|service| fleet.is_server_eligible(service, id)).collect();
        assert_eq!(eligibilities, [true, false]);
        assert!(fleet.is_server_draining(id) && !fleet.is_server_draining(fleet.server_id("s2").unwrap()));
        assert!(!records.drain_server(&drain_request("s1", &["api"]), 3, time_from_seconds(20)));
        assert!(records.drain_server(&drain_request("s1", &["web"]), 3, time_from_seconds(20)));
        let drained_services = drain_record(&records, "s1").unwrap().services.clone();
        assert_eq!(drained_services, drain_request("", &["api", "web"]).services);
        // A removed service ends its part of the drain.
        let random_source = &mut seeded_rng(2, 0);
        records
            .apply_document(&fleet_config_with_servers(&["s1", "s2"], ""), time_from_seconds(30), random_source)
            .unwrap();
        assert_eq!(drain_record(&records, "s1").unwrap().services, drain_request("", &["web"]).services);
        assert!(records.drain_server(&drain_request("s1", &[]), 9, time_from_seconds(40)));
        assert_eq!(
            drain_record(&records, "s1"),
            Some(&DrainRecord { changed_at: time_from_seconds(40), generation: 9, services: None })
        );
        assert!(records.undrain_server("s1"));
        assert!(records.drain_server(&drain_request("s1", &["web"]), 10, time_from_seconds(50)));
        let other_text =
            "[[server]]\nname = \"s1\"\naddress = \"10.2.0.1\"\n[[service]]\nname = \"new\"\nvip = \"10.200.0.1:82\"\n";
        let other_config = FleetConfig::parse(&TomlSource::from_text("fleet.toml", other_text)).unwrap();
        records.apply_document(&other_config, time_from_seconds(60), random_source).unwrap();
        assert_eq!(drain_record(&records, "s1"), None);
    }

    #[test]
    fn unknown_or_last_server_cannot_be_drained() {
        let config_with_both = fleet_config_with_servers(&["s1", "s2"], API_SERVICE_TOML);
        let mut records = records_with_applied_config(&config_with_both);
        let check_drain = |records: &FleetRecords, request: ServerDrainRequest| {
            let fleet = Fleet::new(&config_with_both, records);
            let check_result = request.check(&fleet, |service, id| fleet.is_server_eligible(service, id));
            check_result.map_err(|drain_error| drain_error.to_string())
        };
        assert_eq!(
            check_drain(&records, drain_request("s3", &[])).unwrap_err(),
            "server \"s3\" does not exist in the fleet's document"
        );
        assert_eq!(
            check_drain(&records, drain_request("s2", &["api"])).unwrap_err(),
            "server \"s2\" is not in service \"api\": expected web"
        );
        let expected_error = "no other server of api takes new connections: expected one, or `force`";
        assert_eq!(check_drain(&records, drain_request("s1", &[])).unwrap_err(), expected_error);
        assert_eq!(check_drain(&records, drain_request("s1", &["web"])), Ok(()));
        assert_eq!(
            check_drain(&records, ServerDrainRequest { may_drain_last_server: true, ..drain_request("s1", &[]) }),
            Ok(())
        );
        records.drain_server(&drain_request("s1", &[]), 2, time_from_seconds(1));
        // The server takes no new connections already, so draining it again is allowed.
        assert_eq!(check_drain(&records, drain_request("s1", &[])), Ok(()));
        let expected_error = "no other server of web takes new connections: expected one, or `force`";
        assert_eq!(check_drain(&records, drain_request("s2", &[])).unwrap_err(), expected_error);
    }
}
