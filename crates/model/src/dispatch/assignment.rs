//! Division of a server's cores between two services, and its changes (RingLeader, NSDI'23, Sect. 4.4).

use std::fmt;
use std::str::FromStr;

use super::LoadHint;

/// Rule by which the cores of a server are divided between two services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoreAssignmentMode {
    /// All services run on all cores (`share`).
    CompleteShare,
    /// Each core runs one service, and load hints move cores between the services (`dedicated`).
    Dedicated,
    /// Each service has some cores of its own, and both share the other cores (`hybrid`). With load hints, the number
    /// of the priority service's own cores follows its constant load.
    Hybrid,
}

const CORE_ASSIGNMENT_MODE_NAMES: [(&str, CoreAssignmentMode); 3] = [
    ("share", CoreAssignmentMode::CompleteShare),
    ("dedicated", CoreAssignmentMode::Dedicated),
    ("hybrid", CoreAssignmentMode::Hybrid),
];

/// Error returned for the name of an unknown core assignment mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("assignment {0:?}: expected share, dedicated or hybrid")]
pub struct UnknownCoreAssignmentMode(pub String);

impl FromStr for CoreAssignmentMode {
    type Err = UnknownCoreAssignmentMode;

    fn from_str(name: &str) -> Result<Self, UnknownCoreAssignmentMode> {
        let matching_entry = CORE_ASSIGNMENT_MODE_NAMES.iter().find(|(known_name, _)| *known_name == name);
        matching_entry.map(|(_, assignment)| *assignment).ok_or_else(|| UnknownCoreAssignmentMode(name.to_owned()))
    }
}

impl fmt::Display for CoreAssignmentMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name =
            CORE_ASSIGNMENT_MODE_NAMES.iter().find(|(_, known_mode)| known_mode == self).map_or("", |(name, _)| *name);
        f.write_str(name)
    }
}

/// Start or stop of one service on one core (RingLeader's EnableService and DisableService).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreAssignmentChange {
    /// Number of the service, 0 or 1.
    pub service: u8,
    /// Number of the core, counted from 0.
    pub core: u16,
    /// Whether the service runs on the core after the change.
    pub is_assigned: bool,
}

/// Numbers of cores that the allocator always leaves to each of two services (`2` for both, or `2:0`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReservedCores(pub [u16; 2]);

/// Error returned for a text that is not a valid [`ReservedCores`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("reserved cores {0:?}: expected a number, or one for each service as in 2:0")]
pub struct InvalidReservedCores(pub String);

impl FromStr for ReservedCores {
    type Err = InvalidReservedCores;

    fn from_str(text: &str) -> Result<Self, InvalidReservedCores> {
        let (first, second) = text.split_once(':').unwrap_or((text, text));
        match (first.parse(), second.parse()) {
            (Ok(first), Ok(second)) => Ok(Self([first, second])),
            _ => Err(InvalidReservedCores(text.to_owned())),
        }
    }
}

impl fmt::Display for ReservedCores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self([first, second]) = self;
        if first == second { write!(f, "{first}") } else { write!(f, "{first}:{second}") }
    }
}

/// Core allocator of an operating system, for two services of which service 0 has priority.
#[derive(Debug, Clone)]
pub struct CoreAllocator {
    mode: CoreAssignmentMode,
    reserved_cores: ReservedCores,
    /// For each core, whether service 0 and service 1 run on it.
    is_service_assigned_by_core: Vec<[bool; 2]>,
}

const BOTH_SERVICES_ASSIGNMENT_STATE: [bool; 2] = [true, true];

/// Returns the state of a core on which only `service` runs.
fn exclusive_core_state(service: u8) -> [bool; 2] {
    [service == 0, service == 1]
}

impl CoreAllocator {
    /// Returns an allocator with the initial assignment of cores. In mode `dedicated`, both services have equally many
    /// cores. In mode `hybrid`, they have their reserved cores, service 0 first, and share the others.
    pub fn new(mode: CoreAssignmentMode, core_count: u16, reserved_cores: ReservedCores) -> Self {
        let [first_own_count, second_own_count] = match mode {
            CoreAssignmentMode::CompleteShare => [0, 0],
            CoreAssignmentMode::Dedicated => [core_count / 2, core_count - core_count / 2],
            CoreAssignmentMode::Hybrid => {
                let [first_own_count, second_own_count] = reserved_cores.0;
                [first_own_count.min(core_count), second_own_count.min(core_count.saturating_sub(first_own_count))]
            }
        };
        let services_on_core = |core| [core < core_count.saturating_sub(second_own_count), core >= first_own_count];
        Self { mode, reserved_cores, is_service_assigned_by_core: (0..core_count).map(services_on_core).collect() }
    }

    /// Returns the number of the server's cores.
    pub fn core_count(&self) -> u16 {
        self.is_service_assigned_by_core.len() as u16
    }

