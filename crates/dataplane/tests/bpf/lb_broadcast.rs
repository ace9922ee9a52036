//! Tests of broadcasts by `bpf/lb/lb.bpf.c` (`BPF_PROG_TEST_RUN`). No sender, service or packet kind may use up
//! another's rate.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use coreward_dataplane::lb::{BroadcastRateLimits, LoadBalancerOptions, PacketRateLimit};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

use crate::support::balancer::{TestBalancer, VIP, XDP_TX, random_placement_table, service_address};
use crate::support::{ACK, RST, TcpPacket, aligned_timestamp_option, ipv4_frame, missing_bpf_rights, skip_if};

const FORGED_SOURCE_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

fn balancer_with_services(service_count: u16, options: LoadBalancerOptions) -> TestBalancer {
    let mut rng = seeded_rng(121, 0);
    let services: Vec<_> =
        (0..service_count).map(|n| (service_address((VIP.0, VIP.1 + n)), ServiceSettings::default())).collect();
    let mut balancer = TestBalancer::without_model(&services, options, &mut rng);
    let server_ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
    balancer
}

/// Returns an ICMP error from `router` that quotes the IP header and 8 bytes of a packet to `client` (RFC 792).
fn icmp_error_frame(router: Ipv4Addr, client: (Ipv4Addr, u16)) -> Vec<u8> {
    let quoted_packet = &TcpPacket::new(VIP, client).to_frame()[14..][..28];
    let icmp_message = [&[3, 4, 0, 0, 0, 0, 5, 0][..], quoted_packet].concat();
    ipv4_frame(1, [router, VIP.0], &[], [0x77, 0], &icmp_message)
}

fn rst_frame(client: (Ipv4Addr, u16)) -> Vec<u8> {
    TcpPacket { flags: RST, ..TcpPacket::new(client, VIP) }.to_frame()
}

/// Returns a packet whose cookie most likely names no server, because only 5 of 32,768 cookies name a server.
fn frame_with_unknown_cookie(client: (Ipv4Addr, u16), vip: (Ipv4Addr, u16), tsecr: u32) -> Vec<u8> {
    TcpPacket { flags: ACK, tcp_options: aligned_timestamp_option(1, tsecr), ..TcpPacket::new(client, vip) }.to_frame()
}

fn is_frame_broadcast(balancer: &TestBalancer, frame: &[u8]) -> bool {
    let (xdp_action, packet) = balancer.process_frame(frame);
    xdp_action == XDP_TX && packet[..6] == MacAddress::BROADCAST.0
}

/// Sends 100 genuine ICMP errors, each from another router, among 10,000 forged packets within a second. Returns the
/// number of genuine errors that pass.
fn count_passed_icmp_errors(balancer: &TestBalancer, forged_frame: impl FnMut() -> Vec<u8>) -> usize {
    count_passed_errors_from_routers(|n| Ipv4Addr::from(0x0a01_0000 + n), balancer, forged_frame)
}

/// Counts as [`count_passed_icmp_errors`] does, but the genuine errors come from the addresses that `router` returns.
fn count_passed_errors_from_routers(
    router: fn(u32) -> Ipv4Addr,
    balancer: &TestBalancer,
    mut forged_frame: impl FnMut() -> Vec<u8>,
) -> usize {
    const FORGED_PACKET_INTERVAL: Duration = Duration::from_micros(100);
    let (mut next_send_time, mut accepted_count) = (Instant::now(), 0);
    for n in 0..10_000u32 {
        // If the machine pauses, the missed packets are not sent later, because they would raise the rate.
        while Instant::now() < next_send_time {}
        next_send_time = (next_send_time + FORGED_PACKET_INTERVAL).max(Instant::now());
        balancer.process_frame(&forged_frame());
        if n % 100 == 0 {
            let router_address = router(n);
            accepted_count +=
                usize::from(is_frame_broadcast(balancer, &icmp_error_frame(router_address, (router_address, 4000))));
        }
    }
    accepted_count
}

