//! Load balancer that is configured for a measurement, without a network device.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use anyhow::{Context as _, ensure};
use coreward_dataplane::lb::{
    COUNTER_NAMES, LoadBalancer, LoadBalancerOptions, OuterSourceAddresses, PacketCounters, Server, ServerTunnel,
    ServiceIndex, XdpMode,
};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::connection_table::{
    ConnectionEntry, ConnectionIndex, ConnectionTableSize, TableOwnerNumber, encode_cookie_index,
};
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceSettings};
use coreward_model::cookie::{self, Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::lb_stamping;
use coreward_model::placement::{
    BucketCount, CandidateCore, PlacementRule, PlacementTable, PlacementTableMember, ServerCore, rendezvous_table,
};
use coreward_model::rss::{RssKey, seeded_rng, uniform_below};
use coreward_model::tuple::TransportProtocol;
use coreward_model::{ServerId, ServiceAddress};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::runner::{FrameTemplate, PACKET_COUNT, PacketGenerator, PacketRunner, PacketVariation};
use super::workload::{
    FIRST_SERVER_MAC, IPV4_SERVICE_ADDRESS, LOAD_BALANCER_MAC, NewConnectionCase, PacketCase, PacketDirection,
    random_client_addresses, response_frame_template, syn_frame_template,
};

/// Number of servers in the pool, as in a small fleet.
const SERVER_COUNT: u64 = 64;
const CORES_PER_SERVER: u16 = 16;
/// Source addresses of the outer headers of encapsulated packets.
const OUTER_SOURCE_ADDRESSES: OuterSourceAddresses =
    OuterSourceAddresses { ipv4: Ipv4Addr::new(10, 2, 0, 1), ipv6: Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1) };
const ETHERNET_MTU: u32 = 1500;

/// Number of flow-table entries, which is enough for all connections. On average, a set of eight entries holds 0.5
/// connections. The probability that none of the two million sets gets more than eight is 99 %.
pub const FLOW_TABLE_ENTRIES: u32 = PACKET_COUNT as u32 * 16;

/// Number of connection-table entries, which is enough for all connections. On average, 512 of a partition's 1024
/// entries are used.
pub const CONNECTION_TABLE_ENTRIES: u64 = 2 * PACKET_COUNT as u64;

/// Returns the address of the only service. For [`PacketCase::NoService`], it differs from the packets' destination.
fn service_address(case: PacketCase) -> SocketAddr {
    if case == PacketCase::NoService { IPV4_SERVICE_ADDRESS.into() } else { case.destination_address() }
}

/// Load balancer without a device, which is configured for the packets of one case.
pub struct MeasuredLoadBalancer {
    case: PacketCase,
    load_balancer: RefCell<LoadBalancer>,
    service_index: ServiceIndex,
    cookie_keys: FleetCookieKeys,
    server_ids: Vec<ServerId>,
    owner_number: TableOwnerNumber,
}

/// Placement of the service's new connections, and sizes of the tables that hold connection state.
#[derive(Debug, Clone, Copy)]
pub struct PlacementSetup {
    pub placement_rule: PlacementRule,
    pub rss_group_count: usize,
    pub connection_table_size: ConnectionTableSize,
    pub flow_table_entry_count: u32,
}

impl PlacementSetup {
    fn for_case(case: PacketCase) -> anyhow::Result<Self> {
        let (placement_rule, rss_group_count) = match case {
            PacketCase::NewConnection(NewConnectionCase { placement_rule: rule, rss_group_count, .. }) => {
                (rule, rss_group_count)
            }
            _ => (PlacementRule::Table, 1),
        };
        let connection_table_entries = match case {
            PacketCase::EstablishedConnections(ConsistencyMode::Stateful, _) => CONNECTION_TABLE_ENTRIES,
            PacketCase::NewConnection(NewConnectionCase {
                consistency: ConsistencyMode::Stateful,
                connection_count: connections,
                ..
            }) => 2 * connections as u64,
            _ => u64::from(intf::CONNECTIONS_PER_PARTITION),
        };
        // With LB-side stamping, only connections without stamps use the flow table, and here there are none.
        let flow_table_entries =
            if case.is_lb_stamped() { intf::DEFAULT_FLOW_TABLE_ENTRIES } else { FLOW_TABLE_ENTRIES };
        Ok(Self {
            placement_rule,
            rss_group_count,
            connection_table_size: ConnectionTableSize::try_from(connection_table_entries)?,
            flow_table_entry_count: flow_table_entries,
        })
    }
}

