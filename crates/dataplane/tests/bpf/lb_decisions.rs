//! Comparison of each decision of `bpf/lb/lb.bpf.c` with the model (`BPF_PROG_TEST_RUN`): new connections under every
//! rule, packets with cookies, packets without timestamps.

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddrV4};

use coreward_dataplane::lb::{BroadcastRates, Options, PacketRate, Server};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{self, Cookie, FleetKeys, KeyIndex};
use coreward_model::placement::{PlacementRule, PlacementState, PlacementTable};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::{FourTuple, ServerId};
use rand::Rng as _;

use crate::support::balancer::{Balancer, Identification, VIP, XDP_DROP, XDP_TX, client, random_table, service, tuple};
use crate::support::{self, ACK, FIN, RST, SYN, Tcp, aligned_timestamp, missing_bpf_rights, skip_if, timestamp};

fn syn(client: (Ipv4Addr, u16)) -> Vec<u8> {
    let options = [&[2, 4, 5, 0xb4, 4, 2][..], &timestamp(77, 0), &[1, 3, 3, 7]].concat();
    Tcp { flags: SYN, options, payload: vec![], ..Tcp::new(client, VIP) }.frame()
}

#[test]
fn new_connections_go_to_the_models_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(1, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let mut clients = HashSet::new();
    let mut generation = 0;
    // Rules in the outer loop, because another rule needs another variant of the program.
    for rule in PlacementRule::ALL {
        for round in 0..8 {
            let servers = 1 + uniform_below(&mut rng, 40) as usize;
            let ids = balancer.replace_servers(0, servers, &mut rng);
            let groups = 1 + round % intf::MAX_RSS_GROUPS as usize;
            generation += 1;
            let table = random_table(rule, generation, groups, &ids, &mut rng);
            let mut state = PlacementState::for_table(&table);
            // The counter of round robin continues from table to table.
            state.round_robin_counter = balancer.turns;
            balancer.install(0, &table);
            for _ in 0..450 {
                let client = client(&mut rng);
                if !clients.insert(client) {
                    continue;
                }
                let chosen = table.choose(&mut state, &tuple(client)).expect("there are members");
                balancer.expect_sent_to(0, &syn(client), chosen, "new_connection");
            }
            balancer.turns = state.round_robin_counter;
        }
    }
}

#[test]
fn connection_without_timestamps_stays_at_the_consistent_choice() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(2, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let ids = balancer.replace_servers(0, 7, &mut rng);
    for (generation, rule) in PlacementRule::ALL.into_iter().enumerate() {
        let table = random_table(rule, generation as u64, 2, &ids, &mut rng);
        balancer.install(0, &table);
        for _ in 0..200 {
            let client = client(&mut rng);
            let chosen = table.choose_consistent(&tuple(client)).expect("one per bucket");
            let before = Identification::Before(support::balancer::previous_server(&table, &tuple(client)));
            let inserted = balancer.events(0, "flow_inserted");
            // The first packet that is not a SYN enters the connection in the flow table.
            let packets = [
                (SYN, vec![2, 4, 5, 0xb4], "bucket_hash", 0),
                (SYN, vec![2, 4, 5, 0xb4], "bucket_hash", 0),
                (ACK, vec![], "bucket_hash", 1),
                (ACK | FIN, vec![1, 1, 1, 0], "flow_table", 1),
                (RST, vec![], "flow_table", 1),
            ];
            for (flags, options, name, more) in packets {
                let frame = Tcp { flags, options, ..Tcp::new(client, VIP) }.frame();
                balancer.expect_sent(0, &frame, chosen, before, name);
                assert_eq!(balancer.events(0, "flow_inserted") - inserted, more);
            }
        }
    }
    // Packets to an unresolved server are dropped, because no other server has the connection.
    let client = client(&mut rng);
    let chosen = table_of(&balancer).choose_consistent(&tuple(client)).unwrap();
    balancer.lb.set_server(balancer.services[0], chosen, Server { mac: None, is_eligible: true });
    let frame = Tcp::new(client, VIP).frame();
    balancer.expect(&frame, XDP_DROP, 0, "drop_server_unresolved");
}

