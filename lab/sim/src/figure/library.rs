//! All scenarios that are embedded in the executable, sorted and found by name.

use super::embedded::EmbeddedScenario;
use super::live::LiveFigure;
use crate::unknown_name::UnknownName;

include!(concat!(env!("OUT_DIR"), "/scenarios.rs"));

/// Returns the embedded scenarios of all simulated figures, ordered by paper and then by figure number.
pub fn simulated_figures() -> Vec<EmbeddedScenario> {
    simulated_and_live_figures(&[])
}

/// Returns the embedded scenarios of all simulated figures and of the given live figures, ordered by paper and figure.
pub fn simulated_and_live_figures(live_figures: &[LiveFigure]) -> Vec<EmbeddedScenario> {
    let simulated_scenarios = SCENARIOS.iter().map(|&(name, toml_text)| EmbeddedScenario { name, toml_text });
    let mut scenarios: Vec<EmbeddedScenario> =
        simulated_scenarios.chain(live_figures.iter().map(|live_figure| live_figure.embedded_scenario)).collect();
    scenarios.sort_by_key(|embedded_scenario| figure_sort_key(embedded_scenario.name));
    scenarios
}

/// Returns the scenario with this name. If `figures` has none, the error suggests the most similar names.
pub fn find_figure(name: &str, figures: &[EmbeddedScenario]) -> Result<EmbeddedScenario, UnknownName> {
    let figure = figures.iter().copied().find(|embedded_scenario| embedded_scenario.name == name);
    figure
        .ok_or_else(|| UnknownName::new("figure", name, figures.iter().map(|embedded_scenario| embedded_scenario.name)))
}

/// Returns a sort key that orders figures by paper and then by figure number, so that 2b precedes 11.
fn figure_sort_key(name: &str) -> (usize, String, u64, String) {
    const PAPERS_IN_DISPLAY_ORDER: [&str; 4] = ["crossrss", "cheetah", "turbo", "ringleader"];
    let (paper, figure) = name.split_once('-').unwrap_or((name, ""));
    let paper_index = PAPERS_IN_DISPLAY_ORDER
        .iter()
        .position(|known_paper| *known_paper == paper)
        .unwrap_or(PAPERS_IN_DISPLAY_ORDER.len());
    let digit_count = figure.bytes().take_while(u8::is_ascii_digit).count();
    // Tables and sensitivity analyses have no number, so they follow the figures.
    let figure_number = figure[..digit_count].parse().unwrap_or(u64::MAX);
    (paper_index, paper.to_owned(), figure_number, figure[digit_count..].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of all figures that `coreward-lab figure --all` produces.
    const SIMULATED_FIGURE_NAMES: [&str; 32] = [
        "crossrss-2a",
        "crossrss-2b",
        "cheetah-2a",
        "cheetah-2b",
        "cheetah-2c",
        "cheetah-6",
        "cheetah-7",
        "cheetah-8",
        "cheetah-9",
        "cheetah-appendix-b",
        "turbo-2a",
        "turbo-2b",
        "turbo-6a",
        "turbo-6b",
        "turbo-6c",
        "turbo-6d",
        "turbo-7a",
        "turbo-7b",
        "turbo-7c",
        "turbo-7d",
        "turbo-10",
        "turbo-11",
        "turbo-12",
        "ringleader-3",
        "ringleader-5",
        "ringleader-6",
        "ringleader-8",
        "ringleader-lambda",
        "ringleader-switch",
        "ringleader-table2-bimodal",
        "ringleader-table2-high-bimodal",
        "rack-aggregation",
    ];

    #[test]
    fn figures_are_sorted_in_the_papers_order() {
        let mut names = ["turbo-11", "ringleader-lambda", "turbo-2b", "crossrss-2a", "ringleader-8", "turbo-2a"];
        names.sort_by_key(|name| figure_sort_key(name));
        assert_eq!(names, ["crossrss-2a", "turbo-2a", "turbo-2b", "turbo-11", "ringleader-8", "ringleader-lambda"]);
    }

    #[test]
    fn unknown_figure_name_suggests_the_most_similar_ones() {
        let error = find_figure("turbo-2c", &simulated_figures()).unwrap_err();
        assert!(error.nearest_names().contains(&"turbo-2b"), "{error}");
    }

    #[test]
    fn every_scenario_is_valid() {
        let names: Vec<&str> = simulated_figures().iter().map(|embedded_scenario| embedded_scenario.name).collect();
        assert_eq!(names, SIMULATED_FIGURE_NAMES);
        for embedded_scenario in simulated_figures() {
            embedded_scenario.parse_scenario().unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
