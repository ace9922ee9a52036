//! Server with emulated cores. Each worker serves one request at a time and emulates its service time, so that two CPUs
//! can run sixteen cores.
//!
//! For the agent it equals nginx with `reuseport`, which has one listening socket per worker. The master opens these
//! sockets and all workers inherit them. Each worker is a process and waits only on its own socket. Worker K is named
//! `coreK`.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;

use anyhow::bail;
use coreward_load::paced_protocol::{MAX_SERVICE_TIME_US, PacedMessageBuffer, PacedRequest, PacedResponse};
use nix::sys::wait::wait;
use zerocopy::IntoBytes as _;

use crate::core_load_file::{SharedCounterFile, read_core_load_file};
use crate::emulated_server::{
    EmulatedCore, EmulatedServerProtocol, ResponseQueue, ServerEventLoop, fork_worker, open_listener,
};
use crate::fleet;
use crate::process::TestbedProcess;
use crate::topology::Testbed;

/// Options of `coreward-lab testbed paced-server`.
#[derive(Debug, Clone, clap::Args)]
pub struct PacedServerArgs {
    /// Address and port to listen on
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Number of workers, each an emulated core
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub workers: u8,
    /// File of one little-endian u64 per worker: the worker's busy time (ns); created when all sockets listen
    #[arg(long, value_name = "FILE")]
    pub busy_file: PathBuf,
    /// Number of this server, which its answers contain
    #[arg(long, default_value_t = 1)]
    pub server: u8,
}

/// Serves requests until it is killed. Fails when it cannot listen, when the core load file cannot be created, or when
/// a worker ends.
pub fn run_paced_server(args: &PacedServerArgs) -> anyhow::Result<()> {
    let listeners: Vec<TcpListener> =
        (0..args.workers).map(|_| open_listener(args.listen, true)).collect::<anyhow::Result<_>>()?;
    let core_load_file = SharedCounterFile::create(&args.busy_file, args.workers.into())?;
    for ((number, listener), busy_ns) in (0..).zip(&listeners).zip(core_load_file.counters()) {
        let protocol = PacedServerProtocol { server_number: args.server, core_number: number };
        let run_core = || ServerEventLoop::new(protocol, vec![EmulatedCore::new(listener, busy_ns)])?.run();
        fork_worker("paced server", number, run_core)?;
    }
    core_load_file.publish(&args.busy_file)?;
    // Workers only end after an error. The others then end with the master (PR_SET_PDEATHSIG).
    let ended_child = wait()?;
    bail!("a worker of the paced server ended: {ended_child:?}");
}

/// Protocol by which one core of a paced server communicates with its clients.
struct PacedServerProtocol {
    server_number: u8,
    core_number: u8,
}

impl EmulatedServerProtocol for PacedServerProtocol {
    type ConnectionState = PacedMessageBuffer;
    const CLOSES_AFTER_RESPONSE: bool = false;
    const ACCEPT_CORE_TIME_NS: u64 = 0;
    /// Maximum age of the busy time in the core load file (ns), 4 % of a report interval of 100 ms. A request in the
    /// demo (7.5 ms) thus needs only one additional wake-up.
    const LOAD_FILE_UPDATE_INTERVAL_NS: u64 = 4_000_000;

    fn try_parse_received_bytes(
        &self,
        messages: &mut PacedMessageBuffer,
        bytes: &[u8],
        queue: &mut ResponseQueue<'_>,
    ) -> bool {
        let mut is_valid = true;
        messages.for_each_message(bytes, |request: PacedRequest| {
            let service_us = request.service_us.get();
            is_valid &= service_us <= MAX_SERVICE_TIME_US;
            let completion_ns = queue.enqueue_work(u64::from(service_us.min(MAX_SERVICE_TIME_US)) * 1_000);
            queue.enqueue_response_packet(completion_ns, request.id.get());
        });
        is_valid
    }

    fn append_response_packet(&self, _: &PacedMessageBuffer, id: u32, packet: &mut Vec<u8>, _: &mut ResponseQueue<'_>) {
        let response = PacedResponse {
            id: id.into(),
            server_number: self.server_number,
            core_number: self.core_number,
            reserved: [0; 2],
        };
        packet.extend_from_slice(response.as_bytes());
    }
}

/// Running paced server on a server of the testbed. Dropping this value kills it.
#[derive(Debug)]
pub struct PacedServer {
    master_process: TestbedProcess,
    core_load_file_path: PathBuf,
}

impl PacedServer {
    pub fn master_pid(&self) -> u32 {
        self.master_process.pid()
    }

    /// Returns the total busy time of each core (ns). Fails when the core load file cannot be read.
    pub fn read_core_busy_ns(&self) -> anyhow::Result<Vec<u64>> {
        read_core_load_file(&self.core_load_file_path)
    }
}

impl Testbed {
    /// Starts a paced server on server `number`, with one worker per core. Fails when the server does not exist, or
    /// does not listen in time.
    pub fn start_paced_server(&self, number: u16) -> anyhow::Result<PacedServer> {
        let core_load_file_path = fleet::core_load_file_path(self, number);
        let mut command = Command::new(fleet::lab_binary_path()?);
        command.args(["testbed", "paced-server", "--listen", &self.service_address().to_string()]);
        command.args(["--workers", &self.options().core_count.to_string(), "--server", &number.to_string()]);
        command.arg("--busy-file").arg(&core_load_file_path);
        let mut master_process = self.spawn(self.server(number)?, command)?;
        master_process.wait_for_file(&format!("the paced server of server {number}"), &core_load_file_path)?;
        Ok(PacedServer { master_process, core_load_file_path })
    }
}
