//! The file of `coreward orchestrate`.

use coreward_config::TomlSource;
use coreward_model::dispatch::{
    CoreRankRule, DispatchEligibilityRule, DispatchRateLimit, RankLambda, SchedulingMemberRanking,
};
use coreward_orchestrator::classify::{PayloadPattern, RequestClassifier};
use coreward_orchestrator::config::OrchestratorConfig;
use coreward_orchestrator::dispatch_engine::DispatchEngineConfig;

fn parse_config(text: &str) -> Result<OrchestratorConfig, String> {
    let source = TomlSource::from_text("orchestrate.toml", text);
    OrchestratorConfig::parse(&source).map_err(|mistakes| mistakes.to_string())
}

const REQUIRED_KEYS_TOML: &str = "memory = \"/run/cores\"\ncores = 4\n";

#[test]
fn minimal_file_gets_defaults() {
    let config = parse_config(&format!("{REQUIRED_KEYS_TOML}[[service]]\nlisten = \"127.0.0.1:4000\"\n")).unwrap();
    let DispatchEngineConfig {
        rank_bound,
        rank_rule,
        max_payload_bytes: payload_bytes,
        services,
        scheduler_config: scheduler,
        ..
    } = &config.engine_config;
    assert_eq!((rank_bound.get(), *rank_rule, *payload_bytes), (4, CoreRankRule::Ranked, 1472));
    assert_eq!(services[0].lambda, RankLambda::PAPER_VALUE);
    assert_eq!(
        (scheduler.max_waiting_requests, scheduler.eligibility_rule),
        (4096, DispatchEligibilityRule::FirstEligible)
    );
    assert_eq!(config.listeners[0].1.services_and_patterns, [(0, None)]);
}

const GROUPED_SERVICES_TOML: &str = r#"ranking = "share"
policy = "per-service-jbsq"
[[group]]
name = "fast"
weight = 3
ranking = "deadline"
[[group]]
name = "batch"
[[service]]
listen = "127.0.0.1:4000"
match = { offset = 2, value = 258, bytes = 2, little_endian = true }
group = "fast"
deadline = "20us"
[[service]]
listen = "127.0.0.1:4001"
match = { prefix = "get " }
group = "fast"
lambda = 0.5
[[service]]
listen = "127.0.0.1:4000"
group = "batch"
priority = 7
rate = 1000
burst = 10
"#;

#[test]
fn services_may_share_a_port_and_are_ranked_in_groups() {
    let config = parse_config(&format!("{REQUIRED_KEYS_TOML}{GROUPED_SERVICES_TOML}")).unwrap();
    let port_rules: Vec<_> =
        config.listeners.iter().map(|(address, classifier)| (address.port(), classifier)).collect();
    let payload_pattern =
        |offset, bytes: &[u8]| Some(PayloadPattern { byte_offset: offset, expected_bytes: bytes.to_vec() });
    assert_eq!(
        port_rules[0],
        (4000, &RequestClassifier { services_and_patterns: vec![(0, payload_pattern(2, &[2, 1])), (2, None)] })
    );
    assert_eq!(
        port_rules[1],
        (4001, &RequestClassifier { services_and_patterns: vec![(1, payload_pattern(0, b"get "))] })
    );
    let scheduler = &config.engine_config.scheduler_config;
    let group_rankings: Vec<_> = scheduler
        .groups
        .iter()
        .map(|group| (group.parameters.priority_weight_or_deadline, group.service_ranking))
        .collect();
    assert_eq!(
        group_rankings,
        [(3, SchedulingMemberRanking::EarliestDeadline), (1, SchedulingMemberRanking::StrictPriority)]
    );
    let queue_rankings: Vec<_> = scheduler
        .queues
        .iter()
        .map(|queue| (queue.group_index, queue.parameters.priority_weight_or_deadline))
        .collect();
    assert_eq!(queue_rankings, [(0, 20_000), (0, 1_000_000), (1, 7)]);
    assert_eq!(
        scheduler.queues[2].parameters.rate_limit,
        Some(DispatchRateLimit { token_interval: 1_000_000, burst_tokens: 10 })
    );
    assert_eq!(config.engine_config.services[1].lambda.get(), 0.5);
}

#[test]
fn af_xdp_requires_an_interface_and_specific_addresses() {
    let service_toml = "[[service]]\nlisten = \"192.0.2.1:4000\"\n";
    let parse_with_keys = |keys: &str, service: &str| parse_config(&format!("{REQUIRED_KEYS_TOML}{keys}{service}"));
    let parsed_af_xdp_interface = |keys: &str| parse_with_keys(keys, service_toml).unwrap().af_xdp_interface;
    assert_eq!((parsed_af_xdp_interface(""), parsed_af_xdp_interface("intake = \"socket\"\n")), (None, None));
    assert_eq!(parsed_af_xdp_interface("intake = \"af-xdp\"\ninterface = \"eth1\"\n").as_deref(), Some("eth1"));
    let parse_error_text = |keys, service| parse_with_keys(keys, service).unwrap_err();
    assert!(
        parse_error_text("intake = \"af-xdp\"\n", service_toml)
            .ends_with("expected the interface at which requests arrive")
    );
    assert!(parse_error_text("interface = \"eth1\"\n", service_toml).ends_with("expected both or neither"));
    assert!(parse_error_text("intake = \"xdp\"\n", service_toml).ends_with("expected \"socket\" or \"af-xdp\""));
    let service_on_any_address = service_toml.replace("192.0.2.1", "0.0.0.0");
    let any_address_error = parse_error_text("intake = \"af-xdp\"\ninterface = \"eth1\"\n", &service_on_any_address);
    assert!(
        any_address_error.contains("listen 0.0.0.0:4000")
            && any_address_error.ends_with("the address to which requests go"),
        "{any_address_error}"
    );
}

#[test]
fn mistakes_are_reported_with_line_and_expected_value() {
    let error_of_service =
        |extra_lines: &str| parse_config(&format!("{REQUIRED_KEYS_TOML}[[service]]\n{extra_lines}\n")).unwrap_err();
    let lambda_error = error_of_service("listen = \"127.0.0.1:4000\"\nlambda = 1.5");
    assert_eq!(lambda_error, "orchestrate.toml:3:1: key `service`: lambda 1.5: expected a number from 0 to 1");
    assert!(
        error_of_service("listen = \"[::1]:4000\"").contains("expected an IPv4 address and a port from 1 to 65535")
    );
    let listen_line = "listen = \"127.0.0.1:4000\"\n";
    assert!(
        error_of_service(&format!("{listen_line}priority = 8")).ends_with("8: expected a whole number from 0 to 7")
    );
    assert!(
        error_of_service(&format!("{listen_line}match = {{}}")).ends_with("match: expected either `value` or `prefix`")
    );
    let text = error_of_service(&format!("{listen_line}match = {{ value = 256 }}"));
    assert!(text.ends_with("value = 256: expected a number of 1 bytes"), "{text}");
    assert!(error_of_service(&format!("{listen_line}group = \"x\"")).ends_with("no [[group]] has the name \"x\""));
    assert!(parse_config(REQUIRED_KEYS_TOML).unwrap_err().contains("service"));
    assert!(
        parse_config(&format!("service = []\n{REQUIRED_KEYS_TOML}"))
            .unwrap_err()
            .contains("0 services: expected 1 to 64")
    );
}
