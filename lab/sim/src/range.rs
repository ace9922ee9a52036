//! Numbers that cannot be simulated.

/// A number of a configuration is out of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} {value}: expected {expected}")]
pub struct OutOfRange {
    /// Name of its option.
    pub name: &'static str,
    pub value: String,
    pub expected: String,
}
