//! Runs request dispatch (`coreward dispatch`) inside the agent, and reports its state for `coreward status`.

use coreward_dispatch::dispatcher::Dispatcher;
use coreward_wire::v1;

/// Returns the problems that the dispatcher has, as text for `coreward status`.
pub fn warnings(dispatcher: &Dispatcher) -> Vec<String> {
    if dispatcher.is_running() {
        return dispatcher.state().warnings;
    }
    vec!["no daemon maintains the dispatched services: restart the agent".to_owned()]
}

/// Returns the state of each dispatched service when the dispatcher last polled it.
pub fn service_reports(dispatcher: &Dispatcher) -> Vec<v1::DispatchedService> {
    dispatcher.state().service_statuses.into_iter().map(v1::DispatchedService::from).collect()
}
