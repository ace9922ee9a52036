//! Which of a daemon's threads the kernel prefers.

use nix::errno::Errno;
use nix::libc;

/// A ninth of what others have of a CPU.
const NICER: i32 = 10;

/// From now on the calling thread yields to this process's others (on Linux niceness is a thread's, setpriority(2)). It has what
/// they leave, and no less than a ninth: who holds a lock that the others want goes on.
///
/// # Errors
/// When the kernel refuses: never, as a thread may always yield more.
pub fn yield_to_others() -> nix::Result<()> {
    // SAFETY: both calls take numbers only; 0 is the calling thread.
    let outcome = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, libc::getpriority(libc::PRIO_PROCESS, 0) + NICER) };
    Errno::result(outcome).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_yields() {
        // SAFETY: the call takes numbers only; 0 is the calling thread.
        let niceness = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = niceness();
        let yielding = std::thread::spawn(move || yield_to_others().map(|()| niceness()));
        assert_eq!(yielding.join().unwrap(), Ok((before + NICER).min(19)));
        assert_eq!(niceness(), before);
    }
}
