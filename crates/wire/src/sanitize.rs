//! Sanitizing of foreign text for display. Control characters, which a terminal would execute, are replaced, and the
//! length and number of texts are limited.

use std::collections::HashMap;

use coreward_intf as intf;

use crate::v1;

const MAX_MESSAGE_TEXT_CHARS: usize = 512;
/// Maximum number of counters or services in one list of a message. It equals the number of service indexes.
const MAX_SERVICES_PER_MESSAGE: usize = 1024;
/// Maximum number of servers in a message, which is the number of server ids.
const MAX_SERVERS_PER_MESSAGE: usize = 16_384;

/// Returns the text with control characters replaced and its length limited to 512 characters.
pub fn sanitize_str(text: &str) -> String {
    text.chars().take(MAX_MESSAGE_TEXT_CHARS).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Returns the same text as [`sanitize_str`]. If the text needs no change, it is not copied.
pub fn sanitize_string(text: String) -> String {
    let needs_no_change = text.len() <= MAX_MESSAGE_TEXT_CHARS && !text.chars().any(char::is_control);
    if needs_no_change { text } else { sanitize_str(&text) }
}

fn sanitize_texts(texts: Vec<String>) -> Vec<String> {
    texts.into_iter().take(MAX_SERVERS_PER_MESSAGE).map(sanitize_string).collect()
}

/// Returns the counts by name, with sanitized names.
pub fn sanitize_count_names(counts: HashMap<String, u64>) -> HashMap<String, u64> {
    counts.into_iter().take(MAX_SERVICES_PER_MESSAGE).map(|(name, count)| (sanitize_string(name), count)).collect()
}

/// Returns the counters that have known names. Unknown names could create endless metrics series, because names become
/// labels of metrics.
pub fn retain_known_counters(counts: HashMap<String, u64>, known_names: &[&[&str]]) -> HashMap<String, u64> {
    let is_known_counter = |name: &String| known_names.iter().any(|names| names.contains(&name.as_str()));
    counts.into_iter().filter(|(name, _)| is_known_counter(name)).collect()
}

/// Sanitizes the texts in an agent's state of a UDP service.
pub fn sanitize_dispatched_service(service: v1::DispatchedService) -> v1::DispatchedService {
    v1::DispatchedService {
        listen: sanitize_string(service.listen),
        policy: sanitize_string(service.policy),
        workers: service.workers,
        counters: sanitize_count_names(service.counters),
    }
}

/// Sanitizes the texts in rejected updates.
pub fn sanitize_rejected_updates(rejected_updates: Vec<v1::RejectedUpdate>) -> Vec<v1::RejectedUpdate> {
    let sanitize_update = |rejected_update: v1::RejectedUpdate| v1::RejectedUpdate {
        service: sanitize_string(rejected_update.service),
        reason: sanitize_string(rejected_update.reason),
        ..rejected_update
    };
    rejected_updates.into_iter().take(MAX_SERVICES_PER_MESSAGE).map(sanitize_update).collect()
}

/// Sanitizes the texts in a load balancer's state.
pub fn sanitize_load_balancer_state(state: v1::LoadBalancerState) -> v1::LoadBalancerState {
    let sanitize_clock = |clock: v1::ServerClock| v1::ServerClock {
        service: sanitize_string(clock.service),
        server: sanitize_string(clock.server),
        state: sanitize_string(clock.state),
        problem: sanitize_string(clock.problem),
        ..clock
    };
    let sanitize_stamped_packets = |stamped_packets: v1::StampedPackets| v1::StampedPackets {
        service: sanitize_string(stamped_packets.service),
        ..stamped_packets
    };
    v1::LoadBalancerState {
        table_generations: sanitize_count_names(state.table_generations),
        unresolved_servers: sanitize_texts(state.unresolved_servers),
        counters: retain_known_counters(state.counters, &[&intf::LB_COUNTER_NAMES]),
        xdp_mode: sanitize_string(state.xdp_mode),
        events: retain_known_counters(state.events, &[&intf::LB_EVENT_NAMES]),
        unresolved_load_balancers: sanitize_texts(state.unresolved_load_balancers),
        server_clocks: state.server_clocks.into_iter().take(MAX_SERVERS_PER_MESSAGE).map(sanitize_clock).collect(),
        warnings: sanitize_texts(state.warnings),
        rejected: sanitize_rejected_updates(state.rejected),
        stamped_services: state
            .stamped_services
            .into_iter()
            .take(MAX_SERVICES_PER_MESSAGE)
            .map(sanitize_stamped_packets)
            .collect(),
        ..state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        let escape_sequence = || "\u{1b}[2Jgone".to_owned();
        assert_eq!(sanitize_string("s1".into()), "s1");
        assert_eq!(sanitize_string(escape_sequence()), "\u{fffd}[2Jgone");
        assert_eq!(sanitize_string("ä".repeat(600)).chars().count(), MAX_MESSAGE_TEXT_CHARS);
        let state = sanitize_load_balancer_state(v1::LoadBalancerState {
            xdp_mode: escape_sequence(),
            counters: (0..5000).map(|n| (format!("\n{n}"), n)).chain([("new_connection".to_owned(), 1)]).collect(),
            table_generations: (0..5000).map(|n| (format!("\n{n}"), n)).collect(),
            unresolved_servers: vec![escape_sequence()],
            server_clocks: vec![v1::ServerClock { problem: escape_sequence(), ..Default::default() }],
            stamped_services: vec![v1::StampedPackets { service: escape_sequence(), ..Default::default() }],
            connections: 7,
            ..Default::default()
        });
        // Only known counter names remain, because they are labels of metrics.
        assert_eq!(
            (state.counters.len(), state.table_generations.len(), state.connections),
            (1, MAX_SERVICES_PER_MESSAGE, 7)
        );
        let service = &state.stamped_services[0].service;
        let displayed_texts = [&state.xdp_mode, &state.unresolved_servers[0], &state.server_clocks[0].problem, service];
        assert!(displayed_texts.into_iter().chain(state.counters.keys()).all(|text| !text.contains(char::is_control)));
    }
}
