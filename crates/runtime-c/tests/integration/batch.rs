//! Tests `examples/batch.c`, in which requests preempt a batch.

use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use crate::server::{
    StopDaemonOnDrop, compile_example, connected_client_socket, send_request_until_answered, start_orchestrator,
    stop_server, unused_udp_address,
};

#[test]
fn requests_preempt_a_batch_that_always_has_work() {
    check_batch_preemption(None);
}

#[test]
fn timer_preempts_a_batch_without_yield_points() {
    check_batch_preemption(Some("50"));
}

fn check_batch_preemption(timer_us: Option<&str>) {
    let directory = tempfile::tempdir().unwrap();
    let (memory, [interactive, batch]) = (directory.path().join("cores"), [unused_udp_address(), unused_udp_address()]);
    let services_toml = format!(
        "[[service]]\nlisten = \"{interactive}\"\n\
         [[service]]\nlisten = \"{batch}\"\npriority = 1\n"
    );
    let mut daemon = start_orchestrator(&memory, &services_toml);
    let mut server = Command::new(compile_example(directory.path(), "batch", &[]));
    server
        .arg(&memory)
        .args([interactive, batch].map(|address| address.port().to_string()))
        .args(timer_us)
        .stdout(Stdio::piped());
    let stop_flag = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        let _stop_guard = StopDaemonOnDrop(&stop_flag);
        scope.spawn(|| daemon.run_until_stopped(&stop_flag).unwrap());
        let server = server.spawn().unwrap();
        let client = connected_client_socket(interactive);
        for number in 0..200u32 {
            send_request_until_answered(&client, &number.to_be_bytes(), |response| response == number.to_be_bytes());
        }
        stop_server(server)
    });
    let server_output = String::from_utf8_lossy(&output.stdout);
    let parse_word =
        |word_index: usize| server_output.split_whitespace().nth(word_index).unwrap().parse::<u64>().unwrap();
    let [requests, preempting, units, primes] = [0, 2, 5, 7].map(parse_word);
    assert!(
        output.status.success() && requests >= 200 && preempting > 0 && units > 0 && primes > units,
        "{server_output}"
    );
}
