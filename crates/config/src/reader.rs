//! Reader that collects all mistakes in a file instead of stopping at the first one.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::diagnostic::{MAX_SHOWN_DIAGNOSTICS, find_nearest_name};
use crate::source::{ParsedToml, join_lines, key_at};
use crate::{ConfigDiagnostic, Diagnostics, FromToml, Span, TomlSource};

/// Reader of the values of one file. It stores each mistake and continues.
pub struct TomlReader<'a> {
    source: &'a TomlSource,
    /// Names of the nested keys that lead to the value which is currently read.
    key_path: Vec<String>,
    pending_diagnostics: Vec<UnlocatedDiagnostic>,
    omitted_diagnostic_count: usize,
    syntax_errors: SyntaxErrorLines,
}

/// Mistake whose line and column are not yet computed.
struct UnlocatedDiagnostic {
    span: Span,
    /// Full name of the key, or `None` if it must be derived from the location.
    key: Option<String>,
    message: String,
    nearest_name: Option<String>,
}

/// Lines of a file's syntax errors, and the line after which later checks are unreliable because of them.
#[derive(Default)]
struct SyntaxErrorLines {
    has_error: bool,
    error_lines: BTreeSet<usize>,
    /// Line of the first syntax error after which tables may be incomplete, or `None` if there is no such error.
    first_header_error_line: Option<usize>,
}

impl<'a> TomlReader<'a> {
    pub(crate) fn read<T: FromToml, U>(
        source: &'a TomlSource,
        check: impl FnOnce(T, &mut TomlReader<'_>) -> Option<U>,
    ) -> Result<U, Diagnostics> {
        let ParsedToml { table, errors, omitted_error_count: omitted_count } = source.parse_toml();
        let mut reader = Self {
            source,
            key_path: Vec::new(),
            pending_diagnostics: Vec::new(),
            omitted_diagnostic_count: omitted_count,
            syntax_errors: SyntaxErrorLines::default(),
        };
        for error in &errors {
            reader.record_syntax_error(error);
        }
        let root = Spanned::new(table.span(), DeValue::Table(table.into_inner()));
        let root_value = T::read(&root, &mut reader);
        // If the file has syntax errors, values may be missing, so combinations of values are not checked.
        let checked_value =
            if reader.syntax_errors.has_error { None } else { root_value.and_then(|value| check(value, &mut reader)) };
        match checked_value {
            Some(value) if reader.pending_diagnostics.is_empty() => Ok(value),
            _ => Err(reader.into_diagnostics(root.get_ref())),
        }
    }

    fn record_syntax_error(&mut self, error: &toml::de::Error) {
        let span = error.span().unwrap_or_default();
        let line = self.source.line_number(&span);
        self.syntax_errors.has_error = true;
        self.syntax_errors.error_lines.insert(line);
        if self.source.line_text(line).trim_start().starts_with('[') {
            self.syntax_errors.first_header_error_line =
                Some(self.syntax_errors.first_header_error_line.map_or(line, |first| first.min(line)));
        }
        // An empty span means that a value is missing, so no key can be derived from the location.
        let key = span.is_empty().then(String::new);
        let message = join_lines(error.message());
        self.pending_diagnostics.push(UnlocatedDiagnostic { span, key, message, nearest_name: None });
    }

    fn into_diagnostics(self, root: &DeValue<'_>) -> Diagnostics {
        let source = self.source;
        let to_diagnostic = |pending_diagnostic: UnlocatedDiagnostic| {
            let key = pending_diagnostic
                .key
                .or_else(|| Some(key_at(root.as_table()?, &pending_diagnostic.span)))
                .unwrap_or_default();
            let diagnostic = ConfigDiagnostic::new(
                source.path(),
                source.text_location(&pending_diagnostic.span),
                key,
                &pending_diagnostic.message,
            );
            ConfigDiagnostic { nearest_name: pending_diagnostic.nearest_name.map(String::into), ..diagnostic }
        };
        let mut shown_diagnostics: Vec<ConfigDiagnostic> =
            self.pending_diagnostics.into_iter().map(to_diagnostic).collect();
        shown_diagnostics.sort_by_key(|mistake| mistake.location);
        Diagnostics { shown_diagnostics, omitted_diagnostic_count: self.omitted_diagnostic_count }
    }

    /// Stores a mistake at a location. `message` has the form "found: expected ...".
    pub fn report_mistake(&mut self, span: Span, message: impl Display) {
        self.push_diagnostic(span, message, || None);
    }

    /// Stores a mistake at a location within the value that is currently read. The key is derived from the location.
    pub fn report_mistake_within_value(&mut self, span: Span, message: impl Display) {
        self.check_current_value(|reader| reader.report_mistake(span, message));
    }

    /// Runs `check` on the value that is currently read. The key of each mistake is derived from the mistake's
    /// location.
    pub fn check_current_value<T>(&mut self, check: impl FnOnce(&mut Self) -> T) -> T {
        let key_path = std::mem::take(&mut self.key_path);
        let result = check(self);
        self.key_path = key_path;
        result
    }

    /// Stores a mistake about a name that is not in `known_names`. Suggests the most similar known name.
    pub fn report_unknown_name<'n>(
        &mut self,
        span: Span,
        message: impl Display,
        unknown_name: &str,
        known_names: impl IntoIterator<Item = &'n str>,
    ) {
        self.push_diagnostic(span, message, || find_nearest_name(unknown_name, known_names).map(str::to_owned));
    }

