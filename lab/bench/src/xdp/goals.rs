//! Goals of `coreward-lab bench xdp`. They are multiples of a baseline, so that they apply to any machine.

use coreward_model::consistency::ConsistencyMode;
use coreward_model::forwarding::ForwardingMode;
use coreward_model::placement::PlacementRule;
use coreward_model::statistics::median;

use super::PacketCaseMeasurement;
use super::established::ConnectionCountCosts;
use super::interleaved::{differences_by_round, median_of_rounds};
use super::runner::PACKET_COUNT;
use super::workload::{NewConnectionCase, PacketCase};
use crate::report::MeasurementGoal;

/// Cost (ns) of parsing a packet and swapping its MACs, above the empty program, on the machine of the goals (an AMD
/// EPYC).
const REFERENCE_PARSE_AND_SWAP_NS: f64 = 4.5;
/// Maximum cost of an IPv6 packet, as a multiple of an IPv4 packet's cost.
const MAX_IPV6_COST_FACTOR: f64 = 1.3;

/// Maximum cost of a case's packets, minus that of the empty program.
#[derive(Debug, Clone, Copy, PartialEq)]
enum PacketCostLimit {
    /// Cost (ns) on the machine for which the goals were set, to be scaled to this machine.
    ReferenceNs(f64),
    /// Cost like `ReferenceNs`, plus the cost of one cache miss, which is added after scaling.
    CacheMissPlusReferenceNs(f64),
    /// Cost of this IPv4 case times [`MAX_IPV6_COST_FACTOR`].
    RelativeToIpv4(PacketCase),
}

fn cost_limit(case: PacketCase) -> Option<PacketCostLimit> {
    let reference_limit = |ns| Some(PacketCostLimit::ReferenceNs(ns));
    match case {
        PacketCase::EstablishedConnections(ConsistencyMode::Stateless, _) => reference_limit(20.0),
        PacketCase::EstablishedConnections(ConsistencyMode::Stateful, 16384) => reference_limit(32.0),
        PacketCase::EstablishedConnections(ConsistencyMode::Stateful, PACKET_COUNT) => {
            Some(PacketCostLimit::CacheMissPlusReferenceNs(20.0))
        }
        PacketCase::EstablishedConnections(ConsistencyMode::HashTable, 16384) => reference_limit(90.0),
        PacketCase::EstablishedConnections(ConsistencyMode::HashTable, 131072) => reference_limit(190.0),
        PacketCase::NewConnection(new_connection) => {
            new_connection_cost_limit_ns(new_connection).map(PacketCostLimit::ReferenceNs)
        }
        PacketCase::Encapsulated(ForwardingMode::Gue) => reference_limit(35.0),
        PacketCase::EstablishedIpv6Connections(connections) => Some(PacketCostLimit::RelativeToIpv4(
            PacketCase::EstablishedConnections(ConsistencyMode::Stateless, connections),
        )),
        PacketCase::NewConnectionIpv6 => {
            Some(PacketCostLimit::RelativeToIpv4(PacketCase::NewConnection(NewConnectionCase::STATELESS)))
        }
        _ => None,
    }
}

/// Returns the maximum cost of a new connection's first packet on the goals' machine (ns), or `None` if it has no goal.
fn new_connection_cost_limit_ns(new_connection: NewConnectionCase) -> Option<f64> {
    match (new_connection.consistency, new_connection.placement_rule, new_connection.rss_group_count) {
        (ConsistencyMode::Stateful, ..) => Some(160.0),
        (ConsistencyMode::Stateless, PlacementRule::Table, 1) => Some(45.0),
        (ConsistencyMode::Stateless, PlacementRule::LeastAssigned, 1) => Some(60.0),
        (ConsistencyMode::Stateless, PlacementRule::LeastAssigned, _) => Some(105.0),
        _ => None,
    }
}

/// Costs on this machine, from which the goals of all cases are calculated.
pub struct PacketCostGoals<'a> {
    /// Cost of parsing a packet and swapping its MAC addresses, above the empty program (ns).
    pub parse_and_swap_ns: f64,
    /// Cost of one cache miss for which the packet must wait (ns), if it was measured.
    cache_miss_ns: Option<f64>,
    measurements: Vec<&'a PacketCaseMeasurement>,
}

