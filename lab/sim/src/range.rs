//! Error for values out of range.

/// Value of a configuration that is out of range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} {value}: expected {expected}")]
pub struct OutOfRange {
    /// Name of the option that sets the value.
    pub name: &'static str,
    pub value: String,
    pub expected: String,
}
