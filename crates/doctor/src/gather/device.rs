//! The device of the services' packets.

use coreward_agent::hazards::Hazards;
use coreward_agent::load::queues;
use coreward_agent::rss::ethtool::{self, EthtoolRss};
use coreward_agent::rss::{RssDevice, RssUnknown};
use coreward_agent::sysfs;
use coreward_dataplane::{device, lb};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::{InterfaceFlags, if_nametoindex};

use crate::facts::{Device, RssProblem, Settings};

/// `None`: there is none of that name.
pub(super) fn look(name: &str, settings: &Settings, rss: Option<Box<dyn RssDevice>>) -> Option<Device> {
    let index = if_nametoindex(name).ok()?;
    let entries: Vec<_> = getifaddrs().into_iter().flatten().filter(|entry| entry.interface_name == name).collect();
    let up = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
    let mac = entries.iter().find_map(|entry| entry.address.as_ref()?.as_link_addr()?.addr());
    let rss = rss.unwrap_or_else(|| Box::new(EthtoolRss::new(name)));
    Some(Device {
        running: entries.iter().any(|entry| entry.flags.contains(up)),
        ethernet: mac.is_some_and(|mac| mac != [0; 6]),
        mtu: device::mtu(name).unwrap_or(0),
        driver: ethtool::driver(name).unwrap_or_default(),
        channels: ethtool::all_channels(name).ok(),
        lro: ethtool::merges_what_it_receives(name).unwrap_or(false),
        udp_ports: ethtool::hashes_udp_ports(name),
        xdp: device::xdp(index).unwrap_or_default(),
        own_xdp: settings.pin_directory.as_deref().and_then(|pins| lb::pinned_program(pins).ok().flatten()),
        hazards: Hazards::gather(name),
        interrupts: queues::interrupts(name),
        rss: rss.read().map(|rss| rss.indirection_table.entry_count()).map_err(|error| match error {
            RssUnknown::Unsupported(_) => RssProblem::None(error.to_string()),
            _ => RssProblem::Other(error.to_string()),
        }),
        seen_in_sys: sysfs::device_directory(name).is_some(),
    })
}
