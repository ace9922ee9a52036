//! Settings of a traffic generator, given on the command line as `name=value,name=value`.

use std::ops::RangeInclusive;

use crate::unknown_name::UnknownName;

/// Error for invalid settings of a traffic generator.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TrafficSettingError {
    /// The text does not have the form `name=value`.
    #[error("{generator}: {text:?}: expected name=value")]
    NotNameValuePair { generator: &'static str, text: String },
    /// The generator does not have this setting.
    #[error("{generator}: {name}")]
    UnknownSetting { generator: &'static str, name: UnknownName },
    /// The value is not an integer, or is out of range.
    #[error("{generator}: {name}={value}: expected a whole number from {low} to {high}")]
    InvalidValue { generator: &'static str, name: String, value: String, low: u64, high: u64 },
}

/// Setting of a traffic generator, given as `name=value`.
pub struct TrafficSetting<'a> {
    generator_name: &'static str,
    pub name: &'a str,
    value: &'a str,
}

/// Parses the traffic settings in `text`, and returns them in the order of the text.
pub fn parse_settings<'a>(
    generator: &'static str,
    text: &'a str,
) -> impl Iterator<Item = Result<TrafficSetting<'a>, TrafficSettingError>> + use<'a> {
    text.split(',').filter(|setting_text| !setting_text.is_empty()).map(move |pair| match pair.split_once('=') {
        Some((name, value)) => Ok(TrafficSetting { generator_name: generator, name, value }),
        None => Err(TrafficSettingError::NotNameValuePair { generator, text: pair.to_owned() }),
    })
}

impl TrafficSetting<'_> {
    /// Returns the setting's value as an integer. Fails when it is not an integer, or is not within `range`.
    pub fn parse_integer_in(&self, range: RangeInclusive<u64>) -> Result<u64, TrafficSettingError> {
        self.value.parse().ok().filter(|value| range.contains(value)).ok_or_else(|| TrafficSettingError::InvalidValue {
            generator: self.generator_name,
            name: self.name.to_owned(),
            value: self.value.to_owned(),
            low: *range.start(),
            high: *range.end(),
        })
    }

    pub fn build_unknown_name_error(&self, known_names: &[&str]) -> TrafficSettingError {
        let unknown_name = UnknownName::new("setting", self.name, known_names.iter().copied());
        TrafficSettingError::UnknownSetting { generator: self.generator_name, name: unknown_name }
    }
}
