//! Tests of the message for each kind of invalid input.

use coreward_config::TomlSource;

use super::*;

const VALID_FLEET_TOML: &str = r#"# Our fleet.
# Ask Kim before changing it.
report_interval = "50ms"
load_ewma_alpha = 0.25
buckets = 256

[[server]]
name = "s1"
address = "10.2.0.11"
id = 7

[[server]]
name = "s2"
address = "10.2.0.12"
state = "draining"

[[service]]
name = "web"
vip = "10.200.0.1:80"

[[service]]
name = "api"
vip = "10.200.0.1:443"
policy = "pow2"
buckets = 64
servers = ["s2"]
"#;

fn parse_fleet(text: &str) -> Result<FleetConfig, String> {
    FleetConfig::parse(&TomlSource::from_text("fleet.toml", text)).map_err(|mistakes| mistakes.to_string())
}

/// Returns the error message after `old_text` has been replaced by `new_text` in the valid document.
fn error_after_replacement(old_text: &str, new_text: &str) -> String {
    assert!(VALID_FLEET_TOML.contains(old_text), "{old_text:?} is not in the good file");
    parse_fleet(&VALID_FLEET_TOML.replacen(old_text, new_text, 1)).unwrap_err()
}

#[test]
fn server_in_too_many_services_is_rejected() {
    let parse_services = |service_count: u32| {
        let mut text = "[[server]]\nname = \"s1\"\naddress = \"10.2.0.1\"\n".to_owned();
        for service in 0..service_count {
            text += &format!("[[service]]\nname = \"web{service}\"\nvip = \"10.200.0.1:{}\"\n", 80 + service);
        }
        FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text))
    };
    assert_eq!(parse_services(64).unwrap().services.len(), 64);
    let mistakes = parse_services(65).unwrap_err().to_string();
    assert!(mistakes.contains("server \"s1\" is in 65 services: expected at most 64"), "{mistakes}");
}

/// A file that was truncated (by a full disk, or by an editor during a write) must not end all services.
#[test]
fn empty_fleet_document_is_rejected() {
    for text in ["", "\n# nothing\n", "\u{feff}"] {
        let message = parse_fleet(text).unwrap_err();
        assert!(
            message.starts_with("fleet.toml: nothing in it: expected [[server]] and [[service]], or "),
            "{message}"
        );
        assert!(
            FleetConfig::parse_stored(&TomlSource::from_text("fleet.toml", text)).is_ok(),
            "the store's first document"
        );
    }
    assert_eq!(parse_fleet("load_ewma_alpha = 0.5\n").unwrap().services.len(), 0);
}

#[test]
fn valid_fleet_file_is_parsed() {
    let config = parse_fleet(VALID_FLEET_TOML).unwrap();
    assert_eq!(config.report_interval, Duration::from_millis(50));
    assert_eq!(config.load_ewma_alpha.get(), 0.25);
    assert_eq!(config.max_connection_lifetime, DEFAULT_MAX_CONNECTION_LIFETIME);
    let servers: Vec<_> =
        config.servers.iter().map(|s| (s.name.as_str(), s.id.as_ref().map(|id| id.0.get()), s.drain_state)).collect();
    assert_eq!(servers, [("s1", Some(7), ServerDrainState::Active), ("s2", None, ServerDrainState::Draining)]);
    let services: Vec<_> = config
        .services
        .iter()
        .map(|s| (s.address.to_string(), s.policy_name, s.bucket_count.get(), s.server_positions.clone()))
        .collect();
    assert_eq!(
        services,
        [
            ("10.200.0.1:80/tcp".to_owned(), coreward_model::policy::DEFAULT_POLICY_NAME, 256, vec![0, 1]),
            ("10.200.0.1:443/tcp".to_owned(), "pow2", 64, vec![1]),
        ]
    );
}

#[test]
fn fleet_defaults_are_as_documented() {
    let config = parse_fleet("[[service]]\nname = \"w\"\nvip = \"10.0.0.1:80\"\n").unwrap();
    assert_eq!(
        (config.report_interval, config.load_ewma_alpha),
        (DEFAULT_REPORT_INTERVAL, SmoothingWeight::PAPER_VALUE)
    );
    assert_eq!(config.services[0].bucket_count, BucketCount::PAPER_VALUE);
    assert!(config.services[0].server_positions.is_empty());
}

