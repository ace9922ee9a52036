//! A load balancer without a device, and checks of the packets that it sends.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};

use coreward_dataplane::lb::{BroadcastRateLimits, LB_COUNTER_COUNT, LoadBalancerOptions, Server, ServiceIndex};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{self, Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::uniform_below;
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng;

use super::FOREIGN_TIME_KEY;
use super::model_checked_lb::ModelCheckedLb;

/// Verdict of an XDP program that drops the packet (linux/bpf.h).
pub const XDP_DROP: i32 = 1;
pub const XDP_PASS: i32 = 2;
pub const XDP_TX: i32 = 3;

/// MAC address of the balancer, which is the destination of the frames of [`super::TcpPacket`].
pub const LOAD_BALANCER_MAC: MacAddress = MacAddress([0; 6]);

pub const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
pub const CLIENT_ENDPOINT: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 1, 0, 7), 40312);

pub fn random_client(rng: &mut impl Rng) -> (Ipv4Addr, u16) {
    (Ipv4Addr::from(rng.next_u32()), rng.next_u32() as u16)
}

pub fn four_tuple_to_vip(client: (Ipv4Addr, u16)) -> FourTuple {
    FourTuple::ipv4(client, VIP)
}

pub fn server_id_from_number(number: u64) -> ServerId {
    ServerId::try_from(number).unwrap()
}

pub fn service_address(vip: impl Into<SocketAddr>) -> ServiceAddress {
    ServiceAddress { vip_and_port: vip.into(), protocol: TransportProtocol::Tcp }
}

/// IP identification or IPv6 flow label that a forwarded packet must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpectedIdentification {
    Unchanged,
    /// Id of the bucket's previous server, or `NO_SERVER` if `None`.
    PreviousServer(Option<ServerId>),
}

/// Returns `frame` with `identification` as its IP identification (with a correct header checksum) or IPv6 flow label.
fn frame_with_identification(frame: &[u8], identification: u16) -> Vec<u8> {
    let mut changed_frame = frame.to_vec();
    if super::is_ipv6(&changed_frame) {
        changed_frame[15] &= 0xf0;
        changed_frame[16..18].copy_from_slice(&identification.to_be_bytes());
        return changed_frame;
    }
    let ip_header_range = 14..super::tcp_header_offset(&changed_frame);
    changed_frame[18..20].copy_from_slice(&identification.to_be_bytes());
    changed_frame[24..26].fill(0);
    let checksum = !super::ones_complement_sum(&changed_frame[ip_header_range]);
    changed_frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    changed_frame
}

/// Returns the previous server of the bucket to which the table assigns the connection.
pub fn previous_server(table: &PlacementTable, tuple: &FourTuple) -> Option<ServerId> {
    let bucket = table.bucket_count.bucket_of_hash(table.rss_key_by_group[0].toeplitz_hash(&tuple.bytes()));
    table.previous_consistent_server_by_bucket.get(bucket as usize).copied().flatten()
}

/// Returns `options` with a fixed connection hash key, unless they already contain a key. With random keys, each run of
/// a test would have other hash collisions.
fn options_with_fixed_hash_key(options: LoadBalancerOptions) -> LoadBalancerOptions {
    let fixed_key = CookieKey { k0: 0x5d3c_91ab, k1: 0x0f1e_77c9 };
    LoadBalancerOptions { connection_hash_key: options.connection_hash_key.or(Some(fixed_key)), ..options }
}

pub struct TestBalancer {
    pub lb: ModelCheckedLb,
    pub service_indexes: Vec<ServiceIndex>,
    pub fleet_keys: FleetCookieKeys,
    /// MAC address of each server, by the index of its service in `service_indexes` and by server id.
    pub server_macs: HashMap<(usize, ServerId), MacAddress>,
    /// Number of connections that the round robin rule has placed so far.
    pub round_robin_connection_count: u64,
    pub newest_table: Option<PlacementTable>,
}

