//! Packets whose processing cost is measured.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};

use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::consistency::ConsistencyMode;
use coreward_model::forwarding::ForwardingMode;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use coreward_model::{FourTuple, ServerId};
use rand::Rng as _;

use super::runner::{FrameTemplate, PACKET_COUNT, PacketGenerator};

/// Verdict of linux/bpf.h that leaves the packet to the kernel.
const XDP_PASS: i32 = 2;
pub const XDP_TX: i32 = 3;

pub const IPV4_SERVICE_ADDRESS: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
pub const IPV6_SERVICE_ADDRESS: (Ipv6Addr, u16) =
    (Ipv6Addr::new(0x2001, 0xdb8, 0xc8, 0, 0, 0, 0, 1), IPV4_SERVICE_ADDRESS.1);
/// Port of the VIP at which there is no service.
const PORT_WITHOUT_SERVICE: u16 = 81;
pub const LOAD_BALANCER_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

pub const FIRST_SERVER_MAC: MacAddress = MacAddress([2, 0, 0, 1, 0, 0]);
/// Offset of the IPv4 source address in an Ethernet frame.
const IPV4_SOURCE_OFFSET: u32 = 14 + 12;
/// Offset of the TCP header in an Ethernet frame whose IPv4 header has no options.
const TCP_HEADER_OFFSET: usize = 14 + 20;

const TCP_FLAG_SYN: u8 = 0x02;
const TCP_FLAG_ACK: u8 = 0x10;

/// Kind of packets whose processing cost in the load balancer is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketCase {
    /// Packets of this number of open connections, in random order, each with a valid cookie.
    EstablishedConnections(ConsistencyMode, usize),
    /// Packets of open connections, to which the load balancer adds an outer header.
    Encapsulated(ForwardingMode),
    /// IPv6 packets of open connections, to which the load balancer adds an outer IPv6 header.
    EncapsulatedIpv6(ForwardingMode),
    /// SYNs of different IPv4 connections.
    NewConnection(NewConnectionCase),
    /// Packets of this number of open IPv6 connections, each with a valid cookie.
    EstablishedIpv6Connections(usize),
    /// SYNs of different IPv6 connections.
    NewConnectionIpv6,
    /// Packets of open connections whose timestamps the load balancer stamps and restores (`timestamps = "lb"`).
    LbStamped(PacketDirection),
    /// TCP packets to a port of the VIP that belongs to no service.
    NoService,
}

/// Direction in which a packet of a connection is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketDirection {
    /// From the client to the server, where the load balancer restores TSecr.
    ToServer,
    /// From the server to the client, where the load balancer stamps TSval.
    ToClient,
}

/// Configuration and number of the new connections whose SYNs are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewConnectionCase {
    /// Consistency mode of the service. With `Stateful`, each SYN takes a free entry of the connection table.
    pub consistency: ConsistencyMode,
    pub placement_rule: PlacementRule,
    pub rss_group_count: usize,
    /// Number of different connections, after which they repeat. When a connection repeats, its entry is free again.
    pub connection_count: usize,
}

impl NewConnectionCase {
    /// New connections that are placed by the placement table, as with the policy `crossrss`.
    pub const STATELESS: NewConnectionCase = NewConnectionCase {
        consistency: ConsistencyMode::Stateless,
        placement_rule: PlacementRule::Table,
        rss_group_count: 1,
        connection_count: PACKET_COUNT,
    };
}

/// Number of connection-table entries that fit into a CPU's cache together with the free list.
const CACHE_SIZED_TABLE_ENTRY_COUNT: usize = 1 << 14;

