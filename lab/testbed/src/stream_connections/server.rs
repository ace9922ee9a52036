//! All servers of a testbed in one process, with a listening socket in each server's namespace and one event loop.
//!
//! Each server has only one emulated core. A packet and an accepted connection each count as a millisecond of work for
//! the core, so that policies that use loads work.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, ensure};
use zerocopy::FromBytes as _;

use super::{STREAM_PACKET_BYTES, STREAM_REQUEST_BYTES, StreamRequest, raise_open_file_limit, stream_content_byte};
use crate::core_load_file::SharedCounterFile;
use crate::emulated_server::{EmulatedCore, EmulatedServerProtocol, ResponseQueue, ServerEventLoop, open_listener};
use crate::fleet;
use crate::namespace::NetworkNamespace;
use crate::process::TestbedProcess;
use crate::topology::Testbed;

/// Core time for each packet sent and each connection accepted, on an emulated core (ns).
const CORE_TIME_PER_PACKET_NS: u64 = 1_000_000;

/// Options of `coreward-lab testbed stream-server`.
#[derive(Debug, Clone, clap::Args)]
pub struct StreamServerArgs {
    /// Address and port to listen on in each namespace
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Network namespaces (as in `ip netns`), each with a file for the server's busy time, created when all sockets
    /// listen
    #[arg(long = "server", value_name = "NAMESPACE=FILE", required = true, value_parser = parse_namespace_and_file)]
    pub servers: Vec<(String, PathBuf)>,
}

fn parse_namespace_and_file(text: &str) -> Result<(String, PathBuf), String> {
    let (namespace, file) = text.split_once('=').ok_or_else(|| format!("{text:?}: expected NAMESPACE=FILE"))?;
    Ok((namespace.to_owned(), file.into()))
}

/// Serves streams until it is killed. Fails when it cannot listen in a namespace, or when a core load file cannot be
/// created.
pub fn run_stream_server(args: &StreamServerArgs) -> anyhow::Result<()> {
    raise_open_file_limit()?;
    let start_server = |(namespace, file): &(String, PathBuf)| {
        let tcp_listener = NetworkNamespace::new(namespace.clone()).run_within(|| open_listener(args.listen, false));
        Ok((tcp_listener.with_context(|| namespace.clone())?, SharedCounterFile::create(file, 1)?))
    };
    let listeners_and_load_files: Vec<(TcpListener, SharedCounterFile)> =
        args.servers.iter().map(start_server).collect::<anyhow::Result<_>>()?;
    for ((_, core_load_file), (_, file)) in listeners_and_load_files.iter().zip(&args.servers) {
        core_load_file.publish(file)?;
    }
    let emulated_cores = listeners_and_load_files
        .iter()
        .map(|(listener, core_load_file)| EmulatedCore::new(listener, &core_load_file.counters()[0]))
        .collect();
    match ServerEventLoop::new(StreamServerProtocol, emulated_cores)?.run()? {}
}

/// State of a connection: its request, or the part of the request that has been received so far.
#[derive(Default)]
struct StreamConnectionState {
    request_buffer: ([u8; STREAM_REQUEST_BYTES], usize),
    request: Option<StreamRequest>,
    response_start_ns: u64,
}

struct StreamServerProtocol;

impl EmulatedServerProtocol for StreamServerProtocol {
    type ConnectionState = StreamConnectionState;
    const CLOSES_AFTER_RESPONSE: bool = true;
    const ACCEPT_CORE_TIME_NS: u64 = CORE_TIME_PER_PACKET_NS;
    const LOAD_FILE_UPDATE_INTERVAL_NS: u64 = 50_000_000;

    fn try_parse_received_bytes(
        &self,
        stream: &mut StreamConnectionState,
        bytes: &[u8],
        queue: &mut ResponseQueue<'_>,
    ) -> bool {
        let (buffer, length) = &mut stream.request_buffer;
        let Some(remaining_buffer) = buffer.get_mut(*length..*length + bytes.len()) else { return false };
        remaining_buffer.copy_from_slice(bytes);
        *length += bytes.len();
        if *length == STREAM_REQUEST_BYTES {
            let request = StreamRequest::read_from_bytes(buffer).expect("REQUEST_BYTES");
            (stream.request, stream.response_start_ns) = (Some(request), queue.now_ns);
            queue.enqueue_response_packet(queue.now_ns + request.packet_due_ns(0), 0);
        }
        true
    }

    fn append_response_packet(
        &self,
        stream: &StreamConnectionState,
        packet_index: u32,
        packet: &mut Vec<u8>,
        queue: &mut ResponseQueue<'_>,
    ) {
        let request = stream.request.expect("packets are queued after the request");
        let first_byte_index = u64::from(packet_index) * STREAM_PACKET_BYTES as u64;
        packet.extend(
            (first_byte_index..first_byte_index + STREAM_PACKET_BYTES as u64)
                .map(|position| stream_content_byte(request.content_seed.get(), position)),
        );
        queue.enqueue_work(CORE_TIME_PER_PACKET_NS);
        if packet_index + 1 < request.packet_count.get() {
            queue.enqueue_response_packet(
                stream.response_start_ns + request.packet_due_ns(packet_index + 1),
                packet_index + 1,
            );
        }
    }
}

/// Running process of all stream servers in a testbed. Dropping this value kills the process.
#[derive(Debug)]
pub struct StreamServerProcess {
    process: TestbedProcess,
}

impl Testbed {
    /// Starts one process that runs a stream server on every server of the testbed. Fails when it does not listen in
    /// time.
    pub fn start_stream_servers(&self) -> anyhow::Result<StreamServerProcess> {
        self.start_stream_servers_at_address(self.service_address(), |number| fleet::core_load_file_path(self, number))
    }

    /// Starts stream servers that listen at `listen`. `to_core_load_file_path` returns the path of each server's core
    /// load file.
    pub fn start_stream_servers_at_address(
        &self,
        listen: impl Into<SocketAddr>,
        to_core_load_file_path: impl Fn(u16) -> PathBuf,
    ) -> anyhow::Result<StreamServerProcess> {
        let server_numbers = self.server_numbers();
        ensure!(!server_numbers.is_empty(), "a testbed without servers");
        let mut command = Command::new(fleet::lab_binary_path()?);
        command.args(["testbed", "stream-server", "--listen", &listen.into().to_string()]);
        for number in &server_numbers {
            let core_load_file_path = to_core_load_file_path(*number);
            command.arg("--server").arg(format!("{}={}", self.server(*number)?.name(), core_load_file_path.display()));
        }
        let mut process = self.spawn(self.controller(), command)?;
        for number in server_numbers {
            process.wait_for_file("the process of the stream servers", &to_core_load_file_path(number))?;
        }
        Ok(StreamServerProcess { process })
    }
}

impl StreamServerProcess {
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }
}