impl TestBalancer {
    /// Returns a balancer with a TCP service in the default mode at each of `vips`.
    pub fn new(vips: &[(Ipv4Addr, u16)], rng: &mut impl Rng) -> Self {
        let services: Vec<_> = vips.iter().map(|vip| (service_address(*vip), ServiceSettings::default())).collect();
        Self::with_model(&services, LoadBalancerOptions::default(), rng)
    }

    /// Returns a balancer whose results are compared with those of the reference model. Panics when `options` limits
    /// broadcasts.
    pub fn with_model(
        services: &[(ServiceAddress, ServiceSettings)],
        options: LoadBalancerOptions,
        rng: &mut impl Rng,
    ) -> Self {
        assert_eq!(
            options.broadcast_limits,
            BroadcastRateLimits::DEFAULT_BROADCAST_LIMITS,
            "expected no limits, or with_limits"
        );
        Self::with_loaded_lb(
            ModelCheckedLb::load_with_model(options_with_fixed_hash_key(options), LOAD_BALANCER_MAC),
            services,
            rng,
        )
    }

    /// Returns a balancer whose results are not compared with those of a model, so that `options` may limit broadcasts.
    pub fn without_model(
        services: &[(ServiceAddress, ServiceSettings)],
        options: LoadBalancerOptions,
        rng: &mut impl Rng,
    ) -> Self {
        Self::with_loaded_lb(
            ModelCheckedLb::load_without_model(options_with_fixed_hash_key(options), LOAD_BALANCER_MAC),
            services,
            rng,
        )
    }

    fn with_loaded_lb(
        mut lb: ModelCheckedLb,
        services: &[(ServiceAddress, ServiceSettings)],
        rng: &mut impl Rng,
    ) -> Self {
        let service_indexes = lb.set_services(services).unwrap();
        let zero_key = CookieKey { k0: 0, k1: 0 };
        let fleet_keys = FleetCookieKeys { keys: [zero_key; 2], current_key_index: CookieKeyIndex::First };
        let mut balancer = Self {
            lb,
            service_indexes,
            fleet_keys,
            server_macs: HashMap::new(),
            round_robin_connection_count: 0,
            newest_table: None,
        };
        balancer.set_random_keys(rng);
        balancer
    }

    pub fn set_random_keys(&mut self, rng: &mut impl Rng) {
        let mut draw_random_key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        self.fleet_keys =
            FleetCookieKeys { keys: [draw_random_key(), draw_random_key()], current_key_index: CookieKeyIndex::First };
        self.lb.set_cookie_keys(&self.fleet_keys);
    }

    /// Returns a TSval with the server's id as its cookie, stamped with one of the fleet's two keys at random.
    pub fn stamp_tsval_by_random_key(&self, tuple: &FourTuple, server: ServerId, rng: &mut impl Rng) -> u32 {
        let current = if rng.next_u32() & 1 == 0 { CookieKeyIndex::First } else { CookieKeyIndex::Second };
        let keys = FleetCookieKeys { current_key_index: current, ..self.fleet_keys };
        cookie::stamp_tsval(&keys, &FOREIGN_TIME_KEY, tuple, Cookie::Server(server), rng.next_u32())
    }

    /// Replaces all servers by `count` servers with random MAC addresses. Returns their random ids, sorted.
    pub fn replace_servers(&mut self, service_position: usize, count: usize, rng: &mut impl Rng) -> Vec<ServerId> {
        for (server, _) in self.lb.servers(self.service_indexes[service_position]) {
            self.lb.remove_server(self.service_indexes[service_position], server);
            self.server_macs.remove(&(service_position, server));
        }
        let mut server_ids: Vec<ServerId> = Vec::new();
        while server_ids.len() < count {
            let random_id = server_id_from_number(u64::from(uniform_below(rng, intf::SERVER_ID_COUNT)));
            if self.server_macs.contains_key(&(service_position, random_id)) {
                continue;
            }
            let mut mac = [0; 6];
            rng.fill_bytes(&mut mac);
            mac[0] &= 0xfe;
            self.server_macs.insert((service_position, random_id), MacAddress(mac));
            self.lb.set_server(
                self.service_indexes[service_position],
                random_id,
                Server { mac: Some(MacAddress(mac)), is_eligible: true },
            );
            server_ids.push(random_id);
        }
        server_ids.sort();
        server_ids
    }

