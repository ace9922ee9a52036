//! Finds a device's directory in /sys. After `nsenter --net` or `ip netns exec`, /sys may show another network
//! namespace, which may have a device of the same name.

use std::fs;
use std::path::{Path, PathBuf};

use nix::ifaddrs::getifaddrs;

/// Returns `/sys/class/net/INTERFACE`, or `None` if /sys is missing or belongs to another network namespace.
pub fn network_device_directory(interface: &str) -> Option<PathBuf> {
    let directory = Path::new("/sys/class/net").join(interface);
    let sysfs_mac_address = fs::read_to_string(directory.join("address")).ok()?;
    let own_mac_address = getifaddrs().ok()?.find_map(|entry| {
        let address = *entry.address.as_ref().filter(|_| entry.interface_name == interface)?.as_link_addr()?;
        address.addr()
    })?;
    let own_mac_address: Vec<String> = own_mac_address.iter().map(|byte| format!("{byte:02x}")).collect();
    (sysfs_mac_address.trim() == own_mac_address.join(":")).then_some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_device_has_no_sysfs_directory() {
        assert_eq!(network_device_directory("nonexistent0"), None);
    }
}
