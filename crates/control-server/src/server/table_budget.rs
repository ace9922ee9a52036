//! The part of the controller's time that tables may take.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Tables that are due are made as long as this; then reports have their turn.
const TABLES_AT_ONCE: Duration = Duration::from_millis(2);
/// After tables were made, none are for so many times as long: they take at most half of a CPU.
const TABLES_REST: u32 = 1;
/// But at least so long: what comes meanwhile is in the next ones.
const TABLES_GAP: Duration = Duration::from_millis(1);

/// Time from which on tables may be made again; `None`: at once.
#[derive(Debug, Default)]
pub struct TableBudget(Mutex<Option<Instant>>);

impl TableBudget {
    /// Runs `make`, which is given a time limit and returns the time it took, if tables may be made now. Returns when
    /// they may be made next.
    pub fn spend(&self, make: impl FnOnce(Duration) -> Duration) -> Instant {
        let mut next = self.0.lock();
        if let Some(later) = next.filter(|next| *next > Instant::now()) {
            return later;
        }
        let took = make(TABLES_AT_ONCE);
        *next.insert(Instant::now() + (took * TABLES_REST).max(TABLES_GAP))
    }
}
