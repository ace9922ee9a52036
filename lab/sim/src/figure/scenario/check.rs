//! Checks of a scenario that its types cannot express, such as whether names exist and values fit together.

use std::ops::Range;

use coreward_config::{ConfigDiagnostic, Spanned, TomlSource};

use super::{FigurePanel, FigureScenario, PlotType, SweepAxis};
use crate::figure::axis_points::is_same_x;
use crate::figure::figure_claim::{Assertion, FigureQuantity, QuantityRatio};
use crate::unknown_name::UnknownName;

const MAX_SEED_COUNT: u64 = 1_000;

type ScenarioCheckError = (Range<usize>, String);

/// Checks a scenario. An error names the invalid value with its line and column.
pub fn check_scenario(scenario: &FigureScenario, source: &TomlSource) -> Result<(), ConfigDiagnostic> {
    let checks = [
        check_seed_count,
        check_simulation_kinds,
        check_series_and_panel_names,
        check_panel_axes,
        check_published_values,
        check_claims,
        check_run_parameters,
    ];
    checks.iter().try_for_each(|check| check(scenario)).map_err(|(span, message)| source.diagnostic_at(span, &message))
}

fn check_seed_count(scenario: &FigureScenario) -> Result<(), ScenarioCheckError> {
    let seeds = *scenario.seeds.get_ref();
    if (1..=MAX_SEED_COUNT).contains(&seeds) {
        return Ok(());
    }
    Err((scenario.seeds.span(), format!("{seeds} seeds: expected 1 to {MAX_SEED_COUNT}")))
}

/// Returns the names among rpc, lb, pcc and path whose element in `is_present` is true.
fn given_simulation_kinds(is_present: [bool; 4]) -> Vec<&'static str> {
    ["rpc", "lb", "pcc", "path"]
        .into_iter()
        .zip(is_present)
        .filter_map(|(kind, has_kind)| has_kind.then_some(kind))
        .collect()
}

fn check_simulation_kinds(scenario: &FigureScenario) -> Result<(), ScenarioCheckError> {
    let scenario_kinds = given_simulation_kinds([
        scenario.rpc.is_some(),
        scenario.lb.is_some(),
        scenario.pcc.is_some(),
        scenario.path.is_some(),
    ]);
    // A live figure may also have series that the simulator produces.
    let kind = match (&scenario_kinds[..], &scenario.live) {
        ([kind], _) => *kind,
        ([], Some(_)) => "live",
        _ => {
            let found_kinds = if scenario_kinds.is_empty() { "none".to_owned() } else { scenario_kinds.join(", ") };
            return Err((
                0..0,
                format!("tables of {found_kinds}: expected exactly one of [rpc], [lb], [pcc], [path], [live]"),
            ));
        }
    };
    if let Some(series) = scenario.series.iter().find(|series| series.simulated)
        && (scenario.live.is_none() || kind == "live")
    {
        let message = "simulated = true: expected [live], and one of [rpc], [lb], [pcc], [path] with it";
        return Err((series.label.span(), message.to_owned()));
    }
    let series_kinds = scenario.series.iter().map(|series| {
        let is_kind_present = [series.rpc.is_some(), series.lb.is_some(), series.pcc.is_some(), series.path.is_some()];
        (series.label.span(), is_kind_present)
    });
    let panel_kinds = scenario.panel.iter().map(|panel| {
        let is_kind_present = [panel.rpc.is_some(), panel.lb.is_some(), panel.pcc.is_some(), panel.path.is_some()];
        (panel.title.span(), is_kind_present)
    });
    for (span, is_kind_present) in series_kinds.chain(panel_kinds) {
        if let Some(other_kind) = given_simulation_kinds(is_kind_present).into_iter().find(|other| *other != kind) {
            return Err((span, format!("has parameters of kind `{other_kind}`: this scenario is of kind `{kind}`")));
        }
    }
    Ok(())
}

fn check_unique_names<'a>(
    item_kind: &str,
    mut names: impl Iterator<Item = &'a Spanned<String>>,
) -> Result<(), ScenarioCheckError> {
    let mut earlier_names = Vec::new();
    let duplicate = names.find(|name| {
        let is_duplicate = earlier_names.contains(name.get_ref());
        earlier_names.push(name.get_ref().clone());
        is_duplicate
    });
    duplicate.map_or(Ok(()), |name| Err((name.span(), format!("{item_kind} {:?} is there twice", name.get_ref()))))
}

