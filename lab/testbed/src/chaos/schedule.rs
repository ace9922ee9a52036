//! Schedule of faults, which is reproducible from a seed.
//!
//! A run is a sequence of rounds. In each round a few faults begin and end at random times. Then the fleet must
//! converge before the next round begins, and the time until then is measured.

use std::time::Duration;

use coreward_model::rss::{seeded_rng, uniform_below};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::etcd::ETCD_MEMBER_COUNT;
use super::fault::{ChaosFault, ChaosFaultKind};
use crate::addresses::{load_balancer_name, rack_controller_name};
use crate::fleet::{FIRST_CONTROLLER_NAME, agent_name, controller_name};

/// Number of the [`seeded_rng`] stream from which the faults are drawn.
const RNG_STREAM_FAULTS: u64 = 0x6368_6101;
const MAX_FAULTS_PER_ROUND: u32 = 3;
/// Maximum time from the start of a round to the start of a fault (ms).
const MAX_FAULT_START_OFFSET_MS: u32 = 2_000;

/// Fault with its planned start and end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFault {
    /// Time from the start of the round to the start of the fault.
    pub start_offset: Duration,
    /// Time from the start of the round to the end of the fault.
    pub end_offset: Duration,
    pub fault: ChaosFault,
}

/// Number of components of each kind in the fleet that the faults may affect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetComponentCounts {
    /// Number of controllers, which store their records in an etcd cluster if there are two or more.
    pub controller_count: u16,
    pub load_balancer_count: u16,
    /// Number of rack controllers, or 0 if agents connect to controllers directly.
    pub rack_controller_count: u16,
    pub server_count: u16,
}

/// Generator of random rounds of faults. Every kind of fault occurs once before any kind occurs again.
#[derive(Debug)]
pub struct FaultRoundGenerator {
    rng: Xoshiro256PlusPlus,
    all_kinds: Vec<ChaosFaultKind>,
    unused_kinds: Vec<ChaosFaultKind>,
    component_counts: FleetComponentCounts,
}

impl FaultRoundGenerator {
    /// Creates a generator of faults of these `kinds`. At least one kind must be possible with the fleet's components.
    pub fn new(seed: u64, kinds: &[ChaosFaultKind], component_counts: FleetComponentCounts) -> Self {
        Self {
            rng: seeded_rng(seed, RNG_STREAM_FAULTS),
            all_kinds: kinds.to_vec(),
            unused_kinds: Vec::new(),
            component_counts,
        }
    }

    /// Returns the faults of the next round. There is at least one, and no two conflict with each other.
    pub fn draw_next_round(&mut self) -> Vec<PlannedFault> {
        let fault_count = 1 + self.random_number_below(MAX_FAULTS_PER_ROUND);
        let mut planned_faults: Vec<PlannedFault> = Vec::new();
        for _ in 0..fault_count {
            let kind = self.draw_next_kind();
            let fault = self.random_fault(kind);
            if planned_faults.iter().any(|other| other.fault.conflicts_with(&fault)) {
                self.unused_kinds.push(kind);
                continue;
            }
            let start_offset = Duration::from_millis(self.random_number_below(MAX_FAULT_START_OFFSET_MS).into());
            let duration_range_ms = fault.duration_range_ms();
            let fault_duration = Duration::from_millis(
                (duration_range_ms.start + self.random_number_below(duration_range_ms.end - duration_range_ms.start))
                    .into(),
            );
            planned_faults.push(PlannedFault { start_offset, end_offset: start_offset + fault_duration, fault });
        }
        planned_faults
    }

    fn draw_next_kind(&mut self) -> ChaosFaultKind {
        if self.unused_kinds.is_empty() {
            self.unused_kinds.clone_from(&self.all_kinds);
        }
        let kind_index = self.random_number_below(self.unused_kinds.len() as u32);
        self.unused_kinds.swap_remove(kind_index as usize)
    }

    fn random_fault(&mut self, kind: ChaosFaultKind) -> ChaosFault {
        match kind {
            ChaosFaultKind::Kill => ChaosFault::KillDaemon(self.random_daemon_name()),
            ChaosFaultKind::Stop => ChaosFault::StopDaemon(self.random_daemon_name()),
            ChaosFaultKind::Upgrade => ChaosFault::UpgradeDaemon(self.random_daemon_name()),
            ChaosFaultKind::Partition => {
                let (sender_port, receiver_port) = self.random_switch_port_pair();
                ChaosFault::Partition { sender_port, receiver_port, is_bidirectional: self.random_number_below(2) == 0 }
            }
            ChaosFaultKind::Link => ChaosFault::LinkDown(self.random_switch_port_name()),
            ChaosFaultKind::Disk => ChaosFault::DiskFull { fails_every_write: self.random_number_below(2) == 0 },
            ChaosFaultKind::Etcd => ChaosFault::EtcdFailure {
                hits_leader: self.random_number_below(2) == 0,
                member_number: 1 + self.random_number_below(ETCD_MEMBER_COUNT.into()) as u16,
                is_stopped: self.random_number_below(2) == 0,
            },
            ChaosFaultKind::Clock => {
                ChaosFault::ClockOffset { daemon: self.random_daemon_name(), offset_s: self.random_clock_offset_s() }
            }
            ChaosFaultKind::ByzantineAgent => ChaosFault::ByzantineAgent(self.random_server_number()),
        }
    }

