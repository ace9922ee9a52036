//! Cores that serve by priority and can interrupt a request (RingLeader, NSDI'23, Sect. 3.1 and 4.2).

use std::collections::VecDeque;

use coreward_model::dispatch::TournamentTree;

use super::SimulatedRequest;
use super::queue_discipline::QueueDiscipline;
use crate::rpc::ticks::Tick;

/// Cores that have one queue per service. A core serves the service of highest priority first, and its requests in
/// order of arrival. A running request yields only at the end of a quantum, and only to a request of higher priority.
/// It continues later.
#[derive(Debug)]
pub struct PriorityCores {
    preemption_quantum: Tick,
    service_switch_time: Tick,
    cores: Vec<PriorityCore>,
}

#[derive(Debug, Clone)]
struct PriorityCore {
    running_job: Option<PriorityJob>,
    /// Time at which the running job was last started or continued. If the core had to switch services, this is the end
    /// of the switch.
    job_started_at: Tick,
    last_service_number: u8,
    /// Waiting jobs of each service, by priority.
    waiting_jobs_by_service: Vec<VecDeque<PriorityJob>>,
    /// Total time of all requests and switches on this core, including the remaining time of the running request.
    busy_time: Tick,
}

#[derive(Debug, Clone, Copy)]
struct PriorityJob {
    request: SimulatedRequest,
    remaining_time: Tick,
}

impl PriorityCores {
    /// Creates idle cores. A request can yield after each `preemption_quantum`, and a switch of services takes
    /// `service_switch_time`.
    pub fn new(cores: u16, services: u8, preemption_quantum: Tick, service_switch_time: Tick) -> Self {
        let idle_core = PriorityCore {
            running_job: None,
            job_started_at: 0,
            last_service_number: 0,
            waiting_jobs_by_service: vec![VecDeque::new(); usize::from(services)],
            busy_time: 0,
        };
        Self { preemption_quantum, service_switch_time, cores: vec![idle_core; usize::from(cores)] }
    }

    fn run_next_job(&mut self, now: Tick, core: u16, timers: &mut TournamentTree<Tick>) {
        let core_state = &mut self.cores[usize::from(core)];
        let Some(job) = core_state.waiting_jobs_by_service.iter_mut().find_map(VecDeque::pop_front) else { return };
        let switch_time =
            if job.request.service == core_state.last_service_number { 0 } else { self.service_switch_time };
        core_state.last_service_number = job.request.service;
        core_state.job_started_at = now + switch_time;
        core_state.busy_time += switch_time + job.remaining_time;
        timers.set_key(core, core_state.job_started_at + job.remaining_time);
        core_state.running_job = Some(job);
    }
}

impl QueueDiscipline for PriorityCores {
    fn handle_arrival(&mut self, now: Tick, core: u16, request: SimulatedRequest, timers: &mut TournamentTree<Tick>) {
        let core_state = &mut self.cores[usize::from(core)];
        core_state.waiting_jobs_by_service[usize::from(request.service)]
            .push_back(PriorityJob { request, remaining_time: request.service_time });
        match core_state.running_job {
            None => self.run_next_job(now, core, timers),
            Some(job) if request.service < job.request.service => {
                let elapsed_quanta = now.saturating_sub(core_state.job_started_at).div_ceil(self.preemption_quantum);
                let end_of_quantum = (core_state.job_started_at + elapsed_quanta * self.preemption_quantum).max(now);
                // If the timer fires before the request ends, the request yields.
                timers.set_key(core, timers.leaf_key(core).min(end_of_quantum));
            }
            Some(_) => {}
        }
    }

    fn handle_timer(&mut self, now: Tick, core: u16, timers: &mut TournamentTree<Tick>) -> Option<SimulatedRequest> {
        let core_state = &mut self.cores[usize::from(core)];
        let mut job = core_state.running_job.take()?;
        let served_time = now.saturating_sub(core_state.job_started_at);
        let is_finished = served_time >= job.remaining_time;
        if !is_finished {
            job.remaining_time -= served_time;
            core_state.busy_time -= job.remaining_time;
            core_state.waiting_jobs_by_service[usize::from(job.request.service)].push_front(job);
        }
        self.run_next_job(now, core, timers);
        is_finished.then_some(job.request)
    }

    fn core_busy_times(&self, now: Tick) -> Vec<Tick> {
        let remaining_time = |core: &PriorityCore| {
            core.running_job.map_or(0, |job| (core.job_started_at + job.remaining_time).saturating_sub(now))
        };
        self.cores.iter().map(|core| core.busy_time - remaining_time(core)).collect()
    }
}