fn table_of(balancer: &Balancer) -> PlacementTable {
    balancer.newest_table.clone().expect("a table was installed")
}

#[test]
fn established_packets_follow_the_cookie_not_the_table() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(3, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let ids = balancer.replace_servers(0, 300, &mut rng);
    for round in 0..3000 {
        if round % 500 == 0 {
            balancer.new_keys(&mut rng);
            let rule = PlacementRule::ALL[round / 500 % 4];
            let table = random_table(rule, round as u64 + 1, 1, &ids, &mut rng);
            balancer.install(0, &table);
        }
        let client = client(&mut rng);
        let server = ids[uniform_below(&mut rng, ids.len() as u32) as usize];
        let current = if rng.next_u32() & 1 == 0 { KeyIndex::First } else { KeyIndex::Second };
        let keys = FleetKeys { current, ..balancer.keys };
        let tsecr =
            cookie::stamp_tsval(&keys, &support::TIME_KEY, &tuple(client), Cookie::Server(server), rng.next_u32());
        // Aligned and other offsets of the timestamp, IP options, packets with and without payload.
        let usual = aligned_timestamp(rng.next_u32(), tsecr);
        let bare = timestamp(rng.next_u32(), tsecr);
        let odd = [&[1][..], &bare, &[0]].concat();
        let behind_others = [&[254, 5, 1, 2, 3, 2, 4, 0, 0, 1, 1, 1][..], &bare].concat();
        let ended = [&[5, 10, 0, 0, 0, 1, 0, 0, 0, 9][..], &bare].concat();
        let flags = [ACK, ACK | FIN, ACK | RST, RST, ACK | 0x08, ACK | 0x20 | 0xc0];
        for options in [usual.clone(), odd, behind_others, ended, usual] {
            let flags = flags[uniform_below(&mut rng, flags.len() as u32) as usize];
            let payload = vec![0x5a; uniform_below(&mut rng, 1400) as usize];
            let ip_options = vec![1; 4 * uniform_below(&mut rng, 2) as usize * uniform_below(&mut rng, 11) as usize];
            let frame = Tcp { flags, options, payload, ip_options, ..Tcp::new(client, VIP) }.frame();
            balancer.expect_sent_to(0, &frame, server, "established");
        }
    }
}

