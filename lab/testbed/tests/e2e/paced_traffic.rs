//! Load generator and paced server without a load balancer between them. Due requests are served in their service time,
//! and broken connections are counted.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use coreward_model::arrival_log::{ArrivalLog, ConnectionArrival, ConnectionWorkload};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::lab_binary_path;
use coreward_testbed::load::LoadClientReport;
use coreward_testbed::{Testbed, TestbedProcess, find_missing_testbed_rights, skip_if};

use crate::support::assert_eventually;

fn start_load_generator(testbed: &Testbed, log: &ArrivalLog) -> anyhow::Result<TestbedProcess> {
    let arrival_log_path = testbed.directory().join("arrivals.txt");
    fs::write(&arrival_log_path, log.to_string())?;
    let mut command = Command::new(lab_binary_path()?);
    command.args(["testbed", "load", "--vip", &SERVICE_ADDRESS.to_string(), "--log"]).arg(arrival_log_path);
    command.args(["--first-address", &testbed.client_address(0).to_string()]).stdout(Stdio::piped());
    testbed.spawn(testbed.client(), command)
}

fn wait_for_load_report(load_process: TestbedProcess) -> anyhow::Result<LoadClientReport> {
    load_process.wait_for_json(Duration::from_secs(30))
}

#[test]
fn every_request_is_served_for_its_service_time() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tpaced")?;
    let server = testbed.start_paced_server(1)?;
    let workload = ConnectionWorkload { duration_us: 2_000_000, core_count: 2, ..ConnectionWorkload::default() };
    let arrival_log = workload.generate(1);
    let request_count: u64 = arrival_log.arrivals.iter().map(|arrival| u64::from(arrival.request_count)).sum();
    let work_us: u64 = arrival_log.arrivals.iter().map(ConnectionArrival::total_work_us).sum();

    let report = wait_for_load_report(start_load_generator(&testbed, &arrival_log)?)?;
    assert_eq!(
        (report.opened, report.completed),
        (arrival_log.arrivals.len() as u64, arrival_log.arrivals.len() as u64)
    );
    assert_eq!((report.broken.total_count(), report.answered_requests), (0, request_count));
    assert_eq!(
        report.connections_by_core.iter().map(|core_connections| core_connections.connections).sum::<u64>(),
        report.opened
    );
    // Service times are exact to the nanosecond, however late the machine wakes the workers.
    assert_eq!(server.read_core_busy_ns()?.iter().sum::<u64>(), work_us * 1_000);
    assert!(report.latency_us.p50 >= u64::from(workload.service_us), "{:?}", report.latency_us);
    Ok(())
}

#[test]
fn broken_connections_are_counted_by_kind() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tbroken")?;
    let log_with_requests = |request_count: u32| ArrivalLog {
        seed: 0,
        duration_us: 10_000_000,
        source_address_count: 1,
        arrivals: (0..10)
            .map(|i| ConnectionArrival {
                start_us: 0,
                source_address_index: 0,
                source_port: 20_000 + i,
                request_count,
                request_interval_us: 100_000,
                service_us: 1_000,
            })
            .collect(),
    };
    // No process listens.
    let refused_report = wait_for_load_report(start_load_generator(&testbed, &log_with_requests(1))?)?;
    assert_eq!(
        (refused_report.opened, refused_report.completed, refused_report.broken.refused),
        (10, 0, 10),
        "{refused_report:?}"
    );

    // The server dies with open connections, which the kernel resets or ends.
    let server = testbed.start_paced_server(1)?;
    let load_generator = start_load_generator(&testbed, &log_with_requests(90))?;
    // 100 requests of a millisecond are served, 10 on each connection.
    let has_worked_long_enough = || server.read_core_busy_ns().unwrap().iter().sum::<u64>() >= 100_000_000;
    assert_eventually(Duration::from_secs(30), "requests are served", has_worked_long_enough);
    drop(server);
    let reset_report = wait_for_load_report(load_generator)?;
    assert_eq!((reset_report.opened, reset_report.completed), (10, 0));
    assert_eq!(reset_report.broken.reset + reset_report.broken.closed_early, 10, "{reset_report:?}");
    Ok(())
}

#[test]
fn invalid_arrival_log_is_rejected() -> anyhow::Result<()> {
    let mut command = Command::new(lab_binary_path()?);
    command.args(["testbed", "load", "--vip", "10.200.0.1:80", "--first-address", "10.1.0.7", "--log", "/dev/null"]);
    let output = command.output()?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("line 1") && error.contains("coreward-arrivals 1"), "{error}");
    Ok(())
}
