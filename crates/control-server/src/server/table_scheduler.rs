//! Scheduler that makes tables at the end of each report interval, or soon after a change of their inputs. The share of
//! time that it may use is limited.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::controller_state::ControllerState;

/// Maximum time after a restart for which load balancers keep their tables until agents have reported. It is longer
/// than the 2 s within which agents retry.
const SETTLE_LIMIT: Duration = Duration::from_secs(4);
const SETTLE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Makes due tables, and never returns. `has_predecessor` is whether load balancers have tables of an earlier process.
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
        // After a pause of the machine, only one tick follows instead of all missed ones.
        due = (due + shared.tick()).max(Instant::now());
    }
}

/// Makes due tables whenever the tasks that receive reports have not done so. Never returns.
async fn on_change_loop(shared: &ControllerState) {
    loop {
        shared.wait_until_tables_due().await;
        while shared.may_make_tables() {
            sleep_until(shared.make_tables_within_budget()).await;
        }
    }
}
