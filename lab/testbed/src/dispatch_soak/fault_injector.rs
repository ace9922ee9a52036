//! Random faults of the dispatch soak test, reproducible from a seed.

use std::time::{Duration, Instant};

use coreward_model::rss::uniform_below;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;
use std::net::SocketAddrV4;

use super::response_spoofer::{FIRST_UNANSWERED_REQUEST_ID, ResponseSpoofer, UnansweredClient};
use super::test_env::{FIRST_LOAD_PORT, LOAD_FLOW_COUNT, SoakTestEnv, WORKER_COUNT};
use crate::interrupt_flag;

/// Range of the pauses between consecutive faults (ms).
const FAULT_PAUSE_RANGE_MS: std::ops::Range<u32> = 100..600;
/// Range of the times for which workers are stopped (ms).
const WORKER_STOP_DURATION_RANGE_MS: std::ops::Range<u32> = 1_000..3_000;
/// Number of datagrams in a flood, which is several times the number that fits into the workers' receive buffers.
const FLOOD_DATAGRAM_COUNT: u32 = 3_000;
/// Number of flood datagrams that are sent without a pause. It is less than a CPU's backlog of 1,000 packets
/// (net.core.netdev_max_backlog), so the flood is dropped only at the receive buffers.
const FLOOD_BURST_DATAGRAM_COUNT: u32 = 100;
/// Time within which a request certainly arrives at its worker.
const MAX_REQUEST_DELIVERY_TIME: Duration = Duration::from_millis(20);

#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct FaultCounts {
    /// Number of killed workers, each of which the server replaces.
    pub worker_kills: u64,
    /// Number of workers that were stopped for one to three seconds.
    pub worker_stops: u64,
    /// Number of times that all workers were killed at once.
    pub server_restarts: u64,
    /// Number of times that `coreward dispatch` was detached and attached again.
    pub detachments: u64,
    /// Number of times that the daemon `coreward dispatch` was killed and started again.
    pub daemon_restarts: u64,
    pub floods: u64,
    /// Number of requests that no worker answers, including the datagrams of floods.
    pub unanswered_requests: u64,
    /// Number of requests that were answered by a process other than a worker.
    pub answered_by_others: u64,
    /// Number of spoofed responses, which match no request.
    pub spoofed_responses: u64,
}

impl FaultCounts {
    /// Adds the fault counts of another segment to these counts.
    pub fn add_counts(&mut self, other: &Self) {
        let Self {
            worker_kills: kills,
            worker_stops: stops,
            server_restarts: restarts,
            detachments,
            daemon_restarts: upgrades,
            ..
        } = other;
        self.worker_kills += kills;
        self.worker_stops += stops;
        self.server_restarts += restarts;
        self.detachments += detachments;
        self.daemon_restarts += upgrades;
        self.floods += other.floods;
        self.unanswered_requests += other.unanswered_requests;
        self.answered_by_others += other.answered_by_others;
        self.spoofed_responses += other.spoofed_responses;
    }
}

#[derive(Debug)]
pub struct FaultInjector<'a> {
    env: &'a mut SoakTestEnv,
    rng: &'a mut Xoshiro256PlusPlus,
    /// Whether faults may detach the BPF program of `coreward dispatch`, which resets its counters.
    may_restart_dispatch: bool,
    unanswered_client: UnansweredClient,
    spoofer: ResponseSpoofer,
    /// Process ids of stopped workers, each with the time to resume it by SIGCONT.
    stopped_workers_and_resume_times: Vec<(u32, Instant)>,
    fault_counts: FaultCounts,
}

impl<'a> FaultInjector<'a> {
    /// Creates an injector. If `may_restart_dispatch` is true, it may detach `coreward dispatch` and kill all workers
    /// at once. Fails when sockets cannot be opened.
    pub fn new(
        env: &'a mut SoakTestEnv,
        rng: &'a mut Xoshiro256PlusPlus,
        may_restart_dispatch: bool,
    ) -> anyhow::Result<Self> {
        let unanswered_client = UnansweredClient::open(env.testbed().client())?;
        let spoofer = ResponseSpoofer::open(env.testbed().server(1)?)?;
        Ok(Self {
            env,
            rng,
            may_restart_dispatch,
            unanswered_client,
            spoofer,
            stopped_workers_and_resume_times: Vec::new(),
            fault_counts: FaultCounts::default(),
        })
    }

    pub fn env(&self) -> &SoakTestEnv {
        self.env
    }

    /// Injects random faults until `end`. Fails when a fault cannot be injected, or after a signal.
    pub fn inject_faults_until(&mut self, end: Instant) -> anyhow::Result<()> {
        loop {
            let pause = self.random_duration(FAULT_PAUSE_RANGE_MS).min(end.saturating_duration_since(Instant::now()));
            std::thread::sleep(pause);
            interrupt_flag::ensure_not_interrupted()?;
            let now = Instant::now();
            let (due_workers, still_stopped_workers): (Vec<_>, Vec<_>) =
                self.stopped_workers_and_resume_times.drain(..).partition(|(_, resume_at)| *resume_at <= now);
            self.stopped_workers_and_resume_times = still_stopped_workers;
            due_workers.into_iter().for_each(|(pid, _)| self.send_signal(pid, Signal::SIGCONT));
            if now >= end {
                return Ok(());
            }
            self.inject_random_fault()?;
        }
    }

