//! Generates packets, both structured ones that reach every branch of the program and mutated ones.

use std::net::Ipv4Addr;

use coreward_intf as intf;
use coreward_model::FourTuple;
use coreward_model::ServerId;
use coreward_model::consistency::ConsistencyMode;
use coreward_model::cookie::{self, Cookie, CookieKeyIndex, FleetCookieKeys};
use coreward_model::lb_stamping;
use coreward_model::tuple::TransportProtocol;

use crate::frame::{self, EthernetIpHeader, TcpHeader, timestamp_option};
use crate::fuzz_rng::FuzzRng;
use crate::harness::{LOAD_BALANCER_MAC, TIME_KEY};
use crate::packet_generator_state::{GeneratedService, PacketGeneratorState, TableConnection};
use crate::server_networks::SERVER_VLAN_IDS;
use crate::{ipv6_translation, mutate};

const TCP_FLAG_FIN: u8 = 0x01;
const TCP_FLAG_SYN: u8 = 0x02;
const TCP_FLAG_RST: u8 = 0x04;
const TCP_FLAG_PSH: u8 = 0x08;
const TCP_FLAG_ACK: u8 = 0x10;

/// Replaces the contents of `packet` by the next random packet.
pub fn write_random_packet(state: &PacketGeneratorState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    packet.clear();
    match rng.random_below(100) {
        0..2 => return mutate::write_packet_of_random_bytes(state, rng, packet),
        2..4 => write_packet_of_other_protocol(state, rng, packet),
        4..8 => write_fragment(state, rng, packet),
        8..20 => write_icmp_message(state, rng, packet),
        20..40 => write_packet_from_server(state, rng, packet),
        _ => write_packet_to_service(state, rng, packet),
    }
    ipv6_translation::translate_to_ipv6(rng, packet);
    // Some packets come from another load balancer.
    if rng.random_bool(1, 10) {
        packet[6..12].copy_from_slice(&rng.pick(&state.owner_macs));
    }
    insert_random_vlan_tag(state, rng, packet);
    if rng.random_bool(1, 4) {
        mutate::mutate_packet(rng, packet);
    }
}

/// Inserts a VLAN tag, mostly of the VIPs' VLAN, if tagging is enabled. Sometimes inserts a second tag.
fn insert_random_vlan_tag(state: &PacketGeneratorState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let vlans = state.harness_setup.vlans;
    if !vlans.is_tagging_enabled {
        return;
    }
    let vlan_id = match rng.random_below(16) {
        0 => rng.pick(&SERVER_VLAN_IDS),
        1 => rng.next_u16() & 0xfff,
        _ => vlans.vip_vlan.id_or_zero(),
    };
    let priority_bits = if rng.random_bool(1, 8) { rng.next_u16() & 0xf000 } else { 0 };
    // A tag with VLAN 0 and a priority is a priority tag.
    if vlan_id | priority_bits != 0 {
        frame::insert_vlan_tag(packet, vlan_id | priority_bits);
    }
    if rng.random_bool(1, 64) {
        frame::insert_vlan_tag(packet, vlan_id);
    }
}

fn random_client_address(state: &PacketGeneratorState, rng: &mut FuzzRng) -> (Ipv4Addr, u16) {
    if rng.random_bool(3, 4) {
        rng.pick(&state.client_addresses)
    } else {
        (Ipv4Addr::from(rng.next_u32()), rng.next_u16())
    }
}

/// Returns a client, a service and a destination. In one of four cases, the client has a connection-table entry of this
/// service.
fn random_client_and_destination<'a>(
    state: &'a PacketGeneratorState,
    rng: &mut FuzzRng,
) -> ((Ipv4Addr, u16), &'a GeneratedService, (Ipv4Addr, u16)) {
    if !state.table_connections.is_empty() && rng.random_bool(1, 4) {
        let entry = rng.pick(&state.table_connections);
        if let Some(service) = state.services.iter().find(|planned| planned.service_slot == entry.service_slot) {
            return (entry.client_address, service, service.ipv4_address);
        }
    }
    let client = random_client_address(state, rng);
    let (service, vip) = random_service_and_destination(state, rng);
    (client, service, vip)
}

/// Returns a random service, and a destination that is mostly the service's address.
fn random_service_and_destination<'a>(
    state: &'a PacketGeneratorState,
    rng: &mut FuzzRng,
) -> (&'a GeneratedService, (Ipv4Addr, u16)) {
    let service = &state.services[rng.random_below(state.services.len())];
    let vip = match rng.random_below(40) {
        0 => (Ipv4Addr::from(rng.next_u32()), service.ipv4_address.1),
        1 => (service.ipv4_address.0, rng.pick(&[0, 1, 80, 443, 8080])),
        _ => service.ipv4_address,
    };
    (service, vip)
}

