//! The pure logic of coreward for RSS, cookies and the placement of connections.
//!
//! The crate has no I/O, no clock and no global randomness, because time and random numbers are arguments. So the live
//! controller, the tests of the BPF programs and the simulator decide by the same code, and the same input gives the
//! same result on every machine.
//!
//! * [`tuple`]: addresses, services, the 4-tuple of a connection
//! * [`rss`]: the Toeplitz hash, RSS keys, indirection tables
//! * [`cookie`]: the cookie in the TCP timestamp
//! * [`lb_stamping`]: LB-side stamping, and servers' clocks
//! * [`key_activation`]: activation time of the fleet's keys
//! * [`health`]: health of servers by checks
//! * [`tsval_clamp`]: TSval after a long silence
//! * [`consistency`]: consistency modes of services
//! * [`connection_table`]: entries of stateful services, their timers, and the operations on them
//! * [`load`]: smoothed loads per core from absolute reports
//! * [`counter_growth`]: growth of counters in the last seconds, and its interpretation
//! * [`placement`]: the data plane's table for new connections
//! * [`lb`]: reference model of `bpf/lb/lb.bpf.c`, packet by packet
//! * [`bucket_history`]: previous servers of buckets
//! * [`connection_allowance`]: limit of a server's share of new connections
//! * [`policy`]: policies that fill placement tables, one file each
//! * [`dispatch`]: policies that assign requests to a server's cores, one file each
//! * [`statistics`]: variance % and similar measures
//! * [`arrival_log`]: logs of connections, kept by the demo and replayed by the simulator
//! * [`fleet`]: servers, controller and load balancer in virtual time
//! * [`replay`]: an arrival log in virtual time
//! * [`vlan`]: VLAN ids

#![deny(missing_docs)]

pub mod arrival_log;
pub mod bucket_history;
pub mod connection_allowance;
pub mod connection_table;
pub mod consistency;
pub mod cookie;
pub mod counter_growth;
pub mod dispatch;
pub mod fleet;
pub mod forwarding;
pub mod health;
pub mod key_activation;
pub mod lb;
pub mod lb_stamping;
pub mod load;
pub mod placement;
pub mod policy;
pub mod replay;
pub mod rss;
pub mod statistics;
pub mod tsval_clamp;
pub mod tuple;
pub mod vlan;

pub use tuple::{FourTuple, ServerId, ServiceAddress};
