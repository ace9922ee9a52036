//! Scheduler of tables: at the end of each report interval, or soon after a change of their inputs, with a share of
//! time for reports.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use super::controller_state::ControllerState;

/// After a restart load balancers keep their tables until agents are back, which retry every 2 s at the latest; but no
/// longer than this.
const SETTLE_LIMIT: Duration = Duration::from_secs(4);
const SETTLE_LOOK: Duration = Duration::from_millis(10);
/// Time in which due tables are made before reports have their turn.
const TABLES_AT_ONCE: Duration = Duration::from_millis(2);
/// Pause after tables, as a multiple of their time: they take at most half of a CPU.
const TABLES_REST: u32 = 1;
/// Shortest pause: changes in it are in the next tables.
const TABLES_GAP: Duration = Duration::from_millis(1);

/// Time from which tables may be made again; `None`: at once.
#[derive(Debug, Default)]
pub struct TableBudget(Mutex<Option<Instant>>);

impl TableBudget {
    /// Makes due tables if the budget allows. Returns the time of the next turn.
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
    /// Makes tables after new loads, if the budget allows, in the task that received the loads. A separate task would
    /// wait behind the burst of hundreds of tasks with reports.
    pub fn on_loads_updated(&self) {
        if self.may_make_tables() {
            self.table_budget.take(self);
            self.inputs_changed();
        }
    }
}

/// Makes tables, forever. `restarted`: load balancers have earlier ones.
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
        // After a pause of the machine one tick, not all missed ones.
        due = (due + shared.tick()).max(Instant::now());
    }
}

/// Makes due tables while no loads arrive.
async fn on_change(shared: &ControllerState) {
    loop {
        shared.due().await;
        while shared.may_make_tables() {
            sleep_until(shared.table_budget.take(shared)).await;
        }
    }
}
