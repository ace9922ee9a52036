//! Generated packets: structured ones that reach every branch of the program, and mutated ones.

use std::net::Ipv4Addr;

use coreward_intf as intf;
use coreward_model::FourTuple;
use coreward_model::ServerId;
use coreward_model::consistency::Consistency;
use coreward_model::cookie::{self, Cookie, FleetKeys, KeyIndex};
use coreward_model::lb_stamping;
use coreward_model::tuple::Protocol;

use crate::frame::{self, EthernetIpHeader, TcpHeader, timestamp_option};
use crate::fuzz_rng::FuzzRng;
use crate::gen_state::{GenState, GeneratedService, TableConnection};
use crate::harness::{OWN_MAC, SERVER_VLANS, TIME_KEY};
use crate::{ipv6, mutate};

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;

/// Replaces the contents of `packet` by the next random packet.
pub fn write_packet(state: &GenState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    packet.clear();
    match rng.below(100) {
        0..2 => return mutate::write_random_bytes(state, rng, packet),
        2..4 => write_other_protocol(state, rng, packet),
        4..8 => write_fragment(state, rng, packet),
        8..20 => write_icmp(state, rng, packet),
        20..40 => write_server_packet(state, rng, packet),
        _ => write_service_packet(state, rng, packet),
    }
    ipv6::translate(rng, packet);
    // A packet from another load balancer.
    if rng.chance(1, 10) {
        packet[6..12].copy_from_slice(&rng.pick(&state.owner_macs));
    }
    insert_tag(state, rng, packet);
    if rng.chance(1, 4) {
        mutate::mutate(rng, packet);
    }
}

/// Inserts a VLAN tag, mostly that of the VIPs or of a server, if tagging is enabled. Sometimes adds a second tag.
fn insert_tag(state: &GenState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let vlans = state.setup.vlans;
    if !vlans.is_tagging_enabled {
        return;
    }
    let vlan = match rng.below(16) {
        0 => rng.pick(&SERVER_VLANS),
        1 => rng.u16() & 0xfff,
        _ => vlans.vip.get(),
    };
    let priority = if rng.chance(1, 8) { rng.u16() & 0xf000 } else { 0 };
    // VLAN 0 with a priority is a priority tag.
    if vlan | priority != 0 {
        frame::insert_tag(packet, vlan | priority);
    }
    // A second tag.
    if rng.chance(1, 64) {
        frame::insert_tag(packet, vlan);
    }
}

fn client(state: &GenState, rng: &mut FuzzRng) -> (Ipv4Addr, u16) {
    if rng.chance(3, 4) { rng.pick(&state.clients) } else { (Ipv4Addr::from(rng.u32()), rng.u16()) }
}

/// Returns a client, service and destination. In one of four cases, the service has an entry for the client.
fn pick_endpoints<'a>(
    state: &'a GenState,
    rng: &mut FuzzRng,
) -> ((Ipv4Addr, u16), &'a GeneratedService, (Ipv4Addr, u16)) {
    if !state.table_connections.is_empty() && rng.chance(1, 4) {
        let entry = rng.pick(&state.table_connections);
        if let Some(planned) = state.services.iter().find(|planned| planned.service_slot == entry.service_slot) {
            return (entry.client, planned, planned.vip);
        }
    }
    let client = client(state, rng);
    let (planned, vip) = destination(state, rng);
    (client, planned, vip)
}

/// Returns a random service, and a destination that is mostly the service's address.
fn destination<'a>(state: &'a GenState, rng: &mut FuzzRng) -> (&'a GeneratedService, (Ipv4Addr, u16)) {
    let planned = &state.services[rng.below(state.services.len())];
    let vip = match rng.below(40) {
        0 => (Ipv4Addr::from(rng.u32()), planned.vip.1),
        1 => (planned.vip.0, rng.pick(&[0, 1, 80, 443, 8080])),
        _ => planned.vip,
    };
    (planned, vip)
}

fn ip(rng: &mut FuzzRng, source: Ipv4Addr, destination: Ipv4Addr, protocol: u8) -> EthernetIpHeader {
    let mut mac = OWN_MAC;
    match rng.below(60) {
        0 => mac = [0xff; 6],
        1 => rng.fill(&mut mac),
        2 => mac[rng.below(6)] ^= 1 << rng.below(8),
        _ => {}
    }
    EthernetIpHeader {
        mac,
        source,
        destination,
        protocol,
        identification: rng.u16(),
        // "Don't fragment", nothing, or the reserved bit.
        fragment: rng.pick(&[0x4000, 0x4000, 0x4000, 0, 0x8000, 0xc000]),
        option_words: if rng.chance(1, 20) { rng.below(11) } else { 0 },
        tos_and_ttl: [rng.u8(), rng.u8()],
    }
}

