use proptest::prelude::*;

use super::*;

fn build_thresholds(rise: u32, fall: u32) -> HealthVerdictThresholds {
    HealthVerdictThresholds::new(rise, fall).unwrap()
}

fn verdict_after_each_result(results: &[bool], thresholds: HealthVerdictThresholds) -> Vec<Option<HealthVerdict>> {
    let mut tracker = ServerHealthTracker::default();
    let verdict_after_result = |has_passed: &bool| {
        tracker.record_check_result(*has_passed, thresholds);
        tracker.verdict()
    };
    results.iter().map(verdict_after_result).collect()
}

#[test]
fn verdict_changes_after_the_fall_and_rise_thresholds() {
    use HealthVerdict::{Down, Up};
    let results = [true, false, false, true, false, false, false, true, false, true, true, false];
    let expected_verdicts = [Up, Up, Up, Up, Up, Up, Down, Down, Down, Down, Up, Up];
    assert_eq!(verdict_after_each_result(&results, build_thresholds(2, 3)), expected_verdicts.map(Some));
}

#[test]
fn server_without_verdict_goes_down_after_the_fall_threshold() {
    let no_verdict = None;
    assert_eq!(
        verdict_after_each_result(&[false, false, false], build_thresholds(2, 3)),
        [no_verdict, no_verdict, Some(HealthVerdict::Down)]
    );
    assert_eq!(
        verdict_after_each_result(&[false, true], build_thresholds(2, 3)),
        [no_verdict, Some(HealthVerdict::Up)]
    );
}

#[test]
fn status_range_includes_its_bounds() {
    let codes = HttpStatusRange::new(200, 204).unwrap();
    assert!(codes.contains(200) && codes.contains(204) && !codes.contains(205) && !codes.contains(199));
    assert_eq!(codes.to_string(), "200-204");
    assert_eq!(HttpStatusRange::new(204, 204).unwrap().to_string(), "204");
    assert_eq!(
        (HttpStatusRange::new(204, 200), HttpStatusRange::new(99, 200), HttpStatusRange::new(200, 600)),
        (None, None, None)
    );
}

fn observer_verdicts(verdicts: &[(u8, HealthVerdict)]) -> BTreeMap<u8, HealthVerdict> {
    verdicts.iter().copied().collect()
}

fn majority_verdicts_after_previous_verdict(
    observers: &[BTreeMap<u8, HealthVerdict>],
    previous_verdict: HealthVerdict,
) -> Vec<(u8, HealthVerdict)> {
    let observers: Vec<_> = observers.iter().collect();
    majority_verdicts(&observers, |_| previous_verdict).into_iter().collect()
}

#[test]
fn observer_majority_decides_and_a_tie_keeps_the_verdict() {
    use HealthVerdict::{Down, Up};
    let a = observer_verdicts(&[(1, Up), (2, Down)]);
    let b = observer_verdicts(&[(1, Up), (2, Up)]);
    for previous_verdict in [Up, Down] {
        assert_eq!(
            majority_verdicts_after_previous_verdict(&[a.clone(), b.clone()], previous_verdict),
            [(1, Up), (2, previous_verdict)]
        );
        assert_eq!(
            majority_verdicts_after_previous_verdict(&[a.clone(), a.clone(), b.clone()], previous_verdict),
            [(1, Up), (2, Down)]
        );
    }
    assert_eq!(majority_verdicts_after_previous_verdict(&[], Up), []);
}

#[test]
fn observer_that_finds_every_server_down_is_ignored() {
    use HealthVerdict::{Down, Up};
    let cut_off_observer = observer_verdicts(&[(1, Down), (2, Down), (3, Down)]);
    let working_observer = observer_verdicts(&[(1, Up), (2, Down), (3, Up)]);
    assert_eq!(
        majority_verdicts_after_previous_verdict(
            &[cut_off_observer.clone(), cut_off_observer.clone(), working_observer],
            Up
        ),
        [(1, Up), (2, Down), (3, Up)]
    );
    assert_eq!(
        majority_verdicts_after_previous_verdict(&[cut_off_observer.clone(), cut_off_observer], Up),
        [(1, Down), (2, Down), (3, Down)]
    );
}

