//! A load balancer without a device, and what packets should become of it.

use std::collections::HashMap;
use std::net::Ipv4Addr;

use coreward_dataplane::lb::{COUNTERS, LoadBalancer, Options, Server, ServiceIndex, ToAllRate};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::placement::{BucketCount, Candidate, Core, Member, PlacementTable, Rule, rendezvous};
use coreward_model::rss::{RssKey, uniform_below};
use coreward_model::tuple::Protocol;
use coreward_model::{ServerId, ServiceAddress};
use rand::Rng;

/// linux/bpf.h
pub const XDP_DROP: i32 = 1;
pub const XDP_PASS: i32 = 2;
pub const XDP_TX: i32 = 3;

/// [`super::Tcp`] sends to it.
pub const OWN_MAC: MacAddress = MacAddress([0; 6]);

pub fn id(number: u64) -> ServerId {
    ServerId::try_from(number).unwrap()
}

pub fn service(vip: (Ipv4Addr, u16)) -> ServiceAddress {
    ServiceAddress { socket: vip.into(), protocol: Protocol::Tcp }
}

pub struct Balancer {
    pub lb: LoadBalancer,
    pub services: Vec<ServiceIndex>,
    pub keys: FleetKeys,
    /// Of each server by position of its service.
    pub macs: HashMap<(usize, ServerId), MacAddress>,
    /// The counter of rule ROUND_ROBIN.
    pub turns: u64,
    pub installed: Option<PlacementTable>,
}

impl Balancer {
    pub fn new(vips: &[(Ipv4Addr, u16)], rng: &mut impl Rng) -> Self {
        Self::with(vips, Options::default(), rng)
    }

    pub fn with_to_all_rate(vips: &[(Ipv4Addr, u16)], per_second: u32, burst: u32, rng: &mut impl Rng) -> Self {
        Self::with(vips, Options { to_all: ToAllRate { per_second, burst }, ..Options::default() }, rng)
    }

    fn with(vips: &[(Ipv4Addr, u16)], options: Options, rng: &mut impl Rng) -> Self {
        let mut lb = LoadBalancer::load(options).unwrap();
        lb.set_own_mac(OWN_MAC);
        let addresses: Vec<ServiceAddress> = vips.iter().map(|vip| service(*vip)).collect();
        let services = lb.set_services(&addresses).unwrap();
        let none = CookieKey { k0: 0, k1: 0 };
        let keys = FleetKeys { keys: [none; 2], current: KeyIndex::First };
        let mut balancer = Self { lb, services, keys, macs: HashMap::new(), turns: 0, installed: None };
        balancer.new_keys(rng);
        balancer
    }

    pub fn new_keys(&mut self, rng: &mut impl Rng) {
        let mut key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        self.keys = FleetKeys { keys: [key(), key()], current: KeyIndex::First };
        self.lb.set_keys(&self.keys);
    }

    /// `count` servers with random ids and MAC addresses in the place of those there were.
    pub fn replace_servers(&mut self, service: usize, count: usize, rng: &mut impl Rng) -> Vec<ServerId> {
        for (server, _) in self.lb.servers(self.services[service]) {
            self.lb.remove_server(self.services[service], server);
            self.macs.remove(&(service, server));
        }
        let mut ids: Vec<ServerId> = Vec::new();
        while ids.len() < count {
            let server = id(u64::from(uniform_below(rng, intf::SERVER_ID_COUNT)));
            if self.macs.contains_key(&(service, server)) {
                continue;
            }
            let mut mac = [0; 6];
            rng.fill_bytes(&mut mac);
            mac[0] &= 0xfe;
            self.macs.insert((service, server), MacAddress(mac));
            self.lb.set_server(self.services[service], server, Server { mac: Some(MacAddress(mac)), eligible: true });
            ids.push(server);
        }
        ids.sort();
        ids
    }

    pub fn install(&mut self, service: usize, table: &PlacementTable) {
        self.lb.install_table(self.services[service], table).unwrap();
        self.installed = Some(table.clone());
    }

    pub fn run(&self, frame: &[u8]) -> (i32, Vec<u8>) {
        let outcome = test_run::run(self.lb.program(), frame, 1).unwrap();
        (outcome.verdict, outcome.packet)
    }

    /// Where `frame`, which must be forwarded, goes.
    pub fn destination(&self, frame: &[u8]) -> MacAddress {
        let (verdict, packet) = self.run(frame);
        assert_eq!(verdict, XDP_TX);
        MacAddress(packet[..6].try_into().unwrap())
    }

    fn counts(&self, service: Option<usize>) -> [u64; COUNTERS] {
        match service {
            Some(service) => self.lb.counters(self.services[service]).packets,
            None => self.lb.counters_without_service().packets,
        }
    }

