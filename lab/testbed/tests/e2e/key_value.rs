//! Key-value server and load generator without a load balancer between them. The server answers every request, in its
//! service time if it is paced, and the generator counts requests without an answer.

use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use coreward_load::key_value::{KeyValueRequest, KeyValueResponseStatus, MAX_DATAGRAM_BYTES, key_name, parse_response};
use coreward_testbed::DEFAULT_WAIT_TIMEOUT;
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::lab_binary_path;
use coreward_testbed::key_value::handle::KeyValueServer;
use coreward_testbed::{Testbed, find_missing_testbed_rights, skip_if};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::assert_eventually;
use crate::support::load::{start_load_generator, wait_for_load_report};

fn assert_eventually_answered(server: &KeyValueServer, request_count: u64) {
    let count_answered_requests =
        || server.read_counters().unwrap().iter().map(|counters| counters.answered).sum::<u64>();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "requests are answered", || count_answered_requests() >= request_count);
}

/// Client of the key-value server that has at most one outstanding request.
struct KeyValueClient {
    socket: UdpSocket,
    next_request_id: u32,
}

/// Response, as (status, number of the worker, key-value pairs).
type ParsedKeyValueResponse = (u8, u16, Vec<(Vec<u8>, Vec<u8>)>);

impl KeyValueClient {
    fn open() -> anyhow::Result<Self> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(SERVICE_ADDRESS)?;
        socket.set_read_timeout(Some(*DEFAULT_WAIT_TIMEOUT))?;
        Ok(Self { socket, next_request_id: 0 })
    }

    fn request_and_await_response(
        &mut self,
        request_type: &str,
        key: &str,
        value: &str,
    ) -> anyhow::Result<ParsedKeyValueResponse> {
        let id = self.next_request_id;
        self.next_request_id += 1;
        let (key, value) = (key.as_bytes(), value.as_bytes());
        let request =
            KeyValueRequest { request_type: request_type.parse()?, request_id: id, service_ns: 0, key, value };
        let mut datagram = Vec::new();
        request.write_datagram(&mut datagram);
        self.socket.send(&datagram)?;
        let (mut buffer, mut all_pairs, mut part_count) = ([0; MAX_DATAGRAM_BYTES + 1], Vec::new(), 1);
        let mut status_and_worker = (0, 0);
        let mut next_part_index = 0;
        while next_part_index < part_count {
            let length = self.socket.recv(&mut buffer).with_context(|| format!("no answer to {request:?}"))?;
            let (header, pairs) = parse_response(&buffer[..length]).context("a response")?;
            assert_eq!((header.id.get(), header.request_type), (id, request.request_type.as_byte()));
            assert_eq!(header.part_index, next_part_index, "parts come in order on one segment");
            all_pairs.extend(pairs.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())));
            (status_and_worker, part_count) = ((header.status_code, header.worker_index.get()), header.part_count);
            next_part_index += 1;
        }
        Ok((status_and_worker.0, status_and_worker.1, all_pairs))
    }
}

#[test]
fn get_returns_the_value_of_the_last_put() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tkvget")?;
    let assert_put_and_get = |is_store_shared: bool| {
        testbed.client().run_within(|| {
            let mut clients: Vec<KeyValueClient> =
                (0..24).map(|_| KeyValueClient::open()).collect::<anyhow::Result<_>>()?;
            let (_, writer, _) = clients[0].request_and_await_response("PUT", "new", "value")?;
            let mut other_worker_answer_count = 0;
            for client in &mut clients {
                let (status, worker, pairs) = client.request_and_await_response("GET", "new", "")?;
                other_worker_answer_count += usize::from(worker != writer);
                if is_store_shared || worker == writer {
                    assert_eq!(
                        (status, pairs),
                        (KeyValueResponseStatus::Done as u8, vec![(b"new".to_vec(), b"value".to_vec())])
                    );
                } else {
                    assert_eq!(
                        (status, pairs),
                        (KeyValueResponseStatus::NotFound as u8, vec![]),
                        "a store per process"
                    );
                }
                // All stores have equal contents.
                let (status, _, pairs) = client.request_and_await_response("SCAN105", &key_name(5_000), "")?;
                assert_eq!((status, pairs.len()), (KeyValueResponseStatus::Done as u8, 105));
                assert_eq!(pairs[104].0, key_name(5_104).into_bytes());
            }
            // All 24 flows reach the same of four workers only once in 4^23 runs.
            assert!(other_worker_answer_count > 0, "every flow at worker {writer}");
            Ok(())
        })
    };
    let server = testbed.start_key_value_server(1, &[])?;
    assert_eq!(server.worker_pids().len(), 4);
    assert_put_and_get(false)?;
    drop(server);
    let _server = testbed.start_key_value_server(1, &["--threads"])?;
    assert_put_and_get(true)
}

