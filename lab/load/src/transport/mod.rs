//! Transports of requests and responses.

mod connections;
mod http;
mod tcp;
mod udp;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub use connections::{Connections, Malformed, Protocol, Reply};
pub use http::Http;
pub use tcp::Paced;
pub use udp::{Datagrams, Keys, Udp};

use crate::workload::Demand;

/// Sources of requests.
#[derive(Debug, Clone)]
pub struct Sources {
    /// Addresses of the target's family; flows take them in turn.
    pub addresses: Vec<IpAddr>,
    /// Number of flows: source ports.
    pub flows: u16,
    /// The first one's port, the others follow; `None`: the kernel chooses.
    pub first_port: Option<u16>,
}

impl Sources {
    /// Address and port of flow `index` to `target`; port 0 and the unspecified address: the kernel's choice.
    pub fn source(&self, index: u16, target: SocketAddr) -> SocketAddr {
        let any = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let address = self.addresses.get(usize::from(index) % self.addresses.len().max(1)).copied().unwrap_or(any);
        SocketAddr::new(address, self.first_port.map_or(0, |first| first + index))
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Worker {
    pub server: u8,
    pub worker: u16,
}

/// Errors on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
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

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;
    use crate::event_loop::now_ns;
    use crate::key_value::{self, ResponseWriter, Status};
    use crate::request_type::RequestType;

    const SOURCES: Sources = Sources { addresses: Vec::new(), flows: 2, first_port: None };
    const LIMIT_NS: u64 = 30_000_000_000;

    #[test]
    fn ipv6_target_is_loaded_by_udp() {
        let server = UdpSocket::bind("[::1]:0").unwrap();
        let keys = Datagrams::KeyValue(Keys { count: 1, value_bytes: 0 });
        let mut transport = Udp::open(server.local_addr().unwrap(), &SOURCES, keys, 1).unwrap();
        let demand = Demand { class: 0, request_type: RequestType::GET, service_ns: 0 };
        transport.send(&demand, 7, now_ns() + LIMIT_NS);
        let mut datagram = [0; 100];
        let (length, client) = server.recv_from(&mut datagram).unwrap();
        let mut response = ResponseWriter::default();
        response.begin(&key_value::Request::parse(&datagram[..length]).unwrap(), Status::Done, 3);
        response.finish().for_each(|datagram| assert_eq!(server.send_to(datagram, client).unwrap(), datagram.len()));
        let mut answers = Vec::new();
        while answers.is_empty() {
            transport.receive(now_ns() + LIMIT_NS, &mut answers).unwrap();
        }
        assert_eq!((answers[0].id, answers[0].worker), (7, Some(Worker { server: 0, worker: 3 })));
    }

    #[test]
    fn ipv6_target_is_loaded_by_tcp() {
        let server = TcpListener::bind("[::1]:0").unwrap();
        let sources = Sources { addresses: vec![Ipv6Addr::LOCALHOST.into()], ..SOURCES };
        let connections = Connections::open(Paced, server.local_addr().unwrap(), sources, 1).unwrap();
        assert!(server.accept().unwrap().1.is_ipv6());
        assert_eq!(connections.errors(), Errors::default());
    }
}
