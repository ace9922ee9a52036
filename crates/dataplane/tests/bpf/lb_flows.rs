//! Tests of the flow table of `bpf/lb/lb.bpf.c` (`BPF_PROG_TEST_RUN`): new connections with an entry of an older
//! connection, and floods, which must not move the flows of other services.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use coreward_dataplane::lb::{Options, Server};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::connection_table::ConnectionHash;
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng;

use crate::support::balancer::{
    Balancer, Identification, XDP_DROP, XDP_PASS, XDP_TX, client, id, random_table, service,
};
use crate::support::{ACK, SYN, TIME_KEY, Tcp, Udp, missing_bpf_rights, skip_if, timestamp, timestamp_offset, word};

const WEB: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
const DNS: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 53);

fn udp(vip: (Ipv4Addr, u16)) -> (ServiceAddress, ServiceMode) {
    let protocol = Protocol::Udp;
    (ServiceAddress { protocol, ..service(vip) }, ServiceMode::default_for(protocol))
}

fn set_eligible(balancer: &mut Balancer, id: ServerId, is_eligible: bool) {
    let mac = Some(balancer.macs[&(0, id)]);
    balancer.lb.set_server(balancer.services[0], id, Server { mac, is_eligible });
}

fn drain(balancer: &mut Balancer, id: ServerId) {
    set_eligible(balancer, id, false);
}

/// A server drains; in half of the cases a new table also lacks that server and a down server. Established connections
/// stay at their servers, and new connections with the same ports go to another server.
#[test]
fn syn_leaves_a_server_that_takes_no_new_connections() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(111, 0);
    let by_load_balancer = ServiceMode { timestamps: Timestamps::LoadBalancer, ..ServiceMode::default() };
    let modes = [
        ServiceMode::default(),
        ServiceMode { timestamps: Timestamps::Off, ..ServiceMode::default() },
        ServiceMode { consistency: Consistency::Stateful, ..ServiceMode::default() },
        by_load_balancer,
    ];
    for (mode, new_table) in modes.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let mut balancer = Balancer::with(&[(service(WEB), mode)], Options::default(), &mut rng);
        let ids = balancer.replace_servers(0, 6, &mut rng);
        // Random tables are drawn until every server has a bucket.
        let table = std::iter::repeat_with(|| random_table(PlacementRule::Table, 1, 1, &ids, &mut rng))
            .find(|table| ids.iter().all(|id| table.consistent_servers.contains(id)))
            .unwrap();
        balancer.install(0, &table);
        let frames: Vec<_> = (0..400)
            .map(|_| client(&mut rng))
            .map(|client| [SYN, ACK].map(|flags| Tcp { flags, ..Tcp::new(client, WEB) }.frame()))
            .collect();
        let sent = |balancer: &Balancer, frame: &[u8]| balancer.destination(frame);
        let before: Vec<_> = frames
            .iter()
            .map(|[syn, ack]| {
                balancer.run(syn);
                sent(&balancer, ack)
            })
            .collect();
        drain(&mut balancer, ids[0]);
        let mut refusing = vec![balancer.macs[&(0, ids[0])]];
        if new_table {
            let table = random_table(PlacementRule::Table, 2, 1, &ids[2..], &mut rng);
            balancer.install(0, &PlacementTable { down_servers: vec![ids[1]], ..table });
            refusing.push(balancer.macs[&(0, ids[1])]);
        }
        assert!(refusing.iter().all(|mac| before.contains(mac)));
        for ([syn, ack], before) in frames.iter().zip(before) {
            // With LB-side stamping only servers' replies enter connections in the flow table; the test sends no
            // replies.
            let entered = mode != by_load_balancer;
            assert!(!entered || sent(&balancer, ack) == before, "{mode:?}: what is established stays");
            let opened = sent(&balancer, syn);
            assert!(!refusing.contains(&opened), "{mode:?}");
            assert!(!entered || sent(&balancer, ack) == opened, "{mode:?}: the new connection's packets follow");
            assert_eq!(sent(&balancer, syn), opened, "{mode:?}: and so does the SYN sent again");
        }
    }
}