fn random_ip_header(rng: &mut FuzzRng, source: Ipv4Addr, destination: Ipv4Addr, protocol: u8) -> EthernetIpHeader {
    let mut mac = LOAD_BALANCER_MAC;
    match rng.random_below(60) {
        0 => mac = [0xff; 6],
        1 => rng.fill_bytes(&mut mac),
        2 => mac[rng.random_below(6)] ^= 1 << rng.random_below(8),
        _ => {}
    }
    EthernetIpHeader {
        destination_mac: mac,
        source,
        destination,
        protocol,
        ip_identification: rng.next_u16(),
        // The flags are "don't fragment", none, or the reserved bit.
        fragment_flags_and_offset: rng.pick(&[0x4000, 0x4000, 0x4000, 0, 0x8000, 0xc000]),
        option_word_count: if rng.random_bool(1, 20) { rng.random_below(11) } else { 0 },
        tos_and_ttl: [rng.next_u8(), rng.next_u8()],
    }
}

/// Writes a client's packet to a service, mostly of that service's protocol.
fn write_packet_to_service(state: &PacketGeneratorState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let (client, service, vip) = random_client_and_destination(state, rng);
    let is_udp = (service.address.protocol == TransportProtocol::Udp) != rng.random_bool(1, 16);
    let payload_bytes = random_payload_length(rng);
    let ip_header =
        random_ip_header(rng, client.0, vip.0, if is_udp { frame::PROTOCOL_UDP } else { frame::PROTOCOL_TCP });
    if is_udp {
        ip_header.append_frame(packet, |packet| frame::append_udp_datagram(packet, (client.1, vip.1), payload_bytes));
    } else {
        let tcp_header = random_tcp_header(state, service, rng, client, vip);
        let sequence_and_ack = (rng.next_u32(), rng.next_u32());
        ip_header.append_frame(packet, |packet| tcp_header.append_segment(packet, sequence_and_ack, payload_bytes));
    }
    // Some frames have bytes after the IP packet, such as Ethernet's padding.
    if rng.random_bool(1, 16) {
        packet.resize(packet.len() + rng.random_below(20), 0);
    }
}

/// Writes a server's packet to a client. The server belongs to a service with LB-side stamping, if there is one.
/// Otherwise the packet comes from the first service's address.
fn write_packet_from_server(state: &PacketGeneratorState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let lb_stamped_services: Vec<&GeneratedService> =
        state.services.iter().filter(|service| service.uses_lb_stamping()).collect();
    let service = if lb_stamped_services.is_empty() { &state.services[0] } else { rng.pick(&lb_stamped_services) };
    let (client, source) = (random_client_address(state, rng), service.ipv4_address);
    let mut server_mac = LOAD_BALANCER_MAC;
    rng.fill_bytes(&mut server_mac);
    // At most four servers send packets, so that each sends several.
    if !service.server_macs.is_empty() && !rng.random_bool(1, 20) {
        server_mac = service.server_macs[rng.random_below(service.server_macs.len().min(4))];
    }
    let tcp_flags = match rng.random_below(8) {
        0..3 => TCP_FLAG_SYN | TCP_FLAG_ACK,
        3 => rng.pick(&[TCP_FLAG_SYN, TCP_FLAG_ACK | TCP_FLAG_FIN, TCP_FLAG_ACK | TCP_FLAG_RST, TCP_FLAG_RST, 0]),
        _ => TCP_FLAG_ACK | TCP_FLAG_PSH,
    };
    let tsecr = rng.next_u32();
    let tsval =
        if rng.random_bool(1, 8) { rng.next_u32() } else { random_server_clock_ticks(state, &server_mac, client, rng) };
    let tcp_header = TcpHeader {
        source_and_destination_ports: (source.1, client.1),
        tcp_flags,
        options: random_options_with_timestamp(rng, tcp_flags, &timestamp_option(tsval, tsecr)),
    };
    let (payload_bytes, sequence_and_ack) = (random_payload_length(rng), (rng.next_u32(), rng.next_u32()));
    let ip_header = random_ip_header(rng, source.0, client.0, frame::PROTOCOL_TCP);
    ip_header.append_frame(packet, |packet| tcp_header.append_segment(packet, sequence_and_ack, payload_bytes));
    packet[6..12].copy_from_slice(&server_mac);
}