    pub fn install_table(&mut self, service_position: usize, table: &PlacementTable) {
        self.lb.install_table(self.service_indexes[service_position], table).unwrap();
        self.newest_table = Some(table.clone());
    }

    pub fn process_frame(&self, frame: &[u8]) -> (i32, Vec<u8>) {
        let (xdp_action, packet, _) = self.lb.process_frame(frame);
        (xdp_action, packet)
    }

    /// Runs the program on `frame`, which must be forwarded. Returns the MAC address to which it is sent.
    pub fn forward_frame(&self, frame: &[u8]) -> MacAddress {
        let (xdp_action, packet) = self.process_frame(frame);
        assert_eq!(xdp_action, XDP_TX);
        MacAddress(packet[..6].try_into().unwrap())
    }

    fn packet_counts_by_outcome(&self, service_position: Option<usize>) -> [u64; LB_COUNTER_COUNT] {
        match service_position {
            Some(service) => self.lb.service_counters(self.service_indexes[service]).packets_by_outcome,
            None => self.lb.counters_without_service().packets_by_outcome,
        }
    }

    /// Returns all packet counters, each with its service index (`None` for packets without a service), name and value.
    fn packet_counts_by_service(&self) -> Vec<(Option<usize>, &'static str, u64)> {
        let counts_of_service =
            |service| self.packet_counts_by_outcome(service).into_iter().zip(intf::LB_COUNTER_NAMES);
        let service_positions_and_none = (0..self.service_indexes.len()).map(Some).chain([None]);
        service_positions_and_none
            .flat_map(|service| counts_of_service(service).map(move |(count, name)| (service, name, count)))
            .collect()
    }

    /// Processes `frame`, and checks that only the counter `counter_name` of the service increases, by one,
    /// in the program and in the model.
    pub fn process_frame_expecting_counter(
        &self,
        frame: &[u8],
        service_position: Option<usize>,
        counter_name: &str,
    ) -> (i32, Vec<u8>) {
        let counts_before = self.packet_counts_by_service();
        let (xdp_action, packet, outcome) = self.lb.process_frame(frame);
        let counts_after = self.packet_counts_by_service();
        let increased_counters: Vec<_> = std::iter::zip(counts_before, counts_after)
            .filter(|(before, after)| before != after)
            .map(|(before, after)| (after.0, after.1, after.2 - before.2))
            .collect();
        assert_eq!(
            increased_counters,
            [(service_position, counter_name, 1)],
            "verdict {xdp_action}, frame {frame:02x?}"
        );
        if let Some(outcome) = outcome {
            let model_service = service_position.map(|service| usize::from(self.service_indexes[service].as_u16()));
            let model_counter = (outcome.service_slot, intf::LB_COUNTER_NAMES[outcome.counter as usize]);
            assert_eq!((model_service, counter_name), model_counter, "the model's counter, frame {frame:02x?}");
        }
        (xdp_action, packet)
    }

    /// Checks the verdict and the counter of a packet that is not forwarded, and that the packet is unchanged.
    pub fn expect_unforwarded(&self, frame: &[u8], expected_action: i32, service_position: usize, counter_name: &str) {
        let (xdp_action, packet) = self.process_frame_expecting_counter(frame, Some(service_position), counter_name);
        assert_eq!(xdp_action, expected_action, "{counter_name}");
        assert_eq!(packet, frame, "{counter_name}");
    }

