//! The command `coreward connections`, which lists the heaviest connections of a stateful service. It reads them from a
//! running load balancer's pinned table.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use comfy_table::{CellAlignment, Table, presets};
use coreward_dataplane::lb::connections::PinnedConnectionTable;
use coreward_model::connection_table::{ConnectionEntry, DecisecondTicks, top_connections_by_weight};

use crate::capture_command::find_service;

/// Options of `coreward connections`.
#[derive(Debug, Clone, clap::Args)]
pub struct ConnectionListArgs {
    /// Name of the service, or its VIP and port
    #[arg(long, value_name = "SERVICE")]
    pub service: String,
    /// Number of connections to list
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    pub top: usize,
    /// Count by which connections are sorted
    #[arg(long, value_enum, default_value_t = ConnectionSortKey::Packets)]
    pub by: ConnectionSortKey,
    /// Pin directory of the load balancer [default: the only one below /sys/fs/bpf/coreward]
    #[arg(long, value_name = "DIRECTORY")]
    pub pin_directory: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ConnectionSortKey {
    /// Packets from the client
    Packets,
    /// Bytes from the client
    Bytes,
}

impl ConnectionSortKey {
    fn sort_key(self, connection: &ConnectionEntry) -> u64 {
        match self {
            ConnectionSortKey::Packets => connection.packet_count,
            ConnectionSortKey::Bytes => connection.byte_count,
        }
    }
}

const PIN_ROOT_DIRECTORY: &str = "/sys/fs/bpf/coreward";

/// Returns a service's connections with the most packets or bytes, as text. Fails when the pin directory is ambiguous
/// or has no load balancer, or the service is unknown.
pub fn run_connections_command(args: &ConnectionListArgs) -> anyhow::Result<String> {
    let directory = match &args.pin_directory {
        Some(directory) => directory.clone(),
        None => find_only_pin_directory(Path::new(PIN_ROOT_DIRECTORY))?,
    };
    let pinned_connections = PinnedConnectionTable::open(&directory)?;
    let service = find_service(&args.service, &pinned_connections.services_with_names())?;
    let mut connection_count = 0;
    let counted_connections = pinned_connections.connections(service).inspect(|_| connection_count += 1);
    let top_connections =
        top_connections_by_weight(counted_connections, args.top, |connection| args.by.sort_key(connection));
    let table_entry_count = pinned_connections.table_size().entry_count();
    let heading = format!("{service}: {connection_count} connections in a table of {table_entry_count} entries");
    Ok(format!("{heading}\n{}", format_connection_table(&top_connections, pinned_connections.packet_clock_ticks())))
}

/// Returns the only directory below `root` in which a load balancer has pinned its maps. Fails if there are several.
fn find_only_pin_directory(root: &Path) -> anyhow::Result<PathBuf> {
    let root_entries = std::fs::read_dir(root).with_context(|| format!("{}: give --pin-directory", root.display()))?;
    let has_connection_table = |directory: &PathBuf| directory.join("lb/connections").exists();
    let lb_directories: Vec<PathBuf> =
        root_entries.flatten().map(|entry| entry.path()).filter(has_connection_table).collect();
    match lb_directories.as_slice() {
        [only_directory] => Ok(only_directory.clone()),
        [] => bail!("no load balancer has pinned its maps below {}: give --pin-directory", root.display()),
        directories => {
            let directory_names: Vec<String> =
                directories.iter().map(|directory| directory.display().to_string()).collect();
            bail!("several load balancers: give --pin-directory, one of {}", directory_names.join(", "))
        }
    }
}

fn format_connection_table(connections: &[ConnectionEntry], now: DecisecondTicks) -> Table {
    let mut connection_table = Table::new();
    connection_table.load_style(presets::NOTHING);
    connection_table.set_header(["client", "server", "packets", "bytes", "age, s", "idle, s", "state"]);
    for connection in connections {
        connection_table.add_row([
            connection.client.to_string(),
            connection.identity.server.to_string(),
            connection.packet_count.to_string(),
            connection.byte_count.to_string(),
            format_seconds(now.saturating_duration_since(connection.opened_at)),
            format_seconds(now.saturating_duration_since(connection.last_packet_at)),
            connection_state_name(connection).to_owned(),
        ]);
    }
    for column in connection_table.column_iter_mut().skip(1).take(5) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    connection_table
}

fn format_seconds(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64())
}

fn connection_state_name(connection: &ConnectionEntry) -> &'static str {
    match connection {
        ConnectionEntry { packet_count: 0..=1, .. } => "half-open",
        ConnectionEntry { is_closing: true, .. } => "closing",
        _ => "open",
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::ServerId;
    use coreward_model::connection_table::{ConnectionIndex, TableEntryIdentity};

    use super::*;

    #[test]
    fn connection_is_shown_with_age_and_state() {
        let server_id = ServerId::try_from(77).unwrap();
        let connection = ConnectionEntry {
            index: ConnectionIndex::new(0, 5),
            identity: TableEntryIdentity { tag: 1, generation: 2, service_slot: 0, server: server_id },
            client: "10.1.0.7:40312".parse().unwrap(),
            packet_count: 12,
            byte_count: 3456,
            opened_at: DecisecondTicks(100),
            last_packet_at: DecisecondTicks(225),
            is_closing: true,
        };
        let half_open_connection = ConnectionEntry { packet_count: 1, ..connection };
        let table_text = format_connection_table(&[connection, half_open_connection], DecisecondTicks(230)).to_string();
        let table_cells: Vec<Vec<&str>> =
            table_text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(table_cells[0], ["10.1.0.7:40312", "77", "12", "3456", "13.0", "0.5", "closing"]);
        assert_eq!(table_cells[1][6], "half-open");
    }

    #[test]
    fn pin_directory_must_be_given_unless_there_is_one_load_balancer() {
        let root = tempfile::tempdir().unwrap();
        let pin_directory_error = |root: &Path| find_only_pin_directory(root).unwrap_err().to_string();
        assert!(pin_directory_error(root.path()).starts_with("no load balancer has pinned its maps below "));
        let pin_directories = ["lb1", "lb2"].map(|name| {
            std::fs::create_dir_all(root.path().join(name).join("lb/connections")).unwrap();
            find_only_pin_directory(root.path())
        });
        assert_eq!(pin_directories[0].as_ref().unwrap(), &root.path().join("lb1"));
        assert!(pin_directories[1].as_ref().unwrap_err().to_string().starts_with("several load balancers"));
        assert!(pin_directory_error(&root.path().join("none")).ends_with("give --pin-directory"));
    }
}
