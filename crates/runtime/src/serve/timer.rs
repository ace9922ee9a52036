//! Preempts handlers that have no yield points, with a timer.
//!
//! A second thread on the core wakes once per period and serves the requests of higher priority. The kernel preempts
//! the worker's thread for it, so the handler may be anywhere, even in a library or in the memory allocator.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{
    PreemptHandler, RequestHandler, RequestServer, RequestServerAccess, ServeCounters, ServeOptions,
    serve_higher_priority_requests, serve_until_stopped, try_yield,
};
use crate::error::RuntimeError;
use crate::worker::Worker;

/// Request server that the threads of the worker and the timer share. The timer thread keeps the lock while it serves
/// requests, so that the preempted handler waits at its next yield point or at its end.
struct LockedRequestServer<'s, 'w, 'r, H: ?Sized>(&'s Mutex<RequestServer<'w, 'r, H>>);

impl<'w, 'r: 'w, H: RequestHandler + ?Sized> RequestServerAccess<'w, 'r> for LockedRequestServer<'_, 'w, 'r, H> {
    type Handler = H;

    fn call_with_server<T>(&mut self, call: impl FnOnce(&mut RequestServer<'w, 'r, H>) -> T) -> T {
        call(&mut lock_server(self.0))
    }
}

impl<H: RequestHandler + ?Sized> PreemptHandler for LockedRequestServer<'_, '_, '_, H> {
    fn try_yield(&mut self) -> Result<(), RuntimeError> {
        try_yield(self)
    }
}

/// Guard that ends the timer thread when it is dropped, even if the handler has panicked.
struct StopTimerOnDrop<'a>(&'a AtomicBool);

impl Drop for StopTimerOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn lock_server<'l, 'w, 'r, H: ?Sized>(
    server: &'l Mutex<RequestServer<'w, 'r, H>>,
) -> MutexGuard<'l, RequestServer<'w, 'r, H>> {
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker<'_> {
    /// Serves requests like [`serve`](Self::serve), but a timer thread also preempts handlers once per `period`,
    /// between yield points. Both threads may call the handler at the same time. The handler must not hold a lock that
    /// handlers of higher priority need.
    ///
    /// The timer thread has the affinity of this thread, which should be one CPU. Its real-time priority is one above
    /// that of this thread, if the process may set it (CAP_SYS_NICE or RLIMIT_RTPRIO). Otherwise the kernel may let the
    /// handler run for a time slice first. Fails in the same cases as [`serve`](Self::serve).
    pub fn serve_with_timer(
        &mut self,
        handler: &(dyn RequestHandler + Sync),
        options: ServeOptions,
        period: Duration,
        stop_flag: &AtomicBool,
    ) -> Result<ServeCounters, RuntimeError> {
        let request_server = Mutex::new(RequestServer::new(self, handler, options));
        let has_serving_ended = AtomicBool::new(false);
        let serve_result = std::thread::scope(|scope| {
            let timer_thread = scope.spawn(|| preempt_periodically(&request_server, period, &has_serving_ended));
            let serve_result = {
                let _timer_stop_guard = StopTimerOnDrop(&has_serving_ended);
                serve_until_stopped(&mut LockedRequestServer(&request_server), options, stop_flag)
            };
            serve_result.and(timer_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        serve_result?;
        let mut request_server = request_server.into_inner().unwrap_or_else(PoisonError::into_inner);
        request_server.serve_remaining_requests_and_detach()?;
        Ok(request_server.counters)
    }
}

fn preempt_periodically<H: RequestHandler + ?Sized>(
    server: &Mutex<RequestServer<'_, '_, H>>,
    period: Duration,
    has_serving_ended: &AtomicBool,
) -> Result<(), RuntimeError> {
    // Errors are ignored, because without these rights the timer is only late, as documented.
    let _ = nix::sys::prctl::set_timerslack(1);
    raise_thread_priority();
    while !has_serving_ended.load(Relaxed) {
        std::thread::sleep(period);
        let mut locked_server = lock_server(server);
        if let Some(priority) = locked_server.running_priority_if_yield_due().filter(|priority| *priority > 0) {
            serve_higher_priority_requests(&mut *locked_server, priority)?;
        }
    }
    Ok(())
}

/// Raises the calling thread's real-time priority by one, if the process has the right to do so.
fn raise_thread_priority() {
    let mut current_parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: both calls get a valid structure, and thread 0 is the calling one.
    unsafe {
        libc::sched_getparam(0, &raw mut current_parameters);
        let raised_parameters = libc::sched_param { sched_priority: (current_parameters.sched_priority + 1).min(99) };
        libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const raised_parameters);
    }
}
