//! Runs request dispatch (`coreward dispatch`) inside the agent, and reports its state for `coreward status`.

use coreward_dispatch::dispatcher::DispatcherHandle;
use coreward_wire::v1;

/// Returns the dispatcher's current problems as warnings for `coreward status`.
pub fn dispatcher_warnings(dispatcher: &DispatcherHandle) -> Vec<String> {
    if dispatcher.is_running() {
        return dispatcher.state().warnings;
    }
    vec!["no daemon maintains the dispatched services: restart the agent".to_owned()]
}

/// Returns the state of each dispatched service at the dispatcher's last poll.
pub fn dispatched_service_reports(dispatcher: &DispatcherHandle) -> Vec<v1::DispatchedService> {
    dispatcher.state().service_statuses.into_iter().map(v1::DispatchedService::from).collect()
}
