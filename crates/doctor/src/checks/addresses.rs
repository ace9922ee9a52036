//! Checks of IP addresses, ARP and IPv6.

use std::net::IpAddr;

use crate::facts::{DeviceAddress, MachineFacts, MachineRole, ipv4_device_sysctl_path, ipv6_disabling_sysctl_path};
use crate::finding::Finding;

const LOOPBACK_DEVICE: &str = "lo";

pub fn check_vips(facts: &MachineFacts) -> Vec<Finding> {
    let vips = facts.vips();
    if vips.is_empty() {
        return vec![Finding::unknown(
            "no service of this machine is known: neither by the controller nor by --service",
        )];
    }
    let check_vip_of_role = match facts.role {
        MachineRole::Server => check_vip_at_server,
        _ => check_vip_at_load_balancer,
    };
    vips.into_iter().map(|vip| check_vip_of_role(facts, vip)).collect()
}

fn devices_with_address(facts: &MachineFacts, vip: IpAddr) -> Vec<&str> {
    facts
        .addresses
        .iter()
        .filter(|device_address| device_address.address == vip)
        .map(|held| held.device_name.as_str())
        .collect()
}

fn check_vip_at_server(facts: &MachineFacts, vip: IpAddr) -> Finding {
    let devices_with_vip = devices_with_address(facts, vip);
    let (prefix, condition) = match vip {
        IpAddr::V4(_) => ("32", "  # after arp-ignore and arp-announce are right"),
        IpAddr::V6(_) => ("128", ""),
    };
    if let Some(other) = devices_with_vip.iter().find(|device| **device != LOOPBACK_DEVICE) {
        let consequence = "the server answers ARP or neighbour solicitations for the VIP: clients' packets pass the \
                           load balancers by";
        return Finding::fault(format!("VIP {vip} is on {other}: expected lo"), consequence).with_remedy_step(format!(
            "ip address add {vip}/{prefix} dev lo; ip address delete {vip}/{prefix} dev {other}"
        ));
    }
    if devices_with_vip.is_empty() {
        let consequence = "the server's kernel does not accept packets to the VIP: no connection is established";
        // `--fix` does not do this. If the machine answers ARP requests for the VIP, it would receive the load
        // balancer's traffic.
        return Finding::fault(format!("VIP {vip} is on no device"), consequence)
            .with_remedy_step(format!("ip address add {vip}/{prefix} dev lo{condition}"));
    }
    Finding::ok(format!("VIP {vip} is on lo"))
}

fn check_vip_at_load_balancer(facts: &MachineFacts, vip: IpAddr) -> Finding {
    let devices_with_vip = devices_with_address(facts, vip);
    let Some(device) = devices_with_vip.first() else {
        return Finding::ok(format!("VIP {vip} is no address of this machine"));
    };
    let is_vip_stamped_by_lb = facts.services.iter().any(|service| service.is_stamped_by_lb && service.vip() == vip);
    let is_on_network_device = *device != LOOPBACK_DEVICE;
    let consequence = if is_vip_stamped_by_lb {
        "the kernel drops servers' replies as martians: their source is an address of this machine"
    } else if is_on_network_device {
        "this machine answers packets that XDP passes to the kernel (another port, a fragment), and ARP or neighbour \
         solicitations for the VIP"
    } else {
        "this machine answers packets that XDP passes to the kernel (another port, an echo request); intended if a BGP \
         daemon announces the VIP from lo"
    };
    Finding::fault_or_warning(
        is_vip_stamped_by_lb || is_on_network_device,
        format!("VIP {vip} is on {device}: expected no device"),
        consequence,
    )
    .with_remedy_step(format!("ip address delete {vip} dev {device}  # and a route to the VIP at the routers"))
}