/// Texts of the valid document, each with an invalid replacement and the resulting error message.
const INVALID_FLEET_REPLACEMENTS: [(&str, &str, &str); 22] = [
    (
        "load_ewma_alpha = 0.25",
        "load_ewma_alpha = 0",
        "fleet.toml:4:19: key `load_ewma_alpha`: alpha 0: expected a number above 0, at most 1",
    ),
    (
        "load_ewma_alpha = 0.25",
        "load_ewma_alpah = 0.25",
        "fleet.toml:4:1: key `load_ewma_alpah`: is not known: expected one of `report_interval`, `table_updates`, \
         `table_lifetime`, `load_ewma_alpha`, `buckets`, `max_connection_lifetime`, `key_rotation`, `racks`, \
         `load_balancers`, `server`, `service` (nearest: `load_ewma_alpha`)",
    ),
    (
        "\"50ms\"",
        "\"5ms\"",
        "fleet.toml:3:19: key `report_interval`: \"5ms\": expected a time with its unit, from \"10ms\" to \"1s\"",
    ),
    (
        "load_ewma_alpha = 0.25",
        "listen = \"10.0.0.1:1\"",
        "fleet.toml:4:1: key `listen`: is not known here: expected it in the controller's own file",
    ),
    (
        "buckets = 256",
        "buckets = 100",
        "fleet.toml:5:11: key `buckets`: 100 buckets: expected a power of two from 1 to 2048",
    ),
    (
        "buckets = 64",
        "buckets = 4096",
        "fleet.toml:25:11: key `service.buckets`: 4096 buckets: expected a power of two from 1 to 2048",
    ),
    (
        "buckets = 256",
        "rss_key = \"6d:5a\"",
        "fleet.toml:5:1: key `rss_key`: is not known here: expected `rss_key_file = \"FILE\"` in the controller's \
         own file, with the key in FILE",
    ),
    (
        "id = 7",
        "id = 16384",
        "fleet.toml:10:6: key `server.id`: server id 16384 is out of range: expected 0 to 16383, the 14 bits that \
         a cookie holds",
    ),
    (
        "id = 7",
        "state = \"off\"",
        "fleet.toml:10:9: key `server.state`: state \"off\" is not known: expected \"active\" or \"draining\"",
    ),
    (
        "10.2.0.11",
        "10.2.0.256",
        "fleet.toml:9:11: key `server.address`: server address \"10.2.0.256\": expected an address that one host \
         can have, as \"10.2.0.11\" or \"2001:db8::11\"",
    ),
    ("\"s1\"", "\"s 1\"", "fleet.toml:8:8: key `server.name`: name \"s 1\": expected 1 to 64 bytes without blanks"),
    (
        "10.200.0.1:80",
        "2001:db8::1:80",
        "fleet.toml:19:7: key `service.vip`: VIP \"2001:db8::1:80\": expected an address that one host can have \
         and a port from 1 on, as \"10.200.0.1:80\" or \"[2001:db8::1]:80\"",
    ),
    (
        "policy = \"pow2\"",
        "policy = \"pow3\"",
        "fleet.toml:24:10: key `service.policy`: policy \"pow3\" is not known: expected \"hash\", \
         \"consistent-hash\", \"maglev\", \"bounded-load\", \"rr\", \"wrr\", \"awrr\", \"pow2\", \
         \"pow2:connections\", \"pow2:packets\", \"pow2:bytes\", \"least\", \"least:packets\", \"least:bytes\", \
         \"least:cpu\", \"crossrss\" or \"crossrss-plus\" (nearest: `pow2`)",
    ),
    (
        "policy = \"pow2\"",
        "protocol = \"sctp\"",
        "fleet.toml:24:12: key `service.protocol`: protocol \"sctp\" is not known: expected \"tcp\" or \"udp\"",
    ),
    (
        "policy = \"pow2\"",
        "consistency = \"statefull\"",
        "fleet.toml:24:15: key `service.consistency`: consistency \"statefull\" is not known: expected \
         \"stateless\", \"stateful\", \"none\", \"hash-table\" or \"beamer\" (nearest: `stateful`)",
    ),
    (
        "policy = \"pow2\"",
        "timestamps = \"client\"",
        "fleet.toml:24:14: key `service.timestamps`: who stamps, \"client\" is not known: expected \"server\", \
         \"lb\" or \"off\"",
    ),
    (
        "policy = \"pow2\"",
        "protocol = \"udp\"\nudp = \"datagram\"",
        "fleet.toml:25:7: key `service.udp`: udp \"datagram\" is not known: expected \"flow\" or \"packet\"",
    ),
    (
        "policy = \"pow2\"",
        "slow_start = \"3601s\"",
        "fleet.toml:24:14: key `service.slow_start`: \"3601s\": expected a time with its unit, from \"0s\" to \
         \"1h\"",
    ),
    (
        "id = 7",
        "weight = 101",
        "fleet.toml:10:10: key `server.weight`: weight 101: expected 0 (no new connections) to 100",
    ),
    (
        "id = 7",
        "capacity = 0.0",
        "fleet.toml:10:12: key `server.capacity`: capacity 0: expected a number above 0, at most 1000000, where 1 is a \
         typical core",
    ),
    (
        "buckets = 256",
        "key_rotation = \"0s\"",
        "fleet.toml:5:16: key `key_rotation`: \"0s\": expected a time with its unit, from \"1h\" to \"8760h\"",
    ),
    (
        "address = \"10.2.0.12\"",
        "",
        "fleet.toml:12:1: key `server.address`: is missing: expected an address that one host can have, as \
         \"10.2.0.11\" or \"2001:db8::11\"",
    ),
];

