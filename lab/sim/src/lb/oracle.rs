//! Oracle that places each new connection by the true current rates of all flows (policy `oracle`).
//!
//! RSS selects one core for the connection on every server. The oracle chooses the server where the flows of this core
//! have the smallest total rate. No load balancer knows these rates, so the oracle cannot run live and is not among the
//! policies. It bounds what placement by core can achieve while connections stay on their servers.

use crate::trace::FlowFirstPacket;

/// Name by which the oracle is selected among the policies.
pub const ORACLE_POLICY_NAME: &str = "oracle";

/// Number of rate units in one packet per second. Rates are integers, because sums of floating-point numbers would not
/// return to exactly zero.
const RATE_UNITS_PER_PACKET: f64 = 1e6;

/// Placement method that knows the true rates of all flows and therefore the load of every core.
#[derive(Debug, Default)]
pub struct PlacementOracle {
    core_rate_units: Vec<u64>,
    flow_rate_units: Vec<u64>,
}

impl PlacementOracle {
    pub fn new(cores: usize) -> Self {
        Self { core_rate_units: vec![0; cores], flow_rate_units: Vec::new() }
    }

    /// Assigns a new flow to the least loaded of the cores that it can reach, and returns that core. Returns `None` if
    /// the flow's rate is unknown.
    pub fn place_flow(
        &mut self,
        flow: u32,
        first_packet: &FlowFirstPacket,
        reachable_cores: impl Iterator<Item = usize>,
    ) -> Option<usize> {
        let rate_units = (first_packet.flow_rate_pps? * RATE_UNITS_PER_PACKET) as u64;
        let core = reachable_cores.min_by_key(|core| self.core_rate_units[*core])?;
        if self.flow_rate_units.len() <= flow as usize {
            self.flow_rate_units.resize(flow as usize + 1, 0);
        }
        self.flow_rate_units[flow as usize] = rate_units;
        self.core_rate_units[core] += rate_units;
        Some(core)
    }

    pub fn remove_flow(&mut self, flow: u32, core: usize) {
        self.core_rate_units[core] -= self.flow_rate_units[flow as usize];
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use coreward_model::FourTuple;

    use super::*;

    #[test]
    fn oracle_chooses_the_core_with_the_least_sum_of_current_rates() {
        let tuple = FourTuple::ipv4((Ipv4Addr::LOCALHOST, 1), (Ipv4Addr::LOCALHOST, 2));
        let build_first_packet = |rate| FlowFirstPacket { tuple, flow_rate_pps: Some(rate) };
        let mut oracle = PlacementOracle::new(3);
        assert_eq!(oracle.place_flow(0, &build_first_packet(10.0), [0, 2].into_iter()), Some(0));
        assert_eq!(oracle.place_flow(1, &build_first_packet(3.0), [0, 2].into_iter()), Some(2));
        assert_eq!(oracle.place_flow(2, &build_first_packet(3.0), [0, 2].into_iter()), Some(2));
        oracle.remove_flow(0, 0);
        assert_eq!(oracle.place_flow(3, &build_first_packet(1.0), [0, 2].into_iter()), Some(0));
        assert_eq!(oracle.place_flow(4, &FlowFirstPacket { tuple, flow_rate_pps: None }, [0].into_iter()), None);
    }
}
