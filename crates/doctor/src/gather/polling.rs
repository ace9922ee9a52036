//! Polling threads: pinned to one CPU and never waiting.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::facts::PollingThread;

/// Time between two samples. A serving thread waits at least once in this time, unless it is at full load.
const SAMPLE_DURATION: Duration = Duration::from_millis(500);

/// Runnable thread, with the number of its waits (voluntary context switches) so far.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RunnableThread {
    name: String,
    cpu: usize,
    wait_count: u64,
}

/// Returns the polling threads of this network namespace. Takes half a second if there are candidates.
pub fn find_polling_threads() -> Vec<PollingThread> {
    let before = read_runnable_threads();
    if before.is_empty() {
        return vec![];
    }
    std::thread::sleep(SAMPLE_DURATION);
    let after = read_runnable_threads();
    let polls = |(thread, now): (u32, RunnableThread)| {
        (before.get(&thread) == Some(&now)).then_some(PollingThread { thread_id: thread, name: now.name, cpu: now.cpu })
    };
    after.into_iter().filter_map(polls).collect()
}

/// Returns the pinned runnable threads by thread id, without those that have ended meanwhile.
fn read_runnable_threads() -> BTreeMap<u32, RunnableThread> {
    let own = fs::read_link("/proc/self/ns/net").ok();
    let is_here = |process: &Path| fs::read_link(process.join("ns/net")).ok() == own;
    let numbers = |directory: &Path| {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok()).collect::<Vec<_>>()
    };
    let processes = numbers(Path::new("/proc")).into_iter().filter(|process| is_here(&process.path()));
    let threads = processes.flat_map(|process| numbers(&process.path().join("task")));
    let status = |thread: fs::DirEntry| {
        let number = thread.file_name().to_string_lossy().parse().ok()?;
        Some((number, parse(&fs::read_to_string(thread.path().join("status")).ok()?)?))
    };
    threads.filter_map(status).collect()
}

/// Parses /proc/PID/status (proc(5)). Returns `None` if the thread waits, or may run on several CPUs.
fn parse(status: &str) -> Option<RunnableThread> {
    let value = |key: &str| status.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim()));
    let is_running = value("State")?.starts_with('R');
    let cpu = value("Cpus_allowed_list")?.parse().ok()?;
    let wait_count = value("voluntary_ctxt_switches")?.parse().ok()?;
    is_running.then(|| RunnableThread { name: value("Name").unwrap_or_default().to_owned(), cpu, wait_count })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pinned_threads_that_run_are_candidates() {
        let status = |state: &str, cpus: &str| {
            format!("Name:\tdpdk\nState:\t{state}\nCpus_allowed_list:\t{cpus}\nvoluntary_ctxt_switches:\t7\n")
        };
        let expected = RunnableThread { name: "dpdk".to_owned(), cpu: 3, wait_count: 7 };
        assert_eq!(parse(&status("R (running)", "3")), Some(expected));
        assert_eq!(parse(&status("S (sleeping)", "3")), None);
        assert_eq!(parse(&status("R (running)", "0-3")), None);
    }
}
