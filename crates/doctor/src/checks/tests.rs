//! Tests of checks with constructed facts, for states that a network namespace cannot emulate.

mod firewalls;
mod ipv6;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coreward_agent::config::ConnectionSteeringMode;
use coreward_agent::load::receive_queue_cpus::ReceiveQueueInterrupt;
use coreward_agent::rss::ethtool::RssFlowType;
use coreward_agent::rss_conflicts::RssConflicts;
use coreward_dataplane::device::DeviceXdpState;
use coreward_dataplane::ethtool::DeviceQueueCounts;
use coreward_dataplane::lb::XdpMode;
use coreward_model::ServiceAddress;
use coreward_model::forwarding::ForwardingMode;
use coreward_model::rss::RssInputTransform;
use coreward_model::tuple::TransportProtocol;
use coreward_tls::authority::DAY;

use super::*;
use crate::facts::*;
use crate::finding::FindingSeverity;

fn service_with_protocol(protocol: TransportProtocol) -> ServiceFacts {
    let worker_cpus = (0..4).map(|cpu| BTreeSet::from([cpu])).collect();
    ServiceFacts {
        name: "web".to_owned(),
        address: ServiceAddress { vip_and_port: "10.200.0.1:80".parse().unwrap(), protocol },
        is_stamped_by_lb: false,
        is_stamped: true,
        forwarding: ForwardingMode::default(),
        sockets: Some(Ok(ServiceSocketFacts {
            socket_count: 4,
            has_reuseport: Some(true),
            worker_cpu_affinities: worker_cpus,
        })),
    }
}

fn servers_with_address(address: &str, is_on_segment: bool) -> BTreeMap<String, ServerFacts> {
    BTreeMap::from([("s1".to_owned(), ServerFacts { address: address.parse().unwrap(), is_on_segment })])
}

