//! Source text of a configuration file, with the locations of its lines for diagnostics.

use std::fmt::Display;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use toml_parser::parser::{RecursionGuard, ValidateWhitespace, parse_document};

use crate::diagnostic::{MAX_SHOWN_DIAGNOSTICS, TextLocation};
use crate::{ConfigDiagnostic, Diagnostics, FromToml, Span, TomlReader};

/// Maximum size of a configuration file, in bytes. It equals the limit of the API for a fleet document.
const MAX_CONFIG_FILE_BYTES: u64 = 8 << 20;
/// Maximum nesting depth of TOML values. It equals the limit of the `toml` crate.
const MAX_TOML_NESTING_DEPTH: u32 = 80;

/// Text of a TOML file, and the path that diagnostics show for it.
#[derive(Debug, Clone)]
pub struct TomlSource {
    path: PathBuf,
    text: Arc<str>,
    /// Byte offset of the start of each line, with which locations are computed without a search through the text.
    line_starts: Arc<[usize]>,
}

/// Values and syntax errors of a TOML text. If the text has many errors, only its beginning has been parsed.
pub(crate) struct ParsedToml<'a> {
    pub(crate) table: Spanned<DeTable<'a>>,
    /// First syntax errors of the text, at most `MAX_SHOWN_DIAGNOSTICS`.
    pub(crate) errors: Vec<toml::de::Error>,
    /// Number of syntax errors known not to be in `errors`. The text may have even more.
    pub(crate) omitted_error_count: usize,
}

/// Size in bytes of the prefix of a file that is parsed first. Each further prefix is larger by half.
const INITIAL_PARSED_PREFIX_BYTES: usize = 64 << 10;

/// Parses ever larger prefixes of a text, until one has more errors than are shown or the text is complete. This is
/// faster than parsing everything at once, because each error, such as a duplicate key, takes a hundred times as long
/// as valid text.
fn parse_until_error_limit(text: &str) -> (Spanned<DeTable<'_>>, Vec<toml::de::Error>) {
    let mut prefix_bytes = INITIAL_PARSED_PREFIX_BYTES;
    loop {
        let prefix = text.get(..prefix_bytes).and_then(|part| Some(&part[..=part.rfind('\n')?]));
        // A larger part is tried if this one ends within a character or its first line.
        if prefix_bytes >= text.len() {
            return DeTable::parse_recoverable(text);
        }
        if let Some(prefix) = prefix {
            let (table, errors) = DeTable::parse_recoverable(prefix);
            if errors.len() > MAX_SHOWN_DIAGNOSTICS {
                return (table, errors);
            }
        }
        prefix_bytes += prefix_bytes / 2;
    }
}

impl TomlSource {
    /// Reads a file. Fails if the file is larger than 8 MiB or is not UTF-8.
    pub fn read(path: &Path) -> Result<Self, ConfigDiagnostic> {
        let unreadable_diagnostic = |reason: &dyn Display| {
            ConfigDiagnostic::for_file(path, &format!("{reason}: expected a readable TOML file"))
        };
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(|reason| unreadable_diagnostic(&reason))?;
        file.take(MAX_CONFIG_FILE_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(|reason| unreadable_diagnostic(&reason))?;
        if bytes.len() as u64 > MAX_CONFIG_FILE_BYTES {
            return Err(unreadable_diagnostic(&"more than 8 MiB"));
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid_byte_count = error.utf8_error().valid_up_to();
            let text = String::from_utf8_lossy(&error.as_bytes()[..valid_byte_count]).into_owned();
            let location = Self::new(path.to_owned(), text.into()).text_location(&(valid_byte_count..valid_byte_count));
            ConfigDiagnostic::new(
                path,
                location,
                String::new(),
                "bytes that are no text: expected a TOML file in UTF-8",
            )
        })?;
        Ok(Self::new(path.to_owned(), text.into()))
    }

