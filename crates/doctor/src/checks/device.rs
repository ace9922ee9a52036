//! Checks of the NIC, except for those of RSS.

use std::collections::BTreeMap;

use coreward_dataplane::lb::XdpMode;

use crate::facts::{DeviceFacts, MachineFacts, MachineRole, ServerFacts};
use crate::finding::Finding;

/// Runs a check of the services' device. Returns no findings without a device, which the check `interface` reports.
fn run_device_check(facts: &MachineFacts, check: impl FnOnce(&DeviceFacts) -> Vec<Finding>) -> Vec<Finding> {
    facts.device.as_ref().map_or_else(Vec::new, check)
}

pub fn check_interface(facts: &MachineFacts) -> Vec<Finding> {
    let Some(name) = &facts.settings.interface else {
        return vec![Finding::unknown("no interface is named: --config FILE or --interface NAME")];
    };
    let consequence = "no packet arrives on it";
    let Some(device) = &facts.device else {
        return vec![
            Finding::fault(format!("{name} does not exist here"), consequence)
                .with_remedy_step("ip -br link  # name one of these as `interface`"),
        ];
    };
    if !device.is_ethernet {
        let consequence = "the programs read Ethernet headers";
        return vec![
            Finding::fault(format!("{name} is no Ethernet device"), consequence)
                .with_remedy_step("name another `interface`"),
        ];
    }
    if !device.is_up {
        return vec![
            Finding::fault(format!("{name} is down, or has no carrier"), consequence)
                .with_remedy_step(format!("ip link set {name} up")),
        ];
    }
    vec![Finding::ok(format!(
        "{name} is up, driver {}",
        if device.driver.is_empty() { "unknown" } else { &device.driver }
    ))]
}

pub fn check_xdp(facts: &MachineFacts) -> Vec<Finding> {
    run_device_check(facts, |device| {
        let interface_name = facts.interface_name();
        let mut findings = report_foreign_programs(device, interface_name);
        findings.extend(report_queue_limit(facts, device));
        findings.extend(report_missing_native_xdp(facts, device));
        if findings.is_empty() {
            findings.push(match (device.own_program_id, device.xdp_state.supports_native) {
                (Some(id), _) => Finding::ok(format!("coreward's own program (id {id}) is at {interface_name}")),
                (None, Some(true)) => Finding::ok(format!("{interface_name} is free, and its driver has XDP")),
                (None, Some(false)) => Finding::ok(format!("{interface_name} is free; generic XDP, by `xdp_mode`")),
                (None, None) => Finding::ok(format!(
                    "{interface_name} is free; this kernel does not show whether its driver has XDP"
                )),
            });
        }
        findings
    })
}

fn report_foreign_programs(device: &DeviceFacts, interface_name: &str) -> Vec<Finding> {
    let attached_program_ids = [device.xdp_state.native_program_id, device.xdp_state.generic_program_id];
    let foreign_program_ids =
        attached_program_ids.into_iter().flatten().filter(|id| Some(*id) != device.own_program_id);
    let to_finding = |id: u32| {
        let consequence = "a device has one XDP program: the kernel rejects coreward's";
        Finding::fault(format!("{interface_name} has another XDP program (id {id})"), consequence)
            .with_remedy_step(format!("bpftool prog show id {id}  # shows its name and processes"))
            .with_remedy_step(format!("ip link set dev {interface_name} xdp off"))
    };
    foreign_program_ids.map(to_finding).collect()
}

fn report_queue_limit(facts: &MachineFacts, device: &DeviceFacts) -> Option<Finding> {
    let problem = find_queue_limit_problem(device)?;
    let consequence = "each queue needs another one to send frames";
    let max_queues_with_xdp = device.queue_counts.map_or(1, |channels| channels.max_receive_queues / 2).max(1);
    let requires_native_xdp = facts.settings.xdp_mode == XdpMode::Native;
    let remedy_step = format!("ethtool -L {} combined {max_queues_with_xdp}", facts.interface_name());
    Some(Finding::fault_or_warning(requires_native_xdp, problem, consequence).with_remedy_step(remedy_step))
}

