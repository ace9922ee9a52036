//! Pool of persistent connections, for request protocols over TCP.
//!
//! A protocol with pipelining sends each request on a random connection. Other protocols use a free connection, and a
//! request waits while none is free. The wait is part of the latency, because the server or the number of connections
//! causes it. A connection that ends is opened again, and its pending requests are lost.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::Context as _;
use coreward_model::rss::{seeded_rng, uniform_below};
use rand_xoshiro::Xoshiro256PlusPlus;
use socket2::{Domain, Socket, Type};

use super::{AnsweringWorker, FlowSources, RequestTransport, TransportAnswer, TransportErrorCounts};
use crate::event_loop::{Epoll, ReadyEvent, now_ns};
use crate::timestamped_receiver::TimestampedReceiver;
use crate::workload::RequestParameters;

const RNG_STREAM_FLOWS: u64 = 0x6c6f_6103;
/// Maximum time for opening a connection, after which the server counts as unreachable.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before a failed connection is opened again (ns).
const RECONNECT_DELAY_NS: u64 = 100_000_000;

/// Response that the protocol's parser has found in a connection's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConnectionReply {
    /// Id of the request, or `None` if the protocol has no ids.
    pub request_id: Option<u32>,
    /// Worker that answered, or `None` if the protocol does not report it.
    pub worker: Option<AnsweringWorker>,
    /// Whether the server reports that the request failed.
    pub is_failure: bool,
    /// Whether the server will close the connection after this reply.
    pub closes_connection: bool,
}

/// Error for received bytes that are not a response of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MalformedResponse;

/// Protocol on TCP connections, in which responses arrive in the order of the requests.
pub trait ConnectionProtocol {
    /// Parser state of one connection, which cuts received bytes into replies.
    type ReplyReader: Default + std::fmt::Debug;
    /// Whether a request may be sent while an earlier one is unanswered.
    const ALLOWS_PIPELINING: bool;

    /// Appends a request to `output`, the buffer of bytes to send.
    fn write_request(&self, parameters: &RequestParameters, id: u32, output: &mut Vec<u8>);

    /// Parses received bytes, and calls `on_reply` with every complete reply. Fails when the bytes are not a response.
    fn read_replies(
        reader: &mut Self::ReplyReader,
        bytes: &[u8],
        on_reply: &mut dyn FnMut(ConnectionReply),
    ) -> Result<(), MalformedResponse>;
}

#[derive(Debug)]
struct PooledConnection<R> {
    stream: TcpStream,
    /// Whether the connection is established.
    is_open: bool,
    /// Bytes that wait to be sent because the socket's buffer had no room.
    unsent_bytes: Vec<u8>,
    /// Ids of the unanswered requests, with the oldest first.
    pending_request_ids: VecDeque<u32>,
    reply_reader: R,
    is_closing: bool,
}

#[derive(Debug)]
struct WaitingRequest {
    parameters: RequestParameters,
    request_id: u32,
    deadline_ns: u64,
}

/// Pool of persistent connections that use protocol `P`.
#[derive(Debug)]
pub struct ConnectionPool<P: ConnectionProtocol> {
    protocol: P,
    target_address: SocketAddr,
    flow_sources: FlowSources,
    epoll: Epoll,
    /// Connection of each flow, or `None` between two attempts to open it.
    connections: Vec<Option<PooledConnection<P::ReplyReader>>>,
    /// Indices of open connections without a request. The list is unused if the protocol allows pipelining.
    free_connection_indices: Vec<usize>,
    waiting_requests: VecDeque<WaitingRequest>,
    /// Connections to open again, as pairs of due time (ns) and connection index, with the earliest first.
    scheduled_connection_retries: VecDeque<(u64, usize)>,
    rng: Xoshiro256PlusPlus,
    receiver: TimestampedReceiver,
    event_buffer: Vec<ReadyEvent>,
    receive_buffer: Vec<u8>,
    errors: TransportErrorCounts,
}

impl<P: ConnectionProtocol> ConnectionPool<P> {
    /// Opens one connection per flow. Fails when a source address cannot be bound, or the target has no listener.
    pub fn open(protocol: P, target: SocketAddr, sources: FlowSources, seed: u64) -> anyhow::Result<Self> {
        let mut pool = Self {
            protocol,
            target_address: target,
            epoll: Epoll::new()?,
            connections: Vec::new(),
            free_connection_indices: Vec::new(),
            waiting_requests: VecDeque::new(),
            scheduled_connection_retries: VecDeque::new(),
            rng: seeded_rng(seed, RNG_STREAM_FLOWS),
            receiver: TimestampedReceiver::default(),
            event_buffer: Vec::new(),
            receive_buffer: vec![0; 65_536],
            errors: TransportErrorCounts::default(),
            flow_sources: sources,
        };
        for index in 0..usize::from(pool.flow_sources.flow_count) {
            let source = pool.flow_sources.source_address(index as u16, target);
            let socket = pool.bind_flow_socket(index).with_context(|| format!("cannot bind the source {source}"))?;
            let connect_result = socket.connect_timeout(&target.into(), CONNECT_TIMEOUT);
            connect_result.with_context(|| format!("cannot connect from {source} to {target}"))?;
            pool.connections.push(None);
            pool.add_connection(index, socket, true)?;
        }
        Ok(pool)
    }

