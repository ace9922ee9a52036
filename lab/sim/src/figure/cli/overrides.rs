//! Command-line options that reduce a live figure to a part of its points or to a short trial.

use anyhow::ensure;
use coreward_config::Spanned;

use crate::figure::axis_points::is_same_x;
use crate::figure::scenario::FigureScenario;
use crate::unknown_name::UnknownName;

/// Command-line options that override settings of a live figure's scenario.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Live figures, smaller")]
pub struct LiveFigureOverrides {
    /// Number of runs of each point
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100),
        conflicts_with_all = ["all", "list", "scenario"])]
    runs: Option<u64>,
    /// Seconds per point, for scenarios with a duration
    #[arg(long, value_parser = parse_seconds, conflicts_with_all = ["all", "list", "scenario"])]
    seconds: Option<f64>,
    /// Measure only the series with these labels
    #[arg(long, value_name = "LABEL,...", value_delimiter = ',', conflicts_with_all = ["all", "list", "scenario"])]
    series: Vec<String>,
    /// Measure only these values of the x axes, such as loads
    #[arg(long, value_name = "X,...", value_delimiter = ',', conflicts_with_all = ["all", "list", "scenario"])]
    points: Vec<f64>,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let valid_seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    valid_seconds.ok_or_else(|| "expected a number from 0.1 to 3600".to_owned())
}

impl LiveFigureOverrides {
    fn is_empty(&self) -> bool {
        self.runs.is_none() && self.seconds.is_none() && self.series.is_empty() && self.points.is_empty()
    }

    /// Returns the value of `--series` in quotes (labels may contain spaces and parentheses), or nothing without the
    /// option.
    fn quoted_series_labels(&self) -> Vec<String> {
        if self.series.is_empty() { Vec::new() } else { vec![format!("'{}'", self.series.join(","))] }
    }

    /// Returns the overrides as command-line options, for the command on the figure's page that reproduces the figure.
    pub fn to_command_line_options(&self) -> String {
        let format_option = |name: &str, items: Vec<String>| {
            if items.is_empty() { String::new() } else { format!(" --{name} {}", items.join(",")) }
        };
        [
            format_option("runs", self.runs.iter().map(u64::to_string).collect()),
            format_option("seconds", self.seconds.iter().map(f64::to_string).collect()),
            format_option("series", self.quoted_series_labels()),
            format_option("points", self.points.iter().map(f64::to_string).collect()),
        ]
        .concat()
    }