fn check_series_exists(scenario: &FigureScenario, label: &Spanned<String>) -> Result<(), ScenarioCheckError> {
    let labels: Vec<&str> = scenario.series.iter().map(|series| series.label.get_ref().as_str()).collect();
    if labels.contains(&label.get_ref().as_str()) {
        return Ok(());
    }
    Err((label.span(), UnknownName::new("series", label.get_ref(), labels).to_string()))
}

fn check_series_and_panel_names(scenario: &FigureScenario) -> Result<(), ScenarioCheckError> {
    if scenario.series.is_empty() || scenario.panel.is_empty() {
        return Err((0..0, "no series or no panel: expected at least one of each".to_owned()));
    }
    check_unique_names("series", scenario.series.iter().map(|series| &series.label))?;
    check_unique_names("panel", scenario.panel.iter().map(|panel| &panel.title))?;
    scenario.panel.iter().flat_map(|panel| &panel.series).try_for_each(|label| check_series_exists(scenario, label))
}

fn check_panel_axes(scenario: &FigureScenario) -> Result<(), ScenarioCheckError> {
    for panel in &scenario.panel {
        let build_panel_error = |message: &str| Err((panel.title.span(), message.to_owned()));
        if panel.y.range.is_some_and(|[low, high]| low >= high || (panel.y.log && low <= 0.0)) {
            return build_panel_error("y.range: expected [low, high], above 0 where the axis is logarithmic");
        }
        let Some(sweep) = &panel.x else {
            if panel.draw == PlotType::Lines {
                return build_panel_error("has no x: expected x, or draw = \"bars\"");
            }
            continue;
        };
        let is_time_sweep = *sweep.parameter.get_ref() == SweepAxis::Time;
        if is_time_sweep != sweep.values.is_empty() {
            return build_panel_error(
                "x.values: expected values to sweep, and none for time, whose values come out of the run",
            );
        }
        if !sweep.values.is_sorted_by(|a, b| a < b) {
            return build_panel_error("x.values: expected ascending values");
        }
        if sweep.log && sweep.values.first().is_some_and(|first| *first <= 0.0) {
            return build_panel_error("x.values: expected values above 0 on a logarithmic axis");
        }
    }
    Ok(())
}

/// Returns the panel with this title, or all panels if no title is given.
fn find_panels_by_title<'a>(
    scenario: &'a FigureScenario,
    title: Option<&Spanned<String>>,
) -> Result<Vec<&'a FigurePanel>, ScenarioCheckError> {
    let Some(name) = title else { return Ok(scenario.panel.iter().collect()) };
    scenario.find_panel(Some(name.get_ref())).map(|panel| vec![panel]).ok_or_else(|| {
        let titles = scenario.panel.iter().map(|panel| panel.title.get_ref().as_str());
        (name.span(), UnknownName::new("panel", name.get_ref(), titles).to_string())
    })
}

fn check_published_values(scenario: &FigureScenario) -> Result<(), ScenarioCheckError> {
    for published_curve in &scenario.published {
        check_series_exists(scenario, &published_curve.series)?;
        if published_curve.points.is_empty() {
            return Err((published_curve.series.span(), "no published points: expected at least one".to_owned()));
        }
        if find_panels_by_title(scenario, published_curve.panel.as_ref())?.len() > 1 {
            let message = "published values without a panel: expected panel = \"...\", as there are several";
            return Err((published_curve.series.span(), message.to_owned()));
        }
    }
    Ok(())
}

fn check_claims(scenario: &FigureScenario) -> Result<(), ScenarioCheckError> {
    scenario.claim.iter().try_for_each(|claim| check_claim(scenario, claim))
}

impl FigureScenario {
    /// Returns whether the scenario has all panels, series and points that the claim uses.
    pub fn can_judge(&self, claim: &Assertion) -> bool {
        check_claim(self, claim).is_ok()
    }
}

