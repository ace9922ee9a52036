//! Which worker of UDP services gets a request: `coreward dispatch` in the agent. What it counts, for `coreward status`.

use coreward_dispatch::dispatcher::Dispatcher;
use coreward_wire::v1;

/// What is wrong, in words.
pub fn warnings(dispatcher: &Dispatcher) -> Vec<String> {
    if dispatcher.is_running() {
        return dispatcher.seen().warnings;
    }
    vec!["nobody looks after dispatched services any more: restart the agent".to_owned()]
}

/// As the last look saw it.
pub fn reported(dispatcher: &Dispatcher) -> Vec<v1::DispatchedService> {
    dispatcher.seen().services.into_iter().map(v1::DispatchedService::from).collect()
}
