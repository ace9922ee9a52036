//! Priority of a daemon's threads.

use nix::errno::Errno;
use nix::libc;

/// Increment of a thread's niceness. It reduces the thread's CPU weight to a ninth of a normal thread's weight.
const NICENESS_INCREMENT: i32 = 10;

/// Lowers the calling thread's priority. If this fails, logs a warning with the given name of the thread.
pub fn lower_thread_priority(thread_name: &str) {
    if let Err(error) = try_lower_thread_priority() {
        tracing::warn!(
            event = "thread-priority-unchanged",
            thread = thread_name,
            %error,
            "the daemon cannot lower the priority of a thread, which may delay other threads"
        );
    }
}

/// Lowers the priority of the calling thread only, because Linux applies niceness to single threads. With a ninth of
/// the CPU weight, the thread still releases its locks in time.
fn try_lower_thread_priority() -> nix::Result<()> {
    // SAFETY: both calls take numbers only; 0 is the calling thread.
    let setpriority_result = unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, libc::getpriority(libc::PRIO_PROCESS, 0) + NICENESS_INCREMENT)
    };
    Errno::result(setpriority_result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_gets_low_priority() {
        // SAFETY: the call takes numbers only; 0 is the calling thread.
        let read_niceness = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let initial_niceness = read_niceness();
        let lowered_thread = std::thread::spawn(move || try_lower_thread_priority().map(|()| read_niceness()));
        assert_eq!(lowered_thread.join().unwrap(), Ok((initial_niceness + NICENESS_INCREMENT).min(19)));
        assert_eq!(read_niceness(), initial_niceness);
    }
}
