use coreward_config::TomlSource;
use coreward_model::consistency::CookieStamper;
use coreward_model::forwarding::ForwardingMode;
use coreward_model::health::ProbeAddress;

use super::{FleetConfig, MigrationLoadBalancer};

fn parse_fleet_with_service(vip: &str, keys: &str) -> Result<FleetConfig, String> {
    let server = "[[server]]\nname = \"s1\"\naddress = \"10.2.0.11\"\n";
    let text = format!("{server}[[service]]\nname = \"web\"\nvip = \"{vip}\"\n{keys}\n");
    FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).map_err(|mistakes| mistakes.to_string())
}

#[test]
fn service_may_have_an_ipv6_vip() {
    for keys in [
        "",
        "timestamps = \"off\"",
        "consistency = \"hash-table\"",
        "consistency = \"beamer\"",
        "protocol = \"udp\"",
        "consistency = \"none\"\npolicy = \"maglev\"",
    ] {
        let config = parse_fleet_with_service("[2001:DB8:0::1]:80", keys).unwrap();
        assert_eq!(config.services[0].address.vip_and_port, "[2001:db8::1]:80".parse().unwrap(), "{keys}");
    }
}

#[test]
fn same_vip_in_two_notations_is_rejected_as_a_duplicate() {
    let second_service = "[[service]]\nname = \"api\"\nvip = \"[2001:db8:0:0::1]:80\"";
    let error = parse_fleet_with_service("[2001:db8::1]:80", second_service).unwrap_err();
    assert!(error.contains("VIP [2001:db8::1]:80/tcp is used twice (first in line 6)"), "{error}");
}

#[test]
fn unusable_vip_is_rejected_with_the_reason() {
    for (vip, reason) in [
        ("[::]:80", "is the unspecified address"),
        ("[::1]:80", "is the loopback address"),
        ("[ff02::1]:80", "is a multicast address"),
        ("[fe80::1]:80", "is a link-local address"),
        ("[febf::1]:80", "is a link-local address"),
        ("[2001:db8::1%3]:80", "has a zone"),
        ("[::ffff:10.200.0.1]:80", "is an IPv4-mapped address"),
        ("[2001:db8::1]:0", "has port 0"),
        ("10.200.0.1:0", "has port 0"),
        ("224.0.0.1:80", "is no address of one host"),
    ] {
        let expected_error = format!(
            "fleet.toml:6:7: key `service.vip`: VIP {vip:?} {reason}: expected an address that one host can have and a \
             port from 1 on, as \"10.200.0.1:80\" or \"[2001:db8::1]:80\""
        );
        assert_eq!(parse_fleet_with_service(vip, "").unwrap_err(), expected_error);
    }
}

#[test]
fn invalid_settings_for_ipv6_are_rejected_with_their_line() {
    for (keys, message) in [
        (
            "migrate_to = \"fe80::9\"",
            "7:14: key `service.migrate_to`: load balancer's address \"fe80::9\" is a link-local address: expected an \
             address that one host can have, as \"10.2.0.11\" or \"2001:db8::11\"",
        ),
        (
            "migrate_from = \"2001:db8::1\"",
            "7:16: key `service.migrate_from`: `migrate_from` is the VIP 2001:db8::1: expected the load balancer's own \
             address",
        ),
        (
            "health = { at = \"vip\" }",
            "7:17: key `service.health.at`: checks at the VIP of a service with servers whose addresses are of another \
             family: expected \"server\"",
        ),
    ] {
        assert_eq!(parse_fleet_with_service("[2001:db8::1]:80", keys).unwrap_err(), format!("fleet.toml:{message}"));
    }
}

#[test]
fn ipv6_service_may_migrate_from_a_balancer_of_either_family() {
    for address in ["2001:db8::5", "10.2.0.5"] {
        let config = parse_fleet_with_service("[2001:db8::1]:80", &format!("migrate_from = {address:?}")).unwrap();
        let previous_balancer =
            MigrationLoadBalancer { address: address.parse().unwrap(), takes_new_connections: false };
        assert_eq!(config.services[0].other_balancer, Some(previous_balancer));
    }
}

#[test]
fn servers_of_other_family_are_checked_at_their_own_address() {
    let config = parse_fleet_with_service("[2001:db8::1]:80", "[service.health]").unwrap();
    assert_eq!(config.services[0].health_check.as_ref().unwrap().probe_address, ProbeAddress::Server);
    let server = "[[server]]\nname = \"s1\"\naddress = \"2001:db8::11\"\n";
    let service = "[[service]]\nname = \"web\"\nvip = \"[2001:db8::1]:80\"\n[service.health]\n";
    let config = FleetConfig::parse(&TomlSource::from_text("fleet.toml", &format!("{server}{service}"))).unwrap();
    assert_eq!(config.services[0].health_check.as_ref().unwrap().probe_address, ProbeAddress::Vip);
}

fn parse_fleet_with_server(address: &str, keys: &str) -> Result<FleetConfig, String> {
    let server = format!("[[server]]\nname = \"s1\"\naddress = \"{address}\"\n");
    let text = format!("{server}[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n{keys}\n");
    FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).map_err(|mistakes| mistakes.to_string())
}

#[test]
fn server_may_have_an_ipv6_address() {
    let config = parse_fleet_with_server("2001:db8::11", "[service.health]").unwrap();
    assert_eq!(config.servers[0].address, "2001:db8::11".parse::<std::net::IpAddr>().unwrap());
    assert_eq!(config.services[0].health_check.as_ref().unwrap().probe_address, ProbeAddress::Server);
    let expected_error = "fleet.toml:3:11: key `server.address`: server address \"fe80::1\" is a link-local address: \
                    expected an address that one host can have, as \"10.2.0.11\" or \"2001:db8::11\"";
    assert_eq!(parse_fleet_with_server("fe80::1", "").unwrap_err(), expected_error);
}

#[test]
fn lb_side_stamping_is_allowed_for_either_address_family() {
    for vip in ["10.200.0.1:80", "[2001:db8::1]:80"] {
        assert_eq!(
            parse_fleet_with_service(vip, "timestamps = \"lb\"").unwrap().services[0].settings.timestamps,
            CookieStamper::LoadBalancer
        );
    }
    assert!(parse_fleet_with_server("2001:db8::11", "timestamps = \"lb\"").is_ok());
}

#[test]
fn outer_header_may_be_of_either_address_family() {
    for vip in ["10.200.0.1:80", "[2001:db8::1]:80"] {
        for address in ["10.2.0.11", "2001:db8::11"] {
            for forwarding in ForwardingMode::ALL {
                let server = format!("[[server]]\nname = \"s1\"\naddress = \"{address}\"\n");
                let service = format!("[[service]]\nname = \"web\"\nvip = \"{vip}\"\n");
                let text = format!("{server}{service}forwarding = \"{}\"\n", forwarding.name());
                let config = FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap();
                assert_eq!(config.services[0].settings.forwarding, forwarding, "{vip} {address}");
            }
        }
    }
}
