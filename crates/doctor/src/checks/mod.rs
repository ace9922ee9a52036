//! Checks of a machine, which are pure functions of facts. Each file covers a subject. See `coreward doctor --list`.

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

use crate::facts::{MachineFacts, MachineRole};
use crate::finding::Finding;

#[derive(Debug, Clone, Copy)]
pub struct DoctorCheck {
    pub name: &'static str,
    pub roles: &'static [MachineRole],
    pub expectation: &'static str,
    /// Whether `--fix` can execute a remedy for some of the findings of this check.
    pub is_fixable: bool,
    /// Function that runs the check and returns its findings. Returns no findings if the check does not apply.
    pub run_check: fn(&MachineFacts) -> Vec<Finding>,
}

const LB_AND_SERVER_ROLES: &[MachineRole] = &[MachineRole::Lb, MachineRole::Server];
const ALL_MACHINE_ROLES: &[MachineRole] = &[MachineRole::Lb, MachineRole::Server, MachineRole::Controller];
const LB_ROLE_ONLY: &[MachineRole] = &[MachineRole::Lb];
const SERVER_ROLE_ONLY: &[MachineRole] = &[MachineRole::Server];
const CONTROLLER_ROLE_ONLY: &[MachineRole] = &[MachineRole::Controller];

const fn new_check(
    name: &'static str,
    roles: &'static [MachineRole],
    expectation: &'static str,
    run_check: fn(&MachineFacts) -> Vec<Finding>,
) -> DoctorCheck {
    DoctorCheck { name, roles, expectation, is_fixable: false, run_check }
}

const fn new_fixable_check(
    name: &'static str,
    roles: &'static [MachineRole],
    expectation: &'static str,
    run_check: fn(&MachineFacts) -> Vec<Finding>,
) -> DoctorCheck {
    DoctorCheck { is_fixable: true, ..new_check(name, roles, expectation, run_check) }
}