    /// Counters of all services and of none, by name.
    fn all_counts(&self) -> Vec<(Option<usize>, &'static str, u64)> {
        let of = |service| self.counts(service).into_iter().zip(intf::LB_COUNTER_NAMES);
        let services = (0..self.services.len()).map(Some).chain([None]);
        services.flat_map(|service| of(service).map(move |(count, name)| (service, name, count))).collect()
    }

    /// Runs `frame` and checks that exactly the counter `name` of `service` grew, by one.
    fn counted(&self, frame: &[u8], service: Option<usize>, name: &str) -> (i32, Vec<u8>) {
        let before = self.all_counts();
        let ran = self.run(frame);
        let after = self.all_counts();
        let grown: Vec<_> = std::iter::zip(before, after)
            .filter(|(before, after)| before != after)
            .map(|(before, after)| (after.0, after.1, after.2 - before.2))
            .collect();
        assert_eq!(grown, [(service, name, 1)], "verdict {}, frame {frame:02x?}", ran.0);
        ran
    }

    /// A packet that is not forwarded comes back as it was.
    pub fn expect(&self, frame: &[u8], verdict: i32, service: usize, name: &str) {
        let (found, packet) = self.counted(frame, Some(service), name);
        assert_eq!(found, verdict, "{name}");
        assert_eq!(packet, frame, "{name}");
    }

    /// As [`expect`](Self::expect), of a packet whose service cannot be told.
    pub fn expect_without_service(&self, frame: &[u8], verdict: i32, name: &str) {
        let (found, packet) = self.counted(frame, None, name);
        assert_eq!(found, verdict, "{name}");
        assert_eq!(packet, frame, "{name}");
    }

    pub fn expect_passed(&self, frame: &[u8]) {
        self.expect_without_service(frame, XDP_PASS, "passed_not_service");
    }

    /// The packet leaves with the server's MAC address and our own, and is the same otherwise.
    pub fn expect_sent_to(&self, service: usize, frame: &[u8], server: ServerId, name: &str) {
        let (verdict, packet) = self.counted(frame, Some(service), name);
        self.check_sent(frame, verdict, &packet, self.macs[&(service, server)]);
    }

    /// To all servers, or dropped as `over_rate` when the tokens are spent.
    pub fn expect_to_all_or(&self, service: usize, frame: &[u8], over_rate: &str) {
        let before = self.counts(Some(service));
        let (verdict, packet) = self.run(frame);
        let after = self.counts(Some(service));
        let name = if verdict == XDP_TX { "to_all" } else { over_rate };
        let grown =
            std::iter::zip(before, after).zip(intf::LB_COUNTER_NAMES).filter(|((before, after), _)| before != after);
        assert_eq!(grown.map(|(_, name)| name).collect::<Vec<_>>(), [name]);
        if verdict == XDP_TX {
            self.check_sent(frame, verdict, &packet, MacAddress::BROADCAST);
        } else {
            assert_eq!((verdict, &packet[..]), (XDP_DROP, frame));
        }
    }

    fn check_sent(&self, frame: &[u8], verdict: i32, packet: &[u8], destination: MacAddress) {
        assert_eq!(verdict, XDP_TX);
        let mut expected = frame.to_vec();
        expected[..6].copy_from_slice(&destination.0);
        expected[6..12].copy_from_slice(&OWN_MAC.0);
        assert_eq!(packet, expected);
    }
}

/// A table with random keys, loads and costs; loads are few, so that there are ties.
pub fn random_table(
    rule: Rule,
    generation: u64,
    groups: usize,
    servers: &[ServerId],
    rng: &mut impl Rng,
) -> PlacementTable {
    let buckets = BucketCount::new(1 << uniform_below(rng, 10)).unwrap();
    let cores = 1 + uniform_below(rng, 8);
    let core_slots: Vec<Core> =
        servers.iter().flat_map(|server| (0..cores as u16).map(|core| Core { server: *server, core })).collect();
    let most = intf::MAX_TABLE_CANDIDATES / (groups as u32 * buckets.get());
    let per_bucket = 1 + uniform_below(rng, intf::MAX_CANDIDATES.min(most));
    let mut candidate = || {
        let core_slot = uniform_below(rng, core_slots.len() as u32) as u16;
        Candidate { server: core_slots[usize::from(core_slot)].server, load: uniform_below(rng, 16) * 1000, core_slot }
    };
    let candidates = (0..groups as u32 * buckets.get() * per_bucket).map(|_| candidate()).collect();
    // Some stand twice, as servers of more weight do.
    let turns = servers.iter().chain(&servers[..uniform_below(rng, servers.len() as u32) as usize]);
    PlacementTable {
        generation,
        rule,
        bucket_count: buckets,
        groups: (0..groups).map(|_| RssKey::random(rng)).collect(),
        candidates_per_bucket: per_bucket,
        candidates,
        assignment_cost: uniform_below(rng, 4) * 700,
        core_slots,
        members: turns.map(|server| Member { server: *server, load: uniform_below(rng, 5) * 1000 }).collect(),
        consistent: rendezvous(servers, buckets),
    }
}
