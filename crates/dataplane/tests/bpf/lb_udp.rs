//! Tests of `bpf/lb/lb.bpf.c` with UDP (`BPF_PROG_TEST_RUN`): affinity by flow and by packet, malformed datagrams,
//! fragments.

use std::net::Ipv4Addr;

use coreward_dataplane::lb::{Options, Server};
use coreward_model::consistency::{Consistency, ServiceMode};
use coreward_model::lb::ServerTraffic;
use coreward_model::placement::{PlacementRule, PlacementState, PlacementTable};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::support::balancer::{Balancer, XDP_DROP, XDP_TX, client, random_table, service};
use crate::support::{MORE_FRAGMENTS, SYN, Tcp, Udp, missing_bpf_rights, skip_if};

const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 53);

/// Offsets of headers in a frame with an IP header of 20 bytes, in bytes.
const IP: usize = 14;
const UDP: usize = IP + 20;

fn udp_service() -> ServiceAddress {
    ServiceAddress { protocol: Protocol::Udp, ..service(VIP) }
}

fn tuple(client: (Ipv4Addr, u16)) -> FourTuple {
    FourTuple::ipv4(client, VIP)
}

/// Returns a balancer with a UDP and a TCP service at the same port, the servers' ids, and the UDP service's table.
fn balancer(
    consistency: Consistency,
    rule: PlacementRule,
    rng: &mut impl rand::Rng,
) -> (Balancer, Vec<ServerId>, PlacementTable) {
    let udp = ServiceMode { consistency, ..ServiceMode::default_for(Protocol::Udp) };
    let services = [(udp_service(), udp), (service(VIP), ServiceMode::default())];
    let mut balancer = Balancer::with(&services, Options::default(), rng);
    let ids = balancer.replace_servers(0, 9, rng);
    let table = random_table(rule, 1, 2, &ids, rng);
    balancer.install(0, &table);
    (balancer, ids, table)
}

#[test]
fn datagrams_follow_their_flow() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(61, 0);
    let (mut balancer, ids, table) = balancer(Consistency::HashTable, PlacementRule::LeastAssigned, &mut rng);
    let mut state = PlacementState::for_table(&table);
    let flows: Vec<_> = (0..200)
        .map(|_| {
            let client = client(&mut rng);
            let chosen = table.choose(&mut state, &tuple(client)).unwrap();
            balancer.expect_sent_to(0, &Udp::new(client, VIP).frame(), chosen, "new_connection");
            (client, chosen)
        })
        .collect();
    assert_eq!(balancer.events(0, "flow_inserted"), 200);
    // Flows stay when other servers drain: datagrams with IP options, without payload, and with padding.
    for draining in &ids[2..] {
        let mac = Some(balancer.macs[&(0, *draining)]);
        balancer.lb.set_server(balancer.services[0], *draining, Server { mac, is_eligible: false });
    }
    balancer.install(0, &random_table(PlacementRule::Table, 2, 1, &ids[..2], &mut rng));
    for (client, chosen) in &flows {
        let datagram = Udp::new(*client, VIP);
        let mut padded = datagram.frame();
        padded[UDP + 4..UDP + 6].copy_from_slice(&[0, 10]);
        let frames = [
            Udp { payload: vec![], ..datagram.clone() }.frame(),
            Udp { ip_options: vec![1; 12], payload: vec![7; 1400], ..datagram }.frame(),
            padded,
        ];
        for frame in frames {
            balancer.expect_sent_to(0, &frame, *chosen, "flow_table");
        }
    }
    let opened: u64 = ids.iter().map(|id| balancer.lb.traffic(*id).opened).sum();
    assert_eq!(opened, 200);
    // A flow whose server was removed is placed and stored again.
    let (client, chosen) = flows[0];
    balancer.lb.remove_server(balancer.services[0], chosen);
    let frame = Udp::new(client, VIP).frame();
    let (verdict, _) = balancer.run_expecting_counter(&frame, Some(0), "new_connection");
    assert_eq!(verdict, XDP_TX);
    balancer.run_expecting_counter(&frame, Some(0), "flow_table");
}

