//! Emulated cores with their busy times, and the file in which servers publish these times or other worker counters.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use anyhow::{Context as _, bail};

/// Emulated core with a queue of requests. It computes when each request would end, but executes none.
#[derive(Debug, Default)]
pub(crate) struct VirtualCore {
    /// Total service time of all requests accepted so far (ns).
    accepted_service_time_ns: u64,
    /// Time when the last accepted request will end (ns).
    busy_until_ns: u64,
}

impl VirtualCore {
    /// Queues a request that arrives at `now_ns` and takes `service_ns`. Returns the time when the request will end
    /// (ns).
    pub(crate) fn enqueue_request(&mut self, now_ns: u64, service_ns: u64) -> u64 {
        self.accepted_service_time_ns += service_ns;
        self.busy_until_ns = self.busy_until_ns.max(now_ns) + service_ns;
        self.busy_until_ns
    }

    /// Returns whether the core serves a request at `now_ns`.
    pub(crate) fn is_busy(&self, now_ns: u64) -> bool {
        self.busy_until_ns > now_ns
    }

    /// Returns the core's total busy time until `now_ns` (ns). It is the total accepted service time minus the time
    /// until the last request ends, because a core with queued requests is never idle.
    pub(crate) fn total_busy_ns(&self, now_ns: u64) -> u64 {
        self.accepted_service_time_ns - self.busy_until_ns.saturating_sub(now_ns)
    }
}

/// File of 64-bit counters that all workers map into memory. A paced server's file contains each core's busy time (ns).
pub(crate) struct SharedCounterFile {
    counters: &'static [AtomicU64],
    temporary_path: PathBuf,
}

impl SharedCounterFile {
    pub(crate) fn create(path: &Path, counter_count: usize) -> anyhow::Result<Self> {
        let temporary_path = path.with_extension("new");
        let open_and_map = || -> anyhow::Result<&'static [AtomicU64]> {
            let counter_file =
                File::options().read(true).write(true).create(true).truncate(true).open(&temporary_path)?;
            counter_file.set_len((counter_count * size_of::<u64>()) as u64)?;
            map_counter_file(&counter_file, counter_count)
        };
        let counters =
            open_and_map().with_context(|| format!("cannot make the core load file {}", temporary_path.display()))?;
        Ok(Self { counters, temporary_path })
    }

    pub(crate) fn counters(&self) -> &'static [AtomicU64] {
        self.counters
    }

    /// Removes the file's temporary path. Afterwards only workers that have mapped the file can use it.
    pub(crate) fn unlink(&self) -> anyhow::Result<()> {
        fs::remove_file(&self.temporary_path)
            .with_context(|| format!("cannot remove {}", self.temporary_path.display()))
    }

    /// Moves the file to its final path `path`, whose existence shows that the server's sockets listen.
    pub(crate) fn publish(&self, path: &Path) -> anyhow::Result<()> {
        fs::rename(&self.temporary_path, path)
            .with_context(|| format!("cannot make the core load file {}", path.display()))
    }
}

fn map_counter_file(file: &File, counter_count: usize) -> anyhow::Result<&'static [AtomicU64]> {
    use std::os::fd::AsRawFd as _;
    let (length, access) = (counter_count * size_of::<AtomicU64>(), libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: a new shared mapping at an address of the kernel's choice.
    let mapping_address =
        unsafe { libc::mmap(std::ptr::null_mut(), length, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if mapping_address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: the mapping is `length` bytes long, aligned to a page, never unmapped, and only accessed atomically.
    Ok(unsafe { std::slice::from_raw_parts(mapping_address.cast(), counter_count) })
}

/// Returns the cores' busy times (ns) from a core load file. Fails when the file cannot be read or has an incomplete
/// entry.
pub fn read_core_load_file(path: &Path) -> anyhow::Result<Vec<u64>> {
    let bytes = fs::read(path).with_context(|| format!("cannot read the core load file {}", path.display()))?;
    let (cores, remainder) = bytes.as_chunks::<8>();
    if !remainder.is_empty() {
        bail!("the core load file {} has {} bytes: expected a multiple of 8", path.display(), bytes.len());
    }
    Ok(cores.iter().map(|core| u64::from_le_bytes(*core)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_serves_requests_one_after_the_other() {
        let mut core = VirtualCore::default();
        assert_eq!(core.enqueue_request(1_000, 50), 1_050);
        // This request arrives while the core serves the first one, so it waits.
        assert_eq!(core.enqueue_request(1_020, 50), 1_100);
        // This request arrives at an idle core, so it starts at once.
        assert_eq!(core.enqueue_request(1_200, 10), 1_210);
    }

    #[test]
    fn busy_time_equals_served_service_time() {
        let mut core = VirtualCore::default();
        assert_eq!(core.total_busy_ns(500), 0);
        core.enqueue_request(1_000, 100);
        assert_eq!([1_000, 1_040, 1_100, 1_150].map(|now| core.total_busy_ns(now)), [0, 40, 100, 100]);
        core.enqueue_request(1_200, 100);
        core.enqueue_request(1_210, 100);
        assert_eq!([1_250, 1_399, 1_400, 2_000].map(|now| core.total_busy_ns(now)), [150, 299, 300, 300]);
    }
}
