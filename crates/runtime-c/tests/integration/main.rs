//! The header, calls, and a server in C under the orchestrator.

mod batch;
mod calls;
mod header;
mod rocksdb;
mod server;
