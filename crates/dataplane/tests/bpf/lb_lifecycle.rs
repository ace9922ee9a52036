//! Tests of a load balancer's life at a device, from attaching over take-overs, upgrades and errors to detaching.

use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::lb::{
    AttachedXdpMode, LB_COUNTER_COUNT, LoadBalancer, LoadBalancerOptions, Server, ServiceIndex, XdpMode,
};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::{CookieStamper, ServiceSettings};
use coreward_model::cookie::{self, Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use libbpf_rs::{MapCore as _, MapHandle, MapType};

use crate::support::balancer::{CLIENT_ENDPOINT, VIP, random_placement_table, server_id_from_number, service_address};
use crate::support::network::{PinDirectory, VethPair, interface_mac};
use crate::support::{self, TcpPacket, UdpDatagram, aligned_timestamp_option, missing_bpf_rights, skip_if};

const SERVER_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 9]);

fn lb_options_with_pins(pins: &PinDirectory) -> LoadBalancerOptions {
    LoadBalancerOptions { pin_directory: Some(pins.path()), ..LoadBalancerOptions::default() }
}

fn only_server_id() -> ServerId {
    server_id_from_number(7)
}

fn fleet_keys() -> FleetCookieKeys {
    FleetCookieKeys {
        keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }],
        current_key_index: CookieKeyIndex::First,
    }
}

fn one_server_placement_table(generation: u64, rule: PlacementRule) -> PlacementTable {
    random_placement_table(rule, generation, 1, &[only_server_id()], &mut seeded_rng(generation, 0))
}

fn set_up_service(lb: &mut LoadBalancer) -> ServiceIndex {
    let service_index = lb.set_services(&[(service_address(VIP), ServiceSettings::default())]).unwrap()[0];
    lb.set_cookie_keys(&fleet_keys());
    lb.set_server(service_index, only_server_id(), Server { mac: Some(SERVER_MAC), is_eligible: true });
    lb.install_table(service_index, &one_server_placement_table(1, PlacementRule::Table)).unwrap();
    service_index
}

fn frame_with_server_cookie(destination_mac: [u8; 6]) -> Vec<u8> {
    let tsecr = cookie::stamp_tsval(
        &fleet_keys(),
        &support::FOREIGN_TIME_KEY,
        &FourTuple::ipv4(CLIENT_ENDPOINT, VIP),
        Cookie::Server(only_server_id()),
        5,
    );
    TcpPacket {
        destination_mac,
        tcp_options: aligned_timestamp_option(1, tsecr),
        ..TcpPacket::new(CLIENT_ENDPOINT, VIP)
    }
    .to_frame()
}

fn forwarded_packet_count(lb: &LoadBalancer, index: ServiceIndex) -> u64 {
    lb.service_counters(index).packets_by_outcome[intf::LB_COUNTER_ESTABLISHED as usize]
}

fn total_packet_count(lb: &LoadBalancer) -> u64 {
    lb.total_counters().packets_by_outcome[intf::LB_COUNTER_ESTABLISHED as usize]
}

/// Returns a function that reads the number of forwarded packets from the pinned map, which works even if no load
/// balancer process is running.
fn open_pinned_packet_counter(pins: &PinDirectory) -> impl Fn() -> u64 + Send + use<> {
    let counters_map = MapHandle::from_pinned_path(pins.path().join("lb/counters")).unwrap();
    let entry_count = counters_map.max_entries() as usize;
    let mapped_counters =
        coreward_dataplane::mmap_array::MmapArray::<[intf::lb_counters]>::mmap_slice(counters_map.as_fd(), entry_count)
            .unwrap();
    let counter_offset = intf::LB_COUNTER_ESTABLISHED as usize * size_of::<u64>();
    let packets_offset = offset_of!(intf::lb_counters, packets) + counter_offset;
    move || {
        (0..entry_count)
            .map(|entry| mapped_counters.load(entry * size_of::<intf::lb_counters>() + packets_offset))
            .sum()
    }
}

