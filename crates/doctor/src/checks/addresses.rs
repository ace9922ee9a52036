//! Checks of addresses and ARP.

use std::net::IpAddr;

use crate::facts::{Address, Facts, Role, device_sysctl, disable_ipv6_sysctl};
use crate::finding::Finding;

const LOOPBACK: &str = "lo";

pub fn vip(facts: &Facts) -> Vec<Finding> {
    let vips = facts.vips();
    if vips.is_empty() {
        return vec![Finding::unknown(
            "no service of this machine is known: neither by the controller nor by --service",
        )];
    }
    let of_role = match facts.role {
        Role::Server => check_vip_at_server,
        _ => check_vip_at_load_balancer,
    };
    vips.into_iter().map(|vip| of_role(facts, vip)).collect()
}

fn devices_with(facts: &Facts, vip: IpAddr) -> Vec<&str> {
    facts.addresses.iter().filter(|held| held.address == vip).map(|held| held.device.as_str()).collect()
}

fn check_vip_at_server(facts: &Facts, vip: IpAddr) -> Finding {
    let held = devices_with(facts, vip);
    let (prefix, condition) = match vip {
        IpAddr::V4(_) => ("32", "  # after arp-ignore and arp-announce are right"),
        IpAddr::V6(_) => ("128", ""),
    };
    if let Some(other) = held.iter().find(|device| **device != LOOPBACK) {
        let why = "the server answers ARP or neighbour solicitations for the VIP: clients' packets pass the load \
                   balancers by";
        return Finding::fault(format!("VIP {vip} is on {other}: expected lo"), why).with_remediation(format!(
            "ip address add {vip}/{prefix} dev lo; ip address delete {vip}/{prefix} dev {other}"
        ));
    }
    if held.is_empty() {
        let why = "the server's kernel does not accept packets to the VIP: no connection is established";
        // Not by --fix: if the machine answers ARP for the VIP, it would attract the load balancer's traffic.
        return Finding::fault(format!("VIP {vip} is on no device"), why)
            .with_remediation(format!("ip address add {vip}/{prefix} dev lo{condition}"));
    }
    Finding::ok(format!("VIP {vip} is on lo"))
}

fn check_vip_at_load_balancer(facts: &Facts, vip: IpAddr) -> Finding {
    let held = devices_with(facts, vip);
    let Some(device) = held.first() else { return Finding::ok(format!("VIP {vip} is no address of this machine")) };
    let stamps = facts.services.iter().any(|service| service.is_stamped_by_lb && service.vip() == vip);
    let on_network = *device != LOOPBACK;
    let why = if stamps {
        "the kernel drops servers' replies as martians: their source is an address of this machine"
    } else if on_network {
        "this machine answers packets that XDP passes to the kernel (another port, a fragment), and ARP or neighbour \
         solicitations for the VIP"
    } else {
        "this machine answers packets that XDP passes to the kernel (another port, an echo request); intended if a BGP \
         daemon announces the VIP from lo"
    };
    Finding::fault_if(stamps || on_network, format!("VIP {vip} is on {device}: expected no device"), why)
        .with_remediation(format!("ip address delete {vip} dev {device}  # and a route to the VIP at the routers"))
}

pub fn segment(facts: &Facts) -> Vec<Finding> {
    if facts.servers.is_empty() || facts.device.is_none() {
        return vec![Finding::unknown("no server is known: the controller returned none")];
    }
    let own: Vec<&Address> = facts.addresses.iter().filter(|held| held.device == facts.interface()).collect();
    let is_on_segment = facts.servers.iter().filter(|(_, server)| server.is_on_segment);
    let beyond: Vec<String> = is_on_segment
        .clone()
        .filter(|(_, server)| !own.iter().any(|held| held.reaches(server.address)))
        .map(|(name, server)| format!("{name} ({})", server.address))
        .collect();
    if beyond.is_empty() {
        let count = is_on_segment.count();
        let others = match facts.servers.len() - count {
            0 => String::new(),
            others => format!("; {others} are behind routers or in VLANs"),
        };
        return vec![Finding::ok(format!(
            "all {count} servers of the segment are in the network of {}{others}",
            facts.interface()
        ))];
    }
    let why = "packets are forwarded by MAC address: ARP finds no server outside the device's networks";
    vec![
        Finding::fault(format!("not in a network of {}: {}", facts.interface(), beyond.join(", ")), why)
            .with_remediation(format!(
                "ip address add ADDRESS/PREFIX dev {}  # in the servers' network",
                facts.interface()
            )),
    ]
}

/// Returns whether other devices have addresses for which ARP requests may arrive at the services' device.
fn has_addresses_elsewhere(facts: &Facts) -> bool {
    let vips = facts.vips();
    facts
        .addresses
        .iter()
        .filter(|held| held.address.is_ipv4() && held.device != facts.interface())
        .any(|held| !held.address.is_loopback() && !vips.contains(&held.address))
}

pub fn arp_ignore(facts: &Facts) -> Vec<Finding> {
    let why = "the server answers ARP for the VIP on lo: clients' packets bypass the load balancers";
    // Values 3 to 8 have other meanings: with 8 the kernel does not answer even for the server's own address.
    arp(facts, "arp_ignore", 1..=2, "1", why)
}

pub fn arp_announce(facts: &Facts) -> Vec<Finding> {
    let why = "the server sends ARP requests with the VIP as sender: routers learn its MAC address for the VIP";
    arp(facts, "arp_announce", 2..=2, "2", why)
}

fn arp(
    facts: &Facts,
    name: &str,
    right: std::ops::RangeInclusive<u32>,
    value: &'static str,
    why: &str,
) -> Vec<Finding> {
    let vips = facts.vips();
    if !vips.is_empty() && vips.iter().all(IpAddr::is_ipv6) {
        return vec![];
    }
    // As IN_DEV_MAXCONF() in include/linux/inetdevice.h, the larger value counts.
    let Some((all, own)) = facts.device_sysctl(name) else { return vec![] };
    let (in_force, device) = (all.max(own), facts.interface());
    if right.contains(&in_force) {
        return vec![Finding::ok(format!("{in_force} in force at {device}"))];
    }
    let found = format!("net.ipv4.conf.{{all,{device}}}.{name} are {all} and {own}: expected {value}");
    // Other machines may need these answers for addresses of other devices: an operator must decide.
    let safe = in_force < *right.start() && !has_addresses_elsewhere(facts);
    vec![Finding::fault(found, why).with_sysctl(device_sysctl(device, name), value, safe)]
}

/// Checks that IPv6 is enabled on the device that receives packets of an IPv6 VIP, and on `lo`, which has the VIP.
pub fn ipv6(facts: &Facts) -> Vec<Finding> {
    if !facts.vips().iter().any(IpAddr::is_ipv6) {
        return vec![];
    }
    let why = "the kernel does not accept packets to an IPv6 VIP: no connection is established";
    let at_device = |device: &str| match facts.sysctl(&disable_ipv6_sysctl(device)) {
        Some(0) => Finding::ok(format!("IPv6 is enabled at {device}")),
        None => Finding::fault(format!("the kernel has no IPv6 at {device}: expected it"), why)
            .with_remediation("boot without `ipv6.disable=1` on the kernel's command line"),
        // Not by --fix: the device may then take addresses and routes from a router.
        Some(value) => Finding::fault(format!("net.ipv6.conf.{device}.disable_ipv6 is {value}: expected 0"), why)
            .with_sysctl(disable_ipv6_sysctl(device), "0", false),
    };
    [LOOPBACK, facts.interface()].map(at_device).into()
}
