//! One run of `coreward figure`: progress for people, and what is said when it is interrupted.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::Asked;
use crate::figure::live::{LiveFigure, Progress};
use crate::figure::result::FigureResult;
use crate::figure::scenario::Scenario;
use crate::figure::table::Table;
use crate::figure::{live, run};

/// Exit code of a command that was interrupted (128 + SIGINT).
const INTERRUPTED: i32 = 130;

/// What is done and what is not. Files are written while this is locked, so that whoever ends the process (which locks it
/// first) cannot do so in the middle of a file.
#[derive(Debug)]
struct State {
    finished: Vec<String>,
    to_do: Vec<String>,
    writes: bool,
    /// While this machine is measured: how to have that end in order, instead of ending the process.
    interrupt: Option<fn()>,
    interrupted: bool,
}

/// A run that has begun.
pub struct Session {
    state: Arc<Mutex<State>>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// From here on SIGINT, SIGTERM and SIGHUP end the process between two files, with a word on what was finished.
    ///
    /// # Errors
    /// When signals cannot be handled.
    pub fn begin(names: Vec<String>, writes: bool) -> anyhow::Result<Self> {
        let state = Arc::new(Mutex::new(State::new(names, writes)));
        let seen = Arc::clone(&state);
        ctrlc::set_handler(move || {
            let mut state = lock(&seen);
            state.interrupted = true;
            match state.interrupt {
                Some(interrupt) => interrupt(),
                None => state.end(),
            }
        })?;
        Ok(Self { state })
    }

    /// Simulates or measures a figure and judges its claims.
    ///
    /// # Errors
    /// What the simulation refuses, or the machine.
    pub fn make(&self, figure: &Asked) -> anyhow::Result<FigureResult> {
        let began = Instant::now();
        let bar = ProgressBar::new(0).with_prefix(figure.name.clone());
        // A template is wrong only if this text is.
        let style = ProgressStyle::with_template("{prefix:24} {wide_bar} {pos}/{len} runs {elapsed}");
        bar.set_style(style.expect("the template is right"));
        bar.enable_steady_tick(Duration::from_millis(200));
        let progress = |done: usize, of: usize| {
            bar.set_length(of as u64);
            bar.set_position(done as u64);
        };
        let (table, provenance) = match &figure.live {
            None => (run::run(&figure.scenario, &progress), figure.provenance.clone()),
            Some(live) => {
                (self.measure(live, &figure.scenario, &progress), figure.provenance.clone().on(live::machine()))
            }
        };
        bar.finish_and_clear();
        let result = FigureResult::new(&figure.name, provenance, &figure.scenario, table?);
        eprintln!("{}: {:.1} s", figure.name, began.elapsed().as_secs_f64());
        Ok(result)
    }

    /// Measures; a signal that comes meanwhile ends the process when everything is tidied up.
    fn measure(&self, live: &LiveFigure, scenario: &Scenario, progress: Progress<'_>) -> anyhow::Result<Table> {
        lock(&self.state).interrupt = live.interrupt;
        let table = live.table(scenario, progress);
        let mut state = lock(&self.state);
        state.interrupt = None;
        if state.interrupted {
            state.end();
        }
        table
    }

    /// Writes a figure's files while nobody can end the process in between.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn writing(&self, write: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        let mut state = lock(&self.state);
        write()?;
        let name = state.to_do.remove(0);
        state.finished.push(name);
        Ok(())
    }
}

impl State {
    fn new(to_do: Vec<String>, writes: bool) -> Self {
        Self { finished: Vec::new(), to_do, writes, interrupt: None, interrupted: false }
    }

    /// Ends the process, as an interrupted command ends.
    fn end(&self) -> ! {
        eprintln!("\n{}", self.word());
        std::process::exit(INTERRUPTED);
    }

    fn word(&self) -> String {
        if !self.writes {
            return "interrupted".to_owned();
        }
        let names = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        format!(
            "interrupted. Finished, with whole files: {}. Not finished: {}. The same command with --resume goes on.",
            names(&self.finished),
            names(&self.to_do)
        )
    }
}
