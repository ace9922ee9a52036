//! Text output of `coreward status`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use coreward_api::types::{
    DispatchedService, LoadBalancer, LoadBalancerState, Rack, ReportState, Server, ServerClock, ServerState, Service,
    StampedService, Status,
};
use coreward_model::statistics::mean;

use super::keys;

/// Formats the fleet's status as text. `now` is the time since 1970.
pub fn format_status(reply: &Status, now: Duration) -> String {
    let mut text = format!(
        "configuration {}, a report every {} ms: {} taken, {} rejected\n",
        reply.configuration_generation,
        reply.report_interval_ms,
        reply.accepted_reports,
        format_counts(&reply.rejected_reports)
    );
    append_warnings(&mut text, &reply.warnings);
    for service in &reply.services {
        text += &service_status_text(service);
    }
    text += "\n";
    text += &server_table_text(&reply.servers);
    for server in &reply.servers {
        server.dispatched_services.iter().for_each(|service| text += &dispatch_text(&server.name, service));
    }
    reply.racks.iter().for_each(|rack| text += &rack_status_text(rack, reply.servers.len()));
    for balancer in &reply.load_balancers {
        text += &load_balancer_text(balancer, &reply.services);
    }
    if !reply.load_balancers.iter().any(|balancer| balancer.connected) {
        text += "\nno load balancer is connected\n";
    }
    text += "\ncookie keys: ";
    text += &keys::format_key_status(&reply.keys, now);
    text
}

fn rack_status_text(rack: &Rack, server_count: usize) -> String {
    let Rack { name, version, last_message_age_ms: age_ms, servers: connected_servers, permitted_servers } = rack;
    let permitted_text =
        if *permitted_servers as usize == server_count { "all".to_owned() } else { permitted_servers.to_string() };
    let (last_message, connected_servers) = (format!("last message {age_ms} ms ago"), connected_servers.join(" "));
    format!(
        "\nrack {name} ({version}), {last_message}, may report for {permitted_text} of {server_count} servers\n  \
         servers    {connected_servers}\n"
    )
}

/// Formats the sum of the counts and, in descending order, the positive counts by name, such as "3 (out_of_order 2,
/// no_cores 1)".
fn format_counts(counts: &BTreeMap<String, u64>) -> String {
    let counts_text = format_positive_counts(counts);
    let sum = counts.values().fold(0, |sum: u64, count| sum.saturating_add(*count));
    if counts_text.is_empty() { "0".to_owned() } else { format!("{sum} ({counts_text})") }
}

fn format_positive_counts(counts: &BTreeMap<String, u64>) -> String {
    let mut positive_counts: Vec<(&String, &u64)> = counts.iter().filter(|(_, count)| **count > 0).collect();
    positive_counts.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), *name));
    let entries: Vec<String> = positive_counts.into_iter().map(|(name, count)| format!("{name} {count}")).collect();
    entries.join(", ")
}

fn append_warnings(text: &mut String, warnings: &[String]) {
    for warning in warnings {
        let _ = writeln!(text, "  ! {warning}");
    }
}

fn service_status_text(service: &Service) -> String {
    let mut text = format!(
        "\nservice {} at {}: {}, {} buckets{}\n",
        service.name,
        service.address,
        service.policy,
        service.bucket_count,
        service_consistency_text(service)
    );
    let table_text = match service.table_generation {
        0 => "none yet".to_owned(),
        generation => format!("generation {generation}, {} ms old", service.table_age_ms),
    };
    let _ = writeln!(text, "  table      {table_text}");
    let _ = writeln!(text, "  servers    {}", service.servers.join(" "));
    if let Some(check) = &service.health_check_kind {
        let takes_new_connections = |state| matches!(state, ServerState::Active | ServerState::Joining);
        let up = service.members.iter().filter(|member| takes_new_connections(member.state)).count();
        let present_member_count = service.members.iter().filter(|member| member.state != ServerState::Gone).count();
        let _ = writeln!(text, "  health     {check}: {up} of {present_member_count} take new connections");
    }
    for group in &service.rss_groups {
        let _ = writeln!(text, "  RSS group  {}: {}", group.key_fingerprint, group.servers.join(" "));
    }
    append_warnings(&mut text, &service.warnings);
    text
}

/// Formats a service's consistency mode, such as ", stateless, timestamps by servers".
fn service_consistency_text(service: &Service) -> String {
    let timestamps_text = match service.timestamps.as_str() {
        "server" => "timestamps by servers",
        "lb" => "timestamps by load balancers",
        _ => "no timestamps",
    };
    format!(", {}, {timestamps_text}", service.consistency)
}

