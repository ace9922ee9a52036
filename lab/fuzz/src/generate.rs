//! Packets: structured ones that reach every branch of the program, and what mutation makes of them.

use std::net::{Ipv4Addr, SocketAddr};

use coreward_intf as intf;
use coreward_model::FourTuple;
use coreward_model::ServerId;
use coreward_model::consistency::Consistency;
use coreward_model::cookie::{self, Cookie, FleetKeys, KeyIndex};
use coreward_model::correction;
use coreward_model::tuple::Protocol;

use crate::dice::Dice;
use crate::frame::{self, Ip, Tcp, timestamp};
use crate::mutate;
use crate::plan::{Indexed, Plan, Planned};
use crate::world::{OWN_MAC, TIME_KEY};

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;

/// Puts the next packet into `packet`.
pub fn packet(plan: &Plan, dice: &mut Dice, packet: &mut Vec<u8>) {
    packet.clear();
    match dice.below(100) {
        0..2 => return mutate::random(plan, dice, packet),
        2..4 => other_protocol(plan, dice, packet),
        4..8 => fragment(plan, dice, packet),
        8..20 => icmp(plan, dice, packet),
        20..40 => answer(plan, dice, packet),
        _ => whole(plan, dice, packet),
    }
    // From another load balancer.
    if dice.chance(1, 10) {
        packet[6..12].copy_from_slice(&dice.pick(&plan.owners));
    }
    if dice.chance(1, 4) {
        mutate::mutate(dice, packet);
    }
}

fn client(plan: &Plan, dice: &mut Dice) -> (Ipv4Addr, u16) {
    if dice.chance(3, 4) { dice.pick(&plan.clients) } else { (Ipv4Addr::from(dice.u32()), dice.u16()) }
}

/// A client, and where its packet goes: one in four to the service at which it has an entry of the connection table.
fn both_ends<'a>(plan: &'a Plan, dice: &mut Dice) -> ((Ipv4Addr, u16), &'a Planned, (Ipv4Addr, u16)) {
    if !plan.indexed.is_empty() && dice.chance(1, 4) {
        let entry = dice.pick(&plan.indexed);
        if let Some(planned) = plan.services.iter().find(|planned| planned.place == entry.place) {
            return (entry.client, planned, planned.vip);
        }
    }
    let client = client(plan, dice);
    let (planned, vip) = destination(plan, dice);
    (client, planned, vip)
}

/// A service, and where the packet goes: nearly always there.
fn destination<'a>(plan: &'a Plan, dice: &mut Dice) -> (&'a Planned, (Ipv4Addr, u16)) {
    let planned = &plan.services[dice.below(plan.services.len())];
    let vip = match dice.below(40) {
        0 => (Ipv4Addr::from(dice.u32()), planned.vip.1),
        1 => (planned.vip.0, dice.pick(&[0, 1, 80, 443, 8080])),
        _ => planned.vip,
    };
    (planned, vip)
}

fn ip(dice: &mut Dice, source: Ipv4Addr, destination: Ipv4Addr, protocol: u8) -> Ip {
    let mut mac = OWN_MAC;
    match dice.below(60) {
        0 => mac = [0xff; 6],
        1 => dice.fill(&mut mac),
        2 => mac[dice.below(6)] ^= 1 << dice.below(8),
        _ => {}
    }
    Ip {
        mac,
        source,
        destination,
        protocol,
        identification: dice.u16(),
        // "Don't fragment", nothing, or the reserved bit.
        fragment: dice.pick(&[0x4000, 0x4000, 0x4000, 0, 0x8000, 0xc000]),
        option_words: if dice.chance(1, 20) { dice.below(11) } else { 0 },
        service_and_life: [dice.u8(), dice.u8()],
    }
}

