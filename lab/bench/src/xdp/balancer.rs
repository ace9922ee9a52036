//! A configured load balancer without a device.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use anyhow::{Context as _, ensure};
use coreward_dataplane::lb::{
    COUNTER_NAMES, Counters, LoadBalancer, Options, OuterSources, Server, ServiceIndex, Tunnel, XdpMode,
};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::connection_table::{Connection, ConnectionIndex, OwnerNumber, TableSize, encode_cookie_index};
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::cookie::{self, Cookie, CookieKey, FleetKeys, KeyIndex};
use coreward_model::lb_stamping;
use coreward_model::placement::{
    BucketCount, Candidate, Member, PlacementRule, PlacementTable, ServerCore, rendezvous_table,
};
use coreward_model::rss::{RssKey, seeded_rng, uniform_below};
use coreward_model::tuple::Protocol;
use coreward_model::{ServerId, ServiceAddress};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::runner::{Feed, Frame, PACKET_COUNT, Packet, Runner};
use super::workload::{Case, Direction, FIRST_SERVER_MAC, NewConnection, OWN_MAC, VIP, clients, response, syn};

/// Number of servers in the pool, which is that of a small fleet.
const SERVER_COUNT: u64 = 64;
const CORE_COUNT: u16 = 16;
/// Source addresses of the outer headers of encapsulated packets.
const OWN_ADDRESSES: OuterSources =
    OuterSources { ipv4: Ipv4Addr::new(10, 2, 0, 1), ipv6: Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1) };
const ETHERNET_MTU: u32 = 1500;

/// Number of flow table entries that is enough for all connections. A set of eight has half a connection on average, so
/// in 150 runs of 151 none of the two million sets is full.
pub const FLOW_TABLE_ENTRIES: u32 = PACKET_COUNT as u32 * 16;

/// Number of connection table entries, enough for all connections: 512 of a partition's 1024 are used on average.
pub const CONNECTION_TABLE_ENTRIES: u64 = 2 * PACKET_COUNT as u64;

/// Returns the address of the only service, which for [`Case::OtherDestination`] differs from the packets' destination.
fn service_of(case: Case) -> SocketAddr {
    if case == Case::OtherDestination { VIP.into() } else { case.destination() }
}

/// Load balancer that is configured for the packets of one case, without a device.
pub struct Balancer {
    case: Case,
    lb: RefCell<LoadBalancer>,
    service: ServiceIndex,
    keys: FleetKeys,
    servers: Vec<ServerId>,
    owner: OwnerNumber,
}

/// Placement of the service's new connections, and sizes of the tables with connection state.
#[derive(Debug, Clone, Copy)]
pub struct BalancerSetup {
    pub rule: PlacementRule,
    pub rss_group_count: usize,
    pub entries: TableSize,
    pub flow_entries: u32,
}

impl BalancerSetup {
    fn for_case(case: Case) -> anyhow::Result<Self> {
        let (rule, rss_group_count) = match case {
            Case::NewConnection(NewConnection { rule, rss_group_count, .. }) => (rule, rss_group_count),
            _ => (PlacementRule::Table, 1),
        };
        let entries = match case {
            Case::Established(Consistency::Stateful, _) => CONNECTION_TABLE_ENTRIES,
            Case::NewConnection(NewConnection { consistency: Consistency::Stateful, connections, .. }) => {
                2 * connections as u64
            }
            _ => u64::from(intf::CONNECTIONS_PER_PARTITION),
        };
        // With LB-side stamping only connections without stamps use the flow table: here none.
        let flow_entries = if case.is_lb_stamped() { intf::DEFAULT_FLOW_TABLE_ENTRIES } else { FLOW_TABLE_ENTRIES };
        Ok(Self { rule, rss_group_count, entries: TableSize::try_from(entries)?, flow_entries })
    }
}

/// Returns the MAC address of the server with index `n` in the pool.
fn mac_of(n: usize) -> MacAddress {
    let mut mac = FIRST_SERVER_MAC;
    mac.0[4..].copy_from_slice(&(n as u16).to_be_bytes());
    mac
}

