//! Values of a BPF array map, in memory that is shared with the programs that use the map.
//!
//! Programs read and write the memory at any time, on any CPU. Therefore no references into the memory are given out,
//! and each access is to one atomic 64-bit or 32-bit word. Larger values are written where no program reads, and then
//! activated by one word. Offsets count bytes from the start, and come from `std::mem::offset_of!` for the layouts in
//! `bpf/include/intf.h`.

use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Memory of a BPF array map, mapped as a `T`, which is one value of the map or a slice of its values.
#[derive(Debug)]
pub struct MmapArray<T: ?Sized> {
    start_address: NonNull<libc::c_void>,
    length_bytes: NonZeroUsize,
    value_type: PhantomData<T>,
}

// SAFETY: the memory belongs to the map, not to a thread; callers are responsible for raw pointers.
unsafe impl<T: ?Sized> Send for MmapArray<T> {}
// SAFETY: as for `Send`; all accesses are atomic.
unsafe impl<T: ?Sized> Sync for MmapArray<T> {}

impl<T: FromBytes + IntoBytes> MmapArray<T> {
    /// Maps the first value of an array map that was created with `BPF_F_MMAPABLE`. The value must be a `T`, a type
    /// from `bpf/include/intf.h` that Rust and BPF code share. Fails when the map is smaller than a `T` or cannot be
    /// mapped.
    pub fn new(map: impl AsFd) -> nix::Result<Self> {
        Self::mmap_bytes(map, size_of::<T>())
    }

    /// Returns the address of the mapped value, valid as long as `self`. BPF programs access the value concurrently.
    pub fn as_mut_ptr(&self) -> *mut T {
        self.start_address.as_ptr().cast()
    }
}

impl<T: FromBytes + IntoBytes> MmapArray<[T]> {
    /// Maps the first `count` values of an array map that was created with `BPF_F_MMAPABLE`. Each value must be a `T`,
    /// whose size must be a multiple of 8, because the kernel aligns values to 8 bytes. Fails when the map is smaller
    /// or cannot be mapped.
    pub fn mmap_slice(map: impl AsFd, count: usize) -> nix::Result<Self> {
        const { assert!(size_of::<T>().is_multiple_of(WORD_BYTES)) };
        Self::mmap_bytes(map, count * size_of::<T>())
    }
}

const WORD_BYTES: usize = size_of::<u64>();
const HALF_WORD_BYTES: usize = size_of::<u32>();

impl<T: ?Sized> MmapArray<T> {
    fn mmap_bytes(map: impl AsFd, bytes: usize) -> nix::Result<Self> {
        let length_bytes = NonZeroUsize::new(bytes).ok_or(nix::errno::Errno::EINVAL)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new shared mapping at an address of the kernel's choice; page-aligned, so aligned for any T here.
        let start_address = unsafe { mmap(None, length_bytes, protection, MapFlags::MAP_SHARED, map, 0) }?;
        Ok(Self { start_address, length_bytes, value_type: PhantomData })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: these bytes are mapped, aligned to a page, until `self` is dropped; programs change them only word
        // by word, as memory of atomic type may be changed.
        unsafe {
            std::slice::from_raw_parts(
                self.start_address.as_ptr().cast::<AtomicU64>(),
                self.length_bytes.get() / WORD_BYTES,
            )
        }
    }

    fn words_in_range(&self, offset: usize, bytes: usize) -> &[AtomicU64] {
        assert!(
            offset.is_multiple_of(WORD_BYTES) && bytes.is_multiple_of(WORD_BYTES),
            "{bytes} bytes at {offset} are no words"
        );
        &self.words()[offset / WORD_BYTES..(offset + bytes) / WORD_BYTES]
    }

    /// Returns the 64-bit word at byte `offset`. Panics when `offset` is not a multiple of 8 or is out of bounds.
    pub fn load(&self, offset: usize) -> u64 {
        self.words_in_range(offset, WORD_BYTES)[0].load(Ordering::Acquire)
    }

