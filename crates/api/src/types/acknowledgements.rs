//! Who has a configuration in force.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Who has the newest configuration in force: of load balancers that are alive, and of agents that are connected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Acknowledgements {
    /// Of the newest configuration.
    pub configuration_generation: u64,
    /// That have it in force, but for what they refuse.
    pub acknowledged_count: u64,
    /// That have not said so.
    pub waiting_count: u64,
    /// The first 100 of them.
    pub waiting: Vec<Waiting>,
    /// What cannot be used somewhere: what was in force there before stays so.
    pub refused_count: u64,
    /// The first 100 of that.
    pub refused: Vec<RefusedUpdate>,
}

/// One that has not said that the newest configuration is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Waiting {
    /// "lb" or "agent".
    pub part: String,
    /// Name of the load balancer or server.
    pub name: String,
    /// The newest that it has; 0: none.
    pub configuration_generation: u64,
}

/// Something of an update that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusedUpdate {
    /// "lb" or "agent".
    pub part: String,
    /// Name of the load balancer or server.
    pub name: String,
    /// "configuration" or "table".
    pub what: String,
    /// Name of the service; null: all of the update.
    pub service: Option<String>,
    /// Of the configuration or the table; 0: not known.
    pub generation: u64,
    /// What is wrong.
    pub reason: String,
}
