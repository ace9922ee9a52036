//! Datagram transport, with one socket per flow: key-value requests or DNS queries.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;

use anyhow::Context as _;
use coreward_model::rss::{seeded_rng, uniform_below};
use rand_xoshiro::Xoshiro256PlusPlus;
use zerocopy::FromBytes as _;

use super::{Answer, Sources, Transport, TransportErrorCounts, Worker};
use crate::dns::{self, DnsQuery};
use crate::event_loop::Epoll;
use crate::key_value::{Request, ResponseHeader, Status, key_name};
use crate::receive::Receiver;
use crate::request_type::RequestType;
use crate::workload::RequestParameters;

/// Size of the receive buffer for responses that the generator has not read yet (bytes).
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;
const RNG_STREAM_KEYS: u64 = 0x6c6f_6101;
const RNG_STREAM_FLOWS: u64 = 0x6c6f_6102;

/// Settings of the keys and values in key-value requests.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    /// Number of different keys.
    pub count: u32,
    /// Length of the values that PUT requests write (bytes).
    pub value_bytes: u16,
}

#[derive(Debug)]
pub enum DatagramProtocol {
    KeyValue(Keys),
    /// DNS queries, one for each class of the workload.
    Dns(Vec<DnsQuery>),
}

#[derive(Debug)]
pub struct Udp {
    sockets: Vec<UdpSocket>,
    epoll: Epoll,
    datagrams: DatagramProtocol,
    /// Id of the latest request that was sent.
    last_id: u32,
    value: Vec<u8>,
    key_rng: Xoshiro256PlusPlus,
    flow_rng: Xoshiro256PlusPlus,
    receiver: Receiver,
    datagram: Vec<u8>,
    buffer: Vec<u8>,
    errors: TransportErrorCounts,
}

impl Udp {
    /// Opens one socket per flow and connects it to `target`. Fails when a source cannot be bound.
    pub fn open(target: SocketAddr, sources: &Sources, datagrams: DatagramProtocol, seed: u64) -> anyhow::Result<Self> {
        let epoll = Epoll::new()?;
        let mut sockets = Vec::new();
        for index in 0..sources.flow_count {
            let source = sources.source_address(index, target);
            let socket = UdpSocket::bind(source).with_context(|| format!("cannot bind the source {source}"))?;
            socket.connect(target).with_context(|| format!("no way from {source} to {target}"))?;
            socket.set_nonblocking(true)?;
            // The kernel limits the buffer to net.core.rmem_max.
            socket2::SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
            Receiver::enable_timestamps(&socket)?;
            epoll.add(socket.as_fd(), index.into(), libc::EPOLLIN)?;
            sockets.push(socket);
        }
        let value_bytes = if let DatagramProtocol::KeyValue(keys) = &datagrams { keys.value_bytes } else { 0 };
        Ok(Self {
            sockets,
            epoll,
            datagrams,
            last_id: 0,
            value: vec![b'v'; value_bytes.into()],
            key_rng: seeded_rng(seed, RNG_STREAM_KEYS),
            flow_rng: seeded_rng(seed, RNG_STREAM_FLOWS),
            receiver: Receiver::default(),
            datagram: Vec::new(),
            buffer: vec![0; 65_536],
            errors: TransportErrorCounts::default(),
        })
    }

    fn write(&mut self, demand: &RequestParameters, id: u32) {
        self.last_id = id;
        let keys = match &self.datagrams {
            DatagramProtocol::KeyValue(keys) => *keys,
            DatagramProtocol::Dns(queries) => {
                return queries[usize::from(demand.class)].write(id as u16, &mut self.datagram);
            }
        };
        let key = match demand.request_type.work_class() {
            None => key_name(uniform_below(&mut self.key_rng, keys.count)),
            Some(_) => String::new(),
        };
        let value: &[u8] = if demand.request_type == RequestType::PUT { &self.value } else { &[] };
        let request = Request {
            request_type: demand.request_type,
            id,
            service_ns: demand.service_ns,
            key: key.as_bytes(),
            value,
        };
        request.write(&mut self.datagram);
    }

    /// Parses the datagram in the receive buffer as a response; `None` for other datagrams.
    fn read(&mut self, length: usize, arrived_ns: u64) -> Option<Answer> {
        let datagram = &self.buffer[..length];
        match &self.datagrams {
            DatagramProtocol::KeyValue(_) => {
                let (header, _) = ResponseHeader::read_from_prefix(datagram).ok()?;
                self.errors.failed += u64::from(header.status == Status::Full as u8);
                let worker = Some(Worker { server: 0, worker: header.worker.get() });
                Some(Answer { id: header.id.get(), part: (header.part, header.parts), arrived_ns, worker })
            }
            DatagramProtocol::Dns(_) => {
                let (id, good) = dns::parse_response(datagram)?;
                self.errors.failed += u64::from(!good);
                // The newest request whose id has the same low 16 bits.
                let id = self.last_id.wrapping_sub(u32::from((self.last_id as u16).wrapping_sub(id)));
                Some(Answer { id, part: (0, 1), arrived_ns, worker: None })
            }
        }
    }

    /// Counts an error of sending a request, and returns whether a retry may succeed.
    fn count_send_error(&mut self, error: &io::Error) -> bool {
        let refused = error.kind() == io::ErrorKind::ConnectionRefused;
        if refused {
            self.errors.refused += 1;
        } else {
            self.errors.not_sent += 1;
        }
        refused
    }
}

impl Transport for Udp {
    fn send(&mut self, demand: &RequestParameters, id: u32, _deadline_ns: u64) {
        self.write(demand, id);
        let socket = uniform_below(&mut self.flow_rng, self.sockets.len() as u32) as usize;
        // send() returns the ICMP error of an earlier datagram (udp(7)).
        if let Err(error) = self.sockets[socket].send(&self.datagram)
            && self.count_send_error(&error)
            && let Err(error) = self.sockets[socket].send(&self.datagram)
        {
            self.count_send_error(&error);
        }
    }

    fn receive(&mut self, until_ns: u64, answers: &mut Vec<Answer>) -> io::Result<()> {
        let ready: Vec<_> = self.epoll.wait(Some(until_ns))?.collect();
        for event in ready {
            // One datagram per event: epoll reports a socket with further datagrams again.
            let received = match self.receiver.receive(&self.sockets[event.token as usize], &mut self.buffer) {
                Ok(received) => received,
                Err(error) => {
                    self.errors.refused += u64::from(error.kind() == io::ErrorKind::ConnectionRefused);
                    continue;
                }
            };
            match self.read(received.length, received.arrived_ns) {
                Some(answer) => answers.push(answer),
                None => self.errors.malformed += 1,
            }
        }
        Ok(())
    }

    fn errors(&self) -> TransportErrorCounts {
        self.errors
    }
}
