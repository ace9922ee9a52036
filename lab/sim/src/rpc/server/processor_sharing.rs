//! Ideal processor sharing (policy `ps`), which bounds what policies without preemption achieve under long-tailed
//! service times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::interface_delay::DelayLine;
use super::{ServerCores, SimulatedRequest, SimulatedResponse};
use crate::rpc::ticks::{NEVER, Tick};

/// Cores that all requests share equally. If there are n requests and k cores, each request receives min(1, k/n) cores
/// at no cost. (Turbo, HPCA'23, Sect. VII-F, instead switches requests every 10 ns.)
///
/// Virtual time advances at the rate at which each request is served. A request ends when virtual time has advanced by
/// its work. Later arrivals therefore do not change its virtual end time (Demers, Keshav and Shenker, SIGCOMM'89). A
/// heap of these end times is sufficient.
#[derive(Debug)]
pub struct ProcessorSharingCores {
    core_count: u64,
    requests_to_cores: DelayLine<SimulatedRequest>,
    responses_to_nic: DelayLine<SimulatedRequest>,
    jobs: BinaryHeap<Reverse<ProcessorSharingJob>>,
    /// Virtual time at `updated_at`, in fractions of a tick ([`FIXED_POINT_ONE`] is one tick).
    virtual_time_at_update: u128,
    updated_at: Tick,
    /// Advance of virtual time per tick of simulated time, in the unit of `virtual_time_at_update`.
    virtual_time_per_tick: u128,
    next_job_end_at: Tick,
    /// Number of the next arriving job. Jobs that end at the same time are ordered by their numbers.
    next_arrival_number: u64,
    /// Total busy time of all cores until `updated_at`.
    total_busy_time: Tick,
}

/// One tick of virtual time in fixed-point representation. With 32 fractional bits, the rate of virtual time is exact
/// to 1e-9 for any number of requests that fits into memory.
const FIXED_POINT_ONE: u128 = 1 << 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessorSharingJob {
    virtual_end_time: u128,
    arrival_number: u64,
    request: SimulatedRequest,
}

impl Ord for ProcessorSharingJob {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.virtual_end_time, self.arrival_number).cmp(&(other.virtual_end_time, other.arrival_number))
    }
}

impl PartialOrd for ProcessorSharingJob {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl ProcessorSharingCores {
    /// Creates idle cores. `latency` is the one-way latency between NIC and cores.
    pub fn new(cores: u16, latency: Tick) -> Self {
        Self {
            core_count: u64::from(cores),
            requests_to_cores: DelayLine::new(latency),
            responses_to_nic: DelayLine::new(latency),
            jobs: BinaryHeap::new(),
            virtual_time_at_update: 0,
            updated_at: 0,
            virtual_time_per_tick: FIXED_POINT_ONE,
            next_job_end_at: NEVER,
            next_arrival_number: 0,
            total_busy_time: 0,
        }
    }

    fn advance_to(&mut self, now: Tick) {
        self.total_busy_time += self.busy_time_since_update(now);
        self.virtual_time_at_update += u128::from(now - self.updated_at) * self.virtual_time_per_tick;
        self.updated_at = now;
    }

    fn busy_time_since_update(&self, now: Tick) -> Tick {
        (now - self.updated_at) * self.core_count.min(self.jobs.len() as u64)
    }

    /// Updates the rate of virtual time and the time at which the next job ends. Must be called when the number of jobs
    /// changes.
    fn update_virtual_time_rate(&mut self) {
        let job_count = self.jobs.len() as u128;
        self.virtual_time_per_tick = if job_count <= u128::from(self.core_count) {
            FIXED_POINT_ONE
        } else {
            u128::from(self.core_count) * FIXED_POINT_ONE / job_count
        };
        self.next_job_end_at = self.jobs.peek().map_or(NEVER, |Reverse(earliest_job)| {
            self.updated_at
                + earliest_job
                    .virtual_end_time
                    .saturating_sub(self.virtual_time_at_update)
                    .div_ceil(self.virtual_time_per_tick) as Tick
        });
    }
}

impl ServerCores for ProcessorSharingCores {
    fn dispatch(&mut self, now: Tick, _core: u16, request: SimulatedRequest) {
        self.requests_to_cores.send(now, request);
    }

    #[inline]
    fn next_event_time(&self) -> Tick {
        self.requests_to_cores
            .next_arrival_time()
            .min(self.next_job_end_at)
            .min(self.responses_to_nic.next_arrival_time())
    }

    fn process_next_event(&mut self) -> Option<(u16, SimulatedResponse)> {
        let now = self.next_event_time();
        if self.responses_to_nic.next_arrival_time() == now {
            return self
                .responses_to_nic
                .receive()
                .map(|(departed_at, request)| (0, SimulatedResponse { departed_at, request }));
        }
        self.advance_to(now);
        if self.next_job_end_at == now {
            let Reverse(ended_job) = self.jobs.pop()?;
            self.responses_to_nic.send(now, ended_job.request);
        } else {
            let (_, request) = self.requests_to_cores.receive()?;
            let virtual_end = self.virtual_time_at_update + u128::from(request.service_time) * FIXED_POINT_ONE;
            self.jobs.push(Reverse(ProcessorSharingJob {
                virtual_end_time: virtual_end,
                arrival_number: self.next_arrival_number,
                request,
            }));
            self.next_arrival_number += 1;
        }
        self.update_virtual_time_rate();
        None
    }

    fn core_busy_times(&self, now: Tick) -> Vec<Tick> {
        // All cores share all work equally, so their busy times are equal.
        vec![(self.total_busy_time + self.busy_time_since_update(now)) / self.core_count; self.core_count as usize]
    }
}
