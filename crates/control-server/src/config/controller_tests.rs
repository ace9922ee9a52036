//! Tests of the message for each kind of invalid input in the controller's own file.

use std::time::Duration;

use coreward_config::TomlSource;

use super::*;

const CONTROLLER_TOML: &str = "listen = \"127.0.0.1:7400\"\nstore = \"/var/lib/coreward/controller.redb\"\n";

fn parse_controller_config(text: &str) -> Result<ControllerConfig, String> {
    let source = TomlSource::from_text("/etc/coreward/controller.toml", text);
    ControllerConfig::parse(&source).map_err(|mistakes| mistakes.to_string())
}

#[test]
fn controller_file_is_parsed_and_mistakes_name_their_keys() {
    let config = parse_controller_config(&format!("{CONTROLLER_TOML}fleet = \"fleet.toml\"\n")).unwrap();
    assert_eq!(config.fleet_file.as_deref(), Some(Path::new("/etc/coreward/fleet.toml")));
    assert!(parse_controller_config(CONTROLLER_TOML).unwrap().fleet_file.is_none());
    let mistakes = parse_controller_config(
        "stores = \"x\"\nrss_key = \"6d:5a\"\nload_ewma_alpha = 0.5\n[[server]]\nname = \"s1\"\n",
    )
    .unwrap_err();
    let file_path = "/etc/coreward/controller.toml";
    assert_eq!(
        mistakes,
        format!(
            "{file_path}:1:1: key `stores`: is not known: expected one of `listen`, `api`, `token_directory`, `store`, \
             `etcd`, \
             `metrics`, `fleet`, `rss_key_file`, `tls`, `revoked_certificates`, `allow_plaintext` (nearest: `store`)\n\
             {file_path}:1:1: key `listen`: is missing: expected an address and a port, as \"10.1.0.1:7400\"\n\
             {file_path}:1:1: neither `store` nor [etcd]: expected `store = \"/var/lib/coreward/controller.redb\"`, or \
             [etcd] for \
             several controllers\n\
             {file_path}:2:1: key `rss_key`: is not known here: expected `rss_key_file = \"FILE\"`, with the key in \
             FILE, \
             as it \
             is a secret\n\
             {file_path}:3:1: key `load_ewma_alpha`: is not known here: expected it in the fleet's own file, which \
             `fleet = \
             \"fleet.toml\"` names here\n\
             {file_path}:4:3: key `server`: is not known here: expected it in the fleet's own file, which `fleet = \
             \"fleet.toml\"` names here"
        )
    );
}

#[test]
fn reload_names_keys_that_require_restart() {
    let old_config = parse_controller_config(CONTROLLER_TOML).unwrap();
    let keys_needing_restart =
        |text: &str| old_config.config_keys_needing_restart(&parse_controller_config(text).unwrap());
    assert!(keys_needing_restart(CONTROLLER_TOML).is_empty());
    let reloadable_text =
        format!("{CONTROLLER_TOML}fleet = \"fleet.toml\"\nrevoked_certificates = [\"{}\"]\n", "ab".repeat(32));
    assert!(keys_needing_restart(&reloadable_text).is_empty());
    assert_eq!(keys_needing_restart(&CONTROLLER_TOML.replace("7400", "7410")), ["listen"]);
    assert_eq!(keys_needing_restart(&CONTROLLER_TOML.replace("controller.redb", "other.redb")), ["store"]);
    for (key, value) in [
        ("api", "\"127.0.0.1:7999\""),
        ("metrics", "\"127.0.0.1:7998\""),
        ("token_directory", "\"/var/lib/other\""),
        ("allow_plaintext", "true"),
    ] {
        assert_eq!(keys_needing_restart(&format!("{CONTROLLER_TOML}{key} = {value}\n")), [key]);
    }
}