#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Mean time per packet (ns).
    pub mean_ns: f64,
    /// Number of packets that the case's counter has counted in this run.
    pub counted_packets: u64,
}

impl Balancer {
    /// Loads a load balancer and opens all connections of the case's packets. Fails without the capabilities to load
    /// BPF programs, or when a connection gets no entry.
    pub fn new(case: Case) -> anyhow::Result<Self> {
        Self::with_setup(case, BalancerSetup::for_case(case)?)
    }

    /// Like [`new`](Self::new), with another setup than the case's.
    pub fn with_setup(case: Case, setup: BalancerSetup) -> anyhow::Result<Self> {
        let mut rng = seeded_rng(1, 0);
        let mut lb = LoadBalancer::load(Options {
            flow_table_entries: setup.flow_entries,
            connection_table_size: setup.entries,
            packets_read_clock: true,
            ..Options::default()
        })?;
        lb.set_own_mac(OWN_MAC);
        let address = ServiceAddress { socket: service_of(case), protocol: Protocol::Tcp };
        let timestamps = if case.is_lb_stamped() { Timestamps::LoadBalancer } else { Timestamps::Server };
        let (consistency, forwarding) = (case.consistency(), case.forwarding());
        let mode = ServiceMode { consistency, timestamps, forwarding, ..ServiceMode::default() };
        lb.set_outer_header(OWN_ADDRESSES, ETHERNET_MTU);
        let service = lb.set_services(&[(address, mode)])?[0];
        let mut key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let keys = FleetKeys { keys: [key(), key()], current: KeyIndex::First };
        lb.set_keys(&keys);
        lb.set_time_key(service, keys.keys[1]);
        let owner = OwnerNumber::try_from(5)?;
        lb.set_owner_number(Some(owner));
        // Ids are sparse, as those of the controller.
        let ids = if case.is_lb_stamped() { lb_stamping::SERVER_ID_COUNT } else { ServerId::COUNT as u64 };
        let step = ids / SERVER_COUNT;
        let servers: Vec<ServerId> = (0..SERVER_COUNT)
            .map(|n| ServerId::try_from(n * step + u64::from(uniform_below(&mut rng, step as u32))))
            .collect::<Result<_, _>>()?;
        for (n, server) in servers.iter().enumerate() {
            let mac = mac_of(n);
            lb.set_server(service, *server, Server { mac: Some(mac), is_eligible: true });
            lb.set_tunnel(*server, Tunnel { address: case.server_address(*server), source_port: None })?;
        }
        lb.install_table(service, &table(setup.rule, setup.rss_group_count, &servers, &mut rng))?;
        let balancer = Self { case, lb: RefCell::new(lb), service, keys, servers, owner };
        balancer.open_connections()?;
        if case == Case::LbStamped(Direction::ToServer) {
            balancer.show_clocks()?;
        }
        Ok(balancer)
    }

    /// Sends a response of each server through the load balancer, which learns the server's clock to restore TSecr.
    fn show_clocks(&self) -> anyhow::Result<()> {
        let Frame { bytes: mut answer, ports_offset, .. } = response();
        let ports = &mut answer[ports_offset as usize..][..4];
        ports.copy_from_slice(&[self.case.destination().port().to_be_bytes(), [4, 0]].concat());
        for n in 0..self.servers.len() {
            answer[6..12].copy_from_slice(&mac_of(n).0);
            test_run::run(self.lb.borrow().program(), &answer, 1)?;
        }
        let stamped = self.counters().packets[intf::LB_COUNTER_REPLY_STAMPED as usize];
        ensure!(stamped == self.servers.len() as u64, "{}: {stamped} answers were stamped", self.case);
        Ok(())
    }

    pub fn case(&self) -> Case {
        self.case
    }

