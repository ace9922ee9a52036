//! The files: their keys, and what one value must be.

use coreward_config::{Field, HOUR, MILLISECOND, Name, Period, SECOND, Spanned, config_struct, string_enum};
use coreward_model::ServerId;
use coreward_model::load::Alpha;
use coreward_model::placement::{BucketCount, DEFAULT_TABLE_LIFETIME};
use coreward_model::policy::{Capacity, Weight};
use coreward_model::vlan::Vlan;

use super::address::ServerAddress;
use super::service::Service;
use super::{DEFAULT_MAX_CONNECTION_LIFETIME, ServerState, TableTiming};

const CONTROLLER_FILE_HINT: &str = "it in the controller's own file";

config_struct! {
    /// The fleet's.
    pub struct FleetFile {
        /// Time between two reports of an agent.
        pub report_interval: Option<Period<{ 10 * MILLISECOND }, SECOND>>,
        /// When placement tables are made: "on-change", as soon as a report changes what they are made of, or
        /// "interval", once per report_interval.
        pub table_updates: TableTiming = TableTiming::OnChange,
        /// Time for which load balancers use a table that depends on loads while no controller leads; then they place
        /// new connections by their own counts.
        pub table_lifetime: Period<SECOND, HOUR> = Period(DEFAULT_TABLE_LIFETIME),
        /// Weight of the newest report in a core's load.
        pub load_ewma_alpha: Alpha = Alpha::PUBLISHED,
        /// Default of the services' `buckets`.
        pub buckets: BucketCount = BucketCount::PUBLISHED,
        /// Longest life of a cookie.
        pub max_connection_lifetime: Period<SECOND, { 8760 * HOUR }> = Period(DEFAULT_MAX_CONNECTION_LIFETIME),
        /// Interval of key rotations, at least max_connection_lifetime.
        pub key_rotation: Option<Spanned<Period<HOUR, { 8760 * HOUR }>>>,
        /// Names of the racks that may connect; without it any may.
        pub racks: Option<Vec<Spanned<Name>>>,
        /// Names of the load balancers that may connect; without it any may.
        pub load_balancers: Option<Vec<Spanned<Name>>>,
        /// One server each.
        pub servers as "server": Vec<Spanned<Server>>,
        /// One service each.
        pub services as "service": Vec<Spanned<Service>>,
    }
    elsewhere {
        "rss_key" => "`rss_key_file = \"FILE\"` in the controller's own file, with the key in FILE",
        "rss_key_file" => CONTROLLER_FILE_HINT,
        "listen" => CONTROLLER_FILE_HINT,
        "store" => CONTROLLER_FILE_HINT,
    }
}

config_struct! {
    /// One `[[server]]`.
    pub struct Server {
        /// Unique name, as in the agent's file.
        pub name: Field<Name>,
        /// Unique address, in the load balancers' network or behind routers.
        pub address: Field<ServerAddress>,
        /// VLAN of frames from load balancers to it; without it they are untagged.
        pub vlan: Option<Vlan>,
        /// Id in cookies; drawn at random by default.
        pub id: Option<Spanned<ServerId>>,
        /// "draining": takes no new connections, established ones still reach it.
        pub state: ServerState = ServerState::Active,
        /// Relative share of new connections; 0: none, as when draining.
        pub weight: Weight = Weight::ONE,
        /// Capacity in cores of the usual speed; without it the number of its cores.
        pub capacity: Option<Capacity>,
        /// Names of the racks that its agent may use; without it the fleet's; []: none.
        pub racks: Option<Vec<Spanned<Name>>>,
    }
}

string_enum!(
    ServerState,
    "state",
    [("active", ServerState::Active), ("draining", ServerState::Draining)]
        .map(|(name, state)| (name.to_owned(), state))
);

string_enum!(
    TableTiming,
    "tables",
    [("on-change", TableTiming::OnChange), ("interval", TableTiming::Interval)]
        .map(|(name, timing)| (name.to_owned(), timing))
);