fn server_mac(server_index: usize) -> MacAddress {
    let mut mac = FIRST_SERVER_MAC;
    mac.0[4..].copy_from_slice(&(server_index as u16).to_be_bytes());
    mac
}

fn service_settings(case: PacketCase) -> ServiceSettings {
    let timestamps = if case.is_lb_stamped() { CookieStamper::LoadBalancer } else { CookieStamper::Server };
    let (consistency, forwarding) = (case.consistency(), case.forwarding());
    ServiceSettings { consistency, timestamps, forwarding, ..ServiceSettings::default() }
}

/// Returns random ids for the pool's servers. They are sparse, like the ids that the controller assigns.
fn random_server_ids(case: PacketCase, rng: &mut Xoshiro256PlusPlus) -> anyhow::Result<Vec<ServerId>> {
    let server_id_count =
        if case.is_lb_stamped() { lb_stamping::STAMPABLE_SERVER_ID_COUNT } else { ServerId::COUNT as u64 };
    let server_id_step = server_id_count / SERVER_COUNT;
    let random_server_id = |server_index: u64| {
        Ok(ServerId::try_from(server_index * server_id_step + u64::from(uniform_below(rng, server_id_step as u32)))?)
    };
    (0..SERVER_COUNT).map(random_server_id).collect()
}

/// Adds eligible servers to the service, each with its MAC address and its tunnel.
fn add_servers_to_balancer(
    load_balancer: &mut LoadBalancer,
    case: PacketCase,
    service_index: ServiceIndex,
    server_ids: &[ServerId],
) -> anyhow::Result<()> {
    for (server_index, server_id) in server_ids.iter().enumerate() {
        let mac = server_mac(server_index);
        load_balancer.set_server(service_index, *server_id, Server { mac: Some(mac), is_eligible: true });
        let destination_address = case.outer_destination_address(*server_id);
        load_balancer.set_server_tunnel(*server_id, ServerTunnel { destination_address, source_port: None })?;
    }
    Ok(())
}

#[derive(Debug, Clone, Copy)]
pub struct PacketRunResult {
    /// Mean time per packet (ns).
    pub mean_ns_per_packet: f64,
    /// Number of packets in this run that the case's expected counter has counted.
    pub counted_packet_count: u64,
}

impl MeasuredLoadBalancer {
    /// Loads a load balancer and opens all connections of the case's packets. Fails without the capabilities to load
    /// BPF programs, or when a connection gets no entry.
    pub fn new(case: PacketCase) -> anyhow::Result<Self> {
        Self::with_setup(case, PlacementSetup::for_case(case)?)
    }

    /// Loads a load balancer like [`new`](Self::new), but with `setup` instead of the case's own setup.
    pub fn with_setup(case: PacketCase, setup: PlacementSetup) -> anyhow::Result<Self> {
        let mut rng = seeded_rng(1, 0);
        let mut load_balancer = LoadBalancer::load(LoadBalancerOptions {
            flow_table_entry_count: setup.flow_table_entry_count,
            connection_table_size: setup.connection_table_size,
            packets_read_clock: true,
            ..LoadBalancerOptions::default()
        })?;
        load_balancer.set_own_mac(LOAD_BALANCER_MAC);
        load_balancer.set_outer_sources_and_mtu(OUTER_SOURCE_ADDRESSES, ETHERNET_MTU);
        let address = ServiceAddress { vip_and_port: service_address(case), protocol: TransportProtocol::Tcp };
        let service_index = load_balancer.set_services(&[(address, service_settings(case))])?[0];
        let mut random_cookie_key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let cookie_keys = FleetCookieKeys {
            keys: [random_cookie_key(), random_cookie_key()],
            current_key_index: CookieKeyIndex::First,
        };
        load_balancer.set_cookie_keys(&cookie_keys);
        load_balancer.set_time_key(service_index, cookie_keys.keys[1]);
        let owner_number = TableOwnerNumber::try_from(5)?;
        load_balancer.set_owner_number(Some(owner_number));
        let server_ids = random_server_ids(case, &mut rng)?;
        add_servers_to_balancer(&mut load_balancer, case, service_index, &server_ids)?;
        load_balancer.install_table(
            service_index,
            &random_placement_table(setup.placement_rule, setup.rss_group_count, &server_ids, &mut rng),
        )?;
        let balancer = Self {
            case,
            load_balancer: RefCell::new(load_balancer),
            service_index,
            cookie_keys,
            server_ids,
            owner_number,
        };
        balancer.open_connections()?;
        if case == PacketCase::LbStamped(PacketDirection::ToServer) {
            balancer.send_response_per_server()?;
        }
        Ok(balancer)
    }

