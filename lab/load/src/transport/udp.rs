//! Datagram transport for key-value requests or DNS queries, with one socket per flow.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;

use anyhow::Context as _;
use coreward_model::rss::{seeded_rng, uniform_below};
use rand_xoshiro::Xoshiro256PlusPlus;
use zerocopy::FromBytes as _;

use super::{AnsweringWorker, FlowSources, RequestTransport, TransportAnswer, TransportErrorCounts};
use crate::dns::{self, DnsQuery};
use crate::event_loop::Epoll;
use crate::key_value::{KeyValueRequest, KeyValueResponseHeader, KeyValueResponseStatus, key_name};
use crate::request_type::RequestType;
use crate::timestamped_receiver::TimestampedReceiver;
use crate::workload::RequestParameters;

/// Size of each socket's receive buffer (bytes), which holds responses that the generator has not read yet.
const SOCKET_RECEIVE_BUFFER_BYTES: usize = 4 << 20;
const RNG_STREAM_KEYS: u64 = 0x6c6f_6101;
const RNG_STREAM_FLOWS: u64 = 0x6c6f_6102;

/// Settings of the keys and values in key-value requests.
#[derive(Debug, Clone, Copy)]
pub struct KeyValueRequestSettings {
    /// Number of different keys.
    pub key_count: u32,
    /// Length of the values that PUT requests write (bytes).
    pub value_bytes: u16,
}

#[derive(Debug)]
pub enum DatagramProtocol {
    KeyValue(KeyValueRequestSettings),
    /// DNS queries, one for each class of the workload.
    Dns(Vec<DnsQuery>),
}

#[derive(Debug)]
pub struct UdpTransport {
    sockets: Vec<UdpSocket>,
    epoll: Epoll,
    protocol: DatagramProtocol,
    last_request_id: u32,
    put_value: Vec<u8>,
    key_rng: Xoshiro256PlusPlus,
    flow_rng: Xoshiro256PlusPlus,
    receiver: TimestampedReceiver,
    send_buffer: Vec<u8>,
    receive_buffer: Vec<u8>,
    errors: TransportErrorCounts,
}

impl UdpTransport {
    /// Opens one socket per flow and connects it to `target`. Fails when a source cannot be bound.
    pub fn open(
        target: SocketAddr,
        sources: &FlowSources,
        protocol: DatagramProtocol,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let epoll = Epoll::new()?;
        let mut sockets = Vec::new();
        for index in 0..sources.flow_count {
            let source = sources.source_address(index, target);
            let socket = UdpSocket::bind(source).with_context(|| format!("cannot bind the source {source}"))?;
            socket.connect(target).with_context(|| format!("no way from {source} to {target}"))?;
            socket.set_nonblocking(true)?;
            // The kernel limits the buffer's size to net.core.rmem_max.
            socket2::SockRef::from(&socket).set_recv_buffer_size(SOCKET_RECEIVE_BUFFER_BYTES)?;
            TimestampedReceiver::enable_timestamps(&socket)?;
            epoll.add(socket.as_fd(), index.into(), libc::EPOLLIN)?;
            sockets.push(socket);
        }
        let value_bytes =
            if let DatagramProtocol::KeyValue(key_settings) = &protocol { key_settings.value_bytes } else { 0 };
        Ok(Self {
            sockets,
            epoll,
            protocol,
            last_request_id: 0,
            put_value: vec![b'v'; value_bytes.into()],
            key_rng: seeded_rng(seed, RNG_STREAM_KEYS),
            flow_rng: seeded_rng(seed, RNG_STREAM_FLOWS),
            receiver: TimestampedReceiver::default(),
            send_buffer: Vec::new(),
            receive_buffer: vec![0; 65_536],
            errors: TransportErrorCounts::default(),
        })
    }

