//! `name=value,name=value`: how a generator is configured on the command line.

use std::ops::RangeInclusive;

use crate::names::UnknownName;

/// Meaningless text after a generator's name.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SettingError {
    /// Not `name=value`.
    #[error("{generator}: {text:?}: expected name=value")]
    NotAPair { generator: &'static str, text: String },
    /// There is no such name.
    #[error("{generator}: {name}")]
    Name {
        generator: &'static str,
        /// The name, with those that are known.
        name: UnknownName,
    },
    /// The value does not fit.
    #[error("{generator}: {name}={value}: expected a whole number from {low} to {high}")]
    Value {
        generator: &'static str,
        name: String,
        value: String,
        /// The least that would do.
        low: u64,
        /// The most that would do.
        high: u64,
    },
}

/// One `name=value`.
pub struct Setting<'a> {
    generator: &'static str,
    pub name: &'a str,
    value: &'a str,
}

/// The settings in `text`, in their order.
pub fn settings<'a>(
    generator: &'static str,
    text: &'a str,
) -> impl Iterator<Item = Result<Setting<'a>, SettingError>> + use<'a> {
    text.split(',').filter(|pair| !pair.is_empty()).map(move |pair| match pair.split_once('=') {
        Some((name, value)) => Ok(Setting { generator, name, value }),
        None => Err(SettingError::NotAPair { generator, text: pair.to_owned() }),
    })
}

impl Setting<'_> {
    /// The value as a whole number. Fails when it is none, or out of the range.
    pub fn to_integer_in(&self, range: RangeInclusive<u64>) -> Result<u64, SettingError> {
        self.value.parse().ok().filter(|value| range.contains(value)).ok_or_else(|| SettingError::Value {
            generator: self.generator,
            name: self.name.to_owned(),
            value: self.value.to_owned(),
            low: *range.start(),
            high: *range.end(),
        })
    }

    pub fn unknown(&self, known: &[&str]) -> SettingError {
        let name = UnknownName::new("setting", self.name, known.iter().copied());
        SettingError::Name { generator: self.generator, name }
    }
}
