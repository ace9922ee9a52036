//! Results of a bench: as text, as JSON, and as a section of docs/cost.md.

use std::fmt;
use std::path::Path;

use anyhow::Context as _;
use serde_json::json;

/// One number or text of a table.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    Text(String),
    /// A measured value; one digit after the point.
    Number(f64),
    Count(u64),
}

impl From<f64> for Cell {
    fn from(number: f64) -> Self {
        Cell::Number(number)
    }
}

impl From<u32> for Cell {
    fn from(count: u32) -> Self {
        Cell::Count(count.into())
    }
}

impl From<u64> for Cell {
    fn from(count: u64) -> Self {
        Cell::Count(count)
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Cell::Text(text)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Cell::Text(text.to_string())
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cell::Text(text) => f.write_str(text),
            Cell::Number(number) => write!(f, "{number:.1}"),
            Cell::Count(count) => count.fmt(f),
        }
    }
}

/// Rows under the same head.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// No rows yet.
    pub fn new(head: &[&str]) -> Self {
        Self { head: head.iter().map(|name| name.to_string()).collect(), rows: Vec::new() }
    }

    /// Panics when the row is not as long as the head.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.head.len(), "a row as long as the head {:?}", self.head);
        self.rows.push(cells);
    }

    fn json(&self) -> serde_json::Value {
        let value = |cell: &Cell| match cell {
            Cell::Text(text) => json!(text),
            Cell::Number(number) => json!(number),
            Cell::Count(count) => json!(count),
        };
        let row = |cells: &Vec<Cell>| -> serde_json::Map<String, serde_json::Value> {
            self.head.iter().cloned().zip(cells.iter().map(value)).collect()
        };
        self.rows.iter().map(row).collect()
    }

    /// Markdown, which reads as text, too. First column left, the others right.
    fn markdown(&self) -> comfy_table::Table {
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::ASCII_MARKDOWN).set_header(&self.head);
        table.add_rows(self.rows.iter().map(|row| row.iter().map(Cell::to_string).collect::<Vec<_>>()));
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
        table
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The sub-command's name.
    pub name: &'static str,
    /// Heading.
    pub title: &'static str,
    /// Measured values, and the method.
    pub about: String,
    /// The figures.
    pub tables: Vec<Table>,
}

impl Report {
    /// For programs.
    pub fn json(&self) -> serde_json::Value {
        json!({ "bench": self.name, "about": self.about, "tables": self.tables.iter().map(Table::json).collect::<Vec<_>>() })
    }
}

/// A section of Markdown.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "## {}\n\n{}\n", self.title, wrapped(&self.about))?;
        self.tables.iter().try_for_each(|table| writeln!(f, "\n{}", table.markdown()))
    }
}

/// docs/cost.md before the first section.
const HEAD: &str = "# What it costs\n\nWritten by `make bench`, on the machine that it ran on: compare the figures of one \
                    section with each other, not with\nthose of another machine.\n";

/// Puts the report into a Markdown file, in the place of its section if there is one. Fails when the file cannot be
/// read or written.
pub fn write_section(path: &Path, report: &Report) -> anyhow::Result<()> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => HEAD.to_string(),
        read => read.with_context(|| path.display().to_string())?,
    };
    std::fs::write(path, with_section(&text, report)).with_context(|| path.display().to_string())
}

fn with_section(text: &str, report: &Report) -> String {
    let mut parts: Vec<&str> = text.split("\n## ").collect();
    let section = report.to_string();
    let section = section.trim_start_matches("## ");
    let same = |part: &&str| part.lines().next() == Some(report.title);
    match parts.iter().skip(1).position(same) {
        Some(position) => parts[position + 1] = section,
        None => parts.push(section),
    }
    parts.iter().map(|part| part.trim_end()).collect::<Vec<_>>().join("\n\n## ") + "\n"
}

/// Lines of at most 120 characters.
fn wrapped(text: &str) -> String {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().expect("never empty");
        if last.is_empty() {
            last.push_str(word);
        } else if last.chars().count() + 1 + word.chars().count() <= 120 {
            last.push(' ');
            last.push_str(word);
        } else {
            lines.push(word.to_string());
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_markdown_and_json() {
        let mut table = Table::new(&["what", "ns"]);
        table.row(["first".into(), 12.34.into()]);
        table.row(["second one".into(), 5u32.into()]);
        let report = Report { name: "xdp", title: "Cost", about: "how it was".to_string(), tables: vec![table] };
        let expected = "## Cost\n\nhow it was\n\n\
                        | what       |   ns |\n|------------|------|\n| first      | 12.3 |\n| second one |    5 |\n";
        assert_eq!(report.to_string(), expected);
        assert_eq!(report.json()["tables"][0][0]["ns"], 12.34);
    }

    #[test]
    fn section_of_the_page_is_replaced() {
        let report = |title, about: &str| Report { name: "x", title, about: about.to_string(), tables: vec![] };
        let text = with_section("# Head\n", &report("One", "old"));
        let text = with_section(&text, &report("Two", "other"));
        let text = with_section(&text, &report("One", "new"));
        assert_eq!(text, "# Head\n\n## One\n\nnew\n\n## Two\n\nother\n");
    }

    #[test]
    fn lines_are_wrapped_between_words() {
        let text = "word ".repeat(50);
        let wrapped = wrapped(&text);
        assert!(wrapped.lines().all(|line| line.len() <= 120) && wrapped.lines().count() == 3);
        assert_eq!(wrapped.split_whitespace().count(), 50);
    }
}
