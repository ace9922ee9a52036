//! Changes of the pool during a seed's run, and the seconds that count in the results.

/// Number of seconds, after the start and after each pool change, in which variances are not counted.
pub const POOL_SETTLE_SECONDS: u64 = 5;
/// Minimum duration of a run (s). In a shorter run, no second between two changes of the pool would be counted.
pub const MIN_RUN_SECONDS: u64 = 3 * (POOL_SETTLE_SECONDS + 1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolChangeEvent {
    /// The server that waits outside of the pool joins it.
    AddServer,
    /// The server that has been in the pool longest is drained.
    DrainServer,
}

impl PoolChangeEvent {
    /// Returns the verb for the server's action, such as "joins".
    pub fn action_verb(self) -> &'static str {
        match self {
            Self::AddServer => "joins",
            Self::DrainServer => "drains",
        }
    }
}

/// Times of the pool changes in a run, in seconds from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolChangeTimeline {
    run_seconds: u64,
}

impl PoolChangeTimeline {
    /// Creates the timeline of a run of `run_seconds` seconds. Panics with fewer than [`MIN_RUN_SECONDS`] seconds.
    pub fn new(run_seconds: u64) -> Self {
        assert!(run_seconds >= MIN_RUN_SECONDS, "{run_seconds} seconds are too short for a run");
        Self { run_seconds }
    }

    pub fn run_seconds(&self) -> u64 {
        self.run_seconds
    }

    pub fn pool_changes(&self) -> [(u64, PoolChangeEvent); 2] {
        [(self.run_seconds / 3, PoolChangeEvent::AddServer), (self.run_seconds * 2 / 3, PoolChangeEvent::DrainServer)]
    }

    /// Returns the pool change at the start of a second of the run, if any.
    pub fn pool_change_at(&self, second: u64) -> Option<PoolChangeEvent> {
        self.pool_changes().into_iter().find(|(change_second, _)| *change_second == second).map(|(_, event)| event)
    }

    /// Returns whether the variance in the second that begins at `second` is counted in the means.
    pub fn is_second_counted(&self, second: u64) -> bool {
        let is_unsettled_after = |change: u64| (change..change + POOL_SETTLE_SECONDS).contains(&second);
        !is_unsettled_after(0) && !self.pool_changes().into_iter().any(|(change, _)| is_unsettled_after(change))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_after_start_and_pool_changes_do_not_count() {
        let timeline = PoolChangeTimeline::new(38);
        let counted_seconds: Vec<u64> = (0..38).filter(|second| timeline.is_second_counted(*second)).collect();
        let expected_seconds: Vec<u64> = (5..12).chain(17..25).chain(30..38).collect();
        assert_eq!(counted_seconds, expected_seconds);
        assert_eq!(
            (timeline.pool_change_at(12), timeline.pool_change_at(25)),
            (Some(PoolChangeEvent::AddServer), Some(PoolChangeEvent::DrainServer))
        );
        assert_eq!(timeline.pool_change_at(13), None);
    }

    #[test]
    fn shortest_run_has_a_counted_second_between_pool_changes() {
        let timeline = PoolChangeTimeline::new(MIN_RUN_SECONDS);
        assert_eq!(
            (0..MIN_RUN_SECONDS).filter(|second| timeline.is_second_counted(*second)).collect::<Vec<_>>(),
            [5, 11, 17]
        );
    }
}
