//! A load balancer with one stateful service, and packets of its connections.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use coreward_dataplane::lb::Options;
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::connection_table::{
    Connection, ConnectionHash, OwnerNumber, TableSize, decode_cookie_index, encode_syn_tsecr,
};
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::cookie::{self, Cookie, FleetKeys};
use coreward_model::forwarding::Forwarding;
use coreward_model::placement::PlacementRule;
use rand::Rng;

pub use super::balancer::{VIP, client, tuple};

use super::balancer::{Balancer, OWN_MAC, XDP_TX, random_table, service};
use super::{ACK, SYN, Tcp, aligned_timestamp, timestamp, timestamp_offset, word};

pub const STATEFUL: ServiceMode = ServiceMode {
    consistency: Consistency::Stateful,
    timestamps: Timestamps::Server,
    migration: None,
    forwarding: Forwarding::L2,
};

pub type Client = (Ipv4Addr, u16);

/// Returns the address and port of the client of an IPv4 connection.
pub fn ipv4_client(connection: &Connection) -> Client {
    match connection.client.ip() {
        IpAddr::V4(address) => (address, connection.client.port()),
        IpAddr::V6(address) => panic!("a connection of {address}"),
    }
}

pub fn owner(number: u64) -> OwnerNumber {
    OwnerNumber::try_from(number).unwrap()
}

/// Returns the owner number of the load balancer under test.
pub fn own_number() -> OwnerNumber {
    owner(5)
}

/// Returns a balancer with `entries` connection table entries and a stateful service, and the service's nine servers.
pub fn balancer(entries: u64, rng: &mut impl Rng) -> (Balancer, Vec<ServerId>) {
    let options = Options { connection_table_size: TableSize::try_from(entries).unwrap(), ..Options::default() };
    let mut balancer = Balancer::with(&[(service(VIP), STATEFUL)], options, rng);
    let ids = balancer.replace_servers(0, 9, rng);
    let table = random_table(PlacementRule::RoundRobin, 1, 1, &ids, rng);
    balancer.install(0, &table);
    balancer.lb.set_owner_number(Some(own_number()));
    (balancer, ids)
}

/// Returns a SYN with the same options as Linux sends, and with this TSecr.
pub fn syn_with_tsecr(client: Client, tsecr: u32) -> Tcp {
    let options = [&[2, 4, 5, 0xb4, 4, 2][..], &timestamp(77, tsecr), &[1, 3, 3, 7]].concat();
    Tcp { flags: SYN, options, payload: vec![], ..Tcp::new(client, VIP) }
}

pub fn syn(client: Client) -> Vec<u8> {
    syn_with_tsecr(client, 0).frame()
}

/// Returns a packet of an established connection, whose cookie holds the connection table index `number`.
pub fn packet(keys: &FleetKeys, client: Client, number: u16, flags: u8) -> Tcp {
    let tsecr = cookie::stamp_tsval(keys, &super::TIME_KEY, &tuple(client), Cookie::TableIndex(number), 4711);
    Tcp { flags, options: aligned_timestamp(1, tsecr), ..Tcp::new(client, VIP) }
}

pub fn established(balancer: &Balancer, client: Client, number: u16) -> Vec<u8> {
    packet(&balancer.keys, client, number, ACK).frame()
}

/// Returns the TSecr of a SYN that was forwarded to a server.
pub fn tsecr_of(frame: &[u8]) -> u32 {
    word(frame, timestamp_offset(frame).unwrap() + 4)
}

/// Returns the index in a forwarded SYN that the server will put into its cookies; `None`: the SYN has no index.
pub fn number_of(frame: &[u8]) -> Option<u16> {
    let tsecr = tsecr_of(frame);
    let number = (tsecr & intf::COOKIE_ID_MASK) as u16;
    let (owner, slot) = decode_cookie_index(number);
    (tsecr != 0).then(|| {
        assert_eq!(tsecr, encode_syn_tsecr(owner, slot));
        number
    })
}

/// Connection that the balancer has opened and that has a table entry.
#[derive(Debug, Clone, Copy)]
pub struct OpenConnection {
    pub client: Client,
    pub server: ServerId,
    pub number: u16,
}

impl Balancer {
    fn server_at(&self, mac: &[u8]) -> ServerId {
        let mac = MacAddress(mac.try_into().unwrap());
        self.macs.iter().find(|(_, of)| **of == mac).expect("a server's MAC address").0.1
    }

    /// Sends a SYN. Returns the server, and the number for cookies; `None`: the connection got no entry.
    pub fn open(&self, client: Client) -> (ServerId, Option<u16>) {
        let (verdict, packet) = self.run_expecting_counter(&syn(client), Some(0), "new_connection");
        assert_eq!(verdict, XDP_TX);
        (self.server_at(&packet[..6]), number_of(&packet))
    }

    /// Sends a SYN, and asserts that the connection gets a table entry.
    pub fn open_with_entry(&self, client: Client) -> OpenConnection {
        let (server, number) = self.open(client);
        OpenConnection { client, server, number: number.expect("an entry") }
    }

    /// Returns the table entry of a client's connection, if it has one.
    pub fn entry(&self, client: Client) -> Option<Connection> {
        let client = SocketAddr::from(client);
        let mut found = self.lb.connections(self.services[0]).filter(|connection| connection.client == client);
        let entry = found.next();
        assert_eq!(found.next(), None, "{client} has two entries");
        entry
    }

    pub fn hash(&self, client: Client) -> ConnectionHash {
        ConnectionHash::new(&self.lb.connection_key(), self.services[0].get(), client.into())
    }

    /// Asserts that the connection table leads a packet of the connection to its server.
    pub fn expect_by_index(&self, opened: &OpenConnection) {
        let frame = established(self, opened.client, opened.number);
        self.expect_sent_to(0, &frame, opened.server, "connection_table");
    }

    /// Asserts that `frame` is sent to the MAC address `mac`, and that only its MAC addresses change.
    pub fn expect_to(&self, frame: &[u8], mac: MacAddress, name: &str) {
        let (verdict, packet) = self.run_expecting_counter(frame, Some(0), name);
        let mut expected = frame.to_vec();
        expected[..6].copy_from_slice(&mac.0);
        expected[6..12].copy_from_slice(&OWN_MAC.0);
        assert_eq!((verdict, packet), (XDP_TX, expected), "{name}");
    }
}
