//! Tests of counters when services are added and removed, and when two CPUs count at the same time.

use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;

use coreward_dataplane::lb::{Counters, Options};
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::{Consistency, ServiceMode};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::Protocol;
use coreward_model::{ServerId, ServiceAddress};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::support::balancer::{Balancer, VIP, XDP_TX, random_table, service};
use crate::support::{SYN, Tcp, Udp, aligned_timestamp, missing_bpf_rights, skip_if};

const OTHER_VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 2), 443);

#[test]
fn counters_of_a_reused_service_slot_start_at_zero() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(140, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let servers = balancer.replace_servers(0, 4, &mut rng);
    balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &servers, &mut rng));
    for port in 1024..1034 {
        let syn =
            Tcp { flags: SYN, options: aligned_timestamp(1, 0), ..Tcp::new((Ipv4Addr::new(192, 0, 2, 1), port), VIP) };
        assert_eq!(balancer.run(&syn.frame()).0, XDP_TX);
    }
    let (index, total) = (balancer.services[0], balancer.lb.total_counters());
    assert_eq!(balancer.lb.counters(index).packets[intf::LB_COUNTER_NEW_CONNECTION as usize], 10);
    assert_eq!(balancer.lb.opened_connections(index), 10);

    let mut replace = |vip| balancer.lb.set_services(&[(service(vip), ServiceMode::default())]).unwrap()[0];
    assert_eq!(replace(OTHER_VIP), index, "the place is used again");
    assert_eq!(balancer.lb.counters(index), Counters::default());
    assert_eq!(balancer.lb.opened_connections(index), 0);
    assert_eq!(balancer.lb.total_counters(), total, "what removed services counted stays in the total");
}

/// Runs the program `times` times on one CPU, on one frame from receive queue 0.
fn run_on_cpu(cpu: usize, program: BorrowedFd<'_>, frame: &[u8], times: u32) {
    let mut cpu_set = CpuSet::new();
    cpu_set.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(0), &cpu_set).unwrap();
    assert_eq!(test_run::run(program, frame, times).unwrap().verdict, XDP_TX);
}

/// Runs the program on two CPUs at once, as on a bond whose two devices both have a queue 0. The kernel does not
/// restore the frame between runs, so the load balancer gets the MAC address of its only server.
fn run_on_two_cpus(balancer: &mut Balancer, server: ServerId, mut frame: Vec<u8>, times: u32) {
    let mac = *balancer.macs.iter().find(|((_, of), _)| *of == server).unwrap().1;
    balancer.lb.set_own_mac(mac);
    frame[..6].copy_from_slice(&mac.0);
    let (program, frame) = (balancer.lb.program(), &frame);
    std::thread::scope(|scope| {
        for cpu in 0..2 {
            scope.spawn(move || run_on_cpu(cpu, program, frame, times));
        }
    });
}

#[test]
fn no_count_of_connections_is_lost_between_two_cpus() {
    const TIMES: u32 = 1_000_000;
    skip_if!(missing_bpf_rights());
    skip_if!((std::thread::available_parallelism().unwrap().get() < 2).then_some("needs 2 CPUs"));
    let mut rng = seeded_rng(141, 0);
    let datagrams = ServiceAddress { protocol: Protocol::Udp, ..service(VIP) };
    let per_packet = ServiceMode { consistency: Consistency::None, ..ServiceMode::default() };
    let services = [(service(VIP), ServiceMode::default()), (datagrams, per_packet)];
    let mut balancer = Balancer::with(&services, Options::default(), &mut rng);
    let servers = balancer.replace_servers(0, 1, &mut rng);
    balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &servers, &mut rng));
    let client = (Ipv4Addr::new(192, 0, 2, 1), 1024);
    let syn = Tcp { flags: SYN, options: aligned_timestamp(1, 0), ..Tcp::new(client, VIP) }.frame();
    run_on_two_cpus(&mut balancer, servers[0], syn, TIMES);
    let expected = 2 * u64::from(TIMES);
    let (opened, traffic) = (balancer.lb.opened_connections(balancer.services[0]), balancer.lb.traffic(servers[0]));

    let others = balancer.replace_servers(1, 1, &mut rng);
    let table = random_table(PlacementRule::LeastAssigned, 1, 1, &others, &mut rng);
    balancer.install(1, &table);
    // Each datagram is placed by the rule, also further datagrams of the same flow.
    run_on_two_cpus(&mut balancer, others[0], Udp::new(client, VIP).frame(), TIMES);
    let assigned: u32 =
        balancer.lb.assigned_connections(balancer.services[1], table.core_slots.len() as u16).iter().sum();
    println!("of {expected}: opened {opened}, at the server {}, assigned {assigned}", traffic.opened);
    assert_eq!([opened, traffic.opened, assigned.into()], [expected; 3]);
}
