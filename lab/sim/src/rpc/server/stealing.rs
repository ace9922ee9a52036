//! Cores that each have a queue and, when idle, steal requests from other queues (policy `work-stealing`).

use std::collections::VecDeque;

use coreward_model::dispatch::{LongestQueueStealing, TournamentTree};

use super::SimulatedRequest;
use super::queue_discipline::QueueDiscipline;
use crate::rpc::ticks::Tick;

/// Cores, each of which serves its own queue in order of arrival. An idle core steals a waiting request from another
/// core, and a stolen request takes `stealing_cost` longer.
#[derive(Debug)]
pub struct StealingCores {
    stealing_cost: Tick,
    stealing_policy: LongestQueueStealing,
    cores: Vec<StealingCore>,
}

#[derive(Debug, Clone, Default)]
struct StealingCore {
    request_in_service: Option<SimulatedRequest>,
    busy_until: Tick,
    queue: VecDeque<SimulatedRequest>,
    /// Total service time of all requests that have started on this core, including the cost of stealing.
    busy_time: Tick,
}

impl StealingCores {
    /// Creates idle cores, at which a stolen request takes `stealing_cost` longer.
    pub fn new(cores: u16, stealing_cost: Tick) -> Self {
        Self {
            stealing_cost,
            stealing_policy: LongestQueueStealing::new(cores),
            cores: vec![StealingCore::default(); usize::from(cores)],
        }
    }

    fn start_request(
        &mut self,
        now: Tick,
        core: u16,
        request: SimulatedRequest,
        additional_time: Tick,
        timers: &mut TournamentTree<Tick>,
    ) {
        let core_state = &mut self.cores[usize::from(core)];
        core_state.busy_until = now + additional_time + request.service_time;
        core_state.busy_time += additional_time + request.service_time;
        core_state.request_in_service = Some(request);
        timers.set_key(core, core_state.busy_until);
        self.stealing_policy.set_core_busy(core, true);
    }

    fn take_first_waiting_request(&mut self, core: u16) -> Option<SimulatedRequest> {
        let queue = &mut self.cores[usize::from(core)].queue;
        let first_request = queue.pop_front()?;
        self.stealing_policy.set_queue_length(core, queue.len() as u32);
        Some(first_request)
    }

    fn steal_request(&mut self, now: Tick, timers: &mut TournamentTree<Tick>) {
        if let Some(steal) = self.stealing_policy.next_steal()
            && let Some(request) = self.take_first_waiting_request(steal.victim_core)
        {
            self.start_request(now, steal.thief_core, request, self.stealing_cost, timers);
        }
    }
}

impl QueueDiscipline for StealingCores {
    fn handle_arrival(&mut self, now: Tick, core: u16, request: SimulatedRequest, timers: &mut TournamentTree<Tick>) {
        let core_state = &mut self.cores[usize::from(core)];
        if core_state.request_in_service.is_none() {
            return self.start_request(now, core, request, 0, timers);
        }
        core_state.queue.push_back(request);
        self.stealing_policy.set_queue_length(core, core_state.queue.len() as u32);
        self.steal_request(now, timers);
    }

    fn handle_timer(&mut self, now: Tick, core: u16, timers: &mut TournamentTree<Tick>) -> Option<SimulatedRequest> {
        let finished_request = self.cores[usize::from(core)].request_in_service.take();
        self.stealing_policy.set_core_busy(core, false);
        match self.take_first_waiting_request(core) {
            Some(next_request) => self.start_request(now, core, next_request, 0, timers),
            None => self.steal_request(now, timers),
        }
        finished_request
    }

    fn core_busy_times(&self, now: Tick) -> Vec<Tick> {
        self.cores.iter().map(|core| core.busy_time - core.busy_until.saturating_sub(now)).collect()
    }
}
