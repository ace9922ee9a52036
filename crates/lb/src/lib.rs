//! The load balancer's daemon.
//!
//! * [`announce`]: VIPs for routers, by a routing daemon
//! * [`capture_command`]: `coreward capture`
//! * [`config`]: the configuration file
//! * [`connections_command`]: `coreward connections`
//! * [`daemon`]: the daemon's loop
//! * [`forwarder`]: application of the controller's updates
//! * [`health`]: checks of the services' servers
//! * [`last_configuration`]: the configuration for a start without controller
//! * [`resolvers`]: MAC addresses in each VLAN
//! * [`routing`]: check of the kernel's forwarding
//! * [`sweeper`]: expired entries of the connection table

pub mod announce;
pub mod capture_command;
pub mod config;
pub mod connections_command;
pub mod daemon;
pub mod forwarder;
pub mod health;
pub mod last_configuration;
pub mod resolvers;
pub mod routing;
pub mod sweeper;
