//! When tables are made: at the end of each report interval, or as soon as something has changed of which they are made, while
//! reports have their share of the time.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::shared::Shared;

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

/// Makes tables, for ever. `restarted`: load balancers have those of before.
pub async fn make_tables(shared: &Shared, restarted: bool) {
    let limit = Instant::now() + if restarted { SETTLE_LIMIT } else { Duration::ZERO };
    while Instant::now() < limit && !shared.all_report() {
        tokio::time::sleep(SETTLE_LOOK).await;
    }
    shared.settle();
    let mut due = Instant::now();
    loop {
        tokio::select! {
            () = sleep_until(due) => {
                // After a pause of the machine one tick, not all that were missed.
                due = (due + shared.tick()).max(Instant::now());
            }
            () = shared.due() => {
                let took = shared.make_due_tables(TABLES_AT_ONCE);
                tokio::time::sleep((took * TABLES_REST).max(TABLES_GAP)).await;
            }
        }
    }
}