    /// Opens all connections by their SYNs, if the case needs connection entries.
    fn open_connections(&self) -> anyhow::Result<()> {
        if !self.case.needs_connection_entry() {
            return Ok(());
        }
        let clients = clients(self.case.connections());
        let packets: Vec<Packet> = clients.iter().map(|client| self.packet(client, 0)).collect();
        let lb = self.lb.borrow();
        Runner::new(&syn(), &packets, 0)?.run(Feed::Packet, lb.program(), packets.len() as u32)?;
        let opened = lb.counters(self.service).packets[intf::LB_COUNTER_NEW_CONNECTION as usize];
        ensure!(opened == packets.len() as u64, "{}: {opened} connections were opened", self.case);
        Ok(())
    }

    fn packet(&self, client: &SocketAddrV4, tsecr: u32) -> Packet {
        let mut ports = [client.port().to_be_bytes(), self.case.destination().port().to_be_bytes()];
        if self.case == Case::LbStamped(Direction::ToClient) {
            ports.reverse();
        }
        let ports = ports.concat();
        Packet {
            client_address: u32::from_ne_bytes(client.ip().octets()),
            ports: u32::from_ne_bytes(ports.try_into().expect("four bytes")),
            tsecr: tsecr.to_be(),
            line_index: 0,
        }
    }

    /// Returns one packet per connection, in random order, each with the stamp of its server. Fails when a connection
    /// has no entry.
    pub fn packets(&self) -> anyhow::Result<Vec<Packet>> {
        let mut rng = seeded_rng(3, 0);
        let places = self.entries_by_client();
        let clients = clients(self.case.connections());
        let packets = clients.iter().map(|client| {
            let stamped = match self.case {
                Case::NewConnection(_) | Case::NewConnectionIpv6 => return Ok(self.packet(client, 0)),
                Case::LbStamped(Direction::ToClient) => return Ok(self.packet(client, rng.next_u32())),
                Case::LbStamped(Direction::ToServer) => {
                    return Ok(self.packet(client, self.random_stamped_tsecr(client, &mut rng)));
                }
                Case::Established(Consistency::Stateful, _) => {
                    let index =
                        places.get(&SocketAddr::from(*client)).with_context(|| format!("{client} has no entry"))?;
                    Cookie::TableIndex(encode_cookie_index(self.owner, index.slot()))
                }
                _ => Cookie::Server(self.servers[uniform_below(&mut rng, self.servers.len() as u32) as usize]),
            };
            let tuple = self.case.tuple(client);
            let tsecr = cookie::stamp_tsval(&self.keys, &self.keys.keys[0], &tuple, stamped, rng.next_u32());
            Ok(self.packet(client, tsecr))
        });
        packets.collect()
    }

    /// Returns a TSecr with the LB-side stamp of a random server.
    fn random_stamped_tsecr(&self, client: &SocketAddrV4, rng: &mut Xoshiro256PlusPlus) -> u32 {
        let server = self.servers[uniform_below(rng, self.servers.len() as u32) as usize];
        lb_stamping::stamp_tsval(&self.keys, &self.keys.keys[1], &self.case.tuple(client), server, rng.next_u32())
    }

    /// Returns the index of each client's entry in the connection table.
    pub fn entries_by_client(&self) -> HashMap<SocketAddr, ConnectionIndex> {
        let lb = self.lb.borrow();
        lb.connections(self.service).map(|connection| (connection.client, connection.index)).collect()
    }

    /// Attaches the program in native mode. Fails when the device has no native XDP or already has a program.
    pub fn attach(&self, interface: &str) -> anyhow::Result<()> {
        self.lb.borrow_mut().attach(interface, XdpMode::Native).map(drop)
    }

    /// Returns a descriptor of the program, for test runs that the case does not count.
    pub fn program(&self) -> anyhow::Result<OwnedFd> {
        Ok(self.lb.borrow().program().try_clone_to_owned()?)
    }

    /// Returns all counters of the service, or those of packets without a service if the case has none.
    pub fn counters(&self) -> Counters {
        let lb = self.lb.borrow();
        match self.case {
            Case::OtherDestination => lb.counters_without_service(),
            _ => lb.counters(self.service),
        }
    }

