//! Numbers that cannot be simulated.

/// A number of a configuration is out of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} {value}: expected {expected}")]
pub struct OutOfRange {
    /// What it is, as its option is called.
    pub name: &'static str,
    /// What it was.
    pub value: String,
    /// What would do.
    pub expected: String,
}
