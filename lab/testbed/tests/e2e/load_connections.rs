//! The load generator over connections: to the paced server, and by HTTP to stock nginx.

use std::time::Duration;

use coreward_testbed::nginx::{LARGE_FILE, WORKER_PATH};
use coreward_testbed::{Testbed, missing_testbed_rights, skip_if};
use serde_json::Value;

use crate::support::eventually;
use crate::support::load::{report, start_load};

fn count(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report}"))
}

#[test]
fn paced_requests_take_their_requested_time() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_direct("tloadtcp")?;
    let server = testbed.start_paced_server(1)?;
    let load = "--transport tcp --rate 500 --arrivals fixed --seconds 2 --warm-up 0 --flows 16 --timeout 10";
    let mix = format!("{load} --mix GET=0.5,PUT=0.5 --multiplier 400");
    let report = report(start_load(&testbed, &mix)?)?;
    assert_eq!((count(&report, "requests"), count(&report, "lost")), (999, 0), "{report}");
    let of_class = |index: usize| report["classes"][index]["completed"].as_u64().unwrap();
    // Service times are 975 ns and 1.35 us, multiplied by 400.
    assert_eq!(server.busy_ns()?.iter().sum::<u64>(), (of_class(0) * 390 + of_class(1) * 540) * 1_000, "{report}");
    let workers = report["workers"].as_array().unwrap();
    assert!(workers.iter().all(|worker| worker["server"] == 1), "{report}");
    assert_eq!(workers.len(), 2, "{report}");
    Ok(())
}

#[test]
fn broken_connections_are_counted_and_reopened() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_direct("tloadbroken")?;
    let server = testbed.start_paced_server(1)?;
    let options = "--transport tcp --rate 400 --seconds 12 --warm-up 0 --flows 8 --timeout 1 --service exp:1000";
    let load = start_load(&testbed, options)?;
    // 800 requests of a millisecond are 2 s of the load.
    let is_busy = || server.busy_ns().unwrap().iter().sum::<u64>() > 800_000_000;
    eventually(Duration::from_secs(40), "requests are served", is_busy);
    drop(server);
    std::thread::sleep(Duration::from_millis(1_000));
    let server = testbed.start_paced_server(1)?;
    let report = report(load)?;
    assert_eq!(count(&report, "requests"), count(&report, "completed") + count(&report, "lost"), "{report}");
    // For a second, and until the next worker listened, there was no worker.
    assert!(count(&report, "lost") > 100 && count(&report, "lost") < count(&report, "requests") / 2, "{report}");
    assert!(count(&report, "refused") > 0, "{report}");
    // The server served requests again after the pause.
    assert!(server.busy_ns()?.iter().sum::<u64>() > 0, "{report}");
    Ok(())
}

#[test]
fn http_is_answered_by_nginx() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_direct("tloadhttp")?;
    let nginx = testbed.start_nginx(1)?;
    let load = |path: &str, rate: u32| {
        start_load(
            &testbed,
            &format!("--transport http --path {path} --rate {rate} --seconds 2 --warm-up 0 --flows 8 --timeout 10"),
        )
    };
    let who = report(load(WORKER_PATH, 500)?)?;
    let wrong = |report: &Value| ["lost", "failed", "broken_connections", "malformed"].map(|name| count(report, name));
    assert_eq!(wrong(&who), [0; 4], "{who}");
    assert!((850..1_150).contains(&count(&who, "requests")), "{who}");
    // Responses of a megabyte need many reads each.
    let large = report(load(LARGE_FILE, 20)?)?;
    assert_eq!(wrong(&large), [0; 4], "{large}");
    let missing = report(load("/missing", 100)?)?;
    assert_eq!(wrong(&missing), [0, count(&missing, "requests"), 0, 0], "{missing}");
    // A reload ends every old worker's connections; the generator opens new ones to the new workers.
    let running = load(WORKER_PATH, 200)?;
    std::thread::sleep(Duration::from_millis(700));
    nginx.reload(&testbed, 1, 2)?;
    let reloaded = report(running)?;
    assert_eq!(count(&reloaded, "requests"), count(&reloaded, "completed") + count(&reloaded, "lost"), "{reloaded}");
    assert!(count(&reloaded, "completed") * 10 > count(&reloaded, "requests") * 9, "{reloaded}");
    Ok(())
}

#[test]
fn waiting_for_a_connection_is_part_of_the_latency() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_direct("tloadwait")?;
    let _nginx = testbed.start_nginx(1)?;
    // With one connection and answers that take minutes (1 MB at 4 kB/s), the first request is outstanding, and the
    // other requests wait for it.
    let options =
        "--transport http --path /slow --rate 50 --arrivals fixed --seconds 1 --warm-up 0 --flows 1 --timeout 1";
    let report = report(start_load(&testbed, options)?)?;
    assert_eq!((count(&report, "requests"), count(&report, "lost")), (49, 49), "{report}");
    Ok(())
}
