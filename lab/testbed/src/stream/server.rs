//! The servers of a testbed in one process: a listening socket in each one's namespace, one loop for all.
//!
//! A packet and an accepted connection count as a millisecond of work of the server's only emulated core, for policies
//! that use loads.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use socket2::{Domain, Socket, Type};
use zerocopy::FromBytes as _;

use super::{PACKET_BYTES, REQUEST_BYTES, Request, content, raise_file_limit};
use crate::core_load_file::{BusyFile, VirtualCore};
use crate::fleet;
use crate::namespace::Namespace;
use crate::process::{Process, TIMEOUT};
use crate::topology::Testbed;
use coreward_load::event_loop::{Epoll, accept, now_ns};

const BACKLOG: i32 = 4096;
/// Cost of a packet or an accepted connection to the emulated core (ns).
const WORK_NS: u64 = 1_000_000;
/// Interval at which the busy times are published (ns).
const PUBLISH_NS: u64 = 50_000_000;

/// Options of `coreward-lab testbed stream-server`.
#[derive(Debug, Clone, clap::Args)]
pub struct StreamServerArgs {
    /// Address and port in each namespace
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Network namespaces (as in `ip netns`), each with the file of its busy time, created when all listen
    #[arg(long = "server", value_name = "NAMESPACE=FILE", required = true, value_parser = parse_server)]
    pub servers: Vec<(String, PathBuf)>,
}

fn parse_server(text: &str) -> Result<(String, PathBuf), String> {
    let (namespace, file) = text.split_once('=').ok_or_else(|| format!("{text:?}: expected NAMESPACE=FILE"))?;
    Ok((namespace.to_owned(), file.into()))
}

