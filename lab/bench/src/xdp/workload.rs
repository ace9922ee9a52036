//! Measured packets.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};

use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::consistency::Consistency;
use coreward_model::forwarding::Forwarding;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use coreward_model::{FourTuple, ServerId};
use rand::Rng as _;

use super::runner::{Feed, Frame, PACKET_COUNT};

/// Verdict of linux/bpf.h that leaves the packet to the kernel.
const XDP_PASS: i32 = 2;
pub const XDP_TX: i32 = 3;

pub const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
/// Address and port of the IPv6 service.
pub const VIP_IPV6: (Ipv6Addr, u16) = (Ipv6Addr::new(0x2001, 0xdb8, 0xc8, 0, 0, 0, 0, 1), VIP.1);
/// Port of the VIP that belongs to no service.
const OTHER_PORT: u16 = 81;
/// MAC address of the load balancer's device.
pub const OWN_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

/// MAC address of the first server in the pool.
pub const FIRST_SERVER_MAC: MacAddress = MacAddress([2, 0, 0, 1, 0, 0]);
/// Offset of the IPv4 source address in an Ethernet frame.
const CLIENT_ADDRESS_OFFSET: u32 = 14 + 12;
/// Offset of the TCP header in an Ethernet frame with an IPv4 header without options.
const TCP_HEADER_OFFSET: usize = 14 + 20;

/// Flag SYN in the flags byte of a TCP header.
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// Kind of packets whose cost is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Case {
    /// Packets of a number of open connections, in random order, each with a valid cookie.
    Established(Consistency, usize),
    /// Packets of open connections, to which the load balancer adds an outer header.
    Encapsulated(Forwarding),
    /// IPv6 packets of open connections, to which the load balancer adds an outer IPv6 header.
    EncapsulatedIpv6(Forwarding),
    /// SYNs of different IPv4 connections.
    NewConnection(NewConnection),
    /// Packets of a number of open IPv6 connections, each with a valid cookie.
    EstablishedIpv6(usize),
    /// SYNs of different IPv6 connections.
    NewConnectionIpv6,
    /// Packets of open connections whose timestamps the load balancer stamps and restores (`timestamps = "lb"`).
    LbStamped(Direction),
    /// TCP packets to a port of the VIP that belongs to no service.
    OtherDestination,
}

/// Direction in which a packet of a connection is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server: the load balancer restores TSecr.
    ToServer,
    /// From the server to the client: the load balancer stamps TSval.
    ToClient,
}

/// Configuration and number of new connections whose SYNs are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewConnection {
    /// Consistency mode of the service. With `Stateful`, each SYN takes a free entry of the connection table.
    pub consistency: Consistency,
    pub rule: PlacementRule,
    pub rss_group_count: usize,
    /// Number of different connections. When they are repeated, their entries are free again.
    pub connections: usize,
}

impl NewConnection {
    /// New connections that are placed by the table, as with the policy `crossrss`.
    pub const STATELESS: NewConnection = NewConnection {
        consistency: Consistency::Stateless,
        rule: PlacementRule::Table,
        rss_group_count: 1,
        connections: PACKET_COUNT,
    };
}

/// Number of connection-table entries that fit into a CPU's cache together with the free list.
const CACHED_ENTRY_COUNT: usize = 1 << 14;

