//! Tests of the broadcast fallback of `bpf/lb/lb.bpf.c` (`BPF_PROG_TEST_RUN`): no sender, service or kind of packet
//! uses up the rate of another.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use coreward_dataplane::lb::{BroadcastRates, Options, PacketRate};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

use crate::support::balancer::{Balancer, VIP, XDP_TX, random_table, service};
use crate::support::{ACK, RST, Tcp, aligned_timestamp, ipv4_frame, missing_bpf_rights, skip_if};

/// Source address of forged packets.
const FORGED: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

fn balancer(services: u16, options: Options) -> Balancer {
    let mut rng = seeded_rng(121, 0);
    let services: Vec<_> = (0..services).map(|n| (service((VIP.0, VIP.1 + n)), ServiceMode::default())).collect();
    let mut balancer = Balancer::with_limits(&services, options, &mut rng);
    let ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &ids, &mut rng));
    balancer
}

/// Returns an ICMP error from `router` that quotes a packet to `client`: its IP header and 8 bytes (RFC 792).
fn icmp(router: Ipv4Addr, client: (Ipv4Addr, u16)) -> Vec<u8> {
    let quoted = &Tcp::new(VIP, client).frame()[14..][..28];
    let message = [&[3, 4, 0, 0, 0, 0, 5, 0][..], quoted].concat();
    ipv4_frame(1, [router, VIP.0], &[], [0x77, 0], &message)
}

fn reset(client: (Ipv4Addr, u16)) -> Vec<u8> {
    Tcp { flags: RST, ..Tcp::new(client, VIP) }.frame()
}

/// Returns a packet whose cookie most likely names no server: five servers have 5 of 32,768 cookies.
fn unknown_cookie(client: (Ipv4Addr, u16), vip: (Ipv4Addr, u16), tsecr: u32) -> Vec<u8> {
    Tcp { flags: ACK, options: aligned_timestamp(1, tsecr), ..Tcp::new(client, vip) }.frame()
}

fn is_broadcast(balancer: &Balancer, frame: &[u8]) -> bool {
    let (verdict, packet) = balancer.run(frame);
    verdict == XDP_TX && packet[..6] == MacAddress::BROADCAST.0
}

/// Returns how many of 100 genuine ICMP errors in a second, each of another router, pass among 10,000 forged packets.
fn count_accepted(balancer: &Balancer, forged: impl FnMut() -> Vec<u8>) -> usize {
    count_accepted_from(|n| Ipv4Addr::from(0x0a01_0000 + n), balancer, forged)
}

/// Returns the same number as [`count_accepted_errors`], for ICMP errors from the addresses that `router` returns.
fn count_accepted_from(router: fn(u32) -> Ipv4Addr, balancer: &Balancer, mut forged: impl FnMut() -> Vec<u8>) -> usize {
    const INTERVAL: Duration = Duration::from_micros(100);
    let (mut next, mut accepted) = (Instant::now(), 0);
    for n in 0..10_000u32 {
        // After a pause of the machine no missed packets are sent, which would raise the rate.
        while Instant::now() < next {}
        next = (next + INTERVAL).max(Instant::now());
        balancer.run(&forged());
        if n % 100 == 0 {
            let host = router(n);
            accepted += usize::from(is_broadcast(balancer, &icmp(host, (host, 4000))));
        }
    }
    accepted
}

#[test]
fn genuine_icmp_errors_pass_among_forged_packets() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(122, 0);
    let mut any = || (Ipv4Addr::from(rng.next_u32()), rng.next_u32() as u16);
    let balancer = || balancer(1, Options::default());
    let mut tsecr = seeded_rng(123, 0);
    assert_eq!(count_accepted(&balancer(), || unknown_cookie(any(), VIP, tsecr.next_u32())), 100, "unknown cookies");
    assert_eq!(count_accepted(&balancer(), || reset(any())), 100, "resets");
    assert_eq!(count_accepted(&balancer(), || icmp(any().0, any())), 100, "ICMP errors of any source");
    // Forged and genuine errors together stay within the rates.
    assert_eq!(
        count_accepted_from(|_| FORGED, &balancer(), || icmp(FORGED, any())),
        100,
        "ICMP errors of the router's own address"
    );
    // Each router shares one of 4,096 buckets with the forged source by chance: two of them in one of 3,500 runs, three
    // in one of 450,000.
    let beside_one_source = count_accepted(&balancer(), || icmp(FORGED, any()));
    assert!(beside_one_source >= 98, "{beside_one_source} among ICMP errors of one source");
}

/// Returns a rate of one packet per second, at which hardly more packets than the burst pass.
fn rate(burst: u32) -> PacketRate {
    PacketRate { per_second: 1, burst }
}

#[test]
fn one_source_leaves_tokens_to_the_others() {
    skip_if!(missing_bpf_rights());
    let rates = BroadcastRates { per_source: rate(10), per_service: rate(100), total: rate(1000) };
    let balancer =
        balancer(1, Options { broadcast_limits: [rates; intf::LIMITED_KIND_COUNT as usize], ..Options::default() });
    let mut rng = seeded_rng(124, 0);
    let junk = (0..1000u16).map(|port| reset((FORGED, port)));
    let sent = junk.filter(|frame| is_broadcast(&balancer, frame)).count();
    assert!((50..55).contains(&sent), "{sent} of one source: half of what its service may");
    let genuine = (0..50).map(|_| reset((Ipv4Addr::from(rng.next_u32()), 4000)));
    // The forged source has one of 4,096 buckets: two others share it in one of 14,000 runs, three in one of 3,500,000.
    let accepted = genuine.filter(|frame| is_broadcast(&balancer, frame)).count();
    assert!(accepted >= 48, "{accepted} of 50");
}

#[test]
fn all_services_together_are_bounded() {
    skip_if!(missing_bpf_rights());
    let rates = BroadcastRates { per_source: rate(100), per_service: rate(100), total: rate(300) };
    let balancer =
        balancer(40, Options { broadcast_limits: [rates; intf::LIMITED_KIND_COUNT as usize], ..Options::default() });
    let mut rng = seeded_rng(125, 0);
    let sent = (0..2000u16)
        .filter(|n| {
            let client = (Ipv4Addr::from(rng.next_u32()), 4000);
            let vip = (VIP.0, VIP.1 + n % 40);
            is_broadcast(&balancer, &unknown_cookie(client, vip, rng.next_u32()))
        })
        .count();
    assert!((300..310).contains(&sent), "{sent} of 40 services that might have 50 each");
}