/// Returns the present TSval of the server with this MAC address, less a random delay. Every fourth server has a
/// separate clock for each connection, and half of these clocks tick every 10 ms.
fn random_server_clock_ticks(
    state: &PacketGeneratorState,
    server_mac: &[u8; 6],
    client: (Ipv4Addr, u16),
    rng: &mut FuzzRng,
) -> u32 {
    let now_ms = state.clock.0.wrapping_mul(100);
    let server_offset = u32::from_be_bytes([server_mac[1], server_mac[2], server_mac[3], server_mac[4]]);
    if !server_mac[5].is_multiple_of(4) {
        return now_ms.wrapping_add(server_offset).wrapping_sub(rng.random_below(1200) as u32);
    }
    let connection_offset =
        server_offset.wrapping_add(u32::from(client.0)).wrapping_mul(0x9e37_79b1 ^ u32::from(client.1));
    let clock_ticks = if server_mac[5].is_multiple_of(8) { now_ms / 10 } else { now_ms };
    clock_ticks.wrapping_add(connection_offset).wrapping_sub(rng.random_below(60) as u32)
}

/// Writes an ICMP message. It is mostly an error that quotes a server's packet to a client, cut at a random length.
fn write_icmp_message(state: &PacketGeneratorState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let (client, service, vip) = random_client_and_destination(state, rng);
    let mut quoted_packet = Vec::new();
    let quoted_source = if rng.random_bool(1, 30) { client.0 } else { vip.0 };
    let quoted_header = EthernetIpHeader {
        // Some quoted packets are fragments, of which only a first one has ports.
        fragment_flags_and_offset: rng.pick(&[0x4000, 0x4000, 0x4000, 0x4000, 0x2000, 0x2001]),
        ..random_ip_header(rng, quoted_source, client.0, service.address.protocol.iana_number())
    };
    match service.address.protocol {
        TransportProtocol::Udp => quoted_header
            .append_datagram(&mut quoted_packet, |packet| frame::append_udp_datagram(packet, (vip.1, client.1), 20)),
        TransportProtocol::Tcp => {
            let tsval = random_tsecr(state, service, rng, ipv6_translation::four_tuple(client, vip));
            let timestamp_option = timestamp_option(tsval, rng.next_u32());
            let tcp_options = random_quoted_tcp_options(rng, &timestamp_option);
            let tcp_header = TcpHeader {
                source_and_destination_ports: (vip.1, client.1),
                tcp_flags: TCP_FLAG_ACK,
                options: tcp_options,
            };
            quoted_header.append_datagram(&mut quoted_packet, |packet| tcp_header.append_segment(packet, (1, 2), 40));
        }
    }
    match rng.random_below(4) {
        // The shortest quotation of RFC 792 is the IP header and 8 bytes.
        0 => quoted_packet.truncate(20 + 4 * quoted_header.option_word_count + 8),
        1 => quoted_packet.truncate(rng.random_below(quoted_packet.len() + 1)),
        _ => {}
    }
    let icmp_type = if rng.random_bool(1, 16) { rng.next_u8() } else { rng.pick(&[3, 3, 3, 11, 12]) };
    let rest_of_header = [rng.next_u8(), 0, 0, 0, 0, rng.next_u8(), rng.next_u8()];
    let source_address = if rng.random_bool(1, 2) { Ipv4Addr::from(rng.next_u32()) } else { client.0 };
    random_ip_header(rng, source_address, vip.0, frame::PROTOCOL_ICMP).append_frame(packet, |packet| {
        packet.push(icmp_type);
        packet.extend(rest_of_header);
        packet.extend(&quoted_packet);
    });
}

/// Returns TCP options for a packet that an ICMP error quotes.
fn random_quoted_tcp_options(rng: &mut FuzzRng, timestamp_option: &[u8]) -> Vec<u8> {
    match rng.random_below(8) {
        0 => random_malformed_options(rng, timestamp_option),
        1 => Vec::new(),
        2 => [&[2, 4, 5, 0xb4, 4, 2][..], timestamp_option, &[1, 3, 3, 7]].concat(),
        _ => [&[1, 1][..], timestamp_option].concat(),
    }
}

fn random_payload_length(rng: &mut FuzzRng) -> usize {
    match rng.random_below(40) {
        0 => 1400 + rng.random_below(61),
        1..10 => rng.random_below(100),
        _ => 0,
    }
}

