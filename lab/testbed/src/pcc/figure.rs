//! `coreward-lab figure cheetah-9-live`: runs every method for the figure's panels.

use anyhow::{Context as _, anyhow};
use coreward_sim::figure::axes::Metric;
use coreward_sim::figure::live::{Progress, Sample};
use coreward_sim::figure::scenario::{Panel, Scenario};

use super::method::Method;
use super::run::PccRun;
use super::timeline;
use crate::interrupt;
use crate::stream::client::StreamWorkload;

/// Interrupts the measurement that is running.
pub fn interrupt() {
    interrupt::request();
}

/// Measures every series of `scenario` with every seed; the label of a series names a method. Fails when a label is not
/// a method, a panel's metric is not supported, or a run fails.
pub fn measure(scenario: &Scenario, progress: Progress<'_>) -> anyhow::Result<Vec<Sample>> {
    let methods: Vec<Method> = scenario
        .series
        .iter()
        .map(|series| Method::parse(series.label.get_ref()).map_err(|error| anyhow!(error)))
        .collect::<anyhow::Result<_>>()?;
    let seeds = *scenario.seeds.get_ref();
    let streams = StreamWorkload::default();
    let of = methods.len() * seeds as usize * (streams.warm_up_seconds + streams.seconds) as usize;
    let done = std::cell::Cell::new(0);
    let tick = || {
        done.set(done.get() + 1);
        progress(done.get(), of);
    };
    let mut samples = Vec::new();
    // Ordered by seed, so that disturbances of the machine affect all methods.
    for seed in 1..=seeds {
        for method in &methods {
            let run = PccRun::measure(*method, &StreamWorkload { seed, ..streams.clone() }, &tick)?;
            eprintln!("{}", run.line());
            for panel in &scenario.panel {
                let shown = scenario.panel_series(panel).any(|series| series.label.get_ref() == method.name);
                if shown {
                    let values = values(panel, &run)?;
                    samples.extend(values.into_iter().map(|(x, y)| sample(panel, &run, x, y)));
                }
            }
        }
    }
    Ok(samples)
}

fn sample(panel: &Panel, run: &PccRun, x: f64, y: f64) -> Sample {
    Sample { panel: panel.title.get_ref().clone(), series: run.method.to_owned(), x, run: run.seed, y }
}

/// Returns the points (x, y) that a panel shows of a run. The value of a second is at the end of that second.
fn values(panel: &Panel, run: &PccRun) -> anyhow::Result<Vec<(f64, f64)>> {
    let ends = (1..).map(f64::from);
    let seconds = run.seconds.iter();
    match (*panel.measure.get_ref(), &panel.x) {
        (Metric::BrokenPct, Some(_)) => Ok(ends.zip(seconds.map(|second| second.broken_pct())).collect()),
        (Metric::BrokenPct, None) => Ok(vec![(0.0, run.total().broken_pct())]),
        (Metric::CompletedPerSecond, Some(_)) => Ok(ends.zip(seconds.map(|second| second.completed as f64)).collect()),
        (Metric::PoolServers, Some(_)) => {
            Ok(ends.zip((0..).zip(seconds).map(|(second, _)| f64::from(timeline::servers_after(second)))).collect())
        }
        (other, _) => Err(anyhow!("{other:?} is not measured")).context(panel.title.get_ref().clone()),
    }
}