fn report_missing_native_xdp(facts: &MachineFacts, device: &DeviceFacts) -> Option<Finding> {
    if device.xdp_state.supports_native != Some(false) || facts.settings.xdp_mode == XdpMode::Generic {
        return None;
    }
    let requires_native_xdp = facts.settings.xdp_mode == XdpMode::Native;
    let consequence = "the program runs after the driver (generic XDP), several times slower; with `xdp_mode = \
                       \"native\"` the daemon does not start";
    Some(
        Finding::fault_or_warning(requires_native_xdp, format!("the driver {} has no XDP", device.driver), consequence)
            .with_remedy_step("a NIC whose driver has XDP, or `xdp_mode = \"generic\"` to accept that"),
    )
}

pub fn check_xdp_transmission(facts: &MachineFacts) -> Vec<Finding> {
    run_device_check(facts, |device| {
        let interface_name = facts.interface_name();
        let consequence = "packets that coreward forwards are lost";
        let is_native_program =
            device.own_program_id.is_some() && device.xdp_state.native_program_id == device.own_program_id;
        if is_native_program && device.veth_peer_has_xdp == Some(false) {
            let observation = format!(
                "the other end of the veth {interface_name} has no XDP program: frames that XDP sends are dropped, or \
                 with GRO there wait until this machine sends something itself"
            );
            return vec![add_veth_remedy(Finding::fault(observation, consequence))];
        }
        if device.xdp_send_error_counts.is_empty() {
            return vec![Finding::ok(format!(
                "{interface_name} dropped no frame that XDP sent, as far as its driver counts"
            ))];
        }
        let counter_texts: Vec<String> =
            device.xdp_send_error_counts.iter().map(|(counter, count)| format!("{counter} {count}")).collect();
        let observation = format!("{interface_name} dropped frames that XDP sent: {}", counter_texts.join(", "));
        let finding = Finding::fault(observation, consequence);
        vec![match device.driver.as_str() {
            "veth" => add_veth_remedy(finding),
            _ => finding.with_remedy_step(format!("ethtool -G {interface_name} tx NUMBER  # a longer transmit ring")),
        }]
    })
}

/// Adds the remedy for a veth device: its peer must have an XDP program (veth_xdp_flush() in drivers/net/veth.c).
fn add_veth_remedy(finding: Finding) -> Finding {
    finding
        .with_remedy_step(
            "ip link set dev PEER xdp object FILE  # at the other end, in its namespace; one that returns XDP_PASS",
        )
        .with_remedy_step(
            "or `xdp_mode = \"generic\"` in the load balancer's file; `coreward lb --detach`, and start it again",
        )
}

/// Returns a description of the problem if the NIC uses too many queues for XDP. The driver ena allows half of its
/// queues (ena_xdp_legal_queue_count()).
fn find_queue_limit_problem(device: &DeviceFacts) -> Option<String> {
    let channels = device.queue_counts?;
    (device.driver == "ena" && channels.receive_queues * 2 > channels.max_receive_queues).then(|| {
        format!(
            "{} of {} queues in use: the driver ena takes XDP with half of them",
            channels.receive_queues, channels.max_receive_queues
        )
    })
}

/// Maximum MTU for native XDP, in bytes: a page minus the space that XDP and the kernel need around a frame
/// (docs/limits.md). veth_xdp_set() in drivers/net/veth.c allows 3,504, and drivers/net/virtio_net.c 3,506.
const MAX_XDP_MTU_BYTES: u32 = 3_498;

