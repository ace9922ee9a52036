//! Common parts of servers with emulated cores, which are worker processes and an event loop that emulates service
//! times.
//!
//! The queue of a core is a clock. A request that arrives at t completes at max(t, busy until) + its service time, and
//! the core is busy until then. The response is sent at that time. A late wake-up (some 50 us) delays responses but
//! does not reduce the core's capacity.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::convert::Infallible;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, ensure};
use coreward_load::event_loop::{Epoll, accept_nonblocking, now_ns};
use nix::sys::prctl::{set_name, set_pdeathsig};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid};
use socket2::{Domain, Socket, Type};

use crate::core_load_file::VirtualCore;

/// Length of each listening socket's accept queue, enough for a burst of connections to one core. Its limit is
/// net.core.somaxconn (4096).
const ACCEPT_QUEUE_LENGTH: i32 = 4096;

/// Returns a listening TCP socket. With `reuse_port`, other sockets may listen on the same address.
pub(crate) fn open_listener(address: SocketAddr, reuse_port: bool) -> anyhow::Result<TcpListener> {
    let open_socket = || -> io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(reuse_port)?;
        socket.bind(&address.into())?;
        socket.listen(ACCEPT_QUEUE_LENGTH)?;
        socket.set_nonblocking(true)?;
        Ok(socket.into())
    };
    open_socket().with_context(|| format!("cannot listen on {address}"))
}

/// Protocol by which an emulated server communicates with its clients.
pub(crate) trait EmulatedServerProtocol {
    type ConnectionState: Default;
    /// Whether the server closes a connection once the client stops sending or the response is complete.
    const CLOSES_AFTER_RESPONSE: bool;
    /// Core time for accepting a connection (ns).
    const ACCEPT_CORE_TIME_NS: u64;
    /// Maximum age of a busy core's entry in the core load file (ns). Each update costs a wake-up.
    const LOAD_FILE_UPDATE_INTERVAL_NS: u64;

    /// Parses received bytes and queues the packets of responses. Returns whether the bytes are a valid request or part
    /// of a request.
    fn try_parse_received_bytes(
        &self,
        state: &mut Self::ConnectionState,
        bytes: &[u8],
        queue: &mut ResponseQueue<'_>,
    ) -> bool;

    /// Appends the contents of packet `id` of the response to `packet`.
    fn append_response_packet(
        &self,
        state: &Self::ConnectionState,
        id: u32,
        packet: &mut Vec<u8>,
        queue: &mut ResponseQueue<'_>,
    );
}

/// Response packet that will be sent later. Packets are ordered by due time.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ResponsePacket {
    due_ns: u64,
    /// Sequence number, which increases with each queued packet. It orders packets that are due at the same time.
    queue_sequence: u64,
    connection_id: u64,
    packet_id: u32,
}

/// Handle by which the protocol queues work for a core, and response packets for the client of one connection.
pub(crate) struct ResponseQueue<'a> {
    pub(crate) now_ns: u64,
    virtual_core: &'a mut VirtualCore,
    packets: &'a mut BinaryHeap<Reverse<ResponsePacket>>,
    next_queue_sequence: &'a mut u64,
    connection_id: u64,
    pending_packet_count: &'a mut u32,
}

impl ResponseQueue<'_> {
    /// Queues work of `service_ns` for the core. Returns the time at which it will be done (ns).
    pub(crate) fn enqueue_work(&mut self, service_ns: u64) -> u64 {
        self.virtual_core.enqueue_request(self.now_ns, service_ns)
    }

    /// Queues packet `id` of the response, to be sent at `due_ns`.
    pub(crate) fn enqueue_response_packet(&mut self, due_ns: u64, id: u32) {
        *self.next_queue_sequence += 1;
        *self.pending_packet_count += 1;
        self.packets.push(Reverse(ResponsePacket {
            due_ns,
            queue_sequence: *self.next_queue_sequence,
            connection_id: self.connection_id,
            packet_id: id,
        }));
    }
}

