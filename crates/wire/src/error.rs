//! The one error of parsing a message: which field, and what is wrong with its value.

use std::fmt;

/// A field of a message that holds no meaning.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct WireError {
    /// Its path inside the message, as `services[2].address.port`.
    pub field: String,
    /// Its value and what was expected.
    pub problem: String,
}

impl WireError {
    /// `problem` says the value and what was expected.
    pub fn new(field: impl Into<String>, problem: impl fmt::Display) -> Self {
        Self { field: field.into(), problem: problem.to_string() }
    }

    /// The message lacks a part.
    pub fn missing(field: impl Into<String>) -> Self {
        Self::new(field, "missing")
    }
}

impl From<WireError> for tonic::Status {
    fn from(error: WireError) -> Self {
        tonic::Status::invalid_argument(error.to_string())
    }
}

/// Says in which field an error happened.
pub trait Context<T> {
    /// Prefixes the field's name.
    ///
    /// # Errors
    /// The same, with the longer path.
    fn within(self, field: impl fmt::Display) -> Result<T, WireError>;
}

impl<T> Context<T> for Result<T, WireError> {
    fn within(self, field: impl fmt::Display) -> Result<T, WireError> {
        self.map_err(|error| WireError { field: format!("{field}.{}", error.field), problem: error.problem })
    }
}
