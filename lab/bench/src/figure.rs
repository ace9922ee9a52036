//! `coreward-lab figure cheetah-5-live`: cost of the packet path, by consistency mode and number of connections.

use coreward_sim::figure::live::{Progress, Sample};
use coreward_sim::figure::scenario::Scenario;

use crate::xdp::{self, Args};

/// Measures all points of the figure of connection costs, as the bench `xdp` does. In each run (round), the program in
/// all modes and the empty program process packets of the same connections, one after the other. Fails without the
/// capabilities to load BPF programs, or when a program misbehaves.
pub fn cheetah_5(scenario: &Scenario, progress: Progress<'_>) -> anyhow::Result<Vec<Sample>> {
    let args = Args::for_rounds(*scenario.seeds.get_ref() as u32);
    let panel = scenario.panel[0].title.get_ref();
    let costs = xdp::costs_by_connections(&args, progress)?;
    let samples = costs.iter().flat_map(|cost| {
        (1..).zip(&cost.above_empty).map(|(run, y)| Sample {
            panel: panel.clone(),
            series: cost.series.clone(),
            x: cost.connections as f64,
            run,
            y: *y,
        })
    });
    Ok(samples.collect())
}
