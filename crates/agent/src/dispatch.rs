//! Request dispatch in the agent (`coreward dispatch`), and its counts for `coreward status`.

use coreward_dispatch::dispatcher::Dispatcher;
use coreward_wire::v1;

/// Returns the problems of the dispatcher, as text for `coreward status`.
pub fn warnings(dispatcher: &Dispatcher) -> Vec<String> {
    if dispatcher.is_running() {
        return dispatcher.state().warnings;
    }
    vec!["no daemon maintains the dispatched services: restart the agent".to_owned()]
}

/// Returns the state of all dispatched services at the last poll.
pub fn service_reports(dispatcher: &Dispatcher) -> Vec<v1::DispatchedService> {
    dispatcher.state().services.into_iter().map(v1::DispatchedService::from).collect()
}