#[test]
fn new_process_takes_over_while_packets_pass() {
    skip_if!(missing_bpf_rights());
    let (veth_pair, pins) = (VethPair::new(), PinDirectory::new());
    let device_mac = veth_pair.server.run_in_namespace(|| interface_mac("eth0").0);
    let start_lb_process = || {
        let mut lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
        let attachment = veth_pair.server.run_in_namespace(|| lb.attach("eth0", XdpMode::Native)).unwrap();
        assert_eq!(attachment, AttachedXdpMode::Native);
        lb
    };
    let mut lb = start_lb_process();
    assert!(!lb.is_state_taken_over());
    let mut service_index = set_up_service(&mut lb);

    let forwarded_count = open_pinned_packet_counter(&pins);
    let (is_done, sent_frames) = (AtomicBool::new(false), AtomicU64::new(0));
    // The deadline ends the sending thread if an assertion below fails.
    let send_deadline = Instant::now() + Duration::from_secs(60);
    let (lb, index) = std::thread::scope(|scope| {
        scope.spawn(|| {
            veth_pair.client.run_in_namespace(|| {
                let packet_socket = support::packet_socket::PacketSocket::open("eth0");
                let frame = frame_with_server_cookie(device_mac);
                while !is_done.load(Ordering::Relaxed) && Instant::now() < send_deadline {
                    packet_socket.send_frame(&frame);
                    let sent_count = sent_frames.fetch_add(1, Ordering::Relaxed) + 1;
                    // Packets are sent one by one, because the device's ring is small.
                    while forwarded_count() < sent_count && Instant::now() < send_deadline {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                }
            });
        });
        // Waits until `packets` more packets were sent, however slow the machine is.
        let wait_for_sent_packets = |packets: u64| {
            let target_count = sent_frames.load(Ordering::Relaxed) + packets;
            while sent_frames.load(Ordering::Relaxed) < target_count && Instant::now() < send_deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for round in 0..10u64 {
            wait_for_sent_packets(100);
            // Dropping the value detaches nothing, as if the process had been killed.
            let packet_count_before = total_packet_count(&lb);
            drop(lb);
            wait_for_sent_packets(40);
            lb = start_lb_process();
            assert!(lb.is_state_taken_over());
            assert!(
                total_packet_count(&lb) >= packet_count_before && packet_count_before > 0,
                "round {round}: counts continue before services are configured"
            );
            assert_eq!(lb.services().collect::<Vec<_>>(), [(service_address(VIP), service_index)]);
            let expected_server = Server { mac: Some(SERVER_MAC), is_eligible: true };
            assert_eq!(lb.servers(service_index), [(only_server_id(), expected_server)]);
            assert_eq!(lb.placement_table_generation(service_index), Some(round + 1));
            // A rule that differs from the one taken over replaces the program at the device once more.
            let next_rule = PlacementRule::ALL[(round + 1) as usize % PlacementRule::ALL.len()];
            service_index = lb.set_services(&[(service_address(VIP), ServiceSettings::default())]).unwrap()[0];
            lb.install_table(service_index, &one_server_placement_table(round + 2, next_rule)).unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
        (lb, service_index)
    });
    let deadline = Instant::now() + Duration::from_secs(30);
    while forwarded_packet_count(&lb, index) < sent_frames.load(Ordering::Relaxed) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(
        forwarded_packet_count(&lb, index),
        sent_frames.load(Ordering::Relaxed),
        "packets forwarded of those sent"
    );
    assert!(sent_frames.load(Ordering::Relaxed) > 500);

    lb.detach().unwrap();
    assert!(!pins.path().join("lb").exists());
    let ip_link_output = veth_pair
        .server
        .run_in_namespace(|| std::process::Command::new("ip").args(["link", "show", "eth0"]).output().unwrap());
    assert!(!String::from_utf8(ip_link_output.stdout).unwrap().contains("xdp"));
}

/// Runs the program on `frames`. Returns, for each service, the name of the counter that has increased.
fn run_frames_and_name_outcomes(lb: &LoadBalancer, indexes: &[ServiceIndex], frames: &[Vec<u8>]) -> Vec<&'static str> {
    let read_outcome_counts =
        || indexes.iter().map(|index| lb.service_counters(*index).packets_by_outcome).collect::<Vec<_>>();
    let counts_before = read_outcome_counts();
    for frame in frames {
        assert_eq!(test_run::run_program(lb.program_fd(), frame, 1).unwrap().verdict, 3);
    }
    let find_increased_counter = |(before, after): (&[u64; LB_COUNTER_COUNT], &[u64; LB_COUNTER_COUNT])| {
        let counter_index = (0..LB_COUNTER_COUNT).find(|counter| after[*counter] > before[*counter]).unwrap();
        intf::LB_COUNTER_NAMES[counter_index]
    };
    counts_before.iter().zip(&read_outcome_counts()).map(find_increased_counter).collect::<Vec<_>>()
}

/// A new load balancer process takes over the services' modes, and the flow table with its entries and its size.
#[test]
fn new_process_takes_over_service_settings_and_flows() {
    skip_if!(missing_bpf_rights());
    let (veth_pair, pins) = (VethPair::new(), PinDirectory::new());
    let start_lb_process = |flow_table_entries| {
        let mut lb = LoadBalancer::load(LoadBalancerOptions {
            flow_table_entry_count: flow_table_entries,
            ..lb_options_with_pins(&pins)
        })
        .unwrap();
        veth_pair.server.run_in_namespace(|| lb.attach("eth0", XdpMode::Auto)).unwrap();
        lb.set_own_mac(MacAddress([0; 6]));
        lb
    };
    let udp_address = ServiceAddress { protocol: TransportProtocol::Udp, ..service_address(VIP) };
    let timestamps_off_mode = ServiceSettings { timestamps: CookieStamper::Off, ..ServiceSettings::default() };
    let services = [
        (service_address(VIP), timestamps_off_mode),
        (udp_address, ServiceSettings::default_for_protocol(TransportProtocol::Udp)),
    ];
    let frames = [TcpPacket::new(CLIENT_ENDPOINT, VIP).to_frame(), UdpDatagram::new(CLIENT_ENDPOINT, VIP).to_frame()];

    let mut lb = start_lb_process(1 << 14);
    let service_indexes = lb.set_services(&services).unwrap();
    for index in &service_indexes {
        lb.set_server(*index, only_server_id(), Server { mac: Some(SERVER_MAC), is_eligible: true });
        lb.install_table(*index, &one_server_placement_table(1, PlacementRule::Table)).unwrap();
    }
    assert_eq!(run_frames_and_name_outcomes(&lb, &service_indexes, &frames), ["bucket_hash", "new_connection"]);
    drop(lb);
    // Packets are processed before the new process has configured its services.
    let mut lb = start_lb_process(1 << 15);
    assert!(lb.is_state_taken_over());
    assert_eq!(run_frames_and_name_outcomes(&lb, &service_indexes, &frames), ["flow_table", "flow_table"]);
    assert_eq!(lb.set_services(&services).unwrap(), service_indexes);
    assert_eq!(run_frames_and_name_outcomes(&lb, &service_indexes, &frames), ["flow_table", "flow_table"]);
    let flow_table_map = MapHandle::from_pinned_path(pins.path().join("lb/flow_table")).unwrap();
    assert_eq!(flow_table_map.max_entries() * intf::FLOW_SET_ENTRIES, 1 << 14);
    lb.detach().unwrap();
}

#[test]
fn failed_attachment_returns_the_reason() {
    skip_if!(missing_bpf_rights());
    let (veth_pair, pins) = (VethPair::new(), PinDirectory::new());
    let attach_in_namespace =
        |lb: &mut LoadBalancer, interface: &str, mode| veth_pair.server.run_in_namespace(|| lb.attach(interface, mode));
    let attach_error =
        |lb: &mut LoadBalancer, interface, mode| format!("{:#}", attach_in_namespace(lb, interface, mode).unwrap_err());

    let mut lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
    assert_eq!(attach_error(&mut lb, "eth7", XdpMode::Auto), "interface \"eth7\" does not exist");
    // Loopback has no native XDP.
    assert!(attach_error(&mut lb, "lo", XdpMode::Native).starts_with("Native XDP at interface \"lo\": "));
    assert_eq!(attach_in_namespace(&mut lb, "lo", XdpMode::Auto).unwrap(), AttachedXdpMode::Generic);
    drop(lb);
    let mut lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
    assert!(lb.is_state_taken_over());
    let other_interface_error = attach_error(&mut lb, "eth0", XdpMode::Auto);
    assert!(
        other_interface_error.contains("is at the interface of index 1, not at \"eth0\""),
        "{other_interface_error}"
    );
    assert_eq!(attach_in_namespace(&mut lb, "lo", XdpMode::Auto).unwrap(), AttachedXdpMode::Generic);

    let other_pins = PinDirectory::new();
    let mut second_lb = LoadBalancer::load(lb_options_with_pins(&other_pins)).unwrap();
    let occupied_interface_error = attach_error(&mut second_lb, "lo", XdpMode::Auto);
    let expected_error_start =
        format!("interface \"lo\" has the program of a load balancer that is pinned in {}:", pins.path().display());
    assert!(occupied_interface_error.starts_with(&expected_error_start), "{occupied_interface_error}");
    drop(second_lb);
    lb.detach().unwrap();

    let directory_without_bpffs = std::env::temp_dir().join(format!("coreward-no-bpffs-{}", std::process::id()));
    let options_without_bpffs =
        LoadBalancerOptions { pin_directory: Some(directory_without_bpffs.clone()), ..LoadBalancerOptions::default() };
    let error = LoadBalancer::load(options_without_bpffs).unwrap_err().to_string();
    assert!(error.ends_with("expected a directory on a BPF file system (`mount -t bpf bpf /sys/fs/bpf`)"), "{error}");
    std::fs::remove_dir_all(directory_without_bpffs).unwrap();
}

#[test]
fn program_of_another_version_forwards_until_the_upgrade() {
    skip_if!(missing_bpf_rights());
    let (veth_pair, pins) = (VethPair::new(), PinDirectory::new());
    let attach_to_eth0 =
        |lb: &mut LoadBalancer| veth_pair.server.run_in_namespace(|| lb.attach("eth0", XdpMode::Native)).unwrap();
    let mut lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
    attach_to_eth0(&mut lb);
    drop(lb);
    let state_path = pins.path().join("lb").join("state");
    let pinned_program_id = || coreward_dataplane::lb::pinned_program_id(&pins.path()).unwrap().unwrap();
    let take_over_problem = || coreward_dataplane::lb::find_takeover_problem(&pins.path());

    write_layout_version(&state_path, 99);
    let (loaded_program_id, version_problem) = (pinned_program_id(), take_over_problem().unwrap());
    assert!(
        version_problem.contains(&format!("layout version 99, expected {}", intf::LB_LAYOUT_VERSION)),
        "{version_problem}"
    );
    // A process that ends before `commit_upgrade` changes nothing.
    let mut lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
    attach_to_eth0(&mut lb);
    assert!(lb.is_upgrade_pending() && !lb.is_state_taken_over());
    drop(lb);
    assert_eq!((pinned_program_id(), take_over_problem()), (loaded_program_id, Some(version_problem)));
    // The next process completes the upgrade.
    let mut lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
    let attachment = attach_to_eth0(&mut lb);
    lb.commit_upgrade().unwrap();
    assert!(!lb.is_upgrade_pending());
    assert_ne!(pinned_program_id(), loaded_program_id);
    assert_eq!(take_over_problem(), None);
    drop(lb);
    let mut lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
    assert!(lb.is_state_taken_over());
    assert_eq!(attach_to_eth0(&mut lb), attachment);
    drop(lb);

    // A known map name with another size, or an unknown map name, also counts as another version.
    let servers_path = pins.path().join("lb").join("servers");
    std::fs::remove_file(&servers_path).unwrap();
    let create_options = libbpf_rs::libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_rs::libbpf_sys::bpf_map_create_opts>() as _,
        ..Default::default()
    };
    let mut map_of_other_size = MapHandle::create(MapType::Array, Some("other"), 4, 64, 1, &create_options).unwrap();
    map_of_other_size.pin(&servers_path).unwrap();
    map_of_other_size.pin(pins.path().join("lb").join("unknown")).unwrap();
    let size_problem = take_over_problem().unwrap();
    assert!(size_problem.contains("(type, key size, value size, entries) is (Array, 4, 64, 1)"), "{size_problem}");
    let mut lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
    attach_to_eth0(&mut lb);
    lb.commit_upgrade().unwrap();
    assert_eq!(take_over_problem(), None);
    lb.detach().unwrap();

    // Pinned maps without an attached program remain from an interrupted start, and are created again.
    let lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
    drop(lb);
    assert!(state_path.exists());
    let lb = LoadBalancer::load(lb_options_with_pins(&pins)).unwrap();
    assert!(!lb.is_state_taken_over() && !lb.is_upgrade_pending());
    lb.detach().unwrap();
}

fn write_layout_version(state_path: &Path, version: u64) {
    let state_map = libbpf_rs::MapHandle::from_pinned_path(state_path).unwrap();
    let mapped_state = coreward_dataplane::mmap_array::MmapArray::<intf::lb_state>::new(state_map.as_fd()).unwrap();
    mapped_state.store(offset_of!(intf::lb_state, layout_version), version);
}
