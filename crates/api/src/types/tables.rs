//! Placement tables.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The newest table of every service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Tables {
    /// Tables in the order of the fleet's document.
    pub tables: Vec<TableSummary>,
}

/// Summary of a table, without contents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TableSummary {
    /// Name of the service.
    pub service: String,
    /// Generation, which grows with every table of the service; 0: none yet.
    pub generation: u64,
    /// Age of the table (ms).
    pub age_ms: u32,
    /// Placement rule (enum placement_rule); null: no table yet.
    pub rule: Option<String>,
    /// Number of buckets.
    pub bucket_count: u32,
}

/// Contents of a placement table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Table {
    /// Name of the service.
    pub service: String,
    /// Generation, which grows with every table of the service.
    pub generation: u64,
    /// Age of the table (ms).
    pub age_ms: u32,
    /// Placement rule (enum placement_rule).
    pub rule: String,
    /// Number of buckets.
    pub bucket_count: u32,
    /// Candidates for new connections by RSS group and bucket, the best first.
    pub groups: Vec<Vec<Vec<Candidate>>>,
    /// Servers that take new connections.
    pub members: Vec<Member>,
    /// Server for connections without a cookie, by bucket.
    pub consistent: Vec<String>,
}

/// A core of a server that is a candidate for new connections of a bucket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Candidate {
    /// Name of the server.
    pub server: String,
    /// Receive queue of the core; null: the bucket reaches several cores.
    pub core: Option<u32>,
    /// Load of the core when the table was made, in fractions of capacity.
    pub load: f64,
}

/// A server that takes new connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// Name of the server.
    pub server: String,
    /// Mean load of the server when the table was made, in fractions of capacity.
    pub load: f64,
}
