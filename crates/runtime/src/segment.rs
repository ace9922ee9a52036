//! The shared memory, which is a file that the orchestrator creates and the workers open.
//!
//! Locks on single bytes of the file show which processes are alive, because the kernel releases them when a process
//! ends. There is a byte for the orchestrator, for each core's worker, and for each registered service.

use std::fs::{File, OpenOptions, rename};
use std::mem::align_of;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl, posix_fallocate};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::RuntimeError;
use crate::segment_layout::{
    CACHE_LINE_BYTES, CoreCursors, MEMORY_LAYOUT_VERSION, SHARED_MEMORY_MAGIC, SegmentGeometry, SegmentHeader,
    ServiceRecord,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentServiceEntry {
    /// Address and port to which clients send requests of the service.
    pub address: SocketAddrV4,
    /// Priority of the service's requests, which selects their queue at each core. 0 is the highest priority.
    pub priority: u8,
}

/// Byte of the shared file that a process locks. The lock proves that the process is alive.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LivenessLock {
    Orchestrator,
    Core(u16),
    Service(u8),
}

impl LivenessLock {
    fn byte_offset(self) -> i64 {
        match self {
            Self::Orchestrator => 0,
            Self::Service(service) => 1 + i64::from(service),
            Self::Core(core) => 1024 + i64::from(core),
        }
    }

    fn flock_request(self, lock_type: i32) -> libc::flock {
        let (l_type, l_whence) = (lock_type as i16, libc::SEEK_SET as i16);
        libc::flock { l_type, l_whence, l_start: self.byte_offset(), l_len: 1, l_pid: 0 }
    }
}

#[derive(Debug)]
pub(crate) struct SharedSegment {
    memory_file: File,
    base_address: NonNull<u8>,
    mapped_bytes: NonZeroUsize,
    pub geometry: SegmentGeometry,
}

// SAFETY: the mapping belongs to the process, not to a thread. Cursors are atomic; slots have one owner at a time.
unsafe impl Send for SharedSegment {}
// SAFETY: as above.
unsafe impl Sync for SharedSegment {}

impl Drop for SharedSegment {
    fn drop(&mut self) {
        // SAFETY: mapped by `map_file`, and references into it have the lifetime of `self`.
        let _ = unsafe { munmap(self.base_address.cast(), self.mapped_bytes.get()) };
    }
}

fn io_error(action: &'static str, path: &Path, error: impl Into<std::io::Error>) -> RuntimeError {
    RuntimeError::Io { action, path: path.to_owned(), error: error.into() }
}

fn map_file(file: &File, mapping_bytes: usize, path: &Path) -> Result<(NonNull<u8>, NonZeroUsize), RuntimeError> {
    let mapped_bytes = NonZeroUsize::new(mapping_bytes).ok_or(RuntimeError::ForeignSharedMemory)?;
    let memory_protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base_address = unsafe { mmap(None, mapped_bytes, memory_protection, MapFlags::MAP_SHARED, file, 0) };
    Ok((base_address.map_err(|error| io_error("map", path, error))?.cast(), mapped_bytes))
}

impl SharedSegment {
    /// Creates the complete memory in a temporary file, and then renames the file to `path`. Replaces the file of a
    /// killed orchestrator, whose workers detect that its lock is released.
    pub fn create(
        path: &Path,
        geometry: SegmentGeometry,
        services: &[SegmentServiceEntry],
    ) -> Result<Self, RuntimeError> {
        geometry.check_sizes()?;
        if let Some(entry) = services.iter().find(|entry| entry.priority >= geometry.priority_count) {
            return Err(RuntimeError::PriorityOutOfRange {
                priority: entry.priority,
                last: geometry.priority_count - 1,
            });
        }
        if let Ok(previous_file) = OpenOptions::new().read(true).write(true).open(path)
            && is_locked_by_other(&previous_file, LivenessLock::Orchestrator).unwrap_or(false)
        {
            return Err(RuntimeError::OrchestratorRunning);
        }
        let temporary_path = path.with_extension(format!("{}.new", std::process::id()));
        let _ = std::fs::remove_file(&temporary_path);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let memory_file = options.open(&temporary_path).map_err(|error| io_error("create", &temporary_path, error))?;
        // A page that the file system cannot provide later would end the process with SIGBUS, so all are reserved.
        if let Err(error) = posix_fallocate(&memory_file, 0, geometry.segment_bytes() as i64) {
            let _ = std::fs::remove_file(&temporary_path);
            return Err(io_error("reserve memory", &temporary_path, error));
        }
        let (base_address, mapped_bytes) = map_file(&memory_file, geometry.segment_bytes(), &temporary_path)?;
        let segment = Self { memory_file, base_address, mapped_bytes, geometry };
        segment.try_lock(LivenessLock::Orchestrator).map_err(|error| io_error("lock", &temporary_path, error))?;
        segment.write_header(services);
        rename(&temporary_path, path).map_err(|error| io_error("rename", path, error))?;
        Ok(segment)
    }

