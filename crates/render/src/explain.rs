//! Text output of `coreward explain`.

use comfy_table::{CellAlignment, Table, presets};
use coreward_api::types::{Explain, ExplainedServer, Explanation};

pub fn format_explanation(reply: &Explanation, request: &Explain) -> String {
    let chosen_server_name = reply.chosen_server.as_deref().unwrap_or("(see below)");
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["server", "id", "hash", "bucket", "core", "load now", ""]);
    for server in &reply.servers {
        table.add_row(server_row(server, reply.chosen_server.as_deref()));
    }
    for column in 1..6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let server_lines: String = table.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    format!(
        "{} -> {}/{} ({}, {}, table {}): {chosen_server_name}\n\n{server_lines}\n{}.\n{}{}{}",
        request.client,
        request.vip,
        request.protocol,
        reply.service,
        reply.policy,
        reply.table_generation,
        reply.reason,
        format_forwarding(reply),
        format_vlan(reply),
        format_cookie_packet_share(reply)
    )
}

/// Returns the output line about the chosen server's VLAN, or an empty text if its frames are untagged.
fn format_vlan(reply: &Explanation) -> String {
    let chosen_server = reply.servers.iter().find(|server| Some(&*server.name) == reply.chosen_server.as_deref());
    let name_and_vlan = chosen_server.and_then(|server| server.vlan.map(|vlan| (&server.name, vlan)));
    name_and_vlan.map_or_else(String::new, |(name, vlan)| format!("Frames to {name} are in VLAN {vlan}.\n"))
}

/// Returns the output line with the share of established packets whose server is selected by the cookie. The line is
/// empty if load balancers do not stamp the service's cookies.
fn format_cookie_packet_share(reply: &Explanation) -> String {
    reply.cookie_share.map_or_else(String::new, |share| {
        format!("Load balancers decide {:.2} % of its established packets by the cookie.\n", share * 100.0)
    })
}

/// Returns the output line about the outer header of forwarded packets, or an empty text for `l2` forwarding, which
/// adds no header.
fn format_forwarding(reply: &Explanation) -> String {
    const OUTER_HEADER_HASH_NOTE: &str = "NICs hash the outer header, so packets may arrive at another core";
    match (&*reply.forwarding, reply.outer_source_port) {
        ("l2", _) => String::new(),
        (kind, Some(port)) => format!("Forwarded by {kind} from source port {port}: {OUTER_HEADER_HASH_NOTE}.\n"),
        (kind, None) => format!("Forwarded by {kind}: {OUTER_HEADER_HASH_NOTE}.\n"),
    }
}

fn server_row(server: &ExplainedServer, chosen_server_name: Option<&str>) -> Vec<String> {
    let value_or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let note = if Some(&*server.name) == chosen_server_name {
        "<- chosen"
    } else if !server.eligible {
        "takes no new connections"
    } else {
        ""
    };
    vec![
        server.name.clone(),
        server.id.to_string(),
        value_or_dash(server.hash.map(|hash| format!("{hash:08x}"))),
        value_or_dash(server.bucket.map(|bucket| bucket.to_string())),
        value_or_dash(server.core.map(|core| core.to_string())),
        value_or_dash(server.core_load.map(|load| format!("{load:.3}"))),
        note.to_owned(),
    ]
}
