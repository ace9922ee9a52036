//! Goes through a file's values and collects what is wrong.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::diagnostic::{DISPLAY_LIMIT, nearest};
use crate::source::{Parsed, key_at, one_line};
use crate::{Diagnostic, Diagnostics, FromToml, Source, Span};

/// Reads one file. A value that is wrong is noted, and the reading goes on.
pub struct Reader<'a> {
    source: &'a Source,
    /// Of the value that is being read.
    keys: Vec<String>,
    found: Vec<Found>,
    more: usize,
    syntax: Syntax,
}

/// A mistake before its line is known.
struct Found {
    span: Span,
    /// `None`: that at the place.
    key: Option<String>,
    message: String,
    nearest: Option<String>,
}

/// What the errors of syntax leave to be said of the rest.
#[derive(Default)]
struct Syntax {
    is_wrong: bool,
    /// Lines that are no good.
    lines: BTreeSet<usize>,
    /// From here on tables may not be what was meant.
    doubtful_from: Option<usize>,
}

impl<'a> Reader<'a> {
    pub(crate) fn read<T: FromToml, U>(
        source: &'a Source,
        check: impl FnOnce(T, &mut Reader<'_>) -> Option<U>,
    ) -> Result<U, Diagnostics> {
        let Parsed { table, errors, more } = source.toml();
        let mut reader = Self { source, keys: Vec::new(), found: Vec::new(), more, syntax: Syntax::default() };
        for error in &errors {
            reader.syntax_error(error);
        }
        let root = Spanned::new(table.span(), DeValue::Table(table.into_inner()));
        let read = T::read(&root, &mut reader);
        // Half a file says nothing of how its values go together.
        let checked = if reader.syntax.is_wrong { None } else { read.and_then(|read| check(read, &mut reader)) };
        match checked {
            Some(checked) if reader.found.is_empty() => Ok(checked),
            _ => Err(reader.mistakes(root.get_ref())),
        }
    }

    fn syntax_error(&mut self, error: &toml::de::Error) {
        let span = error.span().unwrap_or_default();
        let line = self.source.line(&span);
        self.syntax.is_wrong = true;
        self.syntax.lines.insert(line);
        if self.source.line_text(line).trim_start().starts_with('[') {
            self.syntax.doubtful_from = Some(self.syntax.doubtful_from.map_or(line, |first| first.min(line)));
        }
        // Where the parser points at nothing (what is missing stands there) no key is to be guessed.
        let key = span.is_empty().then(String::new);
        let message = one_line(error.message());
        self.found.push(Found { span, key, message, nearest: None });
    }

    fn mistakes(self, root: &DeValue<'_>) -> Diagnostics {
        let source = self.source;
        let mistake = |found: Found| {
            let key = found.key.or_else(|| Some(key_at(root.as_table()?, &found.span))).unwrap_or_default();
            let mistake = Diagnostic::new(source.path(), source.place(&found.span), key, &found.message);
            Diagnostic { nearest: found.nearest.map(String::into), ..mistake }
        };
        let mut list: Vec<Diagnostic> = self.found.into_iter().map(mistake).collect();
        list.sort_by_key(|mistake| mistake.place);
        Diagnostics { list, more: self.more }
    }

    /// Notes a mistake at a place of the file. `message`: "what was found: expected what was expected".
    pub fn mistake(&mut self, span: Span, message: impl Display) {
        self.note(span, message, || None);
    }

    /// The same of a value within the one that is being read: its key is found by its place.
    pub fn mistake_within(&mut self, span: Span, message: impl Display) {
        let keys = std::mem::take(&mut self.keys);
        self.mistake(span, message);
        self.keys = keys;
    }

    /// The same of a name that is none of `known`.
    pub fn unknown_name<'n>(
        &mut self,
        span: Span,
        message: impl Display,
        given: &str,
        known: impl IntoIterator<Item = &'n str>,
    ) {
        self.note(span, message, || nearest(given, known).map(str::to_owned));
    }