/// Writes a client's packet of the service's protocol, sometimes of the other protocol.
fn write_service_packet(state: &GenState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let (client, planned, vip) = pick_endpoints(state, rng);
    let udp = (planned.address.protocol == Protocol::Udp) != rng.chance(1, 16);
    let payload = payload_length(rng);
    let ip = ip(rng, client.0, vip.0, if udp { frame::UDP } else { frame::TCP });
    if udp {
        ip.append_frame(packet, |packet| frame::udp(packet, (client.1, vip.1), payload));
    } else {
        let segment = segment(state, planned, rng, client, vip);
        let numbers = (rng.u32(), rng.u32());
        ip.append_frame(packet, |packet| segment.append_segment(packet, numbers, payload));
    }
    // Ethernet's padding, or a sender's bytes behind the packet.
    if rng.chance(1, 16) {
        packet.resize(packet.len() + rng.below(20), 0);
    }
}

/// Writes a server's packet to a client. The server belongs to a service with LB-side stamping, if there is one;
/// otherwise the packet is unrelated.
fn write_server_packet(state: &GenState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let lb_stamped: Vec<&GeneratedService> = state.services.iter().filter(|planned| planned.is_lb_stamped()).collect();
    let planned = if lb_stamped.is_empty() { &state.services[0] } else { rng.pick(&lb_stamped) };
    let (client, source) = (client(state, rng), planned.vip);
    let mut address = OWN_MAC;
    rng.fill(&mut address);
    // Few clients, so that each sends several packets.
    if !planned.server_macs.is_empty() && !rng.chance(1, 20) {
        address = planned.server_macs[rng.below(planned.server_macs.len().min(4))];
    }
    let flags = match rng.below(8) {
        0..3 => SYN | ACK,
        3 => rng.pick(&[SYN, ACK | FIN, ACK | RST, RST, 0]),
        _ => ACK | PSH,
    };
    let tsecr = rng.u32();
    let own = if rng.chance(1, 8) { rng.u32() } else { server_clock(state, &address, client, rng) };
    let segment = TcpHeader {
        ports: (source.1, client.1),
        flags,
        options: options_with(rng, flags, &timestamp_option(own, tsecr)),
    };
    let (payload, numbers) = (payload_length(rng), (rng.u32(), rng.u32()));
    let ip = ip(rng, source.0, client.0, frame::TCP);
    ip.append_frame(packet, |packet| segment.append_segment(packet, numbers, payload));
    packet[6..12].copy_from_slice(&address);
}

/// Returns the TSval clock of the server with this MAC address, slightly late. Every fourth server has a clock per
/// connection; half of these have ticks of 10 ms.
fn server_clock(state: &GenState, address: &[u8; 6], client: (Ipv4Addr, u16), rng: &mut FuzzRng) -> u32 {
    let now_ms = state.clock.0.wrapping_mul(100);
    let offset = u32::from_be_bytes([address[1], address[2], address[3], address[4]]);
    if !address[5].is_multiple_of(4) {
        return now_ms.wrapping_add(offset).wrapping_sub(rng.below(1200) as u32);
    }
    let own_offset = offset.wrapping_add(u32::from(client.0)).wrapping_mul(0x9e37_79b1 ^ u32::from(client.1));
    let ticks = if address[5].is_multiple_of(8) { now_ms / 10 } else { now_ms };
    ticks.wrapping_add(own_offset).wrapping_sub(rng.below(60) as u32)
}

