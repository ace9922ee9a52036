//! Tests of the header, the C functions, and servers in C under the orchestrator.

mod batch;
mod calls;
mod header;
mod rocksdb;
mod server;
