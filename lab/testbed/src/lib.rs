//! Datacentre in network namespaces, for the demo and all end-to-end tests.
//!
//! Two parts are emulated, and all output mentions this. RSS is emulated because virtual Ethernet has none, and cores
//! are emulated because two CPUs must run sixteen of them. Packets, TCP, the load balancer, the agents and the
//! controller are real.
//!
//! * [`addresses`]: addresses and names of the hosts
//! * [`topology`]: [`Testbed`], the hosts and the switch between them; [`uplink`]: the client's side of it; [`vlans`]
//! * [`rss_emulation`]: emulated NIC of a server
//! * [`nginx`]: stock nginx on a server
//! * [`baseline_lb`]: IPVS or HAProxy in front of the servers
//! * [`fleet`]: controller, load balancer and agents, started and killed
//! * [`conformance`]: stock clients and servers while tables and pool change; [`counters`]: kernel counters
//! * [`paced_server`]: a server with emulated cores; [`key_value`]: a key-value server over UDP
//! * [`emulated_server`]: event loop and worker processes of such servers
//! * [`load`]: replays an arrival log; [`connection_errors`]: kinds of broken connections
//! * [`knot_benchmark`]: unmodified Knot DNS with and without `coreward dispatch`
//! * [`stream_connections`]: servers and clients of long connections; [`pcc`]: counts broken ones
//! * [`chaos`]: faults while clients connect; [`preloaded_faults`]: a wall clock and a disk for each daemon
//! * [`dispatch_soak`]: `coreward dispatch` under faults
//! * [`dispatch_figure`]: figures of `coreward dispatch` with real servers
//! * [`doc_runner`]: runs the commands in documents
//! * [`process`], [`namespace`]: processes and network namespaces
//! * [`demo`]: `coreward-lab demo`; [`network_options`]; [`cli`]: `coreward-lab testbed`

pub mod addresses;
pub mod baseline_lb;
pub mod chaos;
pub mod cli;
pub mod conformance;
pub mod connection_errors;
pub mod container;
mod core_load_file;
pub mod counters;
pub mod demo;
pub mod dispatch_figure;
pub mod dispatch_soak;
pub mod doc_runner;
mod emulated_server;
pub mod fleet;
pub mod http;
pub mod instance;
mod interrupt_flag;
pub mod key_value;
pub mod knot_benchmark;
pub mod load;
pub mod namespace;
pub mod network_options;
pub mod nginx;
pub mod orchestrated_server;
pub mod paced_server;
pub mod pcc;
pub mod preloaded_faults;
pub mod process;
pub mod rss_emulation;
pub mod server_router;
pub mod stream_connections;
pub mod topology;
pub mod uplink;
pub mod vlans;

pub use coreward_dataplane::skip_if;
pub use namespace::NetworkNamespace;
pub use process::{DEFAULT_WAIT_TIMEOUT, TestbedProcess};
pub use topology::{Testbed, TestbedOptions, find_missing_privilege, find_missing_testbed_rights};