fn check_claim(scenario: &FigureScenario, claim: &Assertion) -> Result<(), ScenarioCheckError> {
    let build_claim_error = |message: &str| Err((claim.statement.span(), message.to_owned()));
    let is_check_present = [claim.value.is_some(), claim.ratio.is_some(), claim.ascending.is_some()];
    if is_check_present.iter().filter(|is_present| **is_present).count() != 1 {
        return build_claim_error("a claim needs exactly one of `value`, `ratio`, `ascending`");
    }
    if claim.ascending.is_none() && claim.at_least.is_none() && claim.at_most.is_none() {
        return build_claim_error(
            "a claim needs `at_least` or `at_most`: without a bound it would hold whatever is measured",
        );
    }
    if claim.at_least.zip(claim.at_most).is_some_and(|(lower_bound, upper_bound)| lower_bound > upper_bound) {
        return build_claim_error("`at_least` is above `at_most`: nothing could be both");
    }
    if let Some(order) = &claim.ascending {
        if order.series.len() < 2 {
            return build_claim_error("`ascending` needs at least two series");
        }
        order.series.iter().try_for_each(|label| check_series_exists(scenario, label))?;
        return check_claimed_x(scenario, claim, order.panel.as_ref(), order.at.as_ref());
    }
    let quantities = claim.value.iter().chain(claim.ratio.iter().flat_map(QuantityRatio::quantities));
    quantities.into_iter().try_for_each(|quantity| check_claimed_quantity(scenario, claim, quantity))
}

fn check_claimed_quantity(
    scenario: &FigureScenario,
    claim: &Assertion,
    quantity: &FigureQuantity,
) -> Result<(), ScenarioCheckError> {
    let build_claim_error = |message: &str| Err((claim.statement.span(), message.to_owned()));
    let is_selector_present =
        [quantity.series.is_some(), !quantity.least_of.is_empty(), !quantity.greatest_of.is_empty()];
    if is_selector_present.iter().filter(|is_present| **is_present).count() != 1 {
        return build_claim_error("a quantity needs exactly one of `series`, `least_of`, `greatest_of`");
    }
    if quantity.reaches.is_some() && (quantity.at.is_some() || quantity.from.is_some() || quantity.to.is_some()) {
        return build_claim_error("`reaches` uses the whole curve: it goes with none of `at`, `from`, `to`");
    }
    quantity.series_labels().try_for_each(|label| check_series_exists(scenario, label))?;
    check_claimed_x(scenario, claim, quantity.panel.as_ref(), quantity.at.as_ref())
}

/// Checks that all panels to which the claim refers show the same metric, and have `at` as an x value if it is given.
fn check_claimed_x(
    scenario: &FigureScenario,
    claim: &Assertion,
    panel: Option<&Spanned<String>>,
    at: Option<&Spanned<f64>>,
) -> Result<(), ScenarioCheckError> {
    let panels = find_panels_by_title(scenario, panel)?;
    if panels.iter().any(|panel| panel.measure.get_ref() != panels[0].measure.get_ref()) {
        let message = "a claim without a panel: expected panel = \"...\", as the panels measure different things";
        return Err((claim.statement.span(), message.to_owned()));
    }
    let Some(at) = at else { return Ok(()) };
    for sweep in panels.iter().filter_map(|panel| panel.x.as_ref()) {
        let is_claimed_x = |value: &f64| is_same_x(value * sweep.scale, *at.get_ref());
        if *sweep.parameter.get_ref() != SweepAxis::Time && !sweep.values.iter().any(is_claimed_x) {
            return Err((at.span(), format!("nothing is simulated at {}: expected one of x.values", at.get_ref())));
        }
    }
    Ok(())
}

fn check_run_parameters(scenario: &FigureScenario) -> Result<(), ScenarioCheckError> {
    let run_plan_error = match scenario.plan_runs() {
        Ok(_) if scenario.live.is_some() => return Ok(()),
        Ok(plan) if plan.plot_points.is_empty() => {
            return Err((0..0, "nothing is simulated: every point is above what its policy can carry".to_owned()));
        }
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    let series = scenario.series[run_plan_error.series_index].label.get_ref();
    let panel = &scenario.panel[run_plan_error.panel_index];
    Err((
        panel.measure.span(),
        format!("panel {:?}, series {series:?}: {}", panel.title.get_ref(), run_plan_error.cause),
    ))
}