/// Returns a balancer with LB-side stamping for six servers, which are placed round robin.
fn with_lb_stamping(rng: &mut impl Rng) -> Balancer {
    let mode = ServiceMode { timestamps: Timestamps::LoadBalancer, ..ServiceMode::default() };
    let mut balancer = Balancer::with(&[(service(WEB), mode)], Options::default(), rng);
    balancer.lb.set_time_key(balancer.services[0], TIME_KEY);
    // Cookies of LB-side stamping can hold only small ids.
    let ids: Vec<_> = (1..=6).map(id).collect();
    for (number, id) in (1..).zip(&ids) {
        let mac = MacAddress([2, 0, 0, 0, 1, number]);
        balancer.macs.insert((0, *id), mac);
        balancer.lb.set_server(balancer.services[0], *id, Server { mac: Some(mac), is_eligible: true });
    }
    balancer.install(0, &random_table(PlacementRule::RoundRobin, 1, 1, &ids, rng));
    balancer
}

/// After a load balancer has lost its state, a retransmitted SYN may have reached a second server, whose SYN-ACK is
/// late.
#[test]
fn late_syn_ack_of_another_server_does_not_move_a_plain_connection() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(115, 0);
    let mut balancer = with_lb_stamping(&mut rng);
    let client = client(&mut rng);
    let sent = |balancer: &Balancer, flags| {
        balancer.destination(&Tcp { flags, options: timestamp(7, 9), ..Tcp::new(client, WEB) }.frame())
    };
    let syn_ack = |balancer: &Balancer, server: MacAddress, verdict, counter| {
        let mut frame = Tcp { flags: SYN | ACK, options: timestamp(9, 7), ..Tcp::new(WEB, client) }.frame();
        frame[6..12].copy_from_slice(&server.0);
        balancer.expect(&frame, verdict, 0, counter);
    };
    let passes = |balancer: &Balancer, server| syn_ack(balancer, server, XDP_PASS, "reply_unchanged");
    let is_late = |balancer: &Balancer, server| syn_ack(balancer, server, XDP_DROP, "drop_late_syn_ack");
    let opened = sent(&balancer, SYN);
    passes(&balancer, opened);
    let late = balancer.macs.values().copied().find(|mac| *mac != opened).unwrap();
    is_late(&balancer, late);
    assert_eq!(sent(&balancer, SYN), opened, "half open: repeated");
    assert_eq!(sent(&balancer, ACK), opened, "half open");
    is_late(&balancer, late);
    assert_eq!(sent(&balancer, ACK), opened, "open");
    for _ in 0..6 {
        assert_eq!(sent(&balancer, SYN), opened, "forged, or the ports are reused");
    }

    // After the server began to drain, the client reuses its port for a new connection.
    let drained = balancer.macs.iter().find(|(_, mac)| **mac == opened).map(|((_, id), _)| *id).unwrap();
    drain(&mut balancer, drained);
    let reopened = sent(&balancer, SYN);
    assert_ne!(reopened, opened);
    passes(&balancer, reopened);
    assert_eq!(sent(&balancer, ACK), reopened);
}

/// An attacker may send a SYN with the address and port of a connected client.
#[test]
fn forged_syn_does_not_move_an_open_connection() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(114, 0);
    let by_hash_table = ServiceMode { consistency: Consistency::HashTable, ..ServiceMode::default() };
    let mut balancer = Balancer::with(&[(service(WEB), by_hash_table)], Options::default(), &mut rng);
    let ids = balancer.replace_servers(0, 6, &mut rng);
    balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &ids, &mut rng));
    let clients: Vec<_> = (0..50).map(|_| client(&mut rng)).collect();
    let sent =
        |balancer: &Balancer, client, flags| balancer.destination(&Tcp { flags, ..Tcp::new(client, WEB) }.frame());
    let opened: Vec<_> = clients.iter().map(|client| sent(&balancer, *client, SYN)).collect();
    // A new table, as after changed loads, would place most of these clients at other servers.
    balancer.install(0, &random_table(PlacementRule::Table, 2, 1, &ids, &mut rng));
    let moved = |balancer: &Balancer, flags| {
        clients.iter().zip(&opened).filter(|(client, opened)| sent(balancer, **client, flags) != **opened).count()
    };
    assert_eq!((moved(&balancer, SYN), moved(&balancer, ACK)), (0, 0), "of 50 SYNs sent again, and of connections");
    // A SYN to a draining server is placed at another server. The flow table has one entry per tuple, so the connection
    // moves as well.
    let draining = opened[0];
    let id = ids.iter().copied().find(|id| balancer.macs[&(0, *id)] == draining).unwrap();
    drain(&mut balancer, id);
    let there = opened.iter().filter(|server| **server == draining).count();
    assert_eq!((moved(&balancer, ACK), moved(&balancer, SYN), moved(&balancer, ACK)), (0, there, there));
}

