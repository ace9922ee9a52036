//! The part of the controller's time that tables may take.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Time in which due tables are made before reports have their turn.
const TABLES_AT_ONCE: Duration = Duration::from_millis(2);
/// Pause after tables, as a multiple of their time: they take at most half of a CPU.
const TABLES_REST: u32 = 1;
/// Shortest pause: changes in it are in the next tables.
const MIN_TABLE_PAUSE: Duration = Duration::from_millis(1);

/// Time from which tables may be made again; `None`: at once.
#[derive(Debug, Default)]
pub struct TableBudget(Mutex<Option<Instant>>);

impl TableBudget {
    /// Runs `make`, which is given a time limit and returns the time it took, if tables may be made now. Returns when
    /// they may be made next.
    pub fn run_within(&self, make: impl FnOnce(Duration) -> Duration) -> Instant {
        let mut next = self.0.lock();
        if let Some(later) = next.filter(|next| *next > Instant::now()) {
            return later;
        }
        let took = make(TABLES_AT_ONCE);
        *next.insert(Instant::now() + (took * TABLES_REST).max(MIN_TABLE_PAUSE))
    }
}