/// Returns facts about a machine with this role for which no check reports a problem.
fn facts_without_problems(role: MachineRole) -> MachineFacts {
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
    let new_address = |device: &str, address: &str, mask: &str| DeviceAddress {
        device_name: device.to_owned(),
        address: address.parse().unwrap(),
        mask: mask.parse().unwrap(),
    };
    let mut addresses =
        vec![new_address("lo", "127.0.0.1", "255.0.0.0"), new_address("eth7", "10.1.1.1", "255.255.0.0")];
    if role == MachineRole::Server {
        addresses.push(new_address("lo", "10.200.0.1", "255.255.255.255"));
    }
    MachineFacts {
        role,
        settings: DaemonSettings {
            interface: Some("eth7".to_owned()),
            pin_directory: Some("/sys/fs/bpf/coreward".into()),
            controllers: vec!["10.1.0.2:7400".parse().unwrap()],
            manages_tcp_timestamps: true,
            reports_cpu_time_as_load: true,
            steering_mode: ConnectionSteeringMode::Affinity,
            xdp_mode: XdpMode::Auto,
            announcement_table_number: None,
        },
        kernel: KernelFacts {
            release: "6.1.0-28-amd64".to_owned(),
            has_btf: true,
            program_load_results: BTreeMap::from([("lb", Ok(()))]),
        },
        missing_capabilities: vec![],
        open_files_limit: 524_288,
        sysctl_values: sysctl_values.into_iter().map(|(path, value)| (path.to_owned(), value.to_owned())).collect(),
        bpf_file_system: BpfFileSystem { nearest_existing_directory: "/sys/fs/bpf".into(), is_bpf_file_system: true },
        pin_takeover_problem: None,
        device: Some(DeviceFacts {
            is_up: true,
            is_ethernet: true,
            mtu_bytes: 1500,
            driver: "igb".to_owned(),
            queue_counts: Some(DeviceQueueCounts { receive_queues: 4, max_receive_queues: 8, transmit_queues: 4 }),
            is_lro_enabled: false,
            port_hashing_by_flow_type: RssFlowType::ALL.into_iter().map(|flow_type| (flow_type, true)).collect(),
            xdp_state: DeviceXdpState {
                native_program_id: Some(7),
                generic_program_id: None,
                supports_native: Some(true),
            },
            veth_peer_has_xdp: None,
            xdp_send_error_counts: vec![],
            own_program_id: Some(7),
            rss_conflicts: RssConflicts::default(),
            interrupts_by_queue: (0..4)
                .map(|queue| (queue, ReceiveQueueInterrupt { irq_number: 30, cpu: Some(queue.into()) }))
                .collect(),
            rss_entry_count_and_transform: Ok((128, RssInputTransform::None)),
            moves_connections_between_queues: None,
            strips_vlan_tags: true,
            vlan_devices: vec![],
            is_sysfs_visible: true,
        }),
        addresses,
        default_route_devices: BTreeSet::from(["eth7".to_owned()]),
        online_cpu_count: 4,
        clock: ClockFacts { clock_source: "tsc".to_owned(), is_synchronised: Some(true) },
        netfilter: NetfilterFacts { chains: Ok(vec![]), legacy_tables: vec![] },
        answering_controller: Some(Ok("10.1.0.2:7400".parse().unwrap())),
        services: vec![service_with_protocol(TransportProtocol::Tcp)],
        servers_by_name: servers_with_address("10.1.1.2", true),
        future_dated_report_count: 0,
        announcement: None,
        controller_facts: Some(ControllerFacts {
            listen_address: "10.1.0.2:7400".parse().unwrap(),
            bind_problem: None,
            is_running: false,
            store: ControllerStoreFacts::Embedded {
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
        identity_mismatch: None,
        remaining_validity: DAY * days_left as u32,
        is_renewal_due: days_left < 30,
    }
}

#[test]
fn expiring_certificate_and_wrong_key_owner_are_reported() {
    for role in [MachineRole::Lb, MachineRole::Server, MachineRole::Controller] {
        let certificate_problems =
            |change: fn(&mut CertificateFacts)| problems_after_change(role, |facts| change(&mut facts.certificates[0]));
        assert_eq!(
            certificate_problems(|certificate| certificate.is_renewal_due = true),
            [("certificates", WARNING_SEVERITY)]
        );
        assert_eq!(
            certificate_problems(|certificate| certificate.remaining_validity = Duration::ZERO),
            [("certificates", FAULT_SEVERITY)]
        );
        assert_eq!(
            certificate_problems(
                |certificate| certificate.identity_mismatch = Some("agent s2: expected agent s1".into())
            ),
            [("certificates", FAULT_SEVERITY)]
        );
    }
}

/// Returns the warnings and faults that all checks report after `change` has modified facts without problems.
fn problems_after_change(
    role: MachineRole,
    change: impl FnOnce(&mut MachineFacts),
) -> Vec<(&'static str, FindingSeverity)> {
    let mut facts = facts_without_problems(role);
    change(&mut facts);
    let findings =
        run_all_checks(&facts).into_iter().filter(|(_, finding)| finding.severity >= FindingSeverity::Warning);
    findings
        .map(|(check, finding)| {
            assert!(!finding.consequence.is_empty() && !finding.remedies.is_empty(), "{}: {finding:?}", check.name);
            let has_fix = finding.remedies.iter().any(|remedy| remedy.automatic_fix.is_some());
            assert!(check.is_fixable || !has_fix, "{}", check.name);
            (check.name, finding.severity)
        })
        .collect()
}

fn device_mut(facts: &mut MachineFacts) -> &mut DeviceFacts {
    facts.device.as_mut().unwrap()
}

const WARNING_SEVERITY: FindingSeverity = FindingSeverity::Warning;
const FAULT_SEVERITY: FindingSeverity = FindingSeverity::Fault;

#[test]
fn correctly_configured_machine_has_no_findings() {
    for role in [MachineRole::Lb, MachineRole::Server, MachineRole::Controller] {
        assert_eq!(problems_after_change(role, |_| {}), []);
        let unknown_checks: Vec<_> = run_all_checks(&facts_without_problems(role))
            .into_iter()
            .filter(|(_, finding)| finding.severity != FindingSeverity::Ok)
            .collect();
        assert!(unknown_checks.is_empty(), "{unknown_checks:?}");
    }
}

#[test]
fn old_kernel_rejected_programs_and_disabled_jit_are_reported() {
    let find_lb_problems = |change: fn(&mut MachineFacts)| problems_after_change(MachineRole::Lb, change);
    assert_eq!(
        find_lb_problems(|facts| facts.kernel.release = "5.15.0-1-amd64".to_owned()),
        [("kernel", FAULT_SEVERITY)]
    );
    assert_eq!(find_lb_problems(|facts| facts.kernel.release = "6.0".to_owned()), [("kernel", FAULT_SEVERITY)]);
    assert_eq!(find_lb_problems(|facts| facts.kernel.release = "10.0.1".to_owned()), []);
    assert_eq!(find_lb_problems(|facts| facts.kernel.has_btf = false), [("kernel", FAULT_SEVERITY)]);
    let reject_program =
        |facts: &mut MachineFacts| drop(facts.kernel.program_load_results.insert("lb", Err("no".to_owned())));
    assert_eq!(find_lb_problems(reject_program), [("programs", FAULT_SEVERITY)]);
    let disable_jit = |facts: &mut MachineFacts| {
        drop(facts.sysctl_values.insert("net/core/bpf_jit_enable".to_owned(), "0".to_owned()))
    };
    assert_eq!(find_lb_problems(disable_jit), [("jit", WARNING_SEVERITY)]);
}

#[test]
fn settings_that_override_rss_are_reported() {
    let find_server_problems = |change: fn(&mut MachineFacts)| problems_after_change(MachineRole::Server, change);
    assert_eq!(
        find_server_problems(|facts| device_mut(facts).rss_conflicts.is_irqbalance_running = true),
        [("irqbalance", WARNING_SEVERITY)]
    );
    assert_eq!(
        find_server_problems(|facts| device_mut(facts).rss_conflicts.flow_rule_count = 2),
        [("flow-rules", WARNING_SEVERITY)]
    );
    let add_rfs_flow_tables = |facts: &mut MachineFacts| {
        device_mut(facts).rss_conflicts.rfs_queues = vec!["rx-0".to_owned(), "rx-1".to_owned()];
        device_mut(facts).rss_conflicts.accepts_flow_rules = true;
    };
    // The kernel ignores the queues' tables unless the machine has socket flow entries.
    assert_eq!(find_server_problems(add_rfs_flow_tables), []);
    let mut facts = facts_without_problems(MachineRole::Server);
    add_rfs_flow_tables(&mut facts);
    device_mut(&mut facts).rss_conflicts.rps_sock_flow_entries = 32_768;
    let finding = rss::check_rfs(&facts).remove(0);
    assert_eq!(finding.severity, WARNING_SEVERITY);
    assert!(finding.observation.starts_with("accelerated RFS is on for eth7"), "{}", finding.observation);
    let remedy_commands: Vec<&str> = finding.remedies.iter().map(|remedy| remedy.shell_command.as_str()).collect();
    let clear_flow_count_command = |queue: &str| format!("echo 0 > /sys/class/net/eth7/queues/{queue}/rps_flow_cnt");
    assert_eq!(remedy_commands, [clear_flow_count_command("rx-0"), clear_flow_count_command("rx-1")]);
}

#[test]
fn wrong_rss_hash_or_hashed_fields_are_reported() {
    let find_server_problems = |change: fn(&mut MachineFacts)| problems_after_change(MachineRole::Server, change);
    let use_other_hash = |facts: &mut MachineFacts| {
        device_mut(facts).rss_entry_count_and_transform =
            Err(RssProblem::UnsupportedHash("eth7 hashes by XOR".to_owned()))
    };
    assert_eq!(find_server_problems(use_other_hash), [("rss", WARNING_SEVERITY)]);
    assert_eq!(
        find_server_problems(|facts| device_mut(facts).rss_entry_count_and_transform =
            Err(RssProblem::NoIndirectionTable("none".to_owned()))),
        [("rss", WARNING_SEVERITY)]
    );
    let hash_without_tcp_ports = |facts: &mut MachineFacts| {
        device_mut(facts).port_hashing_by_flow_type =
            RssFlowType::ALL.into_iter().map(|flow_type| (flow_type, false)).collect();
    };
    assert_eq!(find_server_problems(hash_without_tcp_ports), []);
    let hash_without_udp_ports = |facts: &mut MachineFacts| {
        device_mut(facts).port_hashing_by_flow_type.insert(RssFlowType::Udp4, false);
        facts.services = vec![service_with_protocol(TransportProtocol::Udp)];
    };
    assert_eq!(find_server_problems(hash_without_udp_ports), [("rss-ports", WARNING_SEVERITY)]);
}

#[test]
fn symmetric_hash_is_unknown_if_the_driver_hides_it() {
    let mut facts = facts_without_problems(MachineRole::Server);
    device_mut(&mut facts).rss_entry_count_and_transform = Ok((128, RssInputTransform::SymmetricOrXor));
    let finding = rss::check_rss(&facts).remove(0);
    assert_eq!(finding.severity, FindingSeverity::Ok);
    assert!(finding.observation.contains("symmetric-or-xor"), "{}", finding.observation);
    device_mut(&mut facts).driver = "mlx5_core".to_owned();
    facts.kernel.release = "6.12.117+deb12-amd64".to_owned();
    assert_eq!(rss::check_rss(&facts).remove(0).severity, FindingSeverity::Ok, "reported, by a vendor's driver");
    device_mut(&mut facts).rss_entry_count_and_transform = Ok((128, RssInputTransform::None));
    let finding = rss::check_rss(&facts).remove(0);
    assert_eq!(finding.severity, FindingSeverity::Unknown);
    assert!(finding.observation.contains("mlx5_core"), "{finding:?}");
    assert!(finding.remedies[0].shell_command.contains("xfrm none"), "{finding:?}");
    facts.kernel.release = "6.15.1".to_owned();
    assert_eq!(rss::check_rss(&facts).remove(0).severity, FindingSeverity::Ok);
}

#[test]
fn flow_director_is_reported_with_its_remedy() {
    let find_flow_director_problem = |driver: &str, moves| {
        let mut facts = facts_without_problems(MachineRole::Server);
        device_mut(&mut facts).driver = driver.to_owned();
        device_mut(&mut facts).moves_connections_between_queues = moves;
        rss::check_flow_director(&facts).remove(0)
    };
    for (driver, command) in [("ixgbe", "ethtool -K eth7 ntuple on"), ("i40e", "flow-director-atr off")] {
        let finding = find_flow_director_problem(driver, Some(true));
        assert_eq!(finding.severity, WARNING_SEVERITY);
        assert!(finding.remedies[0].shell_command.contains(command), "{finding:?}");
        assert_eq!(find_flow_director_problem(driver, Some(false)).severity, FindingSeverity::Ok);
    }
    assert_eq!(find_flow_director_problem("ice", None).severity, FindingSeverity::Ok);
}

#[test]
fn vlan_tag_stripping_is_reported_only_with_vlans() {
    let add_vlan_device = |facts: &mut MachineFacts| device_mut(facts).vlan_devices = vec!["eth7.5".to_owned()];
    assert_eq!(problems_after_change(MachineRole::Lb, add_vlan_device), [("vlan-tags", FAULT_SEVERITY)]);
    let keep_vlan_tags = |facts: &mut MachineFacts| {
        add_vlan_device(facts);
        device_mut(facts).strips_vlan_tags = false;
    };
    assert_eq!(problems_after_change(MachineRole::Lb, keep_vlan_tags), []);
}

#[test]
fn too_many_queues_and_shared_interrupt_cpus_are_reported() {
    let set_queue_counts = |receive_queues, receive_max| {
        move |facts: &mut MachineFacts| {
            device_mut(facts).queue_counts = Some(DeviceQueueCounts {
                receive_queues,
                max_receive_queues: receive_max,
                transmit_queues: receive_queues,
            })
        }
    };
    assert_eq!(
        problems_after_change(MachineRole::Server, set_queue_counts(8, 8)),
        [("queues", WARNING_SEVERITY), ("listeners", WARNING_SEVERITY)]
    );
    assert_eq!(problems_after_change(MachineRole::Server, set_queue_counts(2, 8)), [("queues", WARNING_SEVERITY)]);
    assert_eq!(problems_after_change(MachineRole::Server, set_queue_counts(1, 1)), [("queues", WARNING_SEVERITY)]);
    assert_eq!(problems_after_change(MachineRole::Lb, set_queue_counts(1, 1)), []);
    assert_eq!(problems_after_change(MachineRole::Lb, set_queue_counts(1, 4)), [("queues", WARNING_SEVERITY)]);
    let share_interrupt_cpu = |facts: &mut MachineFacts| {
        device_mut(facts).interrupts_by_queue.insert(3, ReceiveQueueInterrupt { irq_number: 33, cpu: Some(0) });
    };
    assert_eq!(problems_after_change(MachineRole::Server, share_interrupt_cpu), [("interrupts", WARNING_SEVERITY)]);
    let mut facts = facts_without_problems(MachineRole::Server);
    share_interrupt_cpu(&mut facts);
    let finding = super::device::check_interrupts(&facts).remove(0);
    assert_eq!(finding.observation, "CPU 0 serves queues 0, 3");
    assert_eq!(finding.remedies[3].shell_command, "echo 3 > /proc/irq/33/smp_affinity_list");
}

#[test]
fn packets_dropped_by_the_driver_are_reported() {
    let add_driver_drops = |facts: &mut MachineFacts| {
        device_mut(facts).xdp_send_error_counts = vec![("rx_queue_0_xdp_tx_errors".to_owned(), 12)];
    };
    assert_eq!(problems_after_change(MachineRole::Lb, add_driver_drops), [("xdp-send", FAULT_SEVERITY)]);
    let mut facts = facts_without_problems(MachineRole::Lb);
    add_driver_drops(&mut facts);
    device_mut(&mut facts).driver = "veth".to_owned();
    let finding = super::device::check_xdp_transmission(&facts).remove(0);
    assert_eq!(finding.observation, "eth7 dropped frames that XDP sent: rx_queue_0_xdp_tx_errors 12");
    assert!(finding.remedies[0].shell_command.starts_with("ip link set dev PEER xdp"), "{:?}", finding.remedies);
}

#[test]
fn veth_peer_without_a_program_is_reported() {
    let remove_peer_program = |facts: &mut MachineFacts| {
        device_mut(facts).driver = "veth".to_owned();
        device_mut(facts).veth_peer_has_xdp = Some(false);
    };
    assert_eq!(problems_after_change(MachineRole::Lb, remove_peer_program), [("xdp-send", FAULT_SEVERITY)]);
    let use_generic_xdp = |facts: &mut MachineFacts| {
        remove_peer_program(facts);
        let xdp_state = &mut device_mut(facts).xdp_state;
        (xdp_state.generic_program_id, xdp_state.native_program_id) = (xdp_state.native_program_id, None);
    };
    assert_eq!(problems_after_change(MachineRole::Lb, use_generic_xdp), []);
}

#[test]
fn polling_threads_are_reported_only_if_load_is_cpu_time() {
    let add_polling_thread = |facts: &mut MachineFacts| {
        facts.polling_threads = vec![PollingThread { thread_id: 41, name: "dpdk-worker".to_owned(), cpu: 2 }];
    };
    assert_eq!(problems_after_change(MachineRole::Server, add_polling_thread), [("polling", WARNING_SEVERITY)]);
    let use_published_load = |facts: &mut MachineFacts| {
        add_polling_thread(facts);
        facts.settings.reports_cpu_time_as_load = false;
    };
    assert_eq!(problems_after_change(MachineRole::Server, use_published_load), []);
}

#[test]
fn obstacles_to_native_xdp_are_reported() {
    let find_lb_problems = |change: fn(&mut MachineFacts)| problems_after_change(MachineRole::Lb, change);
    assert_eq!(find_lb_problems(|facts| device_mut(facts).is_lro_enabled = true), [("lro", FAULT_SEVERITY)]);
    let remove_native_support = |facts: &mut MachineFacts| {
        device_mut(facts).xdp_state = DeviceXdpState { supports_native: Some(false), ..DeviceXdpState::default() }
    };
    assert_eq!(find_lb_problems(remove_native_support), [("xdp", WARNING_SEVERITY)]);
    let require_unsupported_native_xdp = |facts: &mut MachineFacts| {
        device_mut(facts).xdp_state = DeviceXdpState { supports_native: Some(false), ..DeviceXdpState::default() };
        facts.settings.xdp_mode = XdpMode::Native;
    };
    assert_eq!(find_lb_problems(require_unsupported_native_xdp), [("xdp", FAULT_SEVERITY)]);
    let use_generic_xdp = |facts: &mut MachineFacts| {
        device_mut(facts).xdp_state = DeviceXdpState { supports_native: Some(false), ..DeviceXdpState::default() };
        facts.settings.xdp_mode = XdpMode::Generic;
    };
    assert_eq!(find_lb_problems(use_generic_xdp), []);
    let exceed_ena_queue_limit = |facts: &mut MachineFacts| {
        device_mut(facts).driver = "ena".to_owned();
        device_mut(facts).queue_counts =
            Some(DeviceQueueCounts { receive_queues: 4, max_receive_queues: 4, transmit_queues: 4 });
    };
    assert_eq!(find_lb_problems(exceed_ena_queue_limit), [("xdp", WARNING_SEVERITY)]);
    // A program is running in native mode, so the frames evidently fit.
    assert_eq!(find_lb_problems(|facts| device_mut(facts).mtu_bytes = 9000), []);
    let exceed_max_mtu = |facts: &mut MachineFacts| {
        device_mut(facts).mtu_bytes = 9000;
        device_mut(facts).own_program_id = None;
        device_mut(facts).xdp_state.native_program_id = None;
    };
    assert_eq!(find_lb_problems(exceed_max_mtu), [("mtu", WARNING_SEVERITY)]);
}

#[test]
fn servers_on_the_segment_require_an_address_in_its_network() {
    let has_fault = |address: &str, is_on_segment: bool| {
        problems_after_change(MachineRole::Lb, |facts| {
            facts.servers_by_name = servers_with_address(address, is_on_segment)
        })
        .contains(&("segment", FAULT_SEVERITY))
    };
    assert!(has_fault("192.0.2.1", true));
    assert!(!has_fault("192.0.2.1", false), "it is behind routers or in a VLAN");
    assert!(!has_fault("10.1.1.2", true));
}

#[test]
fn mtu_without_room_for_outer_headers_is_reported() {
    let has_fault = |mtu: u32, vip: &str, server_address: &str| {
        let findings = problems_after_change(MachineRole::Lb, |facts| {
            device_mut(facts).mtu_bytes = mtu;
            facts.services[0].forwarding = ForwardingMode::Gue;
            facts.services[0].address.vip_and_port = vip.parse().unwrap();
            facts.servers_by_name = servers_with_address(server_address, false);
        });
        findings.contains(&("outer-headers", FAULT_SEVERITY))
    };
    let (vip, server) = ("[2001:db8::1]:80", "2001:db8:1::2");
    assert_eq!([1328, 1327].map(|mtu| has_fault(mtu, vip, server)), [false, true]);
    assert_eq!([1308, 1307].map(|mtu| has_fault(mtu, vip, "10.1.1.2")), [false, true]);
    assert!(!has_fault(1280, "10.200.0.1:80", server));
}

#[test]
fn arp_sysctls_are_not_fixed_when_other_devices_have_addresses() {
    let has_automatic_fix = |facts: &mut MachineFacts| {
        drop(facts.sysctl_values.insert("net/ipv4/conf/eth7/arp_ignore".to_owned(), "0".to_owned()))
    };
    let mut facts = facts_without_problems(MachineRole::Server);
    has_automatic_fix(&mut facts);
    assert!(addresses::check_arp_ignore(&facts)[0].remedies[0].automatic_fix.is_some());
    let other_address =
        DeviceAddress { device_name: "eth8".to_owned(), address: "192.0.2.7".parse().unwrap(), mask: [255; 4].into() };
    facts.addresses.push(other_address);
    assert!(addresses::check_arp_ignore(&facts)[0].remedies[0].automatic_fix.is_none());
    // With 8 the kernel answers no requests at all, so an operator must have decided that.
    facts.addresses.pop();
    facts.sysctl_values.insert("net/ipv4/conf/eth7/arp_ignore".to_owned(), "8".to_owned());
    let finding = addresses::check_arp_ignore(&facts).remove(0);
    assert!(finding.severity == FAULT_SEVERITY && finding.remedies[0].automatic_fix.is_none());
}

#[test]
fn stamping_at_lb_requires_ip_forwarding() {
    let disable_forwarding = |facts: &mut MachineFacts| {
        for (path, value) in [("forwarding", "0"), ("send_redirects", "1"), ("rp_filter", "1")] {
            facts.sysctl_values.insert(format!("net/ipv4/conf/eth7/{path}"), value.to_owned());
        }
    };
    // This is irrelevant if servers send replies directly to clients.
    assert_eq!(problems_after_change(MachineRole::Lb, disable_forwarding), []);
    let stamp_at_lb = |facts: &mut MachineFacts| {
        disable_forwarding(facts);
        facts.services[0].is_stamped_by_lb = true;
    };
    assert_eq!(
        problems_after_change(MachineRole::Lb, stamp_at_lb),
        [("rp-filter", FAULT_SEVERITY), ("forwarding", FAULT_SEVERITY), ("send-redirects", FAULT_SEVERITY)]
    );
}

#[test]
fn slow_or_unsynchronised_clocks_are_reported() {
    let find_server_problems = |change: fn(&mut MachineFacts)| problems_after_change(MachineRole::Server, change);
    assert_eq!(
        find_server_problems(|facts| facts.clock.clock_source = "hpet".to_owned()),
        [("clock-source", WARNING_SEVERITY)]
    );
    assert_eq!(
        find_server_problems(|facts| facts.clock.is_synchronised = Some(false)),
        [("clock-sync", WARNING_SEVERITY)]
    );
    assert_eq!(find_server_problems(|facts| facts.future_dated_report_count = 3), [("clock-sync", WARNING_SEVERITY)]);
    let use_random_offsets = |facts: &mut MachineFacts| {
        drop(facts.sysctl_values.insert("net/ipv4/tcp_timestamps".to_owned(), "1".to_owned()))
    };
    assert_eq!(find_server_problems(use_random_offsets), []);
    let stop_managing_timestamps = |facts: &mut MachineFacts| {
        use_random_offsets(facts);
        facts.settings.manages_tcp_timestamps = false;
    };
    assert_eq!(
        problems_after_change(MachineRole::Server, stop_managing_timestamps),
        [("tcp-timestamps", FAULT_SEVERITY)]
    );
    // An agent sets the sysctl only for services that are stamped at the server.
    let stamp_at_lb = |facts: &mut MachineFacts| {
        use_random_offsets(facts);
        facts.services[0].is_stamped_by_lb = true;
    };
    assert_eq!(problems_after_change(MachineRole::Server, stamp_at_lb), [("tcp-timestamps", FAULT_SEVERITY)]);
}

#[test]
fn announced_vips_need_a_routing_daemon_and_no_ip_rule() {
    let new_announcement = |rules: &[&str], daemon: Option<&str>| {
        let ip_rules = Ok(rules.iter().map(|rule| (*rule).to_owned()).collect());
        Some(AnnouncementFacts { routing_table_number: 7400, ip_rules, routing_daemon: daemon.map(str::to_owned) })
    };
    let announcement_problems =
        |announcement| problems_after_change(MachineRole::Lb, |facts| facts.announcement = announcement);
    assert_eq!(announcement_problems(new_announcement(&[], Some("bird"))), []);
    assert_eq!(announcement_problems(new_announcement(&[], None)), [("announce", FAULT_SEVERITY)]);
    assert_eq!(
        announcement_problems(new_announcement(&["32765: from all lookup 7400"], Some("bird"))),
        [("announce", FAULT_SEVERITY)]
    );
}

#[test]
fn unreachable_etcd_is_a_fault() {
    let find_etcd_problems = |leader: Result<String, String>| {
        problems_after_change(MachineRole::Controller, |facts| {
            let controller_facts = facts.controller_facts.as_mut().unwrap();
            controller_facts.store =
                ControllerStoreFacts::Etcd { endpoints: vec!["http://10.1.0.5:2379".to_owned()], leader };
        })
    };
    assert_eq!(find_etcd_problems(Ok("controller 10.1.0.2:7400 leads".to_owned())), []);
    assert_eq!(find_etcd_problems(Err("etcd does not answer".to_owned())), [("store", FAULT_SEVERITY)]);
}
