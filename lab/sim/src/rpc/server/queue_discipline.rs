//! Cores for which it is not known at a request's arrival when the request will be served. It waits in a queue, and may
//! be served in several parts or by another core.

use coreward_model::dispatch::TournamentTree;

use super::interface_delay::DelayLine;
use super::{ServerCores, SimulatedRequest, SimulatedResponse};
use crate::rpc::ticks::{NEVER, Tick};

/// Rule that determines the order in which cores serve their requests.
pub trait QueueDiscipline {
    fn handle_arrival(&mut self, now: Tick, core: u16, request: SimulatedRequest, timers: &mut TournamentTree<Tick>);

    /// Processes the expiry of a core's timer, which the caller has cleared. Returns the request that the core has
    /// finished, if any.
    fn handle_timer(&mut self, now: Tick, core: u16, timers: &mut TournamentTree<Tick>) -> Option<SimulatedRequest>;

    /// Returns each core's busy time until `now`.
    fn core_busy_times(&self, now: Tick) -> Vec<Tick>;
}

/// Cores that serve requests in the order that a discipline determines, behind the interface to the NIC. Each core has
/// one timer.
#[derive(Debug)]
pub struct QueueDisciplineCores<Q> {
    discipline: Q,
    requests_to_cores: DelayLine<(u16, SimulatedRequest)>,
    responses_to_nic: DelayLine<(u16, SimulatedRequest)>,
    timers: TournamentTree<Tick>,
}

impl<Q: QueueDiscipline> QueueDisciplineCores<Q> {
    /// Creates idle cores. `latency` is the one-way latency between NIC and cores.
    pub fn new(cores: u16, latency: Tick, discipline: Q) -> Self {
        Self {
            discipline,
            requests_to_cores: DelayLine::new(latency),
            responses_to_nic: DelayLine::new(latency),
            timers: TournamentTree::new(cores, NEVER),
        }
    }
}

impl<Q: QueueDiscipline> ServerCores for QueueDisciplineCores<Q> {
    #[inline]
    fn dispatch(&mut self, now: Tick, core: u16, request: SimulatedRequest) {
        self.requests_to_cores.send(now, (core, request));
    }

    #[inline]
    fn next_event_time(&self) -> Tick {
        self.requests_to_cores
            .next_arrival_time()
            .min(self.timers.least_leaf().1)
            .min(self.responses_to_nic.next_arrival_time())
    }

    fn process_next_event(&mut self) -> Option<(u16, SimulatedResponse)> {
        let now = self.next_event_time();
        if self.responses_to_nic.next_arrival_time() == now {
            let (departed_at, (core, request)) = self.responses_to_nic.receive()?;
            return Some((core, SimulatedResponse { departed_at, request }));
        }
        let (core, timer) = self.timers.least_leaf();
        if timer == now {
            self.timers.set_key(core, NEVER);
            if let Some(finished_request) = self.discipline.handle_timer(now, core, &mut self.timers) {
                self.responses_to_nic.send(now, (core, finished_request));
            }
        } else {
            let (_, (core, request)) = self.requests_to_cores.receive()?;
            self.discipline.handle_arrival(now, core, request, &mut self.timers);
        }
        None
    }

    fn core_busy_times(&self, now: Tick) -> Vec<Tick> {
        self.discipline.core_busy_times(now)
    }
}
