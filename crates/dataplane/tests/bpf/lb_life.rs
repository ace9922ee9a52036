//! Tests of a load balancer at a device: attach, take-over during operation, upgrade, errors, detach.

use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::lb::{AttachedXdpMode, COUNTER_COUNT, LoadBalancer, Options, Server, ServiceIndex, XdpMode};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::{ServiceMode, Timestamps};
use coreward_model::cookie::{self, Cookie, CookieKey, FleetKeys, KeyIndex};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use libbpf_rs::{MapCore as _, MapHandle, MapType};

use crate::support::balancer::{CLIENT, VIP, id, random_table, service};
use crate::support::network::{PinDirectory, VethPair, mac_address};
use crate::support::{self, Tcp, Udp, aligned_timestamp, missing_bpf_rights, skip_if};

const SERVER_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 9]);

fn options(pins: &PinDirectory) -> Options {
    Options { pin_directory: Some(pins.path()), ..Options::default() }
}

fn server() -> ServerId {
    id(7)
}

fn keys() -> FleetKeys {
    FleetKeys { keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }], current: KeyIndex::First }
}

fn one_server_table(generation: u64, rule: PlacementRule) -> PlacementTable {
    random_table(rule, generation, 1, &[server()], &mut seeded_rng(generation, 0))
}

fn fill(lb: &mut LoadBalancer) -> ServiceIndex {
    let index = lb.set_services(&[(service(VIP), ServiceMode::default())]).unwrap()[0];
    lb.set_keys(&keys());
    lb.set_server(index, server(), Server { mac: Some(SERVER_MAC), is_eligible: true });
    lb.install_table(index, &one_server_table(1, PlacementRule::Table)).unwrap();
    index
}

/// Returns a packet of an established connection, to the MAC address of the load balancer's device.
fn established(destination_mac: [u8; 6]) -> Vec<u8> {
    let tsecr =
        cookie::stamp_tsval(&keys(), &support::TIME_KEY, &FourTuple::ipv4(CLIENT, VIP), Cookie::Server(server()), 5);
    Tcp { destination_mac, options: aligned_timestamp(1, tsecr), ..Tcp::new(CLIENT, VIP) }.frame()
}

fn forwarded(lb: &LoadBalancer, index: ServiceIndex) -> u64 {
    lb.counters(index).packets[intf::LB_COUNTER_ESTABLISHED as usize]
}

/// Returns the number of forwarded packets of all services, those of removed services included.
fn total_packets(lb: &LoadBalancer) -> u64 {
    lb.total_counters().packets[intf::LB_COUNTER_ESTABLISHED as usize]
}

/// Returns a function that reads the number of forwarded packets from the pinned map, as no load balancer may run.
fn pinned_count(pins: &PinDirectory) -> impl Fn() -> u64 + Send + use<> {
    let map = MapHandle::from_pinned_path(pins.path().join("lb/counters")).unwrap();
    let entries = map.max_entries() as usize;
    let counters =
        coreward_dataplane::mmap_array::MmapArray::<[intf::lb_counters]>::new_slice(map.as_fd(), entries).unwrap();
    let counter = intf::LB_COUNTER_ESTABLISHED as usize * size_of::<u64>();
    let offset = offset_of!(intf::lb_counters, packets) + counter;
    move || (0..entries).map(|entry| counters.load(entry * size_of::<intf::lb_counters>() + offset)).sum()
}