impl<'a> PacketCostGoals<'a> {
    /// Returns the goals for the costs in the measurements. Panics when there are no measurements.
    pub fn new(established_costs: &'a [ConnectionCountCosts], separate_cases: &'a [PacketCaseMeasurement]) -> Self {
        let established_measurements = established_costs
            .iter()
            .flat_map(|count_costs| [&count_costs.stateless, &count_costs.stateful, &count_costs.hash_table]);
        let measurements: Vec<&PacketCaseMeasurement> = established_measurements.chain(separate_cases).collect();
        let parse_and_swap_values_ns: Vec<f64> =
            measurements.iter().map(|case_measurement| case_measurement.parse_and_swap_ns).collect();
        let largest_count_costs =
            established_costs.iter().find(|count_costs| count_costs.connection_count == PACKET_COUNT);
        Self {
            parse_and_swap_ns: median(&parse_and_swap_values_ns).expect("at least one case"),
            cache_miss_ns: largest_count_costs.map(|count_costs| {
                median_of_rounds(&differences_by_round(
                    &count_costs.ns_after_awaited_cache_line,
                    &count_costs.stateless.ns_above_empty_program,
                ))
            }),
            measurements,
        }
    }

    /// Returns a case's cost goal, or `None` if it has no goal or its goal depends on a case that was not measured.
    pub fn goal_for_case(&self, case: PacketCase) -> Option<MeasurementGoal> {
        let scale_from_reference = |ns: f64| ns * self.parse_and_swap_ns / REFERENCE_PARSE_AND_SWAP_NS;
        let limit_ns = match cost_limit(case)? {
            PacketCostLimit::ReferenceNs(ns) => scale_from_reference(ns),
            PacketCostLimit::CacheMissPlusReferenceNs(ns) => self.cache_miss_ns? + scale_from_reference(ns),
            PacketCostLimit::RelativeToIpv4(ipv4_case) => {
                self.measurements
                    .iter()
                    .find(|case_measurement| case_measurement.case == ipv4_case)?
                    .fastest_ns_above_empty_program
                    * MAX_IPV6_COST_FACTOR
            }
        };
        Some(MeasurementGoal::AtMost(limit_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build_case_measurement(case: PacketCase, baseline_ns: f64, fastest_ns: f64) -> PacketCaseMeasurement {
        PacketCaseMeasurement {
            case,
            empty_program_ns: 0.0,
            ns_above_empty_program: vec![fastest_ns],
            fastest_ns_above_empty_program: fastest_ns,
            parse_and_swap_ns: baseline_ns,
        }
    }

    #[test]
    fn goals_scale_with_parse_and_swap_cost_except_cache_misses() {
        let measurement_of_mode = |consistency, connection_count| {
            build_case_measurement(PacketCase::EstablishedConnections(consistency, connection_count), 9.0, 30.0)
        };
        let established_costs = [ConnectionCountCosts {
            connection_count: PACKET_COUNT,
            stateless: measurement_of_mode(ConsistencyMode::Stateless, PACKET_COUNT),
            stateful: measurement_of_mode(ConsistencyMode::Stateful, PACKET_COUNT),
            hash_table: measurement_of_mode(ConsistencyMode::HashTable, PACKET_COUNT),
            ns_with_parallel_cache_line: vec![40.0],
            ns_after_awaited_cache_line: vec![130.0],
        }];
        let cost_goals = PacketCostGoals::new(&established_costs, &[]);
        assert_eq!(cost_goals.goal_for_case(established_costs[0].stateless.case), Some(MeasurementGoal::AtMost(40.0)));
        assert_eq!(cost_goals.goal_for_case(established_costs[0].stateful.case), Some(MeasurementGoal::AtMost(140.0)));
        assert_eq!(cost_goals.goal_for_case(established_costs[0].hash_table.case), None);
        assert_eq!(
            cost_goals.goal_for_case(PacketCase::EstablishedIpv6Connections(PACKET_COUNT)),
            Some(MeasurementGoal::AtMost(39.0))
        );
        assert_eq!(cost_goals.goal_for_case(PacketCase::NewConnectionIpv6), None);
    }
}
