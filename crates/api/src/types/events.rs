//! Events of the fleet.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Query that selects events of the fleet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// Only events with an id greater than this one are returned.
    #[serde(default)]
    #[param(value_type = Option<u64>, maximum = 9007199254740991_u64)]
    pub after: u64,
    /// Maximum number of events to return. The newest events are returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<u16>,
}

/// Answer with the newest events of the fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Events {
    /// Identifier of the controller's process. The ids of events restart with each process.
    pub run_id: String,
    /// Events, the oldest first. The controller keeps the newest 1,000.
    pub events: Vec<Event>,
}

/// Event in the fleet, such as a state change of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Id of the event, which grows by one with every event since the controller's start.
    pub id: u64,
    /// Time of the event (ms since 1970).
    pub at_unix_ms: u64,
    /// Severity of the event.
    pub severity: Severity,
    /// Kind of the event, whose name is the same in all versions.
    pub event: EventId,
    /// Kind of the event's subject.
    pub subject_kind: SubjectKind,
    /// Name of the event's subject, or empty if the event concerns all subjects of this kind.
    pub subject_name: String,
    /// Description of the event, for people.
    pub message: String,
}

/// Severity of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The event needs no action.
    Info,
    /// The event needs a check by an operator.
    Warning,
}

/// Kind of an event (docs/api.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventId {
    /// This controller has begun to lead, or has started.
    ControllerStarted,
    /// An operator has applied another fleet document.
    FleetApplied,
    /// A fleet document with another generation has become active, for any reason.
    FleetActivated,
    /// A service has been added to the fleet document.
    ServiceAdded,
    /// The policy of a service has changed.
    ServicePolicyChanged,
    /// A service has been removed from the fleet document.
    ServiceRemoved,
    /// A server has been added to the fleet document.
    ServerAdded,
    /// The state of a server has changed to active, joining, down, draining or gone.
    ServerStateChanged,
    /// The weight of a server has changed.
    ServerWeightChanged,
    /// A server that had left the fleet was forgotten, so its id is free again.
    ServerForgotten,
    /// A server was drained or undrained by command.
    ServerDrainChanged,
    /// A load balancer has connected, disconnected, fallen silent, or is lost.
    LoadBalancerStateChanged,
    /// A load balancer was forgotten, because it was disconnected for too long or by command.
    LoadBalancerForgotten,
    /// The next cookie key is being distributed.
    KeysAnnounced,
    /// The next cookie key has become the key that stamps new cookies.
    KeysSwitched,
    /// A rotation of the cookie keys was begun or continued by command.
    KeysRotated,
    /// A warning of `coreward status` has begun.
    WarningStarted,
    /// A warning of `coreward status` has ended.
    WarningEnded,
}

impl EventId {
    /// All kinds of events.
    pub const ALL: [Self; 18] = [
        Self::ControllerStarted,
        Self::FleetApplied,
        Self::FleetActivated,
        Self::ServiceAdded,
        Self::ServicePolicyChanged,
        Self::ServiceRemoved,
        Self::ServerAdded,
        Self::ServerStateChanged,
        Self::ServerWeightChanged,
        Self::ServerForgotten,
        Self::ServerDrainChanged,
        Self::LoadBalancerStateChanged,
        Self::LoadBalancerForgotten,
        Self::KeysAnnounced,
        Self::KeysSwitched,
        Self::KeysRotated,
        Self::WarningStarted,
        Self::WarningEnded,
    ];

    /// Returns the event's name in JSON documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::ControllerStarted => "controller-started",
            Self::FleetApplied => "fleet-applied",
            Self::FleetActivated => "fleet-activated",
            Self::ServiceAdded => "service-added",
            Self::ServicePolicyChanged => "service-policy-changed",
            Self::ServiceRemoved => "service-removed",
            Self::ServerAdded => "server-added",
            Self::ServerStateChanged => "server-state-changed",
            Self::ServerWeightChanged => "server-weight-changed",
            Self::ServerForgotten => "server-forgotten",
            Self::ServerDrainChanged => "server-drain-changed",
            Self::LoadBalancerStateChanged => "load-balancer-state-changed",
            Self::LoadBalancerForgotten => "load-balancer-forgotten",
            Self::KeysAnnounced => "keys-announced",
            Self::KeysSwitched => "keys-switched",
            Self::KeysRotated => "keys-rotated",
            Self::WarningStarted => "warning-started",
            Self::WarningEnded => "warning-ended",
        }
    }
}

/// Kind of an event's subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SubjectKind {
    /// Event about the controller itself.
    Controller,
    /// Event about the fleet document.
    Fleet,
    /// Event about a service.
    Service,
    /// Event about a server.
    Server,
    /// Event about a load balancer.
    LoadBalancer,
    /// Event about the cookie keys.
    Keys,
}

impl fmt::Display for SubjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Controller => "controller",
            Self::Fleet => "fleet",
            Self::Service => "service",
            Self::Server => "server",
            Self::LoadBalancer => "load balancer",
            Self::Keys => "keys",
        })
    }
}