pub(crate) struct EmulatedCore<'a> {
    listener: &'a TcpListener,
    virtual_core: VirtualCore,
    /// Busy time of the core (ns), stored in the core load file.
    published_busy_ns: &'a AtomicU64,
}

impl<'a> EmulatedCore<'a> {
    pub(crate) fn new(listener: &'a TcpListener, published_busy_ns: &'a AtomicU64) -> Self {
        Self { listener, virtual_core: VirtualCore::default(), published_busy_ns }
    }
}

struct ServedConnection<S> {
    core_index: usize,
    stream: TcpStream,
    protocol_state: S,
    pending_packet_count: u32,
    /// Whether the client has closed its sending direction.
    is_half_closed: bool,
}

pub(crate) struct ServerEventLoop<'a, P: EmulatedServerProtocol> {
    protocol: P,
    cores: Vec<EmulatedCore<'a>>,
    epoll: Epoll,
    /// Connections by id. Ids are never reused, so a late packet cannot be sent on another connection.
    connections: HashMap<u64, ServedConnection<P::ConnectionState>>,
    next_connection_id: u64,
    packets: BinaryHeap<Reverse<ResponsePacket>>,
    next_queue_sequence: u64,
}

impl<'a, P: EmulatedServerProtocol> ServerEventLoop<'a, P> {
    /// Creates the event loop. The first epoll tokens belong to the listeners.
    pub(crate) fn new(protocol: P, cores: Vec<EmulatedCore<'a>>) -> io::Result<Self> {
        let (epoll, next_connection_id) = (Epoll::new()?, cores.len() as u64);
        for (token, core) in (0..).zip(&cores) {
            epoll.add(core.listener.as_fd(), token, libc::EPOLLIN)?;
        }
        let (connections, packets) = (HashMap::new(), BinaryHeap::new());
        Ok(Self { protocol, cores, epoll, connections, next_connection_id, packets, next_queue_sequence: 0 })
    }

    /// Serves connections indefinitely, and returns only after an error.
    pub(crate) fn run(mut self) -> anyhow::Result<Infallible> {
        loop {
            self.process_due_events()?;
        }
    }

    /// Waits for the next event and processes all events and packets that are due.
    fn process_due_events(&mut self) -> anyhow::Result<()> {
        let wait_start_ns = now_ns();
        let next_packet_ns = self.packets.peek().map(|Reverse(packet)| packet.due_ns);
        // A busy core must publish its busy time during a request, as a real core does.
        let is_busy = self.cores.iter().any(|core| core.virtual_core.is_busy(wait_start_ns));
        let next_publication_ns = is_busy.then_some(wait_start_ns + P::LOAD_FILE_UPDATE_INTERVAL_NS);
        let events: Vec<_> =
            self.epoll.wait([next_packet_ns, next_publication_ns].into_iter().flatten().min())?.collect();
        let now_ns = now_ns();
        for event in events {
            match event.token as usize {
                core if core < self.cores.len() => self.accept_connections(core, now_ns)?,
                _ => self.read_requests(event.token, now_ns)?,
            }
        }
        while self.packets.peek().is_some_and(|Reverse(packet)| packet.due_ns <= now_ns) {
            let Reverse(packet) = self.packets.pop().expect("just seen");
            self.send_packet(&packet, now_ns);
        }
        for core in &self.cores {
            // There is one writer, and readers need no ordering with other memory.
            core.published_busy_ns.store(core.virtual_core.total_busy_ns(now_ns).to_le(), Ordering::Relaxed);
        }
        Ok(())
    }

    fn accept_connections(&mut self, core_index: usize, now_ns: u64) -> anyhow::Result<()> {
        while let Some(stream) = accept_nonblocking(self.cores[core_index].listener).context("cannot accept")? {
            self.epoll.add(stream.as_fd(), self.next_connection_id, libc::EPOLLIN)?;
            let connection = ServedConnection {
                core_index,
                stream,
                protocol_state: P::ConnectionState::default(),
                pending_packet_count: 0,
                is_half_closed: false,
            };
            self.connections.insert(self.next_connection_id, connection);
            self.next_connection_id += 1;
            self.cores[core_index].virtual_core.enqueue_request(now_ns, P::ACCEPT_CORE_TIME_NS);
        }
        Ok(())
    }

