//! Persistent state: ids and secrets. Pure; `store` writes it.
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
use coreward_model::connection_table::OwnerNumber;
use coreward_model::consistency::Timestamps;
use coreward_model::lb_stamping;
use coreward_model::rss::{RssKey, uniform_below};
use coreward_model::vlan::Vlan;
use coreward_wire::ServiceIndex;
use rand::Rng;

use crate::clock::whole_seconds;
use crate::config::FleetConfig;
use crate::key_ring::KeyRing;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Records {
    /// Number that increases with every change of the records or the configuration.
    pub generation: u64,
    pub key_ring: KeyRing,
    pub rss_key: RssKey,
    pub services: BTreeMap<String, ServiceRecord>,
    pub servers: BTreeMap<ServerId, ServerRecord>,
    pub load_balancers: BTreeMap<String, LoadBalancerRecord>,
    pub document: Document,
    pub audit: Arc<Vec<AuditEntry>>,
    /// Time of the last write, by the records' clock (whole seconds since 1970); `None`: unknown.
    pub last_write_at: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainRecord {
    /// Time of the last change of the drain, by the records' clock (whole seconds since 1970).
    pub since: Duration,
    /// Generation of the configuration that began the drain. A load balancer that has confirmed it sends no new
    /// connections.
    pub generation: u64,
    /// Names of the services in which the server is drained; `None`: all services, including future ones.
    pub services: Option<BTreeSet<String>>,
}

impl DrainRecord {
    pub fn covers(&self, service: &str) -> bool {
        self.services.as_ref().is_none_or(|services| services.contains(service))
    }
}

/// Fleet document in force, including its comments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Document {
    /// Number that increases with every change of the text; 0: there is no document yet.
    pub generation: u64,
    /// Text of the document, in TOML.
    pub text: Arc<str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadBalancerRecord {
    /// Number of the load balancer's connection table, which cookies contain; `None`: all numbers were in use.
    pub owner: Option<OwnerNumber>,
    pub address: Option<IpAddr>,
    /// Time at which the load balancer disconnected (whole seconds since 1970); `None`: it is connected.
    pub left_at: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceRecord {
    pub index: ServiceIndex,
    /// Seed from which the policy's hash keys and the time key of LB-side stamping are derived.
    pub seed: u64,
    /// Current and previous server of each bucket of the service.
    pub bucket_history: BucketHistory,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerRecord {
    pub name: String,
    pub address: IpAddr,
    /// Whether the fleet document contains the server.
    pub is_in_document: bool,
    /// Services whose cookies may contain the server's id.
    pub services: BTreeMap<String, Membership>,
    pub drain: Option<DrainRecord>,
    /// Racks that may report for the server, from its newest entry in the document; `None`: the fleet's racks.
    pub racks: Option<BTreeSet<String>>,
    /// VLAN of the frames to the server, from its newest entry in the document.
    pub vlan: Vlan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Membership {
    /// The server is in the service's pool.
    Present,
    /// The server left the pool at this time (whole seconds since 1970, as stored).
    LeftAt(Duration),
}

impl Records {
    pub fn generate(now: Duration, random: &mut impl Rng) -> Self {
        Self {
            generation: 0,
            key_ring: KeyRing::generate(now, random),
            rss_key: RssKey::random(random),
            services: BTreeMap::new(),
            servers: BTreeMap::new(),
            load_balancers: BTreeMap::new(),
            document: Document::default(),
            audit: Arc::default(),
            last_write_at: Some(whole_seconds(now)),
        }
    }

    /// Applies a document. Fails without a change if chosen ids still belong to other servers, or no id is free.
    pub fn apply(&mut self, config: &FleetConfig, now: Duration, random: &mut impl Rng) -> Result<(), Diagnostics> {
        let mut next = self.clone();
        next.remove_expired(config.max_connection_lifetime, now);
        next.apply_services(config, random);
        let ids = next.apply_servers(config, random)?;
        next.apply_memberships(config, &ids, now);
        next.generation += 1;
        let text = config.source().text();
        if *text != next.document.text {
            next.document = Document { generation: next.document.generation + 1, text: text.clone() };
        }
        *self = next;
        Ok(())
    }

    /// Records a load balancer with its address. A new name gets the first free number. Returns whether the records
    /// have changed.
    pub fn register_load_balancer(&mut self, name: &str, address: Option<IpAddr>) -> bool {
        if let Some(known) = self.load_balancers.get_mut(name) {
            known.left_at = None;
            return std::mem::replace(&mut known.address, address) != address;
        }
        let taken: HashSet<OwnerNumber> = self.load_balancers.values().filter_map(|known| known.owner).collect();
        let owner = OwnerNumber::all().find(|number| !taken.contains(number));
        self.load_balancers.insert(name.to_owned(), LoadBalancerRecord { owner, address, left_at: None });
        true
    }

    /// Removes the record of a load balancer, which frees its number. Returns whether there was one.
    pub fn forget_load_balancer(&mut self, name: &str) -> bool {
        self.load_balancers.remove(name).is_some()
    }

    pub fn record_disconnect(&mut self, name: &str, now: Duration) {
        if let Some(known) = self.load_balancers.get_mut(name) {
            known.left_at.get_or_insert(whole_seconds(now));
        }
    }

    /// Removes load balancers and servers whose cookies have expired. Returns whether anything was removed.
    pub fn remove_expired(&mut self, max_connection_lifetime: Duration, now: Duration) -> bool {
        let load_balancers = self.load_balancers.len();
        self.load_balancers
            .retain(|_, known| known.left_at.is_none_or(|left| now.saturating_sub(left) < max_connection_lifetime));
        let before = self.servers.clone();
        for server in self.servers.values_mut() {
            server.services.retain(|_, membership| match membership {
                Membership::Present => true,
                Membership::LeftAt(left) => now.saturating_sub(*left) < max_connection_lifetime,
            });
        }
        self.servers.retain(|_, server| server.has_id_in_use());
        self.servers != before || self.load_balancers.len() != load_balancers
    }

    fn apply_services(&mut self, config: &FleetConfig, random: &mut impl Rng) {
        let listed: HashSet<&str> = config.services.iter().map(|service| service.name.as_str()).collect();
        self.services.retain(|name, _| listed.contains(name.as_str()));
        let mut taken: HashSet<ServiceIndex> = self.services.values().map(|service| service.index).collect();
        for service in &config.services {
            if self.services.contains_key(&service.name) {
                continue;
            }
            let index = (0..ServiceIndex::COUNT as u32)
                .filter_map(ServiceIndex::new)
                .find(|index| !taken.contains(index))
                .expect("the configuration has at most as many services as indexes");
            taken.insert(index);
            self.services.insert(
                service.name.clone(),
                ServiceRecord { index, seed: random.next_u64(), bucket_history: BucketHistory::default() },
            );
        }
    }

    /// Returns the id of every server: the one that the operator chose, the previous one, or a newly drawn one.
    fn apply_servers(&mut self, config: &FleetConfig, random: &mut impl Rng) -> Result<Vec<ServerId>, Diagnostics> {
        let had = self.ids_by_name();
        let lb_stamped = lb_stamped_servers(config);
        let mut free = self.free_ids(config);
        let mut ids = Vec::with_capacity(config.servers.len());
        let mut wrong: Vec<(Span, String)> = Vec::new();
        for (position, server) in config.servers.iter().enumerate() {
            let room =
                if lb_stamped.contains(&position) { lb_stamping::SERVER_ID_COUNT } else { ServerId::COUNT as u64 };
            let had = had.get(&server.name).filter(|id| u64::from(id.get()) < room);
            let id = match (&server.id, had) {
                (Some((id, span)), _) => self.chosen_id(&server.name, *id).map_err(|message| (span.clone(), message)),
                (None, Some(id)) => Ok(*id),
                (None, None) => draw_server_id(&mut free, room, random).ok_or_else(|| {
                    let message = format!(
                        "no server id is free for {:?}: all {room} are in use, or reserved for connections of servers \
                         that \
                         left",
                        server.name,
                    );
                    (server.span.clone(), message)
                }),
            };
            match id {
                Ok(id) => ids.push(id),
                Err(mistake) => wrong.push(mistake),
            }
        }
        if wrong.is_empty() { Ok(ids) } else { Err(config.diagnostics(wrong)) }
    }

    /// Returns the id that the operator chose, or the reason why the server cannot have it yet.
    fn chosen_id(&self, name: &str, id: ServerId) -> Result<ServerId, String> {
        let Some(owner) = self.servers.get(&id).filter(|owner| owner.name != name) else {
            return Ok(id);
        };
        Err(format!(
            "server id {id} belongs to server {:?}, whose connections may still carry it: expected one that is free, \
             or \
             none to have one drawn",
            owner.name
        ))
    }

    /// Returns server ids by name. If a name has two ids (the operator changed it), the one in the document counts.
    fn ids_by_name(&self) -> HashMap<String, ServerId> {
        let mut by_name = HashMap::new();
        for (id, server) in &self.servers {
            if server.is_in_document || !by_name.contains_key(&server.name) {
                by_name.insert(server.name.clone(), *id);
            }
        }
        by_name
    }

    fn free_ids(&self, config: &FleetConfig) -> Vec<ServerId> {
        let chosen: HashSet<ServerId> = config.servers.iter().filter_map(|s| s.id.as_ref().map(|id| id.0)).collect();
        (0..ServerId::COUNT as u64)
            .filter_map(|id| ServerId::try_from(id).ok())
            .filter(|id| !self.servers.contains_key(id) && !chosen.contains(id))
            .collect()
    }

    /// Records the pools of all services. `ids`: ids of the servers in `config.servers`, in the same order.
    fn apply_memberships(&mut self, config: &FleetConfig, ids: &[ServerId], now: Duration) {
        let mut drains = self.remaining_drains(config);
        for server in self.servers.values_mut() {
            server.is_in_document = false;
            server.drain = None;
            for membership in server.services.values_mut().filter(|membership| **membership == Membership::Present) {
                *membership = Membership::LeftAt(whole_seconds(now));
            }
        }
        for (server, id) in config.servers.iter().zip(ids) {
            let services = self.servers.remove(id).map_or_else(BTreeMap::new, |record| record.services);
            let record = ServerRecord {
                name: server.name.clone(),
                address: server.address,
                is_in_document: true,
                services,
                drain: drains.remove(&server.name),
                racks: server.racks.clone(),
                vlan: server.vlan,
            };
            self.servers.insert(*id, record);
        }
        for service in &config.services {
            for id in service.servers.iter().map(|position| ids[*position]) {
                let record = self.servers.get_mut(&id).expect("every server of the file has just been written down");
                record.services.insert(service.name.clone(), Membership::Present);
            }
        }
        self.servers.retain(|_, server| server.has_id_in_use());
    }
}

impl ServerRecord {
    /// Returns whether the server is in the document, or cookies may contain its id.
    fn has_id_in_use(&self) -> bool {
        self.is_in_document || !self.services.is_empty()
    }
}

/// Returns the positions of servers whose ids must fit the cookie of LB-side stamping.
fn lb_stamped_servers(config: &FleetConfig) -> HashSet<usize> {
    let lb_stamped = config.services.iter().filter(|service| service.mode.timestamps == Timestamps::LoadBalancer);
    lb_stamped.flat_map(|service| service.servers.iter().copied()).collect()
}

/// Draws one of the ids in `free_ids` at random, so that flipped bits of a cookie do not enumerate the pool.
/// `id_limit`: number of ids that the cookie can hold. `free_ids` stays in ascending order.
fn draw_server_id(free: &mut Vec<ServerId>, room: u64, random: &mut impl Rng) -> Option<ServerId> {
    let count = free.partition_point(|id| u64::from(id.get()) < room);
    let count = u32::try_from(count).ok().filter(|count| *count > 0)?;
    Some(free.remove(uniform_below(random, count) as usize))
}

#[cfg(test)]
mod tests {
    use coreward_config::Source;
    use coreward_model::rss::seeded_rng;
    use proptest::prelude::*;

    use super::*;

    /// Returns a document with the servers `servers` in one service, and those of `other_servers` in another.
    fn config(servers: &[&str], elsewhere: &[&str]) -> FleetConfig {
        let mut text = String::new();
        for server in servers {
            // "s5=7" is server s5 with the id 7.
            let (name, id) = server.split_once('=').map_or((*server, None), |(name, id)| (name, Some(id)));
            let number: u8 = name[1..].parse().unwrap();
            text += &format!("[[server]]\nname = \"{name}\"\naddress = \"10.2.0.{number}\"\n");
            text += &id.map_or(String::new(), |id| format!("id = {id}\n"));
        }
        text += "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
        if !elsewhere.is_empty() {
            text += &format!("[[service]]\nname = \"api\"\nvip = \"10.200.0.1:81\"\nservers = {elsewhere:?}\n");
        }
        FleetConfig::parse(&Source::from_text("fleet.toml", &text)).unwrap()
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn ids(records: &Records) -> BTreeMap<String, u16> {
        records.servers.iter().map(|(id, server)| (server.name.clone(), id.get())).collect()
    }

    #[test]
    fn ids_stay_with_their_servers() {
        let random = &mut seeded_rng(1, 0);
        let mut records = Records::generate(at(0), random);
        records.apply(&config(&["s1", "s2", "s3=7"], &["s1"]), at(0), random).unwrap();
        let before = ids(&records);
        assert_eq!(before["s3"], 7);
        let seeds = records.services.clone();
        records.apply(&config(&["s1", "s3=7", "s4"], &["s1"]), at(10), random).unwrap();
        assert_eq!(
            records.servers.values().find(|s| s.name == "s2").unwrap().services["web"],
            Membership::LeftAt(at(10))
        );
        records.apply(&config(&["s4", "s3", "s2", "s1"], &["s1"]), at(20), random).unwrap();
        let after = ids(&records);
        assert!(before.iter().all(|(name, id)| after[name] == *id), "{before:?} {after:?}");
        assert!(records.servers.values().all(|s| s.is_in_document && s.services["web"] == Membership::Present));
        assert_eq!(records.services, seeds);
        assert_eq!(records.generation, 3);
    }

    #[test]
    fn ids_of_departed_servers_are_reserved_then_free() {
        let random = &mut seeded_rng(1, 0);
        let mut records = Records::generate(at(0), random);
        records.apply(&config(&["s1", "s2=7"], &[]), at(0), random).unwrap();
        records.apply(&config(&["s1"], &[]), at(100), random).unwrap();
        let taken = records.apply(&config(&["s1", "s3=7"], &[]), at(200), random).unwrap_err();
        assert_eq!(
            taken.to_string(),
            "fleet.toml:7:6: key `server.id`: server id 7 belongs to server \"s2\", whose connections may still \
             carry it: expected one that is free, or none to have one drawn"
        );
        assert_eq!(records.generation, 2, "a refused configuration changes nothing");
        assert!(!records.remove_expired(at(86_400), at(86_499)));
        assert!(records.remove_expired(at(86_400), at(86_500)));
        records.apply(&config(&["s1", "s3=7"], &[]), at(86_500), random).unwrap();
        assert_eq!(ids(&records)["s3"], 7);
    }

    #[test]
    fn changed_id_leaves_the_old_one_reserved() {
        let random = &mut seeded_rng(1, 0);
        let mut records = Records::generate(at(0), random);
        records.apply(&config(&["s1=5"], &[]), at(0), random).unwrap();
        records.apply(&config(&["s1=6"], &[]), at(10), random).unwrap();
        let states: Vec<_> =
            records.servers.iter().map(|(id, s)| (id.get(), s.is_in_document, s.services["web"])).collect();
        assert_eq!(states, [(5, false, Membership::LeftAt(at(10))), (6, true, Membership::Present)]);
        assert_eq!(records.ids_by_name()["s1"].get(), 6);
    }

    #[test]
    fn server_leaves_one_service_and_stays_in_another() {
        let random = &mut seeded_rng(1, 0);
        let mut records = Records::generate(at(0), random);
        records.apply(&config(&["s1", "s2"], &["s1", "s2"]), at(0), random).unwrap();
        records.apply(&config(&["s1", "s2"], &["s2"]), at(10), random).unwrap();
        let s1 = records.servers.values().find(|s| s.name == "s1").unwrap();
        assert_eq!((s1.services["web"], s1.services["api"]), (Membership::Present, Membership::LeftAt(at(10))));
    }

    /// A server of a service with LB-side stamping gets an id that fits the cookie; old connections keep the old id.
    #[test]
    fn ids_fit_the_cookie_of_lb_side_stamping() {
        let random = &mut seeded_rng(1, 0);
        let mut records = Records::generate(at(0), random);
        let plain = config(&["s1", "s2", "s3=9000"], &["s1", "s2"]);
        records.apply(&plain, at(0), random).unwrap();
        let before = ids(&records);
        assert!(before["s1"] >= 2048, "{before:?}: choose another seed");
        let mut text = String::new();
        for server in ["s1", "s2", "s3", "s4"] {
            text += &format!("[[server]]\nname = \"{server}\"\naddress = \"10.2.0.{}\"\n", &server[1..]);
        }
        text += "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
        text +=
            "[[service]]\nname = \"old\"\nvip = \"10.200.0.1:81\"\ntimestamps = \"lb\"\nservers = [\"s1\", \"s4\"]\n";
        let lb_stamped = FleetConfig::parse(&Source::from_text("fleet.toml", &text)).unwrap();
        records.apply(&lb_stamped, at(10), random).unwrap();
        let by_name = records.ids_by_name();
        let now = |name: &str| by_name[name].get();
        assert!(now("s1") < 2048 && now("s4") < 2048, "{by_name:?}");
        assert_eq!((now("s2"), now("s3")), (before["s2"], 9000));
        let left = &records.servers[&ServerId::try_from(u64::from(before["s1"])).unwrap()];
        assert_eq!((left.is_in_document, left.services["web"]), (false, Membership::LeftAt(at(10))));
        records.apply(&lb_stamped, at(20), random).unwrap();
        assert_eq!(records.ids_by_name(), by_name, "they are drawn once");
    }

    #[test]
    fn exhausted_ids_error_names_the_server() {
        let random = &mut seeded_rng(1, 0);
        let mut records = Records::generate(at(0), random);
        for id in 0..ServerId::COUNT as u64 {
            let services = BTreeMap::from([("web".to_owned(), Membership::LeftAt(at(0)))]);
            let gone = ServerRecord {
                name: format!("g{id}"),
                address: [10, 0, 0, 1].into(),
                is_in_document: false,
                services,
                drain: None,
                racks: None,
                vlan: Vlan::UNTAGGED,
            };
            records.servers.insert(id.try_into().unwrap(), gone);
        }
        let error = records.apply(&config(&["s1"], &[]), at(1), random).unwrap_err().to_string();
        assert!(error.starts_with("fleet.toml:1:1: key `server`: no server id is free for \"s1\""), "{error}");
    }

    #[test]
    fn load_balancers_keep_their_numbers() {
        let mut records = Records::generate(at(0), &mut seeded_rng(1, 0));
        let owner = |records: &Records, name: &str| records.load_balancers[name].owner.map(OwnerNumber::get);
        assert!(
            records.register_load_balancer("lb1", None)
                && records.register_load_balancer("lb2", Some([10, 2, 0, 2].into()))
        );
        assert_eq!((owner(&records, "lb1"), owner(&records, "lb2")), (Some(0), Some(1)));
        records.record_disconnect("lb1", at(10));
        // It returns unchanged, then with another address.
        assert!(!records.register_load_balancer("lb1", None));
        assert_eq!(records.load_balancers["lb1"].left_at, None);
        assert!(records.register_load_balancer("lb1", Some([10, 2, 0, 1].into())));
        for n in 3..=17 {
            records.register_load_balancer(&format!("lb{n}"), None);
        }
        assert_eq!((owner(&records, "lb16"), owner(&records, "lb17")), (Some(15), None));
        // After a day it is forgotten, and its number is reused.
        records.record_disconnect("lb2", at(100));
        assert!(!records.remove_expired(at(86_400), at(86_499)));
        assert!(records.remove_expired(at(86_400), at(86_500)));
        records.register_load_balancer("lb18", None);
        assert_eq!((owner(&records, "lb18"), owner(&records, "lb1")), (Some(1), Some(0)));
    }

    proptest! {
        /// No server id is assigned to another server within the lifetime of cookies.
        #[test]
        fn no_reserved_id_is_reassigned(
            seed: u64,
            pools in prop::collection::vec(prop::collection::btree_set(1u8..20, 0..10), 1..12),
        ) {
            let random = &mut seeded_rng(seed, 0);
            let mut records = Records::generate(at(0), random);
            let mut owners: HashMap<ServerId, String> = HashMap::new();
            for (step, pool) in pools.iter().enumerate() {
                let names: Vec<String> = pool.iter().map(|n| format!("s{n}")).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                records.apply(&config(&names, &[]), at(step as u64 * 60), random).unwrap();
                for (id, server) in &records.servers {
                    prop_assert_eq!(owners.entry(*id).or_insert_with(|| server.name.clone()), &server.name);
                }
            }
        }
    }
}