/// A packet of the service's own protocol; now and then of the other one.
fn whole(plan: &Plan, dice: &mut Dice, packet: &mut Vec<u8>) {
    let (client, planned, vip) = both_ends(plan, dice);
    let udp = (planned.address.protocol == Protocol::Udp) != dice.chance(1, 16);
    let payload = payload_length(dice);
    let ip = ip(dice, client.0, vip.0, if udp { frame::UDP } else { frame::TCP });
    if udp {
        ip.packet(packet, |packet| frame::udp(packet, (client.1, vip.1), payload));
    } else {
        let segment = segment(plan, planned, dice, client, vip);
        let numbers = (dice.u32(), dice.u32());
        ip.packet(packet, |packet| segment.segment(packet, numbers, payload));
    }
    // What Ethernet pads, or a sender leaves behind the packet.
    if dice.chance(1, 16) {
        packet.resize(packet.len() + dice.below(20), 0);
    }
}

/// What a server of a service that load balancers stamp sends to a client, if there is one; otherwise to a client all the
/// same, which nobody looks at.
fn answer(plan: &Plan, dice: &mut Dice, packet: &mut Vec<u8>) {
    let corrected: Vec<&Planned> = plan.services.iter().filter(|planned| planned.is_corrected()).collect();
    let planned = if corrected.is_empty() { &plan.services[0] } else { dice.pick(&corrected) };
    let (client, source) = (client(plan, dice), planned.vip);
    let mut address = OWN_MAC;
    dice.fill(&mut address);
    // Few of them, so that each is heard several times.
    if !planned.addresses.is_empty() && !dice.chance(1, 20) {
        address = planned.addresses[dice.below(planned.addresses.len().min(4))];
    }
    let flags = match dice.below(8) {
        0..3 => SYN | ACK,
        3 => dice.pick(&[SYN, ACK | FIN, ACK | RST, RST, 0]),
        _ => ACK | PSH,
    };
    let echo = dice.u32();
    let own = if dice.chance(1, 8) { dice.u32() } else { server_clock(plan, &address, dice) };
    let segment = Tcp { ports: (source.1, client.1), flags, options: options_with(dice, flags, &timestamp(own, echo)) };
    let (payload, numbers) = (payload_length(dice), (dice.u32(), dice.u32()));
    let ip = ip(dice, source.0, client.0, frame::TCP);
    ip.packet(packet, |packet| segment.segment(packet, numbers, payload));
    packet[6..12].copy_from_slice(&address);
}

/// What the clock of the server at that address shows, a little late; every fourth server has none of its own.
fn server_clock(plan: &Plan, address: &[u8; 6], dice: &mut Dice) -> u32 {
    if address[5].is_multiple_of(4) {
        return dice.u32();
    }
    let offset = u32::from_be_bytes([address[1], address[2], address[3], address[4]]);
    plan.clock.0.wrapping_mul(100).wrapping_add(offset).wrapping_sub(dice.below(1200) as u32)
}

/// Mostly errors that quote what a server may have sent to a client, cut anywhere.
fn icmp(plan: &Plan, dice: &mut Dice, packet: &mut Vec<u8>) {
    let (client, planned, vip) = both_ends(plan, dice);
    let mut quoted = Vec::new();
    let source = if dice.chance(1, 30) { client.0 } else { vip.0 };
    let to_client = Ip {
        // Now and then a fragment, of which the first still has ports.
        fragment: dice.pick(&[0x4000, 0x4000, 0x4000, 0x4000, 0x2000, 0x2001]),
        ..ip(dice, source, client.0, planned.address.protocol.number())
    };
    match planned.address.protocol {
        Protocol::Udp => to_client.datagram(&mut quoted, |packet| frame::udp(packet, (vip.1, client.1), 20)),
        Protocol::Tcp => {
            let stamp = echo(plan, planned, dice, FourTuple::ipv4(client, vip));
            let time = timestamp(stamp, dice.u32());
            let options = match dice.below(8) {
                0 => soup(dice, &time),
                1 => Vec::new(),
                2 => [&[2, 4, 5, 0xb4, 4, 2][..], &time, &[1, 3, 3, 7]].concat(),
                _ => [&[1, 1][..], &time].concat(),
            };
            let segment = Tcp { ports: (vip.1, client.1), flags: ACK, options };
            to_client.datagram(&mut quoted, |packet| segment.segment(packet, (1, 2), 40));
        }
    }
    match dice.below(4) {
        // The least that RFC 792 asks for: the header and 8 bytes.
        0 => quoted.truncate(20 + 4 * to_client.option_words + 8),
        1 => quoted.truncate(dice.below(quoted.len() + 1)),
        _ => {}
    }
    let kind = if dice.chance(1, 16) { dice.u8() } else { dice.pick(&[3, 3, 3, 11, 12]) };
    let rest = [dice.u8(), 0, 0, 0, 0, dice.u8(), dice.u8()];
    let router = if dice.chance(1, 2) { Ipv4Addr::from(dice.u32()) } else { client.0 };
    ip(dice, router, vip.0, frame::ICMP).packet(packet, |packet| {
        packet.push(kind);
        packet.extend(rest);
        packet.extend(&quoted);
    });
}