impl Case {
    /// Returns the cases that are measured separately, in the order of the report.
    pub fn measured_alone() -> impl Iterator<Item = Case> {
        let usual = NewConnection::STATELESS;
        let stateful = NewConnection { consistency: Consistency::Stateful, ..usual };
        let rss_group_count = intf::MAX_RSS_GROUPS as usize;
        let without_cookies = [Consistency::None, Consistency::Beamer];
        let encapsulated = [Forwarding::Ipip, Forwarding::Gue];
        PlacementRule::ALL
            .map(|rule| NewConnection { rule, ..usual })
            .into_iter()
            .chain([PlacementRule::Table, PlacementRule::LeastAssigned].map(|rule| NewConnection {
                rule,
                rss_group_count,
                ..usual
            }))
            .chain(PlacementRule::ALL.map(|rule| NewConnection { rule, ..stateful }))
            .chain(PlacementRule::ALL.map(|rule| NewConnection { rule, connections: CACHED_ENTRY_COUNT, ..stateful }))
            .chain(without_cookies.map(|consistency| NewConnection { consistency, ..usual }))
            .map(Case::NewConnection)
            .chain(without_cookies.map(|consistency| Case::Established(consistency, PACKET_COUNT)))
            .chain(encapsulated.map(Case::Encapsulated))
            .chain([1, PACKET_COUNT].map(Case::EstablishedIpv6))
            .chain(encapsulated.map(Case::EncapsulatedIpv6))
            .chain([Case::NewConnectionIpv6])
            .chain([Direction::ToServer, Direction::ToClient].map(Case::LbStamped))
            .chain([Case::OtherDestination])
    }

    pub fn connections(self) -> usize {
        match self {
            Case::Established(_, connections)
            | Case::EstablishedIpv6(connections)
            | Case::NewConnection(NewConnection { connections, .. }) => connections,
            Case::Encapsulated(_)
            | Case::EncapsulatedIpv6(_)
            | Case::NewConnectionIpv6
            | Case::LbStamped(_)
            | Case::OtherDestination => PACKET_COUNT,
        }
    }

    pub fn consistency(self) -> Consistency {
        match self {
            Case::Established(consistency, _) | Case::NewConnection(NewConnection { consistency, .. }) => consistency,
            Case::Encapsulated(_)
            | Case::EncapsulatedIpv6(_)
            | Case::EstablishedIpv6(_)
            | Case::NewConnectionIpv6
            | Case::LbStamped(_)
            | Case::OtherDestination => Consistency::Stateless,
        }
    }

    pub fn forwarding(self) -> Forwarding {
        match self {
            Case::Encapsulated(forwarding) | Case::EncapsulatedIpv6(forwarding) => forwarding,
            _ => Forwarding::L2,
        }
    }

