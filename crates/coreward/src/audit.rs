//! `coreward audit` and `coreward fleet history|diff|rollback`: who changed what, and the documents of before.

use std::fmt::Write as _;

use coreward_api::types::{AuditEntry, AuditQuery, PastDocument};
use coreward_config::Source;
use coreward_control::config::difference;
use coreward_control::show::ask;
use coreward_control::show::fleet::Wanted;

use crate::apply::put_in_force;
use crate::{AskArgs, Format, print};

#[derive(clap::Args)]
pub struct AuditArgs {
    #[command(flatten)]
    ask: AskArgs,
    /// The newest ones, so many at most (1 to 1,000)
    #[arg(long, value_name = "COUNT", default_value_t = 50)]
    limit: u16,
}

#[derive(clap::Args)]
pub struct DiffArgs {
    /// Generation of the older document
    from: u64,
    /// Generation of the newer one (default: the one in force)
    to: Option<u64>,
    #[command(flatten)]
    ask: AskArgs,
}

#[derive(clap::Args)]
pub struct RollbackArgs {
    /// Generation of the document that is to be in force again
    generation: u64,
    #[command(flatten)]
    ask: AskArgs,
    /// Without the question
    #[arg(long)]
    yes: bool,
}

/// # Errors
/// When the controller cannot be reached, or says no.
pub fn audit(args: &AuditArgs) -> anyhow::Result<()> {
    let client = args.ask.contact.client()?;
    let audit = ask(client.audit(&AuditQuery { after: 0, limit: Some(args.limit) }))?;
    if args.ask.format == Format::Json {
        return print(&serde_json::to_string_pretty(&audit)?);
    }
    print(&audit.entries.iter().map(line).collect::<String>())
}

/// "2026-11-23T14:05:09Z #7 alice from 10.1.0.9: drain s1: not drained -> drained".
fn line(entry: &AuditEntry) -> String {
    let at = moment(entry.at_unix_ms);
    let AuditEntry { id, who, from_address, action, target, before, after, .. } = entry;
    let from = if from_address.is_empty() { String::new() } else { format!(" from {from_address}") };
    let target = if target.is_empty() { String::new() } else { format!(" {target}") };
    format!("{at} #{id} {who}{from}: {action}{target}: {before} -> {after}\n")
}

fn moment(unix_ms: u64) -> String {
    let at = std::time::UNIX_EPOCH + std::time::Duration::from_millis(unix_ms);
    humantime::format_rfc3339_seconds(at).to_string()
}

/// # Errors
/// As [`audit`].
pub fn history(args: &AskArgs) -> anyhow::Result<()> {
    let history = ask(args.contact.client()?.fleet_history())?;
    if args.format == Format::Json {
        return print(&serde_json::to_string_pretty(&history)?);
    }
    let mut text = String::new();
    for PastDocument { generation, at_unix_ms, who, .. } in &history.documents {
        let _ = writeln!(text, "generation {generation}, {}, by {who}", moment(*at_unix_ms));
    }
    print(&text)
}

/// # Errors
/// When one of the documents is not there any more; else as [`audit`].
pub fn diff(args: &DiffArgs) -> anyhow::Result<()> {
    let client = args.ask.contact.client()?;
    let (from, to) = ask(async {
        let from = client.past_document(args.from).await?;
        let to = match args.to {
            Some(generation) => client.past_document(generation).await?.text,
            None => client.fleet().await?.text,
        };
        anyhow::Ok((from.text, to))
    })?;
    let changes = difference(&Source::from_text("older", &from), &Source::from_text("newer", &to));
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    match args.ask.format {
        Format::Json => print(&serde_json::to_string_pretty(&changes)?),
        Format::Text if changes.is_empty() => print("no value differs"),
        Format::Text => print(&changes.join("\n")),
    }
}

/// # Errors
/// When the document is not there any more, the controller refuses it, or the answer is no.
pub fn rollback(args: &RollbackArgs) -> anyhow::Result<()> {
    let client = args.ask.contact.client()?;
    let past = ask(client.past_document(args.generation))?;
    let wanted = Wanted::of_text(&client, format!("generation {}", args.generation), past.text)?;
    put_in_force(wanted, args.ask.format, (false, args.yes))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_one_line() {
        let entry = AuditEntry {
            id: 7,
            at_unix_ms: 1_795_442_709_000,
            who: "operator token 1a2b3c4d".into(),
            from_address: "10.1.0.9".into(),
            action: "drain".into(),
            target: "s1".into(),
            before: "not drained".into(),
            after: "drained".into(),
        };
        let expected =
            "2026-11-23T14:05:09Z #7 operator token 1a2b3c4d from 10.1.0.9: drain s1: not drained -> drained\n";
        assert_eq!(line(&entry), expected);
    }
}
