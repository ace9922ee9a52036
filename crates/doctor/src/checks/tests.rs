//! Checks against constructed facts, for what a network namespace cannot have.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coreward_agent::config::Steer;
use coreward_agent::load::queues::Interrupt;
use coreward_agent::rss::ethtool::FlowType;
use coreward_agent::rss_conflicts::RssConflicts;
use coreward_dataplane::device::XdpState;
use coreward_dataplane::ethtool::Channels;
use coreward_dataplane::lb::XdpMode;
use coreward_model::ServiceAddress;
use coreward_model::forwarding::Forwarding;
use coreward_model::rss::InputTransform;
use coreward_model::tuple::Protocol;
use coreward_tls::authority::DAY;

use super::*;
use crate::facts::*;
use crate::finding::Severity;
use crate::nat_rules::{Chain, MatchCondition, NatRule};

fn service(protocol: Protocol) -> Service {
    let worker_cpus = (0..4).map(|cpu| BTreeSet::from([cpu])).collect();
    Service {
        name: "web".to_owned(),
        address: ServiceAddress { socket: "10.200.0.1:80".parse().unwrap(), protocol },
        is_stamped_by_lb: false,
        is_stamped: true,
        forwarding: Forwarding::default(),
        sockets: Some(Ok(Sockets { count: 4, has_reuseport: Some(true), worker_cpus })),
    }
}

fn servers(address: &str, is_on_segment: bool) -> BTreeMap<String, Server> {
    BTreeMap::from([("s1".to_owned(), Server { address: address.parse().unwrap(), is_on_segment })])
}

/// Returns facts of a server or load balancer for which no check has findings.
fn passing_facts(role: Role) -> Facts {
    let sysctls = [
        ("net/core/bpf_jit_enable", "1"),
        ("net/ipv4/tcp_timestamps", "2"),
        ("net/ipv4/conf/all/arp_ignore", "0"),
        ("net/ipv4/conf/eth7/arp_ignore", "1"),
        ("net/ipv4/conf/all/arp_announce", "2"),
        ("net/ipv4/conf/eth7/arp_announce", "0"),
        ("net/ipv4/conf/all/rp_filter", "0"),
        ("net/ipv4/conf/eth7/rp_filter", "2"),
        ("net/ipv4/conf/all/forwarding", "1"),
        ("net/ipv4/conf/eth7/forwarding", "1"),
        ("net/ipv4/conf/all/send_redirects", "0"),
        ("net/ipv4/conf/eth7/send_redirects", "0"),
    ];
    let address = |device: &str, address: &str, mask: &str| Address {
        device: device.to_owned(),
        address: address.parse().unwrap(),
        mask: mask.parse().unwrap(),
    };
    let mut addresses = vec![address("lo", "127.0.0.1", "255.0.0.0"), address("eth7", "10.1.1.1", "255.255.0.0")];
    if role == Role::Server {
        addresses.push(address("lo", "10.200.0.1", "255.255.255.255"));
    }
    Facts {
        role,
        settings: Settings {
            interface: Some("eth7".to_owned()),
            pin_directory: Some("/sys/fs/bpf/coreward".into()),
            controllers: vec!["10.1.0.2:7400".parse().unwrap()],
            manage_timestamps: true,
            load_by_cpu_time: true,
            steer: Steer::Affinity,
            xdp_mode: XdpMode::Auto,
            announce_table: None,
        },
        kernel: Kernel {
            release: "6.1.0-28-amd64".to_owned(),
            has_btf: true,
            programs: BTreeMap::from([("lb", Ok(()))]),
        },
        missing_rights: vec![],
        open_files_limit: 524_288,
        sysctls: sysctls.into_iter().map(|(path, value)| (path.to_owned(), value.to_owned())).collect(),
        bpf_file_system: BpfFileSystem { directory: "/sys/fs/bpf".into(), is_bpf: true },
        pins_problem: None,
        device: Some(Device {
            is_up: true,
            is_ethernet: true,
            mtu: 1500,
            driver: "igb".to_owned(),
            channels: Some(Channels { receive: 4, receive_max: 8, transmit: 4 }),
            is_lro_enabled: false,
            port_hashing: FlowType::ALL.into_iter().map(|flow_type| (flow_type, true)).collect(),
            xdp: XdpState { native_program_id: Some(7), generic_program_id: None, supports_native: Some(true) },
            veth_peer_has_xdp: None,
            xdp_send_errors: vec![],
            own_program_id: Some(7),
            rss_conflicts: RssConflicts::default(),
            interrupts: (0..4).map(|queue| (queue, Interrupt { number: 30, cpu: Some(queue.into()) })).collect(),
            rss: Ok((128, InputTransform::None)),
            moves_connections: None,
            strips_vlan_tags: true,
            vlans: vec![],
            is_sysfs_visible: true,
        }),
        addresses,
        default_routes: BTreeSet::from(["eth7".to_owned()]),
        cpu_count: 4,
        clock: Clock { source: "tsc".to_owned(), synchronised: Some(true) },
        netfilter: Netfilter { chains: Ok(vec![]), legacy_tables: vec![] },
        reachable_controller: Some(Ok("10.1.0.2:7400".parse().unwrap())),
        services: vec![service(Protocol::Tcp)],
        servers: servers("10.1.1.2", true),
        future_report_count: 0,
        announcement: None,
        controller_facts: Some(ControllerFacts {
            listen: "10.1.0.2:7400".parse().unwrap(),
            listen_problem: None,
            is_running: false,
            store: StoreFacts::File { path: "/var/lib/coreward/store".into(), problem: None, mode: Some(0o600) },
        }),
        polling_threads: vec![],
        certificates: vec![certificate(60)],
    }
}