    /// Sends a response of each server through the load balancer. The load balancer thus learns the servers' clocks,
    /// which it needs to restore TSecr.
    fn send_response_per_server(&self) -> anyhow::Result<()> {
        let FrameTemplate { frame_bytes: mut response_bytes, ports_offset, .. } = response_frame_template();
        let response_ports = &mut response_bytes[ports_offset as usize..][..4];
        response_ports.copy_from_slice(&[self.case.destination_address().port().to_be_bytes(), [4, 0]].concat());
        for server_index in 0..self.server_ids.len() {
            response_bytes[6..12].copy_from_slice(&server_mac(server_index).0);
            test_run::run_program(self.load_balancer.borrow().program_fd(), &response_bytes, 1)?;
        }
        let stamped_packet_count =
            self.case_packet_counters().packets_by_outcome[intf::LB_COUNTER_REPLY_STAMPED as usize];
        ensure!(
            stamped_packet_count == self.server_ids.len() as u64,
            "{}: {stamped_packet_count} answers were stamped",
            self.case
        );
        Ok(())
    }

    pub fn case(&self) -> PacketCase {
        self.case
    }

    /// Opens all connections by their SYNs, if the case needs connection entries.
    fn open_connections(&self) -> anyhow::Result<()> {
        if !self.case.needs_connection_entry() {
            return Ok(());
        }
        let client_addresses = random_client_addresses(self.case.connection_count());
        let syn_packets: Vec<PacketVariation> =
            client_addresses.iter().map(|client| self.packet_from_client(client, 0)).collect();
        let lb = self.load_balancer.borrow();
        PacketRunner::new(&syn_frame_template(), &syn_packets, 0)?.choose_program_and_run(
            PacketGenerator::VariedFrame,
            lb.program_fd(),
            syn_packets.len() as u32,
        )?;
        let opened_connection_count =
            lb.service_counters(self.service_index).packets_by_outcome[intf::LB_COUNTER_NEW_CONNECTION as usize];
        ensure!(
            opened_connection_count == syn_packets.len() as u64,
            "{}: {opened_connection_count} connections were opened",
            self.case
        );
        Ok(())
    }

    fn packet_from_client(&self, client: &SocketAddrV4, tsecr: u32) -> PacketVariation {
        let mut port_bytes = [client.port().to_be_bytes(), self.case.destination_address().port().to_be_bytes()];
        if self.case == PacketCase::LbStamped(PacketDirection::ToClient) {
            port_bytes.reverse();
        }
        let ports = port_bytes.concat();
        PacketVariation {
            client_address: u32::from_ne_bytes(client.ip().octets()),
            ports: u32::from_ne_bytes(ports.try_into().expect("four bytes")),
            tsecr: tsecr.to_be(),
            line_index: 0,
        }
    }

    /// Returns one packet per connection, in random order, each with the stamp of its server. Fails when a connection
    /// has no entry.
    pub fn shuffled_packet_variations(&self) -> anyhow::Result<Vec<PacketVariation>> {
        let mut rng = seeded_rng(3, 0);
        let entry_by_client = self.connection_indexes_by_client();
        let client_addresses = random_client_addresses(self.case.connection_count());
        let packets = client_addresses.iter().map(|client| {
            let cookie = match self.case {
                PacketCase::NewConnection(_) | PacketCase::NewConnectionIpv6 => {
                    return Ok(self.packet_from_client(client, 0));
                }
                PacketCase::LbStamped(PacketDirection::ToClient) => {
                    return Ok(self.packet_from_client(client, rng.next_u32()));
                }
                PacketCase::LbStamped(PacketDirection::ToServer) => {
                    return Ok(self.packet_from_client(client, self.random_server_tsecr(client, &mut rng)));
                }
                PacketCase::EstablishedConnections(ConsistencyMode::Stateful, _) => {
                    let entry_index = entry_by_client
                        .get(&SocketAddr::from(*client))
                        .with_context(|| format!("{client} has no entry"))?;
                    Cookie::TableIndex(encode_cookie_index(self.owner_number, entry_index.slot()))
                }
                _ => Cookie::Server(self.server_ids[uniform_below(&mut rng, self.server_ids.len() as u32) as usize]),
            };
            let tuple = self.case.four_tuple(client);
            let tsecr =
                cookie::stamp_tsval(&self.cookie_keys, &self.cookie_keys.keys[0], &tuple, cookie, rng.next_u32());
            Ok(self.packet_from_client(client, tsecr))
        });
        packets.collect()
    }

