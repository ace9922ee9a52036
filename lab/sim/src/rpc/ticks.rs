//! Simulated time in whole ticks. The order of events therefore does not depend on rounding.

/// Point in time or duration, counted in ticks ([`TICKS_PER_SERVICE_TIME_UNIT`]).
pub type Tick = u64;

/// Number of ticks per unit of service time. A tick is about 6e-8 units, and a run may last 1e12 units.
pub const TICKS_PER_SERVICE_TIME_UNIT: Tick = 1 << 24;

/// Time that is later than all events.
pub const NEVER: Tick = Tick::MAX;

/// Converts units of service time to ticks, rounded to the nearest tick.
#[inline]
pub fn time_units_to_ticks(units: f64) -> Tick {
    (units * TICKS_PER_SERVICE_TIME_UNIT as f64 + 0.5) as Tick
}

/// Converts ticks to units of service time.
pub fn ticks_to_time_units(ticks: Tick) -> f64 {
    ticks as f64 / TICKS_PER_SERVICE_TIME_UNIT as f64
}