fn server_table_text(servers: &[Server]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([
        "server",
        "id",
        "address",
        "state",
        "report",
        "open",
        "weight",
        "RSS as predicted",
        "mean",
        "max",
        "cores",
    ]);
    for server in servers {
        table.add_row(server_status_row(server));
    }
    for column in [1, 4, 5, 6, 7, 8, 9] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut text: String = table.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    let has_state_line = |server: &&Server| !server.state_reason.is_empty() || server.state != ServerState::Active;
    for server in servers.iter().filter(has_state_line) {
        let _ = writeln!(text, "  {}", server_state_text(server));
    }
    servers
        .iter()
        .filter(|server| server.drain.is_some())
        .for_each(|server| text += &remaining_connections_text(server));
    for server in servers {
        let prefixed_warnings: Vec<String> =
            server.warnings.iter().map(|warning| format!("{}: {warning}", server.name)).collect();
        append_warnings(&mut text, &prefixed_warnings);
    }
    text
}

/// Formats a server's state and its reason, such as "s1: down for 3 s: lb1: connection refused".
fn server_state_text(server: &Server) -> String {
    let Server { name, state, state_reason: reason, state_for_ms, .. } = server;
    let duration_text = state_for_ms
        .map_or_else(String::new, |ms| format!(" for {}", keys::format_duration(Duration::from_millis(ms))));
    let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    format!("{name}: {state}{duration_text}{reason}")
}

/// Formats a server's remaining connections, such as "s1: 12 connections as counted 0.7 s ago (api 2, web 10)".
fn remaining_connections_text(server: &Server) -> String {
    let Some(connection_counts) = &server.connection_counts else {
        return format!("  {}: how many connections remain is not known\n", server.name);
    };
    let connection_count: u64 = connection_counts.connections_by_service.values().copied().map(u64::from).sum();
    let services: Vec<String> =
        connection_counts.connections_by_service.iter().map(|(name, count)| format!("{name} {count}")).collect();
    let age_seconds = connection_counts.age_ms as f64 / 1000.0;
    format!(
        "  {}: {connection_count} connections as counted {age_seconds:.1} s ago ({})\n",
        server.name,
        services.join(", ")
    )
}

fn server_status_row(server: &Server) -> Vec<String> {
    let has_report = server.report_state != ReportState::None;
    let report_age = match server.report_state {
        ReportState::Fresh => format!("{} ms", server.report_age_ms),
        ReportState::Stale => format!("{} ms, stale", server.report_age_ms),
        ReportState::None => "never".to_owned(),
    };
    let value_or_dash = |is_known: bool, value: String| if is_known { value } else { "-".to_owned() };
    let core_loads = &server.core_loads;
    let highest_load = core_loads.iter().copied().fold(0.0, f64::max);
    vec![
        server.name.clone(),
        server.id.to_string(),
        server_address_text(server),
        server.state.to_string(),
        report_age,
        value_or_dash(has_report, server.open_connections.to_string()),
        server.weight.to_string(),
        rss_prediction_text(server.rss_matched_syns, server.rss_mismatched_syns),
        value_or_dash(!core_loads.is_empty(), format!("{:.2}", mean(core_loads).unwrap_or(0.0))),
        value_or_dash(!core_loads.is_empty(), format!("{highest_load:.2}")),
        core_loads.iter().map(|load| load_bar(*load)).collect(),
    ]
}

fn server_address_text(server: &Server) -> String {
    server.vlan.map_or_else(|| server.address.to_string(), |vlan| format!("{} VLAN {vlan}", server.address))
}

/// Formats the number of SYNs that arrived on the predicted receive queue, out of all SYNs, such as "97 of 100".
fn rss_prediction_text(matched_count: u64, mismatched_count: u64) -> String {
    match matched_count + mismatched_count {
        0 => "-".to_owned(),
        all => format!("{matched_count} of {all}"),
    }
}

/// Returns a bar character whose height shows a core's load, in steps of an eighth of the core's capacity.
fn load_bar(load: f64) -> char {
    const LOAD_BAR_CHARACTERS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    LOAD_BAR_CHARACTERS[((load * 8.0) as usize).min(LOAD_BAR_CHARACTERS.len() - 1)]
}

