use super::*;

const VALID_SCENARIO_TOML: &str = r#"
title = "t"
paper = "p"
figure = "f"
statement = "s"
modelled = "m"
seeds = 1

[rpc]
cores = 4
service = "exp"
latency = 0
requests = 1000

[[series]]
label = "JSQ"
rpc.policy = "jsq"

[[panel]]
title = "over load"
measure = "p99"
x = { parameter = "load", label = "load", values = [0.5, 0.8] }
y = { label = "p99" }

[[claim]]
statement = "c"
value = { series = "JSQ", at = 0.8 }
at_most = 10
"#;

fn parse_error_after_replacing(old_text: &str, new_text: &str) -> String {
    assert!(VALID_SCENARIO_TOML.contains(old_text), "{old_text:?} is not in the scenario");
    FigureScenario::parse("s.toml", &VALID_SCENARIO_TOML.replace(old_text, new_text)).unwrap_err().to_string()
}

#[test]
fn valid_scenario_is_parsed_and_expanded() {
    let scenario = FigureScenario::parse("s.toml", VALID_SCENARIO_TOML).unwrap();
    let plan = scenario.plan_runs().unwrap();
    assert_eq!((plan.jobs.len(), plan.plot_points.len()), (2, 2));
}

#[test]
fn run_shared_by_two_panels_is_simulated_once() {
    let second_panel = "[[panel]]\ntitle = \"mean\"\nmeasure = \"mean\"\nx = \
                 { parameter = \"load\", label = \"load\", values = [0.5] }\n\
                 y = { label = \"mean\" }\n[[claim]]\nstatement = \"c\"\nvalue = { panel = \"over load\",";
    let text = VALID_SCENARIO_TOML.replace("[[claim]]\nstatement = \"c\"\nvalue = {", second_panel);
    let plan = FigureScenario::parse("s.toml", &text).unwrap().plan_runs().unwrap();
    assert_eq!((plan.jobs.len(), plan.plot_points.len()), (2, 3));
}

#[test]
fn points_above_the_capacity_of_a_policy_are_omitted() {
    let text = VALID_SCENARIO_TOML.replace("\"jsq\"", "\"cfcfs\"").replace("latency = 0", "latency = 0.25");
    // A core is idle for two latencies of 0.25 per request, so the highest load is 1 / 1.5.
    let plan = FigureScenario::parse("s.toml", &text).unwrap().plan_runs().unwrap();
    assert_eq!(plan.plot_points.iter().map(|plot_point| plot_point.x).collect::<Vec<_>>(), [0.5]);
}

#[test]
fn errors_name_the_position_and_the_expected_values() {
    let cases = [
        (
            "measure = \"p99\"",
            "measure = \"p98\"",
            "s.toml:21:11: key `panel.measure`: unknown variant `p98`, expected one of",
        ),
        ("cores = 4", "core = 4", "s.toml:10:1: key `rpc.core`: unknown field `core`, expected one of"),
        (
            "\"jsq\"",
            "\"jsk\"",
            "s.toml:17:14: key `series.rpc.policy`: policy \"jsk\" does not exist: did you mean jsq",
        ),
        ("seeds = 1", "seeds = 0", "s.toml:7:9: key `seeds`: 0 seeds: expected 1 to 1000"),
        ("cores = 4\n", "", "`rpc.cores` is missing: expected in [rpc], in the panel or in the series"),
        (
            "at = 0.8",
            "at = 0.7",
            "s.toml:27:32: key `claim.value.at`: nothing is simulated at 0.7: expected one of x.values",
        ),
        ("series = \"JSQ\"", "series = \"JSQQ\"", "series \"JSQQ\" does not exist: did you mean JSQ?"),
        ("at_most = 10", "", "a claim needs `at_least` or `at_most`"),
        ("at_most = 10", "at_most = 10\nat_least = 11", "`at_least` is above `at_most`"),
        ("value = { series = \"JSQ\", at = 0.8 }", "", "exactly one of `value`, `ratio`, `ascending`"),
        ("[rpc]", "[lb]\n[rpc]", "tables of rpc, lb: expected exactly one of [rpc], [lb], [pcc], [path]"),
        ("rpc.policy = \"jsq\"", "lb.policy = \"rr\"", "has parameters of kind `lb`: this scenario is of kind `rpc`"),
        ("[0.5, 0.8]", "[0.8, 0.5]", "x.values: expected ascending values"),
        ("\"load\", label", "\"servers\", label", "`servers` cannot be swept in a simulation of kind `rpc`"),
        ("measure = \"p99\"", "measure = \"broken-pct\"", "a simulation of kind `rpc` does not measure `broken-pct`"),
    ];
    for (old_text, new_text, expected) in cases {
        let error = parse_error_after_replacing(old_text, new_text);
        assert!(error.contains(expected), "{new_text:?}: {error}");
    }
}

#[test]
fn published_point_has_two_or_four_numbers() {
    let published_toml =
        "[[published]]\nseries = \"JSQ\"\nsource = \"x\"\npoints = [[0.5, 1.0], [0.8, 2.0, 1.5, 2.5]]\n[[claim]]";
    let scenario = FigureScenario::parse("s.toml", &VALID_SCENARIO_TOML.replace("[[claim]]", published_toml)).unwrap();
    assert_eq!(scenario.published[0].points[1].spread, Some((1.5, 2.5)));
    let invalid_scenario = FigureScenario::parse(
        "s.toml",
        &VALID_SCENARIO_TOML.replace("[[claim]]", &published_toml.replace("[0.5, 1.0]", "[0.5]")),
    );
    assert!(invalid_scenario.unwrap_err().to_string().contains("expected [x, y] or [x, y, low, high]"));
}
