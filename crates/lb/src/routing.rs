//! Checks that this machine's kernel forwards servers' replies. LB-side stamping requires this (`timestamps = "lb"`),
//! because the load balancer is then the servers' router.

use std::path::Path;

/// Directory of the IPv4 sysctls, with a subdirectory for each device and one for `all`.
const IPV4_SYSCTL_DIRECTORY: &str = "/proc/sys/net/ipv4/conf";

/// Returns problems with IPv4 routing. Each names a sysctl, its value and the expected value. Skips unreadable sysctls.
pub fn ipv4_routing_problems(interface: &str) -> Vec<String> {
    let read_sysctl_value = |directory: &str, name: &str| {
        let text = std::fs::read_to_string(Path::new(IPV4_SYSCTL_DIRECTORY).join(directory).join(name)).ok()?;
        text.trim().parse().ok()
    };
    routing_sysctl_problems(interface, read_sysctl_value)
}

/// Returns the problem with routing IPv6 replies, or `None` if there is none. Linux forwards for all devices or for
/// none. It has no setting for redirects, but hosts ignore them if their route does not use the router's link-local
/// address.
pub fn ipv6_routing_problem() -> Option<String> {
    problem_of_ipv6_forwarding(&std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/forwarding").ok()?)
}

fn problem_of_ipv6_forwarding(forwarding: &str) -> Option<String> {
    (forwarding.trim() == "0").then(|| {
        "net.ipv6.conf.all.forwarding is 0: expected 1, or no IPv6 answer of a server whose timestamps are by \"lb\" \
         reaches a client"
            .to_owned()
    })
}

/// Returns the problems with an interface's sysctls. `sysctl_value` returns a sysctl's value by its directory and name.
fn routing_sysctl_problems(interface: &str, sysctl_value: impl Fn(&str, &str) -> Option<u32>) -> Vec<String> {
    let mut problems = Vec::new();
    // IN_DEV_FORWARD() in include/linux/inetdevice.h reads the device's value. net.ipv4.ip_forward sets all values.
    if sysctl_value(interface, "forwarding") == Some(0) {
        problems.push(format!(
            "net.ipv4.conf.{interface}.forwarding is 0: expected 1 (net.ipv4.ip_forward = 1), or no answer of a server \
             whose timestamps are by \"lb\" reaches a client"
        ));
    }
    // By IN_DEV_TX_REDIRECTS(), a device sends redirects if either directory allows them.
    for directory in ["all", interface] {
        if sysctl_value(directory, "send_redirects").is_some_and(|value| value != 0) {
            problems.push(format!(
                "net.ipv4.conf.{directory}.send_redirects is 1: expected 0, or the kernel redirects (ICMP) servers \
                 with `timestamps = \"lb\"` to a route past this load balancer"
            ));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ipv6_forwarding_is_reported() {
        assert_eq!(problem_of_ipv6_forwarding("1\n"), None);
        assert!(
            problem_of_ipv6_forwarding("0\n").unwrap().starts_with("net.ipv6.conf.all.forwarding is 0: expected 1")
        );
    }

    #[test]
    fn wrong_ipv4_sysctls_are_reported() {
        let problems_with_values = |forwarding: u32, all_redirects: u32, own_redirects: u32| {
            routing_sysctl_problems("eth7", |directory, name| match (directory, name) {
                ("eth7", "forwarding") => Some(forwarding),
                ("all", "send_redirects") => Some(all_redirects),
                ("eth7", "send_redirects") => Some(own_redirects),
                other => panic!("{other:?}"),
            })
        };
        assert!(problems_with_values(1, 0, 0).is_empty());
        let all_problems = problems_with_values(0, 1, 1).join("\n");
        for expected_problem in [
            "net.ipv4.conf.eth7.forwarding is 0: expected 1",
            "conf.all.send_redirects is 1: expected 0",
            "conf.eth7.send_redirects",
        ] {
            assert!(all_problems.contains(expected_problem), "{all_problems}");
        }
        assert!(ipv4_routing_problems("there is no such device").iter().all(|problem| problem.contains("conf.all.")));
    }
}