#[test]
fn each_invalid_value_is_reported_with_its_key() {
    for (old_text, new_text, message) in INVALID_FLEET_REPLACEMENTS {
        assert_eq!(error_after_replacement(old_text, new_text), message);
    }
}

/// Texts of the valid document, each with a contradictory replacement and the resulting error message.
const CONTRADICTORY_FLEET_REPLACEMENTS: [(&str, &str, &str); 22] = [
    (
        "\"s2\"",
        "\"s1\"",
        "fleet.toml:13:8: key `server.name`: server name s1 is used twice (first in line 8): expected each \
         once\nfleet.toml:26:12: key `service.servers`: server \"s2\" does not exist: expected the name of a \
         [[server]]",
    ),
    (
        "10.2.0.12",
        "10.2.0.11",
        "fleet.toml:14:11: key `server.address`: server address 10.2.0.11 is used twice (first in line 9): \
         expected each once",
    ),
    (
        "state = \"draining\"",
        "id = 7",
        "fleet.toml:15:6: key `server.id`: server id 7 is used twice (first in line 10): expected each once",
    ),
    (
        "10.200.0.1:443",
        "10.200.0.1:80",
        "fleet.toml:23:7: key `service.vip`: VIP 10.200.0.1:80/tcp is used twice (first in line 19): expected each \
         once",
    ),
    (
        "\"api\"",
        "\"web\"",
        "fleet.toml:22:8: key `service.name`: service name web is used twice (first in line 18): expected each \
         once",
    ),
    (
        "[\"s2\"]",
        "[\"s2\", \"s3\"]",
        "fleet.toml:26:18: key `service.servers`: server \"s3\" does not exist: expected the name of a [[server]]",
    ),
    (
        "[\"s2\"]",
        "[\"s2\", \"s2\"]",
        "fleet.toml:26:18: key `service.servers`: server of this service s2 is used twice (first in line 26): \
         expected each once",
    ),
    (
        "buckets = 256",
        "max_connection_lifetime = \"7201s\"\nkey_rotation = \"2h\"",
        "fleet.toml:6:16: key `key_rotation`: a key rotation every 2h, but a cookie may live 7201s \
         (`max_connection_lifetime`): expected no less than that",
    ),
    (
        "policy = \"pow2\"",
        "udp = \"flow\"",
        "fleet.toml:24:7: key `service.udp`: a TCP service has no `udp`: expected it with `protocol = \"udp\"` \
         only",
    ),
    (
        "policy = \"pow2\"",
        "protocol = \"udp\"\nconsistency = \"none\"",
        "fleet.toml:25:15: key `service.consistency`: a UDP service has no `consistency`, as datagrams carry no \
         cookie: expected `udp = \"flow\"` or `udp = \"packet\"`",
    ),
    (
        "policy = \"pow2\"",
        "protocol = \"udp\"\ntimestamps = \"off\"",
        "fleet.toml:25:14: key `service.timestamps`: a UDP service has no `timestamps`, as datagrams carry no \
         cookie: expected `udp = \"flow\"` or `udp = \"packet\"`",
    ),
    (
        "policy = \"pow2\"",
        "consistency = \"beamer\"\ntimestamps = \"server\"",
        "fleet.toml:25:14: key `service.timestamps`: timestamps by \"server\" with consistency \"beamer\", which \
         uses no cookie: expected \"off\"",
    ),
    (
        "policy = \"pow2\"",
        "consistency = \"beamer\"\ntimestamps = \"lb\"",
        "fleet.toml:25:14: key `service.timestamps`: timestamps by \"lb\" with consistency \"beamer\", which uses \
         no cookie: expected \"off\"",
    ),
    (
        "policy = \"pow2\"",
        "forwarding = \"gue\"\ntimestamps = \"lb\"",
        "fleet.toml:24:14: key `service.forwarding`: forwarding \"gue\" with timestamps by \"lb\", whose servers' \
         answers must pass the load balancer: expected \"l2\", or timestamps by \"server\" or \"off\"",
    ),
    (
        "policy = \"pow2\"",
        "forwarding = \"vxlan\"",
        "fleet.toml:24:14: key `service.forwarding`: forwarding \"vxlan\" is not known: expected \"l2\", \"ipip\" \
         or \"gue\"",
    ),
    (
        "policy = \"pow2\"",
        "forwarding = \"ipip\"\nhealth = { at = \"vip\" }",
        "fleet.toml:25:17: key `service.health.at`: checks at the VIP of a service with forwarding \"ipip\", where \
         routers would send them to a load balancer: expected \"server\"",
    ),
    (
        "policy = \"pow2\"",
        "consistency = \"stateful\"\ntimestamps = \"lb\"",
        "fleet.toml:25:14: key `service.timestamps`: timestamps by \"lb\" with consistency \"stateful\": expected \
         \"server\", who stamps the index",
    ),
    (
        "id = 7",
        "id = 2048\n[[service]]\nname = \"old\"\nvip = \"10.200.0.2:80\"\ntimestamps = \"lb\"",
        "fleet.toml:10:6: key `server.id`: server id 2048 in service \"old\", whose timestamps are by \"lb\": \
         expected 0 to 2047, the bits that its cookies hold, or none to have one drawn",
    ),
    (
        "policy = \"pow2\"",
        "consistency = \"stateful\"\ntimestamps = \"off\"",
        "fleet.toml:25:14: key `service.timestamps`: timestamps by \"off\" with consistency \"stateful\": expected \
         \"server\", who stamps the index",
    ),
    (
        "policy = \"pow2\"",
        "policy = \"pow2\"\nconsistency = \"none\"",
        "fleet.toml:25:15: key `service.consistency`: consistency \"none\" with policy \"pow2\", which would send \
         a connection's packets to several servers: expected a policy whose choice depends on the pool alone: \
         hash, consistent-hash, maglev",
    ),
    (
        "policy = \"pow2\"",
        "consistency = \"none\"",
        "fleet.toml:24:15: key `service.consistency`: consistency \"none\" with policy \"crossrss-plus\", which \
         would send a connection's packets to several servers: expected a policy whose choice depends on the pool \
         alone: hash, consistent-hash, maglev",
    ),
    (
        "10.200.0.1:80",
        "10.2.0.12:80",
        "fleet.toml:19:7: key `service.vip`: VIP 10.2.0.12 is also the address of server \"s2\": expected an \
         address of its own",
    ),
];

