//! A live figure, from its samples to the page.

use clap::Parser as _;
use coreward_sim::figure::cli::{self, FigureArgs};
use coreward_sim::figure::draw;
use coreward_sim::figure::embedded::EmbeddedScenario;
use coreward_sim::figure::library;
use coreward_sim::figure::live::{LiveFigure, Sample};
use coreward_sim::figure::result::FigureResult;
use coreward_sim::figure::scenario::Scenario;

const TEXT: &str = r#"
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

const LIVE: LiveFigure = LiveFigure {
    embedded_scenario: EmbeddedScenario { name: "cheetah-5-live", toml_text: TEXT },
    measure: |scenario, progress| {
        progress(0, 1);
        let values = &scenario.panel[0].x.as_ref().expect("it sweeps").values;
        Ok(values.iter().flat_map(|x| [1, 2].map(|run| sample("stateless", *x, run))).collect())
    },
    interrupt: None,
};

fn sample(series: &str, x: f64, run: u64) -> Sample {
    Sample { panel: "cost".into(), series: series.into(), x, run, y: x / 1000.0 + run as f64 }
}

#[derive(clap::Parser)]
struct Cli {
    #[command(flatten)]
    figure: FigureArgs,
}

fn figure(arguments: &[&str], live: LiveFigure) -> anyhow::Result<()> {
    cli::run(Cli::parse_from(["figure"].iter().chain(arguments)).figure, &[live])
}

#[test]
fn live_samples_give_table_verdict_and_page() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().to_str().unwrap();
    figure(&["cheetah-5-live", "--out", out], LIVE).unwrap();
    let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
    let expected = "panel,series,x,median,low,high,published\n\
                    cost,stateless,1,25,20,30,\ncost,stateless,2,35,30,40,\n";
    assert_eq!(read("cheetah-5-live.csv"), expected);
    let result: FigureResult = serde_json::from_str(&read("cheetah-5-live.json")).unwrap();
    assert!(result.claims[0].holds && result.provenance.measured_on.unwrap().starts_with("Linux "));
    let page = read("index.html");
    for part in ["What is measured.", "over 2 runs", "were measured, on the machine", "measured here, median of 2 runs"]
    {
        assert!(page.contains(part), "{part:?} is missing");
    }
}

const LIVE_AND_SIMULATED: &str = include_str!("beside-live.toml");

/// Live figure whose samples are 0, except in run 1, where they are the scenario's duration.
const WITH_SIMULATED: LiveFigure = LiveFigure {
    embedded_scenario: EmbeddedScenario { name: "beside-live", toml_text: LIVE_AND_SIMULATED },
    measure: |scenario, _| {
        assert!(scenario.series.iter().all(|series| !series.simulated));
        let seconds = scenario.live.as_ref().and_then(|live| live.seconds).expect("it has a duration");
        let values = &scenario.panel[0].x.as_ref().expect("it sweeps").values;
        let runs = 1..=*scenario.seeds.get_ref();
        let samples = values.iter().flat_map(|x| runs.clone().map(|run| (*x, run)));
        let y = |run| if run == 1 { seconds } else { 0.0 };
        Ok(samples
            .map(|(x, run)| Sample { panel: "over load".into(), series: "jsq".into(), x, run, y: y(run) })
            .collect())
    },
    interrupt: None,
};

#[test]
fn simulated_series_is_drawn_with_the_measured_one() {
    let scenario = WITH_SIMULATED.embedded_scenario.scenario().unwrap();
    let table = WITH_SIMULATED.measure_table(&scenario, &|_, _| {}).unwrap();
    let [measured, simulated] = &table.panels[0].curves[..] else { panic!("{table:?}") };
    let highest: Vec<(f64, f64)> = measured.cells.iter().map(|cell| (cell.x, cell.spread.high)).collect();
    assert_eq!(highest, [(40.0, 5.0), (80.0, 5.0)]);
    assert_eq!(simulated.cells.iter().map(|cell| cell.seeds.len()).collect::<Vec<_>>(), [3, 3]);
    assert!(simulated.cells.iter().all(|cell| cell.spread.low > 1.0), "{simulated:?}");
    assert!(draw::render_svg(&scenario, &table).contains("open, dashed: simulated"));
}

#[test]
fn simulated_series_need_a_simulation() {
    let error = |text: &str| Scenario::parse("s.toml", text).unwrap_err().to_string();
    let simulated_only = LIVE_AND_SIMULATED.replace("[live]\nminutes = 1\nseconds = 5\n", "");
    assert!(error(&simulated_only).contains("simulated = true: expected [live]"));
    let without = TEXT.replacen("label = \"other\"", "label = \"other\"\nsimulated = true", 1);
    assert!(error(&without).contains("one of [rpc], [lb], [pcc], [path] with it"));
}

#[test]
fn live_figures_are_listed_and_not_part_of_all() {
    let names = |figures: Vec<EmbeddedScenario>| figures.iter().map(|figure| figure.name).collect::<Vec<_>>();
    let with_live = names(library::with_live_figures(&[LIVE]));
    assert!(!names(library::all_figures()).contains(&"cheetah-5-live"));
    let place = with_live.iter().position(|name| *name == "cheetah-5-live").unwrap();
    assert_eq!(&with_live[place - 1..=place + 1], ["cheetah-2c", "cheetah-5-live", "cheetah-6"]);
}

#[test]
fn sample_outside_the_panels_is_an_error() {
    let live = [
        LiveFigure { measure: |_, _| Ok(vec![sample("other", 1000.0, 1)]), ..LIVE },
        LiveFigure { measure: |_, _| Ok(vec![sample("third", 1000.0, 1)]), ..LIVE },
        LiveFigure { measure: |_, _| Ok(vec![sample("stateless", 1000.0, 3)]), ..LIVE },
    ];
    let scenario = LIVE.embedded_scenario.scenario().unwrap();
    for live in live {
        let error = live.measure_table(&scenario, &|_, _| {}).unwrap_err().to_string();
        assert!(error.contains("cheetah-5-live: the scenario has no place for Sample"), "{error}");
    }
}