fn payload_length(dice: &mut Dice) -> usize {
    match dice.below(40) {
        0 => 1400 + dice.below(61),
        1..10 => dice.below(100),
        _ => 0,
    }
}

fn segment(plan: &Plan, planned: &Planned, dice: &mut Dice, client: (Ipv4Addr, u16), vip: (Ipv4Addr, u16)) -> Tcp {
    let flags = match dice.below(20) {
        0..4 => SYN,
        4 => ACK | FIN,
        5 => RST,
        6 => ACK | RST,
        7 => dice.pick(&[SYN | 0xc0, SYN | PSH, ACK | 0xe8, ACK | FIN | RST]),
        8 => dice.u8(),
        9..12 => ACK | PSH,
        _ => ACK,
    };
    let echo = echo(plan, planned, dice, FourTuple::ipv4(client, vip));
    Tcp { ports: (client.1, vip.1), flags, options: options(dice, flags, echo) }
}

/// What the client echoes: mostly the cookie of a server that is or was known.
fn echo(plan: &Plan, planned: &Planned, dice: &mut Dice, tuple: FourTuple) -> u32 {
    if planned.is_corrected() {
        return corrected_echo(plan, planned, dice, &tuple);
    }
    let any =
        |dice: &mut Dice| ServerId::try_from(dice.below(intf::SERVER_ID_COUNT as usize) as u64).expect("in range");
    if let Some(number) = index_of(plan, planned, &tuple).filter(|_| dice.chance(3, 4)) {
        return stamp(plan, dice, &tuple, Cookie::TableIndex(number));
    }
    let cookie = match dice.below(20) {
        0 => return 0,
        1 => return dice.u32(),
        2 => Cookie::TableIndex(dice.u16() & intf::COOKIE_ID_MASK as u16),
        3 => Cookie::Server(any(dice)),
        _ if planned.servers.is_empty() => Cookie::Server(any(dice)),
        _ => Cookie::Server(dice.pick(&planned.servers)),
    };
    stamp(plan, dice, &tuple, cookie)
}

/// The same where load balancers stamp.
fn corrected_echo(plan: &Plan, planned: &Planned, dice: &mut Dice, tuple: &FourTuple) -> u32 {
    if planned.servers.is_empty() || dice.chance(1, 10) {
        return dice.u32();
    }
    let current = dice.pick(&[KeyIndex::First, KeyIndex::Second]);
    let keys = FleetKeys { current, ..plan.setup.keys };
    correction::stamp(&keys, &TIME_KEY, tuple, dice.pick(&planned.servers), dice.u32())
}

fn stamp(plan: &Plan, dice: &mut Dice, tuple: &FourTuple, cookie: Cookie) -> u32 {
    let current = dice.pick(&[KeyIndex::First, KeyIndex::Second]);
    cookie::stamp(&FleetKeys { current, ..plan.setup.keys }, &TIME_KEY, tuple, cookie, dice.u32())
}

/// The entry that the connection was given.
fn index_of(plan: &Plan, planned: &Planned, tuple: &FourTuple) -> Option<u16> {
    if planned.mode.consistency != Consistency::Stateful {
        return None;
    }
    let given = |entry: &&Indexed| entry.place == planned.place && SocketAddr::from(entry.client) == tuple.client();
    plan.indexed.iter().rev().find(given).map(|entry| entry.number)
}

