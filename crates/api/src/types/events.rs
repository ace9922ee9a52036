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
