//! Tests that run every embedded scenario, from its text to the page, with a fraction of its sample size.

use coreward_sim::figure::embedded::EmbeddedScenario;
use coreward_sim::figure::library;
use coreward_sim::figure::result::{FigureProvenance, FigureResult};
use coreward_sim::figure::scenario::FigureScenario;
use coreward_sim::figure::{draw, figure_run, page};

fn build_shrunk_scenario(embedded_scenario: &EmbeddedScenario) -> FigureScenario {
    let shrink_line = |line: &str| match line.split_once(" = ") {
        Some(("seeds", _)) => "seeds = 1".to_owned(),
        Some(("connections", _)) => "connections = 500".to_owned(),
        Some(("requests", _)) => "requests = 2000".to_owned(),
        Some(("trace", _)) => "trace = \"campus:seed=1,flows=200,seconds=4\"".to_owned(),
        _ => line.to_owned(),
    };
    let text: String = embedded_scenario.toml_text.lines().map(|text| shrink_line(text) + "\n").collect();
    FigureScenario::parse(embedded_scenario.name, &text).unwrap_or_else(|error| panic!("{error}"))
}

fn run_figure(embedded_scenario: &EmbeddedScenario, scenario: &FigureScenario) -> FigureResult {
    let table = figure_run::simulate_scenario(scenario, &|_, _| {})
        .unwrap_or_else(|error| panic!("{}: {error:#}", embedded_scenario.name));
    FigureResult::new(
        embedded_scenario.name,
        FigureProvenance::new("command".into(), embedded_scenario.toml_text),
        scenario,
        table,
    )
}

fn render_figure_files(result: &FigureResult, scenario: &FigureScenario) -> [String; 4] {
    let page = page::render_page(&[(result.clone(), scenario.clone())]);
    [result.table.to_csv(), draw::render_svg(scenario, &result.table), serde_json::to_string(result).unwrap(), page]
}

#[test]
fn every_scenario_gives_a_complete_figure() {
    for embedded_scenario in library::simulated_figures() {
        let scenario = build_shrunk_scenario(&embedded_scenario);
        let result = run_figure(&embedded_scenario, &scenario);
        let name = embedded_scenario.name;
        for (panel, panel_table) in scenario.panel.iter().zip(&result.table.panels) {
            assert_eq!(panel_table.curves.len(), scenario.panel_series(panel).count(), "{name}");
            for curve in &panel_table.curves {
                assert!(!curve.cells.is_empty(), "{name}: {}: {} has no point", panel_table.title, curve.label);
            }
        }
        let judged_claims = result.claims.iter().filter(|claim| claim.measured.is_some()).count();
        assert_eq!(judged_claims, scenario.claim.len(), "{name}: a claim has nothing to judge");
        let [csv, svg, json, page] = render_figure_files(&result, &scenario);
        assert_eq!(csv.lines().count(), result.table.csv_rows().len() + 1, "{name}");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{name}");
        let labels = scenario.series.iter().map(|series| series.label.get_ref().as_str());
        for label in labels {
            assert!(svg.contains(&format!("\n{label}\n")), "{name}: no {label:?} in the legend");
        }
        assert!(page.contains(&svg) && page.trim_end().ends_with("</html>"), "{name}");
        assert_eq!(serde_json::from_str::<FigureResult>(&json).unwrap().table, result.table, "{name}");
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for name in ["turbo-2b", "crossrss-2b"] {
        let embedded_scenario = library::find_figure(name, &library::simulated_figures()).unwrap();
        let scenario = build_shrunk_scenario(&embedded_scenario);
        let render_with_thread_count = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| render_figure_files(&run_figure(&embedded_scenario, &scenario), &scenario))
        };
        assert_eq!(render_with_thread_count(1), render_with_thread_count(3), "{name}");
    }
}

#[test]
fn figure_page_needs_no_external_resources() {
    let embedded_scenario = library::find_figure("turbo-11", &library::simulated_figures()).unwrap();
    let scenario = build_shrunk_scenario(&embedded_scenario);
    let [.., page] = render_figure_files(&run_figure(&embedded_scenario, &scenario), &scenario);
    for external_reference in ["<script", "<link", "src=", "href=\"http", "url(", "@import"] {
        assert!(!page.contains(external_reference), "the page has {external_reference}");
    }
}
