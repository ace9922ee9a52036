//! The packets that are measured, and a load balancer that knows what to do with them.

use std::fmt;
use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;

use coreward_dataplane::lb::{LoadBalancer, Options, Server, ServiceIndex};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::consistency::{Consistency, ServiceMode};
use coreward_model::cookie::{self, Cookie, CookieKey, FleetKeys, KeyIndex};
use coreward_model::placement::{BucketCount, Candidate, Core, Member, PlacementTable, Rule, rendezvous};
use coreward_model::rss::{RssKey, seeded_rng, uniform_below};
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::runner::{PACKETS, Packet};

/// linux/bpf.h
const XDP_PASS: i32 = 2;
pub const XDP_TX: i32 = 3;

const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
/// Nobody's port.
const OTHER_PORT: u16 = 81;
const OWN_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

/// A pool like a small fleet's.
const SERVERS: u64 = 64;
const CORES: u16 = 16;

/// Room for all connections: the LRU hash evicts a little before it is full.
const FLOW_TABLE_ENTRIES: u32 = PACKETS as u32 / 4 * 5;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Case {
    /// Packets with a valid cookie, of that many connections.
    Established(usize),
    /// The same at a service of consistency "hash-table": each is in the flow table.
    HashTable(usize),
    /// SYNs of different connections, by a rule, with that many RSS groups.
    First(Rule, usize),
    /// TCP to a port that is no service.
    NotForAVip,
}

impl Case {
    /// All, in the order of the report.
    pub fn all() -> impl Iterator<Item = Case> {
        let connections = [1, 1 << 14, 1 << 17, PACKETS];
        let established = connections.map(Case::Established).into_iter().chain(connections.map(Case::HashTable));
        let first = Rule::ALL.map(|rule| Case::First(rule, 1));
        let most = intf::MAX_RSS_GROUPS as usize;
        let four_groups = [Case::First(Rule::Table, most), Case::First(Rule::LeastAssigned, most)];
        established.chain(first).chain(four_groups).chain([Case::NotForAVip])
    }

    /// What the program returns for the packets.
    pub fn verdict(self) -> i32 {
        if self == Case::NotForAVip { XDP_PASS } else { XDP_TX }
    }

    /// What the packets are counted as.
    pub fn counter(self) -> usize {
        let counter = match self {
            Case::Established(_) => intf::LB_COUNTER_ESTABLISHED,
            Case::HashTable(_) => intf::LB_COUNTER_FLOW,
            Case::First(..) => intf::LB_COUNTER_FIRST,
            Case::NotForAVip => intf::LB_COUNTER_PASSED_NOT_SERVICE,
        };
        counter as usize
    }

    /// Whether the packets carry an echo at the usual place.
    pub fn has_echo(self) -> bool {
        !matches!(self, Case::First(..))
    }

    /// For packets of open connections: how their server is remembered, and how many connections there are.
    pub fn open_connections(self) -> Option<(Consistency, usize)> {
        match self {
            Case::Established(connections) => Some((Consistency::Stateless, connections)),
            _ => None,
        }
    }

    fn connections(self) -> usize {
        match self {
            Case::Established(connections) | Case::HashTable(connections) => connections,
            Case::First(..) | Case::NotForAVip => PACKETS,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::Established(1) => f.write_str("established, 1 connection"),
            Case::Established(connections) => write!(f, "established, {connections} connections"),
            Case::HashTable(1) => f.write_str("hash-table, 1 connection"),
            Case::HashTable(connections) => write!(f, "hash-table, {connections} connections"),
            Case::First(rule, 1) => write!(f, "first, {}", rule.name()),
            Case::First(rule, groups) => write!(f, "first, {}, {groups} RSS groups", rule.name()),
            Case::NotForAVip => f.write_str("not for a VIP"),
        }
    }
}

/// A load balancer without a device, and the packets of one case.
pub struct Balancer {
    case: Case,
    lb: LoadBalancer,
    service: ServiceIndex,
    keys: FleetKeys,
    servers: Vec<ServerId>,
}

impl Balancer {
    /// # Errors
    /// Without the right to load BPF programs.
    pub fn new(case: &Case) -> anyhow::Result<Self> {
        let mut rng = seeded_rng(1, 0);
        let mut lb = LoadBalancer::load(Options { flow_table_entries: FLOW_TABLE_ENTRIES, ..Options::default() })?;
        lb.set_own_mac(OWN_MAC);
        let address = ServiceAddress { socket: VIP.into(), protocol: Protocol::Tcp };
        let consistency = match case {
            Case::HashTable(_) => Consistency::HashTable,
            _ => Consistency::Stateless,
        };
        let service = lb.set_services(&[(address, ServiceMode { consistency, ..ServiceMode::default() })])?[0];
        let mut key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let keys = FleetKeys { keys: [key(), key()], current: KeyIndex::First };
        lb.set_keys(&keys);
        // Ids drawn sparsely, as the controller does.
        let step = ServerId::COUNT as u64 / SERVERS;
        let servers: Vec<ServerId> = (0..SERVERS)
            .map(|n| ServerId::try_from(n * step + u64::from(uniform_below(&mut rng, step as u32))))
            .collect::<Result<_, _>>()?;
        for (n, server) in servers.iter().enumerate() {
            let mac = MacAddress([2, 0, 0, 1, (n >> 8) as u8, n as u8]);
            lb.set_server(service, *server, Server { mac: Some(mac), eligible: true });
        }
        match *case {
            Case::First(rule, groups) => lb.install_table(service, &table(rule, groups, &servers, &mut rng))?,
            Case::HashTable(_) => lb.install_table(service, &table(Rule::Table, 1, &servers, &mut rng))?,
            Case::Established(_) | Case::NotForAVip => {}
        }
        Ok(Self { case: *case, lb, service, keys, servers })
    }