#[test]
fn flow_leaves_a_server_that_health_checks_find_down() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(68, 0);
    let (mut balancer, ids, table) = balancer(Consistency::HashTable, PlacementRule::Table, &mut rng);
    let client = client(&mut rng);
    let frame = Udp::new(client, VIP).frame();
    let chosen = table.choose(&mut PlacementState::for_table(&table), &tuple(client)).unwrap();
    balancer.expect_sent_to(0, &frame, chosen, "new_connection");
    // A flow stays at a draining server, but leaves a masked server even if the table still has that server.
    let mac = Some(balancer.macs[&(0, chosen)]);
    balancer.lb.set_server(balancer.services[0], chosen, Server { mac, is_eligible: false });
    balancer.expect_sent_to(0, &frame, chosen, "flow_table");
    balancer.lb.set_masked(balancer.services[0], chosen, true);
    let to_another = |id: &&ServerId| balancer.macs[&(0, **id)] != balancer.macs[&(0, chosen)];
    let (verdict, sent) = balancer.run_expecting_counter(&frame, Some(0), "new_connection");
    assert_eq!(verdict, XDP_TX);
    assert!(ids.iter().filter(to_another).any(|id| sent[..6] == balancer.macs[&(0, *id)].0), "it went to {chosen}");
    balancer.run_expecting_counter(&frame, Some(0), "flow_table");
}

#[test]
fn datagrams_are_placed_individually() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(62, 0);
    let (balancer, ids, table) = balancer(Consistency::None, PlacementRule::PowerOfTwo, &mut rng);
    let mut state = PlacementState::for_table(&table);
    for _ in 0..300 {
        let client = client(&mut rng);
        let chosen = table.choose(&mut state, &tuple(client)).unwrap();
        for _ in 0..2 {
            balancer.expect_sent_to(0, &Udp::new(client, VIP).frame(), chosen, "per_packet");
        }
    }
    assert_eq!(balancer.events(0, "flow_inserted"), 0);
    assert!(ids.iter().all(|id| balancer.lb.traffic(*id) == ServerTraffic::default()));
}

#[test]
fn protocols_of_one_port_are_separate_services() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(63, 0);
    let (mut balancer, _, table) = balancer(Consistency::HashTable, PlacementRule::Table, &mut rng);
    let client = client(&mut rng);
    let chosen = table.choose(&mut PlacementState::for_table(&table), &tuple(client)).unwrap();
    balancer.expect_sent_to(0, &Udp::new(client, VIP).frame(), chosen, "new_connection");
    let syn = Tcp { flags: SYN, ..Tcp::new(client, VIP) }.frame();
    balancer.expect(&syn, XDP_DROP, 1, "drop_no_eligible_server");
    // Datagrams to another port of the VIP pass to the kernel, also with a wrong length.
    let other = Udp::new(client, (VIP.0, 54)).frame();
    balancer.expect_passed(&other);
    let mut bad = other.clone();
    bad[UDP + 5] = 1;
    balancer.expect_passed(&bad);
    // Without a UDP service all UDP packets pass to the kernel.
    balancer.services = balancer.lb.set_services(&[(service(VIP), ServiceMode::default())]).unwrap();
    balancer.expect_passed(&Udp::new(client, VIP).frame());
}

