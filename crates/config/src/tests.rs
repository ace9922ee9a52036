//! Tests that every kind of mistake is reported, and that schema and parser accept the same files.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_model::rss::RssKey;
use serde_json::json;

use crate::secret::read_secret_checking_owner;
use crate::{
    BoundedDuration, BoundedInteger, Diagnostics, LocatedValue, MILLISECOND_NS, PrintableName, SECOND_NS, Secret,
    Spanned, TomlSource, build_file_schema, config_enum, config_struct,
};

config_struct! {
    /// Configuration file of an example daemon.
    #[derive(Debug)]
    struct DaemonConfig {
        /// Name of the daemon.
        name: LocatedValue<PrintableName>,
        /// Interval between two polls.
        interval: Option<BoundedDuration<{ 10 * MILLISECOND_NS }, { SECOND_NS }>>,
        /// Number of workers.
        count: BoundedInteger<1, 9> = BoundedInteger(3),
        /// Position of the daemon.
        place: Option<TestPositionTable>,
        /// File that contains the hash key.
        key_file: Option<Secret<RssKey>>,
        /// Services of the daemon.
        services as "service": Vec<Spanned<ServiceSection>>,
    }
    elsewhere {
        "key" => "`key_file`",
    }
}

config_struct! {
    #[derive(Debug)]
    struct ServiceSection {
        /// Address at which the service listens.
        listen: LocatedValue<SocketAddr>,
    }
}

config_enum! {
    #[derive(Debug, PartialEq)]
    enum TestPositionTable by "kind" {
        /// Position on this machine.
        Here as "here" {},
        /// Position in a file.
        There as "there" {
            /// Path of the file.
            path: PathBuf,
        },
    }
}

fn read_daemon_config(source: &TomlSource) -> Result<DaemonConfig, Diagnostics> {
    source.read_as(|daemon: DaemonConfig, reader| {
        if let [first, second, ..] = &daemon.services[..]
            && first.get_ref().listen.value.is_some()
            && first.get_ref().listen.value == second.get_ref().listen.value
        {
            reader.report_mistake(second.get_ref().listen.span.clone(), "is used twice: expected each once");
        }
        Some(daemon)
    })
}

fn parse_daemon_config(text: &str) -> Result<DaemonConfig, Diagnostics> {
    read_daemon_config(&TomlSource::from_text("daemon.toml", text))
}

fn diagnostic_lines(text: &str) -> Vec<String> {
    parse_daemon_config(text).unwrap_err().to_string().lines().map(str::to_owned).collect()
}

#[test]
fn valid_file_is_parsed() {
    let daemon = parse_daemon_config("name = \"a\"\n").unwrap();
    assert_eq!((daemon.name.value, daemon.interval, daemon.count.0), (Some(PrintableName("a".into())), None, 3));
    let text = "name = \"a\"\ninterval = \"0.5s\"\ncount = 0x9\nplace = { kind = \"there\", path = \"/p\" }\n\
                [[service]]\nlisten = \"10.0.0.1:80\"\n";
    let daemon = parse_daemon_config(text).unwrap();
    assert_eq!(daemon.interval.unwrap().0, Duration::from_millis(500));
    assert_eq!((daemon.count.0, daemon.place), (9, Some(TestPositionTable::There { path: "/p".into() })));
    assert_eq!(daemon.services[0].get_ref().listen.value, Some("10.0.0.1:80".parse().unwrap()));
}

