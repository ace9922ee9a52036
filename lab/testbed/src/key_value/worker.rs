//! Worker of the key-value server, which reads a request, answers it, and only then reads the next one.
//!
//! Waiting requests stay in the socket's receive queue. With paced service times the worker computes when an emulated
//! core would finish each request ([`VirtualCore`]). A request that arrived at t (the kernel's time stamp) completes at
//! max(t, busy until) + its service time. A late wake-up therefore delays responses but does not reduce the core's
//! capacity.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use coreward_load::event_loop::now_ns;
use coreward_load::key_value::{KeyValueRequest, KeyValueRequestError, KeyValueResponseWriter};
use coreward_load::request_type::{RequestType, ServiceTimesByType};
use coreward_load::timestamped_receiver::TimestampedReceiver;
use nix::errno::Errno;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, ClockNanosleepFlags, clock_nanosleep};

use super::store::{InMemoryStore, KeyValueDatabase as _};
use crate::core_load_file::VirtualCore;

/// Maximum delay of a worker for which an emulated core compensates (ns). Late wake-ups (microseconds to milliseconds)
/// thus do not reduce the core's capacity. A worker that was stopped for longer has lost that time.
pub(crate) const MAX_CATCH_UP_NS: u64 = 20_000_000;

/// Counters of a worker, in memory that the master and the readers of the counter file share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedWorkerCounters(pub(crate) &'static [AtomicU64; SharedWorkerCounters::COUNTERS_PER_WORKER]);

impl SharedWorkerCounters {
    pub(crate) const COUNTERS_PER_WORKER: usize = 4;
    const RECEIVED_COUNTER_INDEX: usize = 0;
    const ANSWERED_COUNTER_INDEX: usize = 1;
    const REJECTED_COUNTER_INDEX: usize = 2;
    const BUSY_NS_COUNTER_INDEX: usize = 3;

    /// Adds `increment` to a worker's counter. Each counter has one writer, and readers need no ordering with other
    /// memory.
    fn add_to_counter(&self, counter_index: usize, increment: u64) {
        let sum = u64::from_le(self.0[counter_index].load(Ordering::Relaxed)) + increment;
        self.0[counter_index].store(sum.to_le(), Ordering::Relaxed);
    }

    /// Returns the present values of the worker's counters.
    pub(crate) fn read_counters(&self) -> [u64; Self::COUNTERS_PER_WORKER] {
        self.0.each_ref().map(|number| u64::from_le(number.load(Ordering::Relaxed)))
    }
}

/// Source of the service time of each request.
#[derive(Debug, Clone)]
pub(crate) enum ServiceTimeSource {
    /// Time that the execution of the request really takes.
    RealWork,
    /// Emulated time that the request contains. If it contains none, the time of its type in this table applies.
    EmulatedTime(ServiceTimesByType),
}

/// Reason why a datagram is not answered.
#[derive(Debug, thiserror::Error)]
enum RequestDatagramRejection {
    #[error(transparent)]
    InvalidRequest(#[from] KeyValueRequestError),
    #[error("a {0}, for which there is no service time: give one by --service-us or in the request")]
    NoServiceTime(RequestType),
    #[error("more than a datagram may have")]
    TruncatedDatagram,
}

pub(crate) struct KeyValueWorker<'a> {
    pub worker_number: u16,
    pub socket: &'a UdpSocket,
    pub store: &'a InMemoryStore,
    pub service_time_source: &'a ServiceTimeSource,
    pub counters: SharedWorkerCounters,
    /// Busy time of the worker (ns), in the file that an agent reads, or `None` without such a file.
    pub published_busy_ns: Option<&'a AtomicU64>,
}

