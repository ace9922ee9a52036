//! Run times of attached BPF programs, from the kernel's statistics.

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use anyhow::ensure;
use libbpf_rs::libbpf_sys;

/// Makes the kernel measure the run times of BPF programs until the returned descriptor is closed. Fails without root.
pub fn enable_run_time_statistics() -> anyhow::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    let descriptor_or_error = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
    ensure!(descriptor_or_error >= 0, "BPF_ENABLE_STATS: {}", std::io::Error::from_raw_os_error(-descriptor_or_error));
    // SAFETY: a new descriptor, owned by nothing else.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor_or_error) })
}

/// Returns the total run time of a BPF program (ns), and the number of its runs.
pub fn read_run_ns_and_count(program: BorrowedFd<'_>) -> anyhow::Result<(u64, u64)> {
    let mut program_info = libbpf_sys::bpf_prog_info::default();
    let mut program_info_bytes = size_of_val(&program_info) as u32;
    // SAFETY: the pointer is of a struct of that length, which lives until the call returns.
    let result = unsafe {
        libbpf_sys::bpf_obj_get_info_by_fd(
            program.as_raw_fd(),
            (&raw mut program_info).cast(),
            &raw mut program_info_bytes,
        )
    };
    ensure!(result == 0, "BPF_OBJ_GET_INFO_BY_FD: {}", std::io::Error::from_raw_os_error(-result));
    Ok((program_info.run_time_ns, program_info.run_cnt))
}
