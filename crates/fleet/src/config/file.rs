//! Keys of the fleet document, and the valid values of each key.

use coreward_config::{
    BoundedDuration, HOUR_NS, LocatedValue, MILLISECOND_NS, PrintableName, SECOND_NS, Spanned, config_struct,
    string_enum,
};
use coreward_model::ServerId;
use coreward_model::load::SmoothingWeight;
use coreward_model::placement::{BucketCount, DEFAULT_PLACEMENT_TABLE_LIFETIME};
use coreward_model::policy::{ServerCapacity, ServerWeight};
use coreward_model::vlan::Vlan;

use super::address::ServerAddress;
use super::service::FleetServiceTable;
use super::{DEFAULT_MAX_CONNECTION_LIFETIME, PlacementTableTiming, ServerDrainState};

const MOVE_TO_CONTROLLER_FILE_HINT: &str = "it in the controller's own file";

config_struct! {
    /// Fleet document.
    pub struct FleetFile {
        /// Time between two reports of an agent.
        pub report_interval: Option<BoundedDuration<{ 10 * MILLISECOND_NS }, SECOND_NS>>,
        /// Trigger of placement tables: "on-change", as soon as a report changes an input of a table, or "interval",
        /// once per report_interval.
        pub table_updates: PlacementTableTiming = PlacementTableTiming::OnChange,
        /// Time for which load balancers use a table that depends on loads while no controller leads; afterwards they
        /// place new connections by their own counts.
        pub table_lifetime: BoundedDuration<SECOND_NS, HOUR_NS> = BoundedDuration(DEFAULT_PLACEMENT_TABLE_LIFETIME),
        /// Weight of the newest report in the moving average of a core's load.
        pub load_ewma_alpha: SmoothingWeight = SmoothingWeight::PAPER_VALUE,
        /// Default number of buckets in the placement tables of services (`buckets`).
        pub buckets: BucketCount = BucketCount::PAPER_VALUE,
        /// Maximum lifetime of a cookie.
        pub max_connection_lifetime: BoundedDuration<SECOND_NS, { 8760 * HOUR_NS }> =
            BoundedDuration(DEFAULT_MAX_CONNECTION_LIFETIME),
        /// Interval of cookie key rotations, at least max_connection_lifetime. By default, keys rotate by command only.
        pub key_rotation: Option<Spanned<BoundedDuration<HOUR_NS, { 8760 * HOUR_NS }>>>,
        /// Names of the racks that may connect. By default, any rack may.
        pub racks: Option<Vec<Spanned<PrintableName>>>,
        /// Names of the load balancers that may connect. By default, any load balancer may.
        pub load_balancers: Option<Vec<Spanned<PrintableName>>>,
        /// Servers of the fleet.
        pub servers as "server": Vec<Spanned<FleetServerTable>>,
        /// Services of the fleet.
        pub services as "service": Vec<Spanned<FleetServiceTable>>,
    }
    elsewhere {
        "rss_key" => "`rss_key_file = \"FILE\"` in the controller's own file, with the key in FILE",
        "rss_key_file" => MOVE_TO_CONTROLLER_FILE_HINT,
        "listen" => MOVE_TO_CONTROLLER_FILE_HINT,
        "store" => MOVE_TO_CONTROLLER_FILE_HINT,
    }
}

config_struct! {
    /// Table `[[server]]`, which describes one server.
    pub struct FleetServerTable {
        /// Unique name of the server, as in its agent's file.
        pub name: LocatedValue<PrintableName>,
        /// Unique address of the server, in the load balancers' network or behind routers.
        pub address: LocatedValue<ServerAddress>,
        /// VLAN of frames from load balancers to the server. By default, frames are untagged.
        pub vlan: Option<Vlan>,
        /// Id of the server in cookies. By default, it is drawn at random.
        pub id: Option<Spanned<ServerId>>,
        /// State of the server. "draining": it takes no new connections, and established ones still reach it.
        pub state: ServerDrainState = ServerDrainState::Active,
        /// Share of new connections relative to other servers. 0: none, as when draining.
        pub weight: ServerWeight = ServerWeight::ONE,
        /// Capacity, where 1 is that of a typical core. By default, the number of the server's cores.
        pub capacity: Option<ServerCapacity>,
        /// Names of the racks that the server's agent may use. By default, those of the fleet; []: none.
        pub racks: Option<Vec<Spanned<PrintableName>>>,
    }
}

string_enum!(
    ServerDrainState,
    "state",
    [("active", ServerDrainState::Active), ("draining", ServerDrainState::Draining)]
        .map(|(name, state)| (name.to_owned(), state))
);

string_enum!(
    PlacementTableTiming,
    "tables",
    [("on-change", PlacementTableTiming::OnChange), ("interval", PlacementTableTiming::Interval)]
        .map(|(name, timing)| (name.to_owned(), timing))
);
