//! Report of a bench, as text, JSON or a section of Markdown.

use std::fmt;

use coreward_model::statistics::median;
use serde_json::json;

#[derive(Debug, Clone, PartialEq)]
pub enum ReportTableCell {
    Text(String),
    /// Measured value, which is printed with one decimal.
    Decimal(f64),
    Count(u64),
}

impl From<f64> for ReportTableCell {
    fn from(number: f64) -> Self {
        ReportTableCell::Decimal(number)
    }
}

impl From<u32> for ReportTableCell {
    fn from(count: u32) -> Self {
        ReportTableCell::Count(count.into())
    }
}

impl From<u64> for ReportTableCell {
    fn from(count: u64) -> Self {
        ReportTableCell::Count(count)
    }
}

impl From<String> for ReportTableCell {
    fn from(text: String) -> Self {
        ReportTableCell::Text(text)
    }
}

impl From<&str> for ReportTableCell {
    fn from(text: &str) -> Self {
        ReportTableCell::Text(text.to_string())
    }
}

impl fmt::Display for ReportTableCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReportTableCell::Text(text) => f.write_str(text),
            ReportTableCell::Decimal(number) => write!(f, "{number:.1}"),
            ReportTableCell::Count(count) => count.fmt(f),
        }
    }
}

/// Returns the median, minimum and maximum of `values`, or NaN for each if there are no values.
pub fn median_min_max(values: impl IntoIterator<Item = f64>) -> [f64; 3] {
    let mut sorted_values: Vec<f64> = values.into_iter().collect();
    sorted_values.sort_by(f64::total_cmp);
    let min_max = [sorted_values.first(), sorted_values.last()].map(Option::<&f64>::copied);
    [median(&sorted_values), min_max[0], min_max[1]].map(|value| value.unwrap_or(f64::NAN))
}

/// Upper or lower limit for a measured value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MeasurementGoal {
    AtMost(f64),
    AtLeast(f64),
}

impl MeasurementGoal {
    fn is_met(self, value: f64) -> bool {
        match self {
            MeasurementGoal::AtMost(bound) => value <= bound,
            MeasurementGoal::AtLeast(bound) => value >= bound,
        }
    }
}

impl fmt::Display for MeasurementGoal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (comparison, limit) = match self {
            MeasurementGoal::AtMost(bound) => ("<=", *bound),
            MeasurementGoal::AtLeast(bound) => (">=", *bound),
        };
        // Ratios are shown with two decimals.
        let decimal_count = if limit < 2.0 { 2 } else { 1 };
        write!(f, "{comparison} {limit:.decimal_count$}")
    }
}

/// Returns two table cells, with the goal and with the verdict on `value`. Both are empty without a goal.
pub fn goal_and_verdict_cells(goal: Option<MeasurementGoal>, value: f64) -> [ReportTableCell; 2] {
    let Some(goal) = goal else { return ["".into(), "".into()] };
    [goal.to_string().into(), if goal.is_met(value) { "met" } else { "missed" }.into()]
}

#[derive(Debug, Clone, PartialEq)]
pub struct ReportTable {
    column_names: Vec<String>,
    rows: Vec<Vec<ReportTableCell>>,
}

impl ReportTable {
    pub fn new(column_names: &[&str]) -> Self {
        Self { column_names: column_names.iter().map(|name| name.to_string()).collect(), rows: Vec::new() }
    }

