//! Parse errors of messages, which name the field and the problem with its value.

use std::fmt;

/// Error about an invalid field of a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct WireError {
    /// Path of the field in the message, such as `services[2].address.port`.
    pub field: String,
    /// The value found and the value expected.
    pub problem: String,
}

impl WireError {
    /// Returns an error. `problem` contains the value found and the value expected.
    pub fn new(field: impl Into<String>, problem: impl fmt::Display) -> Self {
        Self { field: field.into(), problem: problem.to_string() }
    }

    /// Returns the error for a missing field.
    pub fn missing(field: impl Into<String>) -> Self {
        Self::new(field, "missing")
    }
}

/// Extension of results that adds a field's name to an error.
pub trait WireErrorContext<T> {
    /// Prefixes the field's name to the path in the error.
    fn within(self, field: impl fmt::Display) -> Result<T, WireError>;
}

impl<T> WireErrorContext<T> for Result<T, WireError> {
    fn within(self, field: impl fmt::Display) -> Result<T, WireError> {
        self.map_err(|error| WireError { field: format!("{field}.{}", error.field), problem: error.problem })
    }
}