    /// Sets the 64-bit word at byte `offset`. Programs that read the new word also see all earlier writes. Panics when
    /// `offset` is not a multiple of 8 or is out of bounds.
    pub fn store(&self, offset: usize, word: u64) {
        self.words_in_range(offset, WORD_BYTES)[0].store(word, Ordering::Release);
    }

    /// Atomically replaces the 64-bit word at byte `offset` by `new` if it equals `old`, with acquire and release
    /// ordering. Returns whether it was replaced. Panics when `offset` is not a multiple of 8 or is out of bounds.
    pub fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> bool {
        let word = &self.words_in_range(offset, WORD_BYTES)[0];
        word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Returns the 32-bit word at byte `offset` as an atomic integer. Panics when `offset` is not a multiple of 4 or is
    /// out of bounds.
    pub fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(HALF_WORD_BYTES) && offset + HALF_WORD_BYTES <= self.length_bytes.get(),
            "no 32-bit word at {offset}"
        );
        // SAFETY: inside the mapping, aligned, and of atomic type, as all access to this memory is.
        unsafe { AtomicU32::from_ptr(self.start_address.as_ptr().byte_add(offset).cast()) }
    }

    /// Returns the 64-bit word at byte `offset` as an atomic integer. Panics when `offset` is not a multiple of 8 or is
    /// out of bounds.
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        &self.words_in_range(offset, WORD_BYTES)[0]
    }

    /// Returns a copy of the value at byte `offset`. It is read word by word, so a BPF program may change it meanwhile.
    /// Panics when the offset or the value's size is not a multiple of 8, or the value is out of bounds.
    pub fn read<V: FromBytes + IntoBytes>(&self, offset: usize) -> Box<V> {
        let mut value = V::new_box_zeroed().expect("memory for one value");
        let words = self.words_in_range(offset, size_of::<V>());
        for (bytes, word) in value.as_mut_bytes().chunks_exact_mut(WORD_BYTES).zip(words) {
            bytes.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
        }
        value
    }

    /// Returns a copy of the `count` values that begin at byte `offset`. They are read word by word, as by
    /// [`read`](Self::read). Panics when `offset` is not a multiple of 8, or a value is out of bounds.
    pub fn read_slice<V: FromBytes + IntoBytes>(&self, offset: usize, count: usize) -> Vec<V> {
        let mut values = V::new_vec_zeroed(count).expect("memory for the values");
        let bytes = values.as_mut_slice().as_mut_bytes();
        let words = self.words_in_range(offset, bytes.len().next_multiple_of(WORD_BYTES));
        for (bytes, word) in bytes.chunks_mut(WORD_BYTES).zip(words) {
            bytes.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes()[..bytes.len()]);
        }
        values
    }

    /// Copies all words to the start of the memory of `target`. Panics when `target` is smaller.
    pub fn copy_to(&self, target: &Self) {
        for (source_word, target_word) in self.words().iter().zip(target.words_in_range(0, self.length_bytes.get())) {
            target_word.store(source_word.load(Ordering::Acquire), Ordering::Relaxed);
        }
    }

    /// Writes `value` at byte `offset`, word by word. During the write, no BPF program may read that memory. Panics
    /// when the offset or the value's size is not a multiple of 8, or the value is out of bounds.
    pub fn write<V: IntoBytes + Immutable + ?Sized>(&self, offset: usize, value: &V) {
        let words = self.words_in_range(offset, size_of_val(value));
        for (bytes, word) in value.as_bytes().chunks_exact(WORD_BYTES).zip(words) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("a word")), Ordering::Relaxed);
        }
    }
}

impl<T: ?Sized> Drop for MmapArray<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and pointers into it do not outlive `self`.
        if let Err(error) = unsafe { munmap(self.start_address, self.length_bytes.get()) } {
            tracing::warn!(
                event = "munmap-failed",
                %error,
                "the process cannot unmap the memory of a BPF array: the memory stays in use"
            );
        }
    }
}
