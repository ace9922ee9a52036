//! `dfcfs:X,Y`: orchestrators that each have a share of the cores.

use coreward_model::dispatch::{DispatchHeader, Dispatcher, TournamentTree};

use crate::rpc::ticks::Tick;

/// X groups of Y cores, each with one ideal queue in order of arrival; requests are hashed to groups (RingLeader,
/// NSDI'23, Sect. 2.1, D-ideal). In an ideal queue a core gets the next request of its group without delay. No real NIC
/// can do that: it would have to know service times and arrivals at the cores in advance. Such a queue assigns each
/// request to the core that becomes free first (Kiefer and Wolfowitz, 1955).
#[derive(Debug)]
pub struct GroupedFcfsDispatcher {
    latency: Tick,
    cores_per_group: u16,
    /// For each group, the times from which its cores are idle.
    core_idle_times: Vec<TournamentTree<Tick>>,
}

impl GroupedFcfsDispatcher {
    /// Creates a dispatcher for idle cores; `latency` is the one-way latency between NIC and cores.
    pub fn new(groups: u16, cores_per_group: u16, latency: Tick) -> Self {
        Self {
            latency,
            cores_per_group,
            core_idle_times: vec![TournamentTree::new(cores_per_group, 0); usize::from(groups)],
        }
    }
}

impl Dispatcher for GroupedFcfsDispatcher {
    #[inline]
    fn place(&mut self, now: u64, header: &DispatchHeader) -> Option<u16> {
        let group_index = (u64::from(header.flow_hash) * self.core_idle_times.len() as u64) >> 32;
        let group_idle_times = &mut self.core_idle_times[group_index as usize];
        let (core, idle_from) = group_idle_times.least();
        group_idle_times.set(core, idle_from.max(now + self.latency) + header.expected_service_time);
        Some(group_index as u16 * self.cores_per_group + core)
    }

    #[inline]
    fn record_completion(&mut self, _core: u16, _header: &DispatchHeader) {}
}
