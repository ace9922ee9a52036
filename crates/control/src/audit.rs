//! Who changed what, and the documents of before: part of the records, so that a change and its entry are written together, and a
//! restart or another leader loses neither.

use std::sync::Arc;
use std::time::Duration;

use coreward_api::Caller;
use coreward_api::types::{AuditEntry, PastDocument};

use crate::records::Records;

/// Older entries are forgotten.
pub const ENTRIES: usize = 1000;
/// Older documents are.
pub const DOCUMENTS: usize = 100;
/// Bytes of all of them: etcd's space is 2 GB.
const DOCUMENT_BYTES: usize = 64 << 20;
/// Changes of a document that an entry names.
const NAMED_CHANGES: usize = 20;

/// Who wants a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Author {
    /// As [`AuditEntry::who`].
    pub who: String,
    /// As [`AuditEntry::from_address`].
    pub from: String,
}

impl Author {
    /// Nobody else: what is due by itself.
    pub fn controller() -> Self {
        Self { who: "controller".to_owned(), from: String::new() }
    }

    /// Whoever may send this process signals.
    pub fn signal() -> Self {
        Self { who: "SIGHUP".to_owned(), from: String::new() }
    }
}

impl From<&Caller> for Author {
    fn from(caller: &Caller) -> Self {
        Self { who: caller.who.to_string(), from: caller.address.to_string() }
    }
}

/// What is changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// As [`AuditEntry::action`].
    pub action: &'static str,
    /// As [`AuditEntry::target`].
    pub target: String,
    /// As [`AuditEntry::before`].
    pub before: String,
    /// As [`AuditEntry::after`].
    pub after: String,
}

/// The changes of a document, in one line.
pub fn changes_in_words(changes: &[String]) -> String {
    let named = changes[..changes.len().min(NAMED_CHANGES)].join("; ");
    match changes.len().saturating_sub(NAMED_CHANGES) {
        0 => named,
        more => format!("{named}; and {more} more"),
    }
}

impl Records {
    /// Notes a change. `wall`: since 1970.
    pub fn note(&mut self, author: &Author, note: Note, wall: Duration) {
        let entries = Arc::make_mut(&mut self.audit);
        entries.push(AuditEntry {
            id: entries.last().map_or(1, |newest| newest.id + 1),
            at_unix_ms: wall.as_millis() as u64,
            who: author.who.clone(),
            from_address: author.from.clone(),
            action: note.action.to_owned(),
            target: note.target,
            before: note.before,
            after: note.after,
        });
        let superfluous = entries.len().saturating_sub(ENTRIES);
        entries.drain(..superfluous);
    }

    /// Keeps the document in force among those of before, if it is not there yet.
    pub fn keep_document(&mut self, author: &Author, wall: Duration) {
        let generation = self.document.generation;
        if generation == 0 || self.history.last().is_some_and(|newest| newest.generation == generation) {
            return;
        }
        let documents = Arc::make_mut(&mut self.history);
        documents.push(Arc::new(PastDocument {
            generation,
            at_unix_ms: wall.as_millis() as u64,
            who: author.who.clone(),
            text: self.document.text.to_string(),
        }));
        let mut bytes: usize = documents.iter().map(|document| document.text.len()).sum();
        while documents.len() > DOCUMENTS || (bytes > DOCUMENT_BYTES && documents.len() > 1) {
            bytes -= documents.remove(0).text.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::rss::seeded_rng;

    use super::*;
    use crate::records::Document;

    #[test]
    fn so_many_are_kept() {
        let mut records = Records::draw(Duration::ZERO, &mut seeded_rng(1, 0));
        for generation in 1..=ENTRIES as u64 + 7 {
            let note = Note { action: "apply", target: String::new(), before: String::new(), after: String::new() };
            records.note(&Author::signal(), note, Duration::from_secs(generation));
            records.document = Document { generation, text: "alpha = 0.5\n".into() };
            records.keep_document(&Author::signal(), Duration::from_secs(generation));
            records.keep_document(&Author::controller(), Duration::from_secs(generation));
        }
        assert_eq!((records.audit.len(), records.audit[0].id), (ENTRIES, 8));
        assert_eq!((records.history.len(), records.history[99].generation), (DOCUMENTS, ENTRIES as u64 + 7));
        let large: Arc<str> = "#".repeat(DOCUMENT_BYTES / 2 + 1).into();
        for generation in 5000..5003 {
            records.document = Document { generation, text: large.clone() };
            records.keep_document(&Author::signal(), Duration::ZERO);
        }
        assert_eq!(records.history.iter().map(|document| document.generation).collect::<Vec<_>>(), [5002]);
    }
}
