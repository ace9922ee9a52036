//! The agent, which is the daemon that runs on a server.
//!
//! * [`config`]: configuration file
//! * [`daemon`]: connection to the controller, and orderly shutdown
//! * [`agent`]: settings of the server, controller's configuration, reports
//! * [`load`]: busy times of the cores
//! * [`rss`]: reading, setting, restoring and verifying RSS key and indirection table
//! * [`steering`]: giving the connections of core k to the worker of core k
//! * [`dispatch`]: dispatching requests of UDP services to workers
//! * [`timestamps`]: the TCP timestamp sysctl that the cookie needs
//! * [`daisy_chain`]: servers to which packets of unknown connections may be forwarded
//! * [`connection_stall`]: detection of stalled stamped connections
//! * [`rss_conflicts`]: settings of this host that override RSS
//! * [`rss_command`]: `coreward agent rss`
//! * [`connection_counter`]: number of open connections of each service
//! * [`sysfs`]: a device's directory in /sys
//! * [`saved_settings`]: original settings that are restored at the end

pub mod agent;
pub mod config;
pub mod connection_counter;
pub mod connection_stall;
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
pub mod steering;
pub mod sysfs;
pub mod timestamps;
mod unstamped_syn_acks;
