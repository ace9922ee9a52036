//! `coreward connections`: the heaviest connections of a stateful service, read from the pinned table of a running load
//! balancer.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use comfy_table::{CellAlignment, Table, presets};
use coreward_dataplane::lb::connections::PinnedConnections;
use coreward_model::connection_table::{ClockTicks, Connection, heaviest};

use crate::capture_command::find_service;

/// Options of `coreward connections`.
#[derive(Debug, Clone, clap::Args)]
pub struct ConnectionsArgs {
    /// Name of the service, or its VIP and port
    #[arg(long, value_name = "SERVICE")]
    pub service: String,
    /// Number of connections to list
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    pub top: usize,
    /// Count by which connections are sorted
    #[arg(long, value_enum, default_value_t = SortBy::Packets)]
    pub by: SortBy,
    /// Pin directory of the load balancer [default: the only one below /sys/fs/bpf/coreward]
    #[arg(long, value_name = "DIRECTORY")]
    pub pin_directory: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SortBy {
    /// Packets from the client
    Packets,
    /// Bytes from the client
    Bytes,
}

impl SortBy {
    fn sort_key(self, connection: &Connection) -> u64 {
        match self {
            SortBy::Packets => connection.packets,
            SortBy::Bytes => connection.bytes,
        }
    }
}

const PIN_ROOT: &str = "/sys/fs/bpf/coreward";

/// Returns the heaviest connections of a service as text. Fails when the pin directory is ambiguous or has no load
/// balancer, or the service is unknown.
pub fn run(args: &ConnectionsArgs) -> anyhow::Result<String> {
    let directory = match &args.pin_directory {
        Some(directory) => directory.clone(),
        None => find_pin_directory(Path::new(PIN_ROOT))?,
    };
    let pinned = PinnedConnections::open(&directory)?;
    let service = find_service(&args.service, &pinned.services())?;
    let mut count = 0;
    let counted = pinned.connections(service).inspect(|_| count += 1);
    let top = heaviest(counted, args.top, |connection| args.by.sort_key(connection));
    let entries = pinned.size().entry_count();
    let head = format!("{service}: {count} connections in a table of {entries} entries");
    Ok(format!("{head}\n{}", format_table(&top, pinned.clock())))
}

/// Returns the only directory below `root` in which a load balancer has pinned its maps; fails if there are several.
fn find_pin_directory(root: &Path) -> anyhow::Result<PathBuf> {
    let listed = std::fs::read_dir(root).with_context(|| format!("{}: give --pin-directory", root.display()))?;
    let has_table = |directory: &PathBuf| directory.join("lb/connections").exists();
    let found: Vec<PathBuf> = listed.flatten().map(|entry| entry.path()).filter(has_table).collect();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => bail!("no load balancer has pinned its maps below {}: give --pin-directory", root.display()),
        several => {
            let shown: Vec<String> = several.iter().map(|directory| directory.display().to_string()).collect();
            bail!("several load balancers: give --pin-directory, one of {}", shown.join(", "))
        }
    }
}

fn format_table(connections: &[Connection], now: ClockTicks) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["client", "server", "packets", "bytes", "age, s", "idle, s", "state"]);
    for connection in connections {
        table.add_row([
            connection.client.to_string(),
            connection.identity.server.to_string(),
            connection.packets.to_string(),
            connection.bytes.to_string(),
            format_seconds(now.since(connection.opened_at)),
            format_seconds(now.since(connection.last_seen)),
            state_name(connection).to_owned(),
        ]);
    }
    for column in table.column_iter_mut().skip(1).take(5) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn format_seconds(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64())
}

fn state_name(connection: &Connection) -> &'static str {
    match connection {
        Connection { packets: 0..=1, .. } => "half-open",
        Connection { is_closing: true, .. } => "closing",
        _ => "open",
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::ServerId;
    use coreward_model::connection_table::{ConnectionIndex, EntryIdentity};

    use super::*;

    #[test]
    fn connection_is_shown_with_age_and_state() {
        let server = ServerId::try_from(77).unwrap();
        let connection = Connection {
            index: ConnectionIndex::new(0, 5),
            identity: EntryIdentity { tag: 1, generation: 2, service: 0, server },
            client: "10.1.0.7:40312".parse().unwrap(),
            packets: 12,
            bytes: 3456,
            opened_at: ClockTicks(100),
            last_seen: ClockTicks(225),
            is_closing: true,
        };
        let half_open = Connection { packets: 1, ..connection };
        let shown = format_table(&[connection, half_open], ClockTicks(230)).to_string();
        let words: Vec<Vec<&str>> = shown.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[0], ["10.1.0.7:40312", "77", "12", "3456", "13.0", "0.5", "closing"]);
        assert_eq!(words[1][6], "half-open");
    }

    #[test]
    fn without_a_directory_there_must_be_one_load_balancer() {
        let root = tempfile::tempdir().unwrap();
        let refused = |root: &Path| find_pin_directory(root).unwrap_err().to_string();
        assert!(refused(root.path()).starts_with("no load balancer has pinned its maps below "));
        let pinned = ["lb1", "lb2"].map(|name| {
            std::fs::create_dir_all(root.path().join(name).join("lb/connections")).unwrap();
            find_pin_directory(root.path())
        });
        assert_eq!(pinned[0].as_ref().unwrap(), &root.path().join("lb1"));
        assert!(pinned[1].as_ref().unwrap_err().to_string().starts_with("several load balancers"));
        assert!(refused(&root.path().join("none")).ends_with("give --pin-directory"));
    }
}
