//! The pure logic of coreward: what RSS does, what a cookie is, where a connection goes.
//!
//! No I/O, no clock, no global randomness: time and random numbers come in as arguments, so that the live controller,
//! the tests of the BPF programs and the simulator all decide by the same code, and the same input gives the same
//! answer on every machine.
//!
//! * [`tuple`]: addresses, services, the 4-tuple of a connection
//! * [`rss`]: the Toeplitz hash, RSS keys, indirection tables
//! * [`cookie`]: the cookie in the TCP timestamp
//! * [`correction`]: the cookie that the load balancer itself stamps, and servers' clocks
//! * [`key_activation`]: from when on which key stamps
//! * [`health`]: whether a server is fit for new connections, as checks tell
//! * [`tsval_clamp`]: how the time in it goes on after a long silence
//! * [`consistency`]: how packets find the server of their connection
//! * [`connection_table`]: its entries, when they may be freed, and what packets and user space do with them
//! * [`load`]: absolute reports become smoothed loads per core
//! * [`recent`]: how much counters have grown in the last seconds, and what follows
//! * [`placement`]: the table that the data plane consults for a first packet, and how it does
//! * [`lb`]: the load balancer, packet by packet, as `bpf/lb/lb.bpf.c` is
//! * [`bucket_history`]: whose a bucket was before
//! * [`allowance`]: how many new connections a server may still take
//! * [`policy`]: what fills that table; one file per policy
//! * [`dispatch`]: which core of a server gets a request; one file per policy
//! * [`statistics`]: variance % and friends
//! * [`arrivals`]: logs of connections, kept by the demo and replayed by the simulator
//! * [`fleet`]: servers, controller and load balancer in virtual time
//! * [`replay`]: an arrival log in virtual time

#![deny(missing_docs)]

pub mod allowance;
pub mod arrivals;
pub mod bucket_history;
pub mod connection_table;
pub mod consistency;
pub mod cookie;
pub mod correction;
pub mod dispatch;
pub mod fleet;
pub mod health;
pub mod key_activation;
pub mod lb;
pub mod load;
pub mod placement;
pub mod policy;
pub mod recent;
pub mod replay;
pub mod rss;
pub mod statistics;
pub mod tsval_clamp;
pub mod tuple;

pub use tuple::{FourTuple, ServerId, ServiceAddress};
