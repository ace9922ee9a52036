//! Load monitor, which reports that a service needs more or fewer cores (RingLeader, NSDI'23, Sect. 4.4).

use std::num::NonZeroU64;

/// Hint that a service needs more or fewer cores, which the NIC sends to a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadHint {
    /// The service needs more cores.
    ScaleUp,
    /// The service needs fewer cores.
    ScaleDown,
}

/// Interval between two checks of a load monitor, in the caller's unit of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadCheckInterval(NonZeroU64);

impl LoadCheckInterval {
    /// Returns an epoch of length `length`.
    pub const fn new(length: NonZeroU64) -> Self {
        Self(length)
    }

    /// Returns an epoch of length 2^`exponent`, as in RingLeader's hardware, or `None` for exponents from 64 on.
    pub fn power_of_two(exponent: u8) -> Option<Self> {
        let length = 1u64.checked_shl(exponent.into())?;
        NonZeroU64::new(length).map(Self)
    }

    /// Returns the length of the epoch.
    pub const fn get(self) -> NonZeroU64 {
        self.0
    }
}

/// Condition for a hint to scale up. It holds if a request waits at the NIC during two consecutive checks (Caladan's
/// rule, OSDI'20).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaleUpCondition {
    /// Interval between two checks of the condition.
    pub epoch_length: LoadCheckInterval,
}

/// Condition for a hint to scale down. It holds if the queue at the NIC was short enough in several consecutive epochs.
/// RingLeader requires a more conservative rule than for scaling up, but gives no numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaleDownCondition {
    /// Interval between two checks of the condition.
    pub epoch_length: LoadCheckInterval,
    /// Maximum number of waiting requests during an epoch that counts as calm.
    pub max_calm_queue_length: u64,
    /// Number of consecutive calm epochs after which the hint is sent (0 counts as 1).
    pub required_calm_epochs: u32,
}

/// Monitor that sends hints to scale one service up or down. Each kind of hint is enabled separately and has its own
/// epochs.
///
/// A hint disarms both checks until [`rearm_hints`](LoadMonitor::rearm_hints), so a service has one hint in flight at
/// most. The hint goes to the core that [`RankArrays::least_loaded_core`](super::RankArrays::least_loaded_core)
/// returns.
#[derive(Debug, Clone, Default)]
pub struct LoadMonitor {
    scale_up_check: Option<(ScaleUpCondition, NextLoadCheckTimes)>,
    scale_down_check: Option<(ScaleDownCondition, NextLoadCheckTimes)>,
    /// Maximum number of waiting requests in the current epoch of the check for scaling down.
    peak_queue_length: u64,
    /// Number of consecutive calm epochs, without the current one.
    calm_epoch_count: u32,
    is_hint_in_flight: bool,
}

#[derive(Debug, Clone, Copy)]
struct NextLoadCheckTimes {
    previous_check_time: u64,
    next_check_time: u64,
}

impl NextLoadCheckTimes {
    fn new(now: u64, epoch: LoadCheckInterval) -> Self {
        Self { previous_check_time: now, next_check_time: now.saturating_add(epoch.0.get()) }
    }

    /// Returns the time of the previous check if a check is due at `now`, and schedules the next one. Checks that were
    /// missed are not repeated.
    fn schedule_next_check_if_due(&mut self, now: u64, epoch: LoadCheckInterval) -> Option<u64> {
        if now < self.next_check_time {
            return None;
        }
        let missed_check_count = (now - self.next_check_time) / epoch.0;
        self.next_check_time =
            self.next_check_time.saturating_add((missed_check_count + 1).saturating_mul(epoch.0.get()));
        Some(std::mem::replace(&mut self.previous_check_time, now))
    }
}

impl LoadMonitor {
    /// Enables scaling up, or changes its condition. The first check is one epoch after `now`.
    pub fn enable_scale_up(&mut self, now: u64, condition: ScaleUpCondition) {
        self.scale_up_check = Some((condition, NextLoadCheckTimes::new(now, condition.epoch_length)));
    }

    /// Enables scaling down, or changes its condition. The first check is one epoch after `now`.
    pub fn enable_scale_down(&mut self, now: u64, condition: ScaleDownCondition) {
        self.scale_down_check = Some((condition, NextLoadCheckTimes::new(now, condition.epoch_length)));
        (self.peak_queue_length, self.calm_epoch_count) = (0, 0);
    }

    /// Disables the check that sends `hint`. A hint in flight stays in flight.
    pub fn disable_hint(&mut self, hint: LoadHint) {
        match hint {
            LoadHint::ScaleUp => self.scale_up_check = None,
            LoadHint::ScaleDown => self.scale_down_check = None,
        }
    }

