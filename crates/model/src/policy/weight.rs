//! An operator's settings for a server's share.

/// Weight of a server from 0 (no new connections) to 100. A server's share of new connections is proportional to its
/// weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerWeight(u8);

/// Error returned for a weight above [`ServerWeight::MAX`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("weight {0}: expected 0 (no new connections) to {max}", max = ServerWeight::MAX)]
pub struct ServerWeightOutOfRange(pub u64);

impl ServerWeight {
    /// Maximum weight. If a server needs a larger share, the other servers must have smaller weights.
    pub const MAX: u8 = 100;

    /// Default weight of a server, which is 1.
    pub const ONE: ServerWeight = ServerWeight(1);

    /// Returns the weight `weight`. Fails if the weight is above 100.
    pub fn new(weight: u64) -> Result<Self, ServerWeightOutOfRange> {
        u8::try_from(weight).ok().filter(|weight| *weight <= Self::MAX).map(Self).ok_or(ServerWeightOutOfRange(weight))
    }

    /// Returns the weight as a number.
    pub fn get(self) -> u32 {
        self.0.into()
    }
}

impl Default for ServerWeight {
    fn default() -> Self {
        Self::ONE
    }
}

/// Capacity of a server, above 0 and at most a million, where 1 is the capacity of a typical core.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServerCapacity(f64);

/// Error returned for a capacity that is not above 0, or above a million.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("capacity {0}: expected a number above 0, at most 1000000, where 1 is a typical core")]
pub struct ServerCapacityOutOfRange(pub f64);

impl ServerCapacity {
    /// Returns the capacity `capacity`. Fails if the capacity is not above 0, or above a million.
    pub fn new(capacity: f64) -> Result<Self, ServerCapacityOutOfRange> {
        if capacity > 0.0 && capacity <= 1e6 { Ok(Self(capacity)) } else { Err(ServerCapacityOutOfRange(capacity)) }
    }

    /// Returns the capacity, where 1 is that of a typical core.
    pub fn get(self) -> f64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_and_capacity_out_of_range_are_rejected() {
        assert_eq!(ServerWeight::new(100).unwrap().get(), 100);
        assert_eq!(
            ServerWeight::new(101).unwrap_err().to_string(),
            "weight 101: expected 0 (no new connections) to 100"
        );
        assert_eq!(ServerWeight::new(357).unwrap_err(), ServerWeightOutOfRange(357));
        assert_eq!(ServerCapacity::new(0.5).unwrap().get(), 0.5);
        for invalid_capacity in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(
                ServerCapacity::new(invalid_capacity)
                    .unwrap_err()
                    .to_string()
                    .starts_with(&format!("capacity {invalid_capacity}: expected"))
            );
        }
    }
}
