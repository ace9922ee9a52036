//! `coreward dispatch`: dispatch of a UDP service's requests to workers, for unmodified servers. docs/dispatch.md is
//! the reference for users; `bpf/dispatch/dispatch.bpf.c` describes the program.
//!
//! * [`config`]: configuration of the services
//! * [`service`]: one service and its workers
//! * [`dispatcher`]: all services, in a thread of the agent or of [`daemon`]
//! * [`status`]: counts of the programs
//! * [`command`]: the command's arguments

pub mod command;
pub mod config;
pub mod daemon;
pub mod dispatcher;
pub mod service;
pub mod status;
