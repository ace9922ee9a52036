//! Persistent state of the fleet, with its ids and secrets. This module does no I/O, because the store writes the
//! state.
//!
//! A server's id is not reused while a cookie may carry it. A server that leaves the document or a pool stays on record
//! until `max_connection_lifetime` has passed, and established connections still reach it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::AuditEntry;
use coreward_config::{Diagnostics, Span};
use coreward_model::ServerId;
use coreward_model::bucket_history::BucketHistory;
use coreward_model::connection_table::TableOwnerNumber;
use coreward_model::consistency::CookieStamper;
use coreward_model::lb_stamping;
use coreward_model::rss::{RssKey, uniform_below};
use coreward_model::vlan::Vlan;
use coreward_wire::ServiceIndex;
use rand::Rng;

use crate::clock::round_down_to_seconds;
use crate::config::FleetConfig;
use crate::key_ring::CookieKeyRing;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetRecords {
    /// Number that increases with every change of the records or the configuration.
    pub generation: u64,
    pub key_ring: CookieKeyRing,
    pub rss_key: RssKey,
    pub services: BTreeMap<String, ServiceRecord>,
    pub servers: BTreeMap<ServerId, ServerRecord>,
    pub load_balancers: BTreeMap<String, LoadBalancerRecord>,
    pub document: FleetDocument,
    pub audit_log: Arc<Vec<AuditEntry>>,
    /// Time of the records' last write, by the records' clock (whole seconds since 1970), or `None` if it is unknown.
    pub last_write_at: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainRecord {
    /// Time of the last change of the drain, by the records' clock (whole seconds since 1970).
    pub changed_at: Duration,
    /// Generation of the configuration that began the drain. A load balancer that has confirmed this generation sends
    /// the server no new connections.
    pub generation: u64,
    /// Names of the services in which the server is drained, or `None` for all services, including future ones.
    pub services: Option<BTreeSet<String>>,
}

impl DrainRecord {
    pub fn covers_service(&self, service: &str) -> bool {
        self.services.as_ref().is_none_or(|services| services.contains(service))
    }
}

/// The active fleet document, including its comments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FleetDocument {
    /// Number that increases with every change of the text, or 0 if there is no document yet.
    pub generation: u64,
    /// Text of the document, in TOML.
    pub text: Arc<str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadBalancerRecord {
    /// Number that identifies the load balancer's connection table in cookies, or `None` if all numbers were in use.
    pub owner_number: Option<TableOwnerNumber>,
    pub address: Option<IpAddr>,
    /// Time at which the load balancer disconnected (whole seconds since 1970), or `None` while it is connected.
    pub disconnected_at: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceRecord {
    pub index: ServiceIndex,
    /// Seed of the policy's hash keys, and of the key that masks the time in TSvals if load balancers stamp them.
    pub hash_seed: u64,
    /// Current and previous server of each bucket of the service.
    pub bucket_history: BucketHistory,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerRecord {
    pub name: String,
    pub address: IpAddr,
    /// Whether the fleet document contains the server.
    pub is_in_document: bool,
    /// Memberships by service name, for all services whose cookies may contain the server's id.
    pub memberships: BTreeMap<String, ServiceMembership>,
    pub drain: Option<DrainRecord>,
    /// Racks that may report for the server, or `None` for the fleet's racks. Kept after the server left the document.
    pub allowed_racks: Option<BTreeSet<String>>,
    /// VLAN of the frames to the server. Kept after the server left the document.
    pub vlan: Vlan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceMembership {
    /// The server is in the service's pool.
    Present,
    /// The server left the pool at this time (whole seconds since 1970, as stored).
    LeftAt(Duration),
}

impl FleetRecords {
    pub fn generate(now: Duration, random: &mut impl Rng) -> Self {
        Self {
            generation: 0,
            key_ring: CookieKeyRing::generate(now, random),
            rss_key: RssKey::random(random),
            services: BTreeMap::new(),
            servers: BTreeMap::new(),
            load_balancers: BTreeMap::new(),
            document: FleetDocument::default(),
            audit_log: Arc::default(),
            last_write_at: Some(round_down_to_seconds(now)),
        }
    }

    /// Applies a fleet document to the records. Fails without a change if an id that the operator chose still belongs
    /// to another server, or if no id is free.
    pub fn apply_document(
        &mut self,
        config: &FleetConfig,
        now: Duration,
        random: &mut impl Rng,
    ) -> Result<(), Diagnostics> {
        let mut new_records = self.clone();
        new_records.remove_expired(config.max_connection_lifetime, now);
        new_records.update_service_records(config, random);
        let server_ids = new_records.assign_server_ids(config, random)?;
        new_records.record_servers_and_memberships(config, &server_ids, now);
        new_records.generation += 1;
        let document_text = config.source().text();
        if *document_text != new_records.document.text {
            new_records.document =
                FleetDocument { generation: new_records.document.generation + 1, text: document_text.clone() };
        }
        *self = new_records;
        Ok(())
    }

    /// Records a load balancer with its address. A new load balancer gets the first free table number. Returns whether
    /// the records have changed.
    pub fn register_load_balancer(&mut self, name: &str, address: Option<IpAddr>) -> bool {
        if let Some(record) = self.load_balancers.get_mut(name) {
            record.disconnected_at = None;
            return std::mem::replace(&mut record.address, address) != address;
        }
        let used_numbers: HashSet<TableOwnerNumber> =
            self.load_balancers.values().filter_map(|record| record.owner_number).collect();
        let owner_number = TableOwnerNumber::all().find(|number| !used_numbers.contains(number));
        self.load_balancers
            .insert(name.to_owned(), LoadBalancerRecord { owner_number, address, disconnected_at: None });
        true
    }

    /// Removes the record of a load balancer, which frees its table number. Returns whether the record existed.
    pub fn forget_load_balancer(&mut self, name: &str) -> bool {
        self.load_balancers.remove(name).is_some()
    }

    pub fn record_load_balancer_disconnect(&mut self, name: &str, now: Duration) {
        if let Some(record) = self.load_balancers.get_mut(name) {
            record.disconnected_at.get_or_insert(round_down_to_seconds(now));
        }
    }

    /// Removes former load balancers, servers and memberships whose cookies have expired. Returns whether the records
    /// have changed.
    pub fn remove_expired(&mut self, max_connection_lifetime: Duration, now: Duration) -> bool {
        let previous_balancer_count = self.load_balancers.len();
        self.load_balancers.retain(|_, record| {
            record.disconnected_at.is_none_or(|left_at| now.saturating_sub(left_at) < max_connection_lifetime)
        });
        let previous_servers = self.servers.clone();
        for server in self.servers.values_mut() {
            server.memberships.retain(|_, membership| match membership {
                ServiceMembership::Present => true,
                ServiceMembership::LeftAt(left_at) => now.saturating_sub(*left_at) < max_connection_lifetime,
            });
        }
        self.servers.retain(|_, server| server.is_id_in_use());
        self.servers != previous_servers || self.load_balancers.len() != previous_balancer_count
    }

    fn update_service_records(&mut self, config: &FleetConfig, random: &mut impl Rng) {
        let listed_names: HashSet<&str> = config.services.iter().map(|service| service.name.as_str()).collect();
        self.services.retain(|name, _| listed_names.contains(name.as_str()));
        let mut used_indexes: HashSet<ServiceIndex> = self.services.values().map(|service| service.index).collect();
        for service in &config.services {
            if self.services.contains_key(&service.name) {
                continue;
            }
            let free_index = (0..ServiceIndex::COUNT as u32)
                .filter_map(ServiceIndex::new)
                .find(|index| !used_indexes.contains(index))
                .expect("the configuration has at most as many services as indexes");
            used_indexes.insert(free_index);
            self.services.insert(
                service.name.clone(),
                ServiceRecord {
                    index: free_index,
                    hash_seed: random.next_u64(),
                    bucket_history: BucketHistory::default(),
                },
            );
        }
    }

    /// Returns the id of each server in `config`: the operator's choice, the previous id, or a random free id.
    fn assign_server_ids(&mut self, config: &FleetConfig, random: &mut impl Rng) -> Result<Vec<ServerId>, Diagnostics> {
        let previous_ids = self.server_ids_by_name();
        let lb_stamped_server_positions = lb_stamped_server_positions(config);
        let mut free_ids = self.free_server_ids(config);
        let mut server_ids = Vec::with_capacity(config.servers.len());
        let mut mistakes: Vec<(Span, String)> = Vec::new();
        for (position, server) in config.servers.iter().enumerate() {
            let id_limit = if lb_stamped_server_positions.contains(&position) {
                lb_stamping::STAMPABLE_SERVER_ID_COUNT
            } else {
                ServerId::COUNT as u64
            };
            let previous_id = previous_ids.get(&server.name).filter(|id| u64::from(id.get()) < id_limit);
            let id = match (&server.id, previous_id) {
                (Some((id, span)), _) => {
                    self.validate_configured_id(&server.name, *id).map_err(|message| (span.clone(), message))
                }
                (None, Some(id)) => Ok(*id),
                (None, None) => draw_server_id(&mut free_ids, id_limit, random).ok_or_else(|| {
                    let message = format!(
                        "no server id is free for {:?}: all {id_limit} are in use, or reserved for connections of \
                         servers that left",
                        server.name,
                    );
                    (server.span.clone(), message)
                }),
            };
            match id {
                Ok(id) => server_ids.push(id),
                Err(mistake) => mistakes.push(mistake),
            }
        }
        if mistakes.is_empty() { Ok(server_ids) } else { Err(config.diagnostics_for_mistakes(mistakes)) }
    }

    /// Returns the configured id, or the reason why the server cannot have it yet.
    fn validate_configured_id(&self, name: &str, id: ServerId) -> Result<ServerId, String> {
        let Some(owner) = self.servers.get(&id).filter(|owner| owner.name != name) else {
            return Ok(id);
        };
        Err(format!(
            "server id {id} belongs to server {:?}, whose connections may still carry it: expected one that is free, \
             or none to have one drawn",
            owner.name
        ))
    }

    /// Returns server ids by server name. If the operator changed a server's id, the map has the id in the document.
    fn server_ids_by_name(&self) -> HashMap<String, ServerId> {
        let mut ids_by_name = HashMap::new();
        for (id, server) in &self.servers {
            if server.is_in_document || !ids_by_name.contains_key(&server.name) {
                ids_by_name.insert(server.name.clone(), *id);
            }
        }
        ids_by_name
    }

    fn free_server_ids(&self, config: &FleetConfig) -> Vec<ServerId> {
        let configured_ids: HashSet<ServerId> =
            config.servers.iter().filter_map(|s| s.id.as_ref().map(|id| id.0)).collect();
        (0..ServerId::COUNT as u64)
            .filter_map(|id| ServerId::try_from(id).ok())
            .filter(|id| !self.servers.contains_key(id) && !configured_ids.contains(id))
            .collect()
    }

    /// Records the document's servers and their memberships in services. `ids` are the ids of `config.servers`, in the
    /// same order.
    fn record_servers_and_memberships(&mut self, config: &FleetConfig, ids: &[ServerId], now: Duration) {
        let mut remaining_drains = self.remaining_drains(config);
        for server in self.servers.values_mut() {
            server.is_in_document = false;
            server.drain = None;
            for membership in
                server.memberships.values_mut().filter(|membership| **membership == ServiceMembership::Present)
            {
                *membership = ServiceMembership::LeftAt(round_down_to_seconds(now));
            }
        }
        for (server, id) in config.servers.iter().zip(ids) {
            let memberships = self.servers.remove(id).map_or_else(BTreeMap::new, |record| record.memberships);
            let server_record = ServerRecord {
                name: server.name.clone(),
                address: server.address,
                is_in_document: true,
                memberships,
                drain: remaining_drains.remove(&server.name),
                allowed_racks: server.allowed_racks.clone(),
                vlan: server.vlan,
            };
            self.servers.insert(*id, server_record);
        }
        for service in &config.services {
            for id in service.server_positions.iter().map(|position| ids[*position]) {
                let server_record =
                    self.servers.get_mut(&id).expect("every server of the file has just been written down");
                server_record.memberships.insert(service.name.clone(), ServiceMembership::Present);
            }
        }
        self.servers.retain(|_, server| server.is_id_in_use());
    }
}

impl ServerRecord {
    /// Returns whether the server is in the document, or whether cookies may contain its id.
    fn is_id_in_use(&self) -> bool {
        self.is_in_document || !self.memberships.is_empty()
    }
}

/// Returns the positions in `config.servers` of servers whose ids must fit into cookies that load balancers stamp.
fn lb_stamped_server_positions(config: &FleetConfig) -> HashSet<usize> {
    let lb_stamped_services =
        config.services.iter().filter(|service| service.settings.timestamps == CookieStamper::LoadBalancer);
    lb_stamped_services.flat_map(|service| service.server_positions.iter().copied()).collect()
}

/// Removes a random id below `id_limit` from the ascending `free_ids` and returns it. The cookie can hold ids below
/// `id_limit`. Random ids prevent clients from enumerating the servers by flipping bits of a cookie.
fn draw_server_id(free_ids: &mut Vec<ServerId>, id_limit: u64, random: &mut impl Rng) -> Option<ServerId> {
    let candidate_count = free_ids.partition_point(|id| u64::from(id.get()) < id_limit);
    let candidate_count = u32::try_from(candidate_count).ok().filter(|count| *count > 0)?;
    Some(free_ids.remove(uniform_below(random, candidate_count) as usize))
}

#[cfg(test)]
mod tests {
    use coreward_config::TomlSource;
    use coreward_model::rss::seeded_rng;
    use proptest::prelude::*;

    use super::*;

    /// Returns a document whose `servers` are all in the service `web`, and whose `api_servers` are also in `api`.
    fn two_service_config(servers: &[&str], api_servers: &[&str]) -> FleetConfig {
        let mut text = String::new();
        for server in servers {
            // "s5=7" is server s5 with the id 7.
            let (name, id) = server.split_once('=').map_or((*server, None), |(name, id)| (name, Some(id)));
            let server_number: u8 = name[1..].parse().unwrap();
            text += &format!("[[server]]\nname = \"{name}\"\naddress = \"10.2.0.{server_number}\"\n");
            text += &id.map_or(String::new(), |id| format!("id = {id}\n"));
        }
        text += "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
        if !api_servers.is_empty() {
            text += &format!("[[service]]\nname = \"api\"\nvip = \"10.200.0.1:81\"\nservers = {api_servers:?}\n");
        }
        FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap()
    }

    fn time_at_second(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn id_numbers_by_name(records: &FleetRecords) -> BTreeMap<String, u16> {
        records.servers.iter().map(|(id, server)| (server.name.clone(), id.get())).collect()
    }

    #[test]
    fn servers_keep_ids_across_documents() {
        let random = &mut seeded_rng(1, 0);
        let mut records = FleetRecords::generate(time_at_second(0), random);
        records.apply_document(&two_service_config(&["s1", "s2", "s3=7"], &["s1"]), time_at_second(0), random).unwrap();
        let ids_before = id_numbers_by_name(&records);
        assert_eq!(ids_before["s3"], 7);
        let services_before = records.services.clone();
        records
            .apply_document(&two_service_config(&["s1", "s3=7", "s4"], &["s1"]), time_at_second(10), random)
            .unwrap();
        assert_eq!(
            records.servers.values().find(|s| s.name == "s2").unwrap().memberships["web"],
            ServiceMembership::LeftAt(time_at_second(10))
        );
        records
            .apply_document(&two_service_config(&["s4", "s3", "s2", "s1"], &["s1"]), time_at_second(20), random)
            .unwrap();
        let ids_after = id_numbers_by_name(&records);
        assert!(ids_before.iter().all(|(name, id)| ids_after[name] == *id), "{ids_before:?} {ids_after:?}");
        assert!(
            records.servers.values().all(|s| s.is_in_document && s.memberships["web"] == ServiceMembership::Present)
        );
        assert_eq!(records.services, services_before);
        assert_eq!(records.generation, 3);
    }

    #[test]
    fn id_of_departed_server_is_reserved_until_it_expires() {
        let random = &mut seeded_rng(1, 0);
        let mut records = FleetRecords::generate(time_at_second(0), random);
        records.apply_document(&two_service_config(&["s1", "s2=7"], &[]), time_at_second(0), random).unwrap();
        records.apply_document(&two_service_config(&["s1"], &[]), time_at_second(100), random).unwrap();
        let reserved_id_error =
            records.apply_document(&two_service_config(&["s1", "s3=7"], &[]), time_at_second(200), random).unwrap_err();
        assert_eq!(
            reserved_id_error.to_string(),
            "fleet.toml:7:6: key `server.id`: server id 7 belongs to server \"s2\", whose connections may still carry \
             it: expected one that is free, or none to have one drawn"
        );
        assert_eq!(records.generation, 2, "a rejected configuration changes nothing");
        assert!(!records.remove_expired(time_at_second(86_400), time_at_second(86_499)));
        assert!(records.remove_expired(time_at_second(86_400), time_at_second(86_500)));
        records.apply_document(&two_service_config(&["s1", "s3=7"], &[]), time_at_second(86_500), random).unwrap();
        assert_eq!(id_numbers_by_name(&records)["s3"], 7);
    }

    #[test]
    fn old_id_is_reserved_after_a_server_changes_its_id() {
        let random = &mut seeded_rng(1, 0);
        let mut records = FleetRecords::generate(time_at_second(0), random);
        records.apply_document(&two_service_config(&["s1=5"], &[]), time_at_second(0), random).unwrap();
        records.apply_document(&two_service_config(&["s1=6"], &[]), time_at_second(10), random).unwrap();
        let server_states: Vec<_> =
            records.servers.iter().map(|(id, s)| (id.get(), s.is_in_document, s.memberships["web"])).collect();
        assert_eq!(
            server_states,
            [(5, false, ServiceMembership::LeftAt(time_at_second(10))), (6, true, ServiceMembership::Present)]
        );
        assert_eq!(records.server_ids_by_name()["s1"].get(), 6);
    }

    #[test]
    fn server_leaves_one_service_and_stays_in_another() {
        let random = &mut seeded_rng(1, 0);
        let mut records = FleetRecords::generate(time_at_second(0), random);
        records.apply_document(&two_service_config(&["s1", "s2"], &["s1", "s2"]), time_at_second(0), random).unwrap();
        records.apply_document(&two_service_config(&["s1", "s2"], &["s2"]), time_at_second(10), random).unwrap();
        let s1 = records.servers.values().find(|s| s.name == "s1").unwrap();
        assert_eq!(
            (s1.memberships["web"], s1.memberships["api"]),
            (ServiceMembership::Present, ServiceMembership::LeftAt(time_at_second(10)))
        );
    }

    /// A server of a service with LB-side stamping gets an id that fits the cookie. Old connections keep the old id.
    #[test]
    fn servers_of_lb_stamped_services_get_ids_that_fit_the_cookie() {
        let random = &mut seeded_rng(1, 0);
        let mut records = FleetRecords::generate(time_at_second(0), random);
        let config_without_lb_stamping = two_service_config(&["s1", "s2", "s3=9000"], &["s1", "s2"]);
        records.apply_document(&config_without_lb_stamping, time_at_second(0), random).unwrap();
        let ids_before = id_numbers_by_name(&records);
        assert!(ids_before["s1"] >= 2048, "{ids_before:?}: choose another seed");
        let mut text = String::new();
        for server in ["s1", "s2", "s3", "s4"] {
            text += &format!("[[server]]\nname = \"{server}\"\naddress = \"10.2.0.{}\"\n", &server[1..]);
        }
        text += "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
        text +=
            "[[service]]\nname = \"old\"\nvip = \"10.200.0.1:81\"\ntimestamps = \"lb\"\nservers = [\"s1\", \"s4\"]\n";
        let config_with_lb_stamping = FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap();
        records.apply_document(&config_with_lb_stamping, time_at_second(10), random).unwrap();
        let ids_by_name = records.server_ids_by_name();
        let current_server_id = |name: &str| ids_by_name[name].get();
        assert!(current_server_id("s1") < 2048 && current_server_id("s4") < 2048, "{ids_by_name:?}");
        assert_eq!((current_server_id("s2"), current_server_id("s3")), (ids_before["s2"], 9000));
        let old_server_record = &records.servers[&ServerId::try_from(u64::from(ids_before["s1"])).unwrap()];
        assert_eq!(
            (old_server_record.is_in_document, old_server_record.memberships["web"]),
            (false, ServiceMembership::LeftAt(time_at_second(10)))
        );
        records.apply_document(&config_with_lb_stamping, time_at_second(20), random).unwrap();
        assert_eq!(records.server_ids_by_name(), ids_by_name, "they are drawn once");
    }

    #[test]
    fn error_without_free_ids_names_the_server() {
        let random = &mut seeded_rng(1, 0);
        let mut records = FleetRecords::generate(time_at_second(0), random);
        for id in 0..ServerId::COUNT as u64 {
            let memberships = BTreeMap::from([("web".to_owned(), ServiceMembership::LeftAt(time_at_second(0)))]);
            let departed_server = ServerRecord {
                name: format!("g{id}"),
                address: [10, 0, 0, 1].into(),
                is_in_document: false,
                memberships,
                drain: None,
                allowed_racks: None,
                vlan: Vlan::UNTAGGED,
            };
            records.servers.insert(id.try_into().unwrap(), departed_server);
        }
        let error = records
            .apply_document(&two_service_config(&["s1"], &[]), time_at_second(1), random)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("fleet.toml:1:1: key `server`: no server id is free for \"s1\""), "{error}");
    }

    #[test]
    fn load_balancers_keep_their_owner_numbers() {
        let mut records = FleetRecords::generate(time_at_second(0), &mut seeded_rng(1, 0));
        let owner_number =
            |records: &FleetRecords, name: &str| records.load_balancers[name].owner_number.map(TableOwnerNumber::get);
        assert!(
            records.register_load_balancer("lb1", None)
                && records.register_load_balancer("lb2", Some([10, 2, 0, 2].into()))
        );
        assert_eq!((owner_number(&records, "lb1"), owner_number(&records, "lb2")), (Some(0), Some(1)));
        records.record_load_balancer_disconnect("lb1", time_at_second(10));
        // It returns unchanged, then with another address.
        assert!(!records.register_load_balancer("lb1", None));
        assert_eq!(records.load_balancers["lb1"].disconnected_at, None);
        assert!(records.register_load_balancer("lb1", Some([10, 2, 0, 1].into())));
        for n in 3..=17 {
            records.register_load_balancer(&format!("lb{n}"), None);
        }
        assert_eq!((owner_number(&records, "lb16"), owner_number(&records, "lb17")), (Some(15), None));
        // After a day it is forgotten, and its number is reused.
        records.record_load_balancer_disconnect("lb2", time_at_second(100));
        assert!(!records.remove_expired(time_at_second(86_400), time_at_second(86_499)));
        assert!(records.remove_expired(time_at_second(86_400), time_at_second(86_500)));
        records.register_load_balancer("lb18", None);
        assert_eq!((owner_number(&records, "lb18"), owner_number(&records, "lb1")), (Some(1), Some(0)));
    }

    proptest! {
        /// No server id is assigned to another server while cookies may contain it.
        #[test]
        fn no_reserved_id_is_assigned_to_another_server(
            seed: u64,
            pools in prop::collection::vec(prop::collection::btree_set(1u8..20, 0..10), 1..12),
        ) {
            let random = &mut seeded_rng(seed, 0);
            let mut records = FleetRecords::generate(time_at_second(0), random);
            let mut names_by_id: HashMap<ServerId, String> = HashMap::new();
            for (step, pool) in pools.iter().enumerate() {
                let server_names: Vec<String> = pool.iter().map(|n| format!("s{n}")).collect();
                let server_names: Vec<&str> = server_names.iter().map(String::as_str).collect();
                let config = two_service_config(&server_names, &[]);
                records.apply_document(&config, time_at_second(step as u64 * 60), random).unwrap();
                for (id, server) in &records.servers {
                    prop_assert_eq!(names_by_id.entry(*id).or_insert_with(|| server.name.clone()), &server.name);
                }
            }
        }
    }
}
