//! Scheduler of tables: at the end of each report interval, or soon after a change of their inputs, with a limited
//! share of time.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::controller_state::ControllerState;

/// Maximum time after a restart for which load balancers keep their tables, until agents have reported. Agents retry at
/// least every 2 s.
const SETTLE_LIMIT: Duration = Duration::from_secs(4);
const SETTLE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Makes tables when they are due, forever. `has_predecessor`: load balancers have tables of an earlier process.
pub async fn make_tables(shared: &ControllerState, has_predecessor: bool) {
    let limit = Instant::now() + if has_predecessor { SETTLE_LIMIT } else { Duration::ZERO };
    while Instant::now() < limit && !shared.have_all_reported() {
        tokio::time::sleep(SETTLE_POLL_INTERVAL).await;
    }
    shared.settle();
    tokio::join!(table_interval_loop(shared), on_change_loop(shared));
}

async fn table_interval_loop(shared: &ControllerState) {
    let mut due = Instant::now();
    loop {
        sleep_until(due).await;
        // After a pause of the machine one tick, not all missed ones.
        due = (due + shared.tick()).max(Instant::now());
    }
}

/// Makes due tables whenever the reports have not done so, forever.
async fn on_change_loop(shared: &ControllerState) {
    loop {
        shared.wait_until_tables_due().await;
        while shared.may_make_tables() {
            sleep_until(shared.make_tables_within_budget()).await;
        }
    }
}
