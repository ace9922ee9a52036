//! Thread on a second CPU that sends SYNs through a program as fast as possible.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context as _, ensure};
use coreward_dataplane::test_run::ReceiveQueue;

use crate::cpus::{self, THIS_THREAD};
use crate::namespace;
use crate::xdp::runner::{Feed, Packet, Runner};
use crate::xdp::workload::{XDP_TX, syn};

/// Number of SYNs between two checks of the stop flag, which take about 1 ms.
const BATCH_SIZE: u32 = 1 << 13;

/// Command to the flooding thread, which has a CPU of its own.
pub enum Command {
    /// Send SYNs through the empty program, which is the same work without the load balancer.
    Idle,
    /// Send SYNs through this XDP program.
    Flood(OwnedFd),
}

/// Number of SYNs that a flood has sent, and their CPU time.
#[derive(Debug, Clone, Copy, Default)]
pub struct FloodCounts {
    pub syns: u64,
    /// CPU time of the program for all SYNs (s).
    pub time: f64,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    syns: AtomicU64,
}

/// Handle of the flooding thread on the second CPU, which ends when this value is dropped.
pub struct Flooder {
    commands: Option<Sender<Command>>,
    outcomes: Receiver<anyhow::Result<FloodCounts>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Flooder {
    /// Starts the flooding thread on `cpu`. Fails without the capabilities to load BPF programs or to create a network
    /// namespace, or when the CPU cannot be used.
    pub fn start(cpu: usize) -> anyhow::Result<Self> {
        let (commands, received) = channel();
        let (outcome, outcomes) = channel();
        let shared = Arc::new(Shared::default());
        let flooder = {
            let shared = Arc::clone(&shared);
            move || match prepare(cpu) {
                Err(error) => drop(outcome.send(Err(error))),
                Ok(runner) => {
                    let _ = outcome.send(Ok(FloodCounts::default()));
                    for command in received {
                        let _ = outcome.send(execute(&runner, &command, &shared));
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("flood".to_owned()).spawn(flooder)?;
        let flooder = Self { commands: Some(commands), outcomes, shared, thread: Some(thread) };
        flooder.outcome().context("the CPU that floods")?;
        Ok(flooder)
    }

    fn outcome(&self) -> anyhow::Result<FloodCounts> {
        self.outcomes.recv().context("the flooding thread has ended")?
    }

    /// Runs `work` while the flooding thread executes the command, and returns the results of both.
    pub fn run_during<T>(
        &self,
        command: Command,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<(T, FloodCounts)> {
        self.shared.stop.store(false, Ordering::SeqCst);
        self.shared.syns.store(0, Ordering::SeqCst);
        self.commands.as_ref().expect("until it is dropped").send(command).context("the flooding thread has ended")?;
        while self.shared.syns.load(Ordering::SeqCst) == 0 {
            if let Ok(early) = self.outcomes.try_recv() {
                early.context("the CPU that floods")?;
            }
            std::thread::yield_now();
        }
        let done = work();
        self.shared.stop.store(true, Ordering::SeqCst);
        let sent = self.outcome();
        Ok((done?, sent?))
    }
}

impl Drop for Flooder {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Prepares the calling thread for a flood. SYNs arrive on another receive queue than the measured packets, as on a NIC
/// with RSS, because counters have a row per queue.
fn prepare(cpu: usize) -> anyhow::Result<Runner> {
    cpus::bind_to_cpu(THIS_THREAD, cpu)?;
    namespace::enter_new()?;
    namespace::ip("link add flood0 numrxqueues 2 numtxqueues 2 type veth peer name flood1")?;
    let interface = nix::net::if_::if_nametoindex("flood0").context("the index of flood0")?;
    Ok(Runner::new(&syn(), &[Packet::default()], 0)?.on_queue(ReceiveQueue { interface, queue: 1 }))
}

fn execute(runner: &Runner, command: &Command, shared: &Shared) -> anyhow::Result<FloodCounts> {
    let program: BorrowedFd<'_> = match command {
        Command::Idle => runner.empty.as_fd(),
        Command::Flood(program) => program.as_fd(),
    };
    runner.choose(program)?;
    let mut sent = FloodCounts::default();
    while !shared.stop.load(Ordering::Relaxed) {
        let (time, verdict) = runner.run_chosen(Feed::GeneratedSource, BATCH_SIZE)?;
        ensure!(verdict == XDP_TX, "a SYN's verdict was {verdict}, expected {XDP_TX}");
        sent.syns += u64::from(BATCH_SIZE);
        sent.time += time * f64::from(BATCH_SIZE) / 1e9;
        shared.syns.store(sent.syns, Ordering::SeqCst);
    }
    Ok(sent)
}