#[test]
fn contradictory_values_are_reported_with_their_keys() {
    for (old_text, new_text, message) in CONTRADICTORY_FLEET_REPLACEMENTS {
        assert_eq!(error_after_replacement(old_text, new_text), message);
    }
}

#[test]
fn service_settings_are_parsed() {
    let parse_settings = |keys: &str| {
        let service_mode =
            parse_fleet(&VALID_FLEET_TOML.replacen("policy = \"pow2\"", keys, 1)).unwrap().services[1].settings;
        (service_mode.consistency.name(), service_mode.timestamps.name())
    };
    let cases = [
        ("", "stateless", "server"),
        ("timestamps = \"off\"", "stateless", "off"),
        ("timestamps = \"lb\"", "stateless", "lb"),
        ("consistency = \"stateful\"", "stateful", "server"),
        ("consistency = \"hash-table\"", "hash-table", "off"),
        ("consistency = \"beamer\"\ntimestamps = \"off\"", "beamer", "off"),
        ("consistency = \"none\"\npolicy = \"maglev\"", "none", "off"),
        ("protocol = \"udp\"", "hash-table", "off"),
        ("protocol = \"udp\"\nudp = \"flow\"", "hash-table", "off"),
        ("protocol = \"udp\"\nudp = \"packet\"\npolicy = \"rr\"", "none", "off"),
    ];
    for (keys, consistency, timestamps) in cases {
        assert_eq!(parse_settings(keys), (consistency.to_owned(), timestamps), "{keys}");
    }
}