    /// Returns whether `service` runs on core `core`.
    pub fn is_service_assigned(&self, service: u8, core: u16) -> bool {
        self.is_service_assigned_by_core[usize::from(core)][usize::from(service)]
    }

    /// Applies a load hint for `service`, and returns the changes. `is_other_service_waiting` is true if requests of
    /// the other service wait at the NIC. `load` returns the number of requests that a service has at a core.
    pub fn apply_load_hint(
        &mut self,
        service: u8,
        hint: LoadHint,
        is_other_service_waiting: bool,
        load: impl Fn(u8, u16) -> u32,
    ) -> Vec<CoreAssignmentChange> {
        match self.mode {
            CoreAssignmentMode::CompleteShare => Vec::new(),
            // Service 1 takes no core while requests of service 0 wait.
            CoreAssignmentMode::Dedicated if hint == LoadHint::ScaleUp && service == 1 && is_other_service_waiting => {
                Vec::new()
            }
            CoreAssignmentMode::Dedicated => {
                let (source_service, target_service) =
                    if hint == LoadHint::ScaleUp { (1 - service, service) } else { (service, 1 - service) };
                let reserved_core_count = self.reserved_cores.0[usize::from(source_service)];
                self.reassign_one_core(
                    exclusive_core_state(source_service),
                    exclusive_core_state(target_service),
                    reserved_core_count,
                    |core| load(0, core) + load(1, core),
                )
            }
            CoreAssignmentMode::Hybrid => self.adjust_service_0_own_cores(load),
        }
    }

    /// Changes service 0's number of own cores by at most one, so that only bursts reach shared cores. Adds one if more
    /// shared cores serve service 0 than own cores are idle. If fewer do, makes one shared.
    fn adjust_service_0_own_cores(&mut self, load: impl Fn(u8, u16) -> u32) -> Vec<CoreAssignmentChange> {
        let idle_own_core_count =
            self.cores_in_state(exclusive_core_state(0)).filter(|core| load(0, *core) == 0).count();
        let overflow_core_count =
            self.cores_in_state(BOTH_SERVICES_ASSIGNMENT_STATE).filter(|core| load(0, *core) > 0).count();
        let [reserved_core_count, other_reserved_core_count] = self.reserved_cores.0;
        if overflow_core_count > idle_own_core_count {
            // Service 1 always keeps a core.
            self.reassign_one_core(
                BOTH_SERVICES_ASSIGNMENT_STATE,
                exclusive_core_state(0),
                (other_reserved_core_count == 0).into(),
                |core| load(1, core),
            )
        } else if idle_own_core_count > overflow_core_count {
            self.reassign_one_core(
                exclusive_core_state(0),
                BOTH_SERVICES_ASSIGNMENT_STATE,
                reserved_core_count,
                |core| load(0, core),
            )
        } else {
            Vec::new()
        }
    }