#[test]
fn invalid_request_is_counted_and_not_answered() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tkvbad")?;
    // SCAN47 has no published time, so it is rejected.
    let server = testbed.start_key_value_server(1, &["--paced", "--workers", "1"])?;
    testbed.client().run_within(|| {
        let mut client = KeyValueClient::open()?;
        client.socket.send(b"")?;
        client.socket.send(&[0; 12])?;
        client.socket.send(&[1; 65_000])?;
        let mut request_without_time = Vec::new();
        let request_type = "SCAN47".parse()?;
        KeyValueRequest { request_type, request_id: 99, service_ns: 0, key: b"", value: b"" }
            .write_datagram(&mut request_without_time);
        client.socket.send(&request_without_time)?;
        // The server answers in order, so an answer to an earlier request would come first, with another id.
        client.request_and_await_response("GET", &key_name(1), "")?;
        Ok(())
    })?;
    // Wait, because the worker counts an answer after sending it, so the client may be faster.
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the answer is counted", || {
        server.read_counters().unwrap().iter().map(|worker| worker.answered).sum::<u64>() > 0
    });
    let [counters] = server.read_counters()?[..] else { panic!("one worker") };
    assert_eq!((counters.received, counters.answered, counters.refused), (5, 1, 4), "{counters:?}");
    assert_eq!(counters.busy_ns, 975);
    Ok(())
}

#[test]
fn requests_of_a_dead_worker_are_lost_and_counted() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tkvdead")?;
    // The master keeps the socket open, so the kernel continues to give the dead worker its share.
    let server = testbed.start_key_value_server(1, &["--workers", "2", "--keep-sockets"])?;
    let load_process =
        start_load_generator(&testbed, "--rate 500 --seconds 8 --warm-up 0 --timeout 10 --mix GET=0.5,PUT=0.5")?;
    assert_eventually_answered(&server, 2_000);
    kill(Pid::from_raw(server.worker_pid(0)?.try_into()?), Signal::SIGKILL)?;
    let report = wait_for_load_report(load_process)?;
    let read_report_count = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(read_report_count("requests"), read_report_count("completed") + read_report_count("lost"), "{report}");
    // Half of the flows lose requests for half of the time, but the number of such flows is random.
    assert!(
        read_report_count("lost") > read_report_count("requests") / 20
            && read_report_count("lost") < read_report_count("requests") / 2,
        "{report}"
    );
    let answered_request_count: u64 = server.read_counters()?.iter().map(|counters| counters.answered).sum();
    // The worker may be killed between an answer and its count, or its answer may have arrived too late.
    assert!(answered_request_count.abs_diff(read_report_count("completed")) <= 1, "{answered_request_count}: {report}");
    let sum_over_classes = |name: &str| -> u64 {
        report["classes"].as_array().unwrap().iter().map(|class| class[name].as_u64().unwrap()).sum()
    };
    assert_eq!(
        (sum_over_classes("requests"), sum_over_classes("lost")),
        (read_report_count("requests"), read_report_count("lost"))
    );
    Ok(())
}