/// Returns a certificate with a validity of 90 days.
fn certificate(days_left: u64) -> CertificateFacts {
    CertificateFacts {
        usage: "own",
        subject: "agent s1".to_owned(),
        wrong_owner: None,
        remaining_validity: DAY * days_left as u32,
        is_renewal_due: days_left < 30,
    }
}

#[test]
fn certificate_expiry_and_key_owner_are_checked() {
    for role in [Role::Lb, Role::Server, Role::Controller] {
        let found = |change: fn(&mut CertificateFacts)| problems(role, |facts| change(&mut facts.certificates[0]));
        assert_eq!(found(|certificate| certificate.is_renewal_due = true), [("certificates", WARNING)]);
        assert_eq!(found(|certificate| certificate.remaining_validity = Duration::ZERO), [("certificates", FAULT)]);
        assert_eq!(
            found(|own| own.wrong_owner = Some("agent s2: expected agent s1".into())),
            [("certificates", FAULT)]
        );
    }
}

/// Returns the warnings and faults that the checks find after `change`.
fn problems(role: Role, change: impl FnOnce(&mut Facts)) -> Vec<(&'static str, Severity)> {
    let mut facts = passing_facts(role);
    change(&mut facts);
    let findings = run(&facts).into_iter().filter(|(_, finding)| finding.severity >= Severity::Warning);
    findings
        .map(|(check, finding)| {
            assert!(!finding.consequence.is_empty() && !finding.remedies.is_empty(), "{}: {finding:?}", check.name);
            let is_fixed = finding.remedies.iter().any(|remedy| remedy.fix.is_some());
            assert!(check.is_fixable || !is_fixed, "{}", check.name);
            (check.name, finding.severity)
        })
        .collect()
}

fn device(facts: &mut Facts) -> &mut Device {
    facts.device.as_mut().unwrap()
}

const WARNING: Severity = Severity::Warning;
const FAULT: Severity = Severity::Fault;