#[test]
fn all_mistakes_of_a_file_are_reported_together() {
    let text = "nmae = \"a\"\ninterval = \"9ms\"\ncount = 10\n[[service]]\nlisten = \"10.0.0.256:80\"\n[[service]]\n";
    assert_eq!(
        diagnostic_lines(text),
        [
            "daemon.toml:1:1: key `nmae`: is not known: expected one of `name`, `interval`, `count`, `place`, \
             `key_file`, `service` (nearest: `name`)",
            "daemon.toml:1:1: key `name`: is missing: expected 1 to 64 bytes without blanks",
            "daemon.toml:2:12: key `interval`: \"9ms\": expected a time with its unit, from \"10ms\" to \"1s\"",
            "daemon.toml:3:9: key `count`: 10: expected a whole number from 1 to 9",
            "daemon.toml:5:10: key `service.listen`: \"10.0.0.256:80\": expected an address and a port, as \
             \"10.1.0.1:7400\"",
            "daemon.toml:6:1: key `service.listen`: is missing: expected an address and a port, as \"10.1.0.1:7400\"",
        ]
    );
}

#[test]
fn each_diagnostic_names_the_value_and_the_expected_values() {
    let cases = [
        ("count = -1", "2:9: key `count`: -1: expected a whole number from 1 to 9"),
        ("count = 1.5", "2:9: key `count`: 1.5 is a TOML float: expected a whole number from 1 to 9"),
        (
            "interval = 50",
            "2:12: key `interval`: 50 has no unit: expected a time with its unit, from \"10ms\" to \"1s\"",
        ),
        ("key = \"x\"", "2:1: key `key`: is not known here: expected `key_file`"),
        ("service = 5", "2:11: key `service`: 5 is a TOML integer: expected a list: each a table"),
        ("service = [5]", "2:12: key `service`: 5 is a TOML integer: expected a table"),
        ("[service]", "2:1: key `service`: a TOML table: expected a list: each a table"),
        (
            "place = { kind = \"hear\" }",
            "2:18: key `place.kind`: kind \"hear\" is not known: expected \"here\" or \"there\" (nearest: `here`)",
        ),
        ("place = { kind = \"here\", path = \"x\" }", "2:26: key `place.path`: is not known: expected one of `kind`"),
        ("place = { kind = \"there\" }", "2:9: key `place.path`: is missing: expected a path in quotes"),
    ];
    for (line, message) in cases {
        assert_eq!(diagnostic_lines(&format!("name = \"a\"\n{line}\n")), [format!("daemon.toml:{message}")], "{line}");
    }
    assert_eq!(
        diagnostic_lines("# ä\nname = 5\n"),
        ["daemon.toml:2:8: key `name`: 5 is a TOML integer: expected 1 to 64 bytes without blanks"]
    );
}

#[test]
fn contradictory_values_are_reported_with_other_mistakes() {
    let text = "name = \"a\"\ncount = 0\nservice = [{ listen = \"[::1]:1\" }, { listen = \"[::1]:1\" }]\n";
    assert_eq!(
        diagnostic_lines(text),
        [
            "daemon.toml:2:9: key `count`: 0: expected a whole number from 1 to 9",
            "daemon.toml:3:47: key `service.listen`: is used twice: expected each once",
        ]
    );
}

#[test]
fn syntax_errors_and_preceding_mistakes_are_all_reported() {
    let lines = diagnostic_lines("name = \ncount = 0\ninterval = 1x\n[[service]\nlisten = 5\n");
    let locations: Vec<&str> = lines.iter().map(|mistake| mistake.split(": ").next().unwrap()).collect();
    assert_eq!(locations, ["daemon.toml:1:8", "daemon.toml:2:9", "daemon.toml:3:12", "daemon.toml:4:11"], "{lines:?}");
}

#[test]
fn mistakes_above_the_limit_are_only_counted() {
    let text = format!("name = \"a\"\n{}", "[[service]]\n".repeat(250));
    let mistakes = parse_daemon_config(&text).unwrap_err();
    assert_eq!((mistakes.shown_diagnostics.len(), mistakes.omitted_diagnostic_count), (100, 150));
    assert!(mistakes.to_string().ends_with("\nand at least 150 more"));
}