    /// Returns a TSecr as sent by this client, with the stamp that the load balancer adds for a random server.
    fn random_server_tsecr(&self, client: &SocketAddrV4, rng: &mut Xoshiro256PlusPlus) -> u32 {
        let server_id = self.server_ids[uniform_below(rng, self.server_ids.len() as u32) as usize];
        lb_stamping::stamp_tsval(
            &self.cookie_keys,
            &self.cookie_keys.keys[1],
            &self.case.four_tuple(client),
            server_id,
            rng.next_u32(),
        )
    }

    /// Returns the index of each connection's entry in the connection table, by the client's address.
    pub fn connection_indexes_by_client(&self) -> HashMap<SocketAddr, ConnectionIndex> {
        let lb = self.load_balancer.borrow();
        lb.connections(self.service_index).map(|connection| (connection.client, connection.index)).collect()
    }

    /// Attaches the load balancer's XDP program to a device in native mode. Fails when the device has no native XDP or
    /// already has a program.
    pub fn attach(&self, interface: &str) -> anyhow::Result<()> {
        self.load_balancer.borrow_mut().attach(interface, XdpMode::Native).map(drop)
    }

    /// Returns a new descriptor of the load balancer's XDP program, for test runs whose results are not checked.
    pub fn duplicate_program_descriptor(&self) -> anyhow::Result<OwnedFd> {
        Ok(self.load_balancer.borrow().program_fd().try_clone_to_owned()?)
    }

    /// Returns the packet counters of the service, or those of packets without a service if the case has no service.
    pub fn case_packet_counters(&self) -> PacketCounters {
        let lb = self.load_balancer.borrow();
        match self.case {
            PacketCase::NoService => lb.counters_without_service(),
            _ => lb.service_counters(self.service_index),
        }
    }

    /// Runs the program on `packet_count` packets and returns the mean time per packet (ns). Afterwards, frees all
    /// entries that the packets took. Fails when the program does not treat each packet as the case expects.
    pub fn run_packet_batches(
        &self,
        runner: &PacketRunner,
        generator: PacketGenerator,
        packet_count: u32,
    ) -> anyhow::Result<f64> {
        if !self.case.takes_connection_entries() {
            return self.run_packets_and_check_counter(runner, generator, packet_count);
        }
        let packets_per_batch = packet_count.min(runner.connection_count() as u32);
        let batch_count = packet_count / packets_per_batch;
        let mut sum_of_mean_ns = 0.0;
        for _ in 0..batch_count {
            // Freeing waits for a grace period, in which the CPU sleeps and its caches become cold. The first packets
            // fill them again and are not measured.
            self.run_packets_and_check_counter(runner, generator, packets_per_batch / 4)?;
            sum_of_mean_ns +=
                self.run_packets_and_check_counter(runner, generator, packets_per_batch - packets_per_batch / 4)?;
            // Slots are used in the order of memory, so that reading the lowest ones is enough.
            let freed_entry_count =
                self.free_selected_connections(|connections| connections.take(packets_per_batch as usize).collect())?;
            ensure!(
                freed_entry_count == packets_per_batch as usize,
                "{}: {freed_entry_count} entries were taken by {packets_per_batch} packets",
                self.case
            );
        }
        let remaining_entry_count = self.used_table_entry_count();
        ensure!(
            remaining_entry_count == 0,
            "{}: {remaining_entry_count} more entries were taken than packets came",
            self.case
        );
        Ok(sum_of_mean_ns / f64::from(batch_count))
    }

