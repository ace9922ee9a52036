//! The options of `jbsrq` (RingLeader, NSDI'23).

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use coreward_model::dispatch::Lambda;

use crate::names::UnknownName;

/// Options of `jbsrq`, as published when nothing is said.
#[derive(Debug, Clone, PartialEq)]
pub struct JbsrqOptions {
    /// `lambda`: what a request of lower priority counts for one of higher priority, 0 to 1
    pub lambda: Lambda,
    /// `depth`: how many requests the queue of a core holds, with the one that is served
    pub depth: NonZeroU16,
    /// `quantum`: after how much of service a request yields to one of higher priority, in units of service time
    pub quantum: f64,
    /// `priorities`: whether classes have priorities (the shorter first) or all requests are alike
    pub priorities: Priorities,
}

/// Which request is served first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priorities {
    /// `classes`: a shorter class has priority over a longer one
    Classes,
    /// `none`: in the order of arrival
    None,
}

impl Default for JbsrqOptions {
    /// RingLeader, Sect. 7.1: lambda 0.2, depth 4; the yield interval of 5 us is 5/3 of the 3 us of its Exp(3).
    fn default() -> Self {
        Self {
            lambda: Lambda::PUBLISHED,
            depth: const { NonZeroU16::new(4).unwrap() },
            quantum: 5.0 / 3.0,
            priorities: Priorities::Classes,
        }
    }
}

const OPTIONS: [&str; 4] = ["lambda=0..1", "depth=N", "quantum=TIME", "priorities=classes|none"];

/// `lambda=0.2,depth=4,...`; the error says what was expected.
impl FromStr for JbsrqOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for option in text.split(',').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let wrong = |expected: &str| format!("{name} {value:?}: expected {expected}");
            match name {
                "lambda" => {
                    let lambda = value.parse().map_err(|_| wrong("a number from 0 to 1"))?;
                    options.lambda = Lambda::new(lambda).map_err(|error| error.to_string())?;
                }
                "depth" => options.depth = value.parse().map_err(|_| wrong("a number from 1 to 65535"))?,
                "quantum" => {
                    let quantum = value.parse().ok().filter(|quantum| (SHORTEST_QUANTUM..=1e6).contains(quantum));
                    options.quantum = quantum.ok_or_else(|| wrong("a time from 0.001 to 1000000 service times"))?;
                }
                "priorities" => {
                    options.priorities = match value {
                        "classes" => Priorities::Classes,
                        "none" => Priorities::None,
                        _ => return Err(wrong("classes or none")),
                    };
                }
                _ => return Err(UnknownName::new("option", name, OPTIONS).to_string()),
            }
        }
        Ok(options)
    }
}

/// In units of service time.
const SHORTEST_QUANTUM: f64 = 0.001;

/// The options that differ from the defaults.
impl fmt::Display for JbsrqOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let mut differing = Vec::new();
        if self.lambda != default.lambda {
            differing.push(format!("lambda={}", self.lambda.get()));
        }
        if self.depth != default.depth {
            differing.push(format!("depth={}", self.depth));
        }
        if self.quantum != default.quantum {
            differing.push(format!("quantum={}", self.quantum));
        }
        if self.priorities != default.priorities {
            differing.push("priorities=none".to_owned());
        }
        f.write_str(&differing.join(","))
    }
}