#[test]
fn one_vip_and_port_may_have_a_service_per_protocol() {
    let text = VALID_FLEET_TOML.replace("10.200.0.1:443\"", "10.200.0.1:80\"\nprotocol = \"udp\"");
    assert_eq!(parse_fleet(&text).unwrap().services[1].address.to_string(), "10.200.0.1:80/udp");
}

#[test]
fn weights_and_times_are_parsed() {
    let text = VALID_FLEET_TOML
        .replace("id = 7", "weight = 0\ncapacity = 2.5")
        .replace("buckets = 64", "slow_start = \"30s\"")
        .replace("load_ewma_alpha = 0.25", "key_rotation = \"168h\"");
    let config = parse_fleet(&text).unwrap();
    assert_eq!((config.servers[0].weight.get(), config.servers[0].capacity.map(|c| c.get())), (0, Some(2.5)));
    assert_eq!((config.servers[1].weight.get(), config.servers[1].capacity), (1, None));
    assert_eq!(config.services[1].slow_start_duration, Duration::from_secs(30));
    assert_eq!(config.key_rotation_interval, Some(Duration::from_secs(7 * 86_400)));
}

/// Returns the valid document with a list of the fleet's racks and with a rack of server s1.
fn fleet_text_with_racks() -> String {
    VALID_FLEET_TOML
        .replace("id = 7", "racks = [\"r1\"]")
        .replace("load_ewma_alpha = 0.25", "racks = [\"r1\", \"rack2\"]")
}

#[test]
fn racks_of_fleet_and_servers_are_parsed() {
    let rack_names = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
    assert_eq!(
        (
            parse_fleet(VALID_FLEET_TOML).unwrap().allowed_racks,
            parse_fleet(VALID_FLEET_TOML).unwrap().servers[0].allowed_racks.clone()
        ),
        (None, None)
    );
    let config = parse_fleet(&fleet_text_with_racks()).unwrap();
    assert_eq!(
        (config.allowed_racks, config.servers[0].allowed_racks.clone()),
        (rack_names(&["r1", "rack2"]), rack_names(&["r1"]))
    );
    let config_without_racks = parse_fleet(&VALID_FLEET_TOML.replace("id = 7", "racks = []")).unwrap();
    assert_eq!(config_without_racks.servers[0].allowed_racks, rack_names(&[]));
    // Without the fleet's list, any name is allowed.
    let config_with_any_rack = parse_fleet(&VALID_FLEET_TOML.replace("id = 7", "racks = [\"r9\"]")).unwrap();
    assert_eq!(
        (config_with_any_rack.allowed_racks, config_with_any_rack.servers[0].allowed_racks.clone()),
        (None, rack_names(&["r9"]))
    );
}

#[test]
fn unknown_and_repeated_racks_are_rejected() {
    let text = fleet_text_with_racks();
    let error_after_replacement =
        |old_text: &str, new_text: &str| parse_fleet(&text.replace(old_text, new_text)).unwrap_err();
    assert_eq!(
        error_after_replacement("[\"r1\"]", "[\"rakc2\"]"),
        "fleet.toml:10:10: key `server.racks`: rack \"rakc2\" does not exist: expected one of the fleet's `racks` \
         (nearest: `rack2`)"
    );
    assert_eq!(
        error_after_replacement("[\"r1\"]", "[\"r1\", \"r1\"]"),
        "fleet.toml:10:16: key `server.racks`: rack r1 is used twice (first in line 10): expected each once"
    );
    let unknown_key_error = error_after_replacement("racks = [\"r1\"]", "rack = \"r1\"");
    assert!(
        unknown_key_error.starts_with("fleet.toml:10:1: key `server.rack`: is not known")
            && unknown_key_error.contains("(nearest: `racks`)"),
        "{unknown_key_error}"
    );
    let wrong_type_error = error_after_replacement("[\"r1\"]", "\"r1\"");
    assert!(wrong_type_error.starts_with("fleet.toml:10:9: key `server.racks`: "), "{wrong_type_error}");
}

#[test]
fn too_many_servers_are_rejected() {
    let mut text = String::new();
    for n in 0..16_384 {
        text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.{}.{}.{}\"\n", n >> 16, n >> 8 & 255, n & 255);
    }
    // 10.0.0.0 and similar addresses are not rejected as networks, because any unicast address may be a host's.
    assert_eq!(parse_fleet(&text).unwrap().servers.len(), 16_384);
    text += "[[server]]\nname = \"one\"\naddress = \"10.9.9.9\"\n";
    assert_eq!(
        parse_fleet(&text).unwrap_err(),
        "fleet.toml:49153:1: key `server`: 16385 servers: expected at most 16384, all that a cookie holds"
    );
}

