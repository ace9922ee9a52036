//! One run of `coreward-lab figure`, with progress bars and signal handling.

use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::{Mutex, MutexGuard};

use super::RequestedFigure;
use crate::figure::live::{LiveFigure, ProgressCallback};
use crate::figure::result::FigureResult;
use crate::figure::scenario::FigureScenario;
use crate::figure::table::FigureTable;
use crate::figure::{figure_run, live};

/// Exit code of a process that a signal interrupted (128 + SIGINT).
const INTERRUPT_EXIT_CODE: i32 = 130;

/// State that the session shares with its signal handler. It is locked while files are written, so that no signal ends
/// the process between two files of a figure.
#[derive(Debug, Default)]
struct FigureSessionState {
    /// Function that makes the running measurement clean up and return. If it is absent, a signal ends the process at
    /// once.
    interrupt_measurement: Option<fn()>,
    is_interrupted: bool,
}

pub struct FigureSession {
    state: Arc<Mutex<FigureSessionState>>,
}

fn lock_state(state: &Mutex<FigureSessionState>) -> MutexGuard<'_, FigureSessionState> {
    state.lock()
}

impl FigureSession {
    /// Installs the signal handlers of a run. SIGINT, SIGTERM and SIGHUP then end the process only after all files of a
    /// figure are written or a measurement has cleaned up. Fails when signals cannot be handled.
    pub fn begin() -> anyhow::Result<Self> {
        let state = Arc::new(Mutex::new(FigureSessionState::default()));
        let handler_state = Arc::clone(&state);
        ctrlc::set_handler(move || {
            let mut state = lock_state(&handler_state);
            state.is_interrupted = true;
            match state.interrupt_measurement {
                Some(interrupt) => interrupt(),
                None => std::process::exit(INTERRUPT_EXIT_CODE),
            }
        })?;
        Ok(Self { state })
    }

    /// Simulates or measures a figure and checks its claims. Fails when the simulation or measurement fails.
    pub fn run_figure(&self, figure: &RequestedFigure) -> anyhow::Result<FigureResult> {
        let start = Instant::now();
        let progress_bar = ProgressBar::new(0).with_prefix(figure.name.clone());
        // The template is a constant, so it is always valid.
        let bar_style = ProgressStyle::with_template("{prefix:24} {wide_bar} {pos}/{len} runs {elapsed}");
        progress_bar.set_style(bar_style.expect("the template is right"));
        progress_bar.enable_steady_tick(Duration::from_millis(200));
        let report_progress = |finished_count: usize, total_count: usize| {
            progress_bar.set_length(total_count as u64);
            progress_bar.set_position(finished_count as u64);
        };
        let (table, provenance) = match &figure.live_figure {
            None => (figure_run::simulate_scenario(&figure.scenario, &report_progress), figure.provenance.clone()),
            Some(live_figure) => (
                self.measure_live_figure(live_figure, &figure.scenario, &report_progress),
                figure.provenance.clone().with_machine(live::describe_machine()),
            ),
        };
        progress_bar.finish_and_clear();
        let result = FigureResult::new(&figure.name, provenance, &figure.scenario, table?);
        eprintln!("{}: {:.1} s", figure.name, start.elapsed().as_secs_f64());
        Ok(result)
    }

    /// Measures a live figure. After a signal, the process exits as soon as the measurement has cleaned up.
    fn measure_live_figure(
        &self,
        live_figure: &LiveFigure,
        scenario: &FigureScenario,
        report_progress: ProgressCallback<'_>,
    ) -> anyhow::Result<FigureTable> {
        lock_state(&self.state).interrupt_measurement = live_figure.interrupt_measurement;
        let table = live_figure.measure_table(scenario, report_progress);
        let mut state = lock_state(&self.state);
        state.interrupt_measurement = None;
        if state.is_interrupted {
            std::process::exit(INTERRUPT_EXIT_CODE);
        }
        table
    }

    /// Runs `write`, which writes the files of a figure. Signals end the process only after `write` has returned.
    pub fn run_uninterrupted(&self, write: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        let _state = lock_state(&self.state);
        write()
    }
}