    fn cores_in_state(&self, services: [bool; 2]) -> impl Iterator<Item = u16> + '_ {
        (0..)
            .zip(&self.is_service_assigned_by_core)
            .filter(move |(_, running_services)| **running_services == services)
            .map(|(core, _)| core)
    }

    /// Changes the least loaded core in state `old_state` to state `new_state`, if more than `min_core_count` cores are
    /// in state `old_state`.
    fn reassign_one_core(
        &mut self,
        old_state: [bool; 2],
        new_state: [bool; 2],
        min_core_count: u16,
        load: impl Fn(u16) -> u32,
    ) -> Vec<CoreAssignmentChange> {
        if self.cores_in_state(old_state).count() <= usize::from(min_core_count) {
            return Vec::new();
        }
        let Some(core) = self.cores_in_state(old_state).min_by_key(|core| load(*core)) else { return Vec::new() };
        self.is_service_assigned_by_core[usize::from(core)] = new_state;
        let change_for_service = |service: u8| {
            let is_running = new_state[usize::from(service)];
            (is_running != old_state[usize::from(service)]).then_some(CoreAssignmentChange {
                service,
                core,
                is_assigned: is_running,
            })
        };
        [0, 1].into_iter().filter_map(change_for_service).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_up_hint_moves_a_dedicated_core_to_its_service() {
        let mut allocator = CoreAllocator::new(CoreAssignmentMode::Dedicated, 4, ReservedCores([1, 1]));
        let core_load = |service: u8, core: u16| if service == 0 { u32::from(10 - core) } else { 0 };
        let changes = allocator.apply_load_hint(0, LoadHint::ScaleUp, false, core_load);
        let expected_changes = [
            CoreAssignmentChange { service: 0, core: 3, is_assigned: true },
            CoreAssignmentChange { service: 1, core: 3, is_assigned: false },
        ];
        assert_eq!(changes, expected_changes, "the least loaded of the other's");
        assert_eq!(allocator.apply_load_hint(0, LoadHint::ScaleUp, false, core_load), [], "the last one is reserved");
        assert_eq!(allocator.apply_load_hint(1, LoadHint::ScaleUp, true, core_load), [], "service 0 needs what it has");
        assert_eq!(allocator.apply_load_hint(0, LoadHint::ScaleDown, false, core_load).len(), 2);
        assert!(
            allocator.is_service_assigned(1, 3)
                && allocator.is_service_assigned(1, 2)
                && !allocator.is_service_assigned(1, 0)
        );
    }

    fn service_0_own_core_count(allocator: &CoreAllocator) -> usize {
        allocator.cores_in_state(exclusive_core_state(0)).count()
    }

    /// Returns a load function with one request of service 0 at each of the first `busy_core_count` cores. Service 1
    /// has `10 - core` requests at each core.
    fn core_load_with_busy_cores(busy_core_count: u16) -> impl Fn(u8, u16) -> u32 {
        move |service, core| if service == 0 { (core < busy_core_count).into() } else { u32::from(10 - core) }
    }

    #[test]
    fn hybrid_mode_adapts_service_0_own_cores_to_constant_load() {
        let mut allocator = CoreAllocator::new(CoreAssignmentMode::Hybrid, 6, ReservedCores([1, 1]));
        assert!(
            !allocator.is_service_assigned(1, 0)
                && allocator.is_service_assigned(0, 1)
                && allocator.is_service_assigned(1, 4)
                && !allocator.is_service_assigned(0, 5)
        );
        let core_loss_of_service_1 = [CoreAssignmentChange { service: 1, core: 4, is_assigned: false }];
        assert_eq!(
            allocator.apply_load_hint(0, LoadHint::ScaleUp, true, core_load_with_busy_cores(3)),
            core_loss_of_service_1,
            "least load of service 1"
        );
        assert_eq!(
            allocator.apply_load_hint(0, LoadHint::ScaleDown, true, core_load_with_busy_cores(3)),
            [CoreAssignmentChange { core: 3, ..core_loss_of_service_1[0] }]
        );
        assert_eq!(
            allocator.apply_load_hint(0, LoadHint::ScaleDown, true, core_load_with_busy_cores(3)),
            [],
            "cores 1 and 2 serve it, 3 and 4 idle"
        );
        let core_return_to_service_1 = [CoreAssignmentChange { service: 1, core: 3, is_assigned: true }];
        assert_eq!(
            allocator.apply_load_hint(0, LoadHint::ScaleDown, false, core_load_with_busy_cores(1)),
            core_return_to_service_1
        );
        (0..9)
            .for_each(|_| drop(allocator.apply_load_hint(0, LoadHint::ScaleDown, false, core_load_with_busy_cores(0))));
        assert_eq!(service_0_own_core_count(&allocator), 1, "reserved");
        (0..9).for_each(|_| drop(allocator.apply_load_hint(0, LoadHint::ScaleUp, false, core_load_with_busy_cores(6))));
        assert_eq!(service_0_own_core_count(&allocator), 5, "service 1 has its reserved one");
    }

    #[test]
    fn service_without_reserved_cores_keeps_one_shared_core() {
        let mut allocator = CoreAllocator::new(CoreAssignmentMode::Hybrid, 6, ReservedCores([1, 0]));
        (0..9).for_each(|_| drop(allocator.apply_load_hint(0, LoadHint::ScaleUp, false, core_load_with_busy_cores(6))));
        assert_eq!(service_0_own_core_count(&allocator), 5, "service 1 has a shared one");
    }

    #[test]
    fn complete_share_mode_changes_no_assignment() {
        let mut allocator = CoreAllocator::new(CoreAssignmentMode::CompleteShare, 2, ReservedCores([1, 1]));
        assert!(allocator.is_service_assigned(0, 1) && allocator.is_service_assigned(1, 0));
        assert_eq!(allocator.apply_load_hint(0, LoadHint::ScaleUp, false, |_, _| 0), []);
    }

    #[test]
    fn assignment_mode_names_round_trip() {
        for (name, _) in CORE_ASSIGNMENT_MODE_NAMES {
            assert_eq!(name.parse::<CoreAssignmentMode>().unwrap().to_string(), name);
        }
        let error = "shared".parse::<CoreAssignmentMode>().unwrap_err().to_string();
        assert_eq!(error, "assignment \"shared\": expected share, dedicated or hybrid");
        for text in ["2", "2:0", "0"] {
            assert_eq!(text.parse::<ReservedCores>().unwrap().to_string(), text);
        }
        let error = "2:x".parse::<ReservedCores>().unwrap_err().to_string();
        assert_eq!(error, "reserved cores \"2:x\": expected a number, or one for each service as in 2:0");
    }
}
