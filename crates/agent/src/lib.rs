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
//! * [`daisy_chain`]: where servers are that packets may be handed to
//! * [`stall`]: whether stamped connections get on
//! * [`rss_conflicts`]: what on this host overrides RSS
//! * [`rss_command`]: `coreward agent rss`
//! * [`connection_counter`]: how many connections each service has
//! * [`sysfs`]: a device's directory in /sys
//! * [`saved_settings`]: original settings, to be put back

pub mod agent;
pub mod config;
pub mod connection_counter;
pub mod connections;
pub mod daemon;
pub mod daisy_chain;
mod decapsulation;
pub mod dispatch;
mod forwarded;
pub mod load;
pub mod report_state;
pub mod rss;
pub mod rss_command;
pub mod rss_conflicts;
pub mod saved_settings;
pub mod stall;
pub mod steering;
pub mod sysfs;
pub mod timestamps;
