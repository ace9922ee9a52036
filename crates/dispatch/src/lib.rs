//! `coreward dispatch`: which worker of a UDP service gets a request, for unmodified servers. docs/dispatch.md is the
//! reference for users, `bpf/dispatch/dispatch.bpf.c` says how it works.
//!
//! * [`config`]: what is said of each service
//! * [`service`]: one service: its workers found and looked after
//! * [`dispatcher`]: all of them, in a thread: of the agent, or of [`daemon`], until a signal
//! * [`status`]: what the programs count, for people and programs
//! * [`command`]: the command's arguments

pub mod command;
pub mod config;
pub mod daemon;
pub mod dispatcher;
pub mod service;
pub mod status;
