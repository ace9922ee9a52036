//! Checks of routed packets.

use crate::facts::{Facts, IPV6_FORWARDING, Role, device_sysctl};
use crate::finding::Finding;

/// Returns whether this machine stamps replies of a service with an IPv4 VIP.
fn stamps_replies_here(facts: &Facts) -> bool {
    facts.services.iter().any(|service| service.is_stamped_by_lb && service.vip().is_ipv4())
}

/// Value of the sysctl rp_filter for strict mode (RFC 3704, Sect. 2.2).
const RP_FILTER_STRICT: u32 = 1;

pub fn rp_filter(facts: &Facts) -> Vec<Finding> {
    // IN_DEV_RPFILTER() in include/linux/inetdevice.h takes the larger one.
    let Some((all, own)) = facts.device_sysctl("rp_filter") else { return vec![] };
    let (in_force, device) = (all.max(own), facts.interface());
    if in_force != RP_FILTER_STRICT {
        return vec![Finding::ok(format!("{in_force} in force at {device}"))];
    }
    let loose = device_sysctl(device, "rp_filter");
    let found = format!("net.ipv4.conf.{{all,{device}}}.rp_filter are {all} and {own} (strict)");
    if facts.role == Role::Lb {
        if !stamps_replies_here(facts) {
            return vec![Finding::ok(format!(
                "{found}; no service has `timestamps = \"lb\"`, so the kernel routes no replies"
            ))];
        }
        let why = "servers' replies have the VIP as source, whose route uses another device: the kernel drops them";
        return vec![Finding::fault(format!("{found}: expected 0 or 2"), why).with_sysctl(loose, "2", false)];
    }
    if facts.default_routes.contains(device) {
        return vec![Finding::ok(format!("{found}; replies leave by {device}, too"))];
    }
    let why = "clients' packets arrive on this device, and replies leave by another: the kernel drops the packets";
    vec![
        Finding::fault(format!("{found}, and no default route leads over {device}"), why)
            .with_sysctl(loose, "2", false),
    ]
}

pub fn forwarding(facts: &Facts) -> Vec<Finding> {
    let mut findings = forwarding_ipv4(facts);
    findings.extend(forwarding_ipv6(facts));
    findings
}

fn forwarding_ipv6(facts: &Facts) -> Option<Finding> {
    facts.services.iter().find(|service| service.is_stamped_by_lb && service.vip().is_ipv6())?;
    if facts.sysctl(IPV6_FORWARDING)? != 0 {
        return Some(Finding::ok("on for IPv6"));
    }
    let why = "this machine must route servers' replies: none reaches a client";
    let fault = Finding::fault("net.ipv6.conf.all.forwarding is 0: expected 1", why);
    Some(fault.with_sysctl(IPV6_FORWARDING.to_owned(), "1", false))
}

fn forwarding_ipv4(facts: &Facts) -> Vec<Finding> {
    if !stamps_replies_here(facts) {
        return vec![];
    }
    let Some((_, own)) = facts.device_sysctl("forwarding") else { return vec![] };
    if own != 0 {
        return vec![Finding::ok(format!("on at {}", facts.interface()))];
    }
    let device = facts.interface();
    let why = "this machine must route servers' replies: none reaches a client";
    // Not by --fix: the sysctl makes the machine a router for everybody.
    vec![Finding::fault(format!("net.ipv4.conf.{device}.forwarding is 0: expected 1"), why).with_sysctl(
        device_sysctl(device, "forwarding"),
        "1",
        false,
    )]
}

pub fn send_redirects(facts: &Facts) -> Vec<Finding> {
    if !stamps_replies_here(facts) {
        return vec![];
    }
    let Some((all, own)) = facts.device_sysctl("send_redirects") else { return vec![] };
    // As in IN_DEV_TX_REDIRECTS(), one of the two values suffices.
    if all == 0 && own == 0 {
        return vec![Finding::ok("off")];
    }
    let device = facts.interface();
    let why = "the kernel redirects servers to a route past this load balancer: their replies are then not stamped";
    let found = format!("net.ipv4.conf.{{all,{device}}}.send_redirects are {all} and {own}: expected 0");
    let set = ["all", device].into_iter().zip([all, own]).filter(|(_, value)| *value != 0);
    vec![set.fold(Finding::fault(found, why), |finding, (of, _)| {
        finding.with_sysctl(device_sysctl(of, "send_redirects"), "0", true)
    })]
}

pub fn announce(facts: &Facts) -> Vec<Finding> {
    let Some(announcement) = &facts.announcement else { return vec![] };
    let table = announcement.table;
    let mut findings = Vec::new();
    match &announcement.rules {
        Err(problem) => findings.push(Finding::unknown(problem.clone())),
        Ok(rules) if !rules.is_empty() => {
            let why = "the table has blackhole routes to VIPs: the kernel drops packets that use it";
            let finding = Finding::fault(format!("a rule uses table {table}: {}", rules.join("; ")), why);
            findings.push(
                finding.with_remediation(format!("ip rule delete table {table}  # or another `table` in [announce]")),
            );
        }
        Ok(_) => {}
    }
    match &announcement.daemon {
        Some(daemon) => findings.push(Finding::ok(format!("{daemon} runs; no rule uses table {table}"))),
        None => {
            let why = "no routing daemon announces the VIPs of this load balancer";
            let found = "neither bird nor zebra (FRR) runs".to_owned();
            let remedy = "systemctl enable --now bird  # docs/deployment.md has its file";
            findings.push(Finding::fault(found, why).with_remediation(remedy.to_owned()));
        }
    }
    findings
}