fn dispatch_text(server: &str, service: &DispatchedService) -> String {
    let mut text = format!("\ndispatch of {} at {server}: {}\n", service.listen, service.policy);
    let mut table = Table::new();
    let columns =
        ["worker", "pid", "outstanding", "queued", "dispatched", "completed", "abandoned", "dropped", "eligible"];
    table.load_style(presets::NOTHING).set_header(columns);
    for worker in &service.workers {
        let counts = [worker.dispatched, worker.completed, worker.abandoned, worker.dropped];
        let mut row = [worker.worker, worker.pid, worker.outstanding, worker.queued].map(|n| n.to_string()).to_vec();
        row.extend(counts.map(|count| count.to_string()));
        row.push(if worker.eligible { "yes" } else { "no" }.to_owned());
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    text.extend(table.lines().map(|line| format!(" {}\n", line.trim_end())));
    let counters_text = format_positive_counts(&service.counters);
    if !counters_text.is_empty() {
        let _ = writeln!(text, "  counters   {counters_text}");
    }
    text
}

/// Describes whether the load balancer is connected, and its XDP mode if it is known.
fn load_balancer_connection_text(balancer: &LoadBalancer) -> String {
    match (&balancer.state, balancer.connected, balancer.alive) {
        (_, false, true) => "disconnected a moment ago".to_owned(),
        (_, false, false) => "lost".to_owned(),
        (None, true, _) => "connected, no state yet".to_owned(),
        (Some(state), true, _) => format!("XDP {}, as of {} ms ago", state.xdp_mode, balancer.state_age_ms),
    }
}

fn load_balancer_text(balancer: &LoadBalancer, services: &[Service]) -> String {
    let mut text = format!("\nload balancer {}: {}\n", balancer.name, load_balancer_connection_text(balancer));
    let address = balancer.address.map_or_else(|| "no address".to_owned(), |address| address.to_string());
    let owner_text = balancer.connection_table_owner.map_or_else(|| "none".to_owned(), |owner| owner.to_string());
    let _ = writeln!(text, "  owner      {owner_text}, at {address}");
    let Some(state) = balancer.state.as_ref().filter(|_| balancer.connected) else { return text };
    let mut table_generations: Vec<String> =
        state.table_generations.iter().map(|(service, generation)| format!("{service} {generation}")).collect();
    table_generations.sort();
    let _ = writeln!(
        text,
        "  tables     {}",
        if table_generations.is_empty() { "none yet".to_owned() } else { table_generations.join(", ") }
    );
    if let Some(vlan) = state.vlan {
        let _ = writeln!(text, "  VLAN       {vlan}");
    }
    let _ = writeln!(text, "  packets    {}", format_positive_counts(&state.counters));
    let events_text = format_positive_counts(&state.event_counters);
    if !events_text.is_empty() {
        let _ = writeln!(text, "  events     {events_text}");
    }
    if state.connection_count > 0 {
        let _ = writeln!(text, "  table      {} connections", state.connection_count);
    }
    append_warnings(&mut text, describe_missing_configuration(state, services).as_slice());
    if !state.unresolved_load_balancers.is_empty() {
        let _ =
            writeln!(text, "  ! no MAC address known of load balancer {}", state.unresolved_load_balancers.join(", "));
    }
    if !state.unresolved_servers.is_empty() {
        let _ = writeln!(text, "  ! no MAC address known of {}", state.unresolved_servers.join(", "));
    }
    text += &server_clocks_text(state);
    append_warnings(&mut text, &state.warnings);
    text
}

/// Describes which parts of the configuration a load balancer lacks, or returns `None` if it has all of them.
fn describe_missing_configuration(state: &LoadBalancerState, services: &[Service]) -> Option<String> {
    if state.configuration_generation == 0 {
        return Some("no configuration of this controller is in force yet".to_owned());
    }
    let has_placement_table = |service: &&Service| state.table_generations.contains_key(&service.name);
    let services_without_table: Vec<&str> =
        services.iter().filter(|service| !has_placement_table(service)).map(|service| service.name.as_str()).collect();
    (!services_without_table.is_empty())
        .then(|| format!("no table is in force yet for {}", services_without_table.join(", ")))
}

/// Formats one line per service with the number of servers whose timestamp clock is known. A warning follows for each
/// clock with a problem.
fn server_clocks_text(state: &LoadBalancerState) -> String {
    let mut clocks_by_service: BTreeMap<&str, Vec<&ServerClock>> = BTreeMap::new();
    for clock in &state.server_clocks {
        clocks_by_service.entry(&clock.service).or_default().push(clock);
    }
    let mut text = String::new();
    for (service, clocks) in clocks_by_service {
        let is_clock_known = |clock: &&&ServerClock| ["known", "per-connection"].contains(&clock.clock_state.as_str());
        let known_count = clocks.iter().filter(is_clock_known).count();
        let packet_counts = state.stamped_services.iter().find(|stamped_service| stamped_service.service == service);
        let cookie_share_text = packet_counts
            .and_then(StampedService::cookie_share)
            .map_or_else(String::new, |share| format!(", {:.2} % of established packets by the cookie", share * 100.0));
        let _ = writeln!(text, "  clocks     {service}: {known_count} of {} servers'{cookie_share_text}", clocks.len());
        let problems = clocks.iter().filter_map(|clock| {
            let problem = clock.problem.as_ref()?;
            Some(format!("{} of {service} is not stamped: {problem}", clock.server))
        });
        let problem_lines: Vec<String> = problems.collect();
        append_warnings(&mut text, &problem_lines);
    }
    text
}