pub fn check_mtu(facts: &MachineFacts) -> Vec<Finding> {
    run_device_check(facts, |device| {
        let interface_name = facts.interface_name();
        let is_native_program =
            device.own_program_id.is_some() && device.xdp_state.native_program_id == device.own_program_id;
        if device.mtu_bytes <= MAX_XDP_MTU_BYTES || is_native_program || facts.settings.xdp_mode == XdpMode::Generic {
            return vec![Finding::ok(format!("{} bytes", device.mtu_bytes))];
        }
        let consequence = "drivers reject XDP if a frame does not fit one page: generic XDP is slower, and with \
                           `xdp_mode = \"native\"` the daemon does not start";
        let requires_native_xdp = facts.settings.xdp_mode == XdpMode::Native;
        let observation = format!("{} bytes: expected at most {MAX_XDP_MTU_BYTES}", device.mtu_bytes);
        vec![
            Finding::fault_or_warning(requires_native_xdp, observation, consequence)
                .with_remedy_step(format!("ip link set {interface_name} mtu 1500  # servers and switches as well")),
        ]
    })
}

/// Minimum MTU of an IPv6 link, in bytes (RFC 8200, Sect. 5).
const IPV6_MIN_MTU: usize = 1280;

pub fn check_outer_header_room(facts: &MachineFacts) -> Vec<Finding> {
    run_device_check(facts, |device| {
        let ipv6_services = facts.services.iter().filter(|service| service.vip().is_ipv6());
        let packet_lengths = ipv6_services.flat_map(|service| {
            let outer_header_bytes =
                |server: &ServerFacts| service.forwarding.encapsulation_overhead_bytes(server.address);
            facts
                .servers_by_name
                .values()
                .map(outer_header_bytes)
                .filter(|overhead| *overhead > 0)
                .map(|overhead| IPV6_MIN_MTU + overhead)
        });
        let Some(required_mtu) = packet_lengths.max() else {
            return vec![Finding::ok("no service with an IPv6 VIP has servers behind routers")];
        };
        if device.mtu_bytes as usize >= required_mtu {
            return vec![Finding::ok(format!("{} bytes, needed: {required_mtu}", device.mtu_bytes))];
        }
        let interface_name = facts.interface_name();
        let observation =
            format!("the MTU of {interface_name} is {}: expected at least {required_mtu}", device.mtu_bytes);
        let consequence =
            "packets of up to 1280 bytes get no \"packet too big\", because hosts ignore a smaller MTU: they are lost";
        let remedy = format!("ip link set {interface_name} mtu {required_mtu}  # routers and servers as well");
        vec![Finding::fault(observation, consequence).with_remedy_step(remedy)]
    })
}

pub fn check_lro(facts: &MachineFacts) -> Vec<Finding> {
    run_device_check(facts, |device| {
        if !device.is_lro_enabled {
            return vec![Finding::ok("off")];
        }
        let interface_name = facts.interface_name();
        let consequence = "packets that the NIC has merged cannot be forwarded unchanged; drivers reject XDP with LRO";
        vec![
            Finding::fault(format!("LRO is on at {interface_name}"), consequence)
                .with_remedy_step(format!("ethtool -K {interface_name} lro off  # the link may go down for a moment")),
        ]
    })
}

pub fn check_vlan_tags(facts: &MachineFacts) -> Vec<Finding> {
    run_device_check(facts, |device| {
        let interface_name = facts.interface_name();
        match (device.strips_vlan_tags, device.vlan_devices.as_slice()) {
            (false, _) => vec![Finding::ok("frames keep their VLAN tags")],
            (true, []) => vec![Finding::ok(format!(
                "{interface_name} strips VLAN tags, and has no VLAN device: its switch port must send no tagged frames"
            ))],
            (true, vlans) => {
                let consequence = "XDP gets frames without their tags: it forwards packets of VLANs as untagged ones";
                vec![
                    Finding::fault(
                        format!("{interface_name} strips VLAN tags, and carries VLANs ({})", vlans.join(", ")),
                        consequence,
                    )
                    .with_remedy_step(format!("ethtool -K {interface_name} rxvlan off")),
                ]
            }
        }
    })
}

