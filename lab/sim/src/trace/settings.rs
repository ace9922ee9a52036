//! Settings of a traffic generator, given on the command line as `name=value,name=value`.

use std::ops::RangeInclusive;

use crate::names::UnknownName;

/// Error for invalid settings of a traffic generator.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SettingError {
    /// The text does not have the form `name=value`.
    #[error("{generator}: {text:?}: expected name=value")]
    NotAPair { generator: &'static str, text: String },
    /// The generator does not have this setting.
    #[error("{generator}: {name}")]
    UnknownSetting { generator: &'static str, name: UnknownName },
    /// The value is not an integer, or is out of range.
    #[error("{generator}: {name}={value}: expected a whole number from {low} to {high}")]
    InvalidValue { generator: &'static str, name: String, value: String, low: u64, high: u64 },
}

/// Setting of a traffic generator, given as `name=value`.
pub struct Setting<'a> {
    generator: &'static str,
    pub name: &'a str,
    value: &'a str,
}

/// Parses the settings in `text` and returns them in the order of the text.
pub fn parse_settings<'a>(
    generator: &'static str,
    text: &'a str,
) -> impl Iterator<Item = Result<Setting<'a>, SettingError>> + use<'a> {
    text.split(',').filter(|setting_text| !setting_text.is_empty()).map(move |pair| match pair.split_once('=') {
        Some((name, value)) => Ok(Setting { generator, name, value }),
        None => Err(SettingError::NotAPair { generator, text: pair.to_owned() }),
    })
}

impl Setting<'_> {
    /// Returns the value as an integer. Fails when it is not an integer, or is not within `range`.
    pub fn parse_integer_in(&self, range: RangeInclusive<u64>) -> Result<u64, SettingError> {
        self.value.parse().ok().filter(|value| range.contains(value)).ok_or_else(|| SettingError::InvalidValue {
            generator: self.generator,
            name: self.name.to_owned(),
            value: self.value.to_owned(),
            low: *range.start(),
            high: *range.end(),
        })
    }

    pub fn unknown_name_error(&self, known_names: &[&str]) -> SettingError {
        let unknown_name = UnknownName::new("setting", self.name, known_names.iter().copied());
        SettingError::UnknownSetting { generator: self.generator, name: unknown_name }
    }
}
