//! Facts about the network device that receives the services' packets.

use coreward_agent::load::receive_queue_cpus;
use coreward_agent::rss::ethtool::{self, EthtoolRssDevice, RssFlowType};
use coreward_agent::rss::{RssDevice, RssError};
use coreward_agent::rss_conflicts::RssConflicts;
use coreward_agent::sysfs;
use coreward_dataplane::{device, lb};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::{InterfaceFlags, if_nametoindex};

use crate::facts::{DaemonSettings, DeviceFacts, RssProblem};

/// Returns facts about a network device, or `None` if the device does not exist.
pub(super) fn gather_device(
    name: &str,
    settings: &DaemonSettings,
    configured_rss_device: Option<Box<dyn RssDevice>>,
) -> Option<DeviceFacts> {
    let interface_index = if_nametoindex(name).ok()?;
    let interface_entries: Vec<_> =
        getifaddrs().into_iter().flatten().filter(|entry| entry.interface_name == name).collect();
    let up = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
    let mac_address = interface_entries.iter().find_map(|entry| entry.address.as_ref()?.as_link_addr()?.addr());
    let rss_device = configured_rss_device.unwrap_or_else(|| Box::new(EthtoolRssDevice::new(name)));
    let driver_name = ethtool::driver_name(name).unwrap_or_default();
    let rss_conflicts = RssConflicts::gather(name);
    Some(DeviceFacts {
        is_up: interface_entries.iter().any(|entry| entry.flags.contains(up)),
        is_ethernet: mac_address.is_some_and(|mac| mac != [0; 6]),
        mtu_bytes: device::interface_mtu_bytes(name).unwrap_or(0),
        moves_connections_between_queues: moves_connections_between_queues(name, &driver_name, &rss_conflicts),
        strips_vlan_tags: ethtool::strips_vlan_tags(name).unwrap_or(false),
        vlan_devices: find_vlan_devices(name),
        driver: driver_name,
        queue_counts: coreward_dataplane::ethtool::device_queue_counts(name).ok(),
        is_lro_enabled: ethtool::is_lro_enabled(name).unwrap_or(false),
        port_hashing_by_flow_type: RssFlowType::ALL
            .into_iter()
            .filter_map(|of| Some((of, ethtool::hashes_ports(name, of)?)))
            .collect(),
        xdp_state: device::query_xdp_state(interface_index).unwrap_or_default(),
        veth_peer_has_xdp: coreward_dataplane::veth::peer_has_native_xdp(interface_index),
        xdp_send_error_counts: coreward_dataplane::ethtool::xdp_transmit_error_counters(name),
        own_program_id: settings.pin_directory.as_deref().and_then(|pins| lb::pinned_program_id(pins).ok().flatten()),
        rss_conflicts,
        interrupts_by_queue: receive_queue_cpus::receive_queue_interrupts(name),
        rss_entry_count_and_transform: rss_device
            .read_config()
            .map(|rss| (rss.indirection_table.entry_count(), rss.key.input_transform()))
            .map_err(|error| match error {
                RssError::NoIndirectionTable(_) => RssProblem::NoIndirectionTable(error.to_string()),
                _ => RssProblem::UnsupportedHash(error.to_string()),
            }),
        is_sysfs_visible: sysfs::network_device_directory(name).is_some(),
    })
}

/// Returns whether the driver currently moves open connections to other queues, or `None` if it never can. ixgbe and
/// txgbe move them while rules for single flows are disabled (NETIF_F_NTUPLE in ixgbe_set_features() and
/// wx_set_features()). i40e has a private flag for it.
fn moves_connections_between_queues(name: &str, driver: &str, rss_conflicts: &RssConflicts) -> Option<bool> {
    match driver {
        "ixgbe" | "txgbe" => Some(!rss_conflicts.accepts_flow_rules),
        "i40e" => ethtool::read_private_flag(name, "flow-director-atr"),
        _ => None,
    }
}

fn find_vlan_devices(name: &str) -> Vec<String> {
    let Some(directory) = sysfs::network_device_directory(name) else { return vec![] };
    let upper_device_name =
        |entry: std::fs::DirEntry| Some(entry.file_name().to_str()?.strip_prefix("upper_")?.to_owned());
    let is_vlan = |upper_device_name: &String| {
        let uevent_text =
            std::fs::read_to_string(format!("/sys/class/net/{upper_device_name}/uevent")).unwrap_or_default();
        uevent_text.lines().any(|line| line == "DEVTYPE=vlan")
    };
    let mut vlan_devices: Vec<String> = std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(upper_device_name)
        .filter(is_vlan)
        .collect();
    vlan_devices.sort();
    vlan_devices
}
