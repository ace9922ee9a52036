//! A load balancer without a device, and checks of the packets that it sends.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};

use coreward_dataplane::lb::{BroadcastRates, COUNTER_COUNT, Options, Server, ServiceIndex};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::uniform_below;
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng;

use super::compared_lb::ComparedLb;

/// Return values of XDP programs (linux/bpf.h).
pub const XDP_DROP: i32 = 1;
pub const XDP_PASS: i32 = 2;
pub const XDP_TX: i32 = 3;

/// MAC address of the balancer, to which the frames of [`super::TcpPacket`] are sent.
pub const OWN_MAC: MacAddress = MacAddress([0; 6]);

pub const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
pub const CLIENT: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 1, 0, 7), 40312);

/// Returns a random address and port of a client.
pub fn client(rng: &mut impl Rng) -> (Ipv4Addr, u16) {
    (Ipv4Addr::from(rng.next_u32()), rng.next_u32() as u16)
}

pub fn tuple(client: (Ipv4Addr, u16)) -> FourTuple {
    FourTuple::ipv4(client, VIP)
}

pub fn id(number: u64) -> ServerId {
    ServerId::try_from(number).unwrap()
}

pub fn service(vip: impl Into<SocketAddr>) -> ServiceAddress {
    ServiceAddress { socket: vip.into(), protocol: Protocol::Tcp }
}

/// Expected IP identification, or IPv6 flow label, of a forwarded packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identification {
    Unchanged,
    /// Id of the bucket's previous server; `None`: `NO_SERVER`.
    Before(Option<ServerId>),
}

/// Returns `frame` with this IP identification and a correct header checksum, or with this IPv6 flow label.
fn with_identification(frame: &[u8], identification: u16) -> Vec<u8> {
    let mut frame = frame.to_vec();
    if super::is_ipv6(&frame) {
        frame[15] &= 0xf0;
        frame[16..18].copy_from_slice(&identification.to_be_bytes());
        return frame;
    }
    let header = 14..super::tcp_offset(&frame);
    frame[18..20].copy_from_slice(&identification.to_be_bytes());
    frame[24..26].fill(0);
    let checksum = !super::ones_complement_sum(&frame[header]);
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame
}

/// Returns the previous server of the bucket to which the table assigns the connection.
pub fn previous_server(table: &PlacementTable, tuple: &FourTuple) -> Option<ServerId> {
    let bucket = table.bucket_count.bucket(table.groups[0].toeplitz(&tuple.bytes()));
    table.previous_consistent_servers.get(bucket as usize).copied().flatten()
}

/// Returns options with a fixed connection key, unless one is set: random keys would collide differently in each run.
fn with_connection_key(options: Options) -> Options {
    let fixed = CookieKey { k0: 0x5d3c_91ab, k1: 0x0f1e_77c9 };
    Options { connection_key: options.connection_key.or(Some(fixed)), ..options }
}

pub struct Balancer {
    pub lb: ComparedLb,
    pub services: Vec<ServiceIndex>,
    pub keys: FleetKeys,
    /// MAC address of each server, by the index of its service in `service_indexes` and by server id.
    pub macs: HashMap<(usize, ServerId), MacAddress>,
    /// Number of connections placed so far by the rule round robin.
    pub turns: u64,
    pub newest_table: Option<PlacementTable>,
}

impl Balancer {
    /// Returns a balancer with a TCP service in the default mode at each of `vips`.
    pub fn new(vips: &[(Ipv4Addr, u16)], rng: &mut impl Rng) -> Self {
        let services: Vec<_> = vips.iter().map(|vip| (service(*vip), ServiceMode::default())).collect();
        Self::with(&services, Options::default(), rng)
    }

    /// Returns a load balancer that is compared with the model. Panics when `options` limits broadcasts.
    pub fn with(services: &[(ServiceAddress, ServiceMode)], options: Options, rng: &mut impl Rng) -> Self {
        assert_eq!(options.broadcast_limits, BroadcastRates::DEFAULT_LIMITS, "expected no limits, or with_limits");
        Self::with_lb(ComparedLb::load(with_connection_key(options), OWN_MAC), services, rng)
    }

    /// Returns a balancer without a model, as broadcast limits depend on time.
    pub fn with_limits(services: &[(ServiceAddress, ServiceMode)], options: Options, rng: &mut impl Rng) -> Self {
        Self::with_lb(ComparedLb::load_alone(with_connection_key(options), OWN_MAC), services, rng)
    }

    fn with_lb(mut lb: ComparedLb, services: &[(ServiceAddress, ServiceMode)], rng: &mut impl Rng) -> Self {
        let services = lb.set_services(services).unwrap();
        let none = CookieKey { k0: 0, k1: 0 };
        let keys = FleetKeys { keys: [none; 2], current: KeyIndex::First };
        let mut balancer = Self { lb, services, keys, macs: HashMap::new(), turns: 0, newest_table: None };
        balancer.new_keys(rng);
        balancer
    }

    pub fn new_keys(&mut self, rng: &mut impl Rng) {
        let mut key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        self.keys = FleetKeys { keys: [key(), key()], current: KeyIndex::First };
        self.lb.set_keys(&self.keys);
    }