/// Tests a file with so many errors that a search of the whole text for the key of each error would take hours.
#[test]
fn syntax_errors_above_the_limit_are_only_counted() {
    let mistakes = parse_daemon_config(&"=\n".repeat(1 << 20)).unwrap_err();
    assert_eq!(mistakes.shown_diagnostics.len(), 100);
    assert!(
        mistakes
            .shown_diagnostics
            .iter()
            .enumerate()
            .all(|(n, mistake)| mistake.location.unwrap().line as usize <= n + 1)
    );
    assert!(mistakes.omitted_diagnostic_count > 10_000, "{}", mistakes.omitted_diagnostic_count);
    let value = format!("name = \"a\"\nplace = {{ kind = \"{}\" }}\n", "x".repeat(1 << 20));
    assert!(parse_daemon_config(&value).unwrap_err().to_string().len() < 10_000);
}

#[test]
fn mistakes_are_printed_as_json() {
    let mistakes = parse_daemon_config("name = \"a\"\nplace = { kind = \"hear\" }\n").unwrap_err();
    assert_eq!(
        mistakes.shown_diagnostics[0].to_json(),
        json!({
            "file": "daemon.toml", "line": 2, "column": 18, "key": "place.kind",
            "problem": "kind \"hear\" is not known", "expected": "\"here\" or \"there\"", "nearest": "here",
            "message": mistakes.to_string(),
        })
    );
}

#[test]
fn missing_file_is_named_in_the_error() {
    let error = TomlSource::read(Path::new("/nonexistent/daemon.toml")).unwrap_err().to_string();
    assert!(error.starts_with("/nonexistent/daemon.toml: No such file"), "{error}");
    assert!(error.ends_with(": expected a readable TOML file"), "{error}");
}

#[test]
fn binary_and_oversized_files_are_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("daemon.toml");
    let read_error_message = || TomlSource::read(&file).unwrap_err().to_string();
    std::fs::write(&file, b"name = \"a\"\nplace = \"\xff\"\n").unwrap();
    let expected = format!("{}:2:10: bytes that are no text: expected a TOML file in UTF-8", file.display());
    assert_eq!(read_error_message(), expected);
    std::fs::write(&file, " ".repeat((8 << 20) + 1)).unwrap();
    assert!(read_error_message().contains("more than 8 MiB"), "{}", read_error_message());
    // Some editors on Windows add a byte order mark and end lines with a carriage return.
    std::fs::write(&file, "\u{feff}name = \"a\"\r\ncount = 2\r\n").unwrap();
    read_daemon_config(&TomlSource::read(&file).unwrap()).unwrap();
}

#[test]
fn invalid_interface_names_and_relative_paths_are_rejected() {
    crate::config_struct! {
        struct HostConfig {
            interface: crate::InterfaceName,
            pins: crate::AbsolutePath,
        }
    }
    let parse_and_match_schema = |interface: &str, pins: &str| {
        let text = format!("interface = {interface:?}\npins = {pins:?}\n");
        let host =
            TomlSource::from_text("f", &text).read_as(|host: HostConfig, _| Some((host.interface.0, host.pins.0)));
        (
            host.is_ok(),
            jsonschema::is_valid(
                &build_file_schema::<HostConfig>("f"),
                &json!({ "interface": interface, "pins": pins }),
            ),
        )
    };
    for interface in ["eth0", "enp0s31f6", "bond0.12", "lb-vip_1@fifteen"] {
        let is_valid = interface.len() < 16;
        assert_eq!(parse_and_match_schema(interface, "/p"), (is_valid, is_valid), "{interface}");
    }
    for (interface, pins) in [("", "/p"), ("a b", "/p"), ("a/b", "/p"), ("eth0:1", "/p"), ("eth0", "p"), ("eth0", "")] {
        assert_eq!(parse_and_match_schema(interface, pins), (false, false), "{interface:?} {pins:?}");
    }
}

