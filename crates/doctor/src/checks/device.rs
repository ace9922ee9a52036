//! Checks of the NIC, except for RSS.

use std::collections::BTreeMap;

use coreward_dataplane::lb::XdpMode;

use crate::facts::{Device, Facts, Role, Server};
use crate::finding::Finding;

/// Runs a check of the services' device. If there is none, only the check `interface` reports the reason.
fn with_device(facts: &Facts, check: impl FnOnce(&Device) -> Vec<Finding>) -> Vec<Finding> {
    facts.device.as_ref().map_or_else(Vec::new, check)
}

pub fn interface(facts: &Facts) -> Vec<Finding> {
    let Some(name) = &facts.settings.interface else {
        return vec![Finding::unknown("no interface is named: --config FILE or --interface NAME")];
    };
    let why = "no packet arrives on it";
    let Some(device) = &facts.device else {
        return vec![
            Finding::fault(format!("{name} does not exist here"), why)
                .with_remediation("ip -br link  # name one of these as `interface`"),
        ];
    };
    if !device.is_ethernet {
        let why = "the programs read Ethernet headers";
        return vec![
            Finding::fault(format!("{name} is no Ethernet device"), why).with_remediation("name another `interface`"),
        ];
    }
    if !device.is_up {
        return vec![
            Finding::fault(format!("{name} is down, or has no carrier"), why)
                .with_remediation(format!("ip link set {name} up")),
        ];
    }
    vec![Finding::ok(format!(
        "{name} is up, driver {}",
        if device.driver.is_empty() { "unknown" } else { &device.driver }
    ))]
}

pub fn xdp(facts: &Facts) -> Vec<Finding> {
    with_device(facts, |device| {
        let name = facts.interface();
        let programs = [device.xdp.native_program_id, device.xdp.generic_program_id];
        let others: Vec<u32> = programs.into_iter().flatten().filter(|id| Some(*id) != device.own_program_id).collect();
        let mut found = Vec::new();
        for id in others {
            let why = "a device has one XDP program: the kernel rejects coreward's";
            found.push(
                Finding::fault(format!("{name} has another XDP program (id {id})"), why)
                    .with_remediation(format!("bpftool prog show id {id}  # shows its name and processes"))
                    .with_remediation(format!("ip link set dev {name} xdp off")),
            );
        }
        if let Some(refused) = queue_limit_problem(device) {
            let why = "each queue needs another one to send frames";
            let queues = device.channels.map_or(1, |channels| channels.receive_max / 2).max(1);
            let only_native = facts.settings.xdp_mode == XdpMode::Native;
            found.push(
                Finding::fault_if(only_native, refused, why)
                    .with_remediation(format!("ethtool -L {name} combined {queues}")),
            );
        }
        if device.xdp.supports_native == Some(false) && facts.settings.xdp_mode != XdpMode::Generic {
            let only_native = facts.settings.xdp_mode == XdpMode::Native;
            let why = "the program runs after the driver (generic XDP), several times slower; with `xdp_mode = \
                       \"native\"` \
                       the daemon does not start";
            found.push(
                Finding::fault_if(only_native, format!("the driver {} has no XDP", device.driver), why)
                    .with_remediation("a NIC whose driver has XDP, or `xdp_mode = \"generic\"` to accept that"),
            );
        }
        if found.is_empty() {
            found.push(match (device.own_program_id, device.xdp.supports_native) {
                (Some(id), _) => Finding::ok(format!("coreward's own program (id {id}) is at {name}")),
                (None, Some(true)) => Finding::ok(format!("{name} is free, and its driver has XDP")),
                (None, Some(false)) => Finding::ok(format!("{name} is free; generic XDP, by `xdp_mode`")),
                (None, None) => {
                    Finding::ok(format!("{name} is free; this kernel does not show whether its driver has XDP"))
                }
            });
        }
        found
    })
}

