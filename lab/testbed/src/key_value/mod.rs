//! Key-value server with GET, PUT and SCAN over an ordered store in memory, and one UDP socket per worker.
//!
//! Dispatchers can choose its workers. All sockets have one address (SO_REUSEPORT), and a worker reads only its own.
//! Worker K is named `coreK`. By default each worker is a process with its own store, which has the same initial
//! contents. Processes can be killed and stopped separately, and a GET sees only those PUTs that the same worker
//! executed. With `--threads` all workers share one store behind a lock.
//!
//! * [`server`] starts and restarts workers.
//! * [`handle`] is a key-value server in a testbed.

pub mod handle;
pub(crate) mod rocksdb;
pub mod server;
pub(crate) mod store;
pub(crate) mod worker;