#[test]
fn fit_machine_has_no_findings() {
    for role in [Role::Lb, Role::Server, Role::Controller] {
        assert_eq!(problems(role, |_| {}), []);
        let unknown: Vec<_> =
            run(&passing_facts(role)).into_iter().filter(|(_, finding)| finding.severity != Severity::Ok).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}

#[test]
fn kernel_version_programs_and_jit_are_checked() {
    let kernel = |change: fn(&mut Facts)| problems(Role::Lb, change);
    assert_eq!(kernel(|facts| facts.kernel.release = "5.15.0-1-amd64".to_owned()), [("kernel", FAULT)]);
    assert_eq!(kernel(|facts| facts.kernel.release = "6.0".to_owned()), [("kernel", FAULT)]);
    assert_eq!(kernel(|facts| facts.kernel.release = "10.0.1".to_owned()), []);
    assert_eq!(kernel(|facts| facts.kernel.has_btf = false), [("kernel", FAULT)]);
    let refused = |facts: &mut Facts| drop(facts.kernel.programs.insert("lb", Err("no".to_owned())));
    assert_eq!(kernel(refused), [("programs", FAULT)]);
    let interpreted =
        |facts: &mut Facts| drop(facts.sysctls.insert("net/core/bpf_jit_enable".to_owned(), "0".to_owned()));
    assert_eq!(kernel(interpreted), [("jit", WARNING)]);
}

#[test]
fn rss_overrides_are_found() {
    let server = |change: fn(&mut Facts)| problems(Role::Server, change);
    assert_eq!(server(|facts| device(facts).rss_conflicts.is_irqbalance_running = true), [("irqbalance", WARNING)]);
    assert_eq!(server(|facts| device(facts).rss_conflicts.flow_rule_count = 2), [("flow-rules", WARNING)]);
    let flows = |facts: &mut Facts| {
        device(facts).rss_conflicts.rfs_queues = vec!["rx-0".to_owned(), "rx-1".to_owned()];
        device(facts).rss_conflicts.takes_flow_rules = true;
    };
    // Without entries of the host the kernel does not use the queues' table.
    assert_eq!(server(flows), []);
    let mut facts = passing_facts(Role::Server);
    flows(&mut facts);
    device(&mut facts).rss_conflicts.rps_sock_flow_entries = 32_768;
    let finding = rss::rfs(&facts).remove(0);
    assert_eq!(finding.severity, WARNING);
    assert!(finding.observation.starts_with("accelerated RFS is on for eth7"), "{}", finding.observation);
    let commands: Vec<&str> = finding.remedies.iter().map(|remedy| remedy.command.as_str()).collect();
    let of = |queue: &str| format!("echo 0 > /sys/class/net/eth7/queues/{queue}/rps_flow_cnt");
    assert_eq!(commands, [of("rx-0"), of("rx-1")]);
}

#[test]
fn rss_key_and_hashed_fields_are_checked() {
    let server = |change: fn(&mut Facts)| problems(Role::Server, change);
    let other =
        |facts: &mut Facts| device(facts).rss = Err(RssProblem::UnsupportedHash("eth7 hashes by XOR".to_owned()));
    assert_eq!(server(other), [("rss", WARNING)]);
    assert_eq!(
        server(|facts| device(facts).rss = Err(RssProblem::NoIndirectionTable("none".to_owned()))),
        [("rss", WARNING)]
    );
    let without_ports = |facts: &mut Facts| {
        device(facts).port_hashing = FlowType::ALL.into_iter().map(|flow_type| (flow_type, false)).collect();
    };
    assert_eq!(server(without_ports), []);
    let of_udp = |facts: &mut Facts| {
        device(facts).port_hashing.insert(FlowType::Udp4, false);
        facts.services = vec![service(Protocol::Udp)];
    };
    assert_eq!(server(of_udp), [("rss-ports", WARNING)]);
}

#[test]
fn ipv6_services_need_hashes_over_ports() {
    let mut facts = ipv6_facts("lo");
    assert_eq!(rss::ports(&facts)[0].severity, Severity::Ok);
    device(&mut facts).port_hashing.insert(FlowType::Tcp6, false);
    let finding = &rss::ports(&facts)[0];
    assert_eq!((finding.severity, finding.observation.as_str()), (WARNING, "eth7 hashes tcp6 by addresses alone"));
    assert_eq!(finding.remedies[0].command, "ethtool -N eth7 rx-flow-hash tcp6 sdfn");
    device(&mut facts).port_hashing.remove(&FlowType::Tcp6);
    assert_eq!(rss::ports(&facts)[0].severity, Severity::Unknown);
}

#[test]
fn symmetric_hash_is_unknown_if_the_driver_hides_it() {
    let mut facts = passing_facts(Role::Server);
    device(&mut facts).rss = Ok((128, InputTransform::SymmetricOrXor));
    let finding = rss::rss(&facts).remove(0);
    assert_eq!(finding.severity, Severity::Ok);
    assert!(finding.observation.contains("symmetric-or-xor"), "{}", finding.observation);
    device(&mut facts).driver = "mlx5_core".to_owned();
    facts.kernel.release = "6.12.117+deb12-amd64".to_owned();
    assert_eq!(rss::rss(&facts).remove(0).severity, Severity::Ok, "reported, by a vendor's driver");
    device(&mut facts).rss = Ok((128, InputTransform::None));
    let finding = rss::rss(&facts).remove(0);
    assert_eq!(finding.severity, Severity::Unknown);
    assert!(finding.observation.contains("mlx5_core"), "{finding:?}");
    assert!(finding.remedies[0].command.contains("xfrm none"), "{finding:?}");
    facts.kernel.release = "6.15.1".to_owned();
    assert_eq!(rss::rss(&facts).remove(0).severity, Severity::Ok);
}

#[test]
fn flow_director_is_reported_with_its_remedy() {
    let of = |driver: &str, moves| {
        let mut facts = passing_facts(Role::Server);
        device(&mut facts).driver = driver.to_owned();
        device(&mut facts).moves_connections = moves;
        rss::flow_director(&facts).remove(0)
    };
    for (driver, command) in [("ixgbe", "ethtool -K eth7 ntuple on"), ("i40e", "flow-director-atr off")] {
        let finding = of(driver, Some(true));
        assert_eq!(finding.severity, WARNING);
        assert!(finding.remedies[0].command.contains(command), "{finding:?}");
        assert_eq!(of(driver, Some(false)).severity, Severity::Ok);
    }
    assert_eq!(of("ice", None).severity, Severity::Ok);
}

#[test]
fn vlan_tags_are_checked_only_with_vlans() {
    let vlans = |facts: &mut Facts| device(facts).vlans = vec!["eth7.5".to_owned()];
    assert_eq!(problems(Role::Lb, vlans), [("vlan-tags", FAULT)]);
    let left = |facts: &mut Facts| {
        vlans(facts);
        device(facts).strips_vlan_tags = false;
    };
    assert_eq!(problems(Role::Lb, left), []);
}

#[test]
fn queue_counts_and_interrupts_are_checked() {
    let channels = |receive, receive_max| {
        move |facts: &mut Facts| device(facts).channels = Some(Channels { receive, receive_max, transmit: receive })
    };
    assert_eq!(problems(Role::Server, channels(8, 8)), [("queues", WARNING), ("listeners", WARNING)]);
    assert_eq!(problems(Role::Server, channels(2, 8)), [("queues", WARNING)]);
    assert_eq!(problems(Role::Server, channels(1, 1)), [("queues", WARNING)]);
    assert_eq!(problems(Role::Lb, channels(1, 1)), []);
    assert_eq!(problems(Role::Lb, channels(1, 4)), [("queues", WARNING)]);
    let shared = |facts: &mut Facts| {
        device(facts).interrupts.insert(3, Interrupt { number: 33, cpu: Some(0) });
    };
    assert_eq!(problems(Role::Server, shared), [("interrupts", WARNING)]);
    let mut facts = passing_facts(Role::Server);
    shared(&mut facts);
    let finding = super::device::interrupts(&facts).remove(0);
    assert_eq!(finding.observation, "CPU 0 serves queues 0, 3");
    assert_eq!(finding.remedies[3].command, "echo 3 > /proc/irq/33/smp_affinity_list");
}

#[test]
fn driver_drops_are_reported() {
    let drops = |facts: &mut Facts| {
        device(facts).xdp_send_errors = vec![("rx_queue_0_xdp_tx_errors".to_owned(), 12)];
    };
    assert_eq!(problems(Role::Lb, drops), [("xdp-send", FAULT)]);
    let mut facts = passing_facts(Role::Lb);
    drops(&mut facts);
    device(&mut facts).driver = "veth".to_owned();
    let finding = super::device::xdp_send(&facts).remove(0);
    assert_eq!(finding.observation, "eth7 dropped frames that XDP sent: rx_queue_0_xdp_tx_errors 12");
    assert!(finding.remedies[0].command.starts_with("ip link set dev PEER xdp"), "{:?}", finding.remedies);
}

#[test]
fn veth_peer_without_a_program_is_reported() {
    let cut_off = |facts: &mut Facts| {
        device(facts).driver = "veth".to_owned();
        device(facts).veth_peer_has_xdp = Some(false);
    };
    assert_eq!(problems(Role::Lb, cut_off), [("xdp-send", FAULT)]);
    let generic = |facts: &mut Facts| {
        cut_off(facts);
        let xdp = &mut device(facts).xdp;
        (xdp.generic_program_id, xdp.native_program_id) = (xdp.native_program_id, None);
    };
    assert_eq!(problems(Role::Lb, generic), []);
}

#[test]
fn polling_threads_are_reported_if_cpu_time_is_the_load() {
    let polls = |facts: &mut Facts| {
        facts.polling_threads = vec![PollingThread { thread_id: 41, name: "dpdk-worker".to_owned(), cpu: 2 }];
    };
    assert_eq!(problems(Role::Server, polls), [("polling", WARNING)]);
    let published = |facts: &mut Facts| {
        polls(facts);
        facts.settings.load_by_cpu_time = false;
    };
    assert_eq!(problems(Role::Server, published), []);
}

#[test]
fn native_xdp_is_checked() {
    let lb = |change: fn(&mut Facts)| problems(Role::Lb, change);
    assert_eq!(lb(|facts| device(facts).is_lro_enabled = true), [("lro", FAULT)]);
    let none = |facts: &mut Facts| device(facts).xdp = XdpState { supports_native: Some(false), ..XdpState::default() };
    assert_eq!(lb(none), [("xdp", WARNING)]);
    let only_native = |facts: &mut Facts| {
        device(facts).xdp = XdpState { supports_native: Some(false), ..XdpState::default() };
        facts.settings.xdp_mode = XdpMode::Native;
    };
    assert_eq!(lb(only_native), [("xdp", FAULT)]);
    let configured = |facts: &mut Facts| {
        device(facts).xdp = XdpState { supports_native: Some(false), ..XdpState::default() };
        facts.settings.xdp_mode = XdpMode::Generic;
    };
    assert_eq!(lb(configured), []);
    let ena = |facts: &mut Facts| {
        device(facts).driver = "ena".to_owned();
        device(facts).channels = Some(Channels { receive: 4, receive_max: 4, transmit: 4 });
    };
    assert_eq!(lb(ena), [("xdp", WARNING)]);
    // The running program in the driver shows that frames fit.
    assert_eq!(lb(|facts| device(facts).mtu = 9000), []);
    let jumbo = |facts: &mut Facts| {
        device(facts).mtu = 9000;
        device(facts).own_program_id = None;
        device(facts).xdp.native_program_id = None;
    };
    assert_eq!(lb(jumbo), [("mtu", WARNING)]);
}

#[test]
fn servers_of_the_segment_need_an_address_in_its_network() {
    let is_fault = |address: &str, is_on_segment: bool| {
        problems(Role::Lb, |facts| facts.servers = servers(address, is_on_segment)).contains(&("segment", FAULT))
    };
    assert!(is_fault("192.0.2.1", true));
    assert!(!is_fault("192.0.2.1", false), "it is behind routers or in a VLAN");
    assert!(!is_fault("10.1.1.2", true));
}

#[test]
fn mtu_has_room_for_outer_headers_of_ipv6_packets() {
    let is_fault = |mtu: u32, vip: &str, server: &str| {
        let findings = problems(Role::Lb, |facts| {
            device(facts).mtu = mtu;
            facts.services[0].forwarding = Forwarding::Gue;
            facts.services[0].address.socket = vip.parse().unwrap();
            facts.servers = servers(server, false);
        });
        findings.contains(&("outer-headers", FAULT))
    };
    let (vip, server) = ("[2001:db8::1]:80", "2001:db8:1::2");
    assert_eq!([1328, 1327].map(|mtu| is_fault(mtu, vip, server)), [false, true]);
    assert_eq!([1308, 1307].map(|mtu| is_fault(mtu, vip, "10.1.1.2")), [false, true]);
    assert!(!is_fault(1280, "10.200.0.1:80", server));
}

#[test]
fn arp_sysctls_are_not_fixed_when_other_devices_have_addresses() {
    let asks =
        |facts: &mut Facts| drop(facts.sysctls.insert("net/ipv4/conf/eth7/arp_ignore".to_owned(), "0".to_owned()));
    let mut facts = passing_facts(Role::Server);
    asks(&mut facts);
    assert!(addresses::arp_ignore(&facts)[0].remedies[0].fix.is_some());
    let other = Address { device: "eth8".to_owned(), address: "192.0.2.7".parse().unwrap(), mask: [255; 4].into() };
    facts.addresses.push(other);
    assert!(addresses::arp_ignore(&facts)[0].remedies[0].fix.is_none());
    // 8 answers nothing at all: an operator decided that.
    facts.addresses.pop();
    facts.sysctls.insert("net/ipv4/conf/eth7/arp_ignore".to_owned(), "8".to_owned());
    let finding = addresses::arp_ignore(&facts).remove(0);
    assert!(finding.severity == FAULT && finding.remedies[0].fix.is_none());
}

#[test]
fn lb_stamping_requires_forwarding() {
    let without = |facts: &mut Facts| {
        for (path, value) in [("forwarding", "0"), ("send_redirects", "1"), ("rp_filter", "1")] {
            facts.sysctls.insert(format!("net/ipv4/conf/eth7/{path}"), value.to_owned());
        }
    };
    // Irrelevant if servers answer clients directly.
    assert_eq!(problems(Role::Lb, without), []);
    let stamping = |facts: &mut Facts| {
        without(facts);
        facts.services[0].is_stamped_by_lb = true;
    };
    assert_eq!(problems(Role::Lb, stamping), [("rp-filter", FAULT), ("forwarding", FAULT), ("send-redirects", FAULT)]);
}

#[test]
fn ipv6_lb_stamping_requires_ipv6_forwarding_only() {
    let stamping = |forwarding: &'static str| {
        move |facts: &mut Facts| {
            facts.services[0].is_stamped_by_lb = true;
            facts.services[0].address.socket.set_ip("2001:db8::1".parse().unwrap());
            facts.sysctls.insert("net/ipv4/conf/eth7/forwarding".to_owned(), "0".to_owned());
            facts.sysctls.insert(IPV6_FORWARDING.to_owned(), forwarding.to_owned());
        }
    };
    let of_forwarding = |forwarding| {
        problems(Role::Lb, stamping(forwarding)).into_iter().filter(|(check, _)| *check == "forwarding").count()
    };
    assert_eq!((of_forwarding("0"), of_forwarding("1")), (1, 0));
}

