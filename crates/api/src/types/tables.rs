//! Placement tables.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Summaries of the newest placement table of every service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Tables {
    /// Summaries of the tables, in the order of the services in the fleet document.
    pub tables: Vec<TableSummary>,
}

/// Summary of a placement table, without its contents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TableSummary {
    /// Name of the service.
    pub service: String,
    /// Generation of the table, which grows with each new table of the service, or 0 if there is none yet.
    pub generation: u64,
    /// Age of the table (ms).
    pub age_ms: u32,
    /// Placement rule of the table (enum placement_rule), or null if there is no table yet.
    pub placement_rule: Option<String>,
    /// Number of the table's buckets.
    pub bucket_count: u32,
}

/// Contents of a placement table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Table {
    /// Name of the service.
    pub service: String,
    /// Generation of the table, which grows with each new table of the service.
    pub generation: u64,
    /// Age of the table (ms).
    pub age_ms: u32,
    /// Placement rule of the table (enum placement_rule).
    pub placement_rule: String,
    /// Number of the table's buckets.
    pub bucket_count: u32,
    /// Candidates for new connections, by RSS group and then by bucket. The candidates of a bucket begin with the best.
    pub candidates_by_rss_group: Vec<Vec<Vec<Candidate>>>,
    /// Servers that take new connections.
    pub members: Vec<Member>,
    /// Name of the server of each bucket, for connections without a cookie.
    pub consistent_servers: Vec<String>,
}

/// A core of a server that is a candidate for new connections of a bucket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Candidate {
    /// Name of the server.
    pub server: String,
    /// Receive queue of the core, or 0 if the candidate is a whole server. Null if the table does not contain the core.
    pub core: Option<u32>,
    /// Load of the core when the table was made, in fractions of the core's capacity.
    pub load: f64,
}

/// A server that takes new connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// Name of the server.
    pub server: String,
    /// Mean load of the server when the table was made, in fractions of its capacity.
    pub load: f64,
}
