//! A load balancer with one stateful service, and packets of its connections.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use coreward_dataplane::lb::LoadBalancerOptions;
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::connection_table::{
    ConnectionEntry, ConnectionHash, ConnectionTableSize, TableOwnerNumber, decode_cookie_index, encode_syn_tsecr,
};
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceSettings};
use coreward_model::cookie::{self, Cookie, FleetCookieKeys};
use coreward_model::forwarding::ForwardingMode;
use coreward_model::placement::PlacementRule;
use rand::Rng;

pub use super::balancer::{VIP, four_tuple_to_vip, random_client};

use super::balancer::{LOAD_BALANCER_MAC, TestBalancer, XDP_TX, random_placement_table, service_address};
use super::{
    ACK, FOREIGN_TIME_KEY, SYN, TcpPacket, aligned_timestamp_option, read_u32, timestamp_option, tsval_offset,
};

pub const STATEFUL_SERVICE_SETTINGS: ServiceSettings = ServiceSettings {
    consistency: ConsistencyMode::Stateful,
    timestamps: CookieStamper::Server,
    migration: None,
    forwarding: ForwardingMode::L2,
};

pub type ClientEndpoint = (Ipv4Addr, u16);

pub fn ipv4_client_endpoint(connection: &ConnectionEntry) -> ClientEndpoint {
    match connection.client.ip() {
        IpAddr::V4(address) => (address, connection.client.port()),
        IpAddr::V6(address) => panic!("a connection of {address}"),
    }
}

pub fn table_owner_number(number: u64) -> TableOwnerNumber {
    TableOwnerNumber::try_from(number).unwrap()
}

pub fn tested_lb_owner_number() -> TableOwnerNumber {
    table_owner_number(5)
}

/// Returns a balancer with a stateful service and a connection table of `entry_count` entries, and the ids of the
/// service's nine servers.
pub fn stateful_balancer(entry_count: u64, rng: &mut impl Rng) -> (TestBalancer, Vec<ServerId>) {
    let options = LoadBalancerOptions {
        connection_table_size: ConnectionTableSize::try_from(entry_count).unwrap(),
        ..LoadBalancerOptions::default()
    };
    let mut balancer = TestBalancer::with_model(&[(service_address(VIP), STATEFUL_SERVICE_SETTINGS)], options, rng);
    let server_ids = balancer.replace_servers(0, 9, rng);
    let table = random_placement_table(PlacementRule::RoundRobin, 1, 1, &server_ids, rng);
    balancer.install_table(0, &table);
    balancer.lb.set_owner_number(Some(tested_lb_owner_number()));
    (balancer, server_ids)
}

/// Returns a SYN with the same options as Linux sends, and with this TSecr.
pub fn syn_with_tsecr(client: ClientEndpoint, tsecr: u32) -> TcpPacket {
    let options = [&[2, 4, 5, 0xb4, 4, 2][..], &timestamp_option(77, tsecr), &[1, 3, 3, 7]].concat();
    TcpPacket { flags: SYN, tcp_options: options, payload: vec![], ..TcpPacket::new(client, VIP) }
}

pub fn syn_frame(client: ClientEndpoint) -> Vec<u8> {
    syn_with_tsecr(client, 0).to_frame()
}

/// Returns a packet of an established connection, whose cookie holds the connection table index `cookie_index`.
pub fn packet_with_cookie_index(
    keys: &FleetCookieKeys,
    client: ClientEndpoint,
    cookie_index: u16,
    flags: u8,
) -> TcpPacket {
    let tsecr = cookie::stamp_tsval(
        keys,
        &super::FOREIGN_TIME_KEY,
        &four_tuple_to_vip(client),
        Cookie::TableIndex(cookie_index),
        4711,
    );
    TcpPacket { flags, tcp_options: aligned_timestamp_option(1, tsecr), ..TcpPacket::new(client, VIP) }
}

pub fn frame_with_cookie_index(balancer: &TestBalancer, client: ClientEndpoint, cookie_index: u16) -> Vec<u8> {
    packet_with_cookie_index(&balancer.fleet_keys, client, cookie_index, ACK).to_frame()
}

