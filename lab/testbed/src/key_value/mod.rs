//! A key-value server: GET, PUT and SCAN over an ordered store in memory, one UDP socket per worker.
//!
//! The workers are targets of dispatchers: all sockets have one address (SO_REUSEPORT), and a worker reads only its
//! own. Worker K is named `coreK`. By default each worker is a process with its own store, with equal initial contents:
//! processes can be killed and stopped separately, and a GET returns the values of PUTs at the same worker. With
//! `--threads` all workers share one store behind a lock.
//!
//! * [`server`]: starts and restarts workers; [`handle`]: a key-value server in a testbed

pub mod handle;
pub(crate) mod rocksdb;
pub mod server;
pub(crate) mod store;
pub(crate) mod worker;
