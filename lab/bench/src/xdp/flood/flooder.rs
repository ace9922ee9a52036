//! Thread on a second CPU that sends SYNs through a program as fast as possible.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context as _, ensure};
use coreward_dataplane::test_run::ReceiveQueueId;

use crate::namespace;
use crate::thread_cpus::{self, CALLING_THREAD_PID};
use crate::xdp::runner::{PacketGenerator, PacketRunner, PacketVariation};
use crate::xdp::workload::{XDP_TX, syn_frame_template};

/// Number of SYNs between two checks of the stop flag. Sending them takes about 1 ms.
const SYNS_PER_BATCH: u32 = 1 << 13;

/// Command to the flooding thread, which has a CPU of its own.
pub enum SynFlooderCommand {
    /// Send SYNs through the empty program, so that the CPU does the same work except that of the load balancer.
    SynsThroughEmptyProgram,
    /// Send SYNs through this XDP program.
    SynsThroughProgram(OwnedFd),
}

/// Number of SYNs that a flood has sent, and the CPU time that they took.
#[derive(Debug, Clone, Copy, Default)]
pub struct SynFloodCounts {
    pub syn_count: u64,
    /// CPU time that the program took for all SYNs (s).
    pub cpu_seconds: f64,
}

#[derive(Default)]
struct SharedFlooderState {
    should_stop: AtomicBool,
    syn_count: AtomicU64,
}

/// Handle of the flooding thread on the second CPU, which ends when this value is dropped.
pub struct SynFlooder {
    command_sender: Option<Sender<SynFlooderCommand>>,
    result_receiver: Receiver<anyhow::Result<SynFloodCounts>>,
    shared_state: Arc<SharedFlooderState>,
    thread: Option<JoinHandle<()>>,
}

impl SynFlooder {
    /// Starts the flooding thread on `cpu`. Fails without the capabilities to load BPF programs or to create a network
    /// namespace, or when the CPU cannot be used.
    pub fn start(cpu: usize) -> anyhow::Result<Self> {
        let (command_sender, command_receiver) = channel();
        let (result_sender, result_receiver) = channel();
        let shared_state = Arc::new(SharedFlooderState::default());
        let run_commands = {
            let thread_state = Arc::clone(&shared_state);
            move || match create_flood_runner(cpu) {
                Err(error) => drop(result_sender.send(Err(error))),
                Ok(runner) => {
                    let _ = result_sender.send(Ok(SynFloodCounts::default()));
                    for command in command_receiver {
                        let _ = result_sender.send(execute_command_until_stopped(&runner, &command, &thread_state));
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("flood".to_owned()).spawn(run_commands)?;
        let flooder =
            Self { command_sender: Some(command_sender), result_receiver, shared_state, thread: Some(thread) };
        flooder.receive_flood_counts().context("the CPU that floods")?;
        Ok(flooder)
    }

    fn receive_flood_counts(&self) -> anyhow::Result<SynFloodCounts> {
        self.result_receiver.recv().context("the flooding thread has ended")?
    }

    /// Runs `work` while the flooding thread executes the command, and returns the results of both.
    pub fn run_during_flood<T>(
        &self,
        command: SynFlooderCommand,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<(T, SynFloodCounts)> {
        self.shared_state.should_stop.store(false, Ordering::SeqCst);
        self.shared_state.syn_count.store(0, Ordering::SeqCst);
        self.command_sender
            .as_ref()
            .expect("until it is dropped")
            .send(command)
            .context("the flooding thread has ended")?;
        while self.shared_state.syn_count.load(Ordering::SeqCst) == 0 {
            if let Ok(early_result) = self.result_receiver.try_recv() {
                early_result.context("the CPU that floods")?;
            }
            std::thread::yield_now();
        }
        let work_result = work();
        self.shared_state.should_stop.store(true, Ordering::SeqCst);
        let flood_result = self.receive_flood_counts();
        Ok((work_result?, flood_result?))
    }
}

impl Drop for SynFlooder {
    fn drop(&mut self) {
        self.shared_state.should_stop.store(true, Ordering::SeqCst);
        self.command_sender = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Binds the calling thread to `cpu`, and creates a runner of SYNs in a new network namespace. The SYNs have another
/// receive queue and row of counters than the measured packets, as on a NIC with RSS.
fn create_flood_runner(cpu: usize) -> anyhow::Result<PacketRunner> {
    thread_cpus::bind_to_cpu(CALLING_THREAD_PID, cpu)?;
    namespace::enter_new_network_namespace()?;
    namespace::run_ip_command("link add flood0 numrxqueues 2 numtxqueues 2 type veth peer name flood1")?;
    let interface = nix::net::if_::if_nametoindex("flood0").context("the index of flood0")?;
    Ok(PacketRunner::new(&syn_frame_template(), &[PacketVariation::default()], 0)?
        .with_receive_queue(ReceiveQueueId { interface_index: interface, queue_index: 1 }))
}

fn execute_command_until_stopped(
    runner: &PacketRunner,
    command: &SynFlooderCommand,
    shared_state: &SharedFlooderState,
) -> anyhow::Result<SynFloodCounts> {
    let program: BorrowedFd<'_> = match command {
        SynFlooderCommand::SynsThroughEmptyProgram => runner.empty_program.as_fd(),
        SynFlooderCommand::SynsThroughProgram(program) => program.as_fd(),
    };
    runner.choose_program(program)?;
    let mut flood_counts = SynFloodCounts::default();
    while !shared_state.should_stop.load(Ordering::Relaxed) {
        let (mean_ns, xdp_verdict) = runner.run_chosen_program(PacketGenerator::GeneratedSource, SYNS_PER_BATCH)?;
        ensure!(xdp_verdict == XDP_TX, "a SYN's verdict was {xdp_verdict}, expected {XDP_TX}");
        flood_counts.syn_count += u64::from(SYNS_PER_BATCH);
        flood_counts.cpu_seconds += mean_ns * f64::from(SYNS_PER_BATCH) / 1e9;
        shared_state.syn_count.store(flood_counts.syn_count, Ordering::SeqCst);
    }
    Ok(flood_counts)
}