pub fn read_tsecr(frame: &[u8]) -> u32 {
    read_u32(frame, tsval_offset(frame).unwrap() + 4)
}

/// Returns the connection table index in a forwarded SYN, or `None` if the SYN has none. The server puts the index into
/// its cookies.
pub fn read_cookie_index(frame: &[u8]) -> Option<u16> {
    let tsecr = read_tsecr(frame);
    let cookie_index = (tsecr & intf::COOKIE_ID_MASK) as u16;
    let (owner, slot) = decode_cookie_index(cookie_index);
    (tsecr != 0).then(|| {
        assert_eq!(tsecr, encode_syn_tsecr(owner, slot));
        cookie_index
    })
}

/// Connection that the balancer has opened and that has a table entry.
#[derive(Debug, Clone, Copy)]
pub struct EstablishedConnection {
    pub client: ClientEndpoint,
    pub server: ServerId,
    pub cookie_index: u16,
}

impl TestBalancer {
    pub fn server_with_mac(&self, mac: &[u8]) -> ServerId {
        let server_mac = MacAddress(mac.try_into().unwrap());
        self.server_macs.iter().find(|(_, known_mac)| **known_mac == server_mac).expect("a server's MAC address").0.1
    }

    /// Sends a SYN. Returns the chosen server and the connection table index for the server's cookies. The index is
    /// `None` if the connection has no table entry.
    pub fn send_syn(&self, client: ClientEndpoint) -> (ServerId, Option<u16>) {
        let (xdp_action, packet) = self.process_frame_expecting_counter(&syn_frame(client), Some(0), "new_connection");
        assert_eq!(xdp_action, XDP_TX);
        (self.server_with_mac(&packet[..6]), read_cookie_index(&packet))
    }

    /// Sends a SYN and asserts that the connection gets a table entry.
    pub fn open_connection_with_entry(&self, client: ClientEndpoint) -> EstablishedConnection {
        let (server, number) = self.send_syn(client);
        EstablishedConnection { client, server, cookie_index: number.expect("an entry") }
    }

    pub fn connection_entry(&self, client: ClientEndpoint) -> Option<ConnectionEntry> {
        let client = SocketAddr::from(client);
        let mut client_connections =
            self.lb.connections(self.service_indexes[0]).filter(|connection| connection.client == client);
        let entry = client_connections.next();
        assert_eq!(client_connections.next(), None, "{client} has two entries");
        entry
    }

    pub fn connection_hash(&self, client: ClientEndpoint) -> ConnectionHash {
        ConnectionHash::new(&self.lb.connection_hash_key(), self.service_indexes[0].as_u16(), client.into())
    }

    /// Asserts that a packet with the connection's table index is sent to the connection's server.
    pub fn expect_index_leads_to_server(&self, connection: &EstablishedConnection) {
        let frame = frame_with_cookie_index(self, connection.client, connection.cookie_index);
        self.expect_sent_to(0, &frame, connection.server, "connection_table");
    }

    /// Asserts that a packet whose cookie holds the id of `server` is sent to that server.
    pub fn expect_cookie_leads_to_server(&self, client: ClientEndpoint, server: ServerId) {
        let tuple = four_tuple_to_vip(client);
        let tsecr = cookie::stamp_tsval(&self.fleet_keys, &FOREIGN_TIME_KEY, &tuple, Cookie::Server(server), 5);
        let tcp_options = aligned_timestamp_option(1, tsecr);
        let frame = TcpPacket { tcp_options, ..TcpPacket::new(client, VIP) }.to_frame();
        self.expect_sent_to(0, &frame, server, "established");
    }

    /// Asserts that `frame` is sent to the MAC address `mac`, and that only its MAC addresses change.
    pub fn expect_sent_to_mac(&self, frame: &[u8], mac: MacAddress, counter_name: &str) {
        let (xdp_action, packet) = self.process_frame_expecting_counter(frame, Some(0), counter_name);
        let mut expected_packet = frame.to_vec();
        expected_packet[..6].copy_from_slice(&mac.0);
        expected_packet[6..12].copy_from_slice(&LOAD_BALANCER_MAC.0);
        assert_eq!((xdp_action, packet), (XDP_TX, expected_packet), "{counter_name}");
    }
}
