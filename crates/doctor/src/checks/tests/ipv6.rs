//! Tests of checks for servers with IPv6 services.

use super::*;

/// Returns facts about a server whose only service has an IPv6 VIP. The VIP is on `device`.
pub(super) fn ipv6_server_facts(device: &str) -> MachineFacts {
    let mut facts = facts_without_problems(MachineRole::Server);
    let vip = "2001:db8::1".parse().unwrap();
    facts.services[0].address.vip_and_port = std::net::SocketAddr::new(vip, 80);
    let host_mask = std::net::IpAddr::from([0xff; 16]);
    facts.addresses.push(DeviceAddress { device_name: device.to_owned(), address: vip, mask: host_mask });
    for device in ["lo", "eth7"] {
        facts.sysctl_values.insert(ipv6_disabling_sysctl_path(device), "0".to_owned());
    }
    facts
}

#[test]
fn ipv6_vip_on_another_device_is_moved_to_lo() {
    assert_eq!(addresses::check_vips(&ipv6_server_facts("lo"))[0].severity, FindingSeverity::Ok);
    let vip_finding = &addresses::check_vips(&ipv6_server_facts("eth7"))[0];
    assert_eq!(vip_finding.severity, FAULT_SEVERITY);
    assert_eq!(vip_finding.observation, "VIP 2001:db8::1 is on eth7: expected lo");
    let expected_remedy = "ip address add 2001:db8::1/128 dev lo; ip address delete 2001:db8::1/128 dev eth7";
    assert_eq!(vip_finding.remedies[0].shell_command, expected_remedy);
}

#[test]
fn ipv6_service_requires_ipv6_and_ignores_arp_sysctls() {
    let mut facts = ipv6_server_facts("lo");
    facts.sysctl_values.insert("net/ipv4/conf/eth7/arp_ignore".to_owned(), "0".to_owned());
    assert!(addresses::check_arp_ignore(&facts).is_empty());
    assert!(addresses::check_ipv6(&facts).iter().all(|finding| finding.severity == FindingSeverity::Ok));
    facts.sysctl_values.insert(ipv6_disabling_sysctl_path("eth7"), "1".to_owned());
    facts.sysctl_values.remove(&ipv6_disabling_sysctl_path("lo"));
    let observations: Vec<String> =
        addresses::check_ipv6(&facts).into_iter().map(|finding| finding.observation).collect();
    let expected = ["the kernel has no IPv6 at lo: expected it", "net.ipv6.conf.eth7.disable_ipv6 is 1: expected 0"];
    assert_eq!(observations, expected);
    assert!(addresses::check_ipv6(&facts_without_problems(MachineRole::Server)).is_empty());
}

#[test]
fn address_is_in_network_only_of_the_same_family() {
    let own_address = DeviceAddress {
        device_name: "eth7".to_owned(),
        address: "2001:db8::1".parse().unwrap(),
        mask: "ffff:ffff:ffff:ffff::".parse().unwrap(),
    };
    assert!(own_address.shares_network_with("2001:db8::2:3".parse().unwrap()));
    assert!(!own_address.shares_network_with("2001:db8:1::2".parse().unwrap()));
    assert!(!own_address.shares_network_with("10.1.1.1".parse().unwrap()));
}

#[test]
fn ipv6_services_require_hashing_of_ports() {
    let mut ipv6_facts = ipv6_server_facts("lo");
    assert_eq!(rss::check_port_hashing(&ipv6_facts)[0].severity, FindingSeverity::Ok);
    device_mut(&mut ipv6_facts).port_hashing_by_flow_type.insert(RssFlowType::Tcp6, false);
    let finding = &rss::check_port_hashing(&ipv6_facts)[0];
    assert_eq!(
        (finding.severity, finding.observation.as_str()),
        (WARNING_SEVERITY, "eth7 hashes tcp6 by addresses alone")
    );
    assert_eq!(finding.remedies[0].shell_command, "ethtool -N eth7 rx-flow-hash tcp6 sdfn");
    device_mut(&mut ipv6_facts).port_hashing_by_flow_type.remove(&RssFlowType::Tcp6);
    assert_eq!(rss::check_port_hashing(&ipv6_facts)[0].severity, FindingSeverity::Unknown);
}

#[test]
fn stamping_ipv6_at_lb_requires_only_ipv6_forwarding() {
    let stamp_ipv6_at_lb = |forwarding: &'static str| {
        move |facts: &mut MachineFacts| {
            facts.services[0].is_stamped_by_lb = true;
            facts.services[0].address.vip_and_port.set_ip("2001:db8::1".parse().unwrap());
            facts.sysctl_values.insert("net/ipv4/conf/eth7/forwarding".to_owned(), "0".to_owned());
            facts.sysctl_values.insert(IPV6_FORWARDING_SYSCTL.to_owned(), forwarding.to_owned());
        }
    };
    let find_forwarding_problems = |forwarding| {
        problems_after_change(MachineRole::Lb, stamp_ipv6_at_lb(forwarding))
            .into_iter()
            .filter(|(check, _)| *check == "forwarding")
            .count()
    };
    assert_eq!((find_forwarding_problems("0"), find_forwarding_problems("1")), (1, 0));
}
