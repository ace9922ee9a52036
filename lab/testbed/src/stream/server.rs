//! Servers of a testbed in one process: a listening socket in each server's namespace, and one event loop.
//!
//! A packet and an accepted connection each count as a millisecond of work of the server's only emulated core, for
//! policies that use loads.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, ensure};
use zerocopy::FromBytes as _;

use super::{PACKET_BYTES, REQUEST_BYTES, Request, content, raise_file_limit};
use crate::core_load_file::CounterFile;
use crate::emulated_server::{Core, EventLoop, Protocol, ResponseQueue, listen};
use crate::fleet;
use crate::namespace::Namespace;
use crate::process::Process;
use crate::topology::Testbed;

/// Time that the emulated core works for each packet and each accepted connection (ns).
const WORK_NS: u64 = 1_000_000;

/// Options of `coreward-lab testbed stream-server`.
#[derive(Debug, Clone, clap::Args)]
pub struct StreamServerArgs {
    /// Address and port to listen on in each namespace
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Network namespaces (as in `ip netns`), each with a file for the server's busy time, created when all sockets
    /// listen
    #[arg(long = "server", value_name = "NAMESPACE=FILE", required = true, value_parser = parse_server)]
    pub servers: Vec<(String, PathBuf)>,
}

fn parse_server(text: &str) -> Result<(String, PathBuf), String> {
    let (namespace, file) = text.split_once('=').ok_or_else(|| format!("{text:?}: expected NAMESPACE=FILE"))?;
    Ok((namespace.to_owned(), file.into()))
}

/// Serves until killed. Fails when it cannot listen in one of the namespaces, or a core load file cannot be created.
pub fn run(args: &StreamServerArgs) -> anyhow::Result<()> {
    raise_file_limit()?;
    let start = |(namespace, file): &(String, PathBuf)| {
        let listener = Namespace::new(namespace.clone()).within(|| listen(args.listen, false));
        Ok((listener.with_context(|| namespace.clone())?, CounterFile::create(file, 1)?))
    };
    let servers: Vec<(TcpListener, CounterFile)> = args.servers.iter().map(start).collect::<anyhow::Result<_>>()?;
    for ((_, busy), (_, file)) in servers.iter().zip(&args.servers) {
        busy.publish(file)?;
    }
    let cores = servers.iter().map(|(listener, busy)| Core::new(listener, &busy.counters()[0])).collect();
    match EventLoop::new(StreamProtocol, cores)?.run()? {}
}

/// State of a connection: its request, or the bytes received of it so far.
#[derive(Default)]
struct Stream {
    request_buffer: ([u8; REQUEST_BYTES], usize),
    request: Option<Request>,
    began_ns: u64,
}

struct StreamProtocol;

impl Protocol for StreamProtocol {
    type State = Stream;
    const CLOSES_AFTER_RESPONSE: bool = true;
    const ACCEPT_NS: u64 = WORK_NS;
    const PUBLISH_INTERVAL_NS: u64 = 50_000_000;

    fn receive(&self, stream: &mut Stream, bytes: &[u8], queue: &mut ResponseQueue<'_>) -> bool {
        let (buffer, length) = &mut stream.request_buffer;
        let Some(room) = buffer.get_mut(*length..*length + bytes.len()) else { return false };
        room.copy_from_slice(bytes);
        *length += bytes.len();
        if *length == REQUEST_BYTES {
            let request = Request::read_from_bytes(buffer).expect("REQUEST_BYTES");
            (stream.request, stream.began_ns) = (Some(request), queue.now_ns);
            queue.send_at(queue.now_ns + request.due_ns(0), 0);
        }
        true
    }

    fn write(&self, stream: &Stream, index: u32, packet: &mut Vec<u8>, queue: &mut ResponseQueue<'_>) {
        let request = stream.request.expect("packets are queued after the request");
        let first = u64::from(index) * PACKET_BYTES as u64;
        packet.extend((first..first + PACKET_BYTES as u64).map(|position| content(request.seed.get(), position)));
        queue.work(WORK_NS);
        if index + 1 < request.packets.get() {
            queue.send_at(stream.began_ns + request.due_ns(index + 1), index + 1);
        }
    }
}

/// Running process of all stream servers in a testbed, which is killed when dropped.
#[derive(Debug)]
pub struct StreamServers {
    process: Process,
}

impl Testbed {
    /// Starts one process that serves on all present servers. Fails when it does not listen within ten seconds.
    pub fn start_stream_servers(&self) -> anyhow::Result<StreamServers> {
        self.start_stream_servers_at(self.service(), |number| fleet::busy_file(self, number))
    }

    /// Starts stream servers at another address. `busy`: path of the core load file, by server number.
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
        for number in numbers {
            process.wait_for_file("the process of the stream servers", &busy(number))?;
        }
        Ok(StreamServers { process })
    }
}

impl StreamServers {
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }
}
