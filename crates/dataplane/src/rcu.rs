//! RCU grace periods, awaited by a separate thread. A writer that switches programs to other memory continues at once.
//! It reuses the old memory after a grace period that began after the switch.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use anyhow::{Context as _, bail};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, MapType, libbpf_sys};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// Outer and inner map, used by no program: an update of the outer map's only element waits for an RCU grace period.
static MAP_OF_MAPS: OnceLock<(MapHandle, MapHandle)> = OnceLock::new();

/// Returns when every program that ran at the time of the call has ended: programs run inside an RCU read-side section.
///
/// The kernel waits for a grace period after each update of a map of maps (maybe_wait_bpf_programs() in
/// kernel/bpf/syscall.c, since Linux 5.0). membarrier(2)'s global command waits as well, but with `nohz_full` it
/// returns EINVAL. Fails when the kernel refuses the maps or the update.
pub fn wait_for_programs() -> anyhow::Result<()> {
    let (outer, inner) = match MAP_OF_MAPS.get() {
        Some(maps) => maps,
        // Two threads may create maps at the same time: the maps of the slower thread are closed.
        None => {
            let maps = map_of_maps()?;
            MAP_OF_MAPS.get_or_init(|| maps)
        }
    };
    let inner = inner.as_fd().as_raw_fd().to_ne_bytes();
    outer
        .update(&0u32.to_ne_bytes(), &inner, MapFlags::ANY)
        .context("waiting for an RCU grace period by an update of a map of maps")
}

/// Creates a map of maps that contains one map. Returns the outer and the inner map.
fn map_of_maps() -> anyhow::Result<(MapHandle, MapHandle)> {
    let sz = size_of::<libbpf_sys::bpf_map_create_opts>() as _;
    let mut options = libbpf_sys::bpf_map_create_opts { sz, ..Default::default() };
    let value_bytes = size_of::<u32>() as u32;
    let inner = MapHandle::create(MapType::Array, Some("coreward_inner"), 4, value_bytes, 1, &options)
        .context("making the inner map to wait for RCU grace periods with")?;
    options.inner_map_fd = inner.as_fd().as_raw_fd() as u32;
    let outer = MapHandle::create(MapType::ArrayOfMaps, Some("coreward_outer"), 4, value_bytes, 1, &options)
        .context("making the map of maps to wait for RCU grace periods with")?;
    Ok((outer, inner))
}

/// Number of the first grace period that begins after a switch of programs (see [`GracePeriods::has_passed`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct GraceTicket(u64);

/// Thread that waits for RCU grace periods until the value is dropped.
#[derive(Debug)]
pub struct GracePeriods(Arc<GracePeriodState>);

#[derive(Debug, Default)]
struct GracePeriodState {
    /// Number of grace periods that have begun.
    begun_count: AtomicU64,
    /// Number of grace periods that have ended.
    ended_count: AtomicU64,
    requests: Mutex<GraceRequests>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GraceRequests {
    /// Number of the latest grace period for which a caller waits.
    last_requested: u64,
    is_stopped: bool,
    wait_error: Option<String>,
}

impl GracePeriodState {
    fn requests(&self) -> MutexGuard<'_, GraceRequests> {
        self.requests.lock()
    }

    fn run(&self) {
        loop {
            let mut requests = self.requests();
            while !requests.is_stopped && requests.last_requested <= self.ended_count.load(Ordering::SeqCst) {
                self.changed.wait(&mut requests);
            }
            if requests.is_stopped {
                return;
            }
            drop(requests);
            let number = self.begun_count.fetch_add(1, Ordering::SeqCst) + 1;
            let outcome = wait_for_programs();
            let mut requests = self.requests();
            match outcome {
                Ok(()) => self.ended_count.store(number, Ordering::SeqCst),
                Err(error) => {
                    requests.wait_error = Some(format!("{error:#}"));
                    requests.is_stopped = true;
                }
            }
            self.changed.notify_all();
        }
    }
}

impl GracePeriods {
    /// Starts the thread that waits for grace periods. Fails when no thread can be created.
    pub fn start() -> anyhow::Result<Self> {
        let shared = Arc::<GracePeriodState>::default();
        let thread = shared.clone();
        std::thread::Builder::new()
            .name("grace periods".to_owned())
            .spawn(move || thread.run())
            .context("a thread that waits for RCU grace periods")?;
        Ok(Self(shared))
    }

    /// Requests a grace period and returns its ticket. To be called after programs or tables were switched.
    pub fn request(&self) -> GraceTicket {
        // Programs that begin after the fence see all earlier stores.
        fence(Ordering::SeqCst);
        let moment = self.0.begun_count.load(Ordering::SeqCst) + 1;
        let mut requests = self.0.requests();
        requests.last_requested = requests.last_requested.max(moment);
        drop(requests);
        self.0.changed.notify_all();
        GraceTicket(moment)
    }

    /// Returns whether all programs that ran when the ticket was requested have ended.
    pub fn has_passed(&self, moment: GraceTicket) -> bool {
        self.0.ended_count.load(Ordering::SeqCst) >= moment.0
    }

    /// Waits until [`has_passed`](Self::has_passed) returns true for the ticket. Fails when the kernel has refused to
    /// wait for a grace period.
    pub fn wait(&self, moment: GraceTicket) -> anyhow::Result<()> {
        let mut requests = self.0.requests();
        while !self.has_passed(moment) {
            if let Some(error) = &requests.wait_error {
                bail!("{error}");
            }
            self.0.changed.wait(&mut requests);
        }
        Ok(())
    }
}

impl Drop for GracePeriods {
    fn drop(&mut self) {
        self.0.requests().is_stopped = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_tickets_pass_in_order() {
        let periods = GracePeriods::start().unwrap();
        let first = periods.request();
        periods.wait(first).unwrap();
        assert!(periods.has_passed(first));
        let second = periods.request();
        assert!(second > first);
        periods.wait(second).unwrap();
        assert!(periods.has_passed(GraceTicket::default()));
    }
}
