//! XDP link operations that libbpf-rs lacks, namely creating a link with flags and pinning a file descriptor.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::Context as _;
use libbpf_rs::libbpf_sys;
use libbpf_rs::query::{LinkInfo, LinkTypeInfo};

use super::AttachedXdpMode;

fn to_c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Converts a libbpf function's result to an owned file descriptor. A negative result is a negated errno.
fn fd_from_libbpf_result(result: i32) -> io::Result<OwnedFd> {
    if result < 0 {
        return Err(io::Error::from_raw_os_error(-result));
    }
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}

fn check_libbpf_result(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

pub(crate) fn pin_object(object: BorrowedFd<'_>, path: &Path) -> anyhow::Result<()> {
    let c_path = to_c_path(path)?;
    // SAFETY: the string lives through the call.
    check_libbpf_result(unsafe { libbpf_sys::bpf_obj_pin(object.as_raw_fd(), c_path.as_ptr()) })
        .with_context(|| format!("pinning {}", path.display()))
}

/// Removes a pinned object, if `path` exists.
pub(crate) fn unpin_object(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).with_context(|| path.display().to_string()),
        _ => Ok(()),
    }
}

/// BPF link that attaches an XDP program to a device. The program stays attached while the link is open or pinned.
#[derive(Debug)]
pub(crate) struct XdpLink(OwnedFd);

impl XdpLink {
    /// Attaches an XDP program to a device. Fails when the device already has an XDP program (`EBUSY`), or the driver
    /// does not support the requested native mode.
    pub fn create(program: BorrowedFd<'_>, interface_index: u32, attachment: AttachedXdpMode) -> io::Result<Self> {
        let xdp_flags = match attachment {
            AttachedXdpMode::Native => libbpf_sys::XDP_FLAGS_DRV_MODE,
            AttachedXdpMode::Generic => libbpf_sys::XDP_FLAGS_SKB_MODE,
        };
        let create_options = libbpf_sys::bpf_link_create_opts {
            sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
            flags: xdp_flags,
            ..Default::default()
        };
        // SAFETY: `create_options` lives through the call.
        let link_fd_or_error = unsafe {
            libbpf_sys::bpf_link_create(
                program.as_raw_fd(),
                interface_index as i32,
                libbpf_sys::BPF_XDP,
                &create_options,
            )
        };
        Ok(Self(fd_from_libbpf_result(link_fd_or_error)?))
    }

    /// Attaches the program in native mode if the driver supports it, or else in generic mode. Fails when the device
    /// has another XDP program (`EBUSY`).
    pub fn create_in_any_mode(program: BorrowedFd<'_>, interface_index: u32) -> io::Result<(Self, AttachedXdpMode)> {
        let create_in_mode = |attachment| Ok((Self::create(program, interface_index, attachment)?, attachment));
        create_in_mode(AttachedXdpMode::Native).or_else(|error: io::Error| match error.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => Err(error),
            _ => create_in_mode(AttachedXdpMode::Generic),
        })
    }

    /// Opens the link that is pinned at `path`. Returns `None` if there is no such pin.
    pub fn open_pinned(path: &Path) -> anyhow::Result<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let c_path = to_c_path(path)?;
        // SAFETY: the string lives through the call.
        let link_fd_or_error = unsafe { libbpf_sys::bpf_obj_get(c_path.as_ptr()) };
        Ok(Some(Self(fd_from_libbpf_result(link_fd_or_error).with_context(|| path.display().to_string())?)))
    }

    /// Returns the index of the device to which the program is attached, or 0 if the device was removed.
    pub fn interface_index(&self) -> anyhow::Result<u32> {
        match LinkInfo::from_fd(self.0.as_fd()).context("reading the link")?.info {
            LinkTypeInfo::Xdp(xdp) => Ok(xdp.ifindex),
            _ => anyhow::bail!("the pinned link is not of type XDP"),
        }
    }

    pub fn program_id(&self) -> anyhow::Result<u32> {
        Ok(LinkInfo::from_fd(self.0.as_fd()).context("reading the link")?.prog_id)
    }

    /// Replaces the attached program atomically, without losing packets.
    pub fn replace_program(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: no options are passed.
        check_libbpf_result(unsafe {
            libbpf_sys::bpf_link_update(self.0.as_raw_fd(), program.as_raw_fd(), std::ptr::null())
        })
    }

    pub fn pin(&self, path: &Path) -> anyhow::Result<()> {
        pin_object(self.0.as_fd(), path)
    }
}
