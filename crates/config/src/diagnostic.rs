//! Mistakes in a file, with their locations.

use std::fmt;
use std::path::Path;

use serde_json::{Value, json};

use crate::{Span, TomlSource};

/// Maximum number of mistakes that are reported in full. Further mistakes are only counted.
pub(crate) const MAX_SHOWN_DIAGNOSTICS: usize = 100;

/// Description of one mistake in a configuration file, or of the reason why the file cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigDiagnostic {
    /// Path of the file.
    pub file: Box<Path>,
    /// Location of the mistake, or `None` if it concerns the whole file.
    pub location: Option<TextLocation>,
    /// Full name of the key, such as `service.vip`. It is empty for a syntax error.
    pub key: String,
    /// Wrong value, or another description of the mistake.
    pub problem: String,
    /// Description of the expected value, if there is one.
    pub expected: Option<Box<str>>,
    /// Valid name that is most similar to the wrong name, if one is similar enough.
    pub nearest_name: Option<Box<str>>,
}

/// Line and column of a mistake in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TextLocation {
    /// Line, counted from 1.
    pub line: u32,
    /// Column in characters, counted from 1.
    pub column: u32,
}

/// Maximum length, in characters, of a name or value that is shown in full and compared with valid names.
const MAX_SHOWN_VALUE_CHARS: usize = 1000;

fn truncate_to_shown_length(text: String) -> String {
    match text.char_indices().nth(MAX_SHOWN_VALUE_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl ConfigDiagnostic {
    /// Creates the diagnostic of a mistake at a location. `message` has the form "found: expected ...".
    pub(crate) fn new(file: &Path, location: TextLocation, key: String, message: &str) -> Self {
        Self { location: Some(location), key: truncate_to_shown_length(key), ..Self::for_file(file, message) }
    }

    /// Creates the diagnostic of a mistake that concerns the whole file. `message` has the form "found: expected ...".
    pub fn for_file(file: &Path, message: &str) -> Self {
        let (problem, expected) = match message.split_once(": expected ") {
            Some((problem, expected)) => (problem, Some(expected.into())),
            None => (message, None),
        };
        Self {
            file: file.into(),
            location: None,
            key: String::new(),
            problem: truncate_to_shown_length(problem.to_owned()),
            expected,
            nearest_name: None,
        }
    }

    /// Returns the diagnostic as a JSON object.
    pub fn to_json(&self) -> Value {
        json!({
            "file": self.file,
            "line": self.location.map(|location| location.line),
            "column": self.location.map(|location| location.column),
            "key": (!self.key.is_empty()).then_some(&self.key),
            "problem": self.problem,
            "expected": self.expected,
            "nearest": self.nearest_name,
            "message": self.to_string(),
        })
    }
}

impl fmt::Display for ConfigDiagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(TextLocation { line, column }) = self.location {
            write!(f, ":{line}:{column}")?;
        }
        if !self.key.is_empty() {
            write!(f, ": key `{}`", self.key)?;
        }
        write!(f, ": {}", self.problem)?;
        if let Some(expected) = &self.expected {
            write!(f, ": expected {expected}")?;
        }
        match &self.nearest_name {
            Some(nearest) => write!(f, " (nearest: `{nearest}`)"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ConfigDiagnostic {}

/// All mistakes of a file, in the order of its lines. Their text form has one line per mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostics {
    /// First mistakes of the file, at least one and at most `MAX_SHOWN_DIAGNOSTICS`.
    pub shown_diagnostics: Vec<ConfigDiagnostic>,
    /// Number of further mistakes, which are not in `shown_diagnostics`. The file may have even more.
    pub omitted_diagnostic_count: usize,
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, mistake) in self.shown_diagnostics.iter().enumerate() {
            let line_break = if index == 0 { "" } else { "\n" };
            write!(f, "{line_break}{mistake}")?;
        }
        match self.omitted_diagnostic_count {
            0 => Ok(()),
            omitted_count => write!(f, "\nand at least {omitted_count} more"),
        }
    }
}

impl std::error::Error for Diagnostics {}

impl Diagnostics {
    /// Creates the diagnostics of mistakes at given locations in a file that is otherwise correct. Messages have the
    /// form "found: expected ...".
    pub fn from_mistakes(source: &TomlSource, mut mistakes: Vec<(Span, String)>) -> Self {
        let omitted_diagnostic_count = mistakes.len().saturating_sub(MAX_SHOWN_DIAGNOSTICS);
        mistakes.truncate(MAX_SHOWN_DIAGNOSTICS);
        Self { shown_diagnostics: source.diagnostics_at(&mistakes), omitted_diagnostic_count }
    }
}

impl From<ConfigDiagnostic> for Diagnostics {
    fn from(mistake: ConfigDiagnostic) -> Self {
        Self { shown_diagnostics: vec![mistake], omitted_diagnostic_count: 0 }
    }
}

/// Minimum Jaro-Winkler similarity (0 to 1) that a valid name must have to a wrong name to be suggested.
const MIN_SUGGESTION_SIMILARITY: f64 = 0.75;

/// Returns the name in `known_names` that is most similar to `unknown_name`, or `None` if no name is similar enough.
pub fn find_nearest_name<'a>(unknown_name: &str, known_names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if unknown_name.len() > MAX_SHOWN_VALUE_CHARS {
        return None;
    }
    let lower_case_name = unknown_name.to_lowercase();
    let compute_similarity = |name: &str| strsim::jaro_winkler(&lower_case_name, &name.to_lowercase());
    let similar_names = known_names
        .into_iter()
        .map(|name| (compute_similarity(name), name))
        .filter(|(likeness, _)| *likeness >= MIN_SUGGESTION_SIMILARITY);
    similar_names.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name)
}
