//! The fleet's document: servers and services, as the operator wrote them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{MAX_INTEGER, serde_whole};
use crate::problem::DocumentMistake;

/// The document in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Fleet {
    /// Grows with every change of the text; 0: there never was one.
    pub generation: u64,
    /// The file in which it stands; null: it was applied.
    pub file: Option<String>,
    /// TOML, with comments.
    pub text: String,
}

/// A document that is to be in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewFleet {
    /// What mistakes call the document.
    #[serde(default = "unnamed")]
    pub name: String,
    /// TOML (docs/config.md).
    pub text: String,
    /// Of the document that it is to replace: another one in force is a conflict.
    #[serde(deserialize_with = "serde_whole::whole")]
    #[schema(maximum = 9007199254740991_u64)]
    pub generation: u64,
    /// Only say what it would change.
    #[serde(default)]
    pub dry_run: bool,
}

const _: () = assert!(MAX_INTEGER == 9_007_199_254_740_991);

fn unnamed() -> String {
    "fleet.toml".to_owned()
}

/// What another document changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetApplied {
    /// Of the document in force now.
    pub generation: u64,
    /// Of the document with which it was compared.
    pub replaced_generation: u64,
    /// Whether it is in force: not after a dry run, unless its text was in force before.
    pub in_force: bool,
    /// Server by server, service by service, key by key.
    pub changes: Vec<FleetChange>,
}

/// One thing that is different.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetChange {
    /// "server s1", "service web"; empty: the whole fleet.
    pub what: String,
    /// The key; null: the whole server or service is new, or is no more.
    pub key: Option<String>,
    /// Null: nothing was said of it.
    pub old: Option<String>,
    /// Null: nothing is said any more.
    pub new: Option<String>,
    /// All of that in one line.
    pub message: String,
    /// Why established connections break by it; null: they go on.
    #[serde(default)]
    pub breaks: Option<String>,
}

/// A document that is to be looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What mistakes call the document.
    #[serde(default = "unnamed")]
    pub name: String,
    /// TOML (docs/config.md).
    pub text: String,
}

/// What is wrong with a document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Checked {
    /// In the order of its lines; empty: nothing.
    pub mistakes: Vec<DocumentMistake>,
    /// How many more there are, at least.
    pub more: u64,
}