    /// Returns the time of the next check, or `None` if both kinds of hints are disabled.
    pub fn next_check_time(&self) -> Option<u64> {
        let next_scale_up_check_time = self.scale_up_check.map(|(_, checks)| checks.next_check_time);
        let next_scale_down_check_time = self.scale_down_check.map(|(_, checks)| checks.next_check_time);
        next_scale_up_check_time.into_iter().chain(next_scale_down_check_time).min()
    }

    /// Performs the checks that are due at `now`, and returns the hint to send. Scaling up comes before scaling down.
    ///
    /// `oldest_arrival_time` is the arrival of the request that has waited longest, if any waits. `peak_queue_length`
    /// is the maximum number of waiting requests since the previous call. `now` must not decrease.
    pub fn check_for_hint(
        &mut self,
        now: u64,
        oldest_arrival_time: Option<u64>,
        peak_queue_length: u64,
    ) -> Option<LoadHint> {
        let needs_more_cores = self.check_whether_to_scale_up(now, oldest_arrival_time);
        let needs_fewer_cores = self.check_whether_to_scale_down(now, peak_queue_length);
        if self.is_hint_in_flight || !(needs_more_cores || needs_fewer_cores) {
            return None;
        }
        self.is_hint_in_flight = true;
        self.calm_epoch_count = 0;
        Some(if needs_more_cores { LoadHint::ScaleUp } else { LoadHint::ScaleDown })
    }

    fn check_whether_to_scale_up(&mut self, now: u64, oldest_arrival_time: Option<u64>) -> bool {
        let Some((condition, checks)) = &mut self.scale_up_check else { return false };
        let Some(previous_check_time) = checks.schedule_next_check_if_due(now, condition.epoch_length) else {
            return false;
        };
        oldest_arrival_time.is_some_and(|arrival_time| arrival_time <= previous_check_time)
    }

    fn check_whether_to_scale_down(&mut self, now: u64, peak_queue_length: u64) -> bool {
        let Some((condition, checks)) = &mut self.scale_down_check else { return false };
        self.peak_queue_length = self.peak_queue_length.max(peak_queue_length);
        if checks.schedule_next_check_if_due(now, condition.epoch_length).is_none() {
            return false;
        }
        let is_calm = std::mem::take(&mut self.peak_queue_length) <= condition.max_calm_queue_length;
        self.calm_epoch_count = if is_calm { self.calm_epoch_count.saturating_add(1) } else { 0 };
        is_calm && self.calm_epoch_count >= condition.required_calm_epochs
    }

    /// Returns whether a hint was sent, and [`rearm_hints`](Self::rearm_hints) has not been called since.
    pub fn is_hint_in_flight(&self) -> bool {
        self.is_hint_in_flight
    }

