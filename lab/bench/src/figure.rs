//! Figure `cheetah-5-live`, which shows the cost of the packet path by consistency mode and number of connections.

use coreward_sim::figure::live::{LiveFigureSample, ProgressCallback};
use coreward_sim::figure::scenario::FigureScenario;

use crate::xdp::{self, XdpBenchArgs};

/// Measures all points of the figure `cheetah-5-live` like the bench `xdp`. In each round, the program in each mode and
/// the empty program process packets of the same connections, one after the other. Fails without the capabilities to
/// load BPF programs, or when a program returns an unexpected result.
pub fn measure_cheetah_figure_5(
    scenario: &FigureScenario,
    progress: ProgressCallback<'_>,
) -> anyhow::Result<Vec<LiveFigureSample>> {
    let args = XdpBenchArgs::with_round_count(*scenario.seeds.get_ref() as u32);
    let panel_title = scenario.panel[0].title.get_ref();
    let connection_costs = xdp::measure_packet_costs_by_connections(&args, progress)?;
    let samples = connection_costs.iter().flat_map(|cost| {
        (1..).zip(&cost.ns_above_empty_program).map(|(run, y)| LiveFigureSample {
            panel_title: panel_title.clone(),
            series_label: cost.series_label.clone(),
            x: cost.connection_count as f64,
            run_number: run,
            y: *y,
        })
    });
    Ok(samples.collect())
}
