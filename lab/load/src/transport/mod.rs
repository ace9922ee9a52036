//! Transports that carry requests and responses.

mod connections;
mod http;
mod tcp;
mod udp;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub use connections::{ConnectionPool, ConnectionProtocol, ConnectionReply, MalformedResponse};
pub use http::HttpGetClient;
pub use tcp::PacedProtocol;
pub use udp::{DatagramProtocol, KeyValueRequestSettings, UdpTransport};

use crate::workload::RequestParameters;

/// Source addresses and ports of a load generator's flows.
#[derive(Debug, Clone)]
pub struct FlowSources {
    /// Source addresses of the target's address family, which the flows use in turn. If empty, the kernel chooses.
    pub addresses: Vec<IpAddr>,
    /// Number of flows, each of which has its own source port.
    pub flow_count: u16,
    /// Source port of the first flow, which the ports of the other flows follow. `None` lets the kernel choose.
    pub first_source_port: Option<u16>,
}

impl FlowSources {
    /// Returns the source address of flow `index` to `target`. Port 0 and the unspecified address let the kernel
    /// choose.
    pub fn source_address(&self, index: u16, target: SocketAddr) -> SocketAddr {
        let unspecified_address =
            if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let address = self
            .addresses
            .get(usize::from(index) % self.addresses.len().max(1))
            .copied()
            .unwrap_or(unspecified_address);
        SocketAddr::new(address, self.first_source_port.map_or(0, |first_port| first_port + index))
    }
}

/// Response to a request, or one of its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransportAnswer {
    pub request_id: u32,
    pub part_index_and_count: (u8, u8),
    /// Time when the kernel received the response (CLOCK_MONOTONIC, ns).
    pub arrived_ns: u64,
    /// Worker that answered, or `None` if the protocol does not report it.
    pub worker: Option<AnsweringWorker>,
}

/// Worker that answered a request: the number of its server (0 if there is only one), and its number in the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct AnsweringWorker {
    pub server: u8,
    pub worker: u16,
}

/// Number of transport errors by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct TransportErrorCounts {
    /// Number of requests that were refused by an ICMP error or a reset, because no listener exists.
    pub refused: u64,
    /// Number of requests that the kernel did not send because its buffers were full.
    pub not_sent: u64,
    /// Number of times that received bytes were not a valid response.
    pub malformed: u64,
    /// Number of responses that report an error, such as HTTP status 400 and above or a PUT into a full store.
    pub failed: u64,
    /// Number of connections that ended with unanswered requests.
    pub broken_connections: u64,
}

/// Transport that sends requests and receives their responses.
pub trait RequestTransport {
    /// Sends a request, or queues it until a connection is free or `deadline_ns` has passed. A request that cannot be
    /// sent is counted as an error and stays unanswered.
    fn send(&mut self, parameters: &RequestParameters, id: u32, deadline_ns: u64);

    /// Waits for responses until `until_ns` on the clock [`crate::event_loop::now_ns`], and adds them to `answers`.
    /// Fails when the wait fails, or the transport fails permanently.
    fn receive(&mut self, until_ns: u64, answers: &mut Vec<TransportAnswer>) -> io::Result<()>;

    fn error_counts(&self) -> TransportErrorCounts;
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;
    use crate::event_loop::now_ns;
    use crate::key_value::{self, KeyValueResponseStatus, KeyValueResponseWriter};
    use crate::request_type::RequestType;

    const TWO_FLOW_SOURCES: FlowSources = FlowSources { addresses: Vec::new(), flow_count: 2, first_source_port: None };
    const RECEIVE_TIMEOUT_NS: u64 = 30_000_000_000;

    #[test]
    fn udp_transport_exchanges_requests_with_an_ipv6_target() {
        let server = UdpSocket::bind("[::1]:0").unwrap();
        let key_value_protocol = DatagramProtocol::KeyValue(KeyValueRequestSettings { key_count: 1, value_bytes: 0 });
        let mut transport =
            UdpTransport::open(server.local_addr().unwrap(), &TWO_FLOW_SOURCES, key_value_protocol, 1).unwrap();
        let parameters = RequestParameters { class_index: 0, request_type: RequestType::GET, service_ns: 0 };
        transport.send(&parameters, 7, now_ns() + RECEIVE_TIMEOUT_NS);
        let mut datagram = [0; 100];
        let (length, client) = server.recv_from(&mut datagram).unwrap();
        let mut response = KeyValueResponseWriter::default();
        response.begin_response(
            &key_value::KeyValueRequest::parse(&datagram[..length]).unwrap(),
            KeyValueResponseStatus::Done,
            3,
        );
        response
            .finish_response()
            .for_each(|datagram| assert_eq!(server.send_to(datagram, client).unwrap(), datagram.len()));
        let mut answers = Vec::new();
        while answers.is_empty() {
            transport.receive(now_ns() + RECEIVE_TIMEOUT_NS, &mut answers).unwrap();
        }
        assert_eq!((answers[0].request_id, answers[0].worker), (7, Some(AnsweringWorker { server: 0, worker: 3 })));
    }

    #[test]
    fn tcp_transport_connects_to_an_ipv6_target() {
        let server = TcpListener::bind("[::1]:0").unwrap();
        let sources = FlowSources { addresses: vec![Ipv6Addr::LOCALHOST.into()], ..TWO_FLOW_SOURCES };
        let connections = ConnectionPool::open(PacedProtocol, server.local_addr().unwrap(), sources, 1).unwrap();
        assert!(server.accept().unwrap().1.is_ipv6());
        assert_eq!(connections.error_counts(), TransportErrorCounts::default());
    }
}
