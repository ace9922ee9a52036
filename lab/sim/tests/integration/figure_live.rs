//! Tests of a live figure, from its measured samples to the page.

use clap::Parser as _;
use coreward_sim::figure::cli::{self, FigureArgs};
use coreward_sim::figure::draw;
use coreward_sim::figure::embedded::EmbeddedScenario;
use coreward_sim::figure::library;
use coreward_sim::figure::live::{LiveFigure, LiveFigureSample};
use coreward_sim::figure::result::FigureResult;
use coreward_sim::figure::scenario::FigureScenario;

const SCENARIO_TOML: &str = r#"
title = "What a packet costs"
paper = "p"
figure = "f"
statement = "s"
modelled = "m"
seeds = 2

[live]
minutes = 3

[[series]]
label = "stateless"

[[series]]
label = "other"

[[panel]]
title = "cost"
measure = "packet-ns"
x = { parameter = "connections", label = "thousand connections", values = [1000, 2000], scale = 0.001 }
y = { label = "ns", scale = 10 }
series = ["stateless"]

[[claim]]
statement = "at most 40 ns"
value = { series = "stateless" }
at_most = 40
"#;

const TEST_LIVE_FIGURE: LiveFigure = LiveFigure {
    embedded_scenario: EmbeddedScenario { name: "cheetah-5-live", toml_text: SCENARIO_TOML },
    measure: |scenario, report_progress| {
        report_progress(0, 1);
        let values = &scenario.panel[0].x.as_ref().expect("it sweeps").values;
        Ok(values.iter().flat_map(|x| [1, 2].map(|run| build_sample("stateless", *x, run))).collect())
    },
    interrupt_measurement: None,
};

fn build_sample(series: &str, x: f64, run: u64) -> LiveFigureSample {
    LiveFigureSample {
        panel_title: "cost".into(),
        series_label: series.into(),
        x,
        run_number: run,
        y: x / 1000.0 + run as f64,
    }
}

#[derive(clap::Parser)]
struct FigureCli {
    #[command(flatten)]
    figure: FigureArgs,
}

fn run_figure_command(arguments: &[&str], live_figure: LiveFigure) -> anyhow::Result<()> {
    cli::run(FigureCli::parse_from(["figure"].iter().chain(arguments)).figure, &[live_figure])
}

#[test]
fn live_samples_give_table_verdict_and_page() {
    let directory = tempfile::tempdir().unwrap();
    let output_directory = directory.path().to_str().unwrap();
    run_figure_command(&["cheetah-5-live", "--out", output_directory], TEST_LIVE_FIGURE).unwrap();
    let read_output_file = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
    let expected_csv = "panel,series,x,median,low,high,published\n\
                    cost,stateless,1,25,20,30,\ncost,stateless,2,35,30,40,\n";
    assert_eq!(read_output_file("cheetah-5-live.csv"), expected_csv);
    let result: FigureResult = serde_json::from_str(&read_output_file("cheetah-5-live.json")).unwrap();
    assert!(result.claims[0].holds && result.provenance.measured_on.unwrap().starts_with("Linux "));
    let page = read_output_file("index.html");
    for expected_text in
        ["What is measured.", "over 2 runs", "were measured, on the machine", "measured here, median of 2 runs"]
    {
        assert!(page.contains(expected_text), "{expected_text:?} is missing");
    }
}

const LIVE_AND_SIMULATED_TOML: &str = include_str!("compared-live.toml");