impl KeyValueWorker<'_> {
    /// Serves requests indefinitely, and returns only after an error.
    pub(crate) fn run(self) -> anyhow::Result<std::convert::Infallible> {
        // The default timer slack of 50 us is as long as a paced request (prctl(2), PR_SET_TIMERSLACK).
        nix::sys::prctl::set_timerslack(1).context("cannot set the timer slack")?;
        TimestampedReceiver::enable_timestamps(self.socket).context("cannot have arrivals stamped")?;
        let (mut receiver, mut response, mut core) =
            (TimestampedReceiver::default(), KeyValueResponseWriter::default(), VirtualCore::default());
        let mut buffer = vec![0; 65_536];
        let mut is_first_rejection = true;
        loop {
            let received_datagram = match receiver.receive(self.socket, &mut buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                other => other.context("cannot receive")?,
            };
            self.counters.add_to_counter(SharedWorkerCounters::RECEIVED_COUNTER_INDEX, 1);
            let datagram = if received_datagram.is_truncated {
                Err(RequestDatagramRejection::TruncatedDatagram)
            } else {
                Ok(&buffer[..received_datagram.received_byte_count])
            };
            let answer_result = datagram.and_then(|datagram| {
                let request = KeyValueRequest::parse(datagram)?;
                self.serve_request(&request, received_datagram.arrived_ns, &mut core, &mut response)
            });
            match answer_result {
                Ok(()) => {
                    let client_address = received_datagram.sender.context("a datagram without a sender")?;
                    self.send_response(&mut response, client_address);
                }
                Err(rejection) => {
                    self.counters.add_to_counter(SharedWorkerCounters::REJECTED_COUNTER_INDEX, 1);
                    if std::mem::take(&mut is_first_rejection) {
                        self.warn_of_rejection(&rejection);
                    }
                }
            }
        }
    }

    /// Sends a response, and counts it as answered if the kernel accepts all its datagrams.
    fn send_response(&self, response: &mut KeyValueResponseWriter, client_address: SocketAddr) {
        // Sending blocks while the send buffer is full. Datagrams that the network rejects are lost.
        let is_sent = response.finish_response().all(|datagram| self.socket.send_to(datagram, client_address).is_ok());
        self.counters.add_to_counter(SharedWorkerCounters::ANSWERED_COUNTER_INDEX, is_sent.into());
    }

    fn warn_of_rejection(&self, rejection: &RequestDatagramRejection) {
        tracing::warn!(
            event = "request-rejected",
            worker = self.worker_number,
            error = %rejection,
            "request rejected without a response; further rejections are only counted"
        );
    }

    /// Executes a request, and sleeps until its service time is over.
    fn serve_request(
        &self,
        request: &KeyValueRequest<'_>,
        arrival_ns: u64,
        core: &mut VirtualCore,
        response: &mut KeyValueResponseWriter,
    ) -> Result<(), RequestDatagramRejection> {
        let start_ns = now_ns();
        let service_ns = match self.service_time_source {
            ServiceTimeSource::RealWork => None,
            ServiceTimeSource::EmulatedTime(_) if request.service_ns > 0 => Some(request.service_ns),
            ServiceTimeSource::EmulatedTime(times) => {
                let missing_time_rejection = RequestDatagramRejection::NoServiceTime(request.request_type);
                Some(times.get_ns(request.request_type).ok_or(missing_time_rejection)?)
            }
        };
        self.store.answer_request(request, self.worker_number, response);
        if let Some(service_ns) = service_ns {
            let arrival_ns = arrival_ns.max(start_ns.saturating_sub(MAX_CATCH_UP_NS));
            sleep_until(core.enqueue_request(arrival_ns, service_ns.into()));
        }
        let busy_ns = service_ns.map_or_else(|| now_ns() - start_ns, u64::from);
        self.counters.add_to_counter(SharedWorkerCounters::BUSY_NS_COUNTER_INDEX, busy_ns);
        if let Some(published_busy_ns) = self.published_busy_ns {
            published_busy_ns.store(
                self.counters.read_counters()[SharedWorkerCounters::BUSY_NS_COUNTER_INDEX].to_le(),
                Ordering::Relaxed,
            );
        }
        Ok(())
    }
}

/// Sleeps until `deadline_ns` on CLOCK_MONOTONIC (ns).
pub(crate) fn sleep_until(deadline_ns: u64) {
    let deadline = TimeSpec::from_duration(Duration::from_nanos(deadline_ns));
    while clock_nanosleep(ClockId::CLOCK_MONOTONIC, ClockNanosleepFlags::TIMER_ABSTIME, &deadline) == Err(Errno::EINTR)
    {
    }
}

/// Sets the receive buffer's size to `bytes`, beyond net.core.rmem_max if permitted. Fails if the kernel grants less.
pub(crate) fn set_receive_buffer_size(socket: &UdpSocket, bytes: usize) -> anyhow::Result<()> {
    use nix::sys::socket::sockopt::{RcvBuf, RcvBufForce};
    use nix::sys::socket::{getsockopt, setsockopt};
    if setsockopt(socket, RcvBufForce, &bytes).is_err() {
        setsockopt(socket, RcvBuf, &bytes)?;
    }
    // The kernel doubles the requested size for its bookkeeping (socket(7)).
    let granted_bytes = getsockopt(socket, RcvBuf)? / 2;
    if granted_bytes < bytes {
        bail!("receive buffer of {bytes} bytes: this process gets {granted_bytes} at most (net.core.rmem_max)");
    }
    Ok(())
}
