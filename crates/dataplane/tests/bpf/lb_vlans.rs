//! Tests of the VLAN tags of clients' and servers' packets (`bpf/lb/vlan.h`, `BPF_PROG_TEST_RUN`).

use std::collections::BTreeSet;

use coreward_dataplane::lb::{LoadBalancer, LoadBalancerOptions, Server, ServerTunnel, XdpMode};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceSettings};
use coreward_model::forwarding::ForwardingMode;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use coreward_model::vlan::Vlan;

use crate::support::balancer::{
    LOAD_BALANCER_MAC, TestBalancer, XDP_DROP, XDP_PASS, XDP_TX, random_placement_table, server_id_from_number,
    service_address,
};
use crate::support::network::{PinDirectory, VethPair};
use crate::support::tunnel::{LB_OUTER_SOURCE_ADDRESSES, client_socket_address, server_outer_address, service_vip};
use crate::support::{ACK, AddressFamily, RST, SYN, TcpPacket, aligned_timestamp_option, missing_bpf_rights, skip_if};

const VLAN_TAG_OFFSET: usize = 12;
const VLAN_TAG_PRIORITY_BITS: u16 = 0xa000;
/// MTU in bytes of the path to the servers. The frame of one test exceeds it.
const MTU_BYTES: usize = 600;

fn vlan_with_id(id: u16) -> Vlan {
    Vlan::from_id_or_untagged(id.into()).unwrap()
}

/// Returns a balancer with one service. `vip_vlan_id` is the VLAN of the VIP, and `server_vlan_id` the VLAN of all
/// servers. Balancers with different VLANs have the same servers and placement table.
fn balancer_in_vlans(
    family: AddressFamily,
    mode: ServiceSettings,
    vip_vlan_id: u16,
    server_vlan_id: u16,
) -> TestBalancer {
    let mut rng = seeded_rng(32, 1);
    let options = LoadBalancerOptions { vip_vlan: vlan_with_id(vip_vlan_id), ..LoadBalancerOptions::default() };
    let mut balancer = TestBalancer::with_model(&[(service_address(service_vip(family)), mode)], options, &mut rng);
    balancer.lb.set_outer_header(LB_OUTER_SOURCE_ADDRESSES, MTU_BYTES as u32);
    let server_ids = balancer.replace_servers(0, 9, &mut rng);
    balancer.lb.enable_server_vlans(BTreeSet::from([vlan_with_id(server_vlan_id)])).unwrap();
    balancer.lb.set_broadcast_vlan(balancer.service_indexes[0], Some(vlan_with_id(server_vlan_id)));
    for id in &server_ids {
        balancer.lb.set_server_vlan(*id, vlan_with_id(server_vlan_id));
        let outer_address = server_outer_address(AddressFamily::Ipv4, *id);
        balancer
            .lb
            .set_server_tunnel(*id, ServerTunnel { destination_address: outer_address, source_port: None })
            .unwrap();
    }
    let table = random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng);
    balancer.install_table(0, &table);
    balancer
}

fn add_vlan_tag(frame: &[u8], tag_control: u16) -> Vec<u8> {
    [&frame[..VLAN_TAG_OFFSET], &[0x81, 0], &tag_control.to_be_bytes(), &frame[VLAN_TAG_OFFSET..]].concat()
}

/// Returns `frame` with the tag of VLAN `vlan_id`, or without a tag if the id is 0.
fn frame_in_vlan(frame: &[u8], vlan_id: u16) -> Vec<u8> {
    if vlan_id == 0 { frame.to_vec() } else { add_vlan_tag(frame, VLAN_TAG_PRIORITY_BITS | vlan_id) }
}

fn client_frame(family: AddressFamily, flags: u8, payload_bytes: usize) -> Vec<u8> {
    let tcp_packet = TcpPacket {
        flags,
        tcp_options: aligned_timestamp_option(7, 9),
        ..TcpPacket::between(client_socket_address(family), service_vip(family))
    };
    TcpPacket { payload: vec![0x5a; payload_bytes], ..tcp_packet }.to_frame()
}

fn rst_frame(family: AddressFamily) -> Vec<u8> {
    TcpPacket { flags: RST, ..TcpPacket::between(client_socket_address(family), service_vip(family)) }.to_frame()
}

