//! Tests of `bpf/lb/vlan.h` (`BPF_PROG_TEST_RUN`): tags of clients' and servers' VLANs.

use std::collections::BTreeSet;

use coreward_dataplane::lb::{LoadBalancer, Options, Server, Tunnel, XdpMode};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::forwarding::Forwarding;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use coreward_model::vlan::Vlan;

use crate::support::balancer::{Balancer, OWN_MAC, XDP_DROP, XDP_PASS, XDP_TX, id, random_table, service};
use crate::support::network::{PinDirectory, VethPair};
use crate::support::tunnel::{OWN_ADDRESSES, client, server_address, vip};
use crate::support::{ACK, Family, RST, SYN, Tcp, aligned_timestamp, missing_bpf_rights, skip_if};

const TAG_AT: usize = 12;
const PRIORITY: u16 = 0xa000;
/// MTU of the devices in bytes, which the long packet of a test exceeds.
const MTU: usize = 600;

fn vlan(id: u16) -> Vlan {
    Vlan::from_id(id.into()).unwrap()
}

/// Returns a balancer with one service. `vips` is the VLAN of the VIP and `servers` that of all servers; neither
/// changes the placement.
fn balancer(family: Family, mode: ServiceMode, vips: u16, servers: u16) -> Balancer {
    let mut rng = seeded_rng(32, 1);
    let options = Options { vlan: vlan(vips), ..Options::default() };
    let mut balancer = Balancer::with(&[(service(vip(family)), mode)], options, &mut rng);
    balancer.lb.set_outer_header(OWN_ADDRESSES, MTU as u32);
    let ids = balancer.replace_servers(0, 9, &mut rng);
    balancer.lb.use_server_vlans(BTreeSet::from([vlan(servers)])).unwrap();
    balancer.lb.set_broadcast_vlan(balancer.services[0], Some(vlan(servers)));
    for id in &ids {
        balancer.lb.set_server_vlan(*id, vlan(servers));
        let address = server_address(Family::Ipv4, *id);
        balancer.lb.set_tunnel(*id, Tunnel { address, source_port: None }).unwrap();
    }
    let table = random_table(PlacementRule::Table, 1, 1, &ids, &mut rng);
    balancer.install(0, &table);
    balancer
}

fn tagged(frame: &[u8], tag: u16) -> Vec<u8> {
    [&frame[..TAG_AT], &[0x81, 0], &tag.to_be_bytes(), &frame[TAG_AT..]].concat()
}

/// Returns a frame as it arrives from the VLAN with this id; 0: untagged.
fn in_vlan(frame: &[u8], vlan: u16) -> Vec<u8> {
    if vlan == 0 { frame.to_vec() } else { tagged(frame, PRIORITY | vlan) }
}

fn packet(family: Family, flags: u8, payload: usize) -> Vec<u8> {
    let tcp = Tcp { flags, options: aligned_timestamp(7, 9), ..Tcp::between(client(family), vip(family)) };
    Tcp { payload: vec![0x5a; payload], ..tcp }.frame()
}

fn reset(family: Family) -> Vec<u8> {
    Tcp { flags: RST, ..Tcp::between(client(family), vip(family)) }.frame()
}

/// Returns modes whose packets take different paths through the program.
fn modes() -> Vec<ServiceMode> {
    let stateless = ServiceMode::default();
    let flows = ServiceMode { timestamps: Timestamps::Off, consistency: Consistency::HashTable, ..stateless };
    let gue = ServiceMode { forwarding: Forwarding::Gue, ..stateless };
    vec![stateless, flows, gue, ServiceMode { forwarding: Forwarding::Ipip, ..stateless }]
}

#[test]
fn frames_leave_in_their_servers_vlan_and_are_otherwise_the_same() {
    skip_if!(missing_bpf_rights());
    let modes_of = |family| modes().into_iter().map(move |mode| (family, mode));
    for (family, mode) in Family::BOTH.into_iter().flat_map(modes_of) {
        let without = balancer(family, mode, 0, 0);
        // All changes of a tag in the default mode, and a change, an addition and a removal in the others.
        let default = mode == ServiceMode::default();
        let changes: &[_] =
            if default { &[(10, 20), (0, 20), (10, 0), (10, 10), (4094, 1)] } else { &[(10, 20), (0, 20), (10, 0)] };
        for &(vips, servers) in changes {
            let with = balancer(family, mode, vips, servers);
            for frame in [packet(family, SYN, 0), packet(family, ACK, 0), packet(family, ACK, 100)] {
                let (expected_verdict, expected) = without.run(&frame);
                let (verdict, found) = with.run(&in_vlan(&frame, vips));
                assert_eq!(verdict, expected_verdict);
                // The program keeps the priority of the tag.
                let priority = if vips == 0 { 0 } else { PRIORITY };
                let is_tagged = verdict == XDP_TX && servers != 0;
                let expected = if is_tagged { tagged(&expected, priority | servers) } else { expected };
                assert_eq!(found, expected, "{family:?} {mode:?}: from {vips} to {servers}");
            }
        }
    }
}

