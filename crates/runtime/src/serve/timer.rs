//! Preemption of handlers without yield points by a timer.
//!
//! A second thread of the core wakes once in a period and serves the requests of higher priority. The kernel preempts
//! the worker's thread for it: the handler may be anywhere, also in a library or in the allocator.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Access, Handler, Preempt, ServeCounters, ServeOptions, Server, run, serve_higher_priorities, try_yield};
use crate::error::RuntimeError;
use crate::worker::Worker;

/// Request server that the threads of the worker and the timer share. The timer thread keeps the lock while it serves
/// requests, so that the preempted handler waits at its next yield point or at its end.
struct Locked<'s, 'w, 'r, H: ?Sized>(&'s Mutex<Server<'w, 'r, H>>);

impl<'w, 'r: 'w, H: Handler + ?Sized> Access<'w, 'r> for Locked<'_, 'w, 'r, H> {
    type Handler = H;

    fn with<T>(&mut self, call: impl FnOnce(&mut Server<'w, 'r, H>) -> T) -> T {
        call(&mut lock(self.0))
    }
}

impl<H: Handler + ?Sized> Preempt for Locked<'_, '_, '_, H> {
    fn try_yield(&mut self) -> Result<(), RuntimeError> {
        try_yield(self)
    }
}

/// Guard that ends the timer thread when it is dropped, also after a panic of the handler.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn lock<'l, 'w, 'r, H: ?Sized>(server: &'l Mutex<Server<'w, 'r, H>>) -> MutexGuard<'l, Server<'w, 'r, H>> {
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker<'_> {
    /// Serves like [`serve`](Self::serve), and also preempts handlers between yield points, by a timer of `period`. A
    /// handler must allow calls by both threads, and must not hold a lock that handlers of higher priority need.
    ///
    /// The timer thread has the affinity of this thread, which should be one CPU. It has a real-time priority one above
    /// this thread's, if the process may set that (CAP_SYS_NICE or RLIMIT_RTPRIO). Otherwise the kernel may let the
    /// handler run for a time slice first. Fails like [`serve`](Self::serve).
    pub fn serve_with_timer(
        &mut self,
        handler: &(dyn Handler + Sync),
        options: ServeOptions,
        period: Duration,
        stop: &AtomicBool,
    ) -> Result<ServeCounters, RuntimeError> {
        let server = Mutex::new(Server::new(self, handler, options));
        let has_ended = AtomicBool::new(false);
        let served = std::thread::scope(|scope| {
            let timer = scope.spawn(|| preempt_periodically(&server, period, &has_ended));
            let served = {
                let _end = EndOnDrop(&has_ended);
                run(&mut Locked(&server), options, stop)
            };
            served.and(timer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        served?;
        let mut server = server.into_inner().unwrap_or_else(PoisonError::into_inner);
        server.drain_and_detach()?;
        Ok(server.counters)
    }
}

fn preempt_periodically<H: Handler + ?Sized>(
    server: &Mutex<Server<'_, '_, H>>,
    period: Duration,
    has_ended: &AtomicBool,
) -> Result<(), RuntimeError> {
    // Without these rights the timer is late, as documented.
    let _ = nix::sys::prctl::set_timerslack(1);
    raise_priority();
    while !has_ended.load(Relaxed) {
        std::thread::sleep(period);
        let mut server = lock(server);
        if let Some(priority) = server.preempted_priority().filter(|priority| *priority > 0) {
            serve_higher_priorities(&mut *server, priority)?;
        }
    }
    Ok(())
}

/// Gives this thread a real-time priority above its current one, if the process is allowed to.
fn raise_priority() {
    let mut present = libc::sched_param { sched_priority: 0 };
    // SAFETY: both calls get a valid structure, and thread 0 is the calling one.
    unsafe {
        libc::sched_getparam(0, &raw mut present);
        let raised = libc::sched_param { sched_priority: (present.sched_priority + 1).min(99) };
        libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const raised);
    }
}
