//! Parse errors of messages, which name the field and the problem with its value.

use std::fmt;

/// Error about an invalid field of a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct WireError {
    /// Path of the field in the message, such as `services[2].address.port`.
    pub field: String,
    /// Description of the value that was found and of the expected value.
    pub problem: String,
}

impl WireError {
    /// Returns an error about the field `field`. `problem` describes the found and the expected value.
    pub fn new(field: impl Into<String>, problem: impl fmt::Display) -> Self {
        Self { field: field.into(), problem: problem.to_string() }
    }

    /// Returns the error for a missing field.
    pub fn missing(field: impl Into<String>) -> Self {
        Self::new(field, "missing")
    }
}

/// Extension of results that adds the name of a containing field to an error.
pub trait WireErrorContext<T> {
    /// Adds `field` to the front of the path in the error.
    fn with_field_prefix(self, field: impl fmt::Display) -> Result<T, WireError>;
}

impl<T> WireErrorContext<T> for Result<T, WireError> {
    fn with_field_prefix(self, field: impl fmt::Display) -> Result<T, WireError> {
        self.map_err(|error| WireError { field: format!("{field}.{}", error.field), problem: error.problem })
    }
}
