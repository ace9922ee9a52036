//! Tests of the rate limits for reports and registrations.

use super::*;

/// Asserts that a flood of reports from one agent changes only a counter, and does not affect other agents.
#[test]
fn excess_reports_are_rejected_and_counted() {
    let mut harness = ControllerHarness::new(&["active", "active"], "crossrss");
    let sessions = harness.connect_and_report_loads(&[&[0.5; 4], &[0.5; 4]]);
    let loads_before = harness.server_status("s0", now_at_ms(100)).core_loads;
    let accepted_reports: Vec<bool> = (3..1003)
        .map(|sequence| {
            harness
                .controller
                .record_report(
                    &sessions[0],
                    Ok(report_with_initial_rss(sequence, now_at_ms(100), &[50_000_000; 4])),
                    now_at_ms(100),
                )
                .is_ok()
        })
        .collect();
    assert!(accepted_reports.iter().filter(|is_accepted| **is_accepted).count() < 64);
    assert!(harness.controller.status(now_at_ms(100)).rejected_reports["too_often"] > 900);
    assert_eq!(harness.server_status("s0", now_at_ms(100)).core_loads, loads_before, "its clock stood still");
    assert!(
        harness
            .controller
            .record_report(
                &sessions[1],
                Ok(report_with_initial_rss(3, now_at_ms(200), &[100_000_000; 4])),
                now_at_ms(200)
            )
            .is_ok()
    );
    assert!(
        harness
            .controller
            .record_report(
                &sessions[0],
                Ok(report_with_initial_rss(2000, now_at_ms(300), &[100_000_000; 4])),
                now_at_ms(300)
            )
            .is_ok()
    );
}

#[test]
fn registrations_are_rate_limited_per_name() {
    let mut harness = ControllerHarness::new(&["active"], "crossrss");
    let mut try_register = |ms: u64| {
        let session = harness.controller.register_agent("s0", "test", now_at_ms(ms))?;
        harness.controller.end_session(&session);
        Ok::<_, MessageRejection>(())
    };
    assert!((0..30).all(|_| try_register(0).is_ok()));
    assert_eq!(try_register(0).unwrap_err().counter_name(), "too_many_registrations");
    assert!(try_register(1000).is_ok());
    assert!(try_register(1000).is_err());
    let mut try_register_balancer = |n: usize| {
        let session = harness.controller.register_load_balancer(&format!("lb{n}"), now_at_ms(0))?;
        harness.controller.load_balancers.end_session(session, now_at_ms(0));
        Ok::<_, MessageRejection>(())
    };
    assert!((0..30).all(|_| try_register_balancer(0).is_ok()));
    assert_eq!(try_register_balancer(0).unwrap_err().counter_name(), "too_many_registrations");
    assert!((1..1024).all(|n| try_register_balancer(n).is_ok()));
    assert_eq!(try_register_balancer(1024).unwrap_err().counter_name(), "too_many_load_balancers");
}
