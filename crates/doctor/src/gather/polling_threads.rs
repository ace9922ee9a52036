//! Threads that poll, which are pinned to one CPU and never wait.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::facts::PollingThread;

/// Time between two samples of the threads. Below full load, a serving thread sleeps at least once within it.
const THREAD_SAMPLE_INTERVAL: Duration = Duration::from_millis(500);

/// Thread that is running or runnable, with its number of voluntary context switches (waits).
#[derive(Debug, Clone, PartialEq, Eq)]
struct RunnableThread {
    thread_name: String,
    cpu: usize,
    voluntary_switch_count: u64,
}

/// Returns the polling threads in this network namespace. Takes half a second if there are candidates.
pub fn find_polling_threads() -> Vec<PollingThread> {
    let first_sample = read_runnable_threads();
    if first_sample.is_empty() {
        return vec![];
    }
    std::thread::sleep(THREAD_SAMPLE_INTERVAL);
    let second_sample = read_runnable_threads();
    let to_polling_thread = |(thread, now): (u32, RunnableThread)| {
        (first_sample.get(&thread) == Some(&now)).then_some(PollingThread {
            thread_id: thread,
            name: now.thread_name,
            cpu: now.cpu,
        })
    };
    second_sample.into_iter().filter_map(to_polling_thread).collect()
}

/// Returns the runnable threads that are pinned to one CPU, by thread id. Omits threads that end meanwhile.
fn read_runnable_threads() -> BTreeMap<u32, RunnableThread> {
    let own_namespace = fs::read_link("/proc/self/ns/net").ok();
    let is_in_own_namespace = |process: &Path| fs::read_link(process.join("ns/net")).ok() == own_namespace;
    let list_numbered_entries = |directory: &Path| {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok()).collect::<Vec<_>>()
    };
    let process_directories =
        list_numbered_entries(Path::new("/proc")).into_iter().filter(|process| is_in_own_namespace(&process.path()));
    let thread_directories =
        process_directories.flat_map(|process| list_numbered_entries(&process.path().join("task")));
    let read_thread = |thread: fs::DirEntry| {
        let thread_id = thread.file_name().to_string_lossy().parse().ok()?;
        Some((thread_id, parse_thread_status(&fs::read_to_string(thread.path().join("status")).ok()?)?))
    };
    thread_directories.filter_map(read_thread).collect()
}

/// Returns the thread in the text of /proc/PID/status (proc(5)). Returns `None` if it waits or may run on several CPUs.
fn parse_thread_status(status: &str) -> Option<RunnableThread> {
    let find_field_value =
        |key: &str| status.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim()));
    let is_running = find_field_value("State")?.starts_with('R');
    let cpu = find_field_value("Cpus_allowed_list")?.parse().ok()?;
    let voluntary_switch_count = find_field_value("voluntary_ctxt_switches")?.parse().ok()?;
    is_running.then(|| RunnableThread {
        thread_name: find_field_value("Name").unwrap_or_default().to_owned(),
        cpu,
        voluntary_switch_count,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pinned_runnable_threads_are_polling_candidates() {
        let format_status = |state: &str, cpus: &str| {
            format!("Name:\tdpdk\nState:\t{state}\nCpus_allowed_list:\t{cpus}\nvoluntary_ctxt_switches:\t7\n")
        };
        let expected = RunnableThread { thread_name: "dpdk".to_owned(), cpu: 3, voluntary_switch_count: 7 };
        assert_eq!(parse_thread_status(&format_status("R (running)", "3")), Some(expected));
        assert_eq!(parse_thread_status(&format_status("S (sleeping)", "3")), None);
        assert_eq!(parse_thread_status(&format_status("R (running)", "0-3")), None);
    }
}