    fn push_diagnostic(
        &mut self,
        span: Span,
        message: impl Display,
        find_nearest_name: impl FnOnce() -> Option<String>,
    ) {
        if self.syntax_errors.has_error {
            let line = self.source.line_number(&span);
            if self.syntax_errors.error_lines.contains(&line)
                || self.syntax_errors.first_header_error_line.is_some_and(|first| first <= line)
            {
                return;
            }
        }
        // A file may have a million mistakes, so messages are formatted only for those that are shown.
        if self.pending_diagnostics.len() >= MAX_SHOWN_DIAGNOSTICS {
            self.omitted_diagnostic_count += 1;
            return;
        }
        // The key of the value that is currently read is known, so it need not be derived from the location.
        let key = (!self.key_path.is_empty()).then(|| self.key_path.join("."));
        self.pending_diagnostics.push(UnlocatedDiagnostic {
            span,
            key,
            message: message.to_string(),
            nearest_name: find_nearest_name(),
        });
    }

    /// Returns the value of a result. If it is an error, stores it as a mistake at `span` and returns `None`.
    pub fn ok_or_report<T, E: Display>(&mut self, result: Result<T, E>, span: Span) -> Option<T> {
        result.map_err(|message| self.report_mistake(span, message)).ok()
    }

    /// Stores a mistake about a value whose TOML type does not fit `T`, and returns `None`.
    pub fn report_wrong_type<T: FromToml>(&mut self, value: &Spanned<DeValue<'_>>) -> Option<T> {
        let (kind, source_text) = (value.get_ref().type_str(), self.text_at(&value.span()));
        let description = match value.get_ref() {
            DeValue::Table(_) | DeValue::Array(_) => format!("a TOML {kind}"),
            _ => format!("{source_text} is a TOML {kind}"),
        };
        self.report_mistake(value.span(), format!("{description}: expected {}", T::describe_valid_values()));
        None
    }

    /// Returns whether at least one mistake has been stored.
    pub fn has_diagnostics(&self) -> bool {
        !self.pending_diagnostics.is_empty()
    }

    /// Returns the part of the file's text at `span`.
    pub fn text_at(&self, span: &Span) -> &str {
        self.source.text().get(span.clone()).unwrap_or_default()
    }

    /// Returns the line number at which `span` begins, counted from 1.
    pub fn line_number(&self, span: &Span) -> usize {
        self.source.line_number(span)
    }

    /// Returns the file's name and text.
    pub fn source(&self) -> &TomlSource {
        self.source
    }

    /// Returns `path` resolved relative to the directory of the file.
    pub fn resolve_path(&self, path: &Path) -> PathBuf {
        self.source.path().parent().unwrap_or(Path::new("")).join(path)
    }

    /// Returns a reader of a table's keys, and stores a mistake for each key that is not in `known_keys`. If the value
    /// is not a table, stores a mistake and returns `None`. `misplaced_keys` contains keys that belong to other tables,
    /// each with the text that follows "expected".
    pub fn read_table<'v, 'i, T: FromToml>(
        &mut self,
        value: &'v Spanned<DeValue<'i>>,
        known_keys: &[&str],
        misplaced_keys: &[(&str, &str)],
    ) -> Option<TomlTableReader<'v, 'i>> {
        let DeValue::Table(table) = value.get_ref() else {
            self.report_wrong_type::<T>(value);
            return None;
        };
        for (key, _) in table.iter().filter(|(key, _)| !known_keys.contains(&key.get_ref().as_ref())) {
            self.report_unknown_key(key.get_ref(), key.span(), known_keys, misplaced_keys);
        }
        Some(TomlTableReader { table, span: value.span() })
    }

    fn report_unknown_key(&mut self, key: &str, key_span: Span, known_keys: &[&str], misplaced_keys: &[(&str, &str)]) {
        self.key_path.push(key.to_owned());
        match misplaced_keys.iter().find(|(name, _)| *name == key) {
            Some((_, expected)) => self.report_mistake(key_span, format!("is not known here: expected {expected}")),
            None => {
                let key_list = known_keys.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
                let message = format!("is not known: expected one of {key_list}");
                self.report_unknown_name(key_span, message, key, known_keys.iter().copied());
            }
        }
        self.key_path.pop();
    }
}

/// Table in a file, whose keys are read one at a time.
pub struct TomlTableReader<'v, 'i> {
    table: &'v DeTable<'i>,
    span: Span,
}

impl TomlTableReader<'_, '_> {
    /// Returns the value of a key. If the key is missing, returns `default`, or else the default of the type. If the
    /// value is wrong, or missing without a default, stores a mistake and returns `None`.
    pub fn read_key<T: FromToml>(
        &self,
        key: &str,
        default: Option<fn() -> T>,
        reader: &mut TomlReader<'_>,
    ) -> Option<T> {
        reader.key_path.push(key.to_owned());
        let value = match self.table.get(key) {
            Some(value) => T::read(value, reader).or_else(|| T::value_after_error()),
            None if default.is_some() => None,
            None => {
                if T::IS_KEY_REQUIRED && !reader.syntax_errors.has_error {
                    reader.report_mistake(
                        self.span.clone(),
                        format!("is missing: expected {}", T::describe_valid_values()),
                    );
                }
                T::value_if_missing()
            }
        };
        reader.key_path.pop();
        value.or_else(|| default.map(|default| default()))
    }
}