    /// Runs the program on `packets` packets and returns the mean time (ns). Afterwards, frees all entries that were
    /// taken. Fails when the program does not treat each packet as the case expects.
    pub fn run(&self, runner: &Runner, feed: Feed, packets: u32) -> anyhow::Result<f64> {
        if !self.case.allocates_entries() {
            return self.run_expecting(runner, feed, packets);
        }
        let batch = packets.min(runner.connections() as u32);
        let batches = packets / batch;
        let mut time = 0.0;
        for _ in 0..batches {
            // Freeing waits for a grace period, and a CPU that slept has cold caches: the first packets fill them.
            self.run_expecting(runner, feed, batch / 4)?;
            time += self.run_expecting(runner, feed, batch - batch / 4)?;
            // Slots are used in the order of memory, so only the lowest ones are read.
            let freed = self.free(|connections| connections.take(batch as usize).collect())?;
            ensure!(freed == batch as usize, "{}: {freed} entries were taken by {batch} packets", self.case);
        }
        let left = self.entries_in_use();
        ensure!(left == 0, "{}: {left} more entries were taken than packets came", self.case);
        Ok(time / f64::from(batches))
    }

    fn run_expecting(&self, runner: &Runner, feed: Feed, packets: u32) -> anyhow::Result<f64> {
        let case = self.case;
        let run = self.run_and_count(runner, feed, packets)?;
        let (name, counted) = (COUNTER_NAMES[case.counter()], run.counted_packets);
        ensure!(counted == u64::from(packets), "{case}: {counted} of {packets} packets were counted as {name}");
        Ok(run.mean_ns)
    }

    /// Runs the program on `packets` packets, whatever their counters. Fails when the verdict on the last packet is not
    /// the one that the case expects.
    pub fn run_and_count(&self, runner: &Runner, feed: Feed, packets: u32) -> anyhow::Result<Run> {
        let (case, expected) = (self.case, self.case.verdict());
        let before = self.counters().packets[case.counter()];
        let (mean_ns, verdict) = runner.run(feed, self.lb.borrow().program(), packets)?;
        ensure!(verdict == expected, "{case}: the last packet's verdict was {verdict}, expected {expected}");
        Ok(Run { mean_ns, counted_packets: self.counters().packets[case.counter()] - before })
    }

    /// Frees all entries of the connection table except `kept`, and returns the number of freed entries. Fails when the
    /// kernel offers no grace period.
    pub fn free_all_but(&self, kept: &HashSet<ConnectionIndex>) -> anyhow::Result<usize> {
        self.free(|connections| connections.filter(|connection| !kept.contains(&connection.index)).collect())
    }

    fn free(
        &self,
        chosen: impl FnOnce(&mut dyn Iterator<Item = Connection>) -> Vec<Connection>,
    ) -> anyhow::Result<usize> {
        let mut lb = self.lb.borrow_mut();
        let connections = chosen(&mut lb.connections(self.service));
        lb.free_connections(&connections)
    }

    /// Returns the number of used entries of the connection table.
    pub fn entries_in_use(&self) -> usize {
        self.lb.borrow().connections_in_use()
    }
}

/// Returns a random table of 128 buckets. Each has one candidate, as for `crossrss` (rule `Table`), or eight.
fn table(rule: PlacementRule, groups: usize, servers: &[ServerId], rng: &mut Xoshiro256PlusPlus) -> PlacementTable {
    let bucket_count = BucketCount::PUBLISHED;
    let core_slots: Vec<ServerCore> =
        servers.iter().flat_map(|server| (0..CORE_COUNT).map(|core| ServerCore { server: *server, core })).collect();
    let candidates_per_bucket = if rule == PlacementRule::Table { 1 } else { intf::MAX_CANDIDATES };
    let count = groups as u32 * bucket_count.get() * candidates_per_bucket;
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
        bucket_count,
        groups: (0..groups).map(|_| RssKey::random(rng)).collect(),
        candidates_per_bucket,
        candidates,
        assignment_cost: intf::LOAD_ONE / 1000,
        core_slots,
        members,
        consistent_servers: rendezvous_table(servers, bucket_count),
        previous_consistent_servers: Vec::new(),
        down_servers: Vec::new(),
        core_slot_ages: Vec::new(),
    }
}