/// A mistake in the file does not hide other mistakes.
#[test]
fn all_mistakes_are_reported_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("controller.toml");
    let text = "listen = 5\napi = \"10.1.0.1:7401\"\nstore = \"s\"\nfoo = 1\n[etcd]\nendpoints = [\"https://a:1\"]\n";
    let mistakes =
        ControllerConfig::parse(&TomlSource::from_text(file.to_str().unwrap(), text)).unwrap_err().shown_diagnostics;
    let keys: Vec<&str> = mistakes.iter().map(|mistake| &*mistake.key).collect();
    assert_eq!(keys, ["listen", "api", "foo", "etcd"], "{mistakes:?}");

    let text = "listen = 5\nstore = \"s\"\n[tls]\nca = \"ca\"\ncertificate = \"crt\"\nkey = \"key\"\n";
    let mistakes =
        ControllerConfig::parse(&TomlSource::from_text(file.to_str().unwrap(), text)).unwrap_err().shown_diagnostics;
    let keys: Vec<&str> = mistakes.iter().map(|mistake| &*mistake.key).collect();
    assert_eq!(keys, ["listen", "tls.ca", "tls.certificate", "tls.key"], "{mistakes:?}");
}

const LISTEN_TOML_LINE: &str = "listen = \"127.0.0.1:7400\"\n";
const ETCD_TOML_SECTION: &str = "[etcd]\nendpoints = [\"http://10.1.0.5:2379\", \"http://10.1.0.6:2379\"]\n";

#[test]
fn etcd_section_is_parsed() {
    let StoreLocation::Etcd(config) =
        parse_controller_config(&format!("{LISTEN_TOML_LINE}{ETCD_TOML_SECTION}")).unwrap().store
    else {
        panic!("in etcd")
    };
    assert_eq!(config.endpoints, ["http://10.1.0.5:2379", "http://10.1.0.6:2379"]);
    assert_eq!((config.key_prefix.as_str(), config.lease_duration), ("/coreward", Duration::from_secs(5)));
    assert_eq!((config.advertised_address, config.tls), ("127.0.0.1:7400".parse().unwrap(), None));
    assert_eq!(config.advertised_api_url, None, "it listens on its own host only");
    let config_with_api_url =
        format!("{LISTEN_TOML_LINE}{ETCD_TOML_SECTION}advertise_api = \"https://c1.example:443\"\n");
    let StoreLocation::Etcd(config) = parse_controller_config(&config_with_api_url).unwrap().store else {
        panic!("in etcd")
    };
    assert_eq!(config.advertised_api_url.as_deref(), Some("https://c1.example:443"));
    let tls_section =
        "[etcd]\nendpoints = [\"https://a:1\"]\ntls = { ca = \"ca.pem\", certificate = \"c.pem\", key = \"k.pem\" }\n";
    let StoreLocation::Etcd(config) =
        parse_controller_config(&format!("{LISTEN_TOML_LINE}{tls_section}")).unwrap().store
    else {
        panic!("in etcd")
    };
    assert_eq!(config.tls.unwrap().client_certificate_and_key_files.unwrap().1, Path::new("/etc/coreward/k.pem"));
}

/// Asserts that the error begins with the file's path and `message`.
fn expect_mistake(text: &str, message: &str) {
    let mistakes = parse_controller_config(text).unwrap_err();
    let expected_prefix = format!("/etc/coreward/controller.toml:{message}");
    assert!(mistakes.starts_with(&expected_prefix), "{mistakes}\nexpected: {expected_prefix}");
}

#[test]
fn store_and_etcd_are_mutually_exclusive() {
    let cases = [
        (LISTEN_TOML_LINE.to_owned(), "1:1: neither `store` nor [etcd]: expected"),
        (
            format!("{CONTROLLER_TOML}{ETCD_TOML_SECTION}"),
            "3:1: key `etcd`: both `store` and [etcd]: expected one of them",
        ),
        (
            format!("fleet = \"f.toml\"\n{LISTEN_TOML_LINE}{ETCD_TOML_SECTION}"),
            "1:9: key `fleet`: several controllers may each have another file",
        ),
        (
            format!("listen = \"0.0.0.0:7400\"\nallow_plaintext = true\n{ETCD_TOML_SECTION}"),
            "3:1: key `etcd`: others cannot reach 0.0.0.0:7400: expected `advertise`",
        ),
    ];
    for (text, message) in cases {
        expect_mistake(&text, message);
    }
}