#[test]
fn slow_or_unsynchronised_clocks_are_found() {
    let server = |change: fn(&mut Facts)| problems(Role::Server, change);
    assert_eq!(server(|facts| facts.clock.source = "hpet".to_owned()), [("clock-source", WARNING)]);
    assert_eq!(server(|facts| facts.clock.synchronised = Some(false)), [("clock-sync", WARNING)]);
    assert_eq!(server(|facts| facts.future_report_count = 3), [("clock-sync", WARNING)]);
    let random_offsets =
        |facts: &mut Facts| drop(facts.sysctls.insert("net/ipv4/tcp_timestamps".to_owned(), "1".to_owned()));
    assert_eq!(server(random_offsets), []);
    let nobody_sets = |facts: &mut Facts| {
        random_offsets(facts);
        facts.settings.manage_timestamps = false;
    };
    assert_eq!(problems(Role::Server, nobody_sets), [("tcp-timestamps", FAULT)]);
    // An agent sets it only for services stamped at the server.
    let by_lb = |facts: &mut Facts| {
        random_offsets(facts);
        facts.services[0].is_stamped_by_lb = true;
    };
    assert_eq!(problems(Role::Server, by_lb), [("tcp-timestamps", FAULT)]);
}

#[test]
fn firewalls_and_connection_tracking_are_reported() {
    let chain = |hook: &str, drops, accepts, tracks| Chain {
        name: format!("ip filter {hook}"),
        hook: hook.to_owned(),
        drops_by_default: drops,
        accepts_packets: accepts,
        tracks_connections: tracks,
        exempts_packets: false,
        rules: vec![],
    };
    let with = |role: Role, chain: Chain, by_lb: bool| {
        problems(role, |facts| {
            facts.netfilter.chains = Ok(vec![chain]);
            facts.services[0].is_stamped_by_lb = by_lb;
        })
    };
    assert_eq!(with(Role::Server, chain("input", true, false, false), false), [("firewall", FAULT)]);
    assert_eq!(with(Role::Server, chain("input", true, true, false), false), [("firewall", WARNING)]);
    assert_eq!(with(Role::Server, chain("forward", true, false, false), false), []);
    assert_eq!(with(Role::Lb, chain("forward", true, false, false), true), [("firewall", FAULT)]);
    assert_eq!(with(Role::Lb, chain("input", true, true, true), true), [("conntrack", FAULT)]);
    assert_eq!(with(Role::Server, chain("input", false, true, true), false), [("conntrack", WARNING)]);
    let untracked = Chain { exempts_packets: true, ..chain("prerouting", false, true, true) };
    assert_eq!(with(Role::Server, untracked, false), []);
    let translates = |conditions| {
        let rule = NatRule { conditions, translates: true, jumps: vec![] };
        Chain { rules: vec![rule], ..chain("prerouting", false, true, false) }
    };
    assert_eq!(with(Role::Server, translates(vec![]), false), [("dnat", WARNING)]);
    assert_eq!(with(Role::Server, translates(vec![MatchCondition::Port(vec![8080..=8080])]), false), []);
    assert_eq!(with(Role::Lb, translates(vec![]), false), []);
    let unseen = |facts: &mut Facts| facts.netfilter.legacy_tables = vec!["filter".to_owned()];
    assert_eq!(problems(Role::Server, unseen), []);
}

