//! Priority of a daemon's threads.

use nix::errno::Errno;
use nix::libc;

/// Increment of the niceness. A thread with it gets a ninth of a normal thread's CPU time.
const NICENESS_INCREMENT: i32 = 10;

/// Lowers the calling thread's priority. If that fails, logs a warning that names `thread`.
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

/// On Linux, niceness applies to a single thread. A ninth of the CPU is enough for it to release its locks in time.
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
