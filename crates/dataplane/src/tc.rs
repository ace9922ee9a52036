//! Attachment of programs to a device's tc hooks, by pinned tcx links or (before kernel 6.6) by clsact filters.
//! Programs stay attached when this process ends. Attaching again replaces them atomically.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use anyhow::Context as _;
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, TcAttachPoint, TcHook, TcHookBuilder, libbpf_sys};

/// Direction of the packets that a program processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketDirection {
    /// Packets that the device receives.
    Ingress,
    /// Packets that the device sends.
    Egress,
}

impl PacketDirection {
    fn tcx_attach_type(self) -> libbpf_sys::bpf_attach_type {
        match self {
            PacketDirection::Ingress => libbpf_sys::BPF_TCX_INGRESS,
            PacketDirection::Egress => libbpf_sys::BPF_TCX_EGRESS,
        }
    }

    fn clsact_attach_point(self) -> TcAttachPoint {
        match self {
            PacketDirection::Ingress => libbpf_rs::TC_INGRESS,
            PacketDirection::Egress => libbpf_rs::TC_EGRESS,
        }
    }
}

/// Mechanism by which a program is attached to a device's tc hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcAttachMechanism {
    /// The program is attached by a tcx link.
    Tcx,
    /// The program is attached by a filter of the clsact qdisc.
    Clsact,
}

/// Priority of coreward's filter in the clsact qdisc, the highest possible. The handle identifies the filter.
const CLSACT_FILTER_PRIORITY: u32 = 1;
const CLSACT_FILTER_HANDLE: u32 = 0xc03e;
const CLSACT_TEMPORARY_PRIORITY: u32 = 2;

/// Attaches `program` to a device. If the link pinned at `pin_path` belongs to the same device, replaces its program.
/// Fails when neither tcx nor clsact accepts the program.
pub fn attach_tc_program(
    program: BorrowedFd<'_>,
    interface_index: u32,
    direction: PacketDirection,
    pin_path: &Path,
) -> anyhow::Result<TcAttachMechanism> {
    if let Some(link) = open_pinned_link(pin_path)? {
        if is_link_attached_to_interface(&link, interface_index) {
            replace_program(&link, program)
                .with_context(|| format!("replacing the program of {}", pin_path.display()))?;
            return Ok(TcAttachMechanism::Tcx);
        }
        fs::remove_file(pin_path).with_context(|| format!("removing {}", pin_path.display()))?;
    }
    match create_tcx_link(program, interface_index, direction) {
        Ok(link) => {
            pin_object(link.as_fd(), pin_path)?;
            Ok(TcAttachMechanism::Tcx)
        }
        Err(error) if error.kind() == ErrorKind::InvalidInput => {
            attach_to_clsact(program, interface_index, direction).map(|()| TcAttachMechanism::Clsact)
        }
        Err(error) => Err(error).context("making a tcx link"),
    }
}

/// Attachment of a program to a tc hook, which ends when the value is dropped.
#[derive(Debug)]
pub struct TemporaryTcAttachment(TemporaryTcHook);

#[derive(Debug)]
enum TemporaryTcHook {
    Tcx { _link: OwnedFd },
    Clsact { hook: TcHook, interface_index: u32, direction: PacketDirection },
}

/// Attaches `program` to a device, in addition to other programs, until the result is dropped. If the process is
/// killed, Linux 6.6 and later detach the program. On earlier kernels, it remains attached until the next call replaces
/// it. Fails when neither tcx nor clsact accepts the program.
pub fn attach_until_drop(
    program: BorrowedFd<'_>,
    interface_index: u32,
    direction: PacketDirection,
) -> anyhow::Result<TemporaryTcAttachment> {
    match create_tcx_link(program, interface_index, direction) {
        Ok(link) => Ok(TemporaryTcAttachment(TemporaryTcHook::Tcx { _link: link })),
        Err(error) if error.kind() == ErrorKind::InvalidInput => {
            let mut clsact_hook = new_clsact_hook(program, interface_index, direction);
            clsact_hook.priority(CLSACT_TEMPORARY_PRIORITY);
            clsact_hook.create().context("making a clsact qdisc")?;
            let hook = clsact_hook.attach().context("attaching to the clsact qdisc")?;
            Ok(TemporaryTcAttachment(TemporaryTcHook::Clsact { hook, interface_index, direction }))
        }
        Err(error) => Err(error).context("making a tcx link"),
    }
}

impl Drop for TemporaryTcAttachment {
    fn drop(&mut self) {
        if let TemporaryTcHook::Clsact { hook, interface_index, direction } = &mut self.0
            && let Err(error) = hook.detach()
        {
            tracing::warn!(
                event = "not-detached",
                interface_index,
                ?direction,
                %error,
                "the process cannot detach a temporary program from the device: remove it with `tc filter del`"
            );
        }
    }
}

/// Attaches `program` by a clsact filter, as kernels before 6.6 require, in place of an earlier program.
pub fn attach_to_clsact(
    program: BorrowedFd<'_>,
    interface_index: u32,
    direction: PacketDirection,
) -> anyhow::Result<()> {
    let mut clsact_hook = new_clsact_hook(program, interface_index, direction);
    clsact_hook.create().context("making a clsact qdisc")?;
    clsact_hook.attach().context("attaching to the clsact qdisc")?;
    Ok(())
}