/// A draining server may still have an older connection of the same ports. The new server can forward packets to it.
#[test]
fn syn_that_leaves_a_draining_server_names_it_as_previous() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(112, 0);
    let mut balancer = Balancer::new(&[WEB], &mut rng);
    let ids = balancer.replace_servers(0, 6, &mut rng);
    let table = random_table(PlacementRule::Table, 1, 1, &ids, &mut rng);
    balancer.install(0, &table);
    let tuple = |client| FourTuple::ipv4(client, WEB);
    let from = std::iter::repeat_with(|| client(&mut rng))
        .find(|client| table.choose_consistent(&tuple(*client)) == Some(ids[0]))
        .unwrap();
    let frame = |flags| Tcp { flags, ..Tcp::new(from, WEB) }.frame();
    balancer.run(&frame(ACK));
    drain(&mut balancer, ids[0]);
    let opened = balancer.destination(&frame(SYN));
    let at = ids.iter().copied().find(|id| balancer.macs[&(0, *id)] == opened).unwrap();
    assert_ne!(at, ids[0]);
    balancer.expect_sent(0, &frame(ACK), at, Identification::Before(Some(ids[0])), "flow_table");
}

/// If a connection opens while its bucket's server drains, only the flow table has the connection's server.
#[test]
fn flood_evicts_no_connection_that_only_the_flow_table_has() {
    skip_if!(missing_bpf_rights());
    const ENTRY_COUNT: u32 = 1 << 10;
    let mut rng = seeded_rng(116, 0);
    let options = Options { flow_table_entries: ENTRY_COUNT, ..Options::default() };
    let mut balancer = Balancer::with(&[(service(WEB), ServiceMode::default())], options, &mut rng);
    let ids = balancer.replace_servers(0, 6, &mut rng);
    let table = random_table(PlacementRule::Table, 1, 1, &ids, &mut rng);
    balancer.install(0, &table);
    drain(&mut balancer, ids[0]);
    let drains = |client: &(Ipv4Addr, u16)| table.choose_consistent(&FourTuple::ipv4(*client, WEB)) == Some(ids[0]);
    let clients: Vec<_> = std::iter::repeat_with(|| client(&mut rng)).filter(drains).take(20).collect();
    let frame = |client, flags| Tcp { flags, ..Tcp::new(client, WEB) }.frame();
    let opened: Vec<_> = clients.iter().map(|client| balancer.destination(&frame(*client, SYN))).collect();
    assert!(!opened.contains(&balancer.macs[&(0, ids[0])]));
    for _ in 0..10 * ENTRY_COUNT {
        balancer.run(&frame(client(&mut rng), ACK));
    }
    let after: Vec<_> = clients.iter().map(|client| balancer.destination(&frame(*client, ACK))).collect();
    assert_eq!(after, opened);
}