#[test]
fn random_tsecr_values_are_treated_as_in_the_model() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(4, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    // A quarter of all ids are known servers, of which half have a MAC address.
    let ids = balancer.replace_servers(0, 4096, &mut rng);
    let unresolved: HashSet<ServerId> = ids.iter().copied().step_by(2).collect();
    for server in &unresolved {
        balancer.lb.set_server(balancer.services[0], *server, Server { mac: None, is_eligible: true });
    }
    let known: HashSet<ServerId> = ids.iter().copied().collect();
    let mut seen = [0; 3];
    for _ in 0..4000 {
        let client = client(&mut rng);
        let tsecr = rng.next_u32();
        let frame = Tcp { options: aligned_timestamp(1, tsecr), ..Tcp::new(client, VIP) }.frame();
        match cookie::decode_cookie(&balancer.keys, &tuple(client), tsecr) {
            Cookie::Server(server) if unresolved.contains(&server) => {
                seen[0] += 1;
                balancer.expect(&frame, XDP_DROP, 0, "drop_server_unresolved");
            }
            Cookie::Server(server) if known.contains(&server) => {
                seen[1] += 1;
                balancer.expect_sent_to(0, &frame, server, "established");
            }
            _ => {
                seen[2] += 1;
                balancer.expect_broadcast_or(0, &frame, Identification::Unchanged, "drop_unknown_cookie");
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 200), "{seen:?}");
}

#[test]
fn retransmitted_syn_reaches_the_same_server_until_the_next_table() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(5, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let ids = balancer.replace_servers(0, 8, &mut rng);
    for (generation, rule) in PlacementRule::ALL.into_iter().enumerate() {
        let table = random_table(rule, generation as u64 + 10, 1, &ids, &mut rng);
        balancer.install(0, &table);
        let mut elsewhere = 0;
        for _ in 0..100 {
            let client = client(&mut rng);
            let first = balancer.destination(&syn(client));
            // Other connections open between SYN and retransmission.
            for _ in 0..3 {
                balancer.destination(&syn(self::client(&mut rng)));
            }
            elsewhere += usize::from(balancer.destination(&syn(client)) != first);
        }
        // The memory of recent placements has 4096 entries, of which some are overwritten by other connections.
        assert!(elsewhere <= 10, "{rule:?}: {elsewhere} of 100 retransmissions went elsewhere");
    }
    // Under a new table the retransmission is placed again: the counter of round robin has grown.
    let client = client(&mut rng);
    let table = random_table(PlacementRule::RoundRobin, 20, 1, &ids, &mut rng);
    balancer.install(0, &table);
    let first = balancer.destination(&syn(client));
    balancer.install(0, &PlacementTable { generation: 21, ..table });
    assert_ne!(balancer.destination(&syn(client)), first);
}

#[test]
fn ineligible_server_is_replaced_for_new_connections() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(6, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let ids = balancer.replace_servers(0, 10, &mut rng);
    let service = balancer.services[0];
    // Only two of ten servers take new connections: the others are removed, draining or unresolved.
    let able = [ids[3], ids[8]];
    for (position, server) in ids.iter().enumerate().filter(|(_, server)| !able.contains(server)) {
        match position % 3 {
            0 => balancer.lb.remove_server(service, *server),
            1 => balancer.lb.set_server(service, *server, Server { mac: None, is_eligible: true }),
            _ => {
                let mac = Some(balancer.macs[&(0, *server)]);
                balancer.lb.set_server(service, *server, Server { mac, is_eligible: false });
            }
        }
    }
    let able_macs = able.map(|server| balancer.macs[&(0, server)]);
    for (generation, rule) in PlacementRule::ALL.into_iter().enumerate() {
        let table = random_table(rule, generation as u64 + 1, 1, &ids, &mut rng);
        balancer.install(0, &table);
        let mut reached = HashSet::new();
        for _ in 0..100 {
            let destination = balancer.destination(&syn(client(&mut rng)));
            assert!(able_macs.contains(&destination), "{rule:?}: sent to {destination}");
            reached.insert(destination);
        }
        assert_eq!(reached.len(), 2, "{rule:?}");
    }
    for server in able {
        balancer.lb.set_server(service, server, Server { mac: None, is_eligible: true });
    }
    balancer.expect(&syn(client(&mut rng)), XDP_DROP, 0, "drop_no_eligible_server");
}

#[test]
fn new_connection_without_table_or_members_is_dropped() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(7, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let from = client(&mut rng);
    balancer.expect(&syn(from), XDP_DROP, 0, "drop_no_eligible_server");
    balancer.expect(&Tcp::new(from, VIP).frame(), XDP_DROP, 0, "drop_no_eligible_server");
    let ids = balancer.replace_servers(0, 4, &mut rng);
    let mut table = random_table(PlacementRule::LeastAssigned, 1, 1, &ids, &mut rng);
    table.members.clear();
    table.consistent_servers.clear();
    table.previous_consistent_servers.clear();
    balancer.install(0, &table);
    balancer.expect(&syn(from), XDP_DROP, 0, "drop_no_eligible_server");
    assert_eq!(balancer.lb.table_generation(balancer.services[0]), None);
}

#[test]
fn services_have_separate_servers_and_tables() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(8, 0);
    let other = (Ipv4Addr::new(10, 200, 0, 1), 443);
    let mut balancer = Balancer::new(&[VIP, other], &mut rng);
    let first = balancer.replace_servers(0, 3, &mut rng);
    let second = balancer.replace_servers(1, 3, &mut rng);
    let tables = [(0, PlacementRule::Table, &first), (1, PlacementRule::PowerOfTwo, &second)]
        .map(|(service, rule, ids)| (service, random_table(rule, 1, 1, ids, &mut rng)));
    for (service, table) in &tables {
        balancer.install(*service, table);
    }
    for (service, table) in &tables {
        let vip = [VIP, other][*service];
        let mut state = PlacementState::for_table(table);
        for _ in 0..200 {
            let client = client(&mut rng);
            let chosen = table.choose(&mut state, &FourTuple::ipv4(client, vip)).unwrap();
            let frame = Tcp { destination: SocketAddrV4::new(vip.0, vip.1), ..Tcp::new(client, VIP) };
            let frame = Tcp { flags: SYN, options: aligned_timestamp(1, 0), ..frame }.frame();
            balancer.expect_sent_to(*service, &frame, chosen, "new_connection");
        }
    }
    // The second service is removed. Another service that reuses its index starts without servers and table.
    let address = |vip: (Ipv4Addr, u16)| (support::balancer::service(vip), ServiceMode::default());
    balancer.services = balancer.lb.set_services(&[address(VIP)]).unwrap();
    let gone = Tcp { flags: SYN, ..Tcp::new(client(&mut rng), other) }.frame();
    balancer.expect_passed(&gone);
    balancer.services = balancer.lb.set_services(&[address((other.0, 8443)), address(VIP)]).unwrap();
    assert_eq!(balancer.lb.servers(balancer.services[0]), []);
    assert_eq!(balancer.lb.servers(balancer.services[1]).len(), 3);
    let new = Tcp { flags: SYN, ..Tcp::new(client(&mut rng), (other.0, 8443)) }.frame();
    balancer.expect(&new, XDP_DROP, 0, "drop_no_eligible_server");
    assert_eq!(balancer.lb.set_services(&[address(VIP), address(VIP)]).unwrap_err().to_string(), {
        "service 10.200.0.1:80/tcp is listed twice"
    });
}

