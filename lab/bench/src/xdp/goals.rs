//! Goals of `coreward-lab bench xdp`, as multiples of a baseline, so that they hold on any machine.

use coreward_model::consistency::Consistency;
use coreward_model::forwarding::Forwarding;
use coreward_model::placement::PlacementRule;
use coreward_model::statistics::median;

use super::Measured;
use super::established::ConnectionCountResult;
use super::interleaved::{difference, median_of};
use super::runner::PACKET_COUNT;
use super::workload::{Case, NewConnection};
use crate::report::Goal;

/// Cost of parsing a packet and swapping its MACs, above the empty program, on the goals' machine (AMD EPYC), in ns.
const REFERENCE_FLOOR: f64 = 4.5;
/// Maximum cost of an IPv6 packet, as a multiple of an IPv4 packet's cost.
const IPV6_FACTOR: f64 = 1.3;

/// Maximum cost of a case above the empty program.
#[derive(Debug, Clone, Copy, PartialEq)]
enum CostLimit {
    /// Cost on the goals' machine (ns), which is scaled to this machine.
    Reference(f64),
    /// Cost on the goals' machine (ns), which is scaled to this machine, plus the cost of one cache miss.
    MissAndReference(f64),
    /// Cost of an IPv4 case, multiplied by the factor for IPv6.
    Ipv6Of(Case),
}

fn limit(case: Case) -> Option<CostLimit> {
    let reference = |ns| Some(CostLimit::Reference(ns));
    match case {
        Case::Established(Consistency::Stateless, _) => reference(20.0),
        Case::Established(Consistency::Stateful, 16384) => reference(32.0),
        Case::Established(Consistency::Stateful, PACKET_COUNT) => Some(CostLimit::MissAndReference(20.0)),
        Case::Established(Consistency::HashTable, 16384) => reference(90.0),
        Case::Established(Consistency::HashTable, 131072) => reference(190.0),
        Case::NewConnection(first) => new_connection_limit(first).map(CostLimit::Reference),
        Case::Encapsulated(Forwarding::Gue) => reference(35.0),
        Case::EstablishedIpv6(connections) => {
            Some(CostLimit::Ipv6Of(Case::Established(Consistency::Stateless, connections)))
        }
        Case::NewConnectionIpv6 => Some(CostLimit::Ipv6Of(Case::NewConnection(NewConnection::STATELESS))),
        _ => None,
    }
}

/// Returns the maximum cost of a new connection's first packet on the goals' machine (ns), if it has a goal.
fn new_connection_limit(first: NewConnection) -> Option<f64> {
    match (first.consistency, first.rule, first.rss_group_count) {
        (Consistency::Stateful, ..) => Some(160.0),
        (Consistency::Stateless, PlacementRule::Table, 1) => Some(45.0),
        (Consistency::Stateless, PlacementRule::LeastAssigned, 1) => Some(60.0),
        (Consistency::Stateless, PlacementRule::LeastAssigned, _) => Some(105.0),
        _ => None,
    }
}

/// Costs on this machine, from which the goals of all cases are calculated.
pub struct Goals<'a> {
    /// Cost of parsing a packet and swapping its MAC addresses, above the empty program (ns).
    pub floor: f64,
    /// Cost of one cache miss for which the packet must wait (ns), if it was measured.
    cache_miss_ns: Option<f64>,
    measured: Vec<&'a Measured>,
}

impl<'a> Goals<'a> {
    /// Takes the baseline and the cost of a cache miss from the measurements. Panics when there are none.
    pub fn new(established: &'a [ConnectionCountResult], alone: &'a [Measured]) -> Self {
        let of_modes = established.iter().flat_map(|of| [&of.stateless, &of.stateful, &of.hash_table]);
        let measured: Vec<&Measured> = of_modes.chain(alone).collect();
        let floors: Vec<f64> = measured.iter().map(|of| of.floor).collect();
        let largest = established.iter().find(|of| of.connections == PACKET_COUNT);
        Self {
            floor: median(&floors).expect("at least one case"),
            cache_miss_ns: largest.map(|of| median_of(&difference(&of.after_line, &of.stateless.above_empty))),
            measured,
        }
    }

    /// Returns the goal of a case; `None` if it has no goal, or its goal depends on a case that was not measured.
    pub fn goal_of(&self, case: Case) -> Option<Goal> {
        let of_reference = |ns: f64| ns * self.floor / REFERENCE_FLOOR;
        let ns = match limit(case)? {
            CostLimit::Reference(ns) => of_reference(ns),
            CostLimit::MissAndReference(ns) => self.cache_miss_ns? + of_reference(ns),
            CostLimit::Ipv6Of(ipv4) => self.measured.iter().find(|of| of.case == ipv4)?.fastest * IPV6_FACTOR,
        };
        Some(Goal::AtMost(ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(case: Case, floor: f64, fastest: f64) -> Measured {
        Measured { case, empty: 0.0, above_empty: vec![fastest], fastest, floor }
    }

    #[test]
    fn goals_scale_with_the_floor_and_the_miss_does_not() {
        let at = |consistency, connections| measured(Case::Established(consistency, connections), 9.0, 30.0);
        let established = [ConnectionCountResult {
            connections: PACKET_COUNT,
            stateless: at(Consistency::Stateless, PACKET_COUNT),
            stateful: at(Consistency::Stateful, PACKET_COUNT),
            hash_table: at(Consistency::HashTable, PACKET_COUNT),
            with_line: vec![40.0],
            after_line: vec![130.0],
        }];
        let goals = Goals::new(&established, &[]);
        assert_eq!(goals.goal_of(established[0].stateless.case), Some(Goal::AtMost(40.0)));
        assert_eq!(goals.goal_of(established[0].stateful.case), Some(Goal::AtMost(140.0)));
        assert_eq!(goals.goal_of(established[0].hash_table.case), None);
        assert_eq!(goals.goal_of(Case::EstablishedIpv6(PACKET_COUNT)), Some(Goal::AtMost(39.0)));
        assert_eq!(goals.goal_of(Case::NewConnectionIpv6), None);
    }
}
