//! Checks of the facts: pure functions, a file per subject. `coreward doctor --list` lists them.

pub mod addresses;
pub mod certificates;
pub mod clocks;
pub mod controller;
pub mod device;
pub mod machine;
pub mod netfilter;
pub mod routing;
pub mod rss;
#[cfg(test)]
mod tests;
pub mod workers;

use crate::facts::{Facts, Role};
use crate::finding::Finding;

#[derive(Debug, Clone, Copy)]
pub struct Check {
    pub name: &'static str,
    pub roles: &'static [Role],
    pub expectation: &'static str,
    /// Whether `--fix` can repair some findings of this check.
    pub is_fixable: bool,
    /// Function that runs the check and returns its findings; none if the check does not apply.
    pub run_check: fn(&Facts) -> Vec<Finding>,
}

const LB_AND_SERVER: &[Role] = &[Role::Lb, Role::Server];
const ALL_ROLES: &[Role] = &[Role::Lb, Role::Server, Role::Controller];
const LB: &[Role] = &[Role::Lb];
const SERVER: &[Role] = &[Role::Server];
const CONTROLLER: &[Role] = &[Role::Controller];

const fn check(
    name: &'static str,
    roles: &'static [Role],
    expects: &'static str,
    look: fn(&Facts) -> Vec<Finding>,
) -> Check {
    Check { name, roles, expectation: expects, is_fixable: false, run_check: look }
}

const fn fixable_check(
    name: &'static str,
    roles: &'static [Role],
    expects: &'static str,
    look: fn(&Facts) -> Vec<Finding>,
) -> Check {
    Check { is_fixable: true, ..check(name, roles, expects, look) }
}

/// All checks of `coreward doctor`, in the order of the report.
pub const CHECKS: &[Check] = &[
    check("kernel", LB_AND_SERVER, "Linux 6.1 or newer, with BTF", machine::kernel),
    check("rights", LB_AND_SERVER, "CAP_NET_ADMIN, CAP_NET_RAW, CAP_PERFMON and CAP_BPF", machine::rights),
    check(
        "programs",
        LB_AND_SERVER,
        "the kernel accepts the role's BPF programs (tcx or clsact, sk_reuseport, XDP)",
        machine::programs,
    ),
    fixable_check("jit", LB_AND_SERVER, "BPF programs are compiled, not interpreted", machine::jit),
    fixable_check(
        "bpf-file-system",
        LB_AND_SERVER,
        "`pin_directory` is on a BPF file system",
        machine::bpf_file_system,
    ),
    check("pins", LB_AND_SERVER, "pins are of this version, or there are none", machine::pins),
    check("open-files", ALL_ROLES, "the hard limit of open files is high enough", machine::open_files),
    check("interface", LB_AND_SERVER, "the device exists, is Ethernet, up, and has a carrier", device::interface),
    check("xdp", LB, "no other XDP program at the device; the driver supports XDP", device::xdp),
    check("xdp-send", LB, "the driver sends the frames that XDP programs send", device::xdp_send),
    check("mtu", LB, "frames fit one page, which native XDP requires", device::mtu),
    check(
        "outer-headers",
        LB,
        "packets that every IPv6 link takes fit with their outer headers",
        device::outer_headers,
    ),
    check("lro", LB, "the device does not merge packets in hardware", device::lro),
    check("vlan-tags", LB, "the device leaves VLAN tags in frames, if it carries VLANs", device::vlan_tags),
    check("queues", LB_AND_SERVER, "one receive queue per CPU", device::queues),
    check("interrupts", LB_AND_SERVER, "each receive queue's interrupt goes to a CPU of its own", device::interrupts),
    check("irqbalance", SERVER, "irqbalance does not run", rss::irqbalance),
    check("rss", SERVER, "RSS key and table can be read, and hash TCP by Toeplitz over addresses and ports", rss::rss),
    check("rss-ports", SERVER, "RSS hashes the ports of UDP and of TCP over IPv6, if a service uses them", rss::ports),
    fixable_check("rps", SERVER, "RPS is off at the device", rss::rps),
    fixable_check("rfs", SERVER, "RFS, also accelerated, is off at the device", rss::rfs),
    check("flow-rules", SERVER, "no ntuple rules at the device", rss::flow_rules),
    check("flow-director", SERVER, "the driver moves no open connections by itself (ATR)", rss::flow_director),
    check("vip", LB_AND_SERVER, "server: each VIP on `lo`; load balancer: no VIP is its own address", addresses::vip),
    check("ipv6", SERVER, "IPv6 is enabled at `lo` and the device, if a VIP is IPv6", addresses::ipv6),
    check("segment", LB, "the address of every server on the segment is in the device's network", addresses::segment),
    fixable_check("arp-ignore", SERVER, "no answers to ARP for addresses on `lo` (1 or 2)", addresses::arp_ignore),
    fixable_check("arp-announce", SERVER, "no ARP in the name of addresses on `lo` (2)", addresses::arp_announce),
    check(
        "rp-filter",
        LB_AND_SERVER,
        "no strict reverse path filter, if packets and replies use different devices",
        routing::rp_filter,
    ),
    check("forwarding", LB, "on, if a service has `timestamps = \"lb\"`", routing::forwarding),
    fixable_check("send-redirects", LB, "off, if a service has `timestamps = \"lb\"`", routing::send_redirects),
    check("announce", LB, "with `[announce]`: a routing daemon runs, and no rule uses its table", routing::announce),
    check("tcp-timestamps", SERVER, "2, or set by the agent", clocks::tcp_timestamps),
    check("clock-source", ALL_ROLES, "a clock source that is read without leaving the CPU", clocks::source),
    check("clock-sync", ALL_ROLES, "the wall clock is synchronised (NTP)", clocks::synchronised),
    check("conntrack", LB_AND_SERVER, "connection tracking does not see the services' packets", netfilter::conntrack),
    check("dnat", SERVER, "no rule forwards services to other network namespaces", netfilter::dnat),
    check("firewall", LB_AND_SERVER, "no chain drops the services' packets by default", netfilter::firewall),
    check(
        "listeners",
        SERVER,
        "each service has listening sockets, with SO_REUSEPORT, one per core",
        workers::listeners,
    ),
    check("polling", SERVER, "no thread polls, if `load` is CPU time", workers::polling),
    check("workers", SERVER, "workers are pinned to CPUs, if the agent steers by them", workers::pinned),
    check("controller", LB_AND_SERVER, "the controller answers", controller::controller_connection),
    check(
        "certificates",
        ALL_ROLES,
        "with `[tls]`: they name this daemon, and a third of their lifetime is left",
        certificates::certificates,
    ),
    check("listen", CONTROLLER, "`listen` can be bound, or the controller answers there", controller::listen),
    fixable_check(
        "store",
        CONTROLLER,
        "the store's file and disk are writable, and only its owner can read it; or etcd answers and names the leader",
        controller::store,
    ),
];

pub fn run(facts: &Facts) -> Vec<(&'static Check, Finding)> {
    let of_role = CHECKS.iter().filter(|check| check.roles.contains(&facts.role));
    of_role.flat_map(|check| (check.run_check)(facts).into_iter().map(move |finding| (check, finding))).collect()
}