fn random_tcp_header(
    state: &PacketGeneratorState,
    service: &GeneratedService,
    rng: &mut FuzzRng,
    client: (Ipv4Addr, u16),
    vip: (Ipv4Addr, u16),
) -> TcpHeader {
    let tcp_flags = match rng.random_below(20) {
        0..4 => TCP_FLAG_SYN,
        4 => TCP_FLAG_ACK | TCP_FLAG_FIN,
        5 => TCP_FLAG_RST,
        6 => TCP_FLAG_ACK | TCP_FLAG_RST,
        7 => rng.pick(&[
            TCP_FLAG_SYN | 0xc0,
            TCP_FLAG_SYN | TCP_FLAG_PSH,
            TCP_FLAG_ACK | 0xe8,
            TCP_FLAG_ACK | TCP_FLAG_FIN | TCP_FLAG_RST,
        ]),
        8 => rng.next_u8(),
        9..12 => TCP_FLAG_ACK | TCP_FLAG_PSH,
        _ => TCP_FLAG_ACK,
    };
    let tsecr = random_tsecr(state, service, rng, ipv6_translation::four_tuple(client, vip));
    TcpHeader {
        source_and_destination_ports: (client.1, vip.1),
        tcp_flags,
        options: random_options_with_tsecr(rng, tcp_flags, tsecr),
    }
}

/// Returns a random TSecr of a client, which is mostly the cookie of a service's present or earlier server.
fn random_tsecr(state: &PacketGeneratorState, service: &GeneratedService, rng: &mut FuzzRng, tuple: FourTuple) -> u32 {
    if service.uses_lb_stamping() {
        return random_lb_stamped_tsecr(state, service, rng, &tuple);
    }
    let random_server_id = |rng: &mut FuzzRng| {
        ServerId::try_from(rng.random_below(intf::SERVER_ID_COUNT as usize) as u64).expect("in range")
    };
    if let Some(table_index) = table_index_of_connection(state, service, &tuple).filter(|_| rng.random_bool(3, 4)) {
        return stamp_with_random_key(state, rng, &tuple, Cookie::TableIndex(table_index));
    }
    let cookie = match rng.random_below(20) {
        0 => return 0,
        1 => return rng.next_u32(),
        2 => Cookie::TableIndex(rng.next_u16() & intf::COOKIE_ID_MASK as u16),
        3 => Cookie::Server(random_server_id(rng)),
        _ if service.server_ids.is_empty() => Cookie::Server(random_server_id(rng)),
        _ => Cookie::Server(rng.pick(&service.server_ids)),
    };
    stamp_with_random_key(state, rng, &tuple, cookie)
}

/// Returns a random TSecr of a client whose service uses LB-side stamping.
fn random_lb_stamped_tsecr(
    state: &PacketGeneratorState,
    service: &GeneratedService,
    rng: &mut FuzzRng,
    tuple: &FourTuple,
) -> u32 {
    if service.server_ids.is_empty() || rng.random_bool(1, 10) {
        return rng.next_u32();
    }
    let key_index = rng.pick(&[CookieKeyIndex::First, CookieKeyIndex::Second]);
    let keys_with_random_current = FleetCookieKeys { current_key_index: key_index, ..state.harness_setup.cookie_keys };
    lb_stamping::stamp_tsval(&keys_with_random_current, &TIME_KEY, tuple, rng.pick(&service.server_ids), rng.next_u32())
}

fn stamp_with_random_key(state: &PacketGeneratorState, rng: &mut FuzzRng, tuple: &FourTuple, cookie: Cookie) -> u32 {
    let key_index = rng.pick(&[CookieKeyIndex::First, CookieKeyIndex::Second]);
    cookie::stamp_tsval(
        &FleetCookieKeys { current_key_index: key_index, ..state.harness_setup.cookie_keys },
        &TIME_KEY,
        tuple,
        cookie,
        rng.next_u32(),
    )
}

/// Returns the index of the connection's table entry, if the service is stateful and the connection has an entry.
fn table_index_of_connection(
    state: &PacketGeneratorState,
    service: &GeneratedService,
    tuple: &FourTuple,
) -> Option<u16> {
    if service.settings.consistency != ConsistencyMode::Stateful {
        return None;
    }
    let is_same_connection = |entry: &&TableConnection| {
        entry.service_slot == service.service_slot
            && ipv6_translation::four_tuple(entry.client_address, service.ipv4_address) == *tuple
    };
    state.table_connections.iter().rev().find(is_same_connection).map(|entry| entry.table_index)
}

fn random_options_with_tsecr(rng: &mut FuzzRng, flags: u8, tsecr: u32) -> Vec<u8> {
    let timestamp_option =
        timestamp_option(rng.next_u32(), if flags & TCP_FLAG_SYN != 0 && rng.random_bool(15, 16) { 0 } else { tsecr });
    random_options_with_timestamp(rng, flags, &timestamp_option)
}

