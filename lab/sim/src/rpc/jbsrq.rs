//! Options of the policy `jbsrq` (RingLeader, NSDI'23).

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use coreward_model::dispatch::{
    CoreAssignmentMode, CoreRankRule, DispatchEligibilityRule, InvalidReservedCores, RankLambda, ReservedCores,
    UnknownCoreAssignmentMode,
};

use crate::unknown_name::UnknownName;

/// Options of the policy `jbsrq`. The defaults are the published values.
#[derive(Debug, Clone, PartialEq)]
pub struct JbsrqOptions {
    /// Weight (0 to 1) of a core's queued requests of lower priority, relative to those of higher priority (option
    /// `lower_priority_weight`).
    pub lower_priority_weight: RankLambda,
    /// Capacity of a core's queue, including the request in service (option `depth`).
    pub queue_depth: NonZeroU16,
    /// Rule that determines how much each request at a core counts when cores are compared (option `rank`).
    pub rank_rule: CoreRankRule,
    /// Rule that determines whether the next service blocks all others while no core accepts its request (option
    /// `eligibility_rule`).
    pub eligibility_rule: DispatchEligibilityRule,
    /// Time after which a request yields to one of higher priority, in units of service time (option
    /// `preemption_quantum`).
    pub preemption_quantum: f64,
    /// Whether shorter classes have priority or all requests are equal (option `priorities`).
    pub priorities: ClassPriorities,
    /// Time that a core needs to switch to another service, in units of service time (option `switch`).
    pub service_switch_time: f64,
    /// Mode of dividing the cores between two services (option `assignment`).
    pub core_assignment_mode: CoreAssignmentMode,
    /// Interval at which load monitors poll the NIC's queues, in units of service time (option `interval`).
    pub load_monitor_interval: f64,
    /// Numbers of cores that the services always keep, unless all services share all cores (option `reserved`).
    pub reserved_cores: ReservedCores,
    /// Location of the load monitor that triggers moves of cores between services (option `allocator`).
    pub core_allocator_location: CoreAllocatorLocation,
}

/// Location of the load monitor, whose hints change the assignment of cores to services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoreAllocatorLocation {
    /// The monitor runs on the NIC and occupies no core (RingLeader). Option value `nic`.
    Nic,
    /// The monitor occupies the whole last core (IOKernel of Caladan, OSDI'20). Option value `core`.
    Core,
}

impl JbsrqOptions {
    /// Returns how many of `cores` cores serve requests, which excludes a core that the load monitor occupies.
    pub fn serving_core_count(&self, cores: u16) -> u16 {
        match self.core_allocator_location {
            CoreAllocatorLocation::Nic => cores,
            CoreAllocatorLocation::Core => cores.saturating_sub(1),
        }
    }
}

/// Order in which queued requests are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClassPriorities {
    /// Requests of a shorter class have priority over those of a longer class. Option value `classes`.
    Classes,
    /// Requests are served in the order of their arrival. Option value `none`.
    None,
}

impl ClassPriorities {
    #[inline]
    pub fn service_of_class(self, class: u8) -> u8 {
        match self {
            Self::Classes => class,
            Self::None => 0,
        }
    }

    pub fn service_count(self, classes: u8) -> u8 {
        match self {
            Self::Classes => classes,
            Self::None => 1,
        }
    }
}

impl Default for JbsrqOptions {
    /// Returns the settings in Sect. 7.1 of RingLeader, with lambda 0.2 and depth 4. The quantum and the load monitor's
    /// interval are 5 us, which is 5/3 of RingLeader's mean service time of 3 us (Exp(3)).
    fn default() -> Self {
        Self {
            lower_priority_weight: RankLambda::PAPER_VALUE,
            queue_depth: const { NonZeroU16::new(4).unwrap() },
            rank_rule: CoreRankRule::Ranked,
            eligibility_rule: DispatchEligibilityRule::FirstEligible,
            preemption_quantum: 5.0 / 3.0,
            priorities: ClassPriorities::Classes,
            service_switch_time: 0.0,
            core_assignment_mode: CoreAssignmentMode::CompleteShare,
            load_monitor_interval: 5.0 / 3.0,
            reserved_cores: ReservedCores([1, 1]),
            core_allocator_location: CoreAllocatorLocation::Nic,
        }
    }
}

const JBSRQ_OPTION_SYNTAX: [&str; 11] = [
    "lambda=0..1",
    "depth=N",
    "rank=jbsrq|global|per-service",
    "scheduler=feo|pifo",
    "quantum=TIME",
    "priorities=classes|none",
    "switch=TIME",
    "assignment=share|dedicated|hybrid",
    "interval=TIME",
    "reserved=N[:N]",
    "allocator=nic|core",
];

/// Parses options such as `lambda=0.2,depth=4`. An error states the expected form.
impl FromStr for JbsrqOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for option in text.split(',').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            options.set_option(name, value)?;
        }
        Ok(options)
    }
}