    /// Makes the checks of [`expect_unforwarded`](Self::expect_unforwarded) for a packet that belongs to no service.
    pub fn expect_unforwarded_without_service(&self, frame: &[u8], expected_action: i32, counter_name: &str) {
        let (xdp_action, packet) = self.process_frame_expecting_counter(frame, None, counter_name);
        assert_eq!(xdp_action, expected_action, "{counter_name}");
        assert_eq!(packet, frame, "{counter_name}");
    }

    pub fn expect_passed_uncounted(&self, frame: &[u8]) {
        self.expect_unforwarded_without_service(frame, XDP_PASS, "passed_not_service");
    }

    /// Checks that a packet is sent to `server`, and that only its MAC addresses change.
    pub fn expect_sent_to(&self, service_position: usize, frame: &[u8], server: ServerId, counter_name: &str) {
        self.expect_sent_with_identification(
            service_position,
            frame,
            server,
            ExpectedIdentification::Unchanged,
            counter_name,
        );
    }

    /// Checks that a packet is sent to `server` with `identification` as its IP identification or flow label. Apart
    /// from that, only its MAC addresses may change.
    pub fn expect_sent_with_identification(
        &self,
        service_position: usize,
        frame: &[u8],
        server: ServerId,
        identification: ExpectedIdentification,
        counter_name: &str,
    ) {
        let (xdp_action, packet) = self.process_frame_expecting_counter(frame, Some(service_position), counter_name);
        assert_sent_packet(frame, xdp_action, &packet, self.server_macs[&(service_position, server)], identification);
    }

    /// Checks that a packet is broadcast or, if the broadcast limit is reached, dropped and counted as `drop_counter`.
    pub fn expect_broadcast_or_dropped(
        &self,
        service_position: usize,
        frame: &[u8],
        identification: ExpectedIdentification,
        drop_counter: &str,
    ) {
        let counts_before = self.packet_counts_by_outcome(Some(service_position));
        let (xdp_action, packet) = self.process_frame(frame);
        let counts_after = self.packet_counts_by_outcome(Some(service_position));
        let expected_counter = if xdp_action == XDP_TX { "broadcast" } else { drop_counter };
        let increased_counters = std::iter::zip(counts_before, counts_after)
            .zip(intf::LB_COUNTER_NAMES)
            .filter(|((before, after), _)| before != after);
        assert_eq!(increased_counters.map(|(_, name)| name).collect::<Vec<_>>(), [expected_counter]);
        if xdp_action == XDP_TX {
            assert_sent_packet(frame, xdp_action, &packet, MacAddress::BROADCAST, identification);
        } else {
            assert_eq!((xdp_action, &packet[..]), (XDP_DROP, frame));
        }
    }

    pub fn event_count(&self, service_position: usize, event: &str) -> u64 {
        let event_index = intf::LB_EVENT_NAMES.iter().position(|name| *name == event).unwrap();
        self.lb.service_counters(self.service_indexes[service_position]).event_counts[event_index]
    }
}

fn assert_sent_packet(
    frame: &[u8],
    xdp_action: i32,
    packet: &[u8],
    destination: MacAddress,
    identification: ExpectedIdentification,
) {
    assert_eq!(xdp_action, XDP_TX);
    let mut expected_packet = match identification {
        ExpectedIdentification::Unchanged => frame.to_vec(),
        ExpectedIdentification::PreviousServer(None) => frame_with_identification(frame, intf::NO_SERVER as u16),
        ExpectedIdentification::PreviousServer(Some(server)) => frame_with_identification(frame, server.get()),
    };
    expected_packet[..6].copy_from_slice(&destination.0);
    expected_packet[6..12].copy_from_slice(&LOAD_BALANCER_MAC.0);
    assert_eq!(packet, expected_packet);
}

pub fn random_placement_table(
    rule: PlacementRule,
    generation: u64,
    group_count: usize,
    servers: &[ServerId],
    rng: &mut impl Rng,
) -> PlacementTable {
    PlacementTable::random(rule, generation, group_count, servers, rng)
}
