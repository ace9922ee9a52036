//! Transports of requests and responses.

mod connections;
mod http;
mod tcp;
mod udp;

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};

pub use connections::{Connections, Malformed, Protocol, Reply};
pub use http::Http;
pub use tcp::Paced;
pub use udp::{Datagrams, Keys, Udp};

use crate::workload::Demand;

/// Sources of requests.
#[derive(Debug, Clone)]
pub struct Sources {
    /// Addresses; flows take them in turn.
    pub addresses: Vec<Ipv4Addr>,
    /// Number of flows: source ports.
    pub flows: u16,
    /// The first one's port, the others follow; `None`: the kernel chooses.
    pub first_port: Option<u16>,
}

impl Sources {
    /// Address and port of flow `index`; port 0: the kernel's choice.
    pub fn source(&self, index: u16) -> SocketAddrV4 {
        let count = self.addresses.len();
        let address = self.addresses.get(usize::from(index) % count.max(1)).copied().unwrap_or(Ipv4Addr::UNSPECIFIED);
        SocketAddrV4::new(address, self.first_port.map_or(0, |first| first + index))
    }
}

/// A response, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The request's.
    pub id: u32,
    pub part: (u8, u8),
    /// Time when the kernel received it (ns).
    pub arrived_ns: u64,
    /// Worker that answered, if the protocol has it.
    pub worker: Option<Worker>,
}

/// Worker that answered: server (0 where there is only one) and worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct Worker {
    pub server: u8,
    pub worker: u16,
}

/// Errors on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Errors {
    /// No listener: an ICMP error returned, or a reset.
    pub refused: u64,
    /// The kernel did not take a request: its buffers were full.
    pub not_sent: u64,
    /// Bytes that are no response.
    pub malformed: u64,
    /// The server answered that it could not do it: HTTP status 400 and above, a PUT into a full store.
    pub failed: u64,
    /// Connections that ended with requests on their way.
    pub broken_connections: u64,
}

/// One way of sending requests.
pub trait Transport {
    /// Sends a request, or queues it until a connection is free, but not beyond `deadline_ns`. What cannot be sent is
    /// counted and goes unanswered.
    fn send(&mut self, demand: &Demand, id: u32, deadline_ns: u64);

    /// Waits for answers until a moment of [`crate::event_loop::now_ns`] at the latest and puts those that came into
    /// `answers`. Fails when the kernel refuses to wait, or something broke that no later request can repair.
    fn receive(&mut self, until_ns: u64, answers: &mut Vec<Answer>) -> io::Result<()>;

    fn errors(&self) -> Errors;
}