    pub fn program(&self) -> BorrowedFd<'_> {
        self.lb.program()
    }

    /// How many packets were counted as the case's.
    pub fn counted(&self) -> u64 {
        let counters = match self.case {
            Case::NotForAVip => self.lb.counters_without_service(),
            _ => self.lb.counters(self.service),
        };
        counters.packets[self.case.counter()]
    }

    fn destination(&self) -> (Ipv4Addr, u16) {
        if self.case == Case::NotForAVip { (VIP.0, OTHER_PORT) } else { VIP }
    }

    /// The frame that [`packets`](Self::packets) vary: a bare ACK, or a SYN.
    pub fn frame(&self) -> Vec<u8> {
        match self.case {
            Case::First(..) => self.syn(),
            _ => self.frame_with(0x10, &[1, 1, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0]),
        }
    }

    /// The frame with which each connection must have begun before it is measured; `None`: nothing remembers it.
    pub fn opening_frame(&self) -> Option<Vec<u8>> {
        matches!(self.case, Case::HashTable(_)).then(|| self.syn())
    }

    /// As Linux sends it.
    fn syn(&self) -> Vec<u8> {
        self.frame_with(0x02, &[2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7])
    }

    fn frame_with(&self, flags: u8, options: &[u8]) -> Vec<u8> {
        let (vip, port) = self.destination();
        let tcp_header = 20 + options.len();
        let mut frame = [&OWN_MAC.0[..], &[2, 0, 0, 0, 0, 2], &[8, 0]].concat();
        frame.extend([0x45, 0, 0, 20 + tcp_header as u8, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 1, 0, 7]);
        frame.extend(vip.octets());
        frame.extend([0x12, 0x34]);
        frame.extend(port.to_be_bytes());
        frame.extend([0, 0, 0, 1, 0, 0, 0, 2, (tcp_header * 4) as u8, flags, 1, 0, 0, 0, 0, 0]);
        frame.extend(options);
        frame
    }

    /// As many connections as the case has, in random order, each with its valid cookie.
    pub fn packets(&self) -> Vec<Packet> {
        let mut rng = seeded_rng(2, 0);
        let destination = self.destination();
        let mut packet = || {
            let client = (Ipv4Addr::from(rng.next_u32()), rng.next_u32() as u16);
            let server = self.servers[uniform_below(&mut rng, self.servers.len() as u32) as usize];
            let tuple = FourTuple::ipv4(client, destination);
            let echo = cookie::stamp(&self.keys, &self.keys.keys[0], &tuple, Cookie::Server(server), rng.next_u32());
            let ports = [client.1.to_be_bytes(), destination.1.to_be_bytes()].concat();
            Packet {
                client_address: u32::from_ne_bytes(client.0.octets()),
                ports: u32::from_ne_bytes(ports.try_into().expect("four bytes")),
                echo: echo.to_be(),
                reserved: 0,
            }
        };
        (0..self.case.connections()).map(|_| packet()).collect()
    }
}

/// A table as `crossrss-plus` makes it for the pool: 128 buckets, 8 candidates each.
fn table(rule: Rule, groups: usize, servers: &[ServerId], rng: &mut Xoshiro256PlusPlus) -> PlacementTable {
    let buckets = BucketCount::PUBLISHED;
    let core_slots: Vec<Core> =
        servers.iter().flat_map(|server| (0..CORES).map(|core| Core { server: *server, core })).collect();
    let candidates_per_bucket = intf::MAX_CANDIDATES;
    let count = groups as u32 * buckets.get() * candidates_per_bucket;
    let mut candidate = |_| {
        let core_slot = uniform_below(rng, core_slots.len() as u32) as u16;
        let load = uniform_below(rng, intf::LOAD_ONE);
        Candidate { server: core_slots[usize::from(core_slot)].server, load, core_slot }
    };
    let candidates = (0..count).map(&mut candidate).collect();
    let members = servers.iter().map(|server| Member { server: *server, load: uniform_below(rng, intf::LOAD_ONE) });
    let members = members.collect();
    PlacementTable {
        generation: 1,
        rule,
        bucket_count: buckets,
        groups: (0..groups).map(|_| RssKey::random(rng)).collect(),
        candidates_per_bucket,
        candidates,
        assignment_cost: intf::LOAD_ONE / 1000,
        core_slots,
        members,
        consistent: rendezvous(servers, buckets),
        consistent_before: Vec::new(),
    }
}