/// Writes an ICMP message. It is mostly an error that quotes a server's packet to a client, cut at a random length.
fn write_icmp(state: &GenState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let (client, planned, vip) = pick_endpoints(state, rng);
    let mut quoted = Vec::new();
    let source = if rng.chance(1, 30) { client.0 } else { vip.0 };
    let to_client = EthernetIpHeader {
        // Some are fragments; the first fragment has ports.
        fragment: rng.pick(&[0x4000, 0x4000, 0x4000, 0x4000, 0x2000, 0x2001]),
        ..ip(rng, source, client.0, planned.address.protocol.number())
    };
    match planned.address.protocol {
        Protocol::Udp => to_client.append_datagram(&mut quoted, |packet| frame::udp(packet, (vip.1, client.1), 20)),
        Protocol::Tcp => {
            let stamp = tsecr(state, planned, rng, ipv6::tuple(client, vip));
            let time = timestamp_option(stamp, rng.u32());
            let options = match rng.below(8) {
                0 => random_options(rng, &time),
                1 => Vec::new(),
                2 => [&[2, 4, 5, 0xb4, 4, 2][..], &time, &[1, 3, 3, 7]].concat(),
                _ => [&[1, 1][..], &time].concat(),
            };
            let segment = TcpHeader { ports: (vip.1, client.1), flags: ACK, options };
            to_client.append_datagram(&mut quoted, |packet| segment.append_segment(packet, (1, 2), 40));
        }
    }
    match rng.below(4) {
        // Shortest quotation of RFC 792: the IP header and 8 bytes.
        0 => quoted.truncate(20 + 4 * to_client.option_words + 8),
        1 => quoted.truncate(rng.below(quoted.len() + 1)),
        _ => {}
    }
    let kind = if rng.chance(1, 16) { rng.u8() } else { rng.pick(&[3, 3, 3, 11, 12]) };
    let rest = [rng.u8(), 0, 0, 0, 0, rng.u8(), rng.u8()];
    let router = if rng.chance(1, 2) { Ipv4Addr::from(rng.u32()) } else { client.0 };
    ip(rng, router, vip.0, frame::ICMP).append_frame(packet, |packet| {
        packet.push(kind);
        packet.extend(rest);
        packet.extend(&quoted);
    });
}

fn payload_length(rng: &mut FuzzRng) -> usize {
    match rng.below(40) {
        0 => 1400 + rng.below(61),
        1..10 => rng.below(100),
        _ => 0,
    }
}

fn segment(
    state: &GenState,
    planned: &GeneratedService,
    rng: &mut FuzzRng,
    client: (Ipv4Addr, u16),
    vip: (Ipv4Addr, u16),
) -> TcpHeader {
    let flags = match rng.below(20) {
        0..4 => SYN,
        4 => ACK | FIN,
        5 => RST,
        6 => ACK | RST,
        7 => rng.pick(&[SYN | 0xc0, SYN | PSH, ACK | 0xe8, ACK | FIN | RST]),
        8 => rng.u8(),
        9..12 => ACK | PSH,
        _ => ACK,
    };
    let tsecr = tsecr(state, planned, rng, ipv6::tuple(client, vip));
    TcpHeader { ports: (client.1, vip.1), flags, options: options(rng, flags, tsecr) }
}

/// Returns a random TSecr of a client, which is mostly the cookie of a present or earlier server.
fn tsecr(state: &GenState, planned: &GeneratedService, rng: &mut FuzzRng, tuple: FourTuple) -> u32 {
    if planned.is_lb_stamped() {
        return lb_stamped_tsecr(state, planned, rng, &tuple);
    }
    let any =
        |rng: &mut FuzzRng| ServerId::try_from(rng.below(intf::SERVER_ID_COUNT as usize) as u64).expect("in range");
    if let Some(number) = index_of(state, planned, &tuple).filter(|_| rng.chance(3, 4)) {
        return stamp(state, rng, &tuple, Cookie::TableIndex(number));
    }
    let cookie = match rng.below(20) {
        0 => return 0,
        1 => return rng.u32(),
        2 => Cookie::TableIndex(rng.u16() & intf::COOKIE_ID_MASK as u16),
        3 => Cookie::Server(any(rng)),
        _ if planned.servers.is_empty() => Cookie::Server(any(rng)),
        _ => Cookie::Server(rng.pick(&planned.servers)),
    };
    stamp(state, rng, &tuple, cookie)
}

/// Returns a random TSecr of a client for a service with LB-side stamping.
fn lb_stamped_tsecr(state: &GenState, planned: &GeneratedService, rng: &mut FuzzRng, tuple: &FourTuple) -> u32 {
    if planned.servers.is_empty() || rng.chance(1, 10) {
        return rng.u32();
    }
    let current = rng.pick(&[KeyIndex::First, KeyIndex::Second]);
    let keys = FleetKeys { current, ..state.setup.keys };
    lb_stamping::stamp_tsval(&keys, &TIME_KEY, tuple, rng.pick(&planned.servers), rng.u32())
}

fn stamp(state: &GenState, rng: &mut FuzzRng, tuple: &FourTuple, cookie: Cookie) -> u32 {
    let current = rng.pick(&[KeyIndex::First, KeyIndex::Second]);
    cookie::stamp_tsval(&FleetKeys { current, ..state.setup.keys }, &TIME_KEY, tuple, cookie, rng.u32())
}