    /// Returns the destination address in the outer header of packets to a server.
    pub fn server_address(self, server: ServerId) -> IpAddr {
        let [high, low] = server.get().to_be_bytes();
        match self {
            Case::EncapsulatedIpv6(_) => Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, server.get()).into(),
            _ => Ipv4Addr::new(10, 9, high, low).into(),
        }
    }

    pub fn feed(self) -> Feed {
        match self {
            Case::Encapsulated(_) | Case::EncapsulatedIpv6(_) => Feed::Shortened,
            // A repeated client might find its last, freed entry among the recent SYNs.
            Case::NewConnection(_) | Case::NewConnectionIpv6 => Feed::GeneratedSource,
            _ => Feed::Packet,
        }
    }

    /// Returns the XDP verdict that is expected for each packet.
    pub fn verdict(self) -> i32 {
        match self {
            Case::LbStamped(Direction::ToClient) | Case::OtherDestination => XDP_PASS,
            _ => XDP_TX,
        }
    }

    pub fn counter(self) -> usize {
        let counter = match self {
            Case::Established(Consistency::HashTable, _) => intf::LB_COUNTER_FLOW_TABLE,
            Case::Established(Consistency::Stateful, _) => intf::LB_COUNTER_CONNECTION_TABLE,
            Case::Established(Consistency::None, _) => intf::LB_COUNTER_PER_PACKET,
            Case::Established(Consistency::Beamer, _)
            | Case::NewConnection(NewConnection { consistency: Consistency::Beamer, .. }) => {
                intf::LB_COUNTER_BUCKET_HASH
            }
            Case::Established(..)
            | Case::Encapsulated(_)
            | Case::EncapsulatedIpv6(_)
            | Case::EstablishedIpv6(_)
            | Case::LbStamped(Direction::ToServer) => intf::LB_COUNTER_ESTABLISHED,
            Case::LbStamped(Direction::ToClient) => intf::LB_COUNTER_REPLY_STAMPED,
            Case::NewConnection(_) | Case::NewConnectionIpv6 => intf::LB_COUNTER_NEW_CONNECTION,
            Case::OtherDestination => intf::LB_COUNTER_PASSED_NOT_SERVICE,
        };
        counter as usize
    }

    /// Returns whether each packet takes an entry of the connection table.
    pub fn allocates_entries(self) -> bool {
        matches!(self, Case::NewConnection(NewConnection { consistency: Consistency::Stateful, .. }))
    }

    /// Returns whether the SYNs of the packets' connections must have created entries before.
    pub fn needs_connection_entry(self) -> bool {
        matches!(self, Case::Established(Consistency::Stateful | Consistency::HashTable, _))
    }

    /// Returns the destination address and port of the packets.
    pub fn destination(self) -> SocketAddr {
        match self {
            Case::OtherDestination => (VIP.0, OTHER_PORT).into(),
            Case::EstablishedIpv6(_) | Case::EncapsulatedIpv6(_) | Case::NewConnectionIpv6 => VIP_IPV6.into(),
            _ => VIP.into(),
        }
    }

    /// Returns the four-tuple of the connection of a client from [`clients`], converted to IPv6 if the case needs it.
    pub fn tuple(self, client: &SocketAddrV4) -> FourTuple {
        let client = match self.destination() {
            SocketAddr::V4(_) => (*client).into(),
            SocketAddr::V6(_) => (client_ipv6(*client.ip()), client.port()).into(),
        };
        FourTuple::new(client, self.destination()).expect("of one family")
    }

    /// Returns whether the load balancer stamps the connections' timestamps.
    pub fn is_lb_stamped(self) -> bool {
        matches!(self, Case::LbStamped(_))
    }

    /// Returns the frame from which the packets are generated: an ACK without payload, or a SYN.
    pub fn frame(self) -> Frame {
        match self {
            Case::NewConnection(_) => syn(),
            Case::LbStamped(Direction::ToClient) => response(),
            Case::EstablishedIpv6(_) | Case::EncapsulatedIpv6(_) => request_ipv6(),
            Case::NewConnectionIpv6 => in_ipv6(&syn()),
            Case::OtherDestination => established((VIP.0, OTHER_PORT)),
            _ => established(VIP),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::Established(consistency, 1) => write!(f, "{}, 1 connection", consistency.name()),
            Case::Established(consistency, connections) => {
                write!(f, "{}, {connections} connections", consistency.name())
            }
            Case::Encapsulated(forwarding) => {
                write!(f, "stateless by {}, {PACKET_COUNT} connections", forwarding.name())
            }
            Case::NewConnection(NewConnection { consistency, rule, rss_group_count, connections }) => {
                write!(f, "first, {}, {}", consistency.name(), rule.name())?;
                if *rss_group_count > 1 {
                    write!(f, ", {rss_group_count} RSS groups")?;
                }
                if *connections < PACKET_COUNT { write!(f, ", {connections} entries") } else { Ok(()) }
            }
            Case::EncapsulatedIpv6(forwarding) => {
                write!(f, "IPv6 in IPv6, stateless by {}, {PACKET_COUNT} connections", forwarding.name())
            }
            Case::EstablishedIpv6(connections) => write!(f, "IPv6, stateless, {connections} connections"),
            Case::NewConnectionIpv6 => f.write_str("first, IPv6, stateless, table"),
            Case::LbStamped(Direction::ToServer) => f.write_str("timestamps by the load balancer, to the server"),
            Case::LbStamped(Direction::ToClient) => f.write_str("timestamps by the load balancer, to the client"),
            Case::OtherDestination => f.write_str("not for a VIP"),
        }
    }
}

/// Returns a frame with a SYN to the VIP, whose options are those of Linux.
pub fn syn() -> Frame {
    frame(VIP, SYN, &[2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7], 12)
}

/// Returns a frame with a client's ACK to the VIP.
pub fn request() -> Frame {
    established(VIP)
}

fn established(destination: (Ipv4Addr, u16)) -> Frame {
    frame(destination, ACK, &[1, 1, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0], 8)
}

