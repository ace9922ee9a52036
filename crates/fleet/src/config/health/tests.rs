use std::time::Duration;

use coreward_config::TomlSource;
use coreward_model::health::{
    AllServersDownTreatment, CertificateVerification, HealthProbe, HttpStatusRange, ProbeAddress,
};

use crate::config::{FleetConfig, FleetServiceConfig};

/// Certificate of a certificate authority in PEM. It is self-signed and contains no host name.
const AUTHORITY_PEM: &str = include_str!("authority.pem");

fn parse_service_with_keys(keys: &str) -> Result<FleetServiceConfig, String> {
    let text = format!("[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n{keys}");
    let config = FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text));
    config.map(|mut config| config.services.remove(0)).map_err(|mistakes| mistakes.to_string())
}

#[test]
fn missing_health_table_disables_checks() {
    let service = parse_service_with_keys("").unwrap();
    assert_eq!((service.health_check, service.when_all_down), (None, AllServersDownTreatment::FailOpen));
    assert_eq!(parse_service_with_keys("[service.health]\ncheck = \"none\"\n").unwrap().health_check, None);
    assert_eq!(
        parse_service_with_keys("when_all_down = \"drop\"\n").unwrap().when_all_down,
        AllServersDownTreatment::Drop
    );
}

#[test]
fn empty_health_table_checks_tcp() {
    let check = parse_service_with_keys("[service.health]\n").unwrap().health_check.unwrap();
    assert_eq!((&check.probe, check.probe_address, check.probe_port), (&HealthProbe::Tcp, ProbeAddress::Vip, None));
    assert_eq!((check.interval, check.timeout), (Duration::from_secs(2), Duration::from_secs(1)));
    assert_eq!((check.thresholds.rise(), check.thresholds.fall(), check.jitter.get()), (2, 3, 0.1));
    assert_eq!(
        parse_service_with_keys("timestamps = \"lb\"\n[service.health]\n").unwrap().health_check.unwrap().probe_address,
        ProbeAddress::Server
    );
}

#[test]
fn http_host_may_be_name_or_address_with_optional_port() {
    let parse_with_host = |host: &str| {
        parse_service_with_keys(&format!("[service.health]\ncheck = \"http\"\nat = \"server\"\nhost = \"{host}\"\n"))
    };
    for valid in ["www.example.org", "www.example.org:8443", "10.0.0.1:80", "[2001:db8::1]", "[2001:db8::1]:8443"] {
        let service = parse_with_host(valid).unwrap_or_else(|error| panic!("{error}"));
        let HealthProbe::Http(http) = service.health_check.unwrap().probe else { panic!("{valid}") };
        assert_eq!(http.host.as_deref(), Some(valid));
    }
    for invalid in ["2001:db8::1", "[2001:db8::1", "[10.0.0.1]", "www:http", "www:65536", "www:+80", ":80", ""] {
        assert!(parse_with_host(invalid).unwrap_err().contains("expected a host, perhaps with a port"), "{invalid}");
    }
}

#[test]
fn all_keys_of_http_checks_are_parsed() {
    let keys = "[service.health]\ncheck = \"http\"\nat = \"server\"\nport = 8080\npath = \"/healthz?full=1\"\n\
                host = \"www.example.org\"\nexpect = \"204\"\ninterval = \"500ms\"\njitter = 0\n";
    let check = parse_service_with_keys(keys).unwrap().health_check.unwrap();
    assert_eq!(
        (check.probe_address, check.probe_port, check.interval),
        (ProbeAddress::Server, Some(8080), Duration::from_millis(500))
    );
    let HealthProbe::Http(http) = check.probe else { panic!("{check:?}") };
    assert_eq!((http.path_and_query.as_str(), http.host.as_deref()), ("/healthz?full=1", Some("www.example.org")));
    assert_eq!(http.expected_status, HttpStatusRange::new(204, 204).unwrap());

    let parse_verification =
        |keys: &str| match parse_service_with_keys(&format!("[service.health]\ncheck = \"https\"\n{keys}"))
            .unwrap()
            .health_check
        {
            Some(check) => match check.probe {
                HealthProbe::Https(_, verification) => verification,
                other => panic!("{other:?}"),
            },
            None => panic!("no check"),
        };
    assert_eq!(parse_verification(""), CertificateVerification::System);
    assert_eq!(parse_verification("verify = false\n"), CertificateVerification::Off);
    let authorities = CertificateVerification::PemAuthorities(AUTHORITY_PEM.to_owned());
    assert_eq!(parse_verification(&format!("ca = '''\n{AUTHORITY_PEM}'''\n")), authorities);
}