fn options(dice: &mut Dice, flags: u8, echo: u32) -> Vec<u8> {
    let time = timestamp(dice.u32(), if flags & SYN != 0 && dice.chance(15, 16) { 0 } else { echo });
    options_with(dice, flags, &time)
}

/// Options around a timestamp, or without it.
fn options_with(dice: &mut Dice, flags: u8, time: &[u8]) -> Vec<u8> {
    match dice.below(24) {
        _ if flags & SYN != 0 && dice.chance(1, 2) => options_of_a_syn(dice, time),
        0..16 => [&[1, 1][..], time].concat(),
        16..19 => Vec::new(),
        19 => vec![1; dice.below(41)],
        _ => soup(dice, time),
    }
}

/// Options in the order in which Linux, FreeBSD or macOS sends them; one byte of some of them is another one.
fn options_of_a_syn(dice: &mut Dice, time: &[u8]) -> Vec<u8> {
    let mut options = match dice.below(3) {
        0 => [&[2, 4, 5, 0xb4, 4, 2][..], time, &[1, 3, 3, 7]].concat(),
        1 => [&[2, 4, 5, 0xb4, 1, 3, 3, 6, 4, 2][..], time].concat(),
        _ => [&[2, 4, 5, 0xb4, 1, 3, 3, 6, 1, 1][..], time, &[4, 2, 0, 0]].concat(),
    };
    if dice.chance(1, 4) {
        let changed = dice.below(options.len());
        options[changed] = dice.u8();
    }
    options
}

/// Options in any order and at any offset, some of them wrong.
fn soup(dice: &mut Dice, time: &[u8]) -> Vec<u8> {
    let mut options = Vec::new();
    while options.len() < 40 {
        match dice.below(14) {
            0..3 => options.push(1),
            3 => options.extend([3, 3, dice.u8()]),
            4 => options.extend([4, 2]),
            5 => options.extend([2, 4, dice.u8(), dice.u8()]),
            6..9 => options.extend(time),
            9 => {
                let length = 2 + dice.below(12);
                let mut option = vec![dice.u8(); length];
                option[1] = length as u8;
                options.extend(option);
            }
            10 => options.extend([dice.u8(), dice.u8()]),
            11 => options.extend([8, dice.pick(&[0, 1, 2, 9, 11, 40, 255])]),
            12 => options.push(0),
            _ => break,
        }
    }
    options.truncate(40);
    options
}

fn other_protocol(plan: &Plan, dice: &mut Dice, packet: &mut Vec<u8>) {
    let client = client(plan, dice);
    let (_, vip) = destination(plan, dice);
    let protocol = dice.pick(&[0, 2, 47, 132, 255]);
    let payload = payload_length(dice);
    ip(dice, client.0, vip.0, protocol).packet(packet, |packet| frame::udp(packet, (client.1, vip.1), payload));
}

/// Fragments of few datagrams, so that later ones meet first ones, and the table is never full.
fn fragment(plan: &Plan, dice: &mut Dice, packet: &mut Vec<u8>) {
    let client = plan.clients[dice.below(16)];
    let (planned, vip) = destination(plan, dice);
    let fragment = match dice.below(8) {
        0..3 => 0x2000,
        3 => 0x2000 | dice.u16() & 0x1fff,
        4..7 => 185,
        _ => dice.u16(),
    };
    let ip = Ip {
        fragment,
        identification: dice.below(8) as u16,
        ..ip(dice, client.0, vip.0, planned.address.protocol.number())
    };
    let segment = segment(plan, planned, dice, client, vip);
    match planned.address.protocol {
        Protocol::Tcp => ip.packet(packet, |packet| segment.segment(packet, (1, 2), 8)),
        Protocol::Udp => ip.packet(packet, |packet| {
            frame::udp(packet, (client.1, vip.1), 8);
            // The length is that of the whole datagram.
            let length = packet.len() - 8 - 4;
            packet[length..length + 2].copy_from_slice(&(500u16).to_be_bytes());
        }),
    }
}
