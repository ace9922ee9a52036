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

const IN_THE_CONTROLLERS_FILE: &str = "it in the controller's own file";

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
        /// Buckets of a service that names none of its own.
        pub buckets: BucketCount = BucketCount::PUBLISHED,
        /// How long a cookie may live.
        pub max_connection_lifetime: Period<SECOND, { 8760 * HOUR }> = Period(DEFAULT_MAX_CONNECTION_LIFETIME),
        /// Interval of key rotations, at least max_connection_lifetime.
        pub key_rotation: Option<Spanned<Period<HOUR, { 8760 * HOUR }>>>,
        /// The racks there are, by name: no other one may connect. Without it any may.
        pub racks: Option<Vec<Spanned<Name>>>,
        /// The load balancers there are, by name: no other one may connect. Without it any may.
        pub load_balancers: Option<Vec<Spanned<Name>>>,
        /// One server each.
        pub servers as "server": Vec<Spanned<Server>>,
        /// One service each.
        pub services as "service": Vec<Spanned<Service>>,
    }
    elsewhere {
        "rss_key" => "`rss_key_file = \"FILE\"` in the controller's own file, with the key in FILE",
        "rss_key_file" => IN_THE_CONTROLLERS_FILE,
        "listen" => IN_THE_CONTROLLERS_FILE,
        "store" => IN_THE_CONTROLLERS_FILE,
    }
}

config_struct! {
    /// One `[[server]]`.
    pub struct Server {
        /// Unique name, as in the agent's file.
        pub name: Field<Name>,
        /// Address that load balancers reach: in their own network, or, if it is IPv4, behind routers; used once.
        pub address: Field<ServerAddress>,
        /// VLAN of load balancers' frames to it; without it they are untagged.
        pub vlan: Option<Vlan>,
        /// Id in cookies; drawn at random by default.
        pub id: Option<Spanned<ServerId>>,
        /// "draining": takes no new connections, established ones still reach it.
        pub state: ServerState = ServerState::Active,
        /// Its part of new connections next to the others'; 0: none, as when draining.
        pub weight: Weight = Weight::ONE,
        /// How much it can do, in cores of the usual speed; without it its cores.
        pub capacity: Option<Capacity>,
        /// Names of the racks through which its agent may speak; without it the fleet's, [] none: only by itself.
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