/// Returns the index of the connection's entry in the connection table, if the service is stateful and it has one.
fn index_of(state: &GenState, planned: &GeneratedService, tuple: &FourTuple) -> Option<u16> {
    if planned.mode.consistency != Consistency::Stateful {
        return None;
    }
    let given = |entry: &&TableConnection| {
        entry.service_slot == planned.service_slot && ipv6::tuple(entry.client, planned.vip) == *tuple
    };
    state.table_connections.iter().rev().find(given).map(|entry| entry.table_index)
}

fn options(rng: &mut FuzzRng, flags: u8, tsecr: u32) -> Vec<u8> {
    let time = timestamp_option(rng.u32(), if flags & SYN != 0 && rng.chance(15, 16) { 0 } else { tsecr });
    options_with(rng, flags, &time)
}

/// Returns random TCP options, mostly with this timestamp option.
fn options_with(rng: &mut FuzzRng, flags: u8, time: &[u8]) -> Vec<u8> {
    match rng.below(24) {
        _ if flags & SYN != 0 && rng.chance(1, 2) => options_of_a_syn(rng, time),
        0..16 => [&[1, 1][..], time].concat(),
        16..19 => Vec::new(),
        19 => vec![1; rng.below(41)],
        _ => random_options(rng, time),
    }
}

/// Returns SYN options in the order of Linux, FreeBSD or macOS, sometimes with one wrong byte.
fn options_of_a_syn(rng: &mut FuzzRng, time: &[u8]) -> Vec<u8> {
    let mut options = match rng.below(3) {
        0 => [&[2, 4, 5, 0xb4, 4, 2][..], time, &[1, 3, 3, 7]].concat(),
        1 => [&[2, 4, 5, 0xb4, 1, 3, 3, 6, 4, 2][..], time].concat(),
        _ => [&[2, 4, 5, 0xb4, 1, 3, 3, 6, 1, 1][..], time, &[4, 2, 0, 0]].concat(),
    };
    if rng.chance(1, 4) {
        let changed = rng.below(options.len());
        options[changed] = rng.u8();
    }
    options
}

/// Returns options in random order and at random offsets, of which some are malformed.
fn random_options(rng: &mut FuzzRng, time: &[u8]) -> Vec<u8> {
    let mut options = Vec::new();
    while options.len() < 40 {
        match rng.below(14) {
            0..3 => options.push(1),
            3 => options.extend([3, 3, rng.u8()]),
            4 => options.extend([4, 2]),
            5 => options.extend([2, 4, rng.u8(), rng.u8()]),
            6..9 => options.extend(time),
            9 => {
                let length = 2 + rng.below(12);
                let mut option = vec![rng.u8(); length];
                option[1] = length as u8;
                options.extend(option);
            }
            10 => options.extend([rng.u8(), rng.u8()]),
            11 => options.extend([8, rng.pick(&[0, 1, 2, 9, 11, 40, 255])]),
            12 => options.push(0),
            _ => break,
        }
    }
    options.truncate(40);
    options
}

fn write_other_protocol(state: &GenState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let client = client(state, rng);
    let (_, vip) = destination(state, rng);
    let protocol = rng.pick(&[0, 2, 47, 132, 255]);
    let payload = payload_length(rng);
    ip(rng, client.0, vip.0, protocol).append_frame(packet, |packet| frame::udp(packet, (client.1, vip.1), payload));
}

/// Writes a fragment of one of few datagrams, so that later fragments find the first one and the table never fills.
fn write_fragment(state: &GenState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let client = state.clients[rng.below(16)];
    let (planned, vip) = destination(state, rng);
    let fragment = match rng.below(8) {
        0..3 => 0x2000,
        3 => 0x2000 | rng.u16() & 0x1fff,
        4..7 => 185,
        _ => rng.u16(),
    };
    let ip = EthernetIpHeader {
        fragment,
        identification: rng.below(8) as u16,
        ..ip(rng, client.0, vip.0, planned.address.protocol.number())
    };
    let segment = segment(state, planned, rng, client, vip);
    match planned.address.protocol {
        Protocol::Tcp => ip.append_frame(packet, |packet| segment.append_segment(packet, (1, 2), 8)),
        Protocol::Udp => ip.append_frame(packet, |packet| {
            frame::udp(packet, (client.1, vip.1), 8);
            // Length of the whole datagram.
            let length = packet.len() - 8 - 4;
            packet[length..length + 2].copy_from_slice(&(500u16).to_be_bytes());
        }),
    }
}
