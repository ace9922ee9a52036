//! Tests that need neither root nor a network namespace, in one executable.

mod connection_hash;
mod connection_table_loom;
mod policies;
mod racks;
