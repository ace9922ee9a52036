//! Tests of counters when services are added and removed, and when two CPUs count at the same time.

use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;

use coreward_dataplane::lb::{LoadBalancerOptions, PacketCounters};
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::{ConsistencyMode, ServiceSettings};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::TransportProtocol;
use coreward_model::{ServerId, ServiceAddress};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::support::balancer::{TestBalancer, VIP, XDP_TX, random_placement_table, service_address};
use crate::support::{SYN, TcpPacket, UdpDatagram, aligned_timestamp_option, missing_bpf_rights, skip_if};

const OTHER_VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 2), 443);

#[test]
fn counters_of_a_reused_service_slot_start_at_zero() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(140, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let server_ids = balancer.replace_servers(0, 4, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
    for port in 1024..1034 {
        let syn_frame = TcpPacket {
            flags: SYN,
            tcp_options: aligned_timestamp_option(1, 0),
            ..TcpPacket::new((Ipv4Addr::new(192, 0, 2, 1), port), VIP)
        };
        assert_eq!(balancer.process_frame(&syn_frame.to_frame()).0, XDP_TX);
    }
    let (service_index, total_counters) = (balancer.service_indexes[0], balancer.lb.total_counters());
    assert_eq!(
        balancer.lb.service_counters(service_index).packets_by_outcome[intf::LB_COUNTER_NEW_CONNECTION as usize],
        10
    );
    assert_eq!(balancer.lb.opened_connection_count(service_index), 10);

    let mut replace_service =
        |vip| balancer.lb.set_services(&[(service_address(vip), ServiceSettings::default())]).unwrap()[0];
    assert_eq!(replace_service(OTHER_VIP), service_index, "the place is used again");
    assert_eq!(balancer.lb.service_counters(service_index), PacketCounters::default());
    assert_eq!(balancer.lb.opened_connection_count(service_index), 0);
    assert_eq!(balancer.lb.total_counters(), total_counters, "what removed services counted stays in the total");
}

/// Runs the program `run_count` times on one CPU, with a frame from receive queue 0.
fn run_program_on_cpu(cpu: usize, program: BorrowedFd<'_>, frame: &[u8], run_count: u32) {
    let mut single_cpu = CpuSet::new();
    single_cpu.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(0), &single_cpu).unwrap();
    assert_eq!(test_run::run_program(program, frame, run_count).unwrap().verdict, XDP_TX);
}

/// Runs the program on two CPUs concurrently, as on a bond whose two devices both have a queue 0. The load balancer
/// gets the MAC address of its only server, because the kernel does not restore the frame between runs.
fn run_program_on_two_cpus(balancer: &mut TestBalancer, server: ServerId, mut frame: Vec<u8>, run_count: u32) {
    let server_mac = *balancer.server_macs.iter().find(|((_, server_id), _)| *server_id == server).unwrap().1;
    balancer.lb.set_own_mac(server_mac);
    frame[..6].copy_from_slice(&server_mac.0);
    let (program, frame) = (balancer.lb.program_fd(), &frame);
    std::thread::scope(|scope| {
        for cpu in 0..2 {
            scope.spawn(move || run_program_on_cpu(cpu, program, frame, run_count));
        }
    });
}

#[test]
fn connection_counts_are_exact_with_two_concurrent_cpus() {
    const PROGRAM_RUNS_PER_CPU: u32 = 1_000_000;
    skip_if!(missing_bpf_rights());
    skip_if!((std::thread::available_parallelism().unwrap().get() < 2).then_some("needs 2 CPUs"));
    let mut rng = seeded_rng(141, 0);
    let udp_address = ServiceAddress { protocol: TransportProtocol::Udp, ..service_address(VIP) };
    let per_packet_mode = ServiceSettings { consistency: ConsistencyMode::None, ..ServiceSettings::default() };
    let services = [(service_address(VIP), ServiceSettings::default()), (udp_address, per_packet_mode)];
    let mut balancer = TestBalancer::with_model(&services, LoadBalancerOptions::default(), &mut rng);
    let server_ids = balancer.replace_servers(0, 1, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng));
    let client = (Ipv4Addr::new(192, 0, 2, 1), 1024);
    let syn_frame =
        TcpPacket { flags: SYN, tcp_options: aligned_timestamp_option(1, 0), ..TcpPacket::new(client, VIP) }.to_frame();
    run_program_on_two_cpus(&mut balancer, server_ids[0], syn_frame, PROGRAM_RUNS_PER_CPU);
    let expected_count = 2 * u64::from(PROGRAM_RUNS_PER_CPU);
    let (opened_count, traffic) =
        (balancer.lb.opened_connection_count(balancer.service_indexes[0]), balancer.lb.server_traffic(server_ids[0]));

    let udp_server_ids = balancer.replace_servers(1, 1, &mut rng);
    let table = random_placement_table(PlacementRule::LeastAssigned, 1, 1, &udp_server_ids, &mut rng);
    balancer.install_table(1, &table);
    // The rule places each datagram, even if its flow has had datagrams before.
    run_program_on_two_cpus(
        &mut balancer,
        udp_server_ids[0],
        UdpDatagram::new(client, VIP).to_frame(),
        PROGRAM_RUNS_PER_CPU,
    );
    let assigned_count: u32 =
        balancer.lb.assigned_connection_counts(balancer.service_indexes[1], table.core_slots.len() as u16).iter().sum();
    println!(
        "of {expected_count}: opened {opened_count}, at the server {}, assigned {assigned_count}",
        traffic.opened_connection_count
    );
    assert_eq!([opened_count, traffic.opened_connection_count, assigned_count.into()], [expected_count; 3]);
}