    /// Applies the overrides to the scenario, and removes claims that need omitted series or points. Fails when the
    /// figure is not live, or when its scenario lacks a selected series or point.
    pub fn apply_to_scenario(&self, scenario: &mut FigureScenario) -> anyhow::Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let Some(live_parameters) = &mut scenario.live else {
            anyhow::bail!("--runs, --seconds, --series and --points: expected a live figure");
        };
        if let Some(seconds) = self.seconds {
            ensure!(live_parameters.seconds.is_some(), "--seconds {seconds}: this figure has a duration of its own");
            live_parameters.seconds = Some(seconds);
        }
        if let Some(runs) = self.runs {
            scenario.seeds = Spanned::new(scenario.seeds.span(), runs);
        }
        self.retain_selected_points(scenario)?;
        self.retain_selected_series(scenario)?;
        let scenario_after_selection = scenario.clone();
        scenario.claim.retain(|claim| scenario_after_selection.can_judge(claim));
        Ok(())
    }

    fn retain_selected_points(&self, scenario: &mut FigureScenario) -> anyhow::Result<()> {
        let unscale_points = |scale: f64| self.points.iter().map(move |point| point / scale);
        for point in &self.points {
            let mut sweeps = scenario.panel.iter().filter_map(|panel| panel.x.as_ref());
            let is_on_an_axis =
                sweeps.any(|sweep| sweep.values.iter().any(|value| is_same_x(value * sweep.scale, *point)));
            ensure!(is_on_an_axis, "--points {point}: expected points of the figure's horizontal axes");
        }
        if self.points.is_empty() {
            return Ok(());
        }
        for sweep in scenario.panel.iter_mut().filter_map(|panel| panel.x.as_mut()) {
            let scale = sweep.scale;
            sweep.values.retain(|value| unscale_points(scale).any(|point| is_same_x(*value, point)));
        }
        scenario.panel.retain(|panel| panel.x.as_ref().is_none_or(|sweep| !sweep.values.is_empty()));
        Ok(())
    }

    fn retain_selected_series(&self, scenario: &mut FigureScenario) -> anyhow::Result<()> {
        if self.series.is_empty() {
            return Ok(());
        }
        for label in &self.series {
            let mut labels = scenario.series.iter().map(|series| series.label.get_ref().as_str());
            if !labels.any(|known_label| known_label == label) {
                let labels = scenario.series.iter().map(|series| series.label.get_ref().as_str());
                return Err(UnknownName::new("series", label, labels).into());
            }
        }
        let is_selected_label = |label: &Spanned<String>| self.series.contains(label.get_ref());
        for panel in &mut scenario.panel {
            if panel.series.is_empty() {
                panel.series = scenario.series.iter().map(|series| series.label.clone()).collect();
            }
            panel.series.retain(&is_selected_label);
        }
        scenario.panel.retain(|panel| !panel.series.is_empty());
        scenario.series.retain(|series| is_selected_label(&series.label));
        scenario.published.retain(|published_curve| is_selected_label(&published_curve.series));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    const LIVE_AND_SIMULATED_TOML: &str = include_str!("../../../tests/integration/compared-live.toml");

    #[derive(clap::Parser)]
    struct OverridesTestCli {
        #[arg(long)]
        all: bool,
        #[arg(long)]
        list: bool,
        #[arg(long)]
        scenario: bool,
        #[command(flatten)]
        overrides: LiveFigureOverrides,
    }

    fn apply_overrides(arguments: &[&str]) -> anyhow::Result<(FigureScenario, String)> {
        let overrides = OverridesTestCli::parse_from(["figure"].iter().chain(arguments)).overrides;
        let mut scenario = FigureScenario::parse("s.toml", LIVE_AND_SIMULATED_TOML)?;
        overrides.apply_to_scenario(&mut scenario)?;
        Ok((scenario, overrides.to_command_line_options()))
    }

    fn claim_statements(scenario: &FigureScenario) -> Vec<&str> {
        scenario.claim.iter().map(|claim| claim.statement.get_ref().as_str()).collect()
    }

    #[test]
    fn claims_about_omitted_series_and_points_are_removed() {
        let (scenario, options_text) = apply_overrides(&["--runs", "1", "--seconds", "0.5", "--points", "40"]).unwrap();
        assert_eq!((*scenario.seeds.get_ref(), scenario.live.as_ref().unwrap().seconds), (1, Some(0.5)));
        assert_eq!(scenario.panel[0].x.as_ref().unwrap().values, [0.4]);
        assert_eq!(claim_statements(&scenario), ["at 40"]);
        assert_eq!(options_text, " --runs 1 --seconds 0.5 --points 40");
        let (scenario, options_text) = apply_overrides(&["--series", "jsq"]).unwrap();
        assert_eq!((scenario.series.len(), claim_statements(&scenario)), (1, vec!["at 80"]));
        assert_eq!(options_text, " --series 'jsq'");
        let (scenario, options_text) = apply_overrides(&[]).unwrap();
        assert_eq!((claim_statements(&scenario).len(), options_text.as_str()), (2, ""));
    }

    #[test]
    fn invalid_overrides_are_rejected() {
        let expect_override_error = |arguments: &[&str]| apply_overrides(arguments).unwrap_err().to_string();
        assert_eq!(
            expect_override_error(&["--points", "50"]),
            "--points 50: expected points of the figure's horizontal axes"
        );
        assert!(expect_override_error(&["--series", "jsk"]).contains("did you mean jsq"));
        let mut simulated_scenario = crate::figure::library::simulated_figures()[0].parse_scenario().unwrap();
        let overrides = OverridesTestCli::parse_from(["figure", "--runs", "1"]).overrides;
        assert!(
            overrides
                .apply_to_scenario(&mut simulated_scenario)
                .unwrap_err()
                .to_string()
                .contains("expected a live figure")
        );
    }
}
