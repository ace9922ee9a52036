//! A file's name and text, and where in it a byte is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::mistake::Place;
use crate::{Form, Mistake, Mistakes, Reader, Span};

/// A file's name and text, to make mistakes that point into it.
#[derive(Debug, Clone)]
pub struct Source {
    path: PathBuf,
    text: Arc<str>,
}

impl Source {
    /// # Errors
    /// When the file cannot be read.
    pub fn read(path: &Path) -> Result<Self, Mistake> {
        match std::fs::read_to_string(path) {
            Ok(text) => Ok(Self { path: path.to_owned(), text: text.into() }),
            Err(reason) => Err(Mistake::of_file(path, &format!("{reason}: expected a readable TOML file"))),
        }
    }

    /// A text that stands in no file; `name` is what mistakes show.
    pub fn from_text(name: &str, text: &str) -> Self {
        Self { path: name.into(), text: text.into() }
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Everything in it.
    pub fn text(&self) -> &Arc<str> {
        &self.text
    }

    /// Reads a kind of file; `check` looks at what concerns several values, and makes of it what the program needs.
    ///
    /// # Errors
    /// Every mistake: of syntax, of single values, and those that `check` has found.
    pub fn read_as<T: Form, U>(&self, check: impl FnOnce(T, &mut Reader<'_>) -> Option<U>) -> Result<U, Mistakes> {
        Reader::read(self, check)
    }

    /// Reads a serde struct; ends at the first mistake.
    ///
    /// # Errors
    /// When the text is no TOML or not a `T`.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, Mistake> {
        toml::from_str(&self.text)
            .map_err(|error| self.error(error.span().unwrap_or_default(), &one_line(error.message())))
    }

    /// A mistake at a place of the file (bytes, as [`Spanned::span`] gives them).
    pub fn error(&self, span: Span, message: &str) -> Mistake {
        let (table, _errors) = DeTable::parse_recoverable(&self.text);
        Mistake::new(&self.path, self.place(&span), key_at(table.get_ref(), &span), message)
    }

    /// Line and column in which `span` begins.
    pub(crate) fn place(&self, span: &Span) -> Place {
        let before = self.before(span);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Place { line: before.matches('\n').count() as u32 + 1, column: before[line_start..].chars().count() as u32 + 1 }
    }

    /// The line in which `span` begins, counted from 1.
    pub fn line(&self, span: &Span) -> usize {
        self.place(span).line as usize
    }

    fn before(&self, span: &Span) -> &str {
        self.text.get(..span.start).unwrap_or(&self.text)
    }
}

/// Messages of the TOML parser span lines; logs want one.
pub(crate) fn one_line(message: &str) -> String {
    message.trim_end().replace('\n', ", ")
}

/// The key whose name or value stands at `span`; empty where there is none.
pub(crate) fn key_at(table: &DeTable<'_>, span: &Span) -> String {
    let mut keys = Vec::new();
    key_in_table(table, span, &mut keys);
    keys.join(".")
}

/// Fills `keys` with the innermost key at `span`; false when there is none. (The span of a `[table]` is its header's, so
/// tables are searched wherever they stand.)
fn key_in_table(table: &DeTable<'_>, span: &Span, keys: &mut Vec<String>) -> bool {
    table.iter().any(|(key, value)| {
        keys.push(key.get_ref().to_string());
        let found = key_in_value(value, span, keys) || contains(&key.span(), span);
        if !found {
            keys.pop();
        }
        found
    })
}

fn key_in_value(value: &Spanned<DeValue<'_>>, span: &Span, keys: &mut Vec<String>) -> bool {
    let inner = match value.get_ref() {
        DeValue::Table(table) => key_in_table(table, span, keys),
        DeValue::Array(array) => array.iter().any(|value| key_in_value(value, span, keys)),
        _ => false,
    };
    inner || contains(&value.span(), span)
}

fn contains(outer: &Span, inner: &Span) -> bool {
    // The parser gives an empty span where it knows none.
    !inner.is_empty() && outer.contains(&inner.start) && inner.end <= outer.end
}
