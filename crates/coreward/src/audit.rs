//! `coreward audit`, which prints who changed the fleet, and how.

use coreward_api::types::{AuditEntry, AuditQuery};
use coreward_render::block_on;

use crate::{CommandOutputFormat, ControllerQueryArgs, print_to_stdout};

#[derive(clap::Args)]
pub struct AuditArgs {
    #[command(flatten)]
    query: ControllerQueryArgs,
    /// Maximum number of entries, the newest first (1 to 1,000)
    #[arg(long, value_name = "COUNT", default_value_t = 50)]
    limit: u16,
}

/// Runs `coreward audit`. Fails if the controller cannot be reached, or if it rejects the request.
pub fn print_audit_log(args: &AuditArgs) -> anyhow::Result<()> {
    let client = args.query.contact.build_client()?;
    let audit = block_on(client.audit_log(&AuditQuery { after: 0, limit: Some(args.limit) }))?;
    if args.query.format == CommandOutputFormat::Json {
        return print_to_stdout(&serde_json::to_string_pretty(&audit)?);
    }
    print_to_stdout(&audit.entries.iter().map(format_entry).collect::<String>())
}

/// Returns a line such as "2026-11-23T14:05:09Z #7 alice from 10.1.0.9: drain s1: not drained -> drained".
fn format_entry(entry: &AuditEntry) -> String {
    let time_text = format_time(entry.at_unix_ms);
    let AuditEntry { id, actor, from_address, action, target, before, after, .. } = entry;
    let origin_text = if from_address.is_empty() { String::new() } else { format!(" from {from_address}") };
    let target = if target.is_empty() { String::new() } else { format!(" {target}") };
    format!("{time_text} #{id} {actor}{origin_text}: {action}{target}: {before} -> {after}\n")
}

fn format_time(unix_ms: u64) -> String {
    let at = std::time::UNIX_EPOCH + std::time::Duration::from_millis(unix_ms);
    humantime::format_rfc3339_seconds(at).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audit_entry_is_formatted_as_one_line() {
        let entry = AuditEntry {
            id: 7,
            at_unix_ms: 1_795_442_709_000,
            actor: "operator token 1a2b3c4d".into(),
            from_address: "10.1.0.9".into(),
            action: "drain".into(),
            target: "s1".into(),
            before: "not drained".into(),
            after: "drained".into(),
        };
        let expected =
            "2026-11-23T14:05:09Z #7 operator token 1a2b3c4d from 10.1.0.9: drain s1: not drained -> drained\n";
        assert_eq!(format_entry(&entry), expected);
    }
}