impl JbsrqOptions {
    fn set_option(&mut self, name: &str, value: &str) -> Result<(), String> {
        let build_option_error = |expected: &str| format!("{name} {value:?}: expected {expected}");
        let parse_interval =
            || parse_time(value, MIN_OPTION_SERVICE_TIMES).ok_or_else(|| build_option_error(EXPECTED_INTERVAL_TEXT));
        match name {
            "lambda" => {
                let lambda = value.parse().map_err(|_| build_option_error("a number from 0 to 1"))?;
                self.lower_priority_weight = RankLambda::new(lambda).map_err(|error| error.to_string())?;
            }
            "depth" => self.queue_depth = value.parse().map_err(|_| build_option_error(EXPECTED_COUNT_TEXT))?,
            "rank" => {
                let rank_rule = find_named_value(&RANK_RULES_BY_NAME, value);
                self.rank_rule = rank_rule.ok_or_else(|| build_option_error("jbsrq, global or per-service"))?;
            }
            "scheduler" => {
                self.eligibility_rule = find_named_value(&ELIGIBILITY_RULES_BY_NAME, value)
                    .ok_or_else(|| build_option_error("feo or pifo"))?
            }
            "quantum" => self.preemption_quantum = parse_interval()?,
            "interval" => self.load_monitor_interval = parse_interval()?,
            "switch" => {
                let cost = parse_time(value, 0.0);
                self.service_switch_time =
                    cost.ok_or_else(|| build_option_error("a time from 0 to 1000000 service times"))?;
            }
            "assignment" => {
                self.core_assignment_mode =
                    value.parse().map_err(|error: UnknownCoreAssignmentMode| error.to_string())?
            }
            "reserved" => {
                self.reserved_cores = value.parse().map_err(|error: InvalidReservedCores| error.to_string())?
            }
            "allocator" => {
                self.core_allocator_location = find_named_value(&ALLOCATOR_LOCATIONS_BY_NAME, value)
                    .ok_or_else(|| build_option_error("nic or core"))?
            }
            "priorities" => {
                self.priorities = find_named_value(&CLASS_PRIORITIES_BY_NAME, value)
                    .ok_or_else(|| build_option_error("classes or none"))?
            }
            _ => return Err(UnknownName::new("option", name, JBSRQ_OPTION_SYNTAX).to_string()),
        }
        Ok(())
    }
}

/// Rank rules by option value. They are those of RingLeader, RackSched (OSDI'20) and nanoPU (OSDI'21).
const RANK_RULES_BY_NAME: [(&str, CoreRankRule); 3] =
    [("jbsrq", CoreRankRule::Ranked), ("global", CoreRankRule::Global), ("per-service", CoreRankRule::PerService)];

/// Schedulers by option value. They are those of RingLeader and PIFO (SIGCOMM'16).
const ELIGIBILITY_RULES_BY_NAME: [(&str, DispatchEligibilityRule); 2] =
    [("feo", DispatchEligibilityRule::FirstEligible), ("pifo", DispatchEligibilityRule::Pifo)];

const CLASS_PRIORITIES_BY_NAME: [(&str, ClassPriorities); 2] =
    [("classes", ClassPriorities::Classes), ("none", ClassPriorities::None)];

const ALLOCATOR_LOCATIONS_BY_NAME: [(&str, CoreAllocatorLocation); 2] =
    [("nic", CoreAllocatorLocation::Nic), ("core", CoreAllocatorLocation::Core)];

fn find_named_value<T: Copy>(names: &[(&str, T)], name: &str) -> Option<T> {
    names.iter().find(|(known_name, _)| *known_name == name).map(|(_, value)| *value)
}

fn find_value_name<T: PartialEq>(names: &[(&'static str, T)], value: T) -> String {
    names.iter().find(|(_, known_value)| *known_value == value).map_or("", |(name, _)| *name).to_owned()
}

/// Shortest interval to which an option can be set, in units of service time.
const MIN_OPTION_SERVICE_TIMES: f64 = 0.001;
const EXPECTED_INTERVAL_TEXT: &str = "a time from 0.001 to 1000000 service times";
const EXPECTED_COUNT_TEXT: &str = "a number from 1 to 65535";

fn parse_time(text: &str, min: f64) -> Option<f64> {
    text.parse().ok().filter(|time| (min..=1e6).contains(time))
}

/// Writes only the options that differ from the defaults.
impl fmt::Display for JbsrqOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let options = [
            ("lambda", self.lower_priority_weight.get().to_string(), default.lower_priority_weight.get().to_string()),
            ("depth", self.queue_depth.to_string(), default.queue_depth.to_string()),
            (
                "rank",
                find_value_name(&RANK_RULES_BY_NAME, self.rank_rule),
                find_value_name(&RANK_RULES_BY_NAME, default.rank_rule),
            ),
            (
                "scheduler",
                find_value_name(&ELIGIBILITY_RULES_BY_NAME, self.eligibility_rule),
                find_value_name(&ELIGIBILITY_RULES_BY_NAME, default.eligibility_rule),
            ),
            ("quantum", self.preemption_quantum.to_string(), default.preemption_quantum.to_string()),
            ("priorities", self.priorities.to_string(), default.priorities.to_string()),
            ("switch", self.service_switch_time.to_string(), default.service_switch_time.to_string()),
            ("assignment", self.core_assignment_mode.to_string(), default.core_assignment_mode.to_string()),
            ("interval", self.load_monitor_interval.to_string(), default.load_monitor_interval.to_string()),
            ("reserved", self.reserved_cores.to_string(), default.reserved_cores.to_string()),
            (
                "allocator",
                find_value_name(&ALLOCATOR_LOCATIONS_BY_NAME, self.core_allocator_location),
                find_value_name(&ALLOCATOR_LOCATIONS_BY_NAME, default.core_allocator_location),
            ),
        ];
        let changed_options = options.iter().filter(|(_, value, default)| value != default);
        let option_texts: Vec<String> = changed_options.map(|(name, value, _)| format!("{name}={value}")).collect();
        f.write_str(&option_texts.join(","))
    }
}

impl fmt::Display for ClassPriorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Classes => "classes",
            Self::None => "none",
        })
    }
}