/// Returns random TCP options, which mostly include the timestamp option `timestamp_option`.
fn random_options_with_timestamp(rng: &mut FuzzRng, flags: u8, timestamp_option: &[u8]) -> Vec<u8> {
    match rng.random_below(24) {
        _ if flags & TCP_FLAG_SYN != 0 && rng.random_bool(1, 2) => random_syn_options(rng, timestamp_option),
        0..16 => [&[1, 1][..], timestamp_option].concat(),
        16..19 => Vec::new(),
        19 => vec![1; rng.random_below(41)],
        _ => random_malformed_options(rng, timestamp_option),
    }
}

/// Returns SYN options in the order of Linux, FreeBSD or macOS, sometimes with one wrong byte.
fn random_syn_options(rng: &mut FuzzRng, timestamp_option: &[u8]) -> Vec<u8> {
    let mut options = match rng.random_below(3) {
        0 => [&[2, 4, 5, 0xb4, 4, 2][..], timestamp_option, &[1, 3, 3, 7]].concat(),
        1 => [&[2, 4, 5, 0xb4, 1, 3, 3, 6, 4, 2][..], timestamp_option].concat(),
        _ => [&[2, 4, 5, 0xb4, 1, 3, 3, 6, 1, 1][..], timestamp_option, &[4, 2, 0, 0]].concat(),
    };
    if rng.random_bool(1, 4) {
        let changed_offset = rng.random_below(options.len());
        options[changed_offset] = rng.next_u8();
    }
    options
}

/// Returns TCP options in random order and at random offsets, some of them malformed.
fn random_malformed_options(rng: &mut FuzzRng, timestamp_option: &[u8]) -> Vec<u8> {
    let mut options = Vec::new();
    while options.len() < 40 {
        match rng.random_below(14) {
            0..3 => options.push(1),
            3 => options.extend([3, 3, rng.next_u8()]),
            4 => options.extend([4, 2]),
            5 => options.extend([2, 4, rng.next_u8(), rng.next_u8()]),
            6..9 => options.extend(timestamp_option),
            9 => {
                let option_length = 2 + rng.random_below(12);
                let mut option = vec![rng.next_u8(); option_length];
                option[1] = option_length as u8;
                options.extend(option);
            }
            10 => options.extend([rng.next_u8(), rng.next_u8()]),
            11 => options.extend([8, rng.pick(&[0, 1, 2, 9, 11, 40, 255])]),
            12 => options.push(0),
            _ => break,
        }
    }
    options.truncate(40);
    options
}

fn write_packet_of_other_protocol(state: &PacketGeneratorState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let client = random_client_address(state, rng);
    let (_, vip) = random_service_and_destination(state, rng);
    let protocol = rng.pick(&[0, 2, 47, 132, 255]);
    let payload_bytes = random_payload_length(rng);
    random_ip_header(rng, client.0, vip.0, protocol)
        .append_frame(packet, |packet| frame::append_udp_datagram(packet, (client.1, vip.1), payload_bytes));
}

/// Writes a fragment that belongs to one of a few datagrams. Later fragments therefore find the first one, and the
/// fragment table never fills.
fn write_fragment(state: &PacketGeneratorState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let client = state.client_addresses[rng.random_below(16)];
    let (service, vip) = random_service_and_destination(state, rng);
    let fragment_flags_and_offset = match rng.random_below(8) {
        0..3 => 0x2000,
        3 => 0x2000 | rng.next_u16() & 0x1fff,
        4..7 => 185,
        _ => rng.next_u16(),
    };
    let ip_header = EthernetIpHeader {
        fragment_flags_and_offset,
        ip_identification: rng.random_below(8) as u16,
        ..random_ip_header(rng, client.0, vip.0, service.address.protocol.iana_number())
    };
    let tcp_header = random_tcp_header(state, service, rng, client, vip);
    match service.address.protocol {
        TransportProtocol::Tcp => ip_header.append_frame(packet, |packet| tcp_header.append_segment(packet, (1, 2), 8)),
        TransportProtocol::Udp => ip_header.append_frame(packet, |packet| {
            frame::append_udp_datagram(packet, (client.1, vip.1), 8);
            // The UDP header has the length of the whole datagram.
            let length_offset = packet.len() - 8 - 4;
            packet[length_offset..length_offset + 2].copy_from_slice(&(500u16).to_be_bytes());
        }),
    }
}