#[test]
fn etcd_prefix_with_a_reserved_segment_is_rejected() {
    for nested in ["/coreward/parts", "/a/leader/b", "/manifest"] {
        let error_text =
            parse_controller_config(&format!("{LISTEN_TOML_LINE}{ETCD_TOML_SECTION}prefix = {nested:?}\n"))
                .unwrap_err()
                .to_string();
        assert!(error_text.contains("no segment of leader, manifest, parts"), "{error_text}");
    }
}

#[test]
fn invalid_values_of_etcd_are_rejected() {
    let cases = [
        (
            format!("{LISTEN_TOML_LINE}{ETCD_TOML_SECTION}lease = \"2500ms\"\n"),
            "4:9: key `etcd.lease`: a lease in parts of a second",
        ),
        (
            format!("{LISTEN_TOML_LINE}{ETCD_TOML_SECTION}lease = \"1s\"\n"),
            "4:9: key `etcd.lease`: \"1s\": expected a time with its unit, from",
        ),
        (
            format!("{LISTEN_TOML_LINE}{ETCD_TOML_SECTION}prefix = \"/a/\"\n"),
            "4:10: key `etcd.prefix`: \"/a/\": expected what all keys",
        ),
        (
            format!("{LISTEN_TOML_LINE}[etcd]\nendpoints = [\"10.1.0.5:2379\"]\n"),
            "3:14: key `etcd.endpoints`: \"10.1.0.5:2379\": expected a member of etcd",
        ),
        (
            format!("{LISTEN_TOML_LINE}[etcd]\nendpoints = [\"https://a:1\"]\n"),
            "3:14: key `etcd.endpoints`: https://a:1: expected [etcd.tls] with `ca`",
        ),
        (
            format!("{LISTEN_TOML_LINE}[etcd]\nendpoints = [\"http://a:1\", \"http://a:1\"]\n"),
            "3:28: key `etcd.endpoints`: http://a:1 is named twice",
        ),
        (
            format!("{LISTEN_TOML_LINE}{ETCD_TOML_SECTION}advertise_api = \"http://c1:7401\"\n"),
            "4:17: key `etcd.advertise_api`: \"http://c1:7401\": expected where an API is, as \"https://",
        ),
        (format!("{LISTEN_TOML_LINE}[etcd]\nendpoints = []\n"), "2:1: key `etcd`: no endpoints: expected at least one"),
    ];
    for (text, message) in cases {
        expect_mistake(&text, message);
    }
}

#[test]
fn missing_certificate_file_is_rejected() {
    let text = CONTROLLER_TOML.replace("127.0.0.1", "10.1.0.1");
    assert!(!parse_controller_config(&text).unwrap().allow_plaintext);
    assert!(parse_controller_config(&format!("{text}allow_plaintext = true\n")).unwrap().allow_plaintext);
    let missing_file_error = parse_controller_config(&format!(
        "{text}[tls]\nca = \"none.crt\"\ncertificate = \"own.crt\"\nkey = \"own.key\"\n"
    ));
    assert!(missing_file_error.unwrap_err().starts_with(
        "/etc/coreward/controller.toml:4:6: key `tls.ca`: /etc/coreward/none.crt: No such file or directory"
    ));
}

#[test]
fn revoked_certificates_are_sha256_fingerprints() {
    let text = format!("{CONTROLLER_TOML}revoked_certificates = [\"AB:CD\"]\n");
    assert_eq!(
        parse_controller_config(&text).unwrap_err(),
        "/etc/coreward/controller.toml:3:25: key `revoked_certificates`: fingerprint \"AB:CD\": expected the 32 bytes \
         of a SHA-256 in hexadecimal, as `coreward certs show` prints them"
    );
    let fingerprint = "AB".repeat(32);
    let config =
        parse_controller_config(&format!("{CONTROLLER_TOML}revoked_certificates = [\"{fingerprint}\"]\n")).unwrap();
    assert!(config.revoked_certificates[0].to_string().starts_with("AB:AB:"));
}
