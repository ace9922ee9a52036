//! Schedule of faults, which is reproducible from a seed.
//!
//! A run is a sequence of rounds. In each round a few faults begin and end at random times. Then the fleet must
//! converge before the next round begins, and the time until then is measured.

use std::time::Duration;

use coreward_model::rss::{seeded_rng, uniform_below};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::etcd::ETCD_MEMBER_COUNT;
use super::fault::{Fault, FaultKind};
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
    pub fault: Fault,
}

/// Number of components of each kind in the fleet. Faults can affect each component.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComponentCounts {
    /// Number of controllers, which store their records in an etcd cluster if there are two or more.
    pub controllers: u16,
    pub load_balancers: u16,
    /// Number of rack controllers, or 0 if agents connect to controllers directly.
    pub racks: u16,
    pub servers: u16,
}

/// Generator of random rounds of faults. Every kind of fault occurs once before any kind is repeated.
#[derive(Debug)]
pub struct FaultSchedule {
    rng: Xoshiro256PlusPlus,
    all_kinds: Vec<FaultKind>,
    unused_kinds: Vec<FaultKind>,
    component_counts: ComponentCounts,
}

impl FaultSchedule {
    /// Creates a schedule of faults of these `kinds`. At least one of the kinds must be possible with the fleet's
    /// components.
    pub fn new(seed: u64, kinds: &[FaultKind], component_counts: ComponentCounts) -> Self {
        Self {
            rng: seeded_rng(seed, RNG_STREAM_FAULTS),
            all_kinds: kinds.to_vec(),
            unused_kinds: Vec::new(),
            component_counts,
        }
    }

    /// Returns the faults of the next round, which are at least one, and none of which conflict with each other.
    pub fn next_round(&mut self) -> Vec<PlannedFault> {
        let fault_count = 1 + self.random_below(MAX_FAULTS_PER_ROUND);
        let mut planned_faults: Vec<PlannedFault> = Vec::new();
        for _ in 0..fault_count {
            let kind = self.next_kind();
            let fault = self.random_fault(kind);
            if planned_faults.iter().any(|other| other.fault.conflicts_with(&fault)) {
                self.unused_kinds.push(kind);
                continue;
            }
            let start_offset = Duration::from_millis(self.random_below(MAX_FAULT_START_OFFSET_MS).into());
            let duration_range_ms = fault.duration_range_ms();
            let fault_duration = Duration::from_millis(
                (duration_range_ms.start + self.random_below(duration_range_ms.end - duration_range_ms.start)).into(),
            );
            planned_faults.push(PlannedFault { start_offset, end_offset: start_offset + fault_duration, fault });
        }
        planned_faults
    }

    fn next_kind(&mut self) -> FaultKind {
        if self.unused_kinds.is_empty() {
            self.unused_kinds.clone_from(&self.all_kinds);
        }
        let kind_index = self.random_below(self.unused_kinds.len() as u32);
        self.unused_kinds.swap_remove(kind_index as usize)
    }

    fn random_fault(&mut self, kind: FaultKind) -> Fault {
        match kind {
            FaultKind::Kill => Fault::KillDaemon(self.random_daemon()),
            FaultKind::Stop => Fault::StopDaemon(self.random_daemon()),
            FaultKind::Upgrade => Fault::UpgradeDaemon(self.random_daemon()),
            FaultKind::Partition => {
                let (sender_port, receiver_port) = self.random_switch_port_pair();
                Fault::Partition { sender_port, receiver_port, is_bidirectional: self.random_below(2) == 0 }
            }
            FaultKind::Link => Fault::LinkDown(self.random_switch_port()),
            FaultKind::Disk => Fault::DiskFull { fails_every_write: self.random_below(2) == 0 },
            FaultKind::Etcd => Fault::EtcdFailure {
                hits_leader: self.random_below(2) == 0,
                member_number: 1 + self.random_below(ETCD_MEMBER_COUNT.into()) as u16,
                is_stopped: self.random_below(2) == 0,
            },
            FaultKind::Clock => {
                Fault::ClockOffset { daemon: self.random_daemon(), offset_s: self.random_clock_offset_s() }
            }
            FaultKind::ByzantineAgent => Fault::ByzantineAgent(self.random_server()),
        }
    }

    fn random_below(&mut self, upper_bound: u32) -> u32 {
        uniform_below(&mut self.rng, upper_bound)
    }

    fn random_server(&mut self) -> u16 {
        1 + self.random_below(self.component_counts.servers.into()) as u16
    }

    fn random_load_balancer(&mut self) -> u16 {
        1 + self.random_below(self.component_counts.load_balancers.into()) as u16
    }

    fn random_rack(&mut self) -> u16 {
        1 + self.random_below(self.component_counts.racks.into()) as u16
    }

    fn daemon_role_count(&self) -> u32 {
        if self.component_counts.racks > 0 { 4 } else { 3 }
    }

    /// Returns the name of a random daemon. Each role (controller, load balancer ...) has the same probability.
    fn random_daemon(&mut self) -> String {
        match self.random_below(self.daemon_role_count()) {
            0 => controller_name(1 + self.random_below(self.component_counts.controllers.into()) as u16),
            1 => load_balancer_name(self.random_load_balancer()),
            3 => rack_controller_name(self.random_rack()),
            _ => agent_name(self.random_server()),
        }
    }

    fn random_switch_port(&mut self) -> String {
        match self.random_below(self.daemon_role_count()) {
            0 => FIRST_CONTROLLER_NAME.to_owned(),
            1 => load_balancer_name(self.random_load_balancer()),
            3 => rack_controller_name(self.random_rack()),
            _ => format!("s{}", self.random_server()),
        }
    }

    /// Returns a sender's and a different receiver's switch port, between which a fault will drop packets.
    fn random_switch_port_pair(&mut self) -> (String, String) {
        let sender_port = self.random_switch_port();
        loop {
            let receiver_port = self.random_switch_port();
            if receiver_port != sender_port {
                return (sender_port, receiver_port);
            }
        }
    }

    /// Returns a random clock offset (s), positive or negative, of 1 to 59 seconds, minutes, hours or days.
    fn random_clock_offset_s(&mut self) -> i64 {
        let unit_seconds = [1, 60, 3_600, 86_400][self.random_below(4) as usize];
        let offset_s = i64::from(1 + self.random_below(59)) * unit_seconds;
        if self.random_below(2) == 0 { offset_s } else { -offset_s }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const COMPONENT_COUNTS: ComponentCounts =
        ComponentCounts { controllers: 1, load_balancers: 2, racks: 2, servers: 4 };

    #[test]
    fn equal_seeds_give_equal_schedules_with_every_kind_of_fault() {
        let rounds_of_seed = |seed| {
            let mut schedule = FaultSchedule::new(seed, &FaultKind::ALL, COMPONENT_COUNTS);
            (0..40).map(|_| schedule.next_round()).collect::<Vec<_>>()
        };
        assert_eq!(rounds_of_seed(1), rounds_of_seed(1));
        assert_ne!(rounds_of_seed(1), rounds_of_seed(2));
        let occurring_kinds: BTreeSet<&str> =
            rounds_of_seed(3).iter().flatten().map(|planned_fault| planned_fault.fault.kind().name()).collect();
        assert_eq!(occurring_kinds.len(), FaultKind::ALL.len(), "{occurring_kinds:?}");
    }

    #[test]
    fn no_daemon_has_two_overlapping_faults() {
        let mut schedule = FaultSchedule::new(5, &FaultKind::ALL, COMPONENT_COUNTS);
        for round in (0..500).map(|_| schedule.next_round()) {
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
