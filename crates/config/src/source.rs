//! A file's name and text, and where in it a byte is.

use std::fmt::Display;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::mistake::Place;
use crate::{Form, Mistake, Mistakes, Reader, Span};

/// What a file may hold at most, bytes: as much as the API takes of a fleet's document.
const LARGEST: u64 = 8 << 20;

/// A file's name and text, to make mistakes that point into it.
#[derive(Debug, Clone)]
pub struct Source {
    path: PathBuf,
    text: Arc<str>,
}

impl Source {
    /// # Errors
    /// When the file cannot be read, is larger than 8 MiB, or is no text.
    pub fn read(path: &Path) -> Result<Self, Mistake> {
        let unreadable =
            |reason: &dyn Display| Mistake::of_file(path, &format!("{reason}: expected a readable TOML file"));
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(|reason| unreadable(&reason))?;
        file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|reason| unreadable(&reason))?;
        if bytes.len() as u64 > LARGEST {
            return Err(unreadable(&"more than 8 MiB"));
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let good = error.utf8_error().valid_up_to();
            let text = String::from_utf8_lossy(&error.as_bytes()[..good]).into_owned();
            let place = Self { path: path.to_owned(), text: text.into() }.place(&(good..good));
            Mistake::new(path, place, String::new(), "bytes that are no text: expected a TOML file in UTF-8")
        })?;
        Ok(Self { path: path.to_owned(), text: text.into() })
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

    /// The keys of the whole file, also where some of it is wrong.
    pub fn keys(&self) -> Vec<String> {
        let (table, _errors) = DeTable::parse_recoverable(&self.text);
        table.get_ref().keys().map(|key| key.get_ref().to_string()).collect()
    }

    /// What the TOML parser says of the text; empty when it is TOML.
    pub fn syntax_errors(&self) -> Vec<Mistake> {
        let (_table, errors) = DeTable::parse_recoverable(&self.text);
        let mistake = |error: toml::de::Error| {
            Mistake::new(
                &self.path,
                self.place(&error.span().unwrap_or_default()),
                String::new(),
                &one_line(error.message()),
            )
        };
        errors.into_iter().map(mistake).collect()
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