#[test]
fn frames_of_other_vlans_pass_unchanged() {
    skip_if!(missing_bpf_rights());
    for family in Family::BOTH {
        let frame = packet(family, SYN, 0);
        for (vips, other) in [(10, 0), (10, 20), (10, 11), (0, 10)] {
            let balancer = balancer(family, ServiceMode::default(), vips, 20);
            balancer.expect_passed(&in_vlan(&frame, other));
        }
        // A tag with VLAN 0 (a priority alone) counts as untagged; a frame with two tags passes to the kernel.
        let balancer = balancer(family, ServiceMode::default(), 0, 20);
        assert_eq!(balancer.run(&tagged(&frame, PRIORITY)).0, XDP_TX);
        balancer.expect_passed(&tagged(&tagged(&frame, 20), PRIORITY));
        for length in 14..22 {
            assert_eq!(balancer.run(&tagged(&frame, PRIORITY)[..length]).0, XDP_PASS, "{length} bytes");
        }
    }
}

#[test]
fn broadcasts_leave_in_the_vlan_of_all_servers_or_are_dropped() {
    skip_if!(missing_bpf_rights());
    for (vips, servers) in [(0, 20), (10, 20), (10, 0)] {
        let mut balancer = balancer(Family::Ipv4, ServiceMode::default(), vips, servers);
        let frame = reset(Family::Ipv4);
        let (verdict, found) = balancer.run_expecting_counter(&in_vlan(&frame, vips), Some(0), "broadcast");
        let (_, sent) = self::balancer(Family::Ipv4, ServiceMode::default(), 0, 0).run(&frame);
        let priority = if vips == 0 { 0 } else { PRIORITY };
        let expected = if servers == 0 { sent } else { tagged(&sent, priority | servers) };
        assert_eq!((verdict, found), (XDP_TX, expected));
        balancer.lb.set_broadcast_vlan(balancer.services[0], None);
        let (verdict, _) = balancer.run_expecting_counter(&in_vlan(&frame, vips), Some(0), "drop_not_broadcast");
        assert_eq!(verdict, XDP_DROP);
    }
}

#[test]
fn icmp_errors_leave_in_the_senders_vlan() {
    skip_if!(missing_bpf_rights());
    let mode = ServiceMode { forwarding: Forwarding::Gue, ..ServiceMode::default() };
    let frame = packet(Family::Ipv4, SYN, MTU);
    let (verdict, expected) = balancer(Family::Ipv4, mode, 0, 0).run(&frame);
    assert_eq!(verdict, XDP_TX);
    let with = balancer(Family::Ipv4, mode, 10, 20);
    let (_, found) = with.run_expecting_counter(&in_vlan(&frame, 10), Some(0), "drop_fragmentation_needed");
    assert_eq!(found, tagged(&expected, PRIORITY | 10));
}

#[test]
fn vlans_of_servers_are_taken_over() {
    skip_if!(missing_bpf_rights());
    let (pair, pins) = (VethPair::new(), PinDirectory::new());
    let start = || {
        let options = Options { pin_directory: Some(pins.path()), ..Options::default() };
        let mut lb = LoadBalancer::load(options).unwrap();
        pair.server.run_inside(|| lb.attach("eth0", XdpMode::Auto)).unwrap();
        lb.set_own_mac(OWN_MAC);
        lb
    };
    let frame = packet(Family::Ipv4, SYN, 0);
    let leaves_in_vlan = |lb: &LoadBalancer| {
        let sent = test_run::run(lb.program(), &frame, 1).unwrap().packet;
        assert_eq!(sent[TAG_AT..TAG_AT + 4], [0x81, 0, 0, 20]);
    };
    let (mut lb, server) = (start(), id(7));
    let index = lb.set_services(&[(service(vip(Family::Ipv4)), ServiceMode::default())]).unwrap()[0];
    lb.use_server_vlans(BTreeSet::from([vlan(20)])).unwrap();
    lb.set_server_vlan(server, vlan(20));
    lb.set_server(index, server, Server { mac: Some(MacAddress([2, 0, 0, 0, 0, 9])), is_eligible: true });
    lb.install_table(index, &random_table(PlacementRule::Table, 1, 1, &[server], &mut seeded_rng(32, 2))).unwrap();
    leaves_in_vlan(&lb);
    drop(lb);
    let lb = start();
    assert!(lb.is_taken_over());
    leaves_in_vlan(&lb);
}