#[test]
fn genuine_icmp_errors_pass_among_forged_packets() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(122, 0);
    let mut draw_random_endpoint = || (Ipv4Addr::from(rng.next_u32()), rng.next_u32() as u16);
    let new_balancer = || balancer_with_services(1, LoadBalancerOptions::default());
    let mut tsecr_rng = seeded_rng(123, 0);
    assert_eq!(
        count_passed_icmp_errors(&new_balancer(), || frame_with_unknown_cookie(
            draw_random_endpoint(),
            VIP,
            tsecr_rng.next_u32()
        )),
        100,
        "unknown cookies"
    );
    assert_eq!(count_passed_icmp_errors(&new_balancer(), || rst_frame(draw_random_endpoint())), 100, "resets");
    assert_eq!(
        count_passed_icmp_errors(&new_balancer(), || icmp_error_frame(
            draw_random_endpoint().0,
            draw_random_endpoint()
        )),
        100,
        "ICMP errors of any source"
    );
    // Forged and genuine errors together stay within the rates.
    assert_eq!(
        count_passed_errors_from_routers(
            |_| FORGED_SOURCE_ADDRESS,
            &new_balancer(),
            || icmp_error_frame(FORGED_SOURCE_ADDRESS, draw_random_endpoint())
        ),
        100,
        "ICMP errors of the router's own address"
    );
    // By chance, some of the routers share the forged source's bucket (of 4,096). Two do in one run of 3,500, and three
    // in one run of 450,000.
    let accepted_during_one_source_flood =
        count_passed_icmp_errors(&new_balancer(), || icmp_error_frame(FORGED_SOURCE_ADDRESS, draw_random_endpoint()));
    assert!(
        accepted_during_one_source_flood >= 98,
        "{accepted_during_one_source_flood} among ICMP errors of one source"
    );
}

/// Returns a rate limit that passes a burst of `burst` packets, and then one packet per second.
fn rate_limit_with_burst(burst: u32) -> PacketRateLimit {
    PacketRateLimit { packets_per_second: 1, burst_packets: burst }
}

#[test]
fn flood_of_one_source_leaves_tokens_for_other_sources() {
    skip_if!(missing_bpf_rights());
    let rate_limits = BroadcastRateLimits {
        source_limit: rate_limit_with_burst(10),
        service_limit: rate_limit_with_burst(100),
        total_limit: rate_limit_with_burst(1000),
    };
    let balancer = balancer_with_services(
        1,
        LoadBalancerOptions {
            broadcast_limits: [rate_limits; intf::LIMITED_KIND_COUNT as usize],
            ..LoadBalancerOptions::default()
        },
    );
    let mut rng = seeded_rng(124, 0);
    let flood_frames = (0..1000u16).map(|port| rst_frame((FORGED_SOURCE_ADDRESS, port)));
    let broadcast_flood_frames = flood_frames.filter(|frame| is_frame_broadcast(&balancer, frame)).count();
    assert!(
        (50..55).contains(&broadcast_flood_frames),
        "{broadcast_flood_frames} of one source: half of what its service may"
    );
    let genuine_frames = (0..50).map(|_| rst_frame((Ipv4Addr::from(rng.next_u32()), 4000)));
    // By chance, some sources share the forged source's bucket (of 4,096). Two do in one run of 14,000, and three in
    // one run of 3,500,000.
    let accepted_count = genuine_frames.filter(|frame| is_frame_broadcast(&balancer, frame)).count();
    assert!(accepted_count >= 48, "{accepted_count} of 50");
}

#[test]
fn total_limit_applies_to_broadcasts_of_all_services() {
    skip_if!(missing_bpf_rights());
    let rate_limits = BroadcastRateLimits {
        source_limit: rate_limit_with_burst(100),
        service_limit: rate_limit_with_burst(100),
        total_limit: rate_limit_with_burst(300),
    };
    let balancer = balancer_with_services(
        40,
        LoadBalancerOptions {
            broadcast_limits: [rate_limits; intf::LIMITED_KIND_COUNT as usize],
            ..LoadBalancerOptions::default()
        },
    );
    let mut rng = seeded_rng(125, 0);
    let broadcast_count = (0..2000u16)
        .filter(|n| {
            let client = (Ipv4Addr::from(rng.next_u32()), 4000);
            let vip = (VIP.0, VIP.1 + n % 40);
            is_frame_broadcast(&balancer, &frame_with_unknown_cookie(client, vip, rng.next_u32()))
        })
        .count();
    assert!((300..310).contains(&broadcast_count), "{broadcast_count} of 40 services that might have 50 each");
}