/// Checks that a daemon accepts only secret files that belong to its own user or root. Without root, nothing is tested.
#[test]
fn daemon_rejects_secret_file_of_another_user() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("key");
    std::fs::write(&path, "secret").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    if std::os::unix::fs::chown(&path, Some(65_534), None).is_err() {
        return;
    }
    assert_eq!(read_secret_checking_owner(&path, false).unwrap(), "secret");
    let error = read_secret_checking_owner(&path, true).unwrap_err();
    assert!(error.contains("belongs to user 65534: expected user 0"), "{error}");
    std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    assert_eq!(read_secret_checking_owner(&path, true).unwrap(), "secret");
}

/// Checks that a secret's path is relative to the file that names it, and that no message contains the secret.
#[test]
fn secret_file_readable_by_others_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let (file, secret) = (directory.path().join("daemon.toml"), directory.path().join("rss.key"));
    std::fs::write(&file, "name = \"a\"\nkey_file = \"rss.key\"\n").unwrap();
    let source = TomlSource::read(&file).unwrap();
    let read_error_message = || read_daemon_config(&source).unwrap_err().to_string();
    assert!(
        read_error_message().contains("2:12: key `key_file`: ")
            && read_error_message().contains("rss.key: No such file"),
        "{}",
        read_error_message()
    );
    let key = RssKey::microsoft_verification_key();
    std::fs::write(&secret, format!("{key}\n")).unwrap();
    let set_mode = |mode: u32| std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(mode)).unwrap();
    set_mode(0o640);
    let expected = format!("(mode 0640): expected `chmod 600 {}`", secret.display());
    assert!(
        read_error_message().contains("others can read or write") && read_error_message().ends_with(&expected),
        "{}",
        read_error_message()
    );
    set_mode(0o600);
    let daemon = read_daemon_config(&source).unwrap();
    assert_eq!(daemon.key_file.as_ref().unwrap().expose(), &key);
    assert!(!format!("{daemon:?}").contains("6d:5a"), "{daemon:?}");
    // The message must not advise to change a directory's permissions, which would make the directory unusable.
    std::fs::remove_file(&secret).unwrap();
    std::fs::create_dir(&secret).unwrap();
    assert!(
        read_error_message().contains("rss.key is a directory: expected a readable file"),
        "{}",
        read_error_message()
    );
    std::fs::remove_dir(&secret).unwrap();
    std::fs::write(&secret, "").unwrap();
    set_mode(0o600);
    std::fs::write(&secret, "hunter2").unwrap();
    assert!(
        read_error_message().contains("holds something else: expected an RSS key")
            && !read_error_message().contains("hunter2")
    );
}

#[test]
fn schema_and_parser_accept_the_same_text() {
    let validator = jsonschema::validator_for(&build_file_schema::<DaemonConfig>("daemon.toml")).unwrap();
    let matches_schema = |text: &str| {
        let value: toml::Value = toml::from_str(text).unwrap();
        validator.is_valid(&serde_json::to_value(value).unwrap())
    };
    let valid_text =
        "name = \"a\"\ninterval = \"1h 30.5m\"\nplace = { kind = \"here\" }\n[[service]]\nlisten = \"[::1]:80\"\n";
    assert!(matches_schema(valid_text));
    for invalid_text in
        ["", "name = 5", "name = \"a\"\nnmae = 1", "name = \"a\"\ninterval = 5", "name = \"a\"\ncount = 10"]
    {
        assert!(!matches_schema(invalid_text) && parse_daemon_config(invalid_text).is_err(), "{invalid_text}");
    }
    for invalid_place in ["kind = \"hear\"", "kind = \"here\", path = \"x\"", "kind = \"there\"", ""] {
        assert!(!matches_schema(&format!("name = \"a\"\nplace = {{ {invalid_place} }}")), "{invalid_place}");
    }
    let schema = build_file_schema::<DaemonConfig>("daemon.toml");
    assert_eq!(schema["properties"]["count"]["description"], "Number of workers.");
    assert_eq!(schema["required"], json!(["name"]));
}