pub fn check_queue_count(facts: &MachineFacts) -> Vec<Finding> {
    run_device_check(facts, |device| {
        let Some(channels) = device.queue_counts else {
            return vec![Finding::unknown("the driver does not report its queues")];
        };
        let (name, cpus, queues) =
            (facts.interface_name(), facts.online_cpu_count, usize::from(channels.receive_queues));
        let observation = format!("receive queues: {queues} (at most {}), CPUs: {cpus}", channels.max_receive_queues);
        let max_useful_queue_count = usize::from(channels.max_receive_queues).min(cpus);
        let channels_command =
            format!("ethtool -L {name} combined {max_useful_queue_count}  # the link may go down for a moment");
        match facts.role {
            MachineRole::Server if queues > cpus => {
                let consequence = "several queues share a CPU, but each of them is reported as a core";
                vec![Finding::warning(observation, consequence).with_remedy_step(channels_command)]
            }
            _ if queues < max_useful_queue_count => {
                let consequence = "packets use fewer CPUs than there are";
                vec![Finding::warning(observation, consequence).with_remedy_step(channels_command)]
            }
            MachineRole::Server if queues == 1 && cpus > 1 => {
                let consequence = "RSS can select one core only: core-aware policies select by server only";
                vec![
                    Finding::warning(observation, consequence)
                        .with_remedy_step("a NIC (for a virtual machine: a device) with several queues"),
                ]
            }
            _ => vec![Finding::ok(observation)],
        }
    })
}

/// Returns the receive queues whose interrupts each CPU handles. Omits interrupts whose CPU is unknown.
fn receive_queues_by_cpu(device: &DeviceFacts) -> BTreeMap<usize, Vec<u16>> {
    let mut queues_by_cpu: BTreeMap<usize, Vec<u16>> = BTreeMap::new();
    for (queue, interrupt) in &device.interrupts_by_queue {
        if let Some(cpu) = interrupt.cpu {
            queues_by_cpu.entry(cpu).or_default().push(*queue);
        }
    }
    queues_by_cpu
}

/// Returns the commands that distribute the device's interrupts over the CPUs.
fn interrupt_affinity_commands(device: &DeviceFacts, cpu_count: usize) -> impl Iterator<Item = String> {
    device.interrupts_by_queue.iter().map(move |(queue, interrupt)| {
        format!("echo {} > /proc/irq/{}/smp_affinity_list", usize::from(*queue) % cpu_count, interrupt.irq_number)
    })
}

pub fn check_interrupts(facts: &MachineFacts) -> Vec<Finding> {
    run_device_check(facts, |device| {
        let queues_of_cpu = receive_queues_by_cpu(device);
        if queues_of_cpu.is_empty() {
            return vec![Finding::unknown(format!(
                "no interrupts of {} are found (a virtual device has none)",
                facts.interface_name()
            ))];
        }
        let shared_cpus: Vec<_> = queues_of_cpu.iter().filter(|(_, queues)| queues.len() > 1).collect();
        // If there are more queues than CPUs, queues must share CPUs, which the check `queues` reports.
        if shared_cpus.is_empty() || device.interrupts_by_queue.len() > facts.online_cpu_count {
            return vec![Finding::ok(format!(
                "interrupts: {}, on CPUs: {}",
                device.interrupts_by_queue.len(),
                queues_of_cpu.len()
            ))];
        }
        let shared_cpu_texts: Vec<String> = shared_cpus
            .iter()
            .map(|(cpu, queues)| {
                let queue_names: Vec<String> = queues.iter().map(u16::to_string).collect();
                format!("CPU {cpu} serves queues {}", queue_names.join(", "))
            })
            .collect();
        let consequence = "cores share a CPU: one that is reported idle may have a busy CPU";
        vec![
            interrupt_affinity_commands(device, facts.online_cpu_count)
                .fold(Finding::warning(shared_cpu_texts.join("; "), consequence), Finding::with_remedy_step),
        ]
    })
}