    fn run_packets_and_check_counter(
        &self,
        runner: &PacketRunner,
        generator: PacketGenerator,
        packet_count: u32,
    ) -> anyhow::Result<f64> {
        let case = self.case;
        let run_result = self.run_and_count_packets(runner, generator, packet_count)?;
        let (counter_name, counted_packets) =
            (COUNTER_NAMES[case.expected_counter_index()], run_result.counted_packet_count);
        ensure!(
            counted_packets == u64::from(packet_count),
            "{case}: {counted_packets} of {packet_count} packets were counted as {counter_name}"
        );
        Ok(run_result.mean_ns_per_packet)
    }

    /// Runs the program on `packet_count` packets without a check of the counters. Fails when the verdict on the last
    /// packet differs from the expected verdict.
    pub fn run_and_count_packets(
        &self,
        runner: &PacketRunner,
        generator: PacketGenerator,
        packet_count: u32,
    ) -> anyhow::Result<PacketRunResult> {
        let (case, expected_verdict) = (self.case, self.case.expected_verdict());
        let initial_packet_count = self.case_packet_counters().packets_by_outcome[case.expected_counter_index()];
        let (mean_ns, xdp_verdict) =
            runner.choose_program_and_run(generator, self.load_balancer.borrow().program_fd(), packet_count)?;
        ensure!(
            xdp_verdict == expected_verdict,
            "{case}: the last packet's verdict was {xdp_verdict}, expected {expected_verdict}"
        );
        Ok(PacketRunResult {
            mean_ns_per_packet: mean_ns,
            counted_packet_count: self.case_packet_counters().packets_by_outcome[case.expected_counter_index()]
                - initial_packet_count,
        })
    }

    /// Frees all entries of the connection table except `kept_indices`, and returns the number of freed entries. Fails
    /// when the kernel offers no grace period.
    pub fn free_connections_except(&self, kept_indices: &HashSet<ConnectionIndex>) -> anyhow::Result<usize> {
        self.free_selected_connections(|connections| {
            connections.filter(|connection| !kept_indices.contains(&connection.index)).collect()
        })
    }

    fn free_selected_connections(
        &self,
        select_connections: impl FnOnce(&mut dyn Iterator<Item = ConnectionEntry>) -> Vec<ConnectionEntry>,
    ) -> anyhow::Result<usize> {
        let mut load_balancer = self.load_balancer.borrow_mut();
        let connections = select_connections(&mut load_balancer.connections(self.service_index));
        load_balancer.free_connections(&connections)
    }

    pub fn used_table_entry_count(&self) -> usize {
        self.load_balancer.borrow().count_used_entries_by_scan()
    }
}

/// Returns a random placement table of 128 buckets. Each bucket has one candidate with the rule `Table` (as for
/// `crossrss`), and eight candidates with any other rule.
fn random_placement_table(
    rule: PlacementRule,
    rss_group_count: usize,
    servers: &[ServerId],
    rng: &mut Xoshiro256PlusPlus,
) -> PlacementTable {
    let bucket_count = BucketCount::PAPER_VALUE;
    let core_slots: Vec<ServerCore> = servers
        .iter()
        .flat_map(|server| (0..CORES_PER_SERVER).map(|core| ServerCore { server: *server, core }))
        .collect();
    let candidates_per_bucket = if rule == PlacementRule::Table { 1 } else { intf::MAX_CANDIDATES };
    let candidate_count = rss_group_count as u32 * bucket_count.get() * candidates_per_bucket;
    let mut random_candidate = |_| {
        let core_slot = uniform_below(rng, core_slots.len() as u32) as u16;
        let load = uniform_below(rng, intf::LOAD_ONE);
        CandidateCore { server: core_slots[usize::from(core_slot)].server, fixed_point_load: load, core_slot }
    };
    let candidates = (0..candidate_count).map(&mut random_candidate).collect();
    let members = servers
        .iter()
        .map(|server| PlacementTableMember { server: *server, fixed_point_load: uniform_below(rng, intf::LOAD_ONE) });
    let members = members.collect();
    PlacementTable {
        generation: 1,
        rule,
        bucket_count,
        rss_key_by_group: (0..rss_group_count).map(|_| RssKey::random(rng)).collect(),
        candidates_per_bucket,
        candidates,
        assignment_cost: intf::LOAD_ONE / 1000,
        core_slots,
        members,
        consistent_server_by_bucket: rendezvous_table(servers, bucket_count),
        previous_consistent_server_by_bucket: Vec::new(),
        down_servers: Vec::new(),
        load_age_by_core_slot: Vec::new(),
    }
}