/// Returns a TCP frame of a client. `tsecr`: offset of TSecr in the options.
fn frame(destination: (Ipv4Addr, u16), flags: u8, options: &[u8], tsecr: u32) -> Frame {
    let (vip, port) = destination;
    let tcp_header = 20 + options.len();
    let mut bytes = [&OWN_MAC.0[..], &[2, 0, 0, 0, 0, 2], &[8, 0]].concat();
    bytes.extend([0x45, 0, 0, 20 + tcp_header as u8, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 1, 0, 7]);
    bytes.extend(vip.octets());
    bytes.extend([0x12, 0x34]);
    bytes.extend(port.to_be_bytes());
    bytes.extend([0, 0, 0, 1, 0, 0, 0, 2, (tcp_header * 4) as u8, flags, 1, 0, 0, 0, 0, 0]);
    let tsecr_offset = bytes.len() as u32 + tsecr;
    bytes.extend(options);
    Frame {
        bytes,
        client_offset: CLIENT_ADDRESS_OFFSET,
        ports_offset: TCP_HEADER_OFFSET as u32,
        tsecr_offset,
        destination_port: port,
    }
}

/// Converts a frame between a client and [`VIP`] to one between a client and [`VIP_IPV6`].
fn in_ipv6(ipv4: &Frame) -> Frame {
    let segment = &ipv4.bytes[TCP_HEADER_OFFSET..];
    let mut bytes = [&ipv4.bytes[..12], &[0x86, 0xdd, 0x60, 0, 0, 0, 0, segment.len() as u8, 6, 64]].concat();
    let mut addresses = [client_ipv6(Ipv4Addr::UNSPECIFIED), VIP_IPV6.0].map(|address| address.octets());
    let mut client_end = bytes.len() + size_of::<Ipv6Addr>();
    if ipv4.client_offset != CLIENT_ADDRESS_OFFSET {
        addresses.reverse();
        client_end += size_of::<Ipv6Addr>();
    }
    bytes.extend(addresses.as_flattened());
    let ports_offset = bytes.len();
    bytes.extend(segment);
    let tsecr_offset = ipv4.tsecr_offset + (ports_offset - TCP_HEADER_OFFSET) as u32;
    let client_offset = (client_end - size_of::<Ipv4Addr>()) as u32;
    Frame { bytes, client_offset, ports_offset: ports_offset as u32, tsecr_offset, ..*ipv4 }
}

/// Returns a frame with a client's ACK to the IPv6 service.
pub fn request_ipv6() -> Frame {
    in_ipv6(&request())
}

/// Returns a frame with a server's ACK from the IPv6 service.
pub fn response_ipv6() -> Frame {
    in_ipv6(&response())
}

/// Returns the IPv6 address that corresponds to a client's IPv4 address.
pub fn client_ipv6(client: Ipv4Addr) -> Ipv6Addr {
    Ipv6Addr::from(0x2001_0db8_0001 << 80 | u128::from(client.to_bits()))
}

/// Returns a frame with a server's ACK. Its `tsecr_offset` is that of TSval, the first of the two timestamps.
pub fn response() -> Frame {
    let to_server = frame(VIP, ACK, &[1, 1, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0], 4);
    let mut bytes = to_server.bytes;
    bytes[6..12].copy_from_slice(&FIRST_SERVER_MAC.0);
    let (addresses, length) = (CLIENT_ADDRESS_OFFSET as usize, size_of::<u32>());
    bytes[addresses..addresses + 2 * length].rotate_left(length);
    Frame { bytes, client_offset: CLIENT_ADDRESS_OFFSET + length as u32, ..to_server }
}

/// Returns the first `count` clients of an endless random sequence, which is always the same.
pub fn clients(count: usize) -> Vec<SocketAddrV4> {
    let mut rng = seeded_rng(2, 0);
    (0..count).map(|_| SocketAddrV4::new(Ipv4Addr::from(rng.next_u32()), rng.next_u32() as u16)).collect()
}
