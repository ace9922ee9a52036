//! Options of `jbsrq` (RingLeader, NSDI'23).

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use coreward_model::dispatch::{
    CoreAssignmentMode, InvalidReservedCores, Lambda, RankRule, ReservedCores, Selection, UnknownAssignmentMode,
};

use crate::names::UnknownName;

/// Options of `jbsrq`; defaults as published.
#[derive(Debug, Clone, PartialEq)]
pub struct JbsrqOptions {
    /// `lambda`: weight (0 to 1) of a request of lower priority for a request of higher priority
    pub lambda: Lambda,
    /// `depth`: capacity of a core's queue, including the request in service
    pub queue_depth: NonZeroU16,
    /// `rank`: requests at a core that count for a service
    pub rank_rule: RankRule,
    /// `scheduler`: whether a service that no core accepts blocks the services after it
    pub scheduler: Selection,
    /// `quantum`: service time after which a request yields to one of higher priority, in units of service time
    pub quantum: f64,
    /// `priorities`: whether shorter classes have priority, or all requests are equal
    pub priorities: Priorities,
    /// `switch`: time in which a core switches to another service, in units of service time
    pub switch_cost: f64,
    /// `assignment`: division of the cores between two services
    pub assignment: CoreAssignmentMode,
    /// `interval`: interval in which load monitors poll the NIC's queues, in units of service time
    pub interval: f64,
    /// `reserved`: cores that each service keeps for itself, unless all services share all cores
    pub reserved_cores: ReservedCores,
    /// `allocator`: place of the core allocator's load monitor
    pub allocator: AllocatorLocation,
}

/// Place of the load monitor whose hints change the assignment of cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocatorLocation {
    /// `nic`: the monitor takes no core (RingLeader)
    Nic,
    /// `core`: the monitor takes a whole core, the last one (IOKernel of Caladan, OSDI'20)
    Core,
}

impl JbsrqOptions {
    /// Returns how many of `cores` cores serve requests.
    pub fn worker_count(&self, cores: u16) -> u16 {
        match self.allocator {
            AllocatorLocation::Nic => cores,
            AllocatorLocation::Core => cores.saturating_sub(1),
        }
    }
}

/// Order in which requests are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priorities {
    /// `classes`: a shorter class has priority over a longer one
    Classes,
    /// `none`: in the order of arrival
    None,
}

impl Priorities {
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
    /// Defaults of RingLeader, Sect. 7.1: lambda 0.2, depth 4. The yield interval and the load monitor's interval of 5
    /// us are 5/3 of the mean of Exp(3).
    fn default() -> Self {
        Self {
            lambda: Lambda::PUBLISHED,
            queue_depth: const { NonZeroU16::new(4).unwrap() },
            rank_rule: RankRule::Ranked,
            scheduler: Selection::FirstEligible,
            quantum: 5.0 / 3.0,
            priorities: Priorities::Classes,
            switch_cost: 0.0,
            assignment: CoreAssignmentMode::CompleteShare,
            interval: 5.0 / 3.0,
            reserved_cores: ReservedCores([1, 1]),
            allocator: AllocatorLocation::Nic,
        }
    }
}

