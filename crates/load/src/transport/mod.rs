//! How requests get to the server and responses back.

mod udp;

use std::io;

pub use udp::{Keys, Sources, Udp};

use crate::workload::Demand;

/// A response, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The request's.
    pub id: u32,
    /// Which part this is, of how many.
    pub part: (u8, u8),
    /// When the kernel received it (ns).
    pub arrived_ns: u64,
    /// Who answered, where the protocol says so.
    pub worker: Option<Worker>,
}

/// Who answered: server (0 where there is only one) and worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct Worker {
    /// Number of the server.
    pub server: u8,
    /// Its worker.
    pub worker: u16,
}

/// What went wrong on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Errors {
    /// Nobody listened: an ICMP error came back, or a reset.
    pub refused: u64,
    /// The kernel did not take a request: its buffers were full.
    pub not_sent: u64,
    /// What came was no response.
    pub malformed: u64,
    /// Connections that ended before the test did.
    pub broken_connections: u64,
}

/// One way of sending requests.
pub trait Transport {
    /// Sends a request, or queues it if its connection is not free. What cannot be sent is counted and goes unanswered.
    fn send(&mut self, demand: &Demand, id: u32);

    /// Waits for answers until a moment of [`crate::event_loop::now_ns`] at the latest and puts those that came into `answers`.
    ///
    /// # Errors
    /// When the kernel refuses to wait, or something broke that no later request can repair.
    fn receive(&mut self, until_ns: u64, answers: &mut Vec<Answer>) -> io::Result<()>;

    /// What went wrong so far.
    fn errors(&self) -> Errors;
}
