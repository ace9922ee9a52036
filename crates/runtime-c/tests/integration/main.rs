//! The header, calls, and a server in C under the orchestrator.

mod calls;
mod header;
mod server;
