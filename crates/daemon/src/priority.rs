//! Priorities of a daemon's threads.

use nix::errno::Errno;
use nix::libc;

/// Increment of the niceness: the thread gets a ninth of the CPU share of a normal thread.
const NICENESS_INCREMENT: i32 = 10;

/// Lowers the calling thread's priority; `thread` names it in the log if that fails.
pub fn lower_thread_priority(thread: &str) {
    if let Err(error) = lower_priority() {
        tracing::warn!(
            event = "thread-priority-unchanged",
            thread,
            %error,
            "the daemon cannot lower the priority of a thread, which may delay other threads"
        );
    }
}

/// On Linux niceness belongs to a thread. The thread still gets a ninth of a CPU, so it releases its locks in time.
fn lower_priority() -> nix::Result<()> {
    // SAFETY: both calls take numbers only; 0 is the calling thread.
    let outcome = unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, libc::getpriority(libc::PRIO_PROCESS, 0) + NICENESS_INCREMENT)
    };
    Errno::result(outcome).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_gets_low_priority() {
        // SAFETY: the call takes numbers only; 0 is the calling thread.
        let niceness = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let initial_niceness = niceness();
        let lowered_thread = std::thread::spawn(move || lower_priority().map(|()| niceness()));
        assert_eq!(lowered_thread.join().unwrap(), Ok((initial_niceness + NICENESS_INCREMENT).min(19)));
        assert_eq!(niceness(), initial_niceness);
    }
}