pub fn xdp_send(facts: &Facts) -> Vec<Finding> {
    with_device(facts, |device| {
        let name = facts.interface();
        let why = "packets that coreward forwards are lost";
        let is_native = device.own_program_id.is_some() && device.xdp.native_program_id == device.own_program_id;
        if is_native && device.veth_peer_has_xdp == Some(false) {
            let found = format!(
                "the other end of the veth {name} has no XDP program: frames that XDP sends are dropped, or with GRO \
                 there wait until this machine sends something itself"
            );
            return vec![with_veth_remedy(Finding::fault(found, why))];
        }
        if device.xdp_send_errors.is_empty() {
            return vec![Finding::ok(format!("{name} dropped no frame that XDP sent, as far as its driver counts"))];
        }
        let counters: Vec<String> =
            device.xdp_send_errors.iter().map(|(counter, count)| format!("{counter} {count}")).collect();
        let found = format!("{name} dropped frames that XDP sent: {}", counters.join(", "));
        let finding = Finding::fault(found, why);
        vec![match device.driver.as_str() {
            "veth" => with_veth_remedy(finding),
            _ => finding.with_remediation(format!("ethtool -G {name} tx NUMBER  # a longer transmit ring")),
        }]
    })
}

/// Adds a remedy for veth devices: veth_xdp_flush() in drivers/net/veth.c requires an XDP program at the peer.
fn with_veth_remedy(finding: Finding) -> Finding {
    finding
        .with_remediation(
            "ip link set dev PEER xdp object FILE  # at the other end, in its namespace; one that returns XDP_PASS",
        )
        .with_remediation(
            "or `xdp_mode = \"generic\"` in the load balancer's file; `coreward lb --detach`, and start it again",
        )
}

/// Returns the problem of too many queues for XDP: ena_xdp_legal_queue_count() in the driver ena allows half of them.
fn queue_limit_problem(device: &Device) -> Option<String> {
    let channels = device.channels?;
    (device.driver == "ena" && channels.receive * 2 > channels.receive_max).then(|| {
        format!(
            "{} of {} queues in use: the driver ena takes XDP with half of them",
            channels.receive, channels.receive_max
        )
    })
}

/// Maximum MTU in bytes for native XDP: a page minus the room that XDP and the kernel need around a frame
/// (docs/limits.md). veth_xdp_set() in drivers/net/veth.c allows 3,504, drivers/net/virtio_net.c 3,506.
const MAX_MTU: u32 = 3_498;

pub fn mtu(facts: &Facts) -> Vec<Finding> {
    with_device(facts, |device| {
        let name = facts.interface();
        let in_driver = device.own_program_id.is_some() && device.xdp.native_program_id == device.own_program_id;
        if device.mtu <= MAX_MTU || in_driver || facts.settings.xdp_mode == XdpMode::Generic {
            return vec![Finding::ok(format!("{} bytes", device.mtu))];
        }
        let why = "drivers reject XDP if a frame does not fit one page: generic XDP is slower, and with `xdp_mode = \
                   \"native\"` \
                   the daemon does not start";
        let only_native = facts.settings.xdp_mode == XdpMode::Native;
        let found = format!("{} bytes: expected at most {MAX_MTU}", device.mtu);
        vec![
            Finding::fault_if(only_native, found, why)
                .with_remediation(format!("ip link set {name} mtu 1500  # servers and switches as well")),
        ]
    })
}

/// Minimum MTU of an IPv6 link in bytes (RFC 8200, Sect. 5).
const IPV6_MIN_MTU: usize = 1280;

pub fn outer_headers(facts: &Facts) -> Vec<Finding> {
    with_device(facts, |device| {
        let ipv6 = facts.services.iter().filter(|service| service.vip().is_ipv6());
        let lengths = ipv6.flat_map(|service| {
            let overhead = |server: &Server| service.forwarding.overhead(server.address);
            facts
                .servers
                .values()
                .map(overhead)
                .filter(|overhead| *overhead > 0)
                .map(|overhead| IPV6_MIN_MTU + overhead)
        });
        let Some(needed) = lengths.max() else {
            return vec![Finding::ok("no service with an IPv6 VIP has servers behind routers")];
        };
        if device.mtu as usize >= needed {
            return vec![Finding::ok(format!("{} bytes, needed: {needed}", device.mtu))];
        }
        let name = facts.interface();
        let found = format!("the MTU of {name} is {}: expected at least {needed}", device.mtu);
        let why =
            "packets of up to 1280 bytes get no \"packet too big\", because hosts ignore a smaller MTU: they are lost";
        let remedy = format!("ip link set {name} mtu {needed}  # routers and servers as well");
        vec![Finding::fault(found, why).with_remediation(remedy)]
    })
}