    fn write_header(&self, services: &[SegmentServiceEntry]) {
        let (header, geometry) = (self.header(), &self.geometry);
        header.layout_version.store(MEMORY_LAYOUT_VERSION, Relaxed);
        header.owner_user_id.store(nix::unistd::geteuid().as_raw(), Relaxed);
        header.segment_bytes.store(geometry.segment_bytes() as u64, Relaxed);
        header.core_count.store(geometry.core_count.into(), Relaxed);
        header.service_count.store(services.len() as u32, Relaxed);
        header.priority_count.store(geometry.priority_count.into(), Relaxed);
        header.slots_per_queue.store(geometry.slots_per_queue, Relaxed);
        header.slot_bytes.store(geometry.slot_bytes, Relaxed);
        for (service, entry) in services.iter().enumerate() {
            let service_record = self.service_record(service as u8);
            service_record.address.store((*entry.address.ip()).into(), Relaxed);
            service_record.port.store(entry.address.port().into(), Relaxed);
            service_record.priority.store(entry.priority.into(), Relaxed);
        }
        header.magic.store(SHARED_MEMORY_MAGIC, Release);
    }

    /// Opens the memory of a running orchestrator, and checks the whole header.
    pub fn open(path: &Path) -> Result<Self, RuntimeError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
        let memory_file = options.open(path).map_err(|error| io_error("open", path, error))?;
        let file_metadata = memory_file.metadata().map_err(|error| io_error("stat", path, error))?;
        let user_id = nix::unistd::geteuid().as_raw();
        if file_metadata.uid() != user_id {
            return Err(RuntimeError::OwnedByOtherUser { owner: file_metadata.uid(), user: user_id });
        }
        if file_metadata.len() < CACHE_LINE_BYTES as u64 {
            return Err(RuntimeError::ForeignSharedMemory);
        }
        let (base_address, mapped_bytes) = map_file(&memory_file, file_metadata.len() as usize, path)?;
        let minimal_geometry = SegmentGeometry {
            core_count: 1,
            priority_count: 1,
            slots_per_queue: 1,
            slot_bytes: CACHE_LINE_BYTES as u32,
        };
        let mut segment = Self { memory_file, base_address, mapped_bytes, geometry: minimal_geometry };
        segment.geometry = segment.read_geometry(user_id)?;
        if !segment.is_orchestrator_running() {
            return Err(RuntimeError::OrchestratorNotRunning);
        }
        Ok(segment)
    }

    fn read_geometry(&self, user_id: u32) -> Result<SegmentGeometry, RuntimeError> {
        let header = self.header();
        if header.magic.load(Acquire) != SHARED_MEMORY_MAGIC {
            return Err(RuntimeError::ForeignSharedMemory);
        }
        let layout_version = header.layout_version.load(Relaxed);
        if layout_version != MEMORY_LAYOUT_VERSION {
            return Err(RuntimeError::LayoutVersionMismatch { found: layout_version, expected: MEMORY_LAYOUT_VERSION });
        }
        let owner_user_id = header.owner_user_id.load(Relaxed);
        if owner_user_id != user_id {
            return Err(RuntimeError::OwnedByOtherUser { owner: owner_user_id, user: user_id });
        }
        let geometry = SegmentGeometry {
            core_count: u16::try_from(header.core_count.load(Relaxed)).unwrap_or(u16::MAX),
            priority_count: u8::try_from(header.priority_count.load(Relaxed)).unwrap_or(u8::MAX),
            slots_per_queue: header.slots_per_queue.load(Relaxed),
            slot_bytes: header.slot_bytes.load(Relaxed),
        };
        geometry.check_sizes()?;
        let (found, expected) = (self.mapped_bytes.get() as u64, geometry.segment_bytes() as u64);
        if found != expected || header.segment_bytes.load(Relaxed) != expected {
            return Err(RuntimeError::MemorySizeMismatch { found, expected });
        }
        Ok(geometry)
    }

    /// Locks the byte `lock` for this open file. Returns false if another open file holds the lock.
    pub fn try_lock(&self, lock: LivenessLock) -> nix::Result<bool> {
        match fcntl(self.memory_file.as_fd(), FcntlArg::F_OFD_SETLK(&lock.flock_request(libc::F_WRLCK))) {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns whether another open file holds the lock on the byte `lock`.
    pub fn is_locked(&self, lock: LivenessLock) -> nix::Result<bool> {
        is_locked_by_other(&self.memory_file, lock)
    }

    /// Returns whether the orchestrator of this memory is alive. Only workers may call this.
    pub fn is_orchestrator_running(&self) -> bool {
        self.is_locked(LivenessLock::Orchestrator).unwrap_or(false)
    }

    pub fn service_entry(&self, service: u8) -> Result<SegmentServiceEntry, RuntimeError> {
        let service_count = self.header().service_count.load(Relaxed);
        if u32::from(service) >= service_count {
            return Err(RuntimeError::UnknownService { service, services: service_count });
        }
        let service_record = self.service_record(service);
        let address = SocketAddrV4::new(
            Ipv4Addr::from(service_record.address.load(Relaxed)),
            service_record.port.load(Relaxed) as u16,
        );
        Ok(SegmentServiceEntry { address, priority: service_record.priority.load(Relaxed) as u8 })
    }

    pub fn check_core_is_in_range(&self, core: u16) -> Result<(), RuntimeError> {
        let last_core = self.geometry.core_count - 1;
        if core > last_core { Err(RuntimeError::CoreOutOfRange { core, last: last_core }) } else { Ok(()) }
    }

    fn header(&self) -> &SegmentHeader {
        self.ref_at(0)
    }

    fn service_record(&self, service: u8) -> &ServiceRecord {
        self.ref_at(SegmentGeometry::service_record_offset(service))
    }

    /// Returns the cursors of a core. The core's number must be in range.
    #[inline]
    pub fn core_cursors(&self, core: u16) -> &CoreCursors {
        self.ref_at(self.geometry.core_offset(core))
    }

    /// Returns a reference to the sequence number of the slot or message at `offset`.
    #[inline]
    pub fn sequence_number_at(&self, offset: usize) -> &AtomicU32 {
        self.ref_at(offset)
    }

    /// Returns a reference to the `T` at `offset`. All fields of `T` must be atomic.
    #[inline]
    fn ref_at<T>(&self, offset: usize) -> &T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.mapped_bytes.get());
        // SAFETY: inside the mapping and aligned, as the line above checks; atomic fields accept any bit pattern and
        // changes by others.
        unsafe { self.base_address.byte_add(offset).cast().as_ref() }
    }

    /// Returns a pointer to the memory at `offset`. The caller may access `bytes` bytes there while the slot belongs to
    /// its side of the ring.
    #[inline]
    pub fn slot_pointer<T>(&self, offset: usize, bytes: usize) -> *mut T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + bytes <= self.mapped_bytes.get());
        // SAFETY: inside the mapping.
        unsafe { self.base_address.byte_add(offset).cast().as_ptr() }
    }
}

fn is_locked_by_other(file: &File, lock: LivenessLock) -> nix::Result<bool> {
    let mut lock_request = lock.flock_request(libc::F_WRLCK);
    fcntl(file.as_fd(), FcntlArg::F_OFD_GETLK(&mut lock_request))?;
    Ok(lock_request.l_type != libc::F_UNLCK as i16)
}
