//! Tests of checks with constructed facts, for states that a network namespace cannot emulate.

mod firewalls;
mod ipv6;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coreward_agent::config::Steer;
use coreward_agent::load::queues::Interrupt;
use coreward_agent::rss::ethtool::FlowType;
use coreward_agent::rss_conflicts::RssConflicts;
use coreward_dataplane::device::XdpState;
use coreward_dataplane::ethtool::QueueCounts;
use coreward_dataplane::lb::XdpMode;
use coreward_model::ServiceAddress;
use coreward_model::forwarding::Forwarding;
use coreward_model::rss::InputTransform;
use coreward_model::tuple::Protocol;
use coreward_tls::authority::DAY;

use ipv6::ipv6_server_facts;

use super::*;
use crate::facts::*;
use crate::finding::Severity;

fn service_with_protocol(protocol: Protocol) -> Service {
    let worker_cpus = (0..4).map(|cpu| BTreeSet::from([cpu])).collect();
    Service {
        name: "web".to_owned(),
        address: ServiceAddress { vip_and_port: "10.200.0.1:80".parse().unwrap(), protocol },
        is_stamped_by_lb: false,
        is_stamped: true,
        forwarding: Forwarding::default(),
        sockets: Some(Ok(Sockets { socket_count: 4, has_reuseport: Some(true), worker_cpus })),
    }
}

fn servers_with_address(address: &str, is_on_segment: bool) -> BTreeMap<String, Server> {
    BTreeMap::from([("s1".to_owned(), Server { address: address.parse().unwrap(), is_on_segment })])
}

