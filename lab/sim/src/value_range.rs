//! Error for a configuration value that is out of range.

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} {value}: expected {expected}")]
pub struct ValueOutOfRange {
    /// Name of the command-line option that sets the value.
    pub name: &'static str,
    pub value: String,
    pub expected: String,
}
