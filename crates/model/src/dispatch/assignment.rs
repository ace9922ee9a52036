//! Assignment of cores to two services, and its changes (RingLeader, NSDI'23, Sect. 4.4).

use std::fmt;
use std::str::FromStr;

use super::LoadHint;

/// Division of cores between services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Assignment {
    /// `share`: all services run on all cores
    CompleteShare,
    /// `dedicated`: each core runs one service; cores change hands by load hints
    Dedicated,
    /// `hybrid`: each service has cores of its own, and both share the others; load hints open and close further ones
    Hybrid,
}

const NAMES: [(&str, Assignment); 3] =
    [("share", Assignment::CompleteShare), ("dedicated", Assignment::Dedicated), ("hybrid", Assignment::Hybrid)];

/// A name that no assignment has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("assignment {0:?}: expected share, dedicated or hybrid")]
pub struct UnknownAssignment(pub String);

impl FromStr for Assignment {
    type Err = UnknownAssignment;

    fn from_str(name: &str) -> Result<Self, UnknownAssignment> {
        let found = NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, assignment)| *assignment).ok_or_else(|| UnknownAssignment(name.to_owned()))
    }
}

impl fmt::Display for Assignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, known)| known == self).map_or("", |(name, _)| *name);
        f.write_str(name)
    }
}

/// A service starts or stops running on a core (EnableService, DisableService).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The service, 0 or 1.
    pub service: u8,
    /// The core.
    pub core: u16,
    /// Whether it runs there from now on.
    pub runs: bool,
}

/// The core allocator of the operating system, for two services of which 0 has priority.
#[derive(Debug, Clone)]
pub struct CoreAllocation {
    assignment: Assignment,
    /// Cores that each service keeps for itself.
    reserved: u16,
    /// Cores that both always share.
    shared: u16,
    /// By core: whether service 0 and service 1 run there.
    runs: Vec<[bool; 2]>,
}

impl CoreAllocation {
    /// Gives both services equally many cores of their own; under `hybrid` a quarter of all is shared permanently.
    /// `reserved`: cores that each keeps whatever the other needs.
    pub fn new(assignment: Assignment, cores: u16, reserved: u16) -> Self {
        let shared = match assignment {
            Assignment::CompleteShare => cores,
            Assignment::Dedicated => 0,
            Assignment::Hybrid => cores.div_ceil(4),
        };
        let own = (cores - shared) / 2;
        let runs = |core| [core < own + shared, core >= own];
        Self { assignment, reserved, shared, runs: (0..cores).map(runs).collect() }
    }

    /// Whether `service` runs on `core`.
    pub fn runs(&self, service: u8, core: u16) -> bool {
        self.runs[usize::from(core)][usize::from(service)]
    }

    /// Returns the changes after a hint for `service`. `other_waits`: requests of the other service wait at the NIC.
    /// `load`: work of a core; the core with the least gives way, the first of equals.
    pub fn hint(&mut self, service: u8, hint: LoadHint, other_waits: bool, load: impl Fn(u16) -> u32) -> Vec<Change> {
        let other = 1 - service;
        // Result for each kind of core, [this service, the other].
        let (from, to) = match (self.assignment, hint) {
            (Assignment::CompleteShare, _) => return Vec::new(),
            // Service 1 takes nothing that service 0 needs.
            (_, LoadHint::ScaleUp) if service > other && other_waits => return Vec::new(),
            (Assignment::Dedicated, LoadHint::ScaleUp) => ([false, true], [true, false]),
            (Assignment::Dedicated, LoadHint::ScaleDown) => ([true, false], [false, true]),
            (Assignment::Hybrid, LoadHint::ScaleUp) => ([false, true], [true, true]),
            (Assignment::Hybrid, LoadHint::ScaleDown) => ([true, true], [false, true]),
        };
        let roles = |core: u16| [self.runs(service, core), self.runs(other, core)];
        let candidates: Vec<u16> = (0..self.runs.len() as u16).filter(|core| roles(*core) == from).collect();
        let kept = if from == [true, true] { self.shared } else { self.reserved };
        if candidates.len() <= usize::from(kept) {
            return Vec::new();
        }
        let Some(core) = candidates.into_iter().min_by_key(|core| load(*core)) else { return Vec::new() };
        let mut changes = Vec::new();
        for (service, (before, after)) in [service, other].into_iter().zip(from.into_iter().zip(to)) {
            if before != after {
                self.runs[usize::from(core)][usize::from(service)] = after;
                changes.push(Change { service, core, runs: after });
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dedicated_cores_change_hands() {
        let mut allocation = CoreAllocation::new(Assignment::Dedicated, 4, 1);
        let load = |core: u16| u32::from(10 - core);
        let changes = allocation.hint(0, LoadHint::ScaleUp, false, load);
        let expected = [Change { service: 0, core: 3, runs: true }, Change { service: 1, core: 3, runs: false }];
        assert_eq!(changes, expected, "the least loaded of the other's");
        assert_eq!(allocation.hint(0, LoadHint::ScaleUp, false, load), [], "the last one is reserved");
        assert_eq!(allocation.hint(1, LoadHint::ScaleUp, true, load), [], "service 0 needs what it has");
        assert_eq!(allocation.hint(0, LoadHint::ScaleDown, false, load).len(), 2);
        assert!(allocation.runs(1, 3) && allocation.runs(1, 2) && !allocation.runs(1, 0));
    }

    #[test]
    fn hybrid_opens_cores_to_both_and_closes_them_again() {
        let mut allocation = CoreAllocation::new(Assignment::Hybrid, 8, 2);
        assert!(allocation.runs(0, 4) && !allocation.runs(0, 5) && allocation.runs(1, 3) && !allocation.runs(1, 2));
        assert_eq!(allocation.hint(0, LoadHint::ScaleDown, false, |_| 0), [], "the shared ones stay shared");
        let opened = [Change { service: 0, core: 5, runs: true }];
        assert_eq!(allocation.hint(0, LoadHint::ScaleUp, false, |_| 0), opened);
        assert!(allocation.runs(1, 5));
        assert_eq!(allocation.hint(0, LoadHint::ScaleUp, false, |_| 0), [], "6 and 7 are reserved for service 1");
        let closed = [Change { service: 1, core: 3, runs: false }];
        assert_eq!(allocation.hint(1, LoadHint::ScaleDown, false, |_| 0), closed);
    }

    #[test]
    fn shared_cores_do_not_change() {
        let mut allocation = CoreAllocation::new(Assignment::CompleteShare, 2, 1);
        assert!(allocation.runs(0, 1) && allocation.runs(1, 0));
        assert_eq!(allocation.hint(0, LoadHint::ScaleUp, false, |_| 0), []);
    }

    #[test]
    fn names_round_trip() {
        for (name, _) in NAMES {
            assert_eq!(name.parse::<Assignment>().unwrap().to_string(), name);
        }
        let error = "shared".parse::<Assignment>().unwrap_err().to_string();
        assert_eq!(error, "assignment \"shared\": expected share, dedicated or hybrid");
    }
}