    /// Arms both checks again, after the cores acted on the hint (RingLeader's RearmLoadMonitor). Returns whether a
    /// hint was in flight.
    pub fn rearm_hints(&mut self) -> bool {
        std::mem::take(&mut self.is_hint_in_flight)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn epoch_length(length: u64) -> LoadCheckInterval {
        LoadCheckInterval::new(NonZeroU64::new(length).unwrap())
    }

    fn create_monitor(
        up_epoch_length: u64,
        down_epoch_length: u64,
        max_calm_queue_length: u64,
        required_calm_epochs: u32,
    ) -> LoadMonitor {
        let mut monitor = LoadMonitor::default();
        monitor.enable_scale_up(0, ScaleUpCondition { epoch_length: epoch_length(up_epoch_length) });
        monitor.enable_scale_down(
            0,
            ScaleDownCondition {
                epoch_length: epoch_length(down_epoch_length),
                max_calm_queue_length,
                required_calm_epochs,
            },
        );
        monitor
    }

    #[test]
    fn request_that_waits_at_two_consecutive_checks_causes_scale_up() {
        let mut monitor = create_monitor(10, 10, 0, 4);
        assert_eq!(monitor.check_for_hint(10, Some(5), 1), None, "it arrived after the previous check");
        assert_eq!(monitor.check_for_hint(20, Some(15), 1), None, "another one");
        assert_eq!(monitor.check_for_hint(30, Some(15), 1), Some(LoadHint::ScaleUp));
        assert_eq!(monitor.check_for_hint(40, Some(15), 1), None, "one hint in flight");
        assert!(monitor.rearm_hints() && !monitor.rearm_hints());
        assert_eq!(monitor.check_for_hint(50, Some(15), 1), Some(LoadHint::ScaleUp));
        monitor.rearm_hints();
        let hints: Vec<_> = (6..10).map(|n| monitor.check_for_hint(n * 10, None, 0)).collect();
        assert_eq!(hints, [None, None, None, Some(LoadHint::ScaleDown)]);
    }

    #[test]
    fn scale_up_and_scale_down_checks_have_separate_epochs() {
        let mut monitor = LoadMonitor::default();
        assert_eq!((monitor.next_check_time(), monitor.check_for_hint(1000, Some(0), 9)), (None, None));
        let condition = ScaleDownCondition {
            epoch_length: LoadCheckInterval::power_of_two(6).unwrap(),
            max_calm_queue_length: 2,
            required_calm_epochs: 1,
        };
        monitor.enable_scale_down(1000, condition);
        assert_eq!(monitor.next_check_time(), Some(1064));
        assert_eq!(monitor.check_for_hint(1063, Some(0), 3), None);
        assert_eq!(monitor.check_for_hint(1064, None, 0), None, "3 waited in this epoch");
        monitor.enable_scale_up(1064, ScaleUpCondition { epoch_length: LoadCheckInterval::power_of_two(4).unwrap() });
        assert_eq!(monitor.next_check_time(), Some(1080));
        monitor.disable_hint(LoadHint::ScaleUp);
        assert_eq!(monitor.check_for_hint(1128, Some(0), 2), Some(LoadHint::ScaleDown));
        monitor.rearm_hints();
        monitor.disable_hint(LoadHint::ScaleDown);
        assert_eq!((monitor.next_check_time(), monitor.check_for_hint(2000, Some(0), 0)), (None, None));
        assert_eq!(
            (LoadCheckInterval::power_of_two(0), LoadCheckInterval::power_of_two(64)),
            (Some(epoch_length(1)), None)
        );
    }

    #[test]
    fn missed_checks_are_not_repeated() {
        let mut monitor = create_monitor(10, 1000, 0, 1);
        assert_eq!(monitor.check_for_hint(55, Some(0), 1), Some(LoadHint::ScaleUp));
        assert_eq!(monitor.next_check_time(), Some(60));
    }

    fn expected_hint(is_hint_in_flight: bool, needs_more: bool, needs_fewer: bool) -> Option<LoadHint> {
        match (is_hint_in_flight, needs_more, needs_fewer) {
            (false, true, _) => Some(LoadHint::ScaleUp),
            (false, false, true) => Some(LoadHint::ScaleDown),
            _ => None,
        }
    }

    proptest! {
        #[test]
        fn hints_match_the_conditions_evaluated_on_the_queue_history(
            (up_epoch_length, down_epoch_length) in (1u64..5, 1u64..9),
            max_calm_queue_length in 0u64..3,
            required_calm_epochs in 1u32..4,
            steps in prop::collection::vec((0usize..3, 0usize..3, any::<bool>()), 1..300),
        ) {
            let mut monitor =
                create_monitor(up_epoch_length, down_epoch_length, max_calm_queue_length, required_calm_epochs);
            let mut queue: VecDeque<(u64, usize)> = VecDeque::new();
            let mut queue_at_previous_check: VecDeque<(u64, usize)> = VecDeque::new();
            let (mut is_hint_in_flight, mut calm_epoch_count, mut epoch_peak) = (false, 0, 0);
            for (now, (arrivals, departures, rearms)) in (1u64..).zip(steps) {
                // Requests that arrive at the time of a check are taken to arrive just after it.
                queue.drain(..departures.min(queue.len()));
                let needs_more_cores =
                    now % up_epoch_length == 0 && queue.iter().any(|request| queue_at_previous_check.contains(request));
                if now % up_epoch_length == 0 {
                    queue_at_previous_check.clone_from(&queue);
                }
                let mut needs_fewer_cores = false;
                if now % down_epoch_length == 0 {
                    calm_epoch_count = if epoch_peak <= max_calm_queue_length { calm_epoch_count + 1 } else { 0 };
                    needs_fewer_cores = calm_epoch_count >= required_calm_epochs;
                }
                let expected_load_hint = expected_hint(is_hint_in_flight, needs_more_cores, needs_fewer_cores);
                let oldest_arrival_time = queue.front().map(|(arrival_time, _)| *arrival_time);
                prop_assert_eq!(monitor.check_for_hint(now, oldest_arrival_time, epoch_peak), expected_load_hint);
                if expected_load_hint.is_some() {
                    (is_hint_in_flight, calm_epoch_count) = (true, 0);
                }
                if now % down_epoch_length == 0 {
                    epoch_peak = queue.len() as u64;
                }
                prop_assert_eq!(monitor.is_hint_in_flight(), is_hint_in_flight);
                if rearms {
                    prop_assert_eq!(monitor.rearm_hints(), is_hint_in_flight);
                    is_hint_in_flight = false;
                }
                queue.extend((0..arrivals).map(|index| (now + 1, index)));
                epoch_peak = epoch_peak.max(queue.len() as u64);
            }
        }
    }
}
