//! When tables are made: at the end of each report interval, or as soon as something has changed of which they are made, while
//! reports have their share of the time.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use super::controller_state::ControllerState;

/// After a restart load balancers keep the tables that they have until agents, who try again every 2 s at the latest,
/// are back; but no longer than this.
const SETTLE_LIMIT: Duration = Duration::from_secs(4);
const SETTLE_LOOK: Duration = Duration::from_millis(10);
/// Tables that are due are made as long as this; then reports have their turn.
const TABLES_AT_ONCE: Duration = Duration::from_millis(2);
/// After tables were made, none are for so many times as long: they take at most half of a CPU.
const TABLES_REST: u32 = 1;
/// But at least so long: what comes meanwhile is in the next ones.
const TABLES_GAP: Duration = Duration::from_millis(1);

/// From when on it is the turn of tables again; `None`: it always was.
#[derive(Debug, Default)]
pub struct TableBudget(Mutex<Option<Instant>>);

impl TableBudget {
    /// Makes tables that are due if it is their turn. Gives when it is next.
    fn take(&self, shared: &ControllerState) -> Instant {
        let mut next = self.0.lock();
        if let Some(later) = next.filter(|next| *next > Instant::now()) {
            return later;
        }
        let took = shared.make_due_tables(TABLES_AT_ONCE);
        *next.insert(Instant::now() + (took * TABLES_REST).max(TABLES_GAP))
    }
}

impl ControllerState {
    /// Loads are new. Whoever takes them in makes the tables, too, when it is their turn: a task of their own that had to wait for its
    /// turn among hundreds that have reports to take in would make them after a burst of these.
    pub fn on_loads_updated(&self) {
        if self.may_make_tables() {
            self.table_budget.take(self);
            self.inputs_changed();
        }
    }
}

/// Makes tables, for ever. `restarted`: load balancers have those of before.
pub async fn make_tables(shared: &ControllerState, restarted: bool) {
    let limit = Instant::now() + if restarted { SETTLE_LIMIT } else { Duration::ZERO };
    while Instant::now() < limit && !shared.all_report() {
        tokio::time::sleep(SETTLE_LOOK).await;
    }
    shared.settle();
    tokio::join!(at_intervals(shared), on_change(shared));
}

async fn at_intervals(shared: &ControllerState) {
    let mut due = Instant::now();
    loop {
        sleep_until(due).await;
        // After a pause of the machine one tick, not all that were missed.
        due = (due + shared.tick()).max(Instant::now());
    }
}

/// Tables that are due while no loads come.
async fn on_change(shared: &ControllerState) {
    loop {
        shared.due().await;
        while shared.may_make_tables() {
            sleep_until(shared.table_budget.take(shared)).await;
        }
    }
}