/// Detaches the program that [`attach_tc_program`] has attached, if any.
pub fn detach_tc_program(interface_index: u32, direction: PacketDirection, pin_path: &Path) -> anyhow::Result<()> {
    if let Some(link) = open_pinned_link(pin_path)? {
        // An error means that the device was removed, so that nothing is attached.
        if let Err(error) = link.detach() {
            tracing::debug!(
                event = "link-not-detached",
                interface_index,
                pin = %pin_path.display(),
                %error,
                "the agent cannot detach its program: the device may be gone"
            );
        }
        return fs::remove_file(pin_path).with_context(|| format!("removing {}", pin_path.display()));
    }
    // SAFETY: detaching and querying use the hook alone, not the program's descriptor.
    let unused_fd = unsafe { BorrowedFd::borrow_raw(0) };
    let mut clsact_hook = new_clsact_hook(unused_fd, interface_index, direction);
    if clsact_hook.query().is_ok() {
        clsact_hook.detach().context("detaching from the clsact qdisc")?;
    }
    Ok(())
}

/// Returns whether the link pinned at `pin_path` attaches a program to the device's tc hook for `direction`. Fails when
/// the pin is not a link, or the kernel does not list the hook's programs.
pub fn is_tc_program_attached(
    interface_index: u32,
    direction: PacketDirection,
    pin_path: &Path,
) -> anyhow::Result<bool> {
    let Some(link) = open_pinned_link(pin_path)? else { return Ok(false) };
    // The program ids decide, because the same interface index may exist in another network namespace.
    let program_ids_at_hook = query_program_ids(interface_index, direction)?;
    Ok(is_link_attached_to_interface(&link, interface_index) && program_ids_at_hook.contains(&link.info()?.prog_id))
}

/// Maximum number of programs on one tc hook (the kernel's BPF_MPROG_MAX).
const MAX_PROGRAMS_PER_TC_HOOK: usize = 64;

fn query_program_ids(interface_index: u32, direction: PacketDirection) -> anyhow::Result<Vec<u32>> {
    let mut program_ids = [0u32; MAX_PROGRAMS_PER_TC_HOOK];
    let mut query_options = libbpf_sys::bpf_prog_query_opts {
        sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as libbpf_sys::size_t,
        prog_ids: program_ids.as_mut_ptr(),
        ..Default::default()
    };
    query_options.__bindgen_anon_1.count = MAX_PROGRAMS_PER_TC_HOOK as u32;
    // SAFETY: `query_options` and `program_ids`, of the declared length, live through the call.
    let result = unsafe {
        libbpf_sys::bpf_prog_query_opts(interface_index as i32, direction.tcx_attach_type(), &raw mut query_options)
    };
    match -result {
        // EINVAL means that the kernel has no tcx.
        libc::EINVAL => return Ok(Vec::new()),
        error if error > 0 => {
            return Err(std::io::Error::from_raw_os_error(error)).context("asking for the programs at the device");
        }
        _ => {}
    }
    // SAFETY: both fields of the union are the same number.
    let program_count = unsafe { query_options.__bindgen_anon_1.count } as usize;
    Ok(program_ids.into_iter().take(program_count).collect())
}

fn open_pinned_link(pin_path: &Path) -> anyhow::Result<Option<Link>> {
    if !pin_path.exists() {
        return Ok(None);
    }
    Link::open(pin_path).map(Some).with_context(|| pin_path.display().to_string())
}

fn is_link_attached_to_interface(link: &Link, interface_index: u32) -> bool {
    // A link whose device was removed has the index 0.
    matches!(link.info().map(|info| info.info), Ok(LinkTypeInfo::Tcx(tcx)) if tcx.ifindex == interface_index)
}

fn create_tcx_link(
    program: BorrowedFd<'_>,
    interface_index: u32,
    direction: PacketDirection,
) -> Result<OwnedFd, std::io::Error> {
    let target_index = interface_index as i32;
    // SAFETY: no options are passed; the kernel checks the rest.
    let link_fd_or_error = unsafe {
        libbpf_sys::bpf_link_create(program.as_raw_fd(), target_index, direction.tcx_attach_type(), std::ptr::null())
    };
    if link_fd_or_error < 0 {
        return Err(std::io::Error::from_raw_os_error(-link_fd_or_error));
    }
    // SAFETY: a new descriptor, owned by nothing else.
    Ok(unsafe { OwnedFd::from_raw_fd(link_fd_or_error) })
}

/// Replaces a link's program atomically, without losing packets.
fn replace_program(link: &Link, program: BorrowedFd<'_>) -> std::io::Result<()> {
    // SAFETY: no options are passed; the kernel checks the rest.
    let result =
        unsafe { libbpf_sys::bpf_link_update(link.as_fd().as_raw_fd(), program.as_raw_fd(), std::ptr::null()) };
    if result < 0 { Err(std::io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

pub(crate) fn pin_object(object: BorrowedFd<'_>, pin_path: &Path) -> anyhow::Result<()> {
    let c_path = std::ffi::CString::new(pin_path.as_os_str().as_encoded_bytes()).context("a path with a zero byte")?;
    // SAFETY: a valid descriptor and a terminated string.
    let result = unsafe { libbpf_sys::bpf_obj_pin(object.as_raw_fd(), c_path.as_ptr()) };
    if result < 0 {
        let pin_error = std::io::Error::from_raw_os_error(-result);
        return Err(pin_error).with_context(|| format!("pinning {} (is bpffs mounted there?)", pin_path.display()));
    }
    Ok(())
}

fn new_clsact_hook(program: BorrowedFd<'_>, interface_index: u32, direction: PacketDirection) -> TcHook {
    let mut hook_builder = TcHookBuilder::new(program);
    hook_builder
        .ifindex(interface_index as i32)
        .replace(true)
        .handle(CLSACT_FILTER_HANDLE)
        .priority(CLSACT_FILTER_PRIORITY);
    hook_builder.hook(direction.clsact_attach_point())
}
