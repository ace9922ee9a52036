//! The load balancer's daemon.
//!
//! * [`announce`]: VIPs to the routers, by a routing daemon
//! * [`capture_command`]: `coreward capture`
//! * [`config`]: its file
//! * [`connections_command`]: `coreward connections`
//! * [`daemon`]: follows the controller
//! * [`forwarder`]: what the controller says, put into the data plane
//! * [`health`]: checks of the services' servers
//! * [`last_configuration`]: the configuration in force, kept for a start without controller
//! * [`routing`]: whether the kernel hands servers' answers on
//! * [`sweeper`]: which entries of the connection table may be freed

pub mod announce;
pub mod capture_command;
pub mod config;
pub mod connections_command;
pub mod daemon;
pub mod forwarder;
pub mod health;
pub mod last_configuration;
pub mod routing;
pub mod sweeper;
