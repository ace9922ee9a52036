//! The server agent: everything of coreward that runs on a server.
//!
//! * [`config`]: configuration file
//! * [`daemon`]: controller connection, reports, orderly end
//! * [`agent`]: inputs, configuration, reports
//! * [`load`]: busy times of the cores
//! * [`rss`]: RSS key and indirection table: reading, setting, restoring, verifying
//! * [`steering`]: connections of core k to the worker of core k
//! * [`dispatch`]: requests of UDP services to workers
//! * [`timestamps`]: the sysctl that the cookie needs
//! * [`daisy_chain`]: servers to which unknown packets may be forwarded
//! * [`stall`]: detection of stalled stamped connections
//! * [`rss_conflicts`]: settings of this host that override RSS
//! * [`rss_command`]: `coreward agent rss`
//! * [`connection_counter`]: connections of each service
//! * [`sysfs`]: a device's directory in /sys
//! * [`saved_settings`]: original settings, for restoring

pub mod agent;
pub mod config;
pub mod connection_counter;
pub mod connections;
pub mod daemon;
pub mod daisy_chain;
mod decapsulation;
pub mod dispatch;
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
mod unstamped_syn_acks;
