//! `examples/batch.c`: requests that preempt a batch.

use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use crate::server::{StopOnDrop, ask, client, compile, end, free_address, orchestrator_of};

#[test]
fn requests_preempt_a_batch_that_always_has_work() {
    preempt_batch(None);
}

#[test]
fn timer_preempts_a_batch_without_yield_points() {
    preempt_batch(Some("50"));
}

fn preempt_batch(timer_us: Option<&str>) {
    let directory = tempfile::tempdir().unwrap();
    let (memory, [interactive, batch]) = (directory.path().join("cores"), [free_address(), free_address()]);
    let services = format!(
        "[[service]]\nlisten = \"{interactive}\"\n\
         [[service]]\nlisten = \"{batch}\"\npriority = 1\n"
    );
    let mut daemon = orchestrator_of(&memory, &services);
    let mut server = Command::new(compile(directory.path(), "batch", &[]));
    server
        .arg(&memory)
        .args([interactive, batch].map(|address| address.port().to_string()))
        .args(timer_us)
        .stdout(Stdio::piped());
    let stop = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        let _end = StopOnDrop(&stop);
        scope.spawn(|| daemon.run(&stop).unwrap());
        let server = server.spawn().unwrap();
        let client = client(interactive);
        for number in 0..200u32 {
            ask(&client, &number.to_be_bytes(), |response| response == number.to_be_bytes());
        }
        end(server)
    });
    let printed = String::from_utf8_lossy(&output.stdout);
    let count = |word: usize| printed.split_whitespace().nth(word).unwrap().parse::<u64>().unwrap();
    let [requests, preempting, units, primes] = [0, 2, 5, 7].map(count);
    assert!(output.status.success() && requests >= 200 && preempting > 0 && units > 0 && primes > units, "{printed}");
}
