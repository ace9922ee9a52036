//! Dispatches a UDP service's requests to an unmodified server's workers (`coreward dispatch`). Users find the
//! reference in docs/dispatch.md. The program is described in `bpf/dispatch/dispatch.bpf.c`.
//!
//! * [`config`]: configuration of the services
//! * [`service`]: one service and its workers
//! * [`dispatcher`]: maintenance of all services, in a thread of the agent or of [`daemon`]
//! * [`status`]: the BPF programs' counters
//! * [`command`]: the command and its arguments

pub mod command;
pub mod config;
pub mod daemon;
pub mod dispatcher;
pub mod service;
pub mod status;
