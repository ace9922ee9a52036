//! Simulated time: whole ticks, so that no order of events depends on rounding.

/// A moment or a length of time.
pub type Tick = u64;

/// Ticks of one unit of service time. Steps of 6e-8 of a service time; a run may last 1e12 of them.
pub const TICKS_PER_UNIT: Tick = 1 << 24;

/// After everything else.
pub const NEVER: Tick = Tick::MAX;

/// `units` of service time, rounded.
#[inline]
pub fn ticks(units: f64) -> Tick {
    (units * TICKS_PER_UNIT as f64 + 0.5) as Tick
}

/// In units of service time.
pub fn units(ticks: Tick) -> f64 {
    ticks as f64 / TICKS_PER_UNIT as f64
}