    fn write_request(&mut self, parameters: &RequestParameters, id: u32) {
        self.last_request_id = id;
        let key_value_settings = match &self.protocol {
            DatagramProtocol::KeyValue(key_settings) => *key_settings,
            DatagramProtocol::Dns(queries) => {
                return queries[usize::from(parameters.class_index)].write_datagram(id as u16, &mut self.send_buffer);
            }
        };
        let key_text = match parameters.request_type.work_class() {
            None => key_name(uniform_below(&mut self.key_rng, key_value_settings.key_count)),
            Some(_) => String::new(),
        };
        let value: &[u8] = if parameters.request_type == RequestType::PUT { &self.put_value } else { &[] };
        let request = KeyValueRequest {
            request_type: parameters.request_type,
            request_id: id,
            service_ns: parameters.service_ns,
            key: key_text.as_bytes(),
            value,
        };
        request.write_datagram(&mut self.send_buffer);
    }

    /// Parses the datagram in the receive buffer as a response, or returns `None` for other datagrams.
    fn parse_answer(&mut self, length: usize, arrived_ns: u64) -> Option<TransportAnswer> {
        let datagram = &self.receive_buffer[..length];
        match &self.protocol {
            DatagramProtocol::KeyValue(_) => {
                let (response_header, _) = KeyValueResponseHeader::read_from_prefix(datagram).ok()?;
                self.errors.failed += u64::from(response_header.status_code == KeyValueResponseStatus::StoreFull as u8);
                let worker = Some(AnsweringWorker { server: 0, worker: response_header.worker_index.get() });
                Some(TransportAnswer {
                    request_id: response_header.id.get(),
                    part_index_and_count: (response_header.part_index, response_header.part_count),
                    arrived_ns,
                    worker,
                })
            }
            DatagramProtocol::Dns(_) => {
                let (low_id_bits, is_success) = dns::parse_response_id_and_success(datagram)?;
                self.errors.failed += u64::from(!is_success);
                // A DNS id has only 16 bits, so the answer belongs to the newest request whose id has the same low 16
                // bits.
                let request_id = self
                    .last_request_id
                    .wrapping_sub(u32::from((self.last_request_id as u16).wrapping_sub(low_id_bits)));
                Some(TransportAnswer { request_id, part_index_and_count: (0, 1), arrived_ns, worker: None })
            }
        }
    }

    /// Counts an error of sending a request, and returns whether a retry may succeed.
    fn count_send_error(&mut self, error: &io::Error) -> bool {
        let is_refused = error.kind() == io::ErrorKind::ConnectionRefused;
        if is_refused {
            self.errors.refused += 1;
        } else {
            self.errors.not_sent += 1;
        }
        is_refused
    }
}

impl RequestTransport for UdpTransport {
    fn send(&mut self, parameters: &RequestParameters, id: u32, _deadline_ns: u64) {
        self.write_request(parameters, id);
        let socket_index = uniform_below(&mut self.flow_rng, self.sockets.len() as u32) as usize;
        // send() may return the ICMP error of an earlier datagram (udp(7)), so it is tried twice.
        if let Err(error) = self.sockets[socket_index].send(&self.send_buffer)
            && self.count_send_error(&error)
            && let Err(error) = self.sockets[socket_index].send(&self.send_buffer)
        {
            self.count_send_error(&error);
        }
    }

    fn receive(&mut self, until_ns: u64, answers: &mut Vec<TransportAnswer>) -> io::Result<()> {
        let ready_events: Vec<_> = self.epoll.wait(Some(until_ns))?.collect();
        for event in ready_events {
            // One read per event suffices, because epoll reports a socket with further datagrams again.
            let received_bytes =
                match self.receiver.receive(&self.sockets[event.token as usize], &mut self.receive_buffer) {
                    Ok(received) => received,
                    Err(error) => {
                        self.errors.refused += u64::from(error.kind() == io::ErrorKind::ConnectionRefused);
                        continue;
                    }
                };
            match self.parse_answer(received_bytes.received_byte_count, received_bytes.arrived_ns) {
                Some(answer) => answers.push(answer),
                None => self.errors.malformed += 1,
            }
        }
        Ok(())
    }

    fn error_counts(&self) -> TransportErrorCounts {
        self.errors
    }
}
