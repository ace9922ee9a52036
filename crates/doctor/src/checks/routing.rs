//! Checks of settings that affect routed packets.

use crate::facts::{IPV6_FORWARDING_SYSCTL, MachineFacts, MachineRole, ipv4_device_sysctl_path};
use crate::finding::Finding;

/// Returns whether this machine stamps the replies of a service with an IPv4 VIP.
fn stamps_ipv4_replies(facts: &MachineFacts) -> bool {
    facts.services.iter().any(|service| service.is_stamped_by_lb && service.vip().is_ipv4())
}

/// Value of the sysctl rp_filter for strict mode (RFC 3704, Sect. 2.2).
const RP_FILTER_STRICT: u32 = 1;

pub fn check_rp_filter(facts: &MachineFacts) -> Vec<Finding> {
    // The larger of the two values applies (IN_DEV_RPFILTER() in include/linux/inetdevice.h).
    let Some((all_value, device_value)) = facts.global_and_device_sysctl_values("rp_filter") else { return vec![] };
    let (in_force, device) = (all_value.max(device_value), facts.interface_name());
    if in_force != RP_FILTER_STRICT {
        return vec![Finding::ok(format!("{in_force} in force at {device}"))];
    }
    let loose_sysctl_path = ipv4_device_sysctl_path(device, "rp_filter");
    let observation = format!("net.ipv4.conf.{{all,{device}}}.rp_filter are {all_value} and {device_value} (strict)");
    if facts.role == MachineRole::Lb {
        if !stamps_ipv4_replies(facts) {
            return vec![Finding::ok(format!(
                "{observation}; no service has `timestamps = \"lb\"`, so the kernel routes no replies"
            ))];
        }
        let consequence =
            "servers' replies have the VIP as source, whose route uses another device: the kernel drops them";
        return vec![Finding::fault(format!("{observation}: expected 0 or 2"), consequence).with_sysctl_remedy(
            loose_sysctl_path,
            "2",
            false,
        )];
    }
    if facts.default_route_devices.contains(device) {
        return vec![Finding::ok(format!("{observation}; replies leave by {device}, too"))];
    }
    let consequence =
        "clients' packets arrive on this device, and replies leave by another: the kernel drops the packets";
    vec![
        Finding::fault(format!("{observation}, and no default route leads over {device}"), consequence)
            .with_sysctl_remedy(loose_sysctl_path, "2", false),
    ]
}

pub fn check_ip_forwarding(facts: &MachineFacts) -> Vec<Finding> {
    let mut findings = check_ipv4_forwarding(facts);
    findings.extend(check_ipv6_forwarding(facts));
    findings
}

fn check_ipv6_forwarding(facts: &MachineFacts) -> Option<Finding> {
    facts.services.iter().find(|service| service.is_stamped_by_lb && service.vip().is_ipv6())?;
    if facts.sysctl_value(IPV6_FORWARDING_SYSCTL)? != 0 {
        return Some(Finding::ok("on for IPv6"));
    }
    let consequence = "this machine must route servers' replies: none reaches a client";
    let fault_finding = Finding::fault("net.ipv6.conf.all.forwarding is 0: expected 1", consequence);
    Some(fault_finding.with_sysctl_remedy(IPV6_FORWARDING_SYSCTL.to_owned(), "1", false))
}

fn check_ipv4_forwarding(facts: &MachineFacts) -> Vec<Finding> {
    if !stamps_ipv4_replies(facts) {
        return vec![];
    }
    let Some((_, device_value)) = facts.global_and_device_sysctl_values("forwarding") else { return vec![] };
    if device_value != 0 {
        return vec![Finding::ok(format!("on at {}", facts.interface_name()))];
    }
    let interface_name = facts.interface_name();
    let consequence = "this machine must route servers' replies: none reaches a client";
    // `--fix` does not do this, because the machine would then also route other machines' packets.
    vec![
        Finding::fault(format!("net.ipv4.conf.{interface_name}.forwarding is 0: expected 1"), consequence)
            .with_sysctl_remedy(ipv4_device_sysctl_path(interface_name, "forwarding"), "1", false),
    ]
}

pub fn check_send_redirects(facts: &MachineFacts) -> Vec<Finding> {
    if !stamps_ipv4_replies(facts) {
        return vec![];
    }
    let Some((all_value, device_value)) = facts.global_and_device_sysctl_values("send_redirects") else {
        return vec![];
    };
    // Redirects are sent if either value is set (IN_DEV_TX_REDIRECTS()).
    if all_value == 0 && device_value == 0 {
        return vec![Finding::ok("off")];
    }
    let interface_name = facts.interface_name();
    let consequence =
        "the kernel redirects servers to a route past this load balancer: their replies are then not stamped";
    let observation =
        format!("net.ipv4.conf.{{all,{interface_name}}}.send_redirects are {all_value} and {device_value}: expected 0");
    let nonzero_redirect_sysctls =
        ["all", interface_name].into_iter().zip([all_value, device_value]).filter(|(_, value)| *value != 0);
    vec![nonzero_redirect_sysctls.fold(Finding::fault(observation, consequence), |finding, (device, _)| {
        finding.with_sysctl_remedy(ipv4_device_sysctl_path(device, "send_redirects"), "0", true)
    })]
}

pub fn check_vip_announcement(facts: &MachineFacts) -> Vec<Finding> {
    let Some(announcement) = &facts.announcement else { return vec![] };
    let routing_table_number = announcement.routing_table_number;
    let mut findings = Vec::new();
    match &announcement.ip_rules {
        Err(problem) => findings.push(Finding::unknown(problem.clone())),
        Ok(rules) if !rules.is_empty() => {
            let consequence = "the table has blackhole routes to VIPs: the kernel drops packets that use it";
            let finding =
                Finding::fault(format!("a rule uses table {routing_table_number}: {}", rules.join("; ")), consequence);
            findings.push(finding.with_remedy_step(format!(
                "ip rule delete table {routing_table_number}  # or another `table` in [announce]"
            )));
        }
        Ok(_) => {}
    }
    match &announcement.routing_daemon {
        Some(daemon) => findings.push(Finding::ok(format!("{daemon} runs; no rule uses table {routing_table_number}"))),
        None => {
            let consequence = "no routing daemon announces the VIPs of this load balancer";
            let observation = "neither bird nor zebra (FRR) runs".to_owned();
            let remedy = "systemctl enable --now bird  # docs/deployment.md has its file";
            findings.push(Finding::fault(observation, consequence).with_remedy_step(remedy.to_owned()));
        }
    }
    findings
}
