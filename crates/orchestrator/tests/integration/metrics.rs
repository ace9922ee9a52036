//! Tests a daemon without workers, whose metrics must show the waiting requests.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use coreward_config::TomlSource;
use coreward_orchestrator::config::OrchestratorConfig;
use coreward_orchestrator::daemon::OrchestratorDaemon;
use coreward_orchestrator::dispatch_engine::CoreRequestCounters;
use coreward_orchestrator::intake::RequestIntake;
use coreward_orchestrator::report::{OrchestratorStatus, SharedOrchestratorStatus};

use crate::engine::CONDITION_TIMEOUT;

fn scrape_metrics(address: SocketAddr) -> String {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut response_text = String::new();
    connection.read_to_string(&mut response_text).unwrap();
    response_text
}

#[test]
fn metrics_show_waiting_requests() {
    let directory = tempfile::tempdir().unwrap();
    let service_address = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let metrics_address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let memory_path = directory.path().join("cores").display().to_string();
    let config_text = format!(
        "memory = \"{memory_path}\"\ncores = 2\nmetrics = \"{metrics_address}\"\n\
         [[service]]\nlisten = \"{service_address}\"\nmatch = {{ value = 1 }}\npriority = 1\n"
    );
    let config = OrchestratorConfig::parse(&TomlSource::from_text("orchestrate.toml", &config_text)).unwrap();
    let mut daemon = OrchestratorDaemon::start(&config, RequestIntake::default()).unwrap();
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    for request in [&[1, 2][..], &[9], &[1]] {
        client.send_to(request, service_address).unwrap();
    }
    let stop_flag = AtomicBool::new(false);
    let served_metrics = std::thread::scope(|scope| {
        scope.spawn(|| daemon.run_until_stopped(&stop_flag).unwrap());
        let start_time = Instant::now();
        let mut text = scrape_metrics(metrics_address);
        while !text.contains("event=\"unclassified\"} 1") && start_time.elapsed() < CONDITION_TIMEOUT {
            text = scrape_metrics(metrics_address);
        }
        stop_flag.store(true, Relaxed);
        text
    });
    for line in [
        "coreward_orchestrate_requests_total{service=\"0\",outcome=\"received\"} 2",
        "coreward_orchestrate_requests_total{service=\"0\",outcome=\"lost\"} 0",
        "coreward_orchestrate_waiting_requests{service=\"0\"} 2",
        "coreward_orchestrate_outstanding_requests{service=\"0\"} 0",
        "coreward_orchestrate_workers 0",
    ] {
        assert!(served_metrics.contains(line), "{line} in {served_metrics}");
    }
}

#[test]
fn status_is_collected_only_on_request() {
    let status_with_workers = |workers| OrchestratorStatus {
        service_statuses: Vec::new(),
        core_counters: CoreRequestCounters::default(),
        attached_worker_count: workers,
        intake_status: RequestIntake::default().status(),
        unclassified_datagrams: 0,
        unsent_responses: 0,
    };
    let (shared_status, mut status_count) = (SharedOrchestratorStatus::new(status_with_workers(0)), 0);
    let mut publish_status = || {
        shared_status.publish_if_requested(|| {
            status_count += 1;
            status_with_workers(status_count)
        })
    };
    publish_status();
    let requested_status = std::thread::scope(|scope| {
        let request = scope.spawn(|| shared_status.request_status());
        while !request.is_finished() {
            publish_status();
            std::thread::yield_now();
        }
        request.join().unwrap()
    });
    publish_status();
    assert_eq!((requested_status.attached_worker_count, status_count), (1, 1));
}