impl PacketCase {
    /// Returns the cases that are measured separately, in the order of the report.
    pub fn separately_measured_cases() -> impl Iterator<Item = PacketCase> {
        let stateless = NewConnectionCase::STATELESS;
        let stateful = NewConnectionCase { consistency: ConsistencyMode::Stateful, ..stateless };
        let rss_group_count = intf::MAX_RSS_GROUPS as usize;
        let modes_without_cookies = [ConsistencyMode::None, ConsistencyMode::Beamer];
        let encapsulations = [ForwardingMode::Ipip, ForwardingMode::Gue];
        PlacementRule::ALL
            .map(|rule| NewConnectionCase { placement_rule: rule, ..stateless })
            .into_iter()
            .chain([PlacementRule::Table, PlacementRule::LeastAssigned].map(|rule| NewConnectionCase {
                placement_rule: rule,
                rss_group_count,
                ..stateless
            }))
            .chain(PlacementRule::ALL.map(|rule| NewConnectionCase { placement_rule: rule, ..stateful }))
            .chain(PlacementRule::ALL.map(|rule| NewConnectionCase {
                placement_rule: rule,
                connection_count: CACHE_SIZED_TABLE_ENTRY_COUNT,
                ..stateful
            }))
            .chain(modes_without_cookies.map(|consistency| NewConnectionCase { consistency, ..stateless }))
            .map(PacketCase::NewConnection)
            .chain(
                modes_without_cookies.map(|consistency| PacketCase::EstablishedConnections(consistency, PACKET_COUNT)),
            )
            .chain(encapsulations.map(PacketCase::Encapsulated))
            .chain([1, PACKET_COUNT].map(PacketCase::EstablishedIpv6Connections))
            .chain(encapsulations.map(PacketCase::EncapsulatedIpv6))
            .chain([PacketCase::NewConnectionIpv6])
            .chain([PacketDirection::ToServer, PacketDirection::ToClient].map(PacketCase::LbStamped))
            .chain([PacketCase::NoService])
    }

    pub fn connection_count(self) -> usize {
        match self {
            PacketCase::EstablishedConnections(_, connections)
            | PacketCase::EstablishedIpv6Connections(connections)
            | PacketCase::NewConnection(NewConnectionCase { connection_count: connections, .. }) => connections,
            PacketCase::Encapsulated(_)
            | PacketCase::EncapsulatedIpv6(_)
            | PacketCase::NewConnectionIpv6
            | PacketCase::LbStamped(_)
            | PacketCase::NoService => PACKET_COUNT,
        }
    }

    pub fn consistency(self) -> ConsistencyMode {
        match self {
            PacketCase::EstablishedConnections(consistency, _)
            | PacketCase::NewConnection(NewConnectionCase { consistency, .. }) => consistency,
            PacketCase::Encapsulated(_)
            | PacketCase::EncapsulatedIpv6(_)
            | PacketCase::EstablishedIpv6Connections(_)
            | PacketCase::NewConnectionIpv6
            | PacketCase::LbStamped(_)
            | PacketCase::NoService => ConsistencyMode::Stateless,
        }
    }

    pub fn forwarding(self) -> ForwardingMode {
        match self {
            PacketCase::Encapsulated(forwarding) | PacketCase::EncapsulatedIpv6(forwarding) => forwarding,
            _ => ForwardingMode::L2,
        }
    }