pub fn check_segment_addresses(facts: &MachineFacts) -> Vec<Finding> {
    if facts.servers_by_name.is_empty() || facts.device.is_none() {
        return vec![Finding::unknown("no server is known: the controller returned none")];
    }
    let interface_addresses: Vec<&DeviceAddress> =
        facts.addresses.iter().filter(|device_address| device_address.device_name == facts.interface_name()).collect();
    let segment_servers = facts.servers_by_name.iter().filter(|(_, server)| server.is_on_segment);
    let unreachable_servers: Vec<String> = segment_servers
        .clone()
        .filter(|(_, server)| {
            !interface_addresses.iter().any(|device_address| device_address.shares_network_with(server.address))
        })
        .map(|(name, server)| format!("{name} ({})", server.address))
        .collect();
    if unreachable_servers.is_empty() {
        let segment_server_count = segment_servers.count();
        let other_servers_note = match facts.servers_by_name.len() - segment_server_count {
            0 => String::new(),
            others => format!("; {others} are behind routers or in VLANs"),
        };
        return vec![Finding::ok(format!(
            "all {segment_server_count} servers of the segment are in the network of {}{other_servers_note}",
            facts.interface_name()
        ))];
    }
    let consequence = "packets are forwarded by MAC address: ARP finds no server outside the device's networks";
    vec![
        Finding::fault(
            format!("not in a network of {}: {}", facts.interface_name(), unreachable_servers.join(", ")),
            consequence,
        )
        .with_remedy_step(format!(
            "ip address add ADDRESS/PREFIX dev {}  # in the servers' network",
            facts.interface_name()
        )),
    ]
}

/// Returns whether devices other than the services' device have addresses. ARP requests for them may arrive on the
/// services' device.
fn has_addresses_on_other_devices(facts: &MachineFacts) -> bool {
    let vips = facts.vips();
    facts
        .addresses
        .iter()
        .filter(|device_address| {
            device_address.address.is_ipv4() && device_address.device_name != facts.interface_name()
        })
        .any(|device_address| !device_address.address.is_loopback() && !vips.contains(&device_address.address))
}

pub fn check_arp_ignore(facts: &MachineFacts) -> Vec<Finding> {
    let consequence = "the server answers ARP for the VIP on lo: clients' packets bypass the load balancers";
    // Values 3 to 8 mean something else. With 8, the kernel does not even answer for the server's own address.
    check_arp_sysctl(facts, "arp_ignore", 1..=2, "1", consequence)
}

pub fn check_arp_announce(facts: &MachineFacts) -> Vec<Finding> {
    let consequence = "the server sends ARP requests with the VIP as sender: routers learn its MAC address for the VIP";
    check_arp_sysctl(facts, "arp_announce", 2..=2, "2", consequence)
}

fn check_arp_sysctl(
    facts: &MachineFacts,
    name: &str,
    accepted_values: std::ops::RangeInclusive<u32>,
    fixed_value: &'static str,
    consequence: &str,
) -> Vec<Finding> {
    let vips = facts.vips();
    if !vips.is_empty() && vips.iter().all(IpAddr::is_ipv6) {
        return vec![];
    }
    // The larger of the two values applies (IN_DEV_MAXCONF() in include/linux/inetdevice.h).
    let Some((all_value, device_value)) = facts.global_and_device_sysctl_values(name) else { return vec![] };
    let (in_force, device) = (all_value.max(device_value), facts.interface_name());
    if accepted_values.contains(&in_force) {
        return vec![Finding::ok(format!("{in_force} in force at {device}"))];
    }
    let observation =
        format!("net.ipv4.conf.{{all,{device}}}.{name} are {all_value} and {device_value}: expected {fixed_value}");
    // Other machines may need these answers for other devices' addresses, so an operator must decide.
    let is_safe_to_fix = in_force < *accepted_values.start() && !has_addresses_on_other_devices(facts);
    vec![Finding::fault(observation, consequence).with_sysctl_remedy(
        ipv4_device_sysctl_path(device, name),
        fixed_value,
        is_safe_to_fix,
    )]
}

/// Checks that IPv6 is enabled on the device that receives packets to IPv6 VIPs, and on `lo`, which has the VIPs.
pub fn check_ipv6(facts: &MachineFacts) -> Vec<Finding> {
    if !facts.vips().iter().any(IpAddr::is_ipv6) {
        return vec![];
    }
    let consequence = "the kernel does not accept packets to an IPv6 VIP: no connection is established";
    let check_device = |device: &str| match facts.sysctl_value(&ipv6_disabling_sysctl_path(device)) {
        Some(0) => Finding::ok(format!("IPv6 is enabled at {device}")),
        None => Finding::fault(format!("the kernel has no IPv6 at {device}: expected it"), consequence)
            .with_remedy_step("boot without `ipv6.disable=1` on the kernel's command line"),
        // `--fix` does not do this, because the device may then accept addresses and routes from a router.
        Some(value) => {
            Finding::fault(format!("net.ipv6.conf.{device}.disable_ipv6 is {value}: expected 0"), consequence)
                .with_sysctl_remedy(ipv6_disabling_sysctl_path(device), "0", false)
        }
    };
    [LOOPBACK_DEVICE, facts.interface_name()].map(check_device).into()
}