/// Returns the tested service modes. Their packets take different paths through the balancer's program.
fn tested_service_settings() -> Vec<ServiceSettings> {
    let stateless_mode = ServiceSettings::default();
    let flow_table_mode =
        ServiceSettings { timestamps: CookieStamper::Off, consistency: ConsistencyMode::HashTable, ..stateless_mode };
    let gue_mode = ServiceSettings { forwarding: ForwardingMode::Gue, ..stateless_mode };
    vec![
        stateless_mode,
        flow_table_mode,
        gue_mode,
        ServiceSettings { forwarding: ForwardingMode::Ipip, ..stateless_mode },
    ]
}

#[test]
fn forwarded_frames_get_the_vlan_tag_of_their_server() {
    skip_if!(missing_bpf_rights());
    let modes_of_family = |family| tested_service_settings().into_iter().map(move |mode| (family, mode));
    for (family, mode) in AddressFamily::BOTH.into_iter().flat_map(modes_of_family) {
        let untagged_balancer = balancer_in_vlans(family, mode, 0, 0);
        // The default mode is tested with all tag changes, other modes with a changed, an added and a removed tag.
        let is_default_mode = mode == ServiceSettings::default();
        let tested_vlan_ids: &[_] = if is_default_mode {
            &[(10, 20), (0, 20), (10, 0), (10, 10), (4094, 1)]
        } else {
            &[(10, 20), (0, 20), (10, 0)]
        };
        for &(vip_vlan_id, server_vlan_id) in tested_vlan_ids {
            let tagged_balancer = balancer_in_vlans(family, mode, vip_vlan_id, server_vlan_id);
            for frame in [client_frame(family, SYN, 0), client_frame(family, ACK, 0), client_frame(family, ACK, 100)] {
                let (expected_action, untagged_output) = untagged_balancer.process_frame(&frame);
                let (xdp_action, tagged_output) = tagged_balancer.process_frame(&frame_in_vlan(&frame, vip_vlan_id));
                assert_eq!(xdp_action, expected_action);
                // The program keeps the priority of the tag.
                let priority_bits = if vip_vlan_id == 0 { 0 } else { VLAN_TAG_PRIORITY_BITS };
                let is_tagged = xdp_action == XDP_TX && server_vlan_id != 0;
                let expected_frame = if is_tagged {
                    add_vlan_tag(&untagged_output, priority_bits | server_vlan_id)
                } else {
                    untagged_output
                };
                assert_eq!(
                    tagged_output, expected_frame,
                    "{family:?} {mode:?}: from {vip_vlan_id} to {server_vlan_id}"
                );
            }
        }
    }
}

#[test]
fn frames_outside_the_vip_vlan_pass_unchanged() {
    skip_if!(missing_bpf_rights());
    for family in AddressFamily::BOTH {
        let frame = client_frame(family, SYN, 0);
        for (vip_vlan_id, other_vlan_id) in [(10, 0), (10, 20), (10, 11), (0, 10)] {
            let balancer = balancer_in_vlans(family, ServiceSettings::default(), vip_vlan_id, 20);
            balancer.expect_passed_uncounted(&frame_in_vlan(&frame, other_vlan_id));
        }
        // A tag with VLAN 0 (which is only a priority) counts as untagged. A frame with two tags passes to the kernel.
        let balancer = balancer_in_vlans(family, ServiceSettings::default(), 0, 20);
        assert_eq!(balancer.process_frame(&add_vlan_tag(&frame, VLAN_TAG_PRIORITY_BITS)).0, XDP_TX);
        balancer.expect_passed_uncounted(&add_vlan_tag(&add_vlan_tag(&frame, 20), VLAN_TAG_PRIORITY_BITS));
        for length in 14..22 {
            assert_eq!(
                balancer.process_frame(&add_vlan_tag(&frame, VLAN_TAG_PRIORITY_BITS)[..length]).0,
                XDP_PASS,
                "{length} bytes"
            );
        }
    }
}