proptest! {
    /// Compares each verdict with its definition, which is evaluated from the newest result backwards.
    #[test]
    fn verdict_changes_only_after_enough_consecutive_results(
        results in prop::collection::vec(any::<bool>(), 1..60), rise in 1u32..6, fall in 1u32..6,
    ) {
        let actual_verdicts = verdict_after_each_result(&results, build_thresholds(rise, fall));
        for result_index in 0..results.len() {
            let previous_verdict = if result_index == 0 { None } else { actual_verdicts[result_index - 1] };
            let newest_first = results[..=result_index].iter().rev();
            let consecutive_equal_result_count =
                newest_first.take_while(|result| **result == results[result_index]).count() as u32;
            let expected_verdict = match (previous_verdict, results[result_index]) {
                (None, true) => Some(HealthVerdict::Up),
                (None | Some(HealthVerdict::Up), false) if consecutive_equal_result_count >= fall =>
                    Some(HealthVerdict::Down),
                (Some(HealthVerdict::Down), true) if consecutive_equal_result_count >= rise => Some(HealthVerdict::Up),
                _ => previous_verdict,
            };
            prop_assert_eq!(actual_verdicts[result_index], expected_verdict, "result {}", result_index);
        }
    }

    #[test]
    fn fewer_results_than_the_threshold_change_no_verdict(run_lengths in prop::collection::vec(1u32..3, 1..20)) {
        let mut tracker = ServerHealthTracker::default();
        let thresholds = build_thresholds(3, 3);
        tracker.record_check_result(true, thresholds);
        let mut has_passed = false;
        for run in run_lengths {
            for _ in 0..run {
                prop_assert!(!tracker.record_check_result(has_passed, thresholds));
            }
            has_passed = !has_passed;
        }
        prop_assert_eq!(tracker.verdict(), Some(HealthVerdict::Up));
    }

    #[test]
    fn jittered_interval_does_not_exceed_the_interval(
        fraction in 0.0..=1.0f64,
        draw in 0.0..=1.0f64,
        interval_ms in 1u64..100_000,
    ) {
        let interval = Duration::from_millis(interval_ms);
        let jittered_interval = HealthCheckJitter::new(fraction).unwrap().jittered_interval(interval, draw);
        prop_assert!(jittered_interval <= interval && jittered_interval >= interval.mul_f64(0.0999), "{:?}",
            jittered_interval);
    }

    /// A cut-off observer finds every server down, while another observer finds a server up.
    #[test]
    fn observer_cut_off_from_all_servers_changes_no_verdict(
        up_states_by_observer in prop::collection::vec(prop::collection::btree_map(0u8..8, any::<bool>(), 1..8), 1..5),
        was_down_before: bool,
    ) {
        let to_verdict = |up: bool| if up { HealthVerdict::Up } else { HealthVerdict::Down };
        let mut observers: Vec<BTreeMap<u8, HealthVerdict>> =
            up_states_by_observer.iter().map(|up_states| {
                up_states.iter().map(|(target, up)| (*target, to_verdict(*up))).collect()
            }).collect();
        prop_assume!(observers.iter().any(|verdict_by_target| {
            verdict_by_target.values().any(|verdict| *verdict == HealthVerdict::Up)
        }));
        let expected_verdicts = majority_verdicts_after_previous_verdict(&observers, to_verdict(!was_down_before));
        observers.push((0..8).map(|target| (target, HealthVerdict::Down)).collect());
        let verdicts = majority_verdicts_after_previous_verdict(&observers, to_verdict(!was_down_before));
        prop_assert_eq!(verdicts, expected_verdicts);
    }
}

#[test]
fn repeated_local_faults_withdraw_the_verdict() {
    let thresholds = HealthVerdictThresholds::new(1, 3).unwrap();
    let mut tracker = ServerHealthTracker::default();
    assert!(tracker.record_check_result(true, thresholds));
    assert!(!tracker.record_check_result(false, thresholds));
    assert!(!tracker.record_local_fault(thresholds));
    assert!(!tracker.record_local_fault(thresholds));
    assert_eq!(tracker.verdict(), Some(HealthVerdict::Up));
    assert!(tracker.record_local_fault(thresholds), "it has not seen the server for long");
    assert_eq!(tracker.verdict(), None);
    assert!(!tracker.record_local_fault(thresholds));
    assert!(tracker.record_check_result(true, thresholds));
}