/// Serves until killed. Fails when it cannot listen in a namespace, or a core load file cannot be made.
pub fn run(args: &StreamServerArgs) -> anyhow::Result<()> {
    raise_file_limit()?;
    let servers: Vec<Server> = args
        .servers
        .iter()
        .map(|(namespace, file)| {
            let listener = Namespace::new(namespace.clone()).within(|| Ok(listen(args.listen)?));
            let listener = listener.with_context(|| format!("cannot listen on {} in {namespace}", args.listen))?;
            Ok(Server { listener, core: VirtualCore::default(), busy: BusyFile::create(file, 1)? })
        })
        .collect::<anyhow::Result<_>>()?;
    for (server, (_, file)) in servers.iter().zip(&args.servers) {
        server.busy.publish(file)?;
    }
    let mut serving = Serving::new(servers)?;
    loop {
        serving.turn()?;
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

struct Server {
    listener: TcpListener,
    core: VirtualCore,
    busy: BusyFile,
}

struct Connection {
    server: usize,
    stream: TcpStream,
    /// The beginning of the request, and how much of it is there.
    received: ([u8; REQUEST_BYTES], usize),
    request: Option<Request>,
    began_ns: u64,
    sent: u32,
}

struct Serving {
    servers: Vec<Server>,
    epoll: Epoll,
    /// By number; numbers are never used again, so that a late packet cannot go out on another's connection.
    connections: HashMap<u64, Connection>,
    next_connection: u64,
    /// (when, connection) of the next packet of each connection that has asked.
    due: BinaryHeap<Reverse<(u64, u64)>>,
    next_publish_ns: u64,
}

impl Serving {
    /// The first tokens are the listeners', by the servers' positions.
    fn new(servers: Vec<Server>) -> anyhow::Result<Self> {
        let epoll = Epoll::new()?;
        for (token, server) in (0..).zip(&servers) {
            epoll.add(server.listener.as_fd(), token, libc::EPOLLIN)?;
        }
        let next_connection = servers.len() as u64;
        let connections = HashMap::new();
        Ok(Self { servers, epoll, connections, next_connection, due: BinaryHeap::new(), next_publish_ns: 0 })
    }

    /// Waits for the next thing to do and does all that is due.
    fn turn(&mut self) -> anyhow::Result<()> {
        let next_ns = self.due.peek().map_or(u64::MAX, |Reverse((due_ns, _))| *due_ns);
        let events: Vec<_> = self.epoll.wait(Some(next_ns.min(self.next_publish_ns)))?.collect();
        let now_ns = now_ns();
        for event in events {
            match self.servers.len() as u64 {
                listeners if event.token < listeners => self.accept_all(event.token as usize, now_ns)?,
                _ => self.read(event.token, now_ns),
            }
        }
        while let Some(Reverse((due_ns, number))) = self.due.peek().copied().filter(|Reverse((at, _))| *at <= now_ns) {
            self.due.pop();
            self.send(number, due_ns, now_ns);
        }
        if now_ns >= self.next_publish_ns {
            self.next_publish_ns = now_ns + PUBLISH_NS;
            for server in &self.servers {
                // One writer; readers need no order with other memory.
                server.busy.numbers()[0].store(server.core.busy_ns(now_ns).to_le(), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn accept_all(&mut self, server: usize, now_ns: u64) -> anyhow::Result<()> {
        while let Some(stream) = accept(&self.servers[server].listener).context("cannot accept")? {
            let number = self.next_connection;
            self.next_connection += 1;
            self.epoll.add(stream.as_fd(), number, libc::EPOLLIN)?;
            let received = ([0; REQUEST_BYTES], 0);
            let connection = Connection { server, stream, received, request: None, began_ns: 0, sent: 0 };
            self.connections.insert(number, connection);
            self.servers[server].core.accept(now_ns, WORK_NS);
        }
        Ok(())
    }

    /// Reads the request; only the connection's end may follow.
    fn read(&mut self, number: u64, now_ns: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let (buffer, length) = &mut connection.received;
        let mut excess = [0; 1];
        let room = if *length < REQUEST_BYTES { &mut buffer[*length..] } else { &mut excess[..] };
        match connection.stream.read(room) {
            Ok(read) if read > 0 && connection.request.is_none() => {
                *length += read;
                if *length == REQUEST_BYTES {
                    let request = Request::read_from_bytes(buffer).expect("REQUEST_BYTES");
                    connection.began_ns = now_ns;
                    connection.request = Some(request);
                    self.due.push(Reverse((now_ns + request.due_ns(0), number)));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Ended, broken, or more than a request.
            _ => drop(self.connections.remove(&number)),
        }
    }

    fn send(&mut self, number: u64, due_ns: u64, now_ns: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let Some(request) = connection.request else { return };
        let first = u64::from(connection.sent) * PACKET_BYTES as u64;
        let packet: [u8; PACKET_BYTES] =
            std::array::from_fn(|offset| content(request.seed.get(), first + offset as u64));
        let written = connection.stream.write(&packet);
        connection.sent += 1;
        self.servers[connection.server].core.accept(now_ns, WORK_NS);
        // A client that leaves a full buffer unread is given up.
        if !matches!(written, Ok(PACKET_BYTES)) || connection.sent >= request.packets.get() {
            self.connections.remove(&number);
        } else {
            let next_ns = connection.began_ns + request.due_ns(connection.sent);
            self.due.push(Reverse((next_ns.max(due_ns), number)));
        }
    }
}

/// The servers' process in a testbed; killed when dropped.
#[derive(Debug)]
pub struct StreamServers {
    process: Process,
}

impl Testbed {
    /// Serves on all servers that are there, from one process. Fails when it does not listen within ten seconds.
    pub fn start_stream_servers(&self) -> anyhow::Result<StreamServers> {
        self.start_stream_servers_at(self.service(), |number| fleet::busy_file(self, number))
    }

    /// Starts stream servers at another address; `busy`: by a server's number, the file for its busy time.
    pub fn start_stream_servers_at(
        &self,
        listen: impl Into<SocketAddr>,
        busy: impl Fn(u16) -> PathBuf,
    ) -> anyhow::Result<StreamServers> {
        let numbers = self.server_numbers();
        ensure!(!numbers.is_empty(), "a testbed without servers");
        let mut command = Command::new(fleet::lab_command()?);
        command.args(["testbed", "stream-server", "--listen", &listen.into().to_string()]);
        for number in &numbers {
            let file = busy(*number);
            command.arg("--server").arg(format!("{}={}", self.server(*number)?.name(), file.display()));
        }
        let mut process = self.spawn(self.controller(), command)?;
        let end = Instant::now() + *TIMEOUT;
        while !numbers.iter().all(|number| busy(*number).exists()) {
            if let Some(status) = process.try_wait()? {
                bail!("the stream servers ended: {status}");
            }
            ensure!(Instant::now() < end, "the stream servers do not listen after {:?}", *TIMEOUT);
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(StreamServers { process })
    }
}

impl StreamServers {
    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }
}