    /// Replaces all servers by `count` servers with random MAC addresses. Returns their random ids, sorted.
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
            self.lb.set_server(
                self.services[service],
                server,
                Server { mac: Some(MacAddress(mac)), is_eligible: true },
            );
            ids.push(server);
        }
        ids.sort();
        ids
    }

    pub fn install(&mut self, service: usize, table: &PlacementTable) {
        self.lb.install_table(self.services[service], table).unwrap();
        self.newest_table = Some(table.clone());
    }

    pub fn run(&self, frame: &[u8]) -> (i32, Vec<u8>) {
        let (verdict, packet, _) = self.lb.run(frame);
        (verdict, packet)
    }

    /// Runs the program on `frame`, which must be forwarded. Returns the MAC address to which it is sent.
    pub fn destination(&self, frame: &[u8]) -> MacAddress {
        let (verdict, packet) = self.run(frame);
        assert_eq!(verdict, XDP_TX);
        MacAddress(packet[..6].try_into().unwrap())
    }

    fn counts(&self, service: Option<usize>) -> [u64; COUNTER_COUNT] {
        match service {
            Some(service) => self.lb.counters(self.services[service]).packets,
            None => self.lb.counters_without_service().packets,
        }
    }

    /// Returns all packet counters: index of the service (`None`: packets without a service), name and value.
    fn all_counts(&self) -> Vec<(Option<usize>, &'static str, u64)> {
        let of = |service| self.counts(service).into_iter().zip(intf::LB_COUNTER_NAMES);
        let services = (0..self.services.len()).map(Some).chain([None]);
        services.flat_map(|service| of(service).map(move |(count, name)| (service, name, count))).collect()
    }

    /// Processes `frame`, and checks that only the counter `name` of `service` increases by one, as in the model.
    pub fn run_expecting_counter(&self, frame: &[u8], service: Option<usize>, name: &str) -> (i32, Vec<u8>) {
        let before = self.all_counts();
        let (verdict, packet, outcome) = self.lb.run(frame);
        let after = self.all_counts();
        let grown: Vec<_> = std::iter::zip(before, after)
            .filter(|(before, after)| before != after)
            .map(|(before, after)| (after.0, after.1, after.2 - before.2))
            .collect();
        assert_eq!(grown, [(service, name, 1)], "verdict {verdict}, frame {frame:02x?}");
        if let Some(outcome) = outcome {
            let slot = service.map(|service| usize::from(self.services[service].get()));
            let expected = (outcome.service, intf::LB_COUNTER_NAMES[outcome.counter as usize]);
            assert_eq!((slot, name), expected, "the model's counter, frame {frame:02x?}");
        }
        (verdict, packet)
    }

    /// Checks the verdict and the counter of a packet that is not forwarded, and that the packet is unchanged.
    pub fn expect(&self, frame: &[u8], verdict: i32, service: usize, name: &str) {
        let (found, packet) = self.run_expecting_counter(frame, Some(service), name);
        assert_eq!(found, verdict, "{name}");
        assert_eq!(packet, frame, "{name}");
    }

    /// Checks a packet of no service like [`expect_unforwarded`](Self::expect_unforwarded).
    pub fn expect_without_service(&self, frame: &[u8], verdict: i32, name: &str) {
        let (found, packet) = self.run_expecting_counter(frame, None, name);
        assert_eq!(found, verdict, "{name}");
        assert_eq!(packet, frame, "{name}");
    }

    pub fn expect_passed(&self, frame: &[u8]) {
        self.expect_without_service(frame, XDP_PASS, "passed_not_service");
    }

    /// Checks that a packet is sent to `server`, and that only its MAC addresses change.
    pub fn expect_sent_to(&self, service: usize, frame: &[u8], server: ServerId, name: &str) {
        self.expect_sent(service, frame, server, Identification::Unchanged, name);
    }

    /// Checks a packet like [`expect_sent_to`](Self::expect_sent_to), with this IP identification after forwarding.
    pub fn expect_sent(
        &self,
        service: usize,
        frame: &[u8],
        server: ServerId,
        identification: Identification,
        name: &str,
    ) {
        let (verdict, packet) = self.run_expecting_counter(frame, Some(service), name);
        check_sent(frame, verdict, &packet, self.macs[&(service, server)], identification);
    }

    /// Checks that a packet is broadcast or, if no token is available, dropped and counted as `over_rate`.
    pub fn expect_broadcast_or(&self, service: usize, frame: &[u8], identification: Identification, over_rate: &str) {
        let before = self.counts(Some(service));
        let (verdict, packet) = self.run(frame);
        let after = self.counts(Some(service));
        let name = if verdict == XDP_TX { "broadcast" } else { over_rate };
        let grown =
            std::iter::zip(before, after).zip(intf::LB_COUNTER_NAMES).filter(|((before, after), _)| before != after);
        assert_eq!(grown.map(|(_, name)| name).collect::<Vec<_>>(), [name]);
        if verdict == XDP_TX {
            check_sent(frame, verdict, &packet, MacAddress::BROADCAST, identification);
        } else {
            assert_eq!((verdict, &packet[..]), (XDP_DROP, frame));
        }
    }

    /// Returns how often the event named `event` has been counted for a service.
    pub fn events(&self, service: usize, event: &str) -> u64 {
        let position = intf::LB_EVENT_NAMES.iter().position(|name| *name == event).unwrap();
        self.lb.counters(self.services[service]).events[position]
    }
}

fn check_sent(frame: &[u8], verdict: i32, packet: &[u8], destination: MacAddress, identification: Identification) {
    assert_eq!(verdict, XDP_TX);
    let mut expected = match identification {
        Identification::Unchanged => frame.to_vec(),
        Identification::Before(None) => with_identification(frame, intf::NO_SERVER as u16),
        Identification::Before(Some(server)) => with_identification(frame, server.get()),
    };
    expected[..6].copy_from_slice(&destination.0);
    expected[6..12].copy_from_slice(&OWN_MAC.0);
    assert_eq!(packet, expected);
}

pub fn random_table(
    rule: PlacementRule,
    generation: u64,
    groups: usize,
    servers: &[ServerId],
    rng: &mut impl Rng,
) -> PlacementTable {
    PlacementTable::random(rule, generation, groups, servers, rng)
}
