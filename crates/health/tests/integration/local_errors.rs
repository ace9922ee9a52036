//! Test that a machine without free file descriptors reports no server as down, because it cannot check any.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coreward_health::checker::{CheckedService, HealthChecker, TargetHealthCheckResult};
use coreward_model::health::{
    HealthCheck, HealthCheckJitter, HealthProbe, HealthVerdict, HealthVerdictThresholds, ProbeAddress,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

fn build_checked_service(vip: SocketAddr) -> CheckedService<u32> {
    let health_check = HealthCheck {
        probe: HealthProbe::Tcp,
        probe_address: ProbeAddress::Server,
        probe_port: None,
        interval: Duration::from_millis(20),
        timeout: Duration::from_secs(5),
        thresholds: HealthVerdictThresholds::new(1, 3).expect("not 0"),
        jitter: HealthCheckJitter::new(0.0).expect("from 0 to 1"),
    };
    CheckedService {
        health_check: Arc::new(health_check),
        vip,
        server_addresses_by_key: vec![(1, Ipv4Addr::LOCALHOST.into())],
        nat_table: None,
    }
}

fn wait_for_check_result(
    checker: &HealthChecker<u32>,
    description: &str,
    condition: impl Fn(&TargetHealthCheckResult) -> bool,
) -> TargetHealthCheckResult {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let check_results = checker.check_results();
        if let Some((_, result)) = check_results.first().filter(|(_, found)| condition(found)) {
            return result.clone();
        }
        assert!(Instant::now() < deadline, "{description}: {check_results:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs in a child process, because the test lowers its process's limit of open files.
#[test]
fn exhausted_file_descriptors_mark_no_server_down() {
    const CHILD_ENV_VARIABLE: &str = "COREWARD_TEST_ALONE";
    if std::env::var_os(CHILD_ENV_VARIABLE).is_none() {
        let test_arguments = ["--exact", "local_errors::exhausted_file_descriptors_mark_no_server_down"];
        let output = Command::new(std::env::current_exe().unwrap())
            .args(test_arguments)
            .env(CHILD_ENV_VARIABLE, "1")
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
        return;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let server_address = listener.local_addr().unwrap();
    let checker = HealthChecker::start().unwrap();
    checker.set_checked_services(vec![build_checked_service(server_address)]);
    wait_for_check_result(&checker, "a server that listens is up", |result| {
        result.verdict() == Some(HealthVerdict::Up)
    });

    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 3, hard).unwrap();
    let unknown_result = wait_for_check_result(&checker, "checks that cannot be made withdraw the verdict", |result| {
        result.verdict() != Some(HealthVerdict::Up)
    });
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    assert_eq!((unknown_result.verdict(), unknown_result.failure_count), (None, 0), "{unknown_result:?}");
    assert!(unknown_result.last_error.contains("Too many open files"), "{unknown_result:?}");

    wait_for_check_result(&checker, "with files it is up again", |result| result.verdict() == Some(HealthVerdict::Up));
    drop(listener);
    let down_result =
        wait_for_check_result(&checker, "no process listens", |result| result.verdict() == Some(HealthVerdict::Down));
    assert!(down_result.failure_count >= 3 && down_result.last_error == "connection refused", "{down_result:?}");
}