const OPTION_SYNTAX: [&str; 11] = [
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

/// Parses `lambda=0.2,depth=4,...`; an error states the expected form.
impl FromStr for JbsrqOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for option in text.split(',').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let invalid_option = |expected: &str| format!("{name} {value:?}: expected {expected}");
            match name {
                "lambda" => {
                    let lambda = value.parse().map_err(|_| invalid_option("a number from 0 to 1"))?;
                    options.lambda = Lambda::new(lambda).map_err(|error| error.to_string())?;
                }
                "depth" => options.queue_depth = value.parse().map_err(|_| invalid_option(EXPECTED_COUNT))?,
                "rank" => {
                    options.rank_rule = find_by_name(&RANK_RULES, value)
                        .ok_or_else(|| invalid_option("jbsrq, global or per-service"))?
                }
                "scheduler" => {
                    options.scheduler = find_by_name(&SCHEDULERS, value).ok_or_else(|| invalid_option("feo or pifo"))?
                }
                "quantum" => {
                    options.quantum =
                        parse_time(value, MIN_OPTION_TIME).ok_or_else(|| invalid_option(EXPECTED_INTERVAL))?
                }
                "interval" => {
                    options.interval =
                        parse_time(value, MIN_OPTION_TIME).ok_or_else(|| invalid_option(EXPECTED_INTERVAL))?
                }
                "switch" => {
                    let switch_cost = parse_time(value, 0.0);
                    options.switch_cost =
                        switch_cost.ok_or_else(|| invalid_option("a time from 0 to 1000000 service times"))?;
                }
                "assignment" => {
                    options.assignment = value.parse().map_err(|error: UnknownAssignmentMode| error.to_string())?
                }
                "reserved" => {
                    options.reserved_cores = value.parse().map_err(|error: InvalidReservedCores| error.to_string())?
                }
                "allocator" => {
                    options.allocator = find_by_name(&ALLOCATORS, value).ok_or_else(|| invalid_option("nic or core"))?
                }
                "priorities" => {
                    options.priorities = match value {
                        "classes" => Priorities::Classes,
                        "none" => Priorities::None,
                        _ => return Err(invalid_option("classes or none")),
                    };
                }
                _ => return Err(UnknownName::new("option", name, OPTION_SYNTAX).to_string()),
            }
        }
        Ok(options)
    }
}

/// Names of the rank rules of RingLeader, RackSched (OSDI'20) and nanoPU (OSDI'21).
const RANK_RULES: [(&str, RankRule); 3] =
    [("jbsrq", RankRule::Ranked), ("global", RankRule::Global), ("per-service", RankRule::PerService)];

/// Names of the schedulers of RingLeader and PIFO (SIGCOMM'16).
const SCHEDULERS: [(&str, Selection); 2] = [("feo", Selection::FirstEligible), ("pifo", Selection::Pifo)];

const ALLOCATORS: [(&str, AllocatorLocation); 2] = [("nic", AllocatorLocation::Nic), ("core", AllocatorLocation::Core)];

fn find_by_name<T: Copy>(names: &[(&str, T)], name: &str) -> Option<T> {
    names.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: T) -> String {
    names.iter().find(|(_, known)| *known == value).map_or("", |(name, _)| *name).to_owned()
}

/// Shortest interval that an option can have, in units of service time.
const MIN_OPTION_TIME: f64 = 0.001;
const EXPECTED_INTERVAL: &str = "a time from 0.001 to 1000000 service times";
const EXPECTED_COUNT: &str = "a number from 1 to 65535";

fn parse_time(text: &str, min: f64) -> Option<f64> {
    text.parse().ok().filter(|time| (min..=1e6).contains(time))
}

/// Writes the options that differ from the defaults.
impl fmt::Display for JbsrqOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let options = [
            ("lambda", self.lambda.get().to_string(), default.lambda.get().to_string()),
            ("depth", self.queue_depth.to_string(), default.queue_depth.to_string()),
            ("rank", name_of(&RANK_RULES, self.rank_rule), name_of(&RANK_RULES, default.rank_rule)),
            ("scheduler", name_of(&SCHEDULERS, self.scheduler), name_of(&SCHEDULERS, default.scheduler)),
            ("quantum", self.quantum.to_string(), default.quantum.to_string()),
            ("priorities", self.priorities.to_string(), default.priorities.to_string()),
            ("switch", self.switch_cost.to_string(), default.switch_cost.to_string()),
            ("assignment", self.assignment.to_string(), default.assignment.to_string()),
            ("interval", self.interval.to_string(), default.interval.to_string()),
            ("reserved", self.reserved_cores.to_string(), default.reserved_cores.to_string()),
            ("allocator", name_of(&ALLOCATORS, self.allocator), name_of(&ALLOCATORS, default.allocator)),
        ];
        let changed_options = options.iter().filter(|(_, value, default)| value != default);
        let option_texts: Vec<String> = changed_options.map(|(name, value, _)| format!("{name}={value}")).collect();
        f.write_str(&option_texts.join(","))
    }
}

impl fmt::Display for Priorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Classes => "classes",
            Self::None => "none",
        })
    }
}
