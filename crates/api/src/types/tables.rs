//! Placement tables.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The newest table of every service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Tables {
    /// In the order of the fleet's document.
    pub tables: Vec<TableSummary>,
}

/// A table without contents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TableSummary {
    /// Its service.
    pub service: String,
    /// Grows with every table of the service; 0: none yet.
    pub generation: u64,
    /// Age.
    pub age_ms: u32,
    /// Placement rule (enum placement_rule); null: no table yet.
    pub rule: Option<String>,
    /// Number of buckets.
    pub bucket_count: u32,
}

/// A table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Table {
    /// Its service.
    pub service: String,
    /// Grows with every table of the service.
    pub generation: u64,
    /// Age.
    pub age_ms: u32,
    /// Placement rule (enum placement_rule).
    pub rule: String,
    /// Number of buckets.
    pub bucket_count: u32,
    /// For each RSS group, by bucket: candidates for new connections, the best first.
    pub groups: Vec<Vec<Vec<Candidate>>>,
    /// The servers that take new connections.
    pub members: Vec<Member>,
    /// By bucket: the server of connections without a cookie.
    pub consistent: Vec<String>,
}

/// A core of a server that is a candidate of a bucket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Candidate {
    /// Name of the server.
    pub server: String,
    /// Its receive queue; null: the bucket reaches several cores.
    pub core: Option<u32>,
    /// Load when the table was made, in fractions of capacity.
    pub load: f64,
}

/// A server that takes new connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// Its name.
    pub server: String,
    /// Its mean load when the table was made, in fractions of capacity.
    pub load: f64,
}