#[test]
fn too_many_services_are_rejected() {
    let mut text = String::new();
    for n in 0..1025 {
        text += &format!("[[service]]\nname = \"w{n}\"\nvip = \"10.0.0.1:{}\"\n", n + 80);
    }
    assert_eq!(
        parse_fleet(&text).unwrap_err(),
        "fleet.toml:3073:1: key `service`: 1025 services: expected at most 1024"
    );
}

/// All mistakes are reported, but a value that depends on an invalid one counts as no further mistake.
#[test]
fn all_fleet_mistakes_are_reported_at_once() {
    let text = VALID_FLEET_TOML
        .replace("10.2.0.12", "10.2.0.300")
        .replace("load_ewma_alpha = 0.25", "load_ewma_alpha = 2")
        .replace("policy = \"pow2\"", "policy = \"pow\"\nconsistency = \"none\"")
        .replace("10.200.0.1:443", "10.200.0.1:80")
        .replace("name = \"s1\"", "nane = \"s1\"");
    let mistakes = parse_fleet(&text).unwrap_err();
    let mistake_keys: Vec<&str> = mistakes.lines().map(|line| line.split(": ").nth(1).unwrap()).collect();
    let expected_keys =
        ["load_ewma_alpha", "server.name", "server.nane", "server.address", "service.vip", "service.policy"];
    assert_eq!(mistake_keys, expected_keys.map(|key| format!("key `{key}`")), "{mistakes}");
}

/// Lines to add to the second service, and the expected error message about them.
const INVALID_SERVICE_MIGRATIONS: [(&str, &str); 6] = [
    (
        "migrate_from = \"10.2.0.5\"\nmigrate_to = \"10.2.0.5\"",
        "fleet.toml:26:14: key `service.migrate_to`: `migrate_to` with `migrate_from`: expected one of the two",
    ),
    (
        "migrate_from = \"10.200.0.1\"",
        "fleet.toml:25:16: key `service.migrate_from`: `migrate_from` is the VIP 10.200.0.1: expected the load \
         balancer's own address",
    ),
    (
        "forwarding = \"gue\"\nmigrate_from = \"10.2.0.5\"",
        "fleet.toml:26:16: key `service.migrate_from`: `migrate_from` with forwarding \"gue\": expected \"l2\", as \
         the other load balancer is reached by its MAC address",
    ),
    (
        "protocol = \"udp\"\nmigrate_from = \"10.2.0.5\"",
        "fleet.toml:26:16: key `service.migrate_from`: `migrate_from` of a UDP service, whose datagrams do not \
         show what begins a flow: expected TCP",
    ),
    (
        "timestamps = \"lb\"\nmigrate_from = \"10.2.0.5\"",
        "fleet.toml:26:16: key `service.migrate_from`: `migrate_from` with consistency \"stateless\" and \
         timestamps by \"lb\": expected consistency \"stateless\", \"stateful\" or \"hash-table\", and timestamps \
         by \"server\" or \"off\"",
    ),
    (
        "migrate_to = \"10.2.0.5\"",
        "fleet.toml:25:14: key `service.migrate_to`: service \"api\" is handed over, but its server \"s2\" goes on \
         stamping new connections of service \"web\", and a server stamps those of all its services or of none: \
         expected `migrate_to` in both",
    ),
];

#[test]
fn service_migrates_either_to_or_from_another_load_balancer() {
    let error_with_line =
        |line: &str| error_after_replacement("policy = \"pow2\"\n", &format!("policy = \"pow2\"\n{line}\n"));
    let migrating_text = VALID_FLEET_TOML.replacen("policy = \"pow2\"\n", "migrate_from = \"10.2.0.5\"\n", 1);
    let config = parse_fleet(&migrating_text).unwrap();
    assert_eq!(config.services[0].other_balancer, None);
    let previous_balancer = MigrationLoadBalancer { address: [10, 2, 0, 5].into(), takes_new_connections: false };
    assert_eq!(config.services[1].other_balancer, Some(previous_balancer));
    for (line, message) in INVALID_SERVICE_MIGRATIONS {
        assert_eq!(error_with_line(line), message);
    }
}
