//! Checks of clocks.

use crate::facts::Facts;
use crate::finding::Finding;

const TCP_TIMESTAMPS: &str = "net/ipv4/tcp_timestamps";

pub fn tcp_timestamps(facts: &Facts) -> Vec<Finding> {
    let Some(value) = facts.sysctl(TCP_TIMESTAMPS) else { return vec![] };
    let stamped = facts.services.is_empty() || facts.services.iter().any(|service| service.is_stamped);
    // The agent sets the sysctl after a service is stamped at the server.
    let at_server = facts.services.iter().any(|service| service.is_stamped && !service.is_stamped_by_lb);
    let by_agent = facts.settings.manage_timestamps && (facts.services.is_empty() || at_server);
    if value == 2 || !stamped {
        return vec![Finding::ok(format!("net.ipv4.tcp_timestamps is {value}"))];
    }
    if by_agent {
        return vec![Finding::ok(format!(
            "net.ipv4.tcp_timestamps is {value}; the agent sets 2 (`manage_timestamps`)"
        ))];
    }
    let why = "each connection has its own clock (1) or none (0): it cannot be stamped, and loses its server when the \
               pool \
               changes";
    // Not by --fix: timestamps of connections that an agent already stamps would jump.
    vec![Finding::fault(format!("net.ipv4.tcp_timestamps is {value}: expected 2"), why).with_sysctl(
        TCP_TIMESTAMPS.to_owned(),
        "2",
        false,
    )]
}

/// Clock sources that are slow to read, because each reading accesses a device.
const SLOW_CLOCKS: [&str; 4] = ["hpet", "acpi_pm", "jiffies", "refined-jiffies"];

pub fn source(facts: &Facts) -> Vec<Finding> {
    let source = facts.clock.source.as_str();
    if source.is_empty() {
        return vec![Finding::unknown("/sys does not show the clock source")];
    }
    if !SLOW_CLOCKS.contains(&source) {
        return vec![Finding::ok(source)];
    }
    let why = "each reading takes a microsecond or more, or is coarse: timestamps, loads and request times read it for \
               every packet";
    let remedy = "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource  # or see dmesg why tsc \
                  is not trusted";
    vec![Finding::warning(format!("{source}: expected tsc or the hypervisor's"), why).with_remediation(remedy)]
}

/// Checks whether the wall clock is synchronised (check `clock-sync`).
pub fn synchronised(facts: &Facts) -> Vec<Finding> {
    let future = facts.future_report_count;
    if future > 0 {
        let why = "one of the clocks is wrong by more than a second: logs cannot be compared";
        return vec![
            Finding::warning(format!("{future} reports were sent ahead of the controller's clock"), why)
                .with_remediation("chronyc tracking  # at the servers and at the controller"),
        ];
    }
    match facts.clock.synchronised {
        None => vec![Finding::unknown("the kernel does not report it")],
        Some(true) => vec![Finding::ok("synchronised")],
        Some(false) => {
            let why = "logs of several machines cannot be compared, and certificates begin and end at other times";
            vec![
                Finding::warning("the wall clock is not synchronised (no NTP)", why)
                    .with_remediation("apt install chrony"),
            ]
        }
    }
}