pub const DOCTOR_CHECKS: &[DoctorCheck] = &[
    new_check("kernel", LB_AND_SERVER_ROLES, "Linux 6.1 or newer, with BTF", machine::check_kernel),
    new_check(
        "rights",
        LB_AND_SERVER_ROLES,
        "CAP_NET_ADMIN, CAP_NET_RAW, CAP_PERFMON and CAP_BPF",
        machine::check_process_capabilities,
    ),
    new_check(
        "programs",
        LB_AND_SERVER_ROLES,
        "the kernel accepts the role's BPF programs (tcx or clsact, sk_reuseport, XDP)",
        machine::check_bpf_programs,
    ),
    new_fixable_check("jit", LB_AND_SERVER_ROLES, "BPF programs are compiled, not interpreted", machine::check_bpf_jit),
    new_fixable_check(
        "bpf-file-system",
        LB_AND_SERVER_ROLES,
        "`pin_directory` is on a BPF file system",
        machine::check_bpf_file_system,
    ),
    new_check("pins", LB_AND_SERVER_ROLES, "pins are of this version, or there are none", machine::check_pin_takeover),
    new_check(
        "open-files",
        ALL_MACHINE_ROLES,
        "the hard limit of open files is high enough",
        machine::check_open_files_limit,
    ),
    new_check(
        "interface",
        LB_AND_SERVER_ROLES,
        "the device exists, is Ethernet, up, and has a carrier",
        device::check_interface,
    ),
    new_check("xdp", LB_ROLE_ONLY, "no other XDP program at the device; the driver supports XDP", device::check_xdp),
    new_check(
        "xdp-send",
        LB_ROLE_ONLY,
        "the driver sends the frames that XDP programs send",
        device::check_xdp_transmission,
    ),
    new_check("mtu", LB_ROLE_ONLY, "frames fit one page, which native XDP requires", device::check_mtu),
    new_check(
        "outer-headers",
        LB_ROLE_ONLY,
        "packets that every IPv6 link takes fit with their outer headers",
        device::check_outer_header_room,
    ),
    new_check("lro", LB_ROLE_ONLY, "the device does not merge packets in hardware", device::check_lro),
    new_check(
        "vlan-tags",
        LB_ROLE_ONLY,
        "the device leaves VLAN tags in frames, if it carries VLANs",
        device::check_vlan_tags,
    ),
    new_check("queues", LB_AND_SERVER_ROLES, "one receive queue per CPU", device::check_queue_count),
    new_check(
        "interrupts",
        LB_AND_SERVER_ROLES,
        "each receive queue's interrupt goes to a CPU of its own",
        device::check_interrupts,
    ),
    new_check("irqbalance", SERVER_ROLE_ONLY, "irqbalance does not run", rss::check_irqbalance),
    new_check(
        "rss",
        SERVER_ROLE_ONLY,
        "RSS key and table can be read, and hash TCP by Toeplitz over addresses and ports",
        rss::check_rss,
    ),
    new_check(
        "rss-ports",
        SERVER_ROLE_ONLY,
        "RSS hashes the ports of UDP and of TCP over IPv6, if a service uses them",
        rss::check_port_hashing,
    ),
    new_fixable_check("rps", SERVER_ROLE_ONLY, "RPS is off at the device", rss::check_rps),
    new_fixable_check("rfs", SERVER_ROLE_ONLY, "RFS, also accelerated, is off at the device", rss::check_rfs),
    new_check("flow-rules", SERVER_ROLE_ONLY, "no ntuple rules at the device", rss::check_flow_rules),
    new_check(
        "flow-director",
        SERVER_ROLE_ONLY,
        "the driver moves no open connections by itself (ATR)",
        rss::check_flow_director,
    ),
    new_check(
        "vip",
        LB_AND_SERVER_ROLES,
        "server: each VIP on `lo`; load balancer: no VIP is its own address",
        addresses::check_vips,
    ),
    new_check(
        "ipv6",
        SERVER_ROLE_ONLY,
        "IPv6 is enabled at `lo` and the device, if a VIP is IPv6",
        addresses::check_ipv6,
    ),
    new_check(
        "segment",
        LB_ROLE_ONLY,
        "the address of every server on the segment is in the device's network",
        addresses::check_segment_addresses,
    ),
    new_fixable_check(
        "arp-ignore",
        SERVER_ROLE_ONLY,
        "no answers to ARP for addresses on `lo` (1 or 2)",
        addresses::check_arp_ignore,
    ),
    new_fixable_check(
        "arp-announce",
        SERVER_ROLE_ONLY,
        "no ARP in the name of addresses on `lo` (2)",
        addresses::check_arp_announce,
    ),
    new_check(
        "rp-filter",
        LB_AND_SERVER_ROLES,
        "no strict reverse path filter, if packets and replies use different devices",
        routing::check_rp_filter,
    ),
    new_check("forwarding", LB_ROLE_ONLY, "on, if a service has `timestamps = \"lb\"`", routing::check_ip_forwarding),
    new_fixable_check(
        "send-redirects",
        LB_ROLE_ONLY,
        "off, if a service has `timestamps = \"lb\"`",
        routing::check_send_redirects,
    ),
    new_check(
        "announce",
        LB_ROLE_ONLY,
        "with `[announce]`: a routing daemon runs, and no rule uses its table",
        routing::check_vip_announcement,
    ),
    new_check("tcp-timestamps", SERVER_ROLE_ONLY, "2, or set by the agent", clocks::check_tcp_timestamps),
    new_check(
        "clock-source",
        ALL_MACHINE_ROLES,
        "a clock source that is read without leaving the CPU",
        clocks::check_clock_source,
    ),
    new_check("clock-sync", ALL_MACHINE_ROLES, "the wall clock is synchronised (NTP)", clocks::check_clock_sync),
    new_check(
        "conntrack",
        LB_AND_SERVER_ROLES,
        "connection tracking does not see the services' packets",
        netfilter::check_conntrack,
    ),
    new_check("dnat", SERVER_ROLE_ONLY, "no rule forwards services to other network namespaces", netfilter::check_dnat),
    new_check(
        "firewall",
        LB_AND_SERVER_ROLES,
        "no chain drops the services' packets by default",
        netfilter::check_firewall,
    ),
    new_check(
        "listeners",
        SERVER_ROLE_ONLY,
        "each service has listening sockets, with SO_REUSEPORT, one per core",
        workers::check_listeners,
    ),
    new_check("polling", SERVER_ROLE_ONLY, "no thread polls, if `load` is CPU time", workers::check_polling_threads),
    new_check(
        "workers",
        SERVER_ROLE_ONLY,
        "workers are pinned to CPUs, if the agent steers by them",
        workers::check_pinned_workers,
    ),
    new_check("controller", LB_AND_SERVER_ROLES, "the controller answers", controller::check_controller_connection),
    new_check(
        "certificates",
        ALL_MACHINE_ROLES,
        "with `[tls]`: they name this daemon, and a third of their lifetime is left",
        certificates::check_certificates,
    ),
    new_check(
        "listen",
        CONTROLLER_ROLE_ONLY,
        "`listen` can be bound, or the controller answers there",
        controller::check_listen_address,
    ),
    new_fixable_check(
        "store",
        CONTROLLER_ROLE_ONLY,
        "the store's file and disk are writable, and only its owner can read it; or etcd answers and names the leader",
        controller::check_store,
    ),
];

pub fn run_all_checks(facts: &MachineFacts) -> Vec<(&'static DoctorCheck, Finding)> {
    let checks_of_role = DOCTOR_CHECKS.iter().filter(|check| check.roles.contains(&facts.role));
    checks_of_role.flat_map(|check| (check.run_check)(facts).into_iter().map(move |finding| (check, finding))).collect()
}