    /// Returns the destination address in the outer header of packets to a server.
    pub fn outer_destination_address(self, server: ServerId) -> IpAddr {
        let [id_high_byte, id_low_byte] = server.get().to_be_bytes();
        match self {
            PacketCase::EncapsulatedIpv6(_) => Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, server.get()).into(),
            _ => Ipv4Addr::new(10, 9, id_high_byte, id_low_byte).into(),
        }
    }

    pub fn packet_generator(self) -> PacketGenerator {
        match self {
            PacketCase::Encapsulated(_) | PacketCase::EncapsulatedIpv6(_) => PacketGenerator::WithoutOuterHeader,
            // A repeated client might find its previous entry, which was freed, among the recent SYNs.
            PacketCase::NewConnection(_) | PacketCase::NewConnectionIpv6 => PacketGenerator::GeneratedSource,
            _ => PacketGenerator::VariedFrame,
        }
    }

    /// Returns the XDP verdict that is expected for each packet.
    pub fn expected_verdict(self) -> i32 {
        match self {
            PacketCase::LbStamped(PacketDirection::ToClient) | PacketCase::NoService => XDP_PASS,
            _ => XDP_TX,
        }
    }

    pub fn expected_counter_index(self) -> usize {
        let counter = match self {
            PacketCase::EstablishedConnections(ConsistencyMode::HashTable, _) => intf::LB_COUNTER_FLOW_TABLE,
            PacketCase::EstablishedConnections(ConsistencyMode::Stateful, _) => intf::LB_COUNTER_CONNECTION_TABLE,
            PacketCase::EstablishedConnections(ConsistencyMode::None, _) => intf::LB_COUNTER_PER_PACKET,
            PacketCase::EstablishedConnections(ConsistencyMode::Beamer, _)
            | PacketCase::NewConnection(NewConnectionCase { consistency: ConsistencyMode::Beamer, .. }) => {
                intf::LB_COUNTER_BUCKET_HASH
            }
            PacketCase::EstablishedConnections(..)
            | PacketCase::Encapsulated(_)
            | PacketCase::EncapsulatedIpv6(_)
            | PacketCase::EstablishedIpv6Connections(_)
            | PacketCase::LbStamped(PacketDirection::ToServer) => intf::LB_COUNTER_ESTABLISHED,
            PacketCase::LbStamped(PacketDirection::ToClient) => intf::LB_COUNTER_REPLY_STAMPED,
            PacketCase::NewConnection(_) | PacketCase::NewConnectionIpv6 => intf::LB_COUNTER_NEW_CONNECTION,
            PacketCase::NoService => intf::LB_COUNTER_PASSED_NOT_SERVICE,
        };
        counter as usize
    }

    /// Returns whether each of the packets takes a connection-table entry.
    pub fn takes_connection_entries(self) -> bool {
        matches!(self, PacketCase::NewConnection(NewConnectionCase { consistency: ConsistencyMode::Stateful, .. }))
    }

    /// Returns whether the SYNs of the packets' connections must be sent before the measurement, to create
    /// connection-table entries.
    pub fn needs_connection_entry(self) -> bool {
        matches!(self, PacketCase::EstablishedConnections(ConsistencyMode::Stateful | ConsistencyMode::HashTable, _))
    }

    /// Returns the destination address and port of the packets.
    pub fn destination_address(self) -> SocketAddr {
        match self {
            PacketCase::NoService => (IPV4_SERVICE_ADDRESS.0, PORT_WITHOUT_SERVICE).into(),
            PacketCase::EstablishedIpv6Connections(_)
            | PacketCase::EncapsulatedIpv6(_)
            | PacketCase::NewConnectionIpv6 => IPV6_SERVICE_ADDRESS.into(),
            _ => IPV4_SERVICE_ADDRESS.into(),
        }
    }

    /// Returns the four-tuple of a connection whose client is from [`random_client_addresses`], converted to IPv6 if
    /// the case needs it.
    pub fn four_tuple(self, client: &SocketAddrV4) -> FourTuple {
        let client = match self.destination_address() {
            SocketAddr::V4(_) => (*client).into(),
            SocketAddr::V6(_) => (ipv6_client_address(*client.ip()), client.port()).into(),
        };
        FourTuple::new(client, self.destination_address()).expect("of one family")
    }

    /// Returns whether the load balancer stamps the connections' timestamps.
    pub fn is_lb_stamped(self) -> bool {
        matches!(self, PacketCase::LbStamped(_))
    }

    /// Returns the frame from which the packets are generated, which is an ACK without payload or a SYN.
    pub fn frame_template(self) -> FrameTemplate {
        match self {
            PacketCase::NewConnection(_) => syn_frame_template(),
            PacketCase::LbStamped(PacketDirection::ToClient) => response_frame_template(),
            PacketCase::EstablishedIpv6Connections(_) | PacketCase::EncapsulatedIpv6(_) => {
                ipv6_request_frame_template()
            }
            PacketCase::NewConnectionIpv6 => convert_to_ipv6(&syn_frame_template()),
            PacketCase::NoService => ack_frame_template((IPV4_SERVICE_ADDRESS.0, PORT_WITHOUT_SERVICE)),
            _ => ack_frame_template(IPV4_SERVICE_ADDRESS),
        }
    }
}