#[test]
fn announced_vips_need_a_routing_daemon_and_no_ip_rule() {
    let announcement = |rules: &[&str], daemon: Option<&str>| {
        let rules = Ok(rules.iter().map(|rule| (*rule).to_owned()).collect());
        Some(Announcement { table: 7400, rules, daemon: daemon.map(str::to_owned) })
    };
    let found = |announcement| problems(Role::Lb, |facts| facts.announcement = announcement);
    assert_eq!(found(announcement(&[], Some("bird"))), []);
    assert_eq!(found(announcement(&[], None)), [("announce", FAULT)]);
    assert_eq!(found(announcement(&["32765: from all lookup 7400"], Some("bird"))), [("announce", FAULT)]);
}

#[test]
fn unreachable_etcd_is_a_fault() {
    let found = |leader: Result<String, String>| {
        problems(Role::Controller, |facts| {
            let place = facts.controller_facts.as_mut().unwrap();
            place.store = StoreFacts::Etcd { endpoints: vec!["http://10.1.0.5:2379".to_owned()], leader };
        })
    };
    assert_eq!(found(Ok("controller 10.1.0.2:7400 leads".to_owned())), []);
    assert_eq!(found(Err("etcd does not answer".to_owned())), [("store", FAULT)]);
}

/// Returns facts of a server with an IPv6 service only, whose VIP is on `device`.
fn ipv6_facts(device: &str) -> Facts {
    let mut facts = passing_facts(Role::Server);
    let vip = "2001:db8::1".parse().unwrap();
    facts.services[0].address.socket = std::net::SocketAddr::new(vip, 80);
    let mask = std::net::IpAddr::from([0xff; 16]);
    facts.addresses.push(Address { device: device.to_owned(), address: vip, mask });
    for device in ["lo", "eth7"] {
        facts.sysctls.insert(disable_ipv6_sysctl(device), "0".to_owned());
    }
    facts
}

