//! Changes of the pool during a seed's run, and the counted seconds.

/// Number of seconds that the variances exclude after the start and after every change of the pool.
pub const SETTLE_SECONDS: u64 = 5;
/// Minimum duration of a run (s): with a shorter one, no second would count between two changes.
pub const SECONDS_MIN: u64 = 3 * (SETTLE_SECONDS + 1);

/// Change of the server pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolEvent {
    /// The waiting server joins the pool.
    Join,
    /// The server that has been in the pool longest is drained.
    Drain,
}

impl PoolEvent {
    /// Returns the action of the server as a verb.
    pub fn action(self) -> &'static str {
        match self {
            Self::Join => "joins",
            Self::Drain => "drains",
        }
    }
}

/// Times of the pool changes in a run, in seconds from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeline {
    seconds: u64,
}

impl Timeline {
    /// Creates the timeline of a run of `seconds`. Panics with fewer than [`SECONDS_MIN`] seconds.
    pub fn new(seconds: u64) -> Self {
        assert!(seconds >= SECONDS_MIN, "{seconds} seconds are too short for a run");
        Self { seconds }
    }

    /// Returns the duration of the run (s).
    pub fn seconds(&self) -> u64 {
        self.seconds
    }

    pub fn changes(&self) -> [(u64, PoolEvent); 2] {
        [(self.seconds / 3, PoolEvent::Join), (self.seconds * 2 / 3, PoolEvent::Drain)]
    }

    /// Returns the change of the pool at the start of a second, if any.
    pub fn event(&self, second: u64) -> Option<PoolEvent> {
        self.changes().into_iter().find(|(at, _)| *at == second).map(|(_, event)| event)
    }

    /// Returns whether the variance in the second after `second` counts.
    pub fn is_counted(&self, second: u64) -> bool {
        let unsettled = |change: u64| (change..change + SETTLE_SECONDS).contains(&second);
        !unsettled(0) && !self.changes().into_iter().any(|(change, _)| unsettled(change))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_after_start_and_changes_are_left_out() {
        let timeline = Timeline::new(38);
        let counted: Vec<u64> = (0..38).filter(|second| timeline.is_counted(*second)).collect();
        let expected: Vec<u64> = (5..12).chain(17..25).chain(30..38).collect();
        assert_eq!(counted, expected);
        assert_eq!((timeline.event(12), timeline.event(25)), (Some(PoolEvent::Join), Some(PoolEvent::Drain)));
        assert_eq!(timeline.event(13), None);
    }

    #[test]
    fn shortest_run_has_a_counted_second_in_each_part() {
        let timeline = Timeline::new(SECONDS_MIN);
        assert_eq!((0..SECONDS_MIN).filter(|second| timeline.is_counted(*second)).collect::<Vec<_>>(), [5, 11, 17]);
    }
}