    fn read_requests(&mut self, connection_id: u64, now_ns: u64) -> anyhow::Result<()> {
        let Some(connection) = self.connections.get_mut(&connection_id) else { return Ok(()) };
        let mut buffer = [0; 4096];
        let is_valid_request = match connection.stream.read(&mut buffer) {
            Ok(0) => {
                connection.is_half_closed = true;
                true
            }
            Ok(length) => {
                let (virtual_core, packets) = (&mut self.cores[connection.core_index].virtual_core, &mut self.packets);
                let (sequence, pending) = (&mut self.next_queue_sequence, &mut connection.pending_packet_count);
                let mut queue = ResponseQueue {
                    now_ns,
                    virtual_core,
                    packets,
                    next_queue_sequence: sequence,
                    connection_id,
                    pending_packet_count: pending,
                };
                self.protocol.try_parse_received_bytes(&mut connection.protocol_state, &buffer[..length], &mut queue)
            }
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        };
        if !is_valid_request
            || (connection.is_half_closed && (P::CLOSES_AFTER_RESPONSE || connection.pending_packet_count == 0))
        {
            self.connections.remove(&connection_id);
        } else if connection.is_half_closed {
            // Stop polling the stream. Epoll is level-triggered, so an unread end of stream would wake the loop until
            // the last packet is sent.
            self.epoll.remove(connection.stream.as_fd())?;
        }
        Ok(())
    }

    fn send_packet(&mut self, packet: &ResponsePacket, now_ns: u64) {
        let connection_id = packet.connection_id;
        let Some(connection) = self.connections.get_mut(&connection_id) else { return };
        connection.pending_packet_count -= 1;
        let (virtual_core, packets) = (&mut self.cores[connection.core_index].virtual_core, &mut self.packets);
        let (sequence, pending) = (&mut self.next_queue_sequence, &mut connection.pending_packet_count);
        let mut queue = ResponseQueue {
            now_ns,
            virtual_core,
            packets,
            next_queue_sequence: sequence,
            connection_id,
            pending_packet_count: pending,
        };
        let mut packet_bytes = Vec::new();
        self.protocol.append_response_packet(
            &connection.protocol_state,
            packet.packet_id,
            &mut packet_bytes,
            &mut queue,
        );
        let is_fully_written =
            matches!(connection.stream.write(&packet_bytes), Ok(length) if length == packet_bytes.len());
        // A short write means that the client does not read, so close its connection.
        if !is_fully_written
            || (connection.pending_packet_count == 0 && (P::CLOSES_AFTER_RESPONSE || connection.is_half_closed))
        {
            self.connections.remove(&connection_id);
        }
    }
}

/// Forks worker process `number` of a server. The worker is named `coreN`, calls `work`, and ends when its parent (the
/// master) ends. Fails when the master has several threads.
pub(crate) fn fork_worker(
    server: &str,
    number: u8,
    work: impl FnOnce() -> anyhow::Result<Infallible>,
) -> anyhow::Result<Pid> {
    let thread_count = fs::read_dir("/proc/self/task")?.count();
    ensure!(thread_count == 1, "the {server} must be started from a process with a single thread: it forks");
    let master_pid = getpid();
    // SAFETY: there is one thread, so no lock can be held by another in the child.
    if let ForkResult::Parent { child } = unsafe { fork() }.context("cannot fork a worker")? {
        return Ok(child);
    }
    let run_worker = || {
        set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
        ensure!(getppid() == master_pid, "the master has ended");
        set_name(&std::ffi::CString::new(format!("core{number}"))?)?;
        work()
    };
    eprintln!("{server}: worker {number}: {:#}", run_worker().unwrap_err());
    std::process::exit(1)
}
