//! Test of the latencies that the load generator measures, which start at the time at which each request was due.

use coreward_testbed::{Testbed, find_missing_testbed_rights, skip_if};

use crate::support::load::{start_load_generator, wait_for_load_report};

#[test]
fn latency_is_measured_from_the_due_time() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tkvdue")?;
    let options = ["--workers", "1", "--paced", "--service-us", "GET=2000", "--receive-buffer", "16000000"];
    let server = testbed.start_key_value_server(1, &options)?;
    // One worker gets a request every millisecond, and each takes two milliseconds. Request i is due at i and done at 2
    // i (D/D/1 at twice its capacity). So latencies are spread evenly from 2 ms to 2 s. A generator that waited for
    // answers would measure 2 ms.
    let load_options = "--rate 1000 --arrivals fixed --seconds 2 --warm-up 0 --timeout 20 --mix GET=1";
    let report = wait_for_load_report(start_load_generator(&testbed, load_options)?)?;
    assert_eq!((report["requests"].as_u64(), report["lost"].as_u64()), (Some(1999), Some(0)), "{report}");
    for (quantile, expected_ms) in [("p50", 1_000.0), ("p90", 1_800.0), ("p99", 1_980.0), ("max", 2_000.0)] {
        let measured_latency_ms = report["latency_us"][quantile].as_f64().unwrap() / 1e3;
        // Allow 300 ms more for a machine that is busy with other work, and less than 2 us per request for rounding.
        assert!(
            (expected_ms - 5.0..expected_ms + 300.0).contains(&measured_latency_ms),
            "{quantile}: {measured_latency_ms} ms: {report}"
        );
    }
    // Only requests due in the first second are completed within the measured time, which is 1000 of 2000.
    let completed_rps = report["completed_rps"].as_f64().unwrap();
    assert!((450.0..=505.0).contains(&completed_rps), "{completed_rps}");
    assert_eq!(server.read_counters()?[0].busy_ns, 1_999 * 2_000_000);
    Ok(())
}
