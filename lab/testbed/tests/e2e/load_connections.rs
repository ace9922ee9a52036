//! The load generator over connections, to the paced server and by HTTP to stock nginx.

use std::time::Duration;

use coreward_testbed::nginx::{LARGE_FILE_PATH, WORKER_IDENTITY_PATH};
use coreward_testbed::{Testbed, find_missing_testbed_rights, skip_if};
use serde_json::Value;

use crate::support::assert_eventually;
use crate::support::load::{start_load_generator, wait_for_load_report};

fn read_report_count(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report}"))
}

#[test]
fn requests_to_a_paced_server_take_their_service_times() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tloadtcp")?;
    let server = testbed.start_paced_server(1)?;
    let load_options = "--transport tcp --rate 500 --arrivals fixed --seconds 2 --warm-up 0 --flows 16 --timeout 10";
    let load_options_with_mix = format!("{load_options} --mix GET=0.5,PUT=0.5 --multiplier 400");
    let report = wait_for_load_report(start_load_generator(&testbed, &load_options_with_mix)?)?;
    assert_eq!((read_report_count(&report, "requests"), read_report_count(&report, "lost")), (999, 0), "{report}");
    let completed_of_class = |index: usize| report["classes"][index]["completed"].as_u64().unwrap();
    // Service times are 975 ns and 1.35 us, multiplied by 400.
    assert_eq!(
        server.read_core_busy_ns()?.iter().sum::<u64>(),
        (completed_of_class(0) * 390 + completed_of_class(1) * 540) * 1_000,
        "{report}"
    );
    let report_workers = report["workers"].as_array().unwrap();
    assert!(report_workers.iter().all(|worker| worker["server"] == 1), "{report}");
    assert_eq!(report_workers.len(), 2, "{report}");
    Ok(())
}

#[test]
fn broken_connections_are_counted_and_reopened() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tloadbroken")?;
    let server = testbed.start_paced_server(1)?;
    let options = "--transport tcp --rate 400 --seconds 12 --warm-up 0 --flows 8 --timeout 1 --service exp:1000";
    let load_process = start_load_generator(&testbed, options)?;
    // 800 requests of a millisecond are 2 s of the load.
    let has_worked_long_enough = || server.read_core_busy_ns().unwrap().iter().sum::<u64>() > 800_000_000;
    assert_eventually(Duration::from_secs(40), "requests are served", has_worked_long_enough);
    drop(server);
    std::thread::sleep(Duration::from_millis(1_000));
    let server = testbed.start_paced_server(1)?;
    let report = wait_for_load_report(load_process)?;
    assert_eq!(
        read_report_count(&report, "requests"),
        read_report_count(&report, "completed") + read_report_count(&report, "lost"),
        "{report}"
    );
    // For a second, and until the next worker listened, there was no worker.
    assert!(
        read_report_count(&report, "lost") > 100
            && read_report_count(&report, "lost") < read_report_count(&report, "requests") / 2,
        "{report}"
    );
    assert!(read_report_count(&report, "refused") > 0, "{report}");
    // The server served requests again after the pause.
    assert!(server.read_core_busy_ns()?.iter().sum::<u64>() > 0, "{report}");
    Ok(())
}

#[test]
fn http_load_is_answered_by_nginx() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tloadhttp")?;
    let nginx = testbed.start_nginx(1)?;
    let start_http_load = |path: &str, rate: u32| {
        start_load_generator(
            &testbed,
            &format!("--transport http --path {path} --rate {rate} --seconds 2 --warm-up 0 --flows 8 --timeout 10"),
        )
    };
    let worker_path_report = wait_for_load_report(start_http_load(WORKER_IDENTITY_PATH, 500)?)?;
    let read_error_counts = |report: &Value| {
        ["lost", "failed", "broken_connections", "malformed"].map(|name| read_report_count(report, name))
    };
    assert_eq!(read_error_counts(&worker_path_report), [0; 4], "{worker_path_report}");
    assert!((850..1_150).contains(&read_report_count(&worker_path_report, "requests")), "{worker_path_report}");
    // Responses of a megabyte need many reads each.
    let large_file_report = wait_for_load_report(start_http_load(LARGE_FILE_PATH, 20)?)?;
    assert_eq!(read_error_counts(&large_file_report), [0; 4], "{large_file_report}");
    let missing_file_report = wait_for_load_report(start_http_load("/missing", 100)?)?;
    assert_eq!(
        read_error_counts(&missing_file_report),
        [0, read_report_count(&missing_file_report, "requests"), 0, 0],
        "{missing_file_report}"
    );
    // A reload ends all connections of old workers, and the generator opens new ones to the new workers.
    let running_load = start_http_load(WORKER_IDENTITY_PATH, 200)?;
    std::thread::sleep(Duration::from_millis(700));
    nginx.reload_configuration(&testbed, 1, 2)?;
    let reload_report = wait_for_load_report(running_load)?;
    assert_eq!(
        read_report_count(&reload_report, "requests"),
        read_report_count(&reload_report, "completed") + read_report_count(&reload_report, "lost"),
        "{reload_report}"
    );
    assert!(
        read_report_count(&reload_report, "completed") * 10 > read_report_count(&reload_report, "requests") * 9,
        "{reload_report}"
    );
    Ok(())
}

#[test]
fn waiting_for_a_free_connection_counts_as_latency() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tloadwait")?;
    let _nginx = testbed.start_nginx(1)?;
    // There is one connection, and answers take minutes (1 MB at 4 kB/s). So the first request stays outstanding, and
    // the others wait for it.
    let options =
        "--transport http --path /slow --rate 50 --arrivals fixed --seconds 1 --warm-up 0 --flows 1 --timeout 1";
    let report = wait_for_load_report(start_load_generator(&testbed, options)?)?;
    assert_eq!((read_report_count(&report, "requests"), read_report_count(&report, "lost")), (49, 49), "{report}");
    Ok(())
}
