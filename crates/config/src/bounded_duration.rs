//! Durations that are written with a unit, such as "100ms", "1.5s", "24h" or "1h 30m".

use std::time::Duration;

use serde_json::{Value, json};
use toml::Spanned;
use toml::de::DeValue;

use crate::{FromToml, TomlReader};

/// One microsecond in nanoseconds, the unit of the limits of [`BoundedDuration`].
pub const MICROSECOND_NS: u64 = 1_000;
/// One millisecond in nanoseconds.
pub const MILLISECOND_NS: u64 = 1_000_000;
/// One second in nanoseconds.
pub const SECOND_NS: u64 = 1_000_000_000;
/// One minute in nanoseconds.
pub const MINUTE_NS: u64 = 60 * SECOND_NS;
/// One hour in nanoseconds.
pub const HOUR_NS: u64 = 60 * MINUTE_NS;

/// Duration from `MIN` to `MAX` nanoseconds, both inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BoundedDuration<const MIN: u64, const MAX: u64>(pub Duration);

impl<const MIN: u64, const MAX: u64> From<BoundedDuration<MIN, MAX>> for Duration {
    fn from(period: BoundedDuration<MIN, MAX>) -> Self {
        period.0
    }
}

const TIME_UNITS: [(&str, u64); 6] =
    [("h", HOUR_NS), ("m", MINUTE_NS), ("s", SECOND_NS), ("ms", MILLISECOND_NS), ("us", MICROSECOND_NS), ("ns", 1)];

/// Returns a duration as text: a whole number of the largest unit that divides it.
pub fn format_duration(duration: Duration) -> String {
    let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    match TIME_UNITS.iter().find(|(_, unit)| ns != 0 && ns.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("{}{name}", ns / unit),
        None => "0s".to_owned(),
    }
}

impl<const MIN: u64, const MAX: u64> BoundedDuration<MIN, MAX> {
    fn parse(text: &str) -> Result<Self, String> {
        let duration = humantime::parse_duration(text)
            .map_err(|reason| format!("{text:?} is no time ({reason}): expected {}", Self::describe_valid_values()))?;
        let allowed_range = Duration::from_nanos(MIN)..=Duration::from_nanos(MAX);
        if allowed_range.contains(&duration) {
            Ok(Self(duration))
        } else {
            Err(format!("{text:?}: expected {}", Self::describe_valid_values()))
        }
    }
}

impl<const MIN: u64, const MAX: u64> FromToml for BoundedDuration<MIN, MAX> {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        match value.get_ref() {
            DeValue::String(text) => reader.ok_or_report(Self::parse(text), value.span()),
            DeValue::Integer(_) | DeValue::Float(_) => {
                let number_text = reader.text_at(&value.span()).to_owned();
                reader.report_mistake(
                    value.span(),
                    format!("{number_text} has no unit: expected {}", Self::describe_valid_values()),
                );
                None
            }
            _ => reader.report_wrong_type::<Self>(value),
        }
    }

    fn describe_valid_values() -> String {
        let [least, most] = [MIN, MAX].map(|ns| format_duration(Duration::from_nanos(ns)));
        format!("a time with its unit, from \"{least}\" to \"{most}\"")
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": r"^\s*([0-9]+(\.[0-9]+)?\s*[a-zA-Zµ]+\s*)+$|^0$" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formatted_durations_parse_to_the_same_value() {
        for (ns, text) in [
            (0, "0s"),
            (100 * MILLISECOND_NS, "100ms"),
            (86_400 * SECOND_NS, "24h"),
            (90 * SECOND_NS, "90s"),
            (12_500, "12500ns"),
        ] {
            let time = Duration::from_nanos(ns);
            assert_eq!(format_duration(time), text);
            assert_eq!(BoundedDuration::<0, { 48 * HOUR_NS }>::parse(text), Ok(BoundedDuration(time)));
        }
    }

    #[test]
    fn duration_bounds_are_inclusive() {
        type TestInterval = BoundedDuration<{ 10 * MILLISECOND_NS }, SECOND_NS>;
        assert_eq!(TestInterval::parse("1s"), Ok(BoundedDuration(Duration::from_secs(1))));
        assert_eq!(TestInterval::parse("0.01s"), Ok(BoundedDuration(Duration::from_millis(10))));
        assert_eq!(
            TestInterval::parse("9ms").unwrap_err(),
            "\"9ms\": expected a time with its unit, from \"10ms\" to \"1s\""
        );
        let error = TestInterval::parse("100").unwrap_err();
        assert!(error.starts_with("\"100\" is no time (") && error.ends_with("to \"1s\""), "{error}");
    }
}
