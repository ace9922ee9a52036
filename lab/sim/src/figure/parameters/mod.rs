//! Parameters of each kind of simulation, as named in scenario files. Each can be set for the scenario, a panel or a
//! series, of which the last that sets it wins. Some parameters can be swept along an axis.

mod lb;
mod path;
mod pcc;
mod rpc;

use std::str::FromStr;

use serde::{Deserialize, Deserializer, de};

pub use lb::LbParameters;
pub use path::PathParameters;
pub use pcc::PccParameters;
pub use rpc::{RpcParameters, throughput_at_load};

use super::axes::{FigureMetric, SweepAxis};
use crate::unknown_name::UnknownName;

/// Reason why parameters are invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScenarioParameterError {
    /// A required parameter is set nowhere.
    #[error("`{kind}.{parameter}` is missing: expected in [{kind}], in the panel or in the series")]
    MissingParameter { kind: &'static str, parameter: &'static str },
    /// The horizontal axis sweeps a parameter that this kind of simulation does not have.
    #[error("`{}` cannot be swept in a simulation of kind `{kind}`{detail}", kebab_case_variant_name(sweep_axis))]
    UnsupportedSweepAxis {
        kind: &'static str,
        sweep_axis: SweepAxis,
        /// Reason why the parameter cannot be swept, which the error message shows at its end. May be empty.
        detail: &'static str,
    },
    /// The swept parameter has a value that is not allowed.
    #[error("`{}` cannot be {value}", kebab_case_variant_name(sweep_axis))]
    InvalidSweepValue { sweep_axis: SweepAxis, value: f64 },
    /// The panel shows a metric that this kind of simulation does not measure.
    #[error("a simulation of kind `{kind}` does not measure `{}`", kebab_case_variant_name(measure))]
    UnsupportedMetric { kind: &'static str, measure: FigureMetric },
    /// The simulator rejected the configuration with this error message.
    #[error("{0}")]
    RejectedConfig(String),
}

/// Returns the name of an enum variant in scenario files.
fn kebab_case_variant_name(variant: &impl std::fmt::Debug) -> String {
    let debug_name = format!("{variant:?}");
    let kebab_case_parts = debug_name.char_indices().map(|(index, letter)| match letter {
        letter if index > 0 && letter.is_ascii_uppercase() => format!("-{}", letter.to_ascii_lowercase()),
        letter => letter.to_ascii_lowercase().to_string(),
    });
    kebab_case_parts.collect()
}

/// Parameter that has the same text form in scenario files as on the command line.
#[derive(Debug, Clone, PartialEq)]
pub struct ParsedTextParameter<T>(pub T);

impl<'de, T: FromStr<Err: std::fmt::Display>> Deserialize<'de> for ParsedTextParameter<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(de::Error::custom)
    }
}

/// Parameter whose value is one of a few names, the same in scenario files as on the command line.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NamedChoiceParameter<T>(pub T);

impl<'de, T: clap::ValueEnum> Deserialize<'de> for NamedChoiceParameter<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let choice_names =
            || T::value_variants().iter().filter_map(|choice| Some(choice.to_possible_value()?.get_name().to_owned()));
        let unknown_choice_error = |_| de::Error::custom(UnknownName::new("choice", &text, choice_names()));
        T::from_str(&text, false).map(Self).map_err(unknown_choice_error)
    }
}

/// Defines a struct of optional parameters, each of which another instance can override.
macro_rules! parameters {
    ($(#[$about:meta])* pub struct $name:ident { $($(#[$field_about:meta])* pub $field:ident: $type:ty,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Default, PartialEq, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name { $($(#[$field_about])* pub $field: Option<$type>,)* }

        impl $name {
            /// Returns a copy of these parameters, in which each parameter that `over` sets has the value from `over`.
            pub fn overridden_by(&self, over: Option<&Self>) -> Self {
                let Some(over) = over else { return self.clone() };
                Self { $($field: over.$field.clone().or_else(|| self.$field.clone()),)* }
            }
        }
    };
}
use parameters;

/// Returns `value` as an integer. Fails when it has a fraction or does not fit into `T`.
fn to_integer<T: TryFrom<u64>>(sweep_axis: SweepAxis, value: f64) -> Result<T, ScenarioParameterError> {
    let invalid_value_error = ScenarioParameterError::InvalidSweepValue { sweep_axis, value };
    if value.fract() != 0.0 || !(0.0..1e15).contains(&value) {
        return Err(invalid_value_error);
    }
    T::try_from(value as u64).map_err(|_| invalid_value_error)
}