#[test]
fn malformed_datagrams_are_dropped_with_a_reason() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(64, 0);
    let (balancer, _, _) = balancer(Consistency::None, PlacementRule::Table, &mut rng);
    let frame = Udp::new(client(&mut rng), VIP).frame();
    let length = (frame.len() - UDP) as u16;
    for printed in 0..=length + 8 {
        let mut frame = frame.clone();
        frame[UDP + 4..UDP + 6].copy_from_slice(&printed.to_be_bytes());
        if (8..=length).contains(&printed) {
            balancer.run_expecting_counter(&frame, Some(0), "per_packet");
        } else {
            balancer.expect(&frame, XDP_DROP, 0, "drop_malformed_udp");
        }
    }
    // The total length in the IP header is too small.
    for total in 0..28u16 {
        let mut frame = frame.clone();
        frame[IP + 2..IP + 4].copy_from_slice(&total.to_be_bytes());
        match total {
            0..20 => balancer.expect_without_service(&frame, XDP_DROP, "drop_malformed_ipv4"),
            20..24 => balancer.expect_without_service(&frame, XDP_DROP, "drop_malformed_udp"),
            _ => balancer.expect(&frame, XDP_DROP, 0, "drop_malformed_udp"),
        }
    }
    for cut in IP + 20..frame.len() {
        balancer.expect_without_service(&frame[..cut], XDP_DROP, "drop_malformed_ipv4");
    }
}

/// Returns the fragments of a datagram of `count` times 16 bytes, in order.
fn fragments(datagram: &Udp, count: u16) -> Vec<Vec<u8>> {
    let fragment = |n: u16| {
        let more = if n + 1 < count { MORE_FRAGMENTS } else { 0 };
        // The first fragment has 8 bytes of UDP header and 8 of data, the others 16 of data.
        let payload = vec![n as u8; if n == 0 { 8 } else { 16 }];
        Udp { fragment: more | (n * 2), payload, ..datagram.clone() }.frame()
    };
    (0..count).map(fragment).collect()
}

#[test]
fn fragments_follow_the_first_one() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(65, 0);
    for consistency in [Consistency::HashTable, Consistency::None] {
        let (mut balancer, _, table) = balancer(consistency, PlacementRule::Table, &mut rng);
        let name = if consistency == Consistency::None { "per_packet" } else { "new_connection" };
        let mut state = PlacementState::for_table(&table);
        for round in 0..50u16 {
            let client = client(&mut rng);
            let datagram = Udp { identification: round, ..Udp::new(client, VIP) };
            let frames = fragments(&datagram, 4);
            let chosen = table.choose(&mut state, &tuple(client)).unwrap();
            // Before the first fragment has come, the service of the others is unknown.
            balancer.expect_without_service(&frames[1], XDP_DROP, "drop_fragment");
            balancer.expect_sent_to(0, &frames[0], chosen, name);
            for later in [3, 1, 2] {
                balancer.expect_sent_to(0, &frames[later], chosen, "fragment");
            }
            // Fragments of another datagram, or from another client, are not matched.
            let strangers = [
                Udp { identification: round + 1000, ..datagram.clone() },
                Udp { source: std::net::SocketAddrV4::new(Ipv4Addr::new(1, 2, 3, 4), client.1), ..datagram.clone() },
            ];
            for stranger in strangers {
                balancer.expect_without_service(&fragments(&stranger, 3)[1], XDP_DROP, "drop_fragment");
            }
        }
        // Later fragments have no server if the first fragment was dropped, or if its server was removed.
        let datagram = Udp { identification: 7, ..Udp::new(client(&mut rng), VIP) };
        let frames = fragments(&datagram, 3);
        let mut bad = frames[0].clone();
        bad[UDP + 4..UDP + 6].copy_from_slice(&[0, 7]);
        balancer.expect(&bad, XDP_DROP, 0, "drop_malformed_udp");
        balancer.expect_without_service(&frames[1], XDP_DROP, "drop_fragment");
        let chosen = table.choose(&mut state, &tuple((*datagram.source.ip(), datagram.source.port()))).unwrap();
        balancer.expect_sent_to(0, &frames[0], chosen, name);
        balancer.lb.set_server(balancer.services[0], chosen, Server { mac: None, is_eligible: true });
        balancer.expect(&frames[1], XDP_DROP, 0, "drop_server_unresolved");
        balancer.lb.remove_server(balancer.services[0], chosen);
        balancer.expect_without_service(&frames[2], XDP_DROP, "drop_fragment");
        // The first fragment to another port passes to the kernel. Later fragments show no port, and are dropped.
        let other = fragments(&Udp { identification: 9, ..Udp::new(client(&mut rng), (VIP.0, 54)) }, 2);
        balancer.expect_passed(&other[0]);
        balancer.expect_without_service(&other[1], XDP_DROP, "drop_fragment");
        // Without a UDP service later fragments pass to the kernel.
        balancer.services = balancer.lb.set_services(&[(service(VIP), ServiceMode::default())]).unwrap();
        balancer.expect_passed(&frames[1]);
    }
}