    fn new(path: PathBuf, text: Arc<str>) -> Self {
        let later_line_starts =
            text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(byte_index, _)| byte_index + 1);
        let line_starts = std::iter::once(0).chain(later_line_starts).collect();
        Self { path, text, line_starts }
    }

    /// Creates a source from a text. Diagnostics show `name` as the file's path.
    pub fn from_text(name: &str, text: &str) -> Self {
        Self::new(name.into(), text.into())
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the text of the file.
    pub fn text(&self) -> &Arc<str> {
        &self.text
    }

    /// Reads the text as a `T`, and returns the result of `check`, which checks combinations of values. If there are
    /// mistakes, the error lists all of them.
    pub fn read_as<T: FromToml, U>(
        &self,
        check: impl FnOnce(T, &mut TomlReader<'_>) -> Option<U>,
    ) -> Result<U, Diagnostics> {
        TomlReader::read(self, check)
    }

    /// Parses the text as a serde struct. Fails at the first mistake.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ConfigDiagnostic> {
        toml::from_str(&self.text)
            .map_err(|error| self.diagnostic_at(error.span().unwrap_or_default(), &join_lines(error.message())))
    }

    /// Parses the text, but stops at the limit of shown errors. Every byte could be a syntax error, and an error takes
    /// a hundred times as long as valid text.
    pub(crate) fn parse_toml(&self) -> ParsedToml<'_> {
        let (mut syntax_error_count, mut first_omitted_error_offset) = (0, self.text.len());
        let source = toml_parser::Source::new(&self.text);
        let mut ignored_errors = ();
        let mut whitespace = ValidateWhitespace::new(&mut ignored_errors, source);
        let mut nesting_guard = RecursionGuard::new(&mut whitespace, MAX_TOML_NESTING_DEPTH);
        parse_document(&source.lex().into_vec(), &mut nesting_guard, &mut |error: toml_parser::ParseError| {
            syntax_error_count += 1;
            if syntax_error_count == MAX_SHOWN_DIAGNOSTICS + 1 {
                first_omitted_error_offset = error.unexpected().map_or(self.text.len(), |span| span.start());
            }
        });
        let parsed_byte_count =
            (0..=first_omitted_error_offset).rev().find(|at| self.text.is_char_boundary(*at)).unwrap_or_default();
        let (table, mut errors) = parse_until_error_limit(&self.text[..parsed_byte_count]);
        let error_count = errors.len().max(syntax_error_count);
        errors.truncate(MAX_SHOWN_DIAGNOSTICS);
        ParsedToml { table, omitted_error_count: error_count - errors.len(), errors }
    }

    /// Returns the file's top-level keys, even if the file has mistakes.
    pub fn top_level_keys(&self) -> Vec<String> {
        self.parse_toml().table.get_ref().keys().map(|key| key.get_ref().to_string()).collect()
    }

    /// Returns the diagnostics of the first syntax errors, at most `MAX_SHOWN_DIAGNOSTICS`.
    pub fn syntax_errors(&self) -> Vec<ConfigDiagnostic> {
        let to_diagnostic = |error: toml::de::Error| {
            let location = self.text_location(&error.span().unwrap_or_default());
            ConfigDiagnostic::new(&self.path, location, String::new(), &join_lines(error.message()))
        };
        self.parse_toml().errors.into_iter().map(to_diagnostic).collect()
    }

    /// Creates the diagnostic of a mistake at a location, which is a byte range such as [`Spanned::span`] returns.
    pub fn diagnostic_at(&self, span: Span, message: &str) -> ConfigDiagnostic {
        self.diagnostics_at(&[(span, message.to_owned())]).remove(0)
    }

    /// Creates the diagnostics of mistakes at several locations.
    pub(crate) fn diagnostics_at(&self, mistakes: &[(Span, String)]) -> Vec<ConfigDiagnostic> {
        let table = self.parse_toml().table;
        let to_diagnostic = |(span, message): &(Span, String)| {
            ConfigDiagnostic::new(&self.path, self.text_location(span), key_at(table.get_ref(), span), message)
        };
        mistakes.iter().map(to_diagnostic).collect()
    }

    pub(crate) fn text_location(&self, span: &Span) -> TextLocation {
        let line_index = self.line_index(span.start);
        let preceding_text = self.text.get(self.line_starts[line_index]..span.start).unwrap_or_default();
        TextLocation { line: line_index as u32 + 1, column: preceding_text.chars().count() as u32 + 1 }
    }

    fn line_index(&self, byte_offset: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= byte_offset) - 1
    }

    /// Returns the text of a line, counted from 1, or an empty text if the file has fewer lines.
    pub(crate) fn line_text(&self, line: usize) -> &str {
        let start = self.line_starts.get(line - 1).copied().unwrap_or(self.text.len());
        let end = self.line_starts.get(line).copied().unwrap_or(self.text.len());
        &self.text[start..end]
    }

    /// Returns the number of the line in which `span` begins, counted from 1.
    pub fn line_number(&self, span: &Span) -> usize {
        self.line_index(span.start) + 1
    }
}

/// Returns a TOML parser's message as a single line, with its lines joined by commas.
pub(crate) fn join_lines(message: &str) -> String {
    message.trim_end().replace('\n', ", ")
}

/// Returns the full name of the key at `span`, or an empty name if no key is there.
pub(crate) fn key_at(table: &DeTable<'_>, span: &Span) -> String {
    let mut keys = Vec::new();
    find_key_in_table(table, span, &mut keys);
    keys.join(".")
}

/// Appends the names of the nested keys at `span` to `keys`, and returns whether a key is there. All tables are
/// searched, because the span of a `[table]` covers only its header.
fn find_key_in_table<'t>(table: &'t DeTable<'_>, span: &Span, keys: &mut Vec<&'t str>) -> bool {
    table.iter().any(|(key, value)| {
        keys.push(key.get_ref());
        let is_found = find_key_in_value(value, span, keys) || span_contains(&key.span(), span);
        if !is_found {
            keys.pop();
        }
        is_found
    })
}

fn find_key_in_value<'t>(value: &'t Spanned<DeValue<'_>>, span: &Span, keys: &mut Vec<&'t str>) -> bool {
    let is_in_nested_key = match value.get_ref() {
        DeValue::Table(table) => find_key_in_table(table, span, keys),
        DeValue::Array(array) => array.iter().any(|value| find_key_in_value(value, span, keys)),
        _ => false,
    };
    is_in_nested_key || span_contains(&value.span(), span)
}

fn span_contains(outer: &Span, inner: &Span) -> bool {
    // An empty span means that the parser does not know the location.
    !inner.is_empty() && outer.contains(&inner.start) && inner.end <= outer.end
}