/// Returns facts about a machine with this role for which no check reports a problem.
fn facts_without_problems(role: Role) -> Facts {
    let sysctl_values = [
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
    let new_address = |device: &str, address: &str, mask: &str| Address {
        device: device.to_owned(),
        address: address.parse().unwrap(),
        mask: mask.parse().unwrap(),
    };
    let mut addresses =
        vec![new_address("lo", "127.0.0.1", "255.0.0.0"), new_address("eth7", "10.1.1.1", "255.255.0.0")];
    if role == Role::Server {
        addresses.push(new_address("lo", "10.200.0.1", "255.255.255.255"));
    }
    Facts {
        role,
        settings: Settings {
            interface: Some("eth7".to_owned()),
            pin_directory: Some("/sys/fs/bpf/coreward".into()),
            controllers: vec!["10.1.0.2:7400".parse().unwrap()],
            manage_timestamps: true,
            reports_cpu_time_as_load: true,
            steer: Steer::Affinity,
            xdp_mode: XdpMode::Auto,
            announcement_table: None,
        },
        kernel: Kernel {
            release: "6.1.0-28-amd64".to_owned(),
            has_btf: true,
            program_load_results: BTreeMap::from([("lb", Ok(()))]),
        },
        missing_capabilities: vec![],
        open_files_limit: 524_288,
        sysctl_values: sysctl_values.into_iter().map(|(path, value)| (path.to_owned(), value.to_owned())).collect(),
        bpf_file_system: BpfFileSystem { existing_directory: "/sys/fs/bpf".into(), is_bpf: true },
        pins_problem: None,
        device: Some(Device {
            is_up: true,
            is_ethernet: true,
            mtu: 1500,
            driver: "igb".to_owned(),
            queue_counts: Some(QueueCounts { receive_queues: 4, max_receive_queues: 8, transmit_queues: 4 }),
            is_lro_enabled: false,
            port_hashing_by_flow_type: FlowType::ALL.into_iter().map(|flow_type| (flow_type, true)).collect(),
            xdp: XdpState { native_program_id: Some(7), generic_program_id: None, supports_native: Some(true) },
            veth_peer_has_xdp: None,
            xdp_send_errors: vec![],
            own_program_id: Some(7),
            rss_conflicts: RssConflicts::default(),
            interrupts_by_queue: (0..4)
                .map(|queue| (queue, Interrupt { irq_number: 30, cpu: Some(queue.into()) }))
                .collect(),
            rss_entries_and_transform: Ok((128, InputTransform::None)),
            moves_open_connections: None,
            strips_vlan_tags: true,
            vlan_devices: vec![],
            is_sysfs_visible: true,
        }),
        addresses,
        default_route_devices: BTreeSet::from(["eth7".to_owned()]),
        cpu_count: 4,
        clock: Clock { clock_source: "tsc".to_owned(), is_synchronised: Some(true) },
        netfilter: Netfilter { chains: Ok(vec![]), legacy_tables: vec![] },
        controller_answer: Some(Ok("10.1.0.2:7400".parse().unwrap())),
        services: vec![service_with_protocol(Protocol::Tcp)],
        servers_by_name: servers_with_address("10.1.1.2", true),
        future_dated_report_count: 0,
        announcement: None,
        controller_facts: Some(ControllerFacts {
            listen_address: "10.1.0.2:7400".parse().unwrap(),
            listen_problem: None,
            is_running: false,
            store: StoreFacts::File {
                path: "/var/lib/coreward/store".into(),
                problem: None,
                permission_bits: Some(0o600),
            },
        }),
        polling_threads: vec![],
        certificates: vec![certificate_with_days_left(60)],
    }
}

/// Returns facts about a certificate that is valid for 90 days in total, of which `days_left` remain.
fn certificate_with_days_left(days_left: u64) -> CertificateFacts {
    CertificateFacts {
        usage: "own",
        subject: "agent s1".to_owned(),
        wrong_owner: None,
        remaining_validity: DAY * days_left as u32,
        is_renewal_due: days_left < 30,
    }
}

#[test]
fn expiring_certificate_and_wrong_key_owner_are_reported() {
    for role in [Role::Lb, Role::Server, Role::Controller] {
        let certificate_problems =
            |change: fn(&mut CertificateFacts)| problems_after_change(role, |facts| change(&mut facts.certificates[0]));
        assert_eq!(certificate_problems(|certificate| certificate.is_renewal_due = true), [("certificates", WARNING)]);
        assert_eq!(
            certificate_problems(|certificate| certificate.remaining_validity = Duration::ZERO),
            [("certificates", FAULT)]
        );
        assert_eq!(
            certificate_problems(|certificate| certificate.wrong_owner = Some("agent s2: expected agent s1".into())),
            [("certificates", FAULT)]
        );
    }
}

/// Returns the warnings and faults that all checks report after `change` has modified facts without problems.
fn problems_after_change(role: Role, change: impl FnOnce(&mut Facts)) -> Vec<(&'static str, Severity)> {
    let mut facts = facts_without_problems(role);
    change(&mut facts);
    let findings = run_all_checks(&facts).into_iter().filter(|(_, finding)| finding.severity >= Severity::Warning);
    findings
        .map(|(check, finding)| {
            assert!(!finding.consequence.is_empty() && !finding.remedies.is_empty(), "{}: {finding:?}", check.name);
            let has_fix = finding.remedies.iter().any(|remedy| remedy.automatic_fix.is_some());
            assert!(check.is_fixable || !has_fix, "{}", check.name);
            (check.name, finding.severity)
        })
        .collect()
}

fn device_mut(facts: &mut Facts) -> &mut Device {
    facts.device.as_mut().unwrap()
}

const WARNING: Severity = Severity::Warning;
const FAULT: Severity = Severity::Fault;

#[test]
fn correctly_configured_machine_has_no_findings() {
    for role in [Role::Lb, Role::Server, Role::Controller] {
        assert_eq!(problems_after_change(role, |_| {}), []);
        let unknown_checks: Vec<_> = run_all_checks(&facts_without_problems(role))
            .into_iter()
            .filter(|(_, finding)| finding.severity != Severity::Ok)
            .collect();
        assert!(unknown_checks.is_empty(), "{unknown_checks:?}");
    }
}

#[test]
fn old_kernel_rejected_programs_and_disabled_jit_are_reported() {
    let lb_problems = |change: fn(&mut Facts)| problems_after_change(Role::Lb, change);
    assert_eq!(lb_problems(|facts| facts.kernel.release = "5.15.0-1-amd64".to_owned()), [("kernel", FAULT)]);
    assert_eq!(lb_problems(|facts| facts.kernel.release = "6.0".to_owned()), [("kernel", FAULT)]);
    assert_eq!(lb_problems(|facts| facts.kernel.release = "10.0.1".to_owned()), []);
    assert_eq!(lb_problems(|facts| facts.kernel.has_btf = false), [("kernel", FAULT)]);
    let reject_program = |facts: &mut Facts| drop(facts.kernel.program_load_results.insert("lb", Err("no".to_owned())));
    assert_eq!(lb_problems(reject_program), [("programs", FAULT)]);
    let disable_jit =
        |facts: &mut Facts| drop(facts.sysctl_values.insert("net/core/bpf_jit_enable".to_owned(), "0".to_owned()));
    assert_eq!(lb_problems(disable_jit), [("jit", WARNING)]);
}

#[test]
fn settings_that_override_rss_are_reported() {
    let server_problems = |change: fn(&mut Facts)| problems_after_change(Role::Server, change);
    assert_eq!(
        server_problems(|facts| device_mut(facts).rss_conflicts.is_irqbalance_running = true),
        [("irqbalance", WARNING)]
    );
    assert_eq!(server_problems(|facts| device_mut(facts).rss_conflicts.flow_rule_count = 2), [("flow-rules", WARNING)]);
    let add_rfs_flow_tables = |facts: &mut Facts| {
        device_mut(facts).rss_conflicts.rfs_queues = vec!["rx-0".to_owned(), "rx-1".to_owned()];
        device_mut(facts).rss_conflicts.accepts_flow_rules = true;
    };
    // The kernel ignores the queues' tables unless the machine has socket flow entries.
    assert_eq!(server_problems(add_rfs_flow_tables), []);
    let mut facts = facts_without_problems(Role::Server);
    add_rfs_flow_tables(&mut facts);
    device_mut(&mut facts).rss_conflicts.rps_sock_flow_entries = 32_768;
    let finding = rss::check_rfs(&facts).remove(0);
    assert_eq!(finding.severity, WARNING);
    assert!(finding.observation.starts_with("accelerated RFS is on for eth7"), "{}", finding.observation);
    let remedy_commands: Vec<&str> = finding.remedies.iter().map(|remedy| remedy.command.as_str()).collect();
    let of = |queue: &str| format!("echo 0 > /sys/class/net/eth7/queues/{queue}/rps_flow_cnt");
    assert_eq!(remedy_commands, [of("rx-0"), of("rx-1")]);
}

#[test]
fn wrong_rss_hash_or_hashed_fields_are_reported() {
    let server_problems = |change: fn(&mut Facts)| problems_after_change(Role::Server, change);
    let use_other_hash = |facts: &mut Facts| {
        device_mut(facts).rss_entries_and_transform = Err(RssProblem::UnsupportedHash("eth7 hashes by XOR".to_owned()))
    };
    assert_eq!(server_problems(use_other_hash), [("rss", WARNING)]);
    assert_eq!(
        server_problems(|facts| device_mut(facts).rss_entries_and_transform =
            Err(RssProblem::NoIndirectionTable("none".to_owned()))),
        [("rss", WARNING)]
    );
    let hash_without_tcp_ports = |facts: &mut Facts| {
        device_mut(facts).port_hashing_by_flow_type =
            FlowType::ALL.into_iter().map(|flow_type| (flow_type, false)).collect();
    };
    assert_eq!(server_problems(hash_without_tcp_ports), []);
    let hash_without_udp_ports = |facts: &mut Facts| {
        device_mut(facts).port_hashing_by_flow_type.insert(FlowType::Udp4, false);
        facts.services = vec![service_with_protocol(Protocol::Udp)];
    };
    assert_eq!(server_problems(hash_without_udp_ports), [("rss-ports", WARNING)]);
}

#[test]
fn ipv6_services_require_hashing_of_ports() {
    let mut ipv6_facts = ipv6_server_facts("lo");
    assert_eq!(rss::check_port_hashing(&ipv6_facts)[0].severity, Severity::Ok);
    device_mut(&mut ipv6_facts).port_hashing_by_flow_type.insert(FlowType::Tcp6, false);
    let finding = &rss::check_port_hashing(&ipv6_facts)[0];
    assert_eq!((finding.severity, finding.observation.as_str()), (WARNING, "eth7 hashes tcp6 by addresses alone"));
    assert_eq!(finding.remedies[0].command, "ethtool -N eth7 rx-flow-hash tcp6 sdfn");
    device_mut(&mut ipv6_facts).port_hashing_by_flow_type.remove(&FlowType::Tcp6);
    assert_eq!(rss::check_port_hashing(&ipv6_facts)[0].severity, Severity::Unknown);
}

#[test]
fn symmetric_hash_is_unknown_if_the_driver_hides_it() {
    let mut facts = facts_without_problems(Role::Server);
    device_mut(&mut facts).rss_entries_and_transform = Ok((128, InputTransform::SymmetricOrXor));
    let finding = rss::check_rss(&facts).remove(0);
    assert_eq!(finding.severity, Severity::Ok);
    assert!(finding.observation.contains("symmetric-or-xor"), "{}", finding.observation);
    device_mut(&mut facts).driver = "mlx5_core".to_owned();
    facts.kernel.release = "6.12.117+deb12-amd64".to_owned();
    assert_eq!(rss::check_rss(&facts).remove(0).severity, Severity::Ok, "reported, by a vendor's driver");
    device_mut(&mut facts).rss_entries_and_transform = Ok((128, InputTransform::None));
    let finding = rss::check_rss(&facts).remove(0);
    assert_eq!(finding.severity, Severity::Unknown);
    assert!(finding.observation.contains("mlx5_core"), "{finding:?}");
    assert!(finding.remedies[0].command.contains("xfrm none"), "{finding:?}");
    facts.kernel.release = "6.15.1".to_owned();
    assert_eq!(rss::check_rss(&facts).remove(0).severity, Severity::Ok);
}

#[test]
fn flow_director_is_reported_with_its_remedy() {
    let of = |driver: &str, moves| {
        let mut facts = facts_without_problems(Role::Server);
        device_mut(&mut facts).driver = driver.to_owned();
        device_mut(&mut facts).moves_open_connections = moves;
        rss::check_flow_director(&facts).remove(0)
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
fn vlan_tag_stripping_is_reported_only_with_vlans() {
    let add_vlan = |facts: &mut Facts| device_mut(facts).vlan_devices = vec!["eth7.5".to_owned()];
    assert_eq!(problems_after_change(Role::Lb, add_vlan), [("vlan-tags", FAULT)]);
    let keep_vlan_tags = |facts: &mut Facts| {
        add_vlan(facts);
        device_mut(facts).strips_vlan_tags = false;
    };
    assert_eq!(problems_after_change(Role::Lb, keep_vlan_tags), []);
}

#[test]
fn too_many_queues_and_shared_interrupt_cpus_are_reported() {
    let set_channels = |receive_queues, receive_max| {
        move |facts: &mut Facts| {
            device_mut(facts).queue_counts =
                Some(QueueCounts { receive_queues, max_receive_queues: receive_max, transmit_queues: receive_queues })
        }
    };
    assert_eq!(problems_after_change(Role::Server, set_channels(8, 8)), [("queues", WARNING), ("listeners", WARNING)]);
    assert_eq!(problems_after_change(Role::Server, set_channels(2, 8)), [("queues", WARNING)]);
    assert_eq!(problems_after_change(Role::Server, set_channels(1, 1)), [("queues", WARNING)]);
    assert_eq!(problems_after_change(Role::Lb, set_channels(1, 1)), []);
    assert_eq!(problems_after_change(Role::Lb, set_channels(1, 4)), [("queues", WARNING)]);
    let share_cpus = |facts: &mut Facts| {
        device_mut(facts).interrupts_by_queue.insert(3, Interrupt { irq_number: 33, cpu: Some(0) });
    };
    assert_eq!(problems_after_change(Role::Server, share_cpus), [("interrupts", WARNING)]);
    let mut facts = facts_without_problems(Role::Server);
    share_cpus(&mut facts);
    let finding = super::device::check_interrupts(&facts).remove(0);
    assert_eq!(finding.observation, "CPU 0 serves queues 0, 3");
    assert_eq!(finding.remedies[3].command, "echo 3 > /proc/irq/33/smp_affinity_list");
}

#[test]
fn packets_dropped_by_the_driver_are_reported() {
    let count_drops = |facts: &mut Facts| {
        device_mut(facts).xdp_send_errors = vec![("rx_queue_0_xdp_tx_errors".to_owned(), 12)];
    };
    assert_eq!(problems_after_change(Role::Lb, count_drops), [("xdp-send", FAULT)]);
    let mut facts = facts_without_problems(Role::Lb);
    count_drops(&mut facts);
    device_mut(&mut facts).driver = "veth".to_owned();
    let finding = super::device::check_xdp_send(&facts).remove(0);
    assert_eq!(finding.observation, "eth7 dropped frames that XDP sent: rx_queue_0_xdp_tx_errors 12");
    assert!(finding.remedies[0].command.starts_with("ip link set dev PEER xdp"), "{:?}", finding.remedies);
}

#[test]
fn veth_peer_without_a_program_is_reported() {
    let remove_peer_program = |facts: &mut Facts| {
        device_mut(facts).driver = "veth".to_owned();
        device_mut(facts).veth_peer_has_xdp = Some(false);
    };
    assert_eq!(problems_after_change(Role::Lb, remove_peer_program), [("xdp-send", FAULT)]);
    let use_generic_xdp = |facts: &mut Facts| {
        remove_peer_program(facts);
        let xdp_state = &mut device_mut(facts).xdp;
        (xdp_state.generic_program_id, xdp_state.native_program_id) = (xdp_state.native_program_id, None);
    };
    assert_eq!(problems_after_change(Role::Lb, use_generic_xdp), []);
}

#[test]
fn polling_threads_are_reported_only_if_load_is_cpu_time() {
    let add_polling_thread = |facts: &mut Facts| {
        facts.polling_threads = vec![PollingThread { thread_id: 41, name: "dpdk-worker".to_owned(), cpu: 2 }];
    };
    assert_eq!(problems_after_change(Role::Server, add_polling_thread), [("polling", WARNING)]);
    let use_published_load = |facts: &mut Facts| {
        add_polling_thread(facts);
        facts.settings.reports_cpu_time_as_load = false;
    };
    assert_eq!(problems_after_change(Role::Server, use_published_load), []);
}

#[test]
fn obstacles_to_native_xdp_are_reported() {
    let lb = |change: fn(&mut Facts)| problems_after_change(Role::Lb, change);
    assert_eq!(lb(|facts| device_mut(facts).is_lro_enabled = true), [("lro", FAULT)]);
    let remove_native_support =
        |facts: &mut Facts| device_mut(facts).xdp = XdpState { supports_native: Some(false), ..XdpState::default() };
    assert_eq!(lb(remove_native_support), [("xdp", WARNING)]);
    let require_unsupported_native_xdp = |facts: &mut Facts| {
        device_mut(facts).xdp = XdpState { supports_native: Some(false), ..XdpState::default() };
        facts.settings.xdp_mode = XdpMode::Native;
    };
    assert_eq!(lb(require_unsupported_native_xdp), [("xdp", FAULT)]);
    let use_generic_xdp = |facts: &mut Facts| {
        device_mut(facts).xdp = XdpState { supports_native: Some(false), ..XdpState::default() };
        facts.settings.xdp_mode = XdpMode::Generic;
    };
    assert_eq!(lb(use_generic_xdp), []);
    let exceed_ena_queue_limit = |facts: &mut Facts| {
        device_mut(facts).driver = "ena".to_owned();
        device_mut(facts).queue_counts =
            Some(QueueCounts { receive_queues: 4, max_receive_queues: 4, transmit_queues: 4 });
    };
    assert_eq!(lb(exceed_ena_queue_limit), [("xdp", WARNING)]);
    // A program is running in native mode, so the frames evidently fit.
    assert_eq!(lb(|facts| device_mut(facts).mtu = 9000), []);
    let exceed_max_mtu = |facts: &mut Facts| {
        device_mut(facts).mtu = 9000;
        device_mut(facts).own_program_id = None;
        device_mut(facts).xdp.native_program_id = None;
    };
    assert_eq!(lb(exceed_max_mtu), [("mtu", WARNING)]);
}

#[test]
fn servers_on_the_segment_require_an_address_in_its_network() {
    let has_fault = |address: &str, is_on_segment: bool| {
        problems_after_change(Role::Lb, |facts| facts.servers_by_name = servers_with_address(address, is_on_segment))
            .contains(&("segment", FAULT))
    };
    assert!(has_fault("192.0.2.1", true));
    assert!(!has_fault("192.0.2.1", false), "it is behind routers or in a VLAN");
    assert!(!has_fault("10.1.1.2", true));
}

#[test]
fn mtu_without_room_for_outer_headers_is_reported() {
    let has_fault = |mtu: u32, vip: &str, server_address: &str| {
        let findings = problems_after_change(Role::Lb, |facts| {
            device_mut(facts).mtu = mtu;
            facts.services[0].forwarding = Forwarding::Gue;
            facts.services[0].address.vip_and_port = vip.parse().unwrap();
            facts.servers_by_name = servers_with_address(server_address, false);
        });
        findings.contains(&("outer-headers", FAULT))
    };
    let (vip, server) = ("[2001:db8::1]:80", "2001:db8:1::2");
    assert_eq!([1328, 1327].map(|mtu| has_fault(mtu, vip, server)), [false, true]);
    assert_eq!([1308, 1307].map(|mtu| has_fault(mtu, vip, "10.1.1.2")), [false, true]);
    assert!(!has_fault(1280, "10.200.0.1:80", server));
}

#[test]
fn arp_sysctls_are_not_fixed_when_other_devices_have_addresses() {
    let has_fix = |facts: &mut Facts| {
        drop(facts.sysctl_values.insert("net/ipv4/conf/eth7/arp_ignore".to_owned(), "0".to_owned()))
    };
    let mut facts = facts_without_problems(Role::Server);
    has_fix(&mut facts);
    assert!(addresses::check_arp_ignore(&facts)[0].remedies[0].automatic_fix.is_some());
    let other_address =
        Address { device: "eth8".to_owned(), address: "192.0.2.7".parse().unwrap(), mask: [255; 4].into() };
    facts.addresses.push(other_address);
    assert!(addresses::check_arp_ignore(&facts)[0].remedies[0].automatic_fix.is_none());
    // With 8 the kernel answers no requests at all, so an operator must have decided that.
    facts.addresses.pop();
    facts.sysctl_values.insert("net/ipv4/conf/eth7/arp_ignore".to_owned(), "8".to_owned());
    let finding = addresses::check_arp_ignore(&facts).remove(0);
    assert!(finding.severity == FAULT && finding.remedies[0].automatic_fix.is_none());
}

#[test]
fn stamping_at_lb_requires_ip_forwarding() {
    let disable_forwarding = |facts: &mut Facts| {
        for (path, value) in [("forwarding", "0"), ("send_redirects", "1"), ("rp_filter", "1")] {
            facts.sysctl_values.insert(format!("net/ipv4/conf/eth7/{path}"), value.to_owned());
        }
    };
    // This is irrelevant if servers send replies directly to clients.
    assert_eq!(problems_after_change(Role::Lb, disable_forwarding), []);
    let stamp_at_lb = |facts: &mut Facts| {
        disable_forwarding(facts);
        facts.services[0].is_stamped_by_lb = true;
    };
    assert_eq!(
        problems_after_change(Role::Lb, stamp_at_lb),
        [("rp-filter", FAULT), ("forwarding", FAULT), ("send-redirects", FAULT)]
    );
}

#[test]
fn stamping_ipv6_at_lb_requires_only_ipv6_forwarding() {
    let stamp_ipv6_at_lb = |forwarding: &'static str| {
        move |facts: &mut Facts| {
            facts.services[0].is_stamped_by_lb = true;
            facts.services[0].address.vip_and_port.set_ip("2001:db8::1".parse().unwrap());
            facts.sysctl_values.insert("net/ipv4/conf/eth7/forwarding".to_owned(), "0".to_owned());
            facts.sysctl_values.insert(IPV6_FORWARDING_SYSCTL.to_owned(), forwarding.to_owned());
        }
    };
    let forwarding_problems = |forwarding| {
        problems_after_change(Role::Lb, stamp_ipv6_at_lb(forwarding))
            .into_iter()
            .filter(|(check, _)| *check == "forwarding")
            .count()
    };
    assert_eq!((forwarding_problems("0"), forwarding_problems("1")), (1, 0));
}

#[test]
fn slow_or_unsynchronised_clocks_are_reported() {
    let server_problems = |change: fn(&mut Facts)| problems_after_change(Role::Server, change);
    assert_eq!(server_problems(|facts| facts.clock.clock_source = "hpet".to_owned()), [("clock-source", WARNING)]);
    assert_eq!(server_problems(|facts| facts.clock.is_synchronised = Some(false)), [("clock-sync", WARNING)]);
    assert_eq!(server_problems(|facts| facts.future_dated_report_count = 3), [("clock-sync", WARNING)]);
    let use_random_offsets =
        |facts: &mut Facts| drop(facts.sysctl_values.insert("net/ipv4/tcp_timestamps".to_owned(), "1".to_owned()));
    assert_eq!(server_problems(use_random_offsets), []);
    let stop_managing_timestamps = |facts: &mut Facts| {
        use_random_offsets(facts);
        facts.settings.manage_timestamps = false;
    };
    assert_eq!(problems_after_change(Role::Server, stop_managing_timestamps), [("tcp-timestamps", FAULT)]);
    // An agent sets the sysctl only for services that are stamped at the server.
    let stamp_at_lb = |facts: &mut Facts| {
        use_random_offsets(facts);
        facts.services[0].is_stamped_by_lb = true;
    };
    assert_eq!(problems_after_change(Role::Server, stamp_at_lb), [("tcp-timestamps", FAULT)]);
}

#[test]
fn announced_vips_need_a_routing_daemon_and_no_ip_rule() {
    let new_announcement = |rules: &[&str], daemon: Option<&str>| {
        let ip_rules = Ok(rules.iter().map(|rule| (*rule).to_owned()).collect());
        Some(Announcement { routing_table_number: 7400, ip_rules, routing_daemon: daemon.map(str::to_owned) })
    };
    let announcement_problems =
        |announcement| problems_after_change(Role::Lb, |facts| facts.announcement = announcement);
    assert_eq!(announcement_problems(new_announcement(&[], Some("bird"))), []);
    assert_eq!(announcement_problems(new_announcement(&[], None)), [("announce", FAULT)]);
    assert_eq!(
        announcement_problems(new_announcement(&["32765: from all lookup 7400"], Some("bird"))),
        [("announce", FAULT)]
    );
}

#[test]
fn unreachable_etcd_is_a_fault() {
    let etcd_problems = |leader: Result<String, String>| {
        problems_after_change(Role::Controller, |facts| {
            let controller_facts = facts.controller_facts.as_mut().unwrap();
            controller_facts.store = StoreFacts::Etcd { endpoints: vec!["http://10.1.0.5:2379".to_owned()], leader };
        })
    };
    assert_eq!(etcd_problems(Ok("controller 10.1.0.2:7400 leads".to_owned())), []);
    assert_eq!(etcd_problems(Err("etcd does not answer".to_owned())), [("store", FAULT)]);
}