/// Live figure whose samples are the scenario's duration (s) in run 1, and 0 in all other runs.
const FIGURE_WITH_SIMULATED_SERIES: LiveFigure = LiveFigure {
    embedded_scenario: EmbeddedScenario { name: "compared-live", toml_text: LIVE_AND_SIMULATED_TOML },
    measure: |scenario, _| {
        assert!(scenario.series.iter().all(|series| !series.simulated));
        let seconds =
            scenario.live.as_ref().and_then(|live_parameters| live_parameters.seconds).expect("it has a duration");
        let values = &scenario.panel[0].x.as_ref().expect("it sweeps").values;
        let runs = 1..=*scenario.seeds.get_ref();
        let samples = values.iter().flat_map(|x| runs.clone().map(|run| (*x, run)));
        let y_of_run = |run| if run == 1 { seconds } else { 0.0 };
        Ok(samples
            .map(|(x, run)| LiveFigureSample {
                panel_title: "over load".into(),
                series_label: "jsq".into(),
                x,
                run_number: run,
                y: y_of_run(run),
            })
            .collect())
    },
    interrupt_measurement: None,
};

#[test]
fn simulated_series_is_drawn_with_the_measured_one() {
    let scenario = FIGURE_WITH_SIMULATED_SERIES.embedded_scenario.parse_scenario().unwrap();
    let table = FIGURE_WITH_SIMULATED_SERIES.measure_table(&scenario, &|_, _| {}).unwrap();
    let [measured, simulated] = &table.panels[0].curves[..] else { panic!("{table:?}") };
    let highest_values: Vec<(f64, f64)> = measured.cells.iter().map(|cell| (cell.x, cell.spread.high)).collect();
    assert_eq!(highest_values, [(40.0, 5.0), (80.0, 5.0)]);
    assert_eq!(simulated.cells.iter().map(|cell| cell.seeds.len()).collect::<Vec<_>>(), [3, 3]);
    assert!(simulated.cells.iter().all(|cell| cell.spread.low > 1.0), "{simulated:?}");
    assert!(draw::render_svg(&scenario, &table).contains("open, dashed: simulated"));
}

#[test]
fn simulated_series_need_a_live_figure_and_a_simulation() {
    let parsing_error_text = |text: &str| FigureScenario::parse("s.toml", text).unwrap_err().to_string();
    let toml_without_live = LIVE_AND_SIMULATED_TOML.replace("[live]\nminutes = 1\nseconds = 5\n", "");
    assert!(parsing_error_text(&toml_without_live).contains("simulated = true: expected [live]"));
    let toml_without_simulation = SCENARIO_TOML.replacen("label = \"other\"", "label = \"other\"\nsimulated = true", 1);
    assert!(parsing_error_text(&toml_without_simulation).contains("one of [rpc], [lb], [pcc], [path] with it"));
}

#[test]
fn live_figures_are_listed_but_not_among_simulated_figures() {
    let collect_figure_names =
        |figures: Vec<EmbeddedScenario>| figures.iter().map(|figure| figure.name).collect::<Vec<_>>();
    let names_with_live = collect_figure_names(library::simulated_and_live_figures(&[TEST_LIVE_FIGURE]));
    assert!(!collect_figure_names(library::simulated_figures()).contains(&"cheetah-5-live"));
    let position = names_with_live.iter().position(|name| *name == "cheetah-5-live").unwrap();
    assert_eq!(&names_with_live[position - 1..=position + 1], ["cheetah-2c", "cheetah-5-live", "cheetah-6"]);
}

#[test]
fn sample_outside_the_panels_is_rejected() {
    let invalid_figures = [
        LiveFigure { measure: |_, _| Ok(vec![build_sample("other", 1000.0, 1)]), ..TEST_LIVE_FIGURE },
        LiveFigure { measure: |_, _| Ok(vec![build_sample("third", 1000.0, 1)]), ..TEST_LIVE_FIGURE },
        LiveFigure { measure: |_, _| Ok(vec![build_sample("stateless", 1000.0, 3)]), ..TEST_LIVE_FIGURE },
    ];
    let scenario = TEST_LIVE_FIGURE.embedded_scenario.parse_scenario().unwrap();
    for live_figure in invalid_figures {
        let error = live_figure.measure_table(&scenario, &|_, _| {}).unwrap_err().to_string();
        assert!(error.starts_with("cheetah-5-live: not in the scenario: panel \"cost\", \""), "{error}");
    }
}
