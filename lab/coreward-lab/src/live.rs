//! Figures that are measured on this machine; `coreward_sim::figure::live` describes how to add one.

use coreward_bench::figure;
use coreward_dataplane::capabilities;
use coreward_sim::figure::embedded::EmbeddedScenario;
use coreward_sim::figure::live::LiveFigure;
use coreward_testbed::{dispatch_figure, pcc};

/// All figures that are measured on this machine, in arbitrary order. Lists and pages sort them in the order of the
/// papers.
pub const LIVE_FIGURES: &[LiveFigure] = &[
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "cheetah-5-live",
            toml_text: include_str!("../../scenarios/live/cheetah-5-live.toml"),
        },
        measure: |scenario, progress| {
            capabilities::check_capabilities("coreward-lab figure cheetah-5-live")?;
            figure::measure_cheetah_figure_5(scenario, progress)
        },
        // No cleanup is necessary, because the kernel removes programs and maps when the process ends.
        interrupt_measurement: None,
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "cheetah-9-live",
            toml_text: include_str!("../../scenarios/live/cheetah-9-live.toml"),
        },
        measure: pcc::figure::measure_pcc_figure,
        interrupt_measurement: Some(pcc::figure::interrupt_measurement),
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "turbo-9-live",
            toml_text: include_str!("../../scenarios/live/turbo-9-live.toml"),
        },
        measure: dispatch_figure::server_figure::measure_server_figure,
        interrupt_measurement: Some(dispatch_figure::interrupt_measurement),
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "turbo-6d-live",
            toml_text: include_str!("../../scenarios/live/turbo-6d-live.toml"),
        },
        measure: dispatch_figure::server_figure::measure_server_figure,
        interrupt_measurement: Some(dispatch_figure::interrupt_measurement),
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "ringleader-classes-live",
            toml_text: include_str!("../../scenarios/live/ringleader-classes-live.toml"),
        },
        measure: dispatch_figure::server_figure::measure_server_figure,
        interrupt_measurement: Some(dispatch_figure::interrupt_measurement),
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "ringleader-8-live",
            toml_text: include_str!("../../scenarios/live/ringleader-8-live.toml"),
        },
        measure: dispatch_figure::server_figure::measure_server_figure,
        interrupt_measurement: Some(dispatch_figure::interrupt_measurement),
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "ringleader-bimodal-live",
            toml_text: include_str!("../../scenarios/live/ringleader-bimodal-live.toml"),
        },
        measure: dispatch_figure::server_figure::measure_server_figure,
        interrupt_measurement: Some(dispatch_figure::interrupt_measurement),
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "ringleader-high-bimodal-live",
            toml_text: include_str!("../../scenarios/live/ringleader-high-bimodal-live.toml"),
        },
        measure: dispatch_figure::server_figure::measure_server_figure,
        interrupt_measurement: Some(dispatch_figure::interrupt_measurement),
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "ringleader-rocksdb-live",
            toml_text: include_str!("../../scenarios/live/ringleader-rocksdb-live.toml"),
        },
        measure: dispatch_figure::server_figure::measure_server_figure,
        interrupt_measurement: Some(dispatch_figure::interrupt_measurement),
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "ringleader-cores-live",
            toml_text: include_str!("../../scenarios/live/ringleader-cores-live.toml"),
        },
        measure: dispatch_figure::cores_figure::measure_cores_figure,
        interrupt_measurement: Some(dispatch_figure::interrupt_measurement),
    },
    LiveFigure {
        embedded_scenario: EmbeddedScenario {
            name: "path-live",
            toml_text: include_str!("../../scenarios/live/path-live.toml"),
        },
        measure: dispatch_figure::path_figure::measure_path_figure,
        interrupt_measurement: Some(dispatch_figure::interrupt_measurement),
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_live_scenario_is_valid() {
        for live_figure in LIVE_FIGURES {
            let scenario = live_figure.embedded_scenario.parse_scenario().unwrap_or_else(|error| panic!("{error}"));
            assert!(
                scenario.live.is_some() && live_figure.embedded_scenario.name.ends_with("-live"),
                "{}",
                live_figure.embedded_scenario.name
            );
        }
    }
}