/// Invalid keys of `[service.health]`, with the messages about them.
const INVALID_HEALTH_CHECKS: [(&str, &str); 12] = [
    (
        "check = \"htpp\"",
        "fleet.toml:5:9: key `service.health.check`: check \"htpp\" is not known: expected \"tcp\", \"http\", \
         \"https\", \"agent\" or \"none\" (nearest: `http`)",
    ),
    (
        "path = \"/\"",
        "fleet.toml:5:8: key `service.health.path`: check \"tcp\" has no `path`: expected it with `check` = \
         \"http\" or \"https\" only",
    ),
    (
        "check = \"agent\"\nport = 80",
        "fleet.toml:6:8: key `service.health.port`: check \"agent\" has no `port`: expected it with `check` = \
         \"tcp\" or \"http\" or \"https\" only",
    ),
    (
        "check = \"http\"\npath = \"healthz\"",
        "fleet.toml:6:8: key `service.health.path`: path \"healthz\": expected a path that begins with a slash, \
         without blanks, as \"/healthz\"",
    ),
    (
        "check = \"http\"\nexpect = \"400-200\"",
        "fleet.toml:6:10: key `service.health.expect`: \"400-200\": expected status codes from 100 to 599, as \
         \"204\" or \"200-399\"",
    ),
    (
        "check = \"http\"\nhost = \"a b\"",
        "fleet.toml:6:8: key `service.health.host`: host \"a b\": expected a host, perhaps with a port, as \
         \"www.example.org\" or \"[2001:db8::1]:8443\"",
    ),
    ("fall = 0", "fleet.toml:5:8: key `service.health.fall`: 0: expected a whole number from 1 to 100"),
    (
        "interval = \"10ms\"",
        "fleet.toml:5:12: key `service.health.interval`: \"10ms\": expected a time with its unit, from \"100ms\" \
         to \"1h\"",
    ),
    ("jitter = 1.5", "fleet.toml:5:10: key `service.health.jitter`: 1.5: expected a part of the interval, from 0 to 1"),
    (
        "check = \"https\"\nca = \"me\"",
        "fleet.toml:6:6: key `service.health.ca`: no certificate in it: expected one or more certificates \
         (\"-----BEGIN CERTIFICATE-----\" ...)",
    ),
    (
        "at = \"lb\"",
        "fleet.toml:5:6: key `service.health.at`: place \"lb\" is not known: expected \"vip\" or \"server\"",
    ),
    (
        "paths = \"/\"",
        "fleet.toml:5:1: key `service.health.paths`: is not known: expected one of `check`, `at`, `port`, \
         `interval`, `timeout`, `rise`, `fall`, `jitter`, `path`, `host`, `expect`, `ca`, `verify` (nearest: \
         `path`)",
    ),
];

#[test]
fn invalid_health_checks_are_rejected() {
    for (keys, message) in INVALID_HEALTH_CHECKS {
        assert_eq!(parse_service_with_keys(&format!("[service.health]\n{keys}\n")).unwrap_err(), message);
    }
    let contradicting_keys =
        format!("[service.health]\ncheck = \"https\"\nverify = false\nca = '''\n{AUTHORITY_PEM}'''\n");
    assert_eq!(
        parse_service_with_keys(&contradicting_keys).unwrap_err(),
        "fleet.toml:6:10: key `service.health.verify`: `verify = false` with `ca`: expected one of the two"
    );
    let udp_health = "protocol = \"udp\"\n[service.health]\n";
    assert_eq!(
        parse_service_with_keys(udp_health).unwrap_err(),
        "fleet.toml:5:1: key `service.health`: check \"tcp\" of a UDP service: expected `port`, a TCP port that \
         answers for it, or `check = \"agent\"`"
    );
    assert!(
        parse_service_with_keys(&format!("{udp_health}port = 5353\n")).is_ok()
            && parse_service_with_keys(&format!("{udp_health}check = \"agent\"\n")).is_ok()
    );
    let lb_stamped_health = "timestamps = \"lb\"\n[service.health]\nat = \"vip\"\n";
    assert!(
        parse_service_with_keys(lb_stamped_health)
            .unwrap_err()
            .contains("would stamp its own connections: expected \"server\"")
    );
    assert!(
        parse_service_with_keys("when_all_down = \"open\"\n")
            .unwrap_err()
            .contains("expected \"fail-open\" or \"drop\"")
    );
}