    fn note(&mut self, span: Span, message: impl Display, nearest: impl FnOnce() -> Option<String>) {
        if self.syntax.is_wrong {
            let line = self.source.line(&span);
            if self.syntax.lines.contains(&line) || self.syntax.doubtful_from.is_some_and(|first| first <= line) {
                return;
            }
        }
        // There may be a million of them: the words are made for those that are shown.
        if self.found.len() >= DISPLAY_LIMIT {
            self.more += 1;
            return;
        }
        // While a value is read, its key is known without a search.
        let key = (!self.keys.is_empty()).then(|| self.keys.join("."));
        self.found.push(Found { span, key, message: message.to_string(), nearest: nearest() });
    }

    /// The value, or a mistake at its place.
    pub fn taken<T, E: Display>(&mut self, outcome: Result<T, E>, span: Span) -> Option<T> {
        outcome.map_err(|message| self.mistake(span, message)).ok()
    }

    /// Notes that a value is of another type than `T`'s.
    pub fn wrong_type<T: FromToml>(&mut self, value: &Spanned<DeValue<'_>>) -> Option<T> {
        let (kind, written) = (value.get_ref().type_str(), self.written(&value.span()));
        let found = match value.get_ref() {
            DeValue::Table(_) | DeValue::Array(_) => format!("a TOML {kind}"),
            _ => format!("{written} is a TOML {kind}"),
        };
        self.mistake(value.span(), format!("{found}: expected {}", T::expected()));
        None
    }

    /// Whether anything is wrong so far.
    pub fn has_found_any(&self) -> bool {
        !self.found.is_empty()
    }

    /// The file's text at `span`.
    pub fn written(&self, span: &Span) -> &str {
        self.source.text().get(span.clone()).unwrap_or_default()
    }

    /// The line in which `span` begins, counted from 1.
    pub fn line(&self, span: &Span) -> usize {
        self.source.line(span)
    }

    /// The file that is read.
    pub fn source(&self) -> &Source {
        self.source
    }

    /// A path that is relative to the file's own folder.
    pub fn beside(&self, path: &Path) -> PathBuf {
        self.source.path().parent().unwrap_or(Path::new("")).join(path)
    }

    /// Returns the value as a table of which only the `known` keys may be there; `None`, and a mistake, when it is none.
    /// `elsewhere`: keys that belong into another place, with that place in words, after "expected".
    pub fn table<'v, 'i, T: FromToml>(
        &mut self,
        value: &'v Spanned<DeValue<'i>>,
        known: &[&str],
        elsewhere: &[(&str, &str)],
    ) -> Option<TableReader<'v, 'i>> {
        let DeValue::Table(table) = value.get_ref() else {
            self.wrong_type::<T>(value);
            return None;
        };
        for (key, _) in table.iter().filter(|(key, _)| !known.contains(&key.get_ref().as_ref())) {
            self.unknown_key(key.get_ref(), key.span(), known, elsewhere);
        }
        Some(TableReader { table, span: value.span() })
    }

    fn unknown_key(&mut self, key: &str, at: Span, known: &[&str], elsewhere: &[(&str, &str)]) {
        self.keys.push(key.to_owned());
        match elsewhere.iter().find(|(name, _)| *name == key) {
            Some((_, expected)) => self.mistake(at, format!("is not known here: expected {expected}")),
            None => {
                let list = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
                let message = format!("is not known: expected one of {list}");
                self.unknown_name(at, message, key, known.iter().copied());
            }
        }
        self.keys.pop();
    }
}

/// A table whose keys are read one by one.
pub struct TableReader<'v, 'i> {
    table: &'v DeTable<'i>,
    span: Span,
}

impl TableReader<'_, '_> {
    /// The value of a key; what it is when it is not there: `default`, or what its type says. `None`, and a mistake, when
    /// it is wrong or missing and there is nothing else.
    pub fn key<T: FromToml>(&self, key: &str, default: Option<fn() -> T>, reader: &mut Reader<'_>) -> Option<T> {
        reader.keys.push(key.to_owned());
        let value = match self.table.get(key) {
            Some(value) => T::read(value, reader).or_else(|| T::wrong()),
            None if default.is_some() => None,
            None => {
                if T::REQUIRED && !reader.syntax.is_wrong {
                    reader.mistake(self.span.clone(), format!("is missing: expected {}", T::expected()));
                }
                T::absent()
            }
        };
        reader.keys.pop();
        value.or_else(|| default.map(|default| default()))
    }
}
