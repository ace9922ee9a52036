//! Scheduler that makes tables at the end of each report interval, or soon after a change of their inputs. The share of
//! time that it may use is limited.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::controller_state::ControllerState;

/// Maximum time after a restart for which load balancers keep their tables until agents have reported. It is longer
/// than the 2 s within which agents retry.
const FIRST_REPORTS_TIMEOUT_AFTER_RESTART: Duration = Duration::from_secs(4);
const FIRST_REPORTS_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Makes due tables, and never returns. `has_predecessor` is whether load balancers have tables of an earlier process.
pub async fn run_table_scheduler(controller_state: &ControllerState, has_predecessor: bool) {
    let settle_deadline =
        Instant::now() + if has_predecessor { FIRST_REPORTS_TIMEOUT_AFTER_RESTART } else { Duration::ZERO };
    while Instant::now() < settle_deadline && !controller_state.are_loads_and_health_known() {
        tokio::time::sleep(FIRST_REPORTS_POLL_INTERVAL).await;
    }
    controller_state.allow_tables();
    tokio::join!(make_tables_each_interval(controller_state), make_tables_on_change(controller_state));
}

async fn make_tables_each_interval(controller_state: &ControllerState) {
    let mut due_at = Instant::now();
    loop {
        sleep_until(due_at).await;
        // After a pause of the machine, only one tick follows instead of all missed ones.
        due_at = (due_at + controller_state.end_report_interval()).max(Instant::now());
    }
}

/// Computes each due table that the tasks that receive reports have not yet computed. Never returns.
async fn make_tables_on_change(controller_state: &ControllerState) {
    loop {
        controller_state.wait_until_tables_due().await;
        while controller_state.may_make_tables() {
            sleep_until(controller_state.make_tables_within_budget()).await;
        }
    }
}
