//! Checks of TCP timestamps, the clock source and the wall clock.

use crate::facts::MachineFacts;
use crate::finding::Finding;

const TCP_TIMESTAMPS_SYSCTL: &str = "net/ipv4/tcp_timestamps";

pub fn check_tcp_timestamps(facts: &MachineFacts) -> Vec<Finding> {
    let Some(value) = facts.sysctl_value(TCP_TIMESTAMPS_SYSCTL) else { return vec![] };
    let has_stamped_services = facts.services.is_empty() || facts.services.iter().any(|service| service.is_stamped);
    // The agent sets the sysctl once a service is stamped at the server.
    let is_stamped_at_server = facts.services.iter().any(|service| service.is_stamped && !service.is_stamped_by_lb);
    let is_managed_by_agent =
        facts.settings.manages_tcp_timestamps && (facts.services.is_empty() || is_stamped_at_server);
    if value == 2 || !has_stamped_services {
        return vec![Finding::ok(format!("net.ipv4.tcp_timestamps is {value}"))];
    }
    if is_managed_by_agent {
        return vec![Finding::ok(format!(
            "net.ipv4.tcp_timestamps is {value}; the agent sets 2 (`manage_timestamps`)"
        ))];
    }
    let consequence = "each connection has its own clock (1) or none (0): it cannot be stamped, and loses its server \
                       when the pool changes";
    // `--fix` does not do this, because it would change the timestamps of connections that an agent already stamps.
    vec![Finding::fault(format!("net.ipv4.tcp_timestamps is {value}: expected 2"), consequence).with_sysctl_remedy(
        TCP_TIMESTAMPS_SYSCTL.to_owned(),
        "2",
        false,
    )]
}

/// Clock sources that are slow, because each reading accesses a device, or coarse, because they count timer interrupts.
const SLOW_CLOCK_SOURCES: [&str; 4] = ["hpet", "acpi_pm", "jiffies", "refined-jiffies"];

pub fn check_clock_source(facts: &MachineFacts) -> Vec<Finding> {
    let clock_source = facts.clock.clock_source.as_str();
    if clock_source.is_empty() {
        return vec![Finding::unknown("/sys does not show the clock source")];
    }
    if !SLOW_CLOCK_SOURCES.contains(&clock_source) {
        return vec![Finding::ok(clock_source)];
    }
    let consequence = "each reading takes a microsecond or more, or is coarse: timestamps, loads and request times \
                       read it for every packet";
    let remedy = "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource  # or see dmesg why tsc \
                  is not trusted";
    vec![
        Finding::warning(format!("{clock_source}: expected tsc or the hypervisor's"), consequence)
            .with_remedy_step(remedy),
    ]
}

/// Checks that the wall clock is synchronized (the check `clock-sync`).
pub fn check_clock_sync(facts: &MachineFacts) -> Vec<Finding> {
    let future_dated_report_count = facts.future_dated_report_count;
    if future_dated_report_count > 0 {
        let consequence = "one of the clocks is wrong by more than a second: logs cannot be compared";
        return vec![
            Finding::warning(
                format!("{future_dated_report_count} reports were sent ahead of the controller's clock"),
                consequence,
            )
            .with_remedy_step("chronyc tracking  # at the servers and at the controller"),
        ];
    }
    match facts.clock.is_synchronised {
        None => vec![Finding::unknown("the kernel does not report it")],
        Some(true) => vec![Finding::ok("synchronised")],
        Some(false) => {
            let consequence =
                "logs of several machines cannot be compared, and certificates begin and end at other times";
            vec![
                Finding::warning("the wall clock is not synchronised (no NTP)", consequence)
                    .with_remedy_step("apt install chrony"),
            ]
        }
    }
}
