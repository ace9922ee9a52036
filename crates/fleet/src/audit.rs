//! Audit log. A change and its entry are written together, so that a restart or another leader loses neither.

use std::sync::Arc;
use std::time::Duration;

use coreward_api::Caller;
use coreward_api::types::AuditEntry;

use crate::records::FleetRecords;

/// Maximum number of entries in the audit log. When it is exceeded, the oldest entries are dropped.
pub const MAX_AUDIT_ENTRIES: usize = 1000;
/// Maximum length of a name in bytes. This and the other limits keep an entry at about 1 KB, because one change may
/// write up to fifty entries.
const MAX_AUDITED_NAME_BYTES: usize = 100;
/// Maximum length in bytes of each of `state_before` and `state_after`.
const MAX_AUDITED_STATE_BYTES: usize = 500;
/// Maximum length of one described change of a document, in bytes.
const MAX_AUDITED_CHANGE_BYTES: usize = 150;
/// Maximum length of all described changes in an entry, in bytes.
const MAX_AUDITED_CHANGES_TOTAL_BYTES: usize = 400;
const TRUNCATION_MARK_BYTES: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetChangeAuthor {
    /// Name of the person or program that made the change, as in [`AuditEntry::actor`].
    pub actor: String,
    /// Address from which the change was requested, as in [`AuditEntry::from_address`].
    pub from_address: String,
}

impl FleetChangeAuthor {
    /// Returns the controller as the author, for scheduled changes.
    pub fn controller() -> Self {
        Self { actor: "controller".to_owned(), from_address: String::new() }
    }

    pub fn sighup() -> Self {
        Self { actor: "SIGHUP".to_owned(), from_address: String::new() }
    }
}

impl From<&Caller> for FleetChangeAuthor {
    fn from(caller: &Caller) -> Self {
        Self { actor: caller.principal.to_string(), from_address: caller.address.to_string() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetChangeDescription {
    pub action: &'static str,
    pub target: String,
    pub state_before: String,
    pub state_after: String,
}

/// Returns one line that describes the changes of a document, followed by the number of changes that do not fit.
pub fn describe_changes(changes: &[String]) -> String {
    let mut description = String::new();
    for (number, change) in changes.iter().enumerate() {
        let truncated_change = truncate_text(change, MAX_AUDITED_CHANGE_BYTES);
        if description.len() + truncated_change.len() > MAX_AUDITED_CHANGES_TOTAL_BYTES {
            return format!("{description}; and {} more", changes.len() - number);
        }
        description += if number == 0 { "" } else { "; " };
        description += &truncated_change;
    }
    description
}

/// Returns the text if it has at most `max_bytes` bytes. Otherwise returns its beginning and the number of omitted
/// bytes.
fn truncate_text(text: &str, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text.to_owned();
    }
    let kept_bytes = (0..max_bytes - TRUNCATION_MARK_BYTES).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    format!("{} [{} more bytes]", &text[..kept_bytes], text.len() - kept_bytes)
}

/// Returns the entry with its texts truncated to their maximum lengths.
pub fn truncate_entry(entry: AuditEntry) -> AuditEntry {
    AuditEntry {
        actor: truncate_text(&entry.actor, MAX_AUDITED_NAME_BYTES),
        from_address: truncate_text(&entry.from_address, MAX_AUDITED_NAME_BYTES),
        action: truncate_text(&entry.action, MAX_AUDITED_NAME_BYTES),
        target: truncate_text(&entry.target, MAX_AUDITED_NAME_BYTES),
        before: truncate_text(&entry.before, MAX_AUDITED_STATE_BYTES),
        after: truncate_text(&entry.after, MAX_AUDITED_STATE_BYTES),
        ..entry
    }
}

impl FleetRecords {
    /// Appends an entry with the time `wall_time` (wall clock, since 1970) to the audit log.
    pub fn append_audit_entry(
        &mut self,
        author: &FleetChangeAuthor,
        description: FleetChangeDescription,
        wall_time: Duration,
    ) {
        let entries = Arc::make_mut(&mut self.audit_log);
        entries.push(truncate_entry(AuditEntry {
            id: entries.last().map_or(1, |last_entry| last_entry.id + 1),
            at_unix_ms: wall_time.as_millis() as u64,
            actor: author.actor.clone(),
            from_address: author.from_address.clone(),
            action: description.action.to_owned(),
            target: description.target,
            before: description.state_before,
            after: description.state_after,
        }));
        let excess_entry_count = entries.len().saturating_sub(MAX_AUDIT_ENTRIES);
        entries.drain(..excess_entry_count);
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::rss::seeded_rng;

    use super::*;

    #[test]
    fn long_audit_entries_are_truncated_with_a_mark() {
        let long_text = "\u{e4}".repeat(5000);
        let changes: Vec<String> = (0..100).map(|n| format!("~ service s{n}: servers [{long_text}] -> []")).collect();
        let changes_line = describe_changes(&changes);
        assert!(
            changes_line.starts_with("~ service s0: servers [\u{e4}")
                && changes_line.ends_with(" more bytes]; and 98 more"),
            "{changes_line}"
        );
        assert_eq!(describe_changes(&["+ a".to_owned(), "- b".to_owned()]), "+ a; - b");

        let mut records = FleetRecords::generate(Duration::ZERO, &mut seeded_rng(1, 0));
        let change_description = FleetChangeDescription {
            action: "apply",
            target: long_text.clone(),
            state_before: long_text.clone(),
            state_after: changes_line.clone(),
        };
        records.append_audit_entry(
            &FleetChangeAuthor { actor: long_text.clone(), from_address: long_text },
            change_description,
            Duration::ZERO,
        );
        let entry = &records.audit_log[0];
        assert!(entry.before.ends_with("\u{e4} [9534 more bytes]"), "{}", entry.before);
        assert_eq!(entry.after, changes_line);
        assert!(serde_json::to_vec(entry).unwrap().len() < 1500);
        assert_eq!(&truncate_entry(entry.clone()), entry, "an entry that is read again stays as it is");
    }

    #[test]
    fn audit_log_drops_its_oldest_entries_beyond_the_maximum() {
        let mut records = FleetRecords::generate(Duration::ZERO, &mut seeded_rng(1, 0));
        for generation in 1..=MAX_AUDIT_ENTRIES as u64 + 7 {
            let change_description = FleetChangeDescription {
                action: "apply",
                target: String::new(),
                state_before: String::new(),
                state_after: String::new(),
            };
            records.append_audit_entry(
                &FleetChangeAuthor::sighup(),
                change_description,
                Duration::from_secs(generation),
            );
        }
        assert_eq!((records.audit_log.len(), records.audit_log[0].id), (MAX_AUDIT_ENTRIES, 8));
    }
}