#[test]
fn ipv6_vip_belongs_on_lo() {
    assert_eq!(addresses::vip(&ipv6_facts("lo"))[0].severity, Severity::Ok);
    let on_device = &addresses::vip(&ipv6_facts("eth7"))[0];
    assert_eq!(on_device.severity, FAULT);
    assert_eq!(on_device.observation, "VIP 2001:db8::1 is on eth7: expected lo");
    let remedy = "ip address add 2001:db8::1/128 dev lo; ip address delete 2001:db8::1/128 dev eth7";
    assert_eq!(on_device.remedies[0].command, remedy);
}

#[test]
fn ipv6_service_needs_ipv6_and_no_arp_settings() {
    let mut facts = ipv6_facts("lo");
    facts.sysctls.insert("net/ipv4/conf/eth7/arp_ignore".to_owned(), "0".to_owned());
    assert!(addresses::arp_ignore(&facts).is_empty());
    assert!(addresses::ipv6(&facts).iter().all(|finding| finding.severity == Severity::Ok));
    facts.sysctls.insert(disable_ipv6_sysctl("eth7"), "1".to_owned());
    facts.sysctls.remove(&disable_ipv6_sysctl("lo"));
    let found: Vec<String> = addresses::ipv6(&facts).into_iter().map(|finding| finding.observation).collect();
    let expected = ["the kernel has no IPv6 at lo: expected it", "net.ipv6.conf.eth7.disable_ipv6 is 1: expected 0"];
    assert_eq!(found, expected);
    assert!(addresses::ipv6(&passing_facts(Role::Server)).is_empty());
}

#[test]
fn networks_have_one_address_family() {
    let own = Address {
        device: "eth7".to_owned(),
        address: "2001:db8::1".parse().unwrap(),
        mask: "ffff:ffff:ffff:ffff::".parse().unwrap(),
    };
    assert!(own.reaches("2001:db8::2:3".parse().unwrap()));
    assert!(!own.reaches("2001:db8:1::2".parse().unwrap()));
    assert!(!own.reaches("10.1.1.1".parse().unwrap()));
}