    fn bind_flow_socket(&self, index: usize) -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(self.target_address), Type::STREAM, None)?;
        // An earlier connection from this port may still be in TIME-WAIT.
        socket.set_reuse_address(true)?;
        socket.bind(&self.flow_sources.source_address(index as u16, self.target_address).into())?;
        socket.set_tcp_nodelay(true)?;
        TimestampedReceiver::enable_timestamps(&socket)?;
        Ok(socket)
    }

    fn add_connection(&mut self, index: usize, socket: Socket, is_open: bool) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        let stream = TcpStream::from(socket);
        // With edge triggering, epoll reports one event when the connection is established, then one per arrival of
        // data.
        let epoll_flags = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        self.epoll.add(stream.as_fd(), index as u64, epoll_flags)?;
        let (unsent_bytes, pending, reader) = (Vec::new(), VecDeque::new(), P::ReplyReader::default());
        self.connections[index] = Some(PooledConnection {
            stream,
            is_open,
            unsent_bytes,
            pending_request_ids: pending,
            reply_reader: reader,
            is_closing: false,
        });
        if is_open {
            self.send_waiting_or_mark_free(index);
        }
        Ok(())
    }

    /// Closes a connection, if it exists, and starts to open it again.
    fn reopen_connection(&mut self, index: usize) {
        self.connections[index] = None;
        self.free_connection_indices.retain(|free_index| *free_index != index);
        let start_connecting = || -> io::Result<Socket> {
            let socket = self.bind_flow_socket(index)?;
            socket.set_nonblocking(true)?;
            match socket.connect(&self.target_address.into()) {
                Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
                _ => Ok(socket),
            }
        };
        if start_connecting().and_then(|socket| self.add_connection(index, socket, false)).is_err() {
            self.connections[index] = None;
            self.errors.refused += 1;
            self.scheduled_connection_retries.push_back((now_ns() + RECONNECT_DELAY_NS, index));
        }
    }

    /// Sends the next waiting request on this open connection, or marks the connection as free if no request waits.
    fn send_waiting_or_mark_free(&mut self, index: usize) {
        if P::ALLOWS_PIPELINING {
            return;
        }
        let now_ns = now_ns();
        while let Some(waiting_request) = self.waiting_requests.pop_front() {
            // A request whose deadline has passed counts as lost.
            if waiting_request.deadline_ns > now_ns {
                return self.send_request_on_connection(index, &waiting_request.parameters, waiting_request.request_id);
            }
        }
        self.free_connection_indices.push(index);
    }

    fn send_request_on_connection(&mut self, index: usize, parameters: &RequestParameters, id: u32) {
        let Some(connection) = &mut self.connections[index] else {
            self.errors.not_sent += 1;
            return;
        };
        self.protocol.write_request(parameters, id, &mut connection.unsent_bytes);
        connection.pending_request_ids.push_back(id);
        if connection.is_open && connection.flush().is_err() {
            self.count_and_retry_broken_connection(index);
        }
    }

    /// Counts a connection that broke or could not be opened, and opens it again at once or after a delay.
    fn count_and_retry_broken_connection(&mut self, index: usize) {
        let Some(connection) = &self.connections[index] else { return };
        if connection.is_open {
            self.errors.broken_connections += 1;
            self.reopen_connection(index);
        } else {
            self.errors.refused += 1;
            self.connections[index] = None;
            self.scheduled_connection_retries.push_back((now_ns() + RECONNECT_DELAY_NS, index));
        }
    }

    fn handle_connection_event(&mut self, index: usize, event: ReadyEvent, answers: &mut Vec<TransportAnswer>) {
        let Some(connection) = &mut self.connections[index] else { return };
        if event.has_flags(libc::EPOLLERR) && !matches!(connection.stream.take_error(), Ok(None)) {
            return self.count_and_retry_broken_connection(index);
        }
        if event.has_flags(libc::EPOLLOUT) {
            let was_just_opened = !std::mem::replace(&mut connection.is_open, true);
            if connection.flush().is_err() {
                return self.count_and_retry_broken_connection(index);
            }
            if was_just_opened {
                self.send_waiting_or_mark_free(index);
            }
        }
        if event.has_flags(libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLHUP) {
            self.read_connection_replies(index, event.has_flags(libc::EPOLLRDHUP), answers);
        }
    }

    /// Replaces a connection that the server closes, which counts as broken only if requests are pending. A server may
    /// close an idle connection at any time.
    fn replace_closed_connection(&mut self, index: usize) {
        let Some(connection) = &self.connections[index] else { return };
        if connection.pending_request_ids.is_empty() {
            self.reopen_connection(index);
        } else {
            self.count_and_retry_broken_connection(index);
        }
    }

    /// Reads all available bytes of a connection. A read that does not fill the buffer has emptied the socket
    /// (epoll(7), question 9), unless the end of the stream follows.
    fn read_connection_replies(&mut self, index: usize, has_ended: bool, answers: &mut Vec<TransportAnswer>) {
        loop {
            let Some(connection) = &mut self.connections[index] else { return };
            let received_bytes = match self.receiver.receive(&connection.stream, &mut self.receive_buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.count_and_retry_broken_connection(index),
                Ok(received) => received,
            };
            let bytes = &self.receive_buffer[..received_bytes.received_byte_count];
            if bytes.is_empty() {
                return self.replace_closed_connection(index);
            }
            let had_pending_requests = !connection.pending_request_ids.is_empty();
            let failed_response_count = &mut self.errors.failed;
            if connection
                .match_replies_with_requests(
                    bytes,
                    received_bytes.arrived_ns,
                    failed_response_count,
                    answers,
                    P::read_replies,
                )
                .is_err()
            {
                self.errors.malformed += 1;
                return self.count_and_retry_broken_connection(index);
            }
            if connection.is_closing {
                return self.replace_closed_connection(index);
            }
            if had_pending_requests && connection.pending_request_ids.is_empty() {
                self.send_waiting_or_mark_free(index);
            }
            if !has_ended && received_bytes.received_byte_count < self.receive_buffer.len() {
                return;
            }
        }
    }
}