#[test]
fn broadcasts_are_dropped_unless_servers_share_one_vlan() {
    skip_if!(missing_bpf_rights());
    for (vip_vlan_id, server_vlan_id) in [(0, 20), (10, 20), (10, 0)] {
        let mut balancer =
            balancer_in_vlans(AddressFamily::Ipv4, ServiceSettings::default(), vip_vlan_id, server_vlan_id);
        let frame = rst_frame(AddressFamily::Ipv4);
        let (xdp_action, tagged_output) =
            balancer.process_frame_expecting_counter(&frame_in_vlan(&frame, vip_vlan_id), Some(0), "broadcast");
        let (_, untagged_output) =
            self::balancer_in_vlans(AddressFamily::Ipv4, ServiceSettings::default(), 0, 0).process_frame(&frame);
        let priority_bits = if vip_vlan_id == 0 { 0 } else { VLAN_TAG_PRIORITY_BITS };
        let expected_frame = if server_vlan_id == 0 {
            untagged_output
        } else {
            add_vlan_tag(&untagged_output, priority_bits | server_vlan_id)
        };
        assert_eq!((xdp_action, tagged_output), (XDP_TX, expected_frame));
        balancer.lb.set_broadcast_vlan(balancer.service_indexes[0], None);
        let (xdp_action, _) = balancer.process_frame_expecting_counter(
            &frame_in_vlan(&frame, vip_vlan_id),
            Some(0),
            "drop_not_broadcast",
        );
        assert_eq!(xdp_action, XDP_DROP);
    }
}

#[test]
fn icmp_errors_are_sent_in_the_senders_vlan() {
    skip_if!(missing_bpf_rights());
    let gue_mode = ServiceSettings { forwarding: ForwardingMode::Gue, ..ServiceSettings::default() };
    let frame = client_frame(AddressFamily::Ipv4, SYN, MTU_BYTES);
    let (xdp_action, untagged_output) = balancer_in_vlans(AddressFamily::Ipv4, gue_mode, 0, 0).process_frame(&frame);
    assert_eq!(xdp_action, XDP_TX);
    let tagged_balancer = balancer_in_vlans(AddressFamily::Ipv4, gue_mode, 10, 20);
    let (_, tagged_output) = tagged_balancer.process_frame_expecting_counter(
        &frame_in_vlan(&frame, 10),
        Some(0),
        "drop_fragmentation_needed",
    );
    assert_eq!(tagged_output, add_vlan_tag(&untagged_output, VLAN_TAG_PRIORITY_BITS | 10));
}

#[test]
fn new_process_takes_over_server_vlans() {
    skip_if!(missing_bpf_rights());
    let (veth_pair, pins) = (VethPair::new(), PinDirectory::new());
    let start_lb_process = || {
        let options = LoadBalancerOptions { pin_directory: Some(pins.path()), ..LoadBalancerOptions::default() };
        let mut lb = LoadBalancer::load(options).unwrap();
        veth_pair.server.run_in_namespace(|| lb.attach("eth0", XdpMode::Auto)).unwrap();
        lb.set_own_mac(LOAD_BALANCER_MAC);
        lb
    };
    let frame = client_frame(AddressFamily::Ipv4, SYN, 0);
    let assert_sent_in_vlan = |lb: &LoadBalancer| {
        let sent_frame = test_run::run_program(lb.program_fd(), &frame, 1).unwrap().packet;
        assert_eq!(sent_frame[VLAN_TAG_OFFSET..VLAN_TAG_OFFSET + 4], [0x81, 0, 0, 20]);
    };
    let (mut lb, server) = (start_lb_process(), server_id_from_number(7));
    let service_index =
        lb.set_services(&[(service_address(service_vip(AddressFamily::Ipv4)), ServiceSettings::default())]).unwrap()[0];
    lb.enable_server_vlans(BTreeSet::from([vlan_with_id(20)])).unwrap();
    lb.set_server_vlan(server, vlan_with_id(20));
    lb.set_server(service_index, server, Server { mac: Some(MacAddress([2, 0, 0, 0, 0, 9])), is_eligible: true });
    lb.install_table(
        service_index,
        &random_placement_table(PlacementRule::Table, 1, 1, &[server], &mut seeded_rng(32, 2)),
    )
    .unwrap();
    assert_sent_in_vlan(&lb);
    drop(lb);
    let lb = start_lb_process();
    assert!(lb.is_state_taken_over());
    assert_sent_in_vlan(&lb);
}
