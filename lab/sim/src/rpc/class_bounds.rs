//! Options of `jbsrq-fifo`, which gives classes different priority on cores that serve in order of arrival.

use std::fmt;
use std::str::FromStr;

use coreward_model::dispatch::OutstandingBoundsByClass;

use crate::unknown_name::UnknownName;

/// Options of the policy `jbsrq-fifo`, which limits the requests at a core. The defaults are those of `coreward
/// dispatch --policy jbsrq`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassBoundOptions {
    /// Number of cores that are reserved for the shortest class, beginning with core 0 (option `reserved`).
    pub reserved_core_count: u16,
    /// Number of outstanding requests at a core from which the dispatcher prefers other cores (option `bound`).
    pub outstanding_request_bound: u16,
    /// Number of outstanding requests below which a reserved core also takes other classes (option `reserved-bound`).
    pub reserved_core_request_bound: u16,
}

impl Default for ClassBoundOptions {
    fn default() -> Self {
        Self { reserved_core_count: 1, outstanding_request_bound: 4, reserved_core_request_bound: 0 }
    }
}

const CLASS_BOUND_OPTION_SYNTAX: [&str; 3] = ["reserved=N", "bound=N", "reserved-bound=N"];

impl ClassBoundOptions {
    pub fn to_class_bounds(&self, cores: u16, classes: u8) -> OutstandingBoundsByClass {
        OutstandingBoundsByClass::with_reserved_cores(
            cores,
            classes,
            self.reserved_core_count,
            self.outstanding_request_bound.into(),
            self.reserved_core_request_bound.into(),
        )
    }
}

/// Parses options such as `reserved=2,bound=4`. An error states the expected form.
impl FromStr for ClassBoundOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for option in text.split(',').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let parse_number = |min: u16| {
                let number = value.parse().ok().filter(|number: &u16| *number >= min);
                number.ok_or_else(|| format!("{name} {value:?}: expected a number from {min} to 65535"))
            };
            match name {
                "reserved" => options.reserved_core_count = parse_number(0)?,
                "bound" => options.outstanding_request_bound = parse_number(1)?,
                "reserved-bound" => options.reserved_core_request_bound = parse_number(0)?,
                _ => return Err(UnknownName::new("option", name, CLASS_BOUND_OPTION_SYNTAX).to_string()),
            }
        }
        Ok(options)
    }
}

/// Writes only the options that differ from the defaults.
impl fmt::Display for ClassBoundOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let options = [
            ("reserved", self.reserved_core_count, default.reserved_core_count),
            ("bound", self.outstanding_request_bound, default.outstanding_request_bound),
            ("reserved-bound", self.reserved_core_request_bound, default.reserved_core_request_bound),
        ];
        let changed_options = options.iter().filter(|(_, value, default)| value != default);
        let option_texts: Vec<String> = changed_options.map(|(name, value, _)| format!("{name}={value}")).collect();
        f.write_str(&option_texts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_class_bounds_are_rejected() {
        let expect_parse_error = |text: &str| text.parse::<ClassBoundOptions>().unwrap_err();
        assert_eq!(expect_parse_error("bound=0"), "bound \"0\": expected a number from 1 to 65535");
        assert!(expect_parse_error("reserve=1").contains("reserved"), "{}", expect_parse_error("reserve=1"));
        let options: ClassBoundOptions = "reserved=2,reserved-bound=1".parse().unwrap();
        assert_eq!(
            (
                options.to_class_bounds(4, 2).core_bounds_for_class(0),
                options.to_class_bounds(4, 2).core_bounds_for_class(1)
            ),
            (&[4; 4][..], &[1, 1, 4, 4][..])
        );
        assert_eq!(options.to_string(), "reserved=2,reserved-bound=1");
    }
}
