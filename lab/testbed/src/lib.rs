//! A datacentre in network namespaces: for the demo and for every end-to-end test.
//!
//! Two parts are emulated, and marked so in all output: RSS (virtual Ethernet has none) and cores (one machine with two
//! CPUs carries sixteen). Packets, TCP, the load balancer, the agents and the controller are real.
//!
//! * [`addresses`]: addresses and names of the hosts
//! * [`topology`]: [`Testbed`], the hosts and the switch between them; [`uplink`]: the client's side of it; [`vlans`]
//! * [`rss_emulation`]: a server's NIC
//! * [`nginx`]: stock nginx on a server
//! * [`baseline_lb`]: IPVS or HAProxy in front of the servers
//! * [`fleet`]: controller, load balancer and agents, started and killed
//! * [`conformance`]: stock clients and servers while everything changes; [`counters`]: the kernel's own
//! * [`paced_server`]: a server with emulated cores; [`key_value`]: one that stores, and takes requests as datagrams
//! * [`emulated_server`]: event loop and worker processes of such servers
//! * [`load`]: replays an arrival log; [`connection_errors`]: how connections break
//! * [`knot_benchmark`]: Knot DNS as it is, with `coreward dispatch` and without
//! * [`stream`]: many servers in one process, and a client of connections that last; [`pcc`]: which of them break
//! * [`chaos`]: faults while clients connect; [`preload`]: a wall clock and a disk for each daemon
//! * [`dispatch_soak`]: `coreward dispatch` while everything goes wrong
//! * [`dispatch_figure`]: `coreward dispatch` and real servers, as figures
//! * [`doc_runner`]: documents whose commands are run as they are written
//! * [`process`], [`namespace`]: what runs where
//! * [`demo`]: `coreward-lab demo`; [`cli`]: `coreward-lab testbed`

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
mod interrupt;
pub mod key_value;
pub mod knot_benchmark;
pub mod load;
pub mod namespace;
pub mod nginx;
pub mod orchestrated_server;
pub mod paced_server;
pub mod pcc;
pub mod preload;
pub mod process;
pub mod rss_emulation;
pub mod server_router;
pub mod stream;
pub mod topology;
pub mod uplink;
pub mod vlans;

pub use coreward_dataplane::skip_if;
pub use namespace::Namespace;
pub use process::{Process, TIMEOUT};
pub use topology::{Testbed, TestbedOptions, missing_privilege, missing_testbed_rights};