impl fmt::Display for PacketCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PacketCase::EstablishedConnections(consistency, 1) => write!(f, "{}, 1 connection", consistency.name()),
            PacketCase::EstablishedConnections(consistency, connections) => {
                write!(f, "{}, {connections} connections", consistency.name())
            }
            PacketCase::Encapsulated(forwarding) => {
                write!(f, "stateless by {}, {PACKET_COUNT} connections", forwarding.name())
            }
            PacketCase::NewConnection(NewConnectionCase {
                consistency,
                placement_rule: rule,
                rss_group_count,
                connection_count: connections,
            }) => {
                write!(f, "first, {}, {}", consistency.name(), rule.name())?;
                if *rss_group_count > 1 {
                    write!(f, ", {rss_group_count} RSS groups")?;
                }
                if *connections < PACKET_COUNT { write!(f, ", {connections} entries") } else { Ok(()) }
            }
            PacketCase::EncapsulatedIpv6(forwarding) => {
                write!(f, "IPv6 in IPv6, stateless by {}, {PACKET_COUNT} connections", forwarding.name())
            }
            PacketCase::EstablishedIpv6Connections(connections) => {
                write!(f, "IPv6, stateless, {connections} connections")
            }
            PacketCase::NewConnectionIpv6 => f.write_str("first, IPv6, stateless, table"),
            PacketCase::LbStamped(PacketDirection::ToServer) => {
                f.write_str("timestamps by the load balancer, to the server")
            }
            PacketCase::LbStamped(PacketDirection::ToClient) => {
                f.write_str("timestamps by the load balancer, to the client")
            }
            PacketCase::NoService => f.write_str("not for a VIP"),
        }
    }
}

/// Returns a frame with a SYN to the VIP, whose TCP options are those of Linux.
pub fn syn_frame_template() -> FrameTemplate {
    tcp_frame_template(
        IPV4_SERVICE_ADDRESS,
        TCP_FLAG_SYN,
        &[2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7],
        12,
    )
}

/// Returns a frame with a client's ACK to the VIP.
pub fn request_frame_template() -> FrameTemplate {
    ack_frame_template(IPV4_SERVICE_ADDRESS)
}

fn ack_frame_template(destination: (Ipv4Addr, u16)) -> FrameTemplate {
    tcp_frame_template(destination, TCP_FLAG_ACK, &[1, 1, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0], 8)
}

/// Returns a client's TCP frame. `tsecr_offset_in_options` is the offset of TSecr in the options.
fn tcp_frame_template(
    destination: (Ipv4Addr, u16),
    flags: u8,
    options: &[u8],
    tsecr_offset_in_options: u32,
) -> FrameTemplate {
    let (vip, port) = destination;
    let tcp_header_bytes = 20 + options.len();
    let mut frame_bytes = [&LOAD_BALANCER_MAC.0[..], &[2, 0, 0, 0, 0, 2], &[8, 0]].concat();
    frame_bytes.extend([0x45, 0, 0, 20 + tcp_header_bytes as u8, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 1, 0, 7]);
    frame_bytes.extend(vip.octets());
    frame_bytes.extend([0x12, 0x34]);
    frame_bytes.extend(port.to_be_bytes());
    frame_bytes.extend([0, 0, 0, 1, 0, 0, 0, 2, (tcp_header_bytes * 4) as u8, flags, 1, 0, 0, 0, 0, 0]);
    let tsecr_offset = frame_bytes.len() as u32 + tsecr_offset_in_options;
    frame_bytes.extend(options);
    FrameTemplate {
        frame_bytes,
        client_offset: IPV4_SOURCE_OFFSET,
        ports_offset: TCP_HEADER_OFFSET as u32,
        tsecr_offset,
        destination_port: port,
    }
}

