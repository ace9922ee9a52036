//! Datagrams to the service that are not part of the load, and spoofed responses from the service's address.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};

use anyhow::Context as _;
use socket2::{Domain, Protocol, Socket, Type};

use crate::addresses::SERVICE_ADDRESS;
use crate::namespace::NetworkNamespace;

/// First request id of the requests that do not come from the load generator. The generator's ids count from 0.
pub const FIRST_UNANSWERED_REQUEST_ID: u32 = 1 << 31;

/// Client whose requests the key-value server never answers. Each request has a different id.
#[derive(Debug)]
pub struct UnansweredClient {
    socket: UdpSocket,
    next_request_id: u32,
}

impl UnansweredClient {
    /// Opens the client's socket in the network namespace of the client's host. Fails when the socket cannot be opened.
    pub fn open(client: &NetworkNamespace) -> anyhow::Result<Self> {
        let socket = client.run_within(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(SERVICE_ADDRESS)?;
            Ok(socket)
        })?;
        Ok(Self { socket, next_request_id: FIRST_UNANSWERED_REQUEST_ID })
    }

    /// Sends a request and returns its id, or `None` if the kernel rejected it.
    pub fn send_request(&mut self) -> Option<u32> {
        let id = self.next_request_id;
        self.next_request_id = id.checked_add(1).unwrap_or(FIRST_UNANSWERED_REQUEST_ID);
        let mut datagram = [0; 12];
        // The server does not answer, because request type 0 is invalid.
        datagram[4..8].copy_from_slice(&id.to_le_bytes());
        // The first call may only return the ICMP error of an earlier datagram (udp(7)). The second call sends in that
        // case.
        (self.socket.send(&datagram).is_ok() || self.socket.send(&datagram).is_ok()).then_some(id)
    }

    /// Returns the source address of the requests. Fails when the kernel does not report it.
    pub fn source_address(&self) -> anyhow::Result<SocketAddrV4> {
        match self.socket.local_addr()? {
            std::net::SocketAddr::V4(address) => Ok(address),
            std::net::SocketAddr::V6(address) => anyhow::bail!("{address}: expected an IPv4 address"),
        }
    }
}

/// Sender of forged responses. Its raw socket on the server's host sends them from the service's address.
#[derive(Debug)]
pub struct ResponseSpoofer {
    raw_socket: Socket,
}

impl ResponseSpoofer {
    /// Opens the raw socket in the network namespace of the server's host. Fails without root.
    pub fn open(server: &NetworkNamespace) -> anyhow::Result<Self> {
        let open_socket = || {
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP)).context("a raw socket")?;
            socket.set_header_included_v4(true)?;
            Ok(socket)
        };
        Ok(Self { raw_socket: server.run_within(open_socket)? })
    }

    /// Sends a client a forged response to the request `id`. Fails when the kernel does not send it.
    pub fn send_response(&self, client: SocketAddrV4, id: u32) -> anyhow::Result<()> {
        const IP_HEADER_BYTES: usize = 20;
        const UDP_HEADER_BYTES: usize = 8;
        let mut packet = [0; IP_HEADER_BYTES + UDP_HEADER_BYTES + 12];
        let length = packet.len() as u16;
        // RFC 791: version and header length, time to live, protocol, addresses. The kernel fills in the rest (raw(7)).
        (packet[0], packet[8], packet[9]) = (0x45, 64, 17);
        packet[12..16].copy_from_slice(&SERVICE_ADDRESS.ip().octets());
        packet[16..20].copy_from_slice(&client.ip().octets());
        // RFC 768: ports, length. The checksum is omitted.
        packet[20..22].copy_from_slice(&SERVICE_ADDRESS.port().to_be_bytes());
        packet[22..24].copy_from_slice(&client.port().to_be_bytes());
        packet[24..26].copy_from_slice(&(length - IP_HEADER_BYTES as u16).to_be_bytes());
        // Key-value protocol: type GET, id, one part.
        packet[28] = 1;
        packet[32..36].copy_from_slice(&id.to_le_bytes());
        packet[37] = 1;
        self.raw_socket.send_to(&packet, &client.into()).context("sending from a raw socket").map(drop)
    }
}
