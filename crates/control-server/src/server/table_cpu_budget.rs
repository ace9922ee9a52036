//! Limit on the CPU time that the controller uses for making tables.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Maximum time for which due tables are made before reports are processed again.
const MAX_TABLE_COMPUTATION_TIME: Duration = Duration::from_millis(2);
/// Pause after making tables, as a multiple of the time that it took. With 1, tables take at most half of a CPU.
const PAUSE_TO_COMPUTATION_TIME_RATIO: u32 = 1;
/// Shortest pause between two rounds of making tables, during which changes accumulate.
const MIN_TABLE_COMPUTATION_PAUSE: Duration = Duration::from_millis(1);

/// Limit on the CPU time for tables. It is stored as the time from which tables may be made again, or `None` if they
/// may be made at once.
#[derive(Debug, Default)]
pub struct TableCpuBudget(Mutex<Option<Instant>>);

impl TableCpuBudget {
    /// Runs `make_tables` if tables may be made now. `make_tables` receives a time limit and returns the time that it
    /// took. Returns the time at which tables may be made next.
    pub fn run_within_budget(&self, make_tables: impl FnOnce(Duration) -> Duration) -> Instant {
        let mut next_allowed_at = self.0.lock();
        if let Some(next_time) = next_allowed_at.filter(|allowed_at| *allowed_at > Instant::now()) {
            return next_time;
        }
        let used_time = make_tables(MAX_TABLE_COMPUTATION_TIME);
        *next_allowed_at
            .insert(Instant::now() + (used_time * PAUSE_TO_COMPUTATION_TIME_RATIO).max(MIN_TABLE_COMPUTATION_PAUSE))
    }
}