type ParseRepliesFn<R> = fn(&mut R, &[u8], &mut dyn FnMut(ConnectionReply)) -> Result<(), MalformedResponse>;

impl<R> PooledConnection<R> {
    fn flush(&mut self) -> io::Result<()> {
        while !self.unsent_bytes.is_empty() {
            match self.stream.write(&self.unsent_bytes) {
                Ok(length) => drop(self.unsent_bytes.drain(..length)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Parses received bytes, and matches the replies with the pending requests in order. Fails on a malformed
    /// response.
    fn match_replies_with_requests(
        &mut self,
        bytes: &[u8],
        arrived_ns: u64,
        failed_response_count: &mut u64,
        answers: &mut Vec<TransportAnswer>,
        parse_replies: ParseRepliesFn<R>,
    ) -> Result<(), MalformedResponse> {
        let (pending_ids, is_closing, mut is_in_order) = (&mut self.pending_request_ids, &mut self.is_closing, true);
        parse_replies(&mut self.reply_reader, bytes, &mut |reply| match pending_ids.pop_front() {
            Some(id) if reply.request_id.is_none_or(|reply_id| reply_id == id) => {
                *failed_response_count += u64::from(reply.is_failure);
                *is_closing |= reply.closes_connection;
                answers.push(TransportAnswer {
                    request_id: id,
                    part_index_and_count: (0, 1),
                    arrived_ns,
                    worker: reply.worker,
                });
            }
            _ => is_in_order = false,
        })?;
        if is_in_order { Ok(()) } else { Err(MalformedResponse) }
    }
}

impl<P: ConnectionProtocol> RequestTransport for ConnectionPool<P> {
    fn send(&mut self, parameters: &RequestParameters, id: u32, deadline_ns: u64) {
        if P::ALLOWS_PIPELINING {
            let connection_index = uniform_below(&mut self.rng, self.connections.len() as u32) as usize;
            return self.send_request_on_connection(connection_index, parameters, id);
        }
        if self.free_connection_indices.is_empty() {
            return self.waiting_requests.push_back(WaitingRequest {
                parameters: *parameters,
                request_id: id,
                deadline_ns,
            });
        }
        let free_index = uniform_below(&mut self.rng, self.free_connection_indices.len() as u32) as usize;
        let index = self.free_connection_indices.swap_remove(free_index);
        self.send_request_on_connection(index, parameters, id);
    }

    fn receive(&mut self, until_ns: u64, answers: &mut Vec<TransportAnswer>) -> io::Result<()> {
        let next_retry_ns = self.scheduled_connection_retries.front().map_or(u64::MAX, |(at_ns, _)| *at_ns);
        let mut ready_events = std::mem::take(&mut self.event_buffer);
        ready_events.extend(self.epoll.wait(Some(until_ns.min(next_retry_ns)))?);
        for event in ready_events.drain(..) {
            self.handle_connection_event(event.token as usize, event, answers);
        }
        self.event_buffer = ready_events;
        while let Some((_, index)) =
            self.scheduled_connection_retries.front().copied().filter(|(at_ns, _)| *at_ns <= now_ns())
        {
            self.scheduled_connection_retries.pop_front();
            self.reopen_connection(index);
        }
        Ok(())
    }

    fn error_counts(&self) -> TransportErrorCounts {
        self.errors
    }
}