/// Converts a frame between a client and [`IPV4_SERVICE_ADDRESS`] to one between a client and [`IPV6_SERVICE_ADDRESS`].
fn convert_to_ipv6(ipv4_frame: &FrameTemplate) -> FrameTemplate {
    let tcp_segment = &ipv4_frame.frame_bytes[TCP_HEADER_OFFSET..];
    let mut frame_bytes =
        [&ipv4_frame.frame_bytes[..12], &[0x86, 0xdd, 0x60, 0, 0, 0, 0, tcp_segment.len() as u8, 6, 64]].concat();
    let mut addresses =
        [ipv6_client_address(Ipv4Addr::UNSPECIFIED), IPV6_SERVICE_ADDRESS.0].map(|address| address.octets());
    let mut client_address_end = frame_bytes.len() + size_of::<Ipv6Addr>();
    if ipv4_frame.client_offset != IPV4_SOURCE_OFFSET {
        addresses.reverse();
        client_address_end += size_of::<Ipv6Addr>();
    }
    frame_bytes.extend(addresses.as_flattened());
    let ports_offset = frame_bytes.len();
    frame_bytes.extend(tcp_segment);
    let tsecr_offset = ipv4_frame.tsecr_offset + (ports_offset - TCP_HEADER_OFFSET) as u32;
    let client_offset = (client_address_end - size_of::<Ipv4Addr>()) as u32;
    FrameTemplate { frame_bytes, client_offset, ports_offset: ports_offset as u32, tsecr_offset, ..*ipv4_frame }
}

/// Returns a frame with a client's ACK to the IPv6 service.
pub fn ipv6_request_frame_template() -> FrameTemplate {
    convert_to_ipv6(&request_frame_template())
}

/// Returns a frame with a server's ACK from the IPv6 service.
pub fn ipv6_response_frame_template() -> FrameTemplate {
    convert_to_ipv6(&response_frame_template())
}

/// Returns the IPv6 address that corresponds to a client's IPv4 address.
pub fn ipv6_client_address(client: Ipv4Addr) -> Ipv6Addr {
    Ipv6Addr::from(0x2001_0db8_0001 << 80 | u128::from(client.to_bits()))
}

/// Returns a frame with a server's ACK. Its `tsecr_offset` is that of TSval, the first of the two timestamps.
pub fn response_frame_template() -> FrameTemplate {
    let request = tcp_frame_template(IPV4_SERVICE_ADDRESS, TCP_FLAG_ACK, &[1, 1, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0], 4);
    let mut frame_bytes = request.frame_bytes;
    frame_bytes[6..12].copy_from_slice(&FIRST_SERVER_MAC.0);
    let (addresses_offset, address_bytes) = (IPV4_SOURCE_OFFSET as usize, size_of::<u32>());
    frame_bytes[addresses_offset..addresses_offset + 2 * address_bytes].rotate_left(address_bytes);
    FrameTemplate { frame_bytes, client_offset: IPV4_SOURCE_OFFSET + address_bytes as u32, ..request }
}

/// Returns the first `count` clients of an endless random sequence, which is always the same.
pub fn random_client_addresses(count: usize) -> Vec<SocketAddrV4> {
    let mut rng = seeded_rng(2, 0);
    (0..count).map(|_| SocketAddrV4::new(Ipv4Addr::from(rng.next_u32()), rng.next_u32() as u16)).collect()
}
