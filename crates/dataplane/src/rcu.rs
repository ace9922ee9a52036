//! RCU grace periods, for which a separate thread waits. A writer that switches programs to other memory does not wait.
//! It reuses the old memory after a grace period that began after the switch.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use anyhow::{Context as _, bail};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, MapType, libbpf_sys};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// Map of maps and its inner map, which no program uses. An update of the outer map's only element waits for an RCU
/// grace period.
static GRACE_PERIOD_MAPS: OnceLock<(MapHandle, MapHandle)> = OnceLock::new();

/// Waits for an RCU grace period, until all BPF programs that ran at the time of the call have ended. Programs run
/// inside RCU read-side critical sections.
///
/// The kernel waits for a grace period after each update of a map of maps (maybe_wait_bpf_programs() in
/// kernel/bpf/syscall.c, since Linux 5.0). membarrier(2)'s global command waits as well, but it returns EINVAL with
/// `nohz_full`. Fails when the kernel rejects the maps or the update.
pub fn wait_until_running_programs_end() -> anyhow::Result<()> {
    let (outer_map, inner_map) = match GRACE_PERIOD_MAPS.get() {
        Some(maps) => maps,
        // If two threads create maps at the same time, the maps of the slower thread are closed.
        None => {
            let outer_and_inner_map = create_map_of_maps()?;
            GRACE_PERIOD_MAPS.get_or_init(|| outer_and_inner_map)
        }
    };
    let inner_map_fd = inner_map.as_fd().as_raw_fd().to_ne_bytes();
    outer_map
        .update(&0u32.to_ne_bytes(), &inner_map_fd, MapFlags::ANY)
        .context("waiting for an RCU grace period by an update of a map of maps")
}

/// Creates a map of maps with one element. Returns the outer and the inner map.
fn create_map_of_maps() -> anyhow::Result<(MapHandle, MapHandle)> {
    let sz = size_of::<libbpf_sys::bpf_map_create_opts>() as _;
    let mut map_options = libbpf_sys::bpf_map_create_opts { sz, ..Default::default() };
    let value_bytes = size_of::<u32>() as u32;
    let inner_map = MapHandle::create(MapType::Array, Some("coreward_inner"), 4, value_bytes, 1, &map_options)
        .context("making the inner map to wait for RCU grace periods with")?;
    map_options.inner_map_fd = inner_map.as_fd().as_raw_fd() as u32;
    let outer_map = MapHandle::create(MapType::ArrayOfMaps, Some("coreward_outer"), 4, value_bytes, 1, &map_options)
        .context("making the map of maps to wait for RCU grace periods with")?;
    Ok((outer_map, inner_map))
}

/// Ticket to wait for a grace period: the number of the first grace period that begins after the request (see
/// [`GracePeriodWaiter::has_passed`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct GracePeriodTicket(u64);

/// Thread that waits for RCU grace periods until the value is dropped.
#[derive(Debug)]
pub struct GracePeriodWaiter(Arc<GracePeriodSharedState>);

#[derive(Debug, Default)]
struct GracePeriodSharedState {
    begun_period_count: AtomicU64,
    ended_period_count: AtomicU64,
    wait_requests: Mutex<GracePeriodWaitRequests>,
    state_changed: Condvar,
}

#[derive(Debug, Default)]
struct GracePeriodWaitRequests {
    /// Number of the latest grace period that callers have requested.
    last_requested_period: u64,
    is_stopped: bool,
    wait_error: Option<String>,
}

impl GracePeriodSharedState {
    fn lock_wait_requests(&self) -> MutexGuard<'_, GracePeriodWaitRequests> {
        self.wait_requests.lock()
    }

    fn wait_for_requested_periods(&self) {
        loop {
            let mut requests = self.lock_wait_requests();
            while !requests.is_stopped
                && requests.last_requested_period <= self.ended_period_count.load(Ordering::SeqCst)
            {
                self.state_changed.wait(&mut requests);
            }
            if requests.is_stopped {
                return;
            }
            drop(requests);
            let period_number = self.begun_period_count.fetch_add(1, Ordering::SeqCst) + 1;
            let wait_result = wait_until_running_programs_end();
            let mut requests = self.lock_wait_requests();
            match wait_result {
                Ok(()) => self.ended_period_count.store(period_number, Ordering::SeqCst),
                Err(error) => {
                    requests.wait_error = Some(format!("{error:#}"));
                    requests.is_stopped = true;
                }
            }
            self.state_changed.notify_all();
        }
    }
}

impl GracePeriodWaiter {
    /// Starts the thread that waits for grace periods. Fails when no thread can be created.
    pub fn start() -> anyhow::Result<Self> {
        let shared_state = Arc::<GracePeriodSharedState>::default();
        let thread_state = shared_state.clone();
        std::thread::Builder::new()
            .name("grace periods".to_owned())
            .spawn(move || thread_state.wait_for_requested_periods())
            .context("a thread that waits for RCU grace periods")?;
        Ok(Self(shared_state))
    }

    /// Requests a grace period and returns its ticket. It must be called after a program or a table was replaced.
    pub fn request_ticket(&self) -> GracePeriodTicket {
        // Programs that begin after the fence see all earlier stores.
        fence(Ordering::SeqCst);
        let ticket_number = self.0.begun_period_count.load(Ordering::SeqCst) + 1;
        let mut requests = self.0.lock_wait_requests();
        requests.last_requested_period = requests.last_requested_period.max(ticket_number);
        drop(requests);
        self.0.state_changed.notify_all();
        GracePeriodTicket(ticket_number)
    }

    /// Returns whether all programs that ran when the ticket was requested have ended.
    pub fn has_passed(&self, ticket: GracePeriodTicket) -> bool {
        self.0.ended_period_count.load(Ordering::SeqCst) >= ticket.0
    }

    /// Waits until [`has_passed`](Self::has_passed) returns true for the ticket. Fails when the kernel offers no grace
    /// period.
    pub fn wait(&self, ticket: GracePeriodTicket) -> anyhow::Result<()> {
        let mut requests = self.0.lock_wait_requests();
        while !self.has_passed(ticket) {
            if let Some(error) = &requests.wait_error {
                bail!("{error}");
            }
            self.0.state_changed.wait(&mut requests);
        }
        Ok(())
    }
}

impl Drop for GracePeriodWaiter {
    fn drop(&mut self) {
        self.0.lock_wait_requests().is_stopped = true;
        self.0.state_changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_periods_of_tickets_pass_in_order() {
        let grace_periods = GracePeriodWaiter::start().unwrap();
        let first_ticket = grace_periods.request_ticket();
        grace_periods.wait(first_ticket).unwrap();
        assert!(grace_periods.has_passed(first_ticket));
        let second_ticket = grace_periods.request_ticket();
        assert!(second_ticket > first_ticket);
        grace_periods.wait(second_ticket).unwrap();
        assert!(grace_periods.has_passed(GracePeriodTicket::default()));
    }
}