#[test]
fn killed_worker_is_restarted() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tkvrestart")?;
    let server = testbed.start_key_value_server(1, &["--workers", "2", "--restart"])?;
    // Compare process ids, because the socket exists before the worker starts.
    let worker_pid_other_than = |old_pid: Option<u32>| {
        let deadline = std::time::Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        loop {
            match server.worker_pid(1) {
                Ok(pid) if old_pid != Some(pid) => return pid,
                _ => assert!(std::time::Instant::now() < deadline, "no worker 1 but {old_pid:?}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let old_worker_pid = worker_pid_other_than(None);
    kill(Pid::from_raw(old_worker_pid.try_into()?), Signal::SIGKILL)?;
    worker_pid_other_than(Some(old_worker_pid));
    std::thread::sleep(Duration::from_millis(100));
    let report = wait_for_load_report(start_load_generator(
        &testbed,
        "--rate 1000 --seconds 1 --warm-up 0 --timeout 10 --measure 100",
    )?)?;
    assert_eq!(report["lost"], 0, "{report}");
    let report_workers = report["workers"].as_array().unwrap();
    assert_eq!(report_workers.len(), 2, "{report}");
    // Programs rely on these names.
    for name in ["offered_rps", "completed_rps", "lost", "latency_us", "classes", "measure", "lateness_us"] {
        assert!(report.get(name).is_some(), "{name}: {report}");
    }
    for name in ["p50", "p90", "p99", "p999", "max"] {
        assert!(report["latency_us"][name].is_f64() && report["measure"]["latency_us"][name].is_f64(), "{report}");
    }
    Ok(())
}

#[test]
fn interrupted_load_generator_reports_its_measurements() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tkvctrlc")?;
    let server = testbed.start_key_value_server(1, &[])?;
    let load_process = start_load_generator(&testbed, "--rate 1000 --seconds 50 --warm-up 0 --timeout 10")?;
    assert_eventually_answered(&server, 1_500);
    load_process.send_signal(Signal::SIGINT)?;
    let report = wait_for_load_report(load_process)?;
    let measured_seconds = report["seconds"].as_f64().unwrap();
    assert!(measured_seconds > 0.5 && measured_seconds < 20.0, "{report}");
    let request_count = report["requests"].as_f64().unwrap();
    // Arrivals are a Poisson process, so 1,500 are expected within six standard deviations.
    assert!((request_count / measured_seconds / 1_000.0 - 1.0).abs() < 0.16, "{report}");
    assert_eq!((report["lost"].as_u64(), &report["completed"]), (Some(0), &report["requests"]), "{report}");
    Ok(())
}

#[test]
fn contradictory_options_are_rejected() -> anyhow::Result<()> {
    let run_for_error_output = |arguments: &str| -> anyhow::Result<String> {
        let output = Command::new(lab_binary_path()?).args(arguments.split(' ')).output()?;
        assert!(!output.status.success(), "{arguments}");
        Ok(String::from_utf8(output.stderr)?)
    };
    assert!(run_for_error_output("load 127.0.0.1:9 --rate 0")?.contains("expected a number above 0"));
    assert!(run_for_error_output("load 127.0.0.1:9 --rate 1 --mix GET=2")?.contains("share of GET: \"2\""));
    assert!(
        run_for_error_output("load 127.0.0.1:9 --rate 1 --mix SCAN5=1 --multiplier 2")?
            .contains("no service time of SCAN5")
    );
    assert!(
        run_for_error_output("load 127.0.0.1:9 --rate 1 --first-port 65500")?
            .contains("ports 65500 to 65563 of 64 flows")
    );
    assert!(
        run_for_error_output("load 127.0.0.1:9 --rate 1 --sources 192.0.2.1")?
            .contains("cannot bind the source 192.0.2.1:0")
    );
    let server_arguments = "testbed key-value-server --listen 127.0.0.1:0";
    assert!(
        run_for_error_output(&format!("{server_arguments} --paced --multiplier 0"))?.contains("multiplier 0: expected")
    );
    assert!(run_for_error_output(&format!("{server_arguments} --service-us GET=1"))?.contains("--paced"));
    Ok(())
}
