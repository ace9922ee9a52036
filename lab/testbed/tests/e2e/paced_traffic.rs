//! Load generator and paced server without a load balancer between them: due requests are served in their service time,
//! and broken connections are counted.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use coreward_model::arrivals::{Arrival, ArrivalLog, Workload};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::lab_command;
use coreward_testbed::load::LoadReport;
use coreward_testbed::{Process, Testbed, missing_testbed_rights, skip_if};

use crate::support::eventually;

fn start_load(testbed: &Testbed, log: &ArrivalLog) -> anyhow::Result<Process> {
    let path = testbed.directory().join("arrivals.txt");
    fs::write(&path, log.to_string())?;
    let mut command = Command::new(lab_command()?);
    command.args(["testbed", "load", "--vip", &SERVICE_ADDRESS.to_string(), "--log"]).arg(path);
    command.args(["--first-address", &testbed.client_address(0).to_string()]).stdout(Stdio::piped());
    testbed.spawn(testbed.client(), command)
}

fn report(load: Process) -> anyhow::Result<LoadReport> {
    load.read_json(Duration::from_secs(30))
}

#[test]
fn every_request_is_served_by_the_clock() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_direct("tpaced")?;
    let server = testbed.start_paced_server(1)?;
    let workload = Workload { duration_us: 2_000_000, core_count: 2, ..Workload::default() };
    let log = workload.generate(1);
    let requests: u64 = log.arrivals.iter().map(|arrival| u64::from(arrival.request_count)).sum();
    let work_us: u64 = log.arrivals.iter().map(Arrival::work_us).sum();

    let report = report(start_load(&testbed, &log)?)?;
    assert_eq!((report.opened, report.completed), (log.arrivals.len() as u64, log.arrivals.len() as u64));
    assert_eq!((report.broken.total(), report.answered), (0, requests));
    assert_eq!(report.placed.iter().map(|placed| placed.connections).sum::<u64>(), report.opened);
    // Service times are exact to the nanosecond, however late the machine wakes the workers.
    assert_eq!(server.busy_ns()?.iter().sum::<u64>(), work_us * 1_000);
    assert!(report.latency_us.p50 >= u64::from(workload.service_us), "{:?}", report.latency_us);
    Ok(())
}

#[test]
fn broken_connections_are_counted_by_kind() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_direct("tbroken")?;
    let log = |request_count: u32| ArrivalLog {
        seed: 0,
        duration_us: 10_000_000,
        source_address_count: 1,
        arrivals: (0..10)
            .map(|i| Arrival {
                start_us: 0,
                source_address_index: 0,
                source_port: 20_000 + i,
                request_count,
                interval_us: 100_000,
                service_us: 1_000,
            })
            .collect(),
    };
    // No process listens.
    let refused = report(start_load(&testbed, &log(1))?)?;
    assert_eq!((refused.opened, refused.completed, refused.broken.refused), (10, 0, 10), "{refused:?}");

    // The server dies with open connections, which the kernel resets or ends.
    let server = testbed.start_paced_server(1)?;
    let load = start_load(&testbed, &log(90))?;
    // 100 requests of a millisecond are served, 10 on each connection.
    let is_busy = || server.busy_ns().unwrap().iter().sum::<u64>() >= 100_000_000;
    eventually(Duration::from_secs(30), "requests are served", is_busy);
    drop(server);
    let ended = report(load)?;
    assert_eq!((ended.opened, ended.completed), (10, 0));
    assert_eq!(ended.broken.reset + ended.broken.closed_early, 10, "{ended:?}");
    Ok(())
}

#[test]
fn invalid_arrival_log_is_rejected() -> anyhow::Result<()> {
    let mut command = Command::new(lab_command()?);
    command.args(["testbed", "load", "--vip", "10.200.0.1:80", "--first-address", "10.1.0.7", "--log", "/dev/null"]);
    let output = command.output()?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("line 1") && error.contains("coreward-arrivals 1"), "{error}");
    Ok(())
}
