//! Settings and counters of network drivers, which are accessed by the ethtool ioctl.
//!
//! The layouts are those of include/uapi/linux/ethtool.h. Each request is one buffer, whose first word is the command's
//! number.

use std::io;
use std::os::fd::AsRawFd as _;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

const SIOCETHTOOL: libc::c_ulong = 0x8946;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSTATS: u32 = 0x1d;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_SFLAGS: u32 = 0x26;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// Bit of [`read_offload_flags`] that is set if the device strips VLAN tags from received packets.
pub const ETH_FLAG_RXVLAN: u32 = 1 << 8;
/// Bit of [`read_offload_flags`] that is set if the device merges received packets (LRO), which then cannot be
/// forwarded.
pub const ETH_FLAG_LRO: u32 = 1 << 15;
/// Bit of [`read_offload_flags`] that is set if the device applies flow steering rules, as accelerated RFS requires.
pub const ETH_FLAG_NTUPLE: u32 = 1 << 27;

/// Performs one ethtool ioctl on a device. `request` contains the command as 32-bit words, and receives the answer.
/// Fails when the device does not exist, or its driver rejects the request.
///
/// # Safety
/// `request` must have the length that its header specifies, because the kernel writes that many bytes.
pub unsafe fn ethtool_ioctl(interface: &str, request: &mut [u32]) -> io::Result<()> {
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut ifreq = ifreq_for_interface(interface)?;
    ifreq.ifr_ifru.ifru_data = request.as_mut_ptr().cast();
    // SAFETY: `request` has the length that its header gives, by this function's contract.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut ifreq) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns a device's offload flags, whose bits are those of `enum ethtool_flags`. Fails when the driver does not
/// report them.
pub fn read_offload_flags(interface: &str) -> io::Result<u32> {
    let mut flags_request = [ETHTOOL_GFLAGS, 0];
    // SAFETY: struct ethtool_value has two words.
    unsafe { ethtool_ioctl(interface, &mut flags_request) }?;
    Ok(flags_request[1])
}

/// Sets a device's offload flags, whose bits are those of `enum ethtool_flags`. Fails when the driver rejects them.
pub fn set_offload_flags(interface: &str, flags: u32) -> io::Result<()> {
    // SAFETY: struct ethtool_value has two words.
    unsafe { ethtool_ioctl(interface, &mut [ETHTOOL_SFLAGS, flags]) }
}

/// Returns an `ifreq`, the argument of interface ioctls, with the interface's name. Fails when the name is too long.
pub(crate) fn ifreq_for_interface(interface: &str) -> io::Result<libc::ifreq> {
    // SAFETY: a struct of integers and pointers, for which zero is a value.
    let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= ifreq.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (name_char, byte) in ifreq.ifr_name.iter_mut().zip(interface.bytes()) {
        *name_char = byte as libc::c_char;
    }
    Ok(ifreq)
}

/// Returns up to `max_strings` names from one of the driver's string sets (`enum ethtool_stringset`). Fails when the
/// device does not exist, or its driver has no such set.
pub fn driver_string_set(interface: &str, set_id: u32, max_strings: u32) -> io::Result<Vec<String>> {
    const ETHTOOL_STRING_U32_COUNT: usize = 8;
    // struct ethtool_sset_info consists of cmd, reserved, sset_mask (64 bits) and a count for each requested set.
    let mut set_info_request = [ETHTOOL_GSSET_INFO, 0, 1 << set_id, 0, 0];
    // SAFETY: one set is asked for, and there is room for its count.
    unsafe { ethtool_ioctl(interface, &mut set_info_request) }?;
    let string_count = set_info_request[4].min(max_strings);
    // struct ethtool_gstrings consists of cmd, string_set, len and names of 32 bytes. The kernel writes all names.
    let mut strings_request = vec![0; 3 + set_info_request[4] as usize * ETHTOOL_STRING_U32_COUNT];
    strings_request[..3].copy_from_slice(&[ETHTOOL_GSTRINGS, set_id, set_info_request[4]]);
    // SAFETY: there is room for as many names as the driver has.
    unsafe { ethtool_ioctl(interface, &mut strings_request) }?;
    let decode_string = |string_words: &[u32]| {
        let bytes: Vec<u8> =
            string_words.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ok(strings_request[3..].chunks(ETHTOOL_STRING_U32_COUNT).take(string_count as usize).map(decode_string).collect())
}

/// Returns the names and values of the driver's counters (`ethtool -S`), or an empty list if the driver has none.
pub fn driver_counters(interface: &str) -> Vec<(String, u64)> {
    const ETH_SS_STATS: u32 = 1;
    // The names are not limited, because a NIC has only some thousand counters.
    let counter_names = driver_string_set(interface, ETH_SS_STATS, u32::MAX).unwrap_or_default();
    // struct ethtool_stats consists of cmd, n_stats and 64 bits per counter. There is extra room, because counters are
    // added if the number of queues has grown since the names were read.
    let mut statistics_request = vec![0; 2 + 2 * (2 * counter_names.len() + 1024)];
    statistics_request[..2].copy_from_slice(&[ETHTOOL_GSTATS, counter_names.len() as u32]);
    // SAFETY: there is room for all counters.
    if counter_names.is_empty() || unsafe { ethtool_ioctl(interface, &mut statistics_request) }.is_err() {
        return vec![];
    }
    let decode_counter_value = |value_words: &[u32]| {
        u64::from_ne_bytes(
            [value_words[0].to_ne_bytes(), value_words[1].to_ne_bytes()].concat().try_into().expect("8 bytes"),
        )
    };
    counter_names.into_iter().zip(statistics_request[2..].chunks(2).map(decode_counter_value)).collect()
}

/// Returns the nonzero driver counters of frames that the driver dropped after an XDP program had sent them.
pub fn xdp_transmit_error_counters(interface: &str) -> Vec<(String, u64)> {
    filter_xdp_transmit_errors(driver_counters(interface))
}

/// Selects the counters of XDP transmit errors by their names, such as `rx_queue_0_xdp_tx_errors` (veth),
/// `rx_xdp_tx_full` and `rx_xdp_tx_err` (mlx5). The drivers bnxt, ena and virtio_net have similar names.
fn filter_xdp_transmit_errors(counters: Vec<(String, u64)>) -> Vec<(String, u64)> {
    let is_transmit_error = |name: &str| {
        let xdp_tx_suffix = name.split_once("xdp_tx").map(|(_, suffix)| suffix);
        xdp_tx_suffix
            .is_some_and(|suffix| ["err", "full", "drop"].iter().any(|error_marker| suffix.contains(error_marker)))
    };
    counters.into_iter().filter(|(name, count)| *count > 0 && is_transmit_error(name)).collect()
}

/// Returns the number of a device's receive queues, including combined queues (`ethtool -l`). Fails when the driver
/// does not report it.
pub fn receive_queue_count(interface: &str) -> io::Result<u16> {
    device_queue_counts(interface).map(|channels| channels.receive_queues)
}

/// Numbers of a device's receive and transmit queues (`ethtool -l`). Combined queues count in both numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceQueueCounts {
    /// Number of receive queues, at least 1.
    pub receive_queues: u16,
    /// Maximum number of receive queues that the device supports.
    pub max_receive_queues: u16,
    /// Number of transmit queues, at least 1.
    pub transmit_queues: u16,
}

/// Returns the numbers of a device's receive and transmit queues. Fails when the driver does not report them.
pub fn device_queue_counts(interface: &str) -> io::Result<DeviceQueueCounts> {
    // struct ethtool_channels consists of cmd, max_{rx,tx,other,combined} and {rx,tx,other,combined}_count.
    let mut channels_request = [ETHTOOL_GCHANNELS, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: the struct has nine words.
    unsafe { ethtool_ioctl(interface, &mut channels_request) }?;
    let add_combined_queues = |dedicated_count: u32, combined_count: u32| {
        u16::try_from(dedicated_count.saturating_add(combined_count)).unwrap_or(u16::MAX).max(1)
    };
    Ok(DeviceQueueCounts {
        receive_queues: add_combined_queues(channels_request[5], channels_request[8]),
        max_receive_queues: add_combined_queues(channels_request[1], channels_request[4]),
        transmit_queues: add_combined_queues(channels_request[6], channels_request[8]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xdp_transmit_errors_are_found_among_driver_counters() {
        let driver_counters = [
            ("rx_queue_0_xdp_tx", 9),
            ("rx_queue_0_xdp_tx_errors", 4),
            ("rx_queue_1_xdp_tx_errors", 0),
            ("rx_xdp_tx_full", 2),
            ("rx_xdp_drop", 3),
        ];
        let found_errors =
            filter_xdp_transmit_errors(driver_counters.map(|(name, count)| (name.to_owned(), count)).into());
        let expected_errors = [("rx_queue_0_xdp_tx_errors", 4), ("rx_xdp_tx_full", 2)];
        assert_eq!(found_errors, expected_errors.map(|(name, count)| (name.to_owned(), count)));
    }
}
