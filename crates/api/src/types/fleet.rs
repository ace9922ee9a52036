//! The fleet document with servers and services, as the operator wrote it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{MAX_SAFE_INTEGER, serde_whole};
use coreward_config::ConfigDiagnostic;

/// The active fleet document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Fleet {
    /// Generation of the document, which grows with every change of its text, or 0 if none was ever applied.
    pub generation: u64,
    /// Path of the fleet document's file, or null if a command applied the document.
    pub file: Option<String>,
    /// Text of the document in TOML, with comments.
    pub text: String,
}

/// Request to apply a fleet document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewFleet {
    /// Name of the document, shown in error messages.
    #[serde(default = "default_document_name")]
    pub name: String,
    /// Text of the document in TOML (docs/config.md).
    pub text: String,
    /// Generation of the document to replace. The request fails with a conflict if another generation is active.
    #[serde(deserialize_with = "serde_whole::deserialize_whole_number")]
    #[schema(maximum = 9007199254740991_u64)]
    pub generation: u64,
    /// Whether only to return the changes, without applying them.
    #[serde(default)]
    pub dry_run: bool,
}

const _: () = assert!(MAX_SAFE_INTEGER == 9_007_199_254_740_991);

fn default_document_name() -> String {
    "fleet.toml".to_owned()
}

/// Result of a request to apply a fleet document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetApplied {
    /// Generation of the document that is active after the request.
    pub generation: u64,
    /// Generation of the document that the new one was compared with.
    pub replaced_generation: u64,
    /// Whether the new text is active. After a dry run, this is true only if the text was active before.
    pub is_active: bool,
    /// Differences between the replaced and the new document, one for each changed key, server or service.
    pub changes: Vec<FleetChange>,
}

/// One difference between two fleet documents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetChange {
    /// Subject of the change, such as "server s1" or "service web", or empty for the whole fleet.
    pub subject: String,
    /// Changed configuration key, or null if the whole server or service was added or removed.
    pub key: Option<String>,
    /// Old value of the key, or null if it was not set.
    pub old: Option<String>,
    /// New value of the key, or null if it is no longer set.
    pub new: Option<String>,
    /// Description of the change in one line.
    pub message: String,
    /// Reason why established connections break, or null if they continue.
    #[serde(default)]
    pub breakage_reason: Option<String>,
}

/// Request to check a fleet document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckRequest {
    /// Name of the document, shown in error messages.
    #[serde(default = "default_document_name")]
    pub name: String,
    /// Text of the document in TOML (docs/config.md).
    pub text: String,
}

/// Result of the check of a fleet document: the mistakes found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckResult {
    /// Mistakes in the order of their lines, or empty if there are none.
    pub mistakes: Vec<DocumentMistake>,
    /// Number of further mistakes, which are not listed. The document may have even more.
    pub omitted_count: u64,
}

/// Mistake in a fleet document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DocumentMistake {
    /// Name of the document in the request.
    pub file: String,
    /// Line of the mistake, counted from 1, or null if the mistake concerns the whole document.
    pub line: Option<u32>,
    /// Column of the mistake in characters, counted from 1.
    pub column: Option<u32>,
    /// Full name of the key, such as `service.vip`, or null for a syntax error.
    pub key: Option<String>,
    /// Invalid value, or another description of the mistake.
    pub problem: String,
    /// Expected value, or null if none can be named.
    pub expected: Option<String>,
    /// The valid name closest to the invalid one, or null if no name is close.
    pub nearest: Option<String>,
    /// Description of the mistake in one line.
    pub message: String,
}

impl From<&ConfigDiagnostic> for DocumentMistake {
    fn from(mistake: &ConfigDiagnostic) -> Self {
        Self {
            file: mistake.file.display().to_string(),
            line: mistake.location.map(|location| location.line),
            column: mistake.location.map(|location| location.column),
            key: (!mistake.key.is_empty()).then(|| mistake.key.clone()),
            problem: mistake.problem.clone(),
            expected: mistake.expected.as_deref().map(str::to_owned),
            nearest: mistake.nearest_name.as_deref().map(str::to_owned),
            message: mistake.to_string(),
        }
    }
}