#[test]
fn udp_flow_leaves_a_down_server_and_stays_at_a_draining_one() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(113, 0);
    let mut balancer = Balancer::with(&[udp(DNS)], Options::default(), &mut rng);
    let ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install(0, &random_table(PlacementRule::RoundRobin, 1, 1, &ids, &mut rng));
    let frames: Vec<_> = (0..200).map(|_| Udp::new(client(&mut rng), DNS).frame()).collect();
    let before: Vec<_> = frames.iter().map(|frame| balancer.destination(frame)).collect();
    let (draining, down) = (balancer.macs[&(0, ids[0])], balancer.macs[&(0, ids[1])]);
    drain(&mut balancer, ids[0]);
    let table = random_table(PlacementRule::RoundRobin, 2, 1, &ids[2..], &mut rng);
    balancer.install(0, &PlacementTable { down_servers: vec![ids[1]], ..table });
    let after: Vec<_> = frames.iter().map(|frame| balancer.destination(frame)).collect();
    for (before, after) in before.iter().zip(&after) {
        if *before == down {
            assert!(*after != down && *after != draining);
        } else {
            assert_eq!(before, after);
        }
    }
    assert!(before.contains(&down) && before.contains(&draining));
    // The draining server is eligible again, but the table does not have it yet.
    set_eligible(&mut balancer, ids[0], true);
    assert_eq!(frames.iter().map(|frame| balancer.destination(frame)).collect::<Vec<_>>(), after);
    drain(&mut balancer, ids[0]);
    // Flows that left the down server do not return when the server is up again.
    balancer.install(0, &random_table(PlacementRule::RoundRobin, 3, 1, &ids[1..], &mut rng));
    assert_eq!(frames.iter().map(|frame| balancer.destination(frame)).collect::<Vec<_>>(), after);
    // When all servers count as down, flows stay at their servers.
    let mut nobody = random_table(PlacementRule::RoundRobin, 4, 1, &ids[1..], &mut rng);
    nobody.members.clear();
    nobody.consistent_servers.clear();
    nobody.previous_consistent_servers.clear();
    nobody.down_servers = ids[1..].to_vec();
    balancer.install(0, &nobody);
    assert_eq!(frames.iter().map(|frame| balancer.destination(frame)).collect::<Vec<_>>(), after);
}

#[test]
fn udp_flow_expires() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(114, 0);
    let mut balancer = Balancer::with(&[udp(DNS)], Options::default(), &mut rng);
    let ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install(0, &random_table(PlacementRule::RoundRobin, 1, 1, &ids, &mut rng));
    let frame = Udp::new(client(&mut rng), DNS).frame();
    let idle = Duration::from_millis(100 * u64::from(intf::FLOW_IDLE_UDP_TICKS));
    let mut now = Duration::from_secs(1000);
    balancer.lb.tick(now);
    balancer.run_expecting_counter(&frame, Some(0), "new_connection");
    for _ in 0..3 {
        now += idle;
        balancer.lb.tick(now);
        balancer.run_expecting_counter(&frame, Some(0), "flow_table");
    }
    balancer.lb.tick(now + idle + Duration::from_millis(100));
    balancer.run_expecting_counter(&frame, Some(0), "new_connection");
}

