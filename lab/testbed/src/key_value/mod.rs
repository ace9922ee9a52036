//! A key-value server: GET, PUT and SCAN over an ordered store in memory, one UDP socket per worker.
//!
//! Its workers are the choices of dispatchers: all sockets have one address (SO_REUSEPORT), and a worker reads only its
//! own. Worker K is named `coreK`. By default each is a process with a store of its own, all filled alike: processes
//! can be killed and stopped one by one, and a GET sees a PUT only at the same worker. With `--threads` they share one
//! store behind a lock, and a GET sees every PUT.
//!
//! * [`server`]: starting and restarting workers; [`handle`]: a server on a testbed's server

pub mod handle;
pub mod server;
pub(crate) mod store;
pub(crate) mod worker;