#[test]
fn new_process_takes_over_while_packets_pass() {
    skip_if!(missing_bpf_rights());
    let (pair, pins) = (VethPair::new(), PinDirectory::new());
    let mac = pair.server.run_inside(|| mac_address("eth0").0);
    let start = || {
        let mut lb = LoadBalancer::load(options(&pins)).unwrap();
        let attachment = pair.server.run_inside(|| lb.attach("eth0", XdpMode::Native)).unwrap();
        assert_eq!(attachment, AttachedXdpMode::Native);
        lb
    };
    let mut lb = start();
    assert!(!lb.is_taken_over());
    let mut index = fill(&mut lb);

    let passed = pinned_count(&pins);
    let (done, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    // The limit ends the sending thread if an assertion below fails.
    let limit = Instant::now() + Duration::from_secs(60);
    let (lb, index) = std::thread::scope(|scope| {
        scope.spawn(|| {
            pair.client.run_inside(|| {
                let wire = support::packet_socket::PacketSocket::open("eth0");
                let frame = established(mac);
                while !done.load(Ordering::Relaxed) && Instant::now() < limit {
                    wire.send(&frame);
                    let all = sent.fetch_add(1, Ordering::Relaxed) + 1;
                    // Packets are sent one by one, because the device's ring is small.
                    while passed() < all && Instant::now() < limit {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                }
            });
        });
        // Waits until `packets` more packets were sent, however slow the machine is.
        let pass = |packets: u64| {
            let target = sent.load(Ordering::Relaxed) + packets;
            while sent.load(Ordering::Relaxed) < target && Instant::now() < limit {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for round in 0..10u64 {
            pass(100);
            // A drop detaches nothing, as if the process had been killed.
            let counted = total_packets(&lb);
            drop(lb);
            pass(40);
            lb = start();
            assert!(lb.is_taken_over());
            assert!(
                total_packets(&lb) >= counted && counted > 0,
                "round {round}: counts continue before services are configured"
            );
            assert_eq!(lb.services().collect::<Vec<_>>(), [(service(VIP), index)]);
            let kept = Server { mac: Some(SERVER_MAC), is_eligible: true };
            assert_eq!(lb.servers(index), [(server(), kept)]);
            assert_eq!(lb.table_generation(index), Some(round + 1));
            // Another rule than the one taken over replaces the program at the device once more.
            let rule = PlacementRule::ALL[(round + 1) as usize % PlacementRule::ALL.len()];
            index = lb.set_services(&[(service(VIP), ServiceMode::default())]).unwrap()[0];
            lb.install_table(index, &one_server_table(round + 2, rule)).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        (lb, index)
    });
    let deadline = Instant::now() + Duration::from_secs(30);
    while forwarded(&lb, index) < sent.load(Ordering::Relaxed) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(forwarded(&lb, index), sent.load(Ordering::Relaxed), "packets forwarded of those sent");
    assert!(sent.load(Ordering::Relaxed) > 500);

    lb.detach().unwrap();
    assert!(!pins.path().join("lb").exists());
    let shown =
        pair.server.run_inside(|| std::process::Command::new("ip").args(["link", "show", "eth0"]).output().unwrap());
    assert!(!String::from_utf8(shown.stdout).unwrap().contains("xdp"));
}

/// The modes, the flow table's entries and its size outlive the process.
#[test]
fn modes_and_flows_are_taken_over() {
    skip_if!(missing_bpf_rights());
    let (pair, pins) = (VethPair::new(), PinDirectory::new());
    let start = |flow_table_entries| {
        let mut lb = LoadBalancer::load(Options { flow_table_entries, ..options(&pins) }).unwrap();
        pair.server.run_inside(|| lb.attach("eth0", XdpMode::Auto)).unwrap();
        lb.set_own_mac(MacAddress([0; 6]));
        lb
    };
    let udp = ServiceAddress { protocol: Protocol::Udp, ..service(VIP) };
    let off = ServiceMode { timestamps: Timestamps::Off, ..ServiceMode::default() };
    let services = [(service(VIP), off), (udp, ServiceMode::default_for(Protocol::Udp))];
    let frames = [Tcp::new(CLIENT, VIP).frame(), Udp::new(CLIENT, VIP).frame()];
    let outcomes = |lb: &LoadBalancer, indexes: &[ServiceIndex]| {
        let counts = || indexes.iter().map(|index| lb.counters(*index).packets).collect::<Vec<_>>();
        let before = counts();
        for frame in &frames {
            assert_eq!(test_run::run(lb.program(), frame, 1).unwrap().verdict, 3);
        }
        let grown = |(before, after): (&[u64; COUNTER_COUNT], &[u64; COUNTER_COUNT])| {
            let position = (0..COUNTER_COUNT).find(|counter| after[*counter] > before[*counter]).unwrap();
            intf::LB_COUNTER_NAMES[position]
        };
        before.iter().zip(&counts()).map(grown).collect::<Vec<_>>()
    };

    let mut lb = start(1 << 14);
    let indexes = lb.set_services(&services).unwrap();
    for index in &indexes {
        lb.set_server(*index, server(), Server { mac: Some(SERVER_MAC), is_eligible: true });
        lb.install_table(*index, &one_server_table(1, PlacementRule::Table)).unwrap();
    }
    assert_eq!(outcomes(&lb, &indexes), ["bucket_hash", "new_connection"]);
    drop(lb);
    // Packets pass before the new process has configured its services.
    let mut lb = start(1 << 15);
    assert!(lb.is_taken_over());
    assert_eq!(outcomes(&lb, &indexes), ["flow_table", "flow_table"]);
    assert_eq!(lb.set_services(&services).unwrap(), indexes);
    assert_eq!(outcomes(&lb, &indexes), ["flow_table", "flow_table"]);
    let table = MapHandle::from_pinned_path(pins.path().join("lb/flow_table")).unwrap();
    assert_eq!(table.max_entries() * intf::FLOW_SET_ENTRIES, 1 << 14);
    lb.detach().unwrap();
}

#[test]
fn failed_attachment_returns_a_reason() {
    skip_if!(missing_bpf_rights());
    let (pair, pins) = (VethPair::new(), PinDirectory::new());
    let within = |lb: &mut LoadBalancer, interface: &str, mode| pair.server.run_inside(|| lb.attach(interface, mode));
    let refused = |lb: &mut LoadBalancer, interface, mode| format!("{:#}", within(lb, interface, mode).unwrap_err());

    let mut lb = LoadBalancer::load(options(&pins)).unwrap();
    assert_eq!(refused(&mut lb, "eth7", XdpMode::Auto), "interface \"eth7\" does not exist");
    // Loopback has no native XDP.
    assert!(refused(&mut lb, "lo", XdpMode::Native).starts_with("Native XDP at interface \"lo\": "));
    assert_eq!(within(&mut lb, "lo", XdpMode::Auto).unwrap(), AttachedXdpMode::Generic);
    drop(lb);
    let mut lb = LoadBalancer::load(options(&pins)).unwrap();
    assert!(lb.is_taken_over());
    let elsewhere = refused(&mut lb, "eth0", XdpMode::Auto);
    assert!(elsewhere.contains("is at the interface of index 1, not at \"eth0\""), "{elsewhere}");
    assert_eq!(within(&mut lb, "lo", XdpMode::Auto).unwrap(), AttachedXdpMode::Generic);

    let other = PinDirectory::new();
    let mut second = LoadBalancer::load(options(&other)).unwrap();
    let busy = refused(&mut second, "lo", XdpMode::Auto);
    let whose =
        format!("interface \"lo\" has the program of a load balancer that is pinned in {}:", pins.path().display());
    assert!(busy.starts_with(&whose), "{busy}");
    drop(second);
    lb.detach().unwrap();

    let no_bpffs = std::env::temp_dir().join(format!("coreward-no-bpffs-{}", std::process::id()));
    let nowhere = Options { pin_directory: Some(no_bpffs.clone()), ..Options::default() };
    let error = LoadBalancer::load(nowhere).unwrap_err().to_string();
    assert!(error.ends_with("expected a directory on a BPF file system (`mount -t bpf bpf /sys/fs/bpf`)"), "{error}");
    std::fs::remove_dir_all(no_bpffs).unwrap();
}

#[test]
fn program_of_another_version_forwards_until_this_one_is_ready() {
    skip_if!(missing_bpf_rights());
    let (pair, pins) = (VethPair::new(), PinDirectory::new());
    let attach = |lb: &mut LoadBalancer| pair.server.run_inside(|| lb.attach("eth0", XdpMode::Native)).unwrap();
    let mut lb = LoadBalancer::load(options(&pins)).unwrap();
    attach(&mut lb);
    drop(lb);
    let state = pins.path().join("lb").join("state");
    let program = || coreward_dataplane::lb::pinned_program_id(&pins.path()).unwrap().unwrap();
    let problem = || coreward_dataplane::lb::pinned_problem(&pins.path());

    write_layout_version(&state, 99);
    let (at_work, found) = (program(), problem().unwrap());
    assert!(found.contains(&format!("layout version 99, expected {}", intf::LB_LAYOUT_VERSION)), "{found}");
    // A process that ends before `commit_upgrade` changes nothing.
    let mut lb = LoadBalancer::load(options(&pins)).unwrap();
    attach(&mut lb);
    assert!(lb.is_upgrade_pending() && !lb.is_taken_over());
    drop(lb);
    assert_eq!((program(), problem()), (at_work, Some(found)));
    // The next process completes the upgrade.
    let mut lb = LoadBalancer::load(options(&pins)).unwrap();
    let attachment = attach(&mut lb);
    lb.commit_upgrade().unwrap();
    assert!(!lb.is_upgrade_pending());
    assert_ne!(program(), at_work);
    assert_eq!(problem(), None);
    drop(lb);
    let mut lb = LoadBalancer::load(options(&pins)).unwrap();
    assert!(lb.is_taken_over());
    assert_eq!(attach(&mut lb), attachment);
    drop(lb);

    // A known map name with another size, or an unknown map name, also counts as another version.
    let servers = pins.path().join("lb").join("servers");
    std::fs::remove_file(&servers).unwrap();
    let create = libbpf_rs::libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_rs::libbpf_sys::bpf_map_create_opts>() as _,
        ..Default::default()
    };
    let mut other = MapHandle::create(MapType::Array, Some("other"), 4, 64, 1, &create).unwrap();
    other.pin(&servers).unwrap();
    other.pin(pins.path().join("lb").join("unknown")).unwrap();
    let size = problem().unwrap();
    assert!(size.contains("(type, key size, value size, entries) is (Array, 4, 64, 1)"), "{size}");
    let mut lb = LoadBalancer::load(options(&pins)).unwrap();
    attach(&mut lb);
    lb.commit_upgrade().unwrap();
    assert_eq!(problem(), None);
    lb.detach().unwrap();

    // Pinned maps without an attached program are left over from an interrupted start, and are created again.
    let lb = LoadBalancer::load(options(&pins)).unwrap();
    drop(lb);
    assert!(state.exists());
    let lb = LoadBalancer::load(options(&pins)).unwrap();
    assert!(!lb.is_taken_over() && !lb.is_upgrade_pending());
    lb.detach().unwrap();
}

fn write_layout_version(state: &Path, version: u64) {
    let map = libbpf_rs::MapHandle::from_pinned_path(state).unwrap();
    let mapped = coreward_dataplane::mmap_array::MmapArray::<intf::lb_state>::new(map.as_fd()).unwrap();
    mapped.store(offset_of!(intf::lb_state, layout_version), version);
}