#[test]
fn broadcast_is_limited_per_service_and_recovers() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(10, 0);
    let rates = BroadcastRates::uniform(PacketRate { per_second: 20, burst: 8 });
    let options = Options { broadcast_limits: [rates; intf::LIMITED_KIND_COUNT as usize], ..Options::default() };
    let services = [(service(VIP), ServiceMode::default())];
    let mut balancer = Balancer::with_limits(&services, options, &mut rng);
    let reset = Tcp { flags: RST, ..Tcp::new(client(&mut rng), VIP) }.frame();
    let outcomes =
        |balancer: &mut Balancer, count: usize| (0..count).filter(|_| balancer.run(&reset).0 == XDP_TX).count();
    let start = std::time::Instant::now();
    let sent = outcomes(&mut balancer, 200);
    let earned = (start.elapsed().as_secs_f64() * 20.0) as usize;
    assert!((8..=9 + earned).contains(&sent), "{sent} of 200 sent at once, {earned} tokens earned meanwhile");
    std::thread::sleep(std::time::Duration::from_millis(210));
    assert!(outcomes(&mut balancer, 1) == 1);
    let counters = balancer.lb.counters(balancer.services[0]);
    let limited = intf::LB_COUNTER_NAMES.iter().position(|name| *name == "drop_broadcast_rate_limited").unwrap();
    assert_eq!(counters.packets[limited] as usize, 200 - sent);
}

#[test]
fn changed_mac_address_is_used_for_the_next_packet() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(11, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let server = balancer.replace_servers(0, 1, &mut rng)[0];
    let client = client(&mut rng);
    let tsecr = cookie::stamp_tsval(&balancer.keys, &support::TIME_KEY, &tuple(client), Cookie::Server(server), 5);
    let frame = Tcp { options: aligned_timestamp(1, tsecr), ..Tcp::new(client, VIP) }.frame();
    balancer.expect_sent_to(0, &frame, server, "established");
    let mac = MacAddress([0x02, 1, 2, 3, 4, 5]);
    balancer.macs.insert((0, server), mac);
    balancer.lb.set_server(balancer.services[0], server, Server { mac: Some(mac), is_eligible: false });
    balancer.expect_sent_to(0, &frame, server, "established");
}
