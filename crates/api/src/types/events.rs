//! What has happened.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Which events are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// Only those with a greater id.
    #[serde(default)]
    #[param(value_type = Option<u64>, maximum = 9007199254740991_u64)]
    pub after: u64,
    /// At most so many, the newest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<u16>,
}

/// The newest events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Events {
    /// Different for every start of the controller: ids begin again.
    pub run: String,
    /// The oldest first. The controller keeps 1,000.
    pub events: Vec<Event>,
}

/// Something that has happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Grows by one with every event since the controller's start.
    pub id: u64,
    /// When (ms since 1970).
    pub at_unix_ms: u64,
    /// How much it matters.
    pub severity: Severity,
    /// What kind of thing has happened: stays the same from version to version.
    pub event: EventId,
    /// Whom it concerns.
    pub kind: EventKind,
    /// Its name; empty: all.
    pub name: String,
    /// What, in words.
    pub message: String,
}

/// How much an event matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know.
    Info,
    /// To be looked at.
    Warning,
}

/// Kind of an event (docs/api.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventId {
    /// This controller has begun to lead, or has started.
    ControllerStarted,
    /// Somebody has put another document in force.
    FleetApplied,
    /// A document of another generation is in force, whatever way it came.
    FleetInForce,
    /// A service is new in the document.
    ServiceNew,
    /// A service has another policy.
    ServicePolicy,
    /// A service is in the document no more.
    ServiceGone,
    /// A server is new in the document.
    ServerNew,
    /// A server is in another state: up, down, draining, gone.
    ServerState,
    /// A server has another weight.
    ServerWeight,
    /// A server that left is forgotten, and its id is free.
    ServerForgotten,
    /// Somebody has drained a server, or ended that.
    ServerDrain,
    /// A load balancer has connected, disconnected, fallen silent or is lost.
    LoadBalancerState,
    /// A load balancer is forgotten, by time or by somebody.
    LoadBalancerForgotten,
    /// The next cookie key is on its way to everybody.
    KeysAnnounced,
    /// Another cookie key stamps from now on.
    KeysSwitched,
    /// Somebody has begun a rotation of the cookie keys, or gone on with it.
    KeysRotated,
    /// A warning of `coreward status` that was not there before.
    WarningBegins,
    /// A warning is there no more.
    WarningEnds,
}

impl EventId {
    /// All of them.
    pub const ALL: [Self; 18] = [
        Self::ControllerStarted,
        Self::FleetApplied,
        Self::FleetInForce,
        Self::ServiceNew,
        Self::ServicePolicy,
        Self::ServiceGone,
        Self::ServerNew,
        Self::ServerState,
        Self::ServerWeight,
        Self::ServerForgotten,
        Self::ServerDrain,
        Self::LoadBalancerState,
        Self::LoadBalancerForgotten,
        Self::KeysAnnounced,
        Self::KeysSwitched,
        Self::KeysRotated,
        Self::WarningBegins,
        Self::WarningEnds,
    ];

    /// As documents have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::ControllerStarted => "controller-started",
            Self::FleetApplied => "fleet-applied",
            Self::FleetInForce => "fleet-in-force",
            Self::ServiceNew => "service-new",
            Self::ServicePolicy => "service-policy",
            Self::ServiceGone => "service-gone",
            Self::ServerNew => "server-new",
            Self::ServerState => "server-state",
            Self::ServerWeight => "server-weight",
            Self::ServerForgotten => "server-forgotten",
            Self::ServerDrain => "server-drain",
            Self::LoadBalancerState => "load-balancer-state",
            Self::LoadBalancerForgotten => "load-balancer-forgotten",
            Self::KeysAnnounced => "keys-announced",
            Self::KeysSwitched => "keys-switched",
            Self::KeysRotated => "keys-rotated",
            Self::WarningBegins => "warning-begins",
            Self::WarningEnds => "warning-ends",
        }
    }
}

/// Whom an event concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// The controller itself.
    Controller,
    /// The fleet's document.
    Fleet,
    /// A service.
    Service,
    /// A server.
    Server,
    /// A load balancer.
    LoadBalancer,
    /// The cookie keys.
    Keys,
}

impl fmt::Display for EventKind {
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
