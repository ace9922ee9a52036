//! Dispatcher of the policy `dfcfs:X,Y`, which divides the cores among several orchestrators.

use coreward_model::dispatch::{DispatchHeader, RequestDispatcher, TournamentTree};

use crate::rpc::ticks::Tick;

/// Dispatcher for X groups of Y cores, to which requests are hashed (RingLeader, NSDI'23, Sect. 2.1, D-ideal).
///
/// Each group has one ideal queue in order of arrival, from which a free core gets the next request without delay. No
/// real NIC can do that, because it would have to know service times and arrivals at the cores in advance. The queue
/// assigns each request to the core that becomes free first (Kiefer and Wolfowitz, 1955).
#[derive(Debug)]
pub struct GroupedFcfsDispatcher {
    interface_latency: Tick,
    cores_per_group: u16,
    /// Time from which each core is idle, in one tree for each group of cores.
    core_idle_start_times: Vec<TournamentTree<Tick>>,
}

impl GroupedFcfsDispatcher {
    /// Creates a dispatcher for idle cores. `interface_latency` is the one-way latency between NIC and cores.
    pub fn new(groups: u16, cores_per_group: u16, interface_latency: Tick) -> Self {
        Self {
            interface_latency,
            cores_per_group,
            core_idle_start_times: vec![TournamentTree::new(cores_per_group, 0); usize::from(groups)],
        }
    }
}

impl RequestDispatcher for GroupedFcfsDispatcher {
    #[inline]
    fn place_request(&mut self, now: u64, header: &DispatchHeader) -> Option<u16> {
        let group_index = (u64::from(header.flow_hash) * self.core_idle_start_times.len() as u64) >> 32;
        let group_idle_from_times = &mut self.core_idle_start_times[group_index as usize];
        let (core, idle_from) = group_idle_from_times.least_leaf();
        group_idle_from_times.set_key(core, idle_from.max(now + self.interface_latency) + header.expected_service_time);
        Some(group_index as u16 * self.cores_per_group + core)
    }

    #[inline]
    fn record_completion(&mut self, _core: u16, _header: &DispatchHeader) {}
}
