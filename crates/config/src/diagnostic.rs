//! What is wrong with a file, and where.

use std::fmt;
use std::path::Path;

use serde_json::{Value, json};

use crate::{Source, Span};

/// More mistakes than that are counted, not shown.
pub(crate) const DISPLAY_LIMIT: usize = 100;

/// Something in a file that is not as expected, or a file that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// The file.
    pub file: Box<Path>,
    /// Where in it; `None`: all of it.
    pub place: Option<Location>,
    /// Full name of the key, as `service.vip`; empty where there is none (a syntax error).
    pub key: String,
    /// What was found.
    pub problem: String,
    /// What was expected instead, where one can say.
    pub expected: Option<Box<str>>,
    /// The valid name most like the one that was found.
    pub nearest: Option<Box<str>>,
}

/// Where in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// Counted from 1.
    pub line: u32,
    /// Counted from 1, in characters.
    pub column: u32,
}

/// A name or value that is longer is cut off where it is shown, and none is like it, characters.
const LONGEST: usize = 1000;

fn shortened(text: String) -> String {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl Diagnostic {
    /// `message`: "what was found: expected what was expected".
    pub(crate) fn new(file: &Path, place: Location, key: String, message: &str) -> Self {
        Self { place: Some(place), key: shortened(key), ..Self::of_file(file, message) }
    }

    /// One that concerns a whole file; `message` as in `new`.
    pub fn of_file(file: &Path, message: &str) -> Self {
        let (problem, expected) = match message.split_once(": expected ") {
            Some((problem, expected)) => (problem, Some(expected.into())),
            None => (message, None),
        };
        Self {
            file: file.into(),
            place: None,
            key: String::new(),
            problem: shortened(problem.to_owned()),
            expected,
            nearest: None,
        }
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "file": self.file,
            "line": self.place.map(|place| place.line),
            "column": self.place.map(|place| place.column),
            "key": (!self.key.is_empty()).then_some(&self.key),
            "problem": self.problem,
            "expected": self.expected,
            "nearest": self.nearest,
            "message": self.to_string(),
        })
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(Location { line, column }) = self.place {
            write!(f, ":{line}:{column}")?;
        }
        if !self.key.is_empty() {
            write!(f, ": key `{}`", self.key)?;
        }
        write!(f, ": {}", self.problem)?;
        if let Some(expected) = &self.expected {
            write!(f, ": expected {expected}")?;
        }
        match &self.nearest {
            Some(nearest) => write!(f, " (nearest: `{nearest}`)"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Diagnostic {}

/// Everything that is wrong with a file, in the order of its lines. As text: a line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostics {
    /// At least one; the first ones where there are very many.
    pub list: Vec<Diagnostic>,
    /// How many more there are, at least.
    pub more: usize,
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, mistake) in self.list.iter().enumerate() {
            let line_break = if index == 0 { "" } else { "\n" };
            write!(f, "{line_break}{mistake}")?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(f, "\nand at least {more} more"),
        }
    }
}

impl std::error::Error for Diagnostics {}

impl Diagnostics {
    /// At these places of a file that has been read without any: the words as for [`Source::error`].
    pub fn at(source: &Source, mut wrong: Vec<(Span, String)>) -> Self {
        let more = wrong.len().saturating_sub(DISPLAY_LIMIT);
        wrong.truncate(DISPLAY_LIMIT);
        Self { list: source.errors_at(&wrong), more }
    }
}

impl From<Diagnostic> for Diagnostics {
    fn from(mistake: Diagnostic) -> Self {
        Self { list: vec![mistake], more: 0 }
    }
}

/// How alike (0 to 1, Jaro and Winkler's measure) a name must be to be named.
const ALIKE: f64 = 0.75;

/// That of `known` which `given` is most like.
pub fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if given.len() > LONGEST {
        return None;
    }
    let given = given.to_lowercase();
    let likeness = |name: &str| strsim::jaro_winkler(&given, &name.to_lowercase());
    let alike = known.into_iter().map(|name| (likeness(name), name)).filter(|(likeness, _)| *likeness >= ALIKE);
    alike.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name)
}