/// Free entries that each CPU reserves in an LRU map must not reduce the documented capacity.
#[test]
fn fragment_table_holds_its_documented_number_of_datagrams() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(68, 0);
    let (balancer, _, _) = balancer(Consistency::None, PlacementRule::Table, &mut rng);
    let datagrams: Vec<_> = (0..coreward_intf::MAX_FRAGMENTED_DATAGRAMS as u16)
        .map(|n| fragments(&Udp { identification: n, ..Udp::new(client(&mut rng), VIP) }, 2))
        .collect();
    let before = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::count()).filter(|cpu| before.is_set(*cpu).unwrap()).collect();
    let run_on = |cpu: usize| {
        let mut set = CpuSet::new();
        set.set(cpu).unwrap();
        sched_setaffinity(Pid::from_raw(0), &set).unwrap();
    };
    // Each CPU processes one datagram, and the first CPU all the others.
    for (n, datagram) in datagrams.iter().enumerate() {
        run_on(cpus.get(n).copied().unwrap_or(cpus[0]));
        assert_eq!(balancer.run(&datagram[0]).0, XDP_TX);
    }
    let followed = datagrams.iter().filter(|datagram| balancer.run(&datagram[1]).0 == XDP_TX).count();
    sched_setaffinity(Pid::from_raw(0), &before).unwrap();
    assert_eq!(followed, datagrams.len());
}

#[test]
fn fragments_of_a_removed_service_are_dropped() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(67, 0);
    let (mut balancer, _, _) = balancer(Consistency::HashTable, PlacementRule::Table, &mut rng);
    let frames = fragments(&Udp { identification: 7, ..Udp::new(client(&mut rng), VIP) }, 3);
    balancer.run_expecting_counter(&frames[0], Some(0), "new_connection");
    balancer.run_expecting_counter(&frames[1], Some(0), "fragment");
    // Another service of the VIP gets the removed service's index, and another server the removed server's id.
    let other = ServiceAddress { protocol: Protocol::Udp, ..service((VIP.0, 5353)) };
    balancer.services = balancer.lb.set_services(&[(other, ServiceMode::default_for(Protocol::Udp))]).unwrap();
    for id in 0..coreward_intf::SERVER_ID_COUNT {
        let mac = Some(coreward_dataplane::mac::MacAddress([2, 0, 0, 0, 0, 7]));
        let id = ServerId::try_from(u64::from(id)).unwrap();
        balancer.lb.set_server(balancer.services[0], id, Server { mac, is_eligible: true });
    }
    balancer.expect_without_service(&frames[2], XDP_DROP, "drop_fragment");
}

#[test]
fn first_fragments_without_ports_are_dropped_with_a_reason() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(66, 0);
    let (balancer, _, _) = balancer(Consistency::None, PlacementRule::Table, &mut rng);
    let first = fragments(&Udp::new(client(&mut rng), VIP), 2).remove(0);
    for total in 20..28u16 {
        let mut frame = first.clone();
        frame[IP + 2..IP + 4].copy_from_slice(&total.to_be_bytes());
        match total {
            20..24 => balancer.expect_without_service(&frame, XDP_DROP, "drop_malformed_udp"),
            _ => balancer.expect(&frame, XDP_DROP, 0, "drop_malformed_udp"),
        }
    }
}
