//! Expected service time of a request in the 16 bits that the request's entry has for it.

use std::time::Duration;

/// Service time rounded to a mantissa of 11 bits and a power of two, from 1 ns to more than an hour. The entry of an
/// outstanding request stores it, so that a response subtracts exactly the time that its request added. The learned
/// service time may have changed since.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RoundedServiceTime(u16);

const SERVICE_TIME_MANTISSA_BITS: u32 = 11;
const SERVICE_TIME_MANTISSA_MASK: u16 = (1 << SERVICE_TIME_MANTISSA_BITS) - 1;

impl RoundedServiceTime {
    /// Maximum service time that can be stored (2047 << 31 ns, 73 minutes).
    pub const MAX: Duration = Duration::from_nanos((SERVICE_TIME_MANTISSA_MASK as u64) << 31);

    /// Returns the rounded time nearest to `time`, with an error of at most 1/2048. Longer times than the maximum count
    /// as [`RoundedServiceTime::MAX`].
    pub fn new(time: Duration) -> Self {
        let ns = time.min(Self::MAX).as_nanos() as u64;
        let significant_bits = u64::BITS - ns.leading_zeros();
        let mut exponent = significant_bits.saturating_sub(SERVICE_TIME_MANTISSA_BITS);
        let mut mantissa = if exponent == 0 { ns } else { (ns >> (exponent - 1)).div_ceil(2) };
        if mantissa > u64::from(SERVICE_TIME_MANTISSA_MASK) {
            mantissa >>= 1;
            exponent += 1;
        }
        Self((exponent as u16) << SERVICE_TIME_MANTISSA_BITS | mantissa as u16)
    }

    /// Returns the bits that store the rounded time in a request's entry.
    pub fn to_bits(self) -> u16 {
        self.0
    }

    /// Returns the rounded time that these bits store.
    pub fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// Returns the rounded time in ns.
    pub fn as_ns(self) -> u64 {
        u64::from(self.0 & SERVICE_TIME_MANTISSA_MASK) << (self.0 >> SERVICE_TIME_MANTISSA_BITS)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rounded_service_time_is_close_and_monotonic(ns in 0u64..RoundedServiceTime::MAX.as_nanos() as u64) {
            let rounded = RoundedServiceTime::new(Duration::from_nanos(ns));
            let difference = rounded.as_ns().abs_diff(ns);
            prop_assert!(difference <= ns / 2048 + u64::from(ns >= 2048), "{ns} became {}", rounded.as_ns());
            prop_assert!(RoundedServiceTime::new(Duration::from_nanos(ns + 1)).as_ns() >= rounded.as_ns());
            prop_assert_eq!(RoundedServiceTime::from_bits(rounded.to_bits()), rounded);
        }
    }

    #[test]
    fn minimum_and_maximum_times_are_representable() {
        assert_eq!(RoundedServiceTime::new(Duration::ZERO).as_ns(), 0);
        assert_eq!(RoundedServiceTime::new(Duration::from_nanos(2047)).as_ns(), 2047);
        assert_eq!(RoundedServiceTime::new(Duration::MAX).as_ns(), RoundedServiceTime::MAX.as_nanos() as u64);
    }
}