pub fn lro(facts: &Facts) -> Vec<Finding> {
    with_device(facts, |device| {
        if !device.is_lro_enabled {
            return vec![Finding::ok("off")];
        }
        let name = facts.interface();
        let why = "packets that the NIC has merged cannot be forwarded unchanged; drivers reject XDP with LRO";
        vec![
            Finding::fault(format!("LRO is on at {name}"), why)
                .with_remediation(format!("ethtool -K {name} lro off  # the link may go down for a moment")),
        ]
    })
}

pub fn vlan_tags(facts: &Facts) -> Vec<Finding> {
    with_device(facts, |device| {
        let name = facts.interface();
        match (device.strips_vlan_tags, device.vlans.as_slice()) {
            (false, _) => vec![Finding::ok("frames keep their VLAN tags")],
            (true, []) => vec![Finding::ok(format!(
                "{name} strips VLAN tags, and has no VLAN device: its switch port must send no tagged frames"
            ))],
            (true, vlans) => {
                let why = "XDP gets frames without their tags: it forwards packets of VLANs as untagged ones";
                vec![
                    Finding::fault(format!("{name} strips VLAN tags, and carries VLANs ({})", vlans.join(", ")), why)
                        .with_remediation(format!("ethtool -K {name} rxvlan off")),
                ]
            }
        }
    })
}

pub fn queues(facts: &Facts) -> Vec<Finding> {
    with_device(facts, |device| {
        let Some(channels) = device.channels else {
            return vec![Finding::unknown("the driver does not report its queues")];
        };
        let (name, cpus, queues) = (facts.interface(), facts.cpu_count, usize::from(channels.receive));
        let found = format!("receive queues: {queues} (at most {}), CPUs: {cpus}", channels.receive_max);
        let could = usize::from(channels.receive_max).min(cpus);
        let set = format!("ethtool -L {name} combined {could}  # the link may go down for a moment");
        match facts.role {
            Role::Server if queues > cpus => {
                let why = "several queues share a CPU, but each of them is reported as a core";
                vec![Finding::warning(found, why).with_remediation(set)]
            }
            _ if queues < could => {
                let why = "packets use fewer CPUs than there are";
                vec![Finding::warning(found, why).with_remediation(set)]
            }
            Role::Server if queues == 1 && cpus > 1 => {
                let why = "RSS can select one core only: core-aware policies select by server only";
                vec![
                    Finding::warning(found, why)
                        .with_remediation("a NIC (for a virtual machine: a device) with several queues"),
                ]
            }
            _ => vec![Finding::ok(found)],
        }
    })
}

pub fn interrupts(facts: &Facts) -> Vec<Finding> {
    with_device(facts, |device| {
        let mut queues_of_cpu: BTreeMap<usize, Vec<u16>> = BTreeMap::new();
        for (queue, interrupt) in &device.interrupts {
            if let Some(cpu) = interrupt.cpu {
                queues_of_cpu.entry(cpu).or_default().push(*queue);
            }
        }
        if queues_of_cpu.is_empty() {
            return vec![Finding::unknown(format!(
                "no interrupts of {} are found (a virtual device has none)",
                facts.interface()
            ))];
        }
        let shared: Vec<_> = queues_of_cpu.iter().filter(|(_, queues)| queues.len() > 1).collect();
        // With more queues than CPUs, queues share CPUs: the check `queues` reports that.
        if shared.is_empty() || device.interrupts.len() > facts.cpu_count {
            return vec![Finding::ok(format!(
                "interrupts: {}, on CPUs: {}",
                device.interrupts.len(),
                queues_of_cpu.len()
            ))];
        }
        let words: Vec<String> = shared
            .iter()
            .map(|(cpu, queues)| {
                let names: Vec<String> = queues.iter().map(u16::to_string).collect();
                format!("CPU {cpu} serves queues {}", names.join(", "))
            })
            .collect();
        let why = "cores share a CPU: one that is reported idle may have a busy CPU";
        let commands = device.interrupts.iter().map(|(queue, interrupt)| {
            format!("echo {} > /proc/irq/{}/smp_affinity_list", usize::from(*queue) % facts.cpu_count, interrupt.number)
        });
        vec![commands.fold(Finding::warning(words.join("; "), why), Finding::with_remediation)]
    })
}