    /// Resumes all stopped workers. Returns the number of injected faults of each kind.
    pub fn resume_workers_and_take_counts(mut self) -> anyhow::Result<FaultCounts> {
        std::mem::take(&mut self.stopped_workers_and_resume_times)
            .into_iter()
            .for_each(|(pid, _)| self.send_signal(pid, Signal::SIGCONT));
        Ok(self.fault_counts)
    }

    fn inject_random_fault(&mut self) -> anyhow::Result<()> {
        match uniform_below(self.rng, if self.may_restart_dispatch { 8 } else { 6 }) {
            0 => self.kill_worker(),
            1 => self.stop_worker(),
            2 => self.send_unanswered_requests(),
            3 => self.send_spoofed_response()?,
            4 => self.flood_workers(),
            5 => {
                self.env.kill_dispatch_daemon()?;
                std::thread::sleep(self.random_duration(10..400));
                self.env.attach_dispatch(WORKER_COUNT - self.stopped_workers_and_resume_times.len() as u64)?;
                self.fault_counts.daemon_restarts += 1;
            }
            6 => {
                self.env.detach_dispatch()?;
                std::thread::sleep(self.random_duration(10..400));
                self.env.attach_dispatch(WORKER_COUNT - self.stopped_workers_and_resume_times.len() as u64)?;
                self.fault_counts.detachments += 1;
            }
            _ => {
                self.env
                    .key_value_server()
                    .worker_pids()
                    .into_iter()
                    .for_each(|pid| self.send_signal(pid, Signal::SIGKILL));
                self.fault_counts.server_restarts += 1;
            }
        }
        Ok(())
    }

    fn random_duration(&mut self, range_ms: std::ops::Range<u32>) -> Duration {
        let random_part_ms = uniform_below(self.rng, range_ms.end - range_ms.start);
        Duration::from_millis((range_ms.start + random_part_ms).into())
    }

    fn random_worker_pid(&mut self) -> Option<u32> {
        let worker_number = uniform_below(self.rng, WORKER_COUNT as u32) as u8;
        // The worker may be missing, because a killed worker may not have been replaced yet.
        self.env.key_value_server().worker_pid(worker_number).ok()
    }

    /// Sends a signal to a worker process, unless it has ended.
    fn send_signal(&self, pid: u32, signal: Signal) {
        if self.env.key_value_server().worker_pids().contains(&pid) {
            let _ = kill(Pid::from_raw(pid as i32), signal);
        }
    }

    fn kill_worker(&mut self) {
        let Some(pid) = self.random_worker_pid() else { return };
        self.send_signal(pid, Signal::SIGKILL);
        self.fault_counts.worker_kills += 1;
    }

    fn stop_worker(&mut self) {
        let Some(pid) = self.random_worker_pid() else { return };
        let resume_time = Instant::now() + self.random_duration(WORKER_STOP_DURATION_RANGE_MS);
        // Stop at most two workers at a time, because the other half can serve the load.
        if self.stopped_workers_and_resume_times.len() < 2
            && self.stopped_workers_and_resume_times.iter().all(|(stopped_pid, _)| *stopped_pid != pid)
        {
            self.send_signal(pid, Signal::SIGSTOP);
            self.stopped_workers_and_resume_times.push((pid, resume_time));
            self.fault_counts.worker_stops += 1;
        }
    }

    /// Sends requests that no worker answers. A different process answers every second one.
    fn send_unanswered_requests(&mut self) {
        let request_count = 1 + uniform_below(self.rng, 20);
        let request_ids: Vec<u32> = (0..request_count).filter_map(|_| self.unanswered_client.send_request()).collect();
        self.fault_counts.unanswered_requests += request_ids.len() as u64;
        std::thread::sleep(MAX_REQUEST_DELIVERY_TIME);
        let Ok(address) = self.unanswered_client.source_address() else { return };
        for id in request_ids.into_iter().step_by(2) {
            self.fault_counts.answered_by_others += u64::from(self.spoofer.send_response(address, id).is_ok());
        }
    }

    fn send_spoofed_response(&mut self) -> anyhow::Result<()> {
        let client_address = self.env.testbed().client_ipv4_address(0);
        for _ in 0..1 + uniform_below(self.rng, 50) {
            let client_port = FIRST_LOAD_PORT + uniform_below(self.rng, LOAD_FLOW_COUNT.into()) as u16;
            let id = FIRST_UNANSWERED_REQUEST_ID | uniform_below(self.rng, FIRST_UNANSWERED_REQUEST_ID);
            self.spoofer.send_response(SocketAddrV4::new(client_address, client_port), id)?;
            self.fault_counts.spoofed_responses += 1;
        }
        Ok(())
    }

    fn flood_workers(&mut self) {
        for _ in 0..FLOOD_DATAGRAM_COUNT / FLOOD_BURST_DATAGRAM_COUNT {
            let sent_count =
                (0..FLOOD_BURST_DATAGRAM_COUNT).filter(|_| self.unanswered_client.send_request().is_some()).count();
            self.fault_counts.unanswered_requests += sent_count as u64;
            std::thread::sleep(Duration::from_micros(100));
        }
        self.fault_counts.floods += 1;
    }
}
