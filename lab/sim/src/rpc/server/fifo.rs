//! Cores that serve requests to completion in order of arrival.

use std::collections::VecDeque;

use coreward_model::dispatch::TournamentTree;

use super::{ServerCores, SimulatedRequest, SimulatedResponse};
use crate::rpc::ticks::{NEVER, Tick};

/// Cores that serve their requests in order of arrival. A request starts when it reaches the core or when the previous
/// request ends, whichever is later (Lindley's recursion, 1952). The end of a request is therefore known when it is
/// dispatched. Its only event is the response at the NIC.
#[derive(Debug)]
pub struct FifoCores {
    interface_latency: Tick,
    cores: Vec<FifoCore>,
    /// Time at which each core's next response reaches the NIC.
    next_response_times: TournamentTree<Tick>,
}

#[derive(Debug, Clone, Default)]
struct FifoCore {
    idle_from: Tick,
    /// Total service time of all requests that have ever been dispatched to the core.
    total_service_time: Tick,
    unfinished_responses: VecDeque<SimulatedResponse>,
}

impl FifoCores {
    /// Creates idle cores. `interface_latency` is the one-way latency between NIC and cores.
    pub fn new(cores: u16, interface_latency: Tick) -> Self {
        Self {
            interface_latency,
            cores: vec![FifoCore::default(); usize::from(cores)],
            next_response_times: TournamentTree::new(cores, NEVER),
        }
    }
}

impl FifoCores {
    /// Returns, for each core, the remaining service time of all requests that were dispatched by `now`.
    pub fn core_backlogs(&self, now: Tick) -> impl Iterator<Item = Tick> {
        self.cores.iter().map(move |core| core.idle_from.saturating_sub(now))
    }
}

impl ServerCores for FifoCores {
    #[inline]
    fn dispatch(&mut self, now: Tick, core: u16, request: SimulatedRequest) {
        let core_state = &mut self.cores[usize::from(core)];
        let service_start = core_state.idle_from.max(now + self.interface_latency);
        core_state.idle_from = service_start + request.service_time;
        core_state.total_service_time += request.service_time;
        let response = SimulatedResponse { departed_at: core_state.idle_from + self.interface_latency, request };
        if core_state.unfinished_responses.is_empty() {
            self.next_response_times.set_key(core, response.departed_at);
        }
        core_state.unfinished_responses.push_back(response);
    }

    #[inline]
    fn next_event_time(&self) -> Tick {
        self.next_response_times.least_leaf().1
    }

    #[inline]
    fn process_next_event(&mut self) -> Option<(u16, SimulatedResponse)> {
        let (core, _) = self.next_response_times.least_leaf();
        let core_state = &mut self.cores[usize::from(core)];
        let response = core_state.unfinished_responses.pop_front()?;
        self.next_response_times
            .set_key(core, core_state.unfinished_responses.front().map_or(NEVER, |next| next.departed_at));
        Some((core, response))
    }

    fn core_busy_times(&self, now: Tick) -> Vec<Tick> {
        let compute_remaining_work = |core: &FifoCore| -> Tick {
            let unfinished_responses = core
                .unfinished_responses
                .iter()
                .rev()
                .take_while(|response| response.departed_at - self.interface_latency > now);
            unfinished_responses
                .map(|response| {
                    (response.departed_at - self.interface_latency - now).min(response.request.service_time)
                })
                .sum()
        };
        self.cores.iter().map(|core| core.total_service_time - compute_remaining_work(core)).collect()
    }
}
