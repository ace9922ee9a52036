//! The load balancer's daemon and its commands.
//!
//! * [`vip_announcement`]: announcement of VIPs to routers through a routing daemon
//! * [`capture_command`]: `coreward capture`
//! * [`config`]: the configuration file
//! * [`connections_command`]: `coreward connections`
//! * [`daemon`]: the daemon's loop
//! * [`forwarder`]: application of the controller's updates
//! * [`health`]: checks of the services' servers
//! * [`last_configuration`]: the saved configuration, for a start without controller
//! * `pcapng`: files that `coreward capture` writes
//! * [`resolvers`]: MAC addresses of neighbours in each VLAN
//! * [`routing`]: check whether the kernel forwards servers' replies
//! * [`sweeper`]: removal of expired entries from the connection table

pub mod capture_command;
pub mod config;
pub mod connections_command;
pub mod daemon;
pub mod forwarder;
pub mod health;
pub mod last_configuration;
mod pcapng;
pub mod resolvers;
pub mod routing;
pub mod sweeper;
pub mod vip_announcement;