    fn random_number_below(&mut self, upper_bound: u32) -> u32 {
        uniform_below(&mut self.rng, upper_bound)
    }

    fn random_server_number(&mut self) -> u16 {
        1 + self.random_number_below(self.component_counts.server_count.into()) as u16
    }

    fn random_load_balancer_number(&mut self) -> u16 {
        1 + self.random_number_below(self.component_counts.load_balancer_count.into()) as u16
    }

    fn random_rack_number(&mut self) -> u16 {
        1 + self.random_number_below(self.component_counts.rack_controller_count.into()) as u16
    }

    fn daemon_role_count(&self) -> u32 {
        if self.component_counts.rack_controller_count > 0 { 4 } else { 3 }
    }

    /// Returns the name of a random daemon. Each role (controller, load balancer ...) has the same probability.
    fn random_daemon_name(&mut self) -> String {
        match self.random_number_below(self.daemon_role_count()) {
            0 => controller_name(1 + self.random_number_below(self.component_counts.controller_count.into()) as u16),
            1 => load_balancer_name(self.random_load_balancer_number()),
            3 => rack_controller_name(self.random_rack_number()),
            _ => agent_name(self.random_server_number()),
        }
    }

    fn random_switch_port_name(&mut self) -> String {
        match self.random_number_below(self.daemon_role_count()) {
            0 => FIRST_CONTROLLER_NAME.to_owned(),
            1 => load_balancer_name(self.random_load_balancer_number()),
            3 => rack_controller_name(self.random_rack_number()),
            _ => format!("s{}", self.random_server_number()),
        }
    }

    /// Returns the switch ports of a random sender and a different random receiver, between which a fault will drop
    /// packets.
    fn random_switch_port_pair(&mut self) -> (String, String) {
        let sender_port = self.random_switch_port_name();
        loop {
            let receiver_port = self.random_switch_port_name();
            if receiver_port != sender_port {
                return (sender_port, receiver_port);
            }
        }
    }

    /// Returns a random clock offset (s), positive or negative, of 1 to 59 seconds, minutes, hours or days.
    fn random_clock_offset_s(&mut self) -> i64 {
        let unit_seconds = [1, 60, 3_600, 86_400][self.random_number_below(4) as usize];
        let offset_s = i64::from(1 + self.random_number_below(59)) * unit_seconds;
        if self.random_number_below(2) == 0 { offset_s } else { -offset_s }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const TESTED_COMPONENT_COUNTS: FleetComponentCounts =
        FleetComponentCounts { controller_count: 1, load_balancer_count: 2, rack_controller_count: 2, server_count: 4 };

    #[test]
    fn equal_seeds_give_equal_schedules_with_every_kind_of_fault() {
        let rounds_of_seed = |seed| {
            let mut schedule = FaultRoundGenerator::new(seed, &ChaosFaultKind::ALL, TESTED_COMPONENT_COUNTS);
            (0..40).map(|_| schedule.draw_next_round()).collect::<Vec<_>>()
        };
        assert_eq!(rounds_of_seed(1), rounds_of_seed(1));
        assert_ne!(rounds_of_seed(1), rounds_of_seed(2));
        let occurring_kinds: BTreeSet<&str> =
            rounds_of_seed(3).iter().flatten().map(|planned_fault| planned_fault.fault.kind().name()).collect();
        assert_eq!(occurring_kinds.len(), ChaosFaultKind::ALL.len(), "{occurring_kinds:?}");
    }

    #[test]
    fn no_daemon_has_two_overlapping_faults() {
        let mut schedule = FaultRoundGenerator::new(5, &ChaosFaultKind::ALL, TESTED_COMPONENT_COUNTS);
        for round in (0..500).map(|_| schedule.draw_next_round()) {
            assert!(!round.is_empty());
            for (position, planned_fault) in round.iter().enumerate() {
                assert!(planned_fault.start_offset <= planned_fault.end_offset);
                assert!(
                    round[..position].iter().all(|other| !other.fault.conflicts_with(&planned_fault.fault)),
                    "{round:?}"
                );
            }
        }
    }
}
