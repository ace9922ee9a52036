//! The daemon in a thread: requests without workers wait, and its metrics show them.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use coreward_config::Source;
use coreward_orchestrator::config::Config;
use coreward_orchestrator::daemon::Daemon;
use coreward_orchestrator::engine::CoreCounters;
use coreward_orchestrator::intake::RequestIntake;
use coreward_orchestrator::report::{OrchestratorStatus, SharedStatus};

use crate::engine::TIMEOUT;

fn scrape(address: SocketAddr) -> String {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    connection.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn metrics_show_requests_that_wait() {
    let directory = tempfile::tempdir().unwrap();
    let listen = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let memory = directory.path().join("cores").display().to_string();
    let text = format!(
        "memory = \"{memory}\"\ncores = 2\nmetrics = \"{metrics}\"\n\
         [[service]]\nlisten = \"{listen}\"\nmatch = {{ value = 1 }}\npriority = 1\n"
    );
    let config = Config::parse(&Source::from_text("orchestrate.toml", &text)).unwrap();
    let mut daemon = Daemon::start(&config, RequestIntake::default()).unwrap();
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    for request in [&[1, 2][..], &[9], &[1]] {
        client.send_to(request, listen).unwrap();
    }
    let stop = AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        scope.spawn(|| daemon.run(&stop).unwrap());
        let started = Instant::now();
        let mut text = scrape(metrics);
        while !text.contains("event=\"unclassified\"} 1") && started.elapsed() < TIMEOUT {
            text = scrape(metrics);
        }
        stop.store(true, Relaxed);
        text
    });
    for line in [
        "coreward_orchestrate_requests_total{service=\"0\",outcome=\"received\"} 2",
        "coreward_orchestrate_requests_total{service=\"0\",outcome=\"lost\"} 0",
        "coreward_orchestrate_waiting_requests{service=\"0\"} 2",
        "coreward_orchestrate_outstanding_requests{service=\"0\"} 0",
        "coreward_orchestrate_workers 0",
    ] {
        assert!(found.contains(line), "{line} in {found}");
    }
}

#[test]
fn report_is_made_on_request_only() {
    let report = |workers| OrchestratorStatus {
        services: Vec::new(),
        cores: CoreCounters::default(),
        workers,
        intake: RequestIntake::default().status(),
        unclassified: 0,
        unsent: 0,
    };
    let (shared, mut made) = (SharedStatus::new(report(0)), 0);
    let mut publish = || {
        shared.publish(|| {
            made += 1;
            report(made)
        })
    };
    publish();
    let requested = std::thread::scope(|scope| {
        let request = scope.spawn(|| shared.request());
        while !request.is_finished() {
            publish();
            std::thread::yield_now();
        }
        request.join().unwrap()
    });
    publish();
    assert_eq!((requested.workers, made), (1, 1));
}
