//! The server agent: everything of coreward that runs on a server.
//!
//! * [`config`]: its file
//! * [`daemon`]: follows the controller, reports, ends in order
//! * [`agent`]: what it watches, what it is told, what it says
//! * [`load`]: how busy the cores are
//! * [`rss`]: the NIC's key and indirection table: read, set, put back, checked
//! * [`steering`]: connections of core k to the worker of core k
//! * [`dispatch`]: requests of UDP services to workers
//! * [`timestamps`]: the sysctl that the cookie needs
//! * [`chain`]: where servers are that packets may be handed to
//! * [`stall`]: whether stamped connections get on
//! * [`hazards`]: what on this host overrides RSS
//! * [`rss_command`]: `coreward agent rss`
//! * [`counting`]: how many connections each service has
//! * [`sysfs`]: a device's directory in /sys
//! * [`remembered`]: original settings, to be put back

pub mod agent;
pub mod chain;
pub mod config;
pub mod connections;
pub mod counting;
pub mod daemon;
pub mod dispatch;
mod forwarded;
pub mod hazards;
pub mod load;
pub mod remembered;
pub mod rss;
pub mod rss_command;
pub mod stall;
pub mod steering;
pub mod sysfs;
pub mod timestamps;
pub mod told;