    /// Adds a row to the table. Panics if the number of cells differs from the number of columns.
    pub fn add_row(&mut self, cells: impl IntoIterator<Item = ReportTableCell>) {
        let cells: Vec<ReportTableCell> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.column_names.len(), "a row as long as the head {:?}", self.column_names);
        self.rows.push(cells);
    }

    /// Adds a row with a name, the median, minimum and maximum of `values`, and further cells.
    pub fn add_summary_row(
        &mut self,
        name: &str,
        values: impl IntoIterator<Item = f64>,
        extra_cells: impl IntoIterator<Item = ReportTableCell>,
    ) {
        self.add_row(
            [name.into()].into_iter().chain(median_min_max(values).map(ReportTableCell::Decimal)).chain(extra_cells),
        );
    }

    fn to_json(&self) -> serde_json::Value {
        let cell_to_json = |cell: &ReportTableCell| match cell {
            ReportTableCell::Text(text) => json!(text),
            ReportTableCell::Decimal(number) => json!(number),
            ReportTableCell::Count(count) => json!(count),
        };
        let row_to_json = |cells: &Vec<ReportTableCell>| -> serde_json::Map<String, serde_json::Value> {
            self.column_names.iter().cloned().zip(cells.iter().map(cell_to_json)).collect()
        };
        self.rows.iter().map(row_to_json).collect()
    }

    /// Returns the table as Markdown that is readable as text. The first column is aligned left, the others right.
    fn to_markdown(&self) -> comfy_table::Table {
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::ASCII_MARKDOWN).set_header(&self.column_names);
        table.add_rows(self.rows.iter().map(|row| row.iter().map(ReportTableCell::to_string).collect::<Vec<_>>()));
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
        table
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct BenchReport {
    /// Name of the bench's subcommand.
    pub name: &'static str,
    pub heading: &'static str,
    /// Description of the measured values and the method.
    pub method_description: String,
    pub tables: Vec<ReportTable>,
}

impl BenchReport {
    /// Returns the bench's name, its description and all tables as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        let tables: Vec<_> = self.tables.iter().map(ReportTable::to_json).collect();
        json!({ "bench": self.name, "about": self.method_description, "tables": tables })
    }
}

/// Writes the report as a section of a Markdown page.
impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "## {}\n\n{}\n", self.heading, wrap_text(&self.method_description))?;
        self.tables.iter().try_for_each(|table| writeln!(f, "\n{}", table.to_markdown()))
    }
}

/// Returns the text with line breaks between words, so that no line has more than 120 characters.
pub fn wrap_text(text: &str) -> String {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split_whitespace() {
        let last_line = lines.last_mut().expect("never empty");
        if last_line.is_empty() {
            last_line.push_str(word);
        } else if last_line.chars().count() + 1 + word.chars().count() <= 120 {
            last_line.push(' ');
            last_line.push_str(word);
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
    fn report_is_formatted_as_markdown_and_as_json() {
        let mut table = ReportTable::new(&["what", "ns"]);
        table.add_row(["first".into(), 12.34.into()]);
        table.add_row(["second one".into(), 5u32.into()]);
        let report = BenchReport {
            name: "xdp",
            heading: "Cost",
            method_description: "how it was".to_string(),
            tables: vec![table],
        };
        let expected_markdown = "## Cost\n\nhow it was\n\n\
                        | what       |   ns |\n|------------|------|\n| first      | 12.3 |\n| second one |    5 |\n";
        assert_eq!(report.to_string(), expected_markdown);
        assert_eq!(report.to_json()["tables"][0][0]["ns"], 12.34);
    }

    #[test]
    fn goal_is_met_at_or_within_its_limit() {
        let verdicts_for_1_2_3 =
            |goal| [1.0, 2.0, 3.0].map(|value| goal_and_verdict_cells(Some(goal), value)[1].to_string());
        assert_eq!(verdicts_for_1_2_3(MeasurementGoal::AtMost(2.0)), ["met", "met", "missed"]);
        assert_eq!(verdicts_for_1_2_3(MeasurementGoal::AtLeast(2.0)), ["missed", "met", "met"]);
        assert_eq!(goal_and_verdict_cells(Some(MeasurementGoal::AtLeast(0.875)), 0.9)[0].to_string(), ">= 0.88");
        assert_eq!(goal_and_verdict_cells(None, 1.0), ["".into(), "".into()]);
    }

    #[test]
    fn text_is_wrapped_between_words_at_120_characters() {
        let text = "word ".repeat(50);
        let wrapped_text = wrap_text(&text);
        assert!(wrapped_text.lines().all(|line| line.len() <= 120) && wrapped_text.lines().count() == 3);
        assert_eq!(wrapped_text.split_whitespace().count(), 50);
    }
}