/// Four services, one after the other, get floods that would fill the table ten times. A fifth service has 1,000 flows.
#[test]
fn flood_on_one_service_moves_no_udp_flow_of_another() {
    skip_if!(missing_bpf_rights());
    const ENTRY_COUNT: u32 = 1 << 15;
    let mut rng = seeded_rng(115, 0);
    let off = ServiceMode { timestamps: Timestamps::Off, ..ServiceMode::default() };
    let hash_table = ServiceMode { consistency: Consistency::HashTable, ..ServiceMode::default() };
    let flooded: [(Ipv4Addr, u16); 4] = [80, 81, 82, 5353].map(|port| (WEB.0, port));
    let services = [
        udp(DNS),
        (service(flooded[0]), ServiceMode::default()),
        (service(flooded[1]), off),
        (service(flooded[2]), hash_table),
        udp(flooded[3]),
    ];
    let options = Options { flow_table_entries: ENTRY_COUNT, ..Options::default() };
    let mut balancer = Balancer::with(&services, options, &mut rng);
    for position in 0..services.len() {
        let ids = balancer.replace_servers(position, 5, &mut rng);
        balancer.install(position, &random_table(PlacementRule::RoundRobin, 1, 1, &ids, &mut rng));
    }
    // Each service keeps two entries of a set of eight whatever other services send: at most two flows per set are
    // used.
    let (key, dns) = (balancer.lb.connection_key(), balancer.services[0].get());
    let mut sets: HashMap<u64, u32> = HashMap::new();
    let mut has_room = |client: (Ipv4Addr, u16)| {
        let hash = ConnectionHash::new(&key, dns, client.into());
        let in_set = sets
            .entry((u64::from(hash.low_half()) * u64::from(ENTRY_COUNT / intf::FLOW_SET_ENTRIES)) >> 32)
            .or_default();
        *in_set += 1;
        *in_set <= 2
    };
    let clients: Vec<_> =
        std::iter::repeat_with(|| client(&mut rng)).filter(|client| has_room(*client)).take(1000).collect();
    let flows: Vec<_> = clients.into_iter().map(|client| Udp::new(client, DNS).frame()).collect();
    let before: Vec<_> = flows.iter().map(|frame| balancer.destination(frame)).collect();
    let mut out = vec![0; 2048];
    for (vip, (address, _)) in flooded.iter().zip(&services[1..]) {
        for _ in 0..ENTRY_COUNT * 10 / 4 {
            let frame = match address.protocol {
                Protocol::Udp => Udp::new(client(&mut rng), *vip).frame(),
                Protocol::Tcp if *vip == flooded[2] => Tcp { flags: SYN, ..Tcp::new(client(&mut rng), *vip) }.frame(),
                Protocol::Tcp => Tcp { flags: ACK, ..Tcp::new(client(&mut rng), *vip) }.frame(),
            };
            let (verdict, _) = test_run::run_into(balancer.lb.program(), &frame, &mut out).unwrap();
            assert_eq!(verdict, XDP_TX);
        }
        let after = flows.iter().map(|frame| balancer.destination(frame));
        let moved = after.zip(&before).filter(|(after, before)| after != *before).count();
        assert_eq!(moved, 0, "flows moved by a flood on {vip:?}");
    }
}

/// A SYN whose stamped SYN-ACK was lost is retransmitted to a server for which SYN-ACKs cannot be stamped yet. The
/// client may answer either SYN-ACK; its connection goes to the server that sent that one.
#[test]
fn client_may_answer_the_stamped_or_the_unstamped_syn_ack() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(117, 0);
    let balancer = with_lb_stamping(&mut rng);
    let [stamped, plain] = [1, 2].map(|number| balancer.macs[&(0, id(number))]);
    let reply = |client, server: MacAddress, flags, tsval, counter| {
        let mut frame = Tcp { flags, options: timestamp(tsval, 7), ..Tcp::new(WEB, client) }.frame();
        frame[6..12].copy_from_slice(&server.0);
        let (verdict, packet) = balancer.run_expecting_counter(&frame, Some(0), counter);
        assert_eq!(verdict, XDP_PASS);
        word(&packet, timestamp_offset(&packet).unwrap())
    };
    // SYN-ACKs of four connections with one clock.
    let known = 1_000_000;
    for counter in ["reply_unchanged", "reply_unchanged", "reply_unchanged", "reply_stamped"] {
        reply(client(&mut rng), stamped, SYN | ACK, known, counter);
    }
    for round in 0..200 {
        let client = client(&mut rng);
        let to_server = |tsecr, server: MacAddress, counter| {
            let frame = Tcp { options: timestamp(7, tsecr), ..Tcp::new(client, WEB) }.frame();
            let (verdict, packet) = balancer.run_expecting_counter(&frame, Some(0), counter);
            assert_eq!((verdict, &packet[..6]), (XDP_TX, &server.0[..]), "round {round}");
        };
        let cookie = reply(client, stamped, SYN | ACK, known, "reply_stamped");
        reply(client, plain, SYN | ACK, cookie ^ 1 << 31, "reply_unchanged");
        if round % 2 == 0 {
            for _ in 0..2 {
                to_server(cookie, stamped, "established");
                reply(client, stamped, ACK, known, "reply_stamped");
                reply(client, plain, SYN | ACK, cookie ^ 1 << 31, "reply_unchanged");
                reply(client, stamped, ACK, known, "reply_stamped");
            }
        } else {
            to_server(cookie ^ 1 << 31, plain, "flow_table");
            assert_eq!(reply(client, plain, ACK, 99, "reply_unchanged"), 99);
            to_server(99, plain, "flow_table");
        }
    }
}
