//! Reads a daemon's TOML file. Every error names file, line, column, key and what was expected.
//!
//! A configuration is a serde struct with `#[serde(deny_unknown_fields)]`. What one value must be, its own `Deserialize`
//! says (the error then points at that value). What concerns several values (two services with one VIP) is checked
//! after loading: keep the values as [`Spanned`], and make the error with [`Source::error`].

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
pub use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// What is wrong with a configuration file, and where.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{}: {reason}: expected a readable TOML file", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: std::io::Error,
    },
    /// Something in it is not as expected.
    #[error("{}:{line}:{column}: {}{message}", path.display(), in_key(key))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// Counted from 1, in characters.
        column: usize,
        /// Full name of the key, as `service.vip`; empty where there is none (a syntax error).
        key: String,
        /// What is wrong and what was expected.
        message: String,
    },
}

fn in_key(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("key `{key}`: ") }
}

/// A file's name and text, to make errors that point into it.
#[derive(Debug, Clone)]
pub struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    /// # Errors
    /// When the file cannot be read.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let unreadable = |reason| ConfigError::Unreadable { path: path.to_owned(), reason };
        Ok(Self { path: path.to_owned(), text: std::fs::read_to_string(path).map_err(unreadable)? })
    }

    /// A text that stands in no file; `name` is what errors show.
    pub fn from_text(name: &str, text: &str) -> Self {
        Self { path: name.into(), text: text.to_owned() }
    }

    /// # Errors
    /// When the text is no TOML or not a `T`.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        toml::from_str(&self.text)
            .map_err(|error| self.error(error.span().unwrap_or_default(), &one_line(error.message())))
    }

    /// An error at a place of the file (bytes, as [`Spanned::span`] gives them).
    pub fn error(&self, span: Range<usize>, message: &str) -> ConfigError {
        let before = self.before(&span);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        ConfigError::Invalid {
            path: self.path.clone(),
            line: self.line(&span),
            column: before[line_start..].chars().count() + 1,
            key: self.key_at(&span),
            message: message.to_owned(),
        }
    }

    /// The line in which `span` begins, counted from 1.
    pub fn line(&self, span: &Range<usize>) -> usize {
        self.before(span).matches('\n').count() + 1
    }

    fn before(&self, span: &Range<usize>) -> &str {
        self.text.get(..span.start).unwrap_or(&self.text)
    }

    /// The key whose name or value stands at `span`.
    fn key_at(&self, span: &Range<usize>) -> String {
        let (table, _errors) = DeTable::parse_recoverable(&self.text);
        let mut keys = Vec::new();
        key_in_table(table.get_ref(), span, &mut keys);
        keys.join(".")
    }
}

/// Loads the configuration in `path`.
///
/// # Errors
/// When the file cannot be read, is no TOML, or is not a `T`.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    Source::read(path)?.parse()
}

/// Messages of the TOML parser span lines; logs want one.
fn one_line(message: &str) -> String {
    message.trim_end().replace('\n', ", ")
}

/// Fills `keys` with the innermost key at `span`; false when there is none. (The span of a `[table]` is its header's, so
/// tables are searched wherever they stand.)
fn key_in_table(table: &DeTable<'_>, span: &Range<usize>, keys: &mut Vec<String>) -> bool {
    table.iter().any(|(key, value)| {
        keys.push(key.get_ref().to_string());
        let found = key_in_value(value, span, keys) || contains(&key.span(), span);
        if !found {
            keys.pop();
        }
        found
    })
}

fn key_in_value(value: &Spanned<DeValue<'_>>, span: &Range<usize>, keys: &mut Vec<String>) -> bool {
    let inner = match value.get_ref() {
        DeValue::Table(table) => key_in_table(table, span, keys),
        DeValue::Array(array) => array.iter().any(|value| key_in_value(value, span, keys)),
        _ => false,
    };
    inner || contains(&value.span(), span)
}

fn contains(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    // The parser gives an empty span where it knows none.
    !inner.is_empty() && outer.contains(&inner.start) && inner.end <= outer.end
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Daemon {
        name: String,
        #[serde(default)]
        service: Vec<Service>,
    }

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Service {
        vip: Spanned<SocketAddr>,
    }

    fn message(text: &str) -> String {
        Source::from_text("daemon.toml", text).parse::<Daemon>().unwrap_err().to_string()
    }

    #[test]
    fn a_right_file_is_loaded() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"name = \"a\"\n[[service]]\nvip = \"10.0.0.1:80\"\n").unwrap();
        let daemon: Daemon = load(file.path()).unwrap();
        assert_eq!((daemon.name.as_str(), daemon.service[0].vip.get_ref().port()), ("a", 80));
    }

    #[test]
    fn errors_name_line_key_and_what_was_expected() {
        assert_eq!(
            message("name = \"a\"\nnmae = 1\n"),
            "daemon.toml:2:1: key `nmae`: unknown field `nmae`, expected `name` or `service`"
        );
        assert_eq!(
            message("# ä\nname = 5\n"),
            "daemon.toml:2:8: key `name`: invalid type: integer `5`, expected a string"
        );
        assert_eq!(
            message("name = \"a\"\n[[service]]\nvip = \"10.0.0.1:80\"\n[[service]]\nvip = \"10.0.0.256:80\"\n"),
            "daemon.toml:5:7: key `service.vip`: invalid socket address syntax"
        );
        assert_eq!(message("service = []\n"), "daemon.toml:1:1: missing field `name`");
        assert_eq!(message("name = \"a\"\n\n[[service]]\n"), "daemon.toml:3:1: key `service`: missing field `vip`");
        assert!(message("name = \n").starts_with("daemon.toml:1:"), "{}", message("name = \n"));
    }

    #[test]
    fn checks_over_several_values_point_at_one() {
        let source = Source::from_text("daemon.toml", "name = \"a\"\nservice = [{ vip = \"10.0.0.1:80\" }]\n");
        let daemon: Daemon = source.parse().unwrap();
        let error = source.error(daemon.service[0].vip.span(), "is used twice");
        assert_eq!(error.to_string(), "daemon.toml:2:20: key `service.vip`: is used twice");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = load::<Daemon>(Path::new("/nonexistent/daemon.toml")).unwrap_err();
        assert!(error.to_string().starts_with("/nonexistent/daemon.toml: No such file"), "{error}");
    }
}
