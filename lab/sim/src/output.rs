//! Formats in which results are printed.

use comfy_table::Table;
use serde::Serialize;

/// Format of a result on standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SimulationResultFormat {
    /// Text for people
    Text,
    /// One JSON object, for programs
    Json,
    /// CSV for spreadsheets
    Csv,
}

/// Result that can be printed in every [`SimulationResultFormat`]. JSON contains the serialized value, text and CSV
/// contain its rows.
pub trait PrintableResult: Serialize {
    fn column_titles(&self) -> Vec<&'static str>;

    /// Returns the rows of the table, each with as many cells as [`PrintableResult::column_titles`].
    fn table_rows(&self) -> Vec<Vec<String>>;

    /// Returns the remarks below the table of the text output, such as omitted parts or the run time.
    fn table_remarks(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the whole result as text, ending with a line feed.
    fn render(&self, format: SimulationResultFormat) -> String {
        match format {
            SimulationResultFormat::Json => {
                serde_json::to_string_pretty(self).expect("results have string keys only") + "\n"
            }
            SimulationResultFormat::Csv => format_csv(&self.column_titles(), &self.table_rows()),
            SimulationResultFormat::Text => {
                let mut table = Table::new();
                table.load_style(comfy_table::presets::UTF8_BORDERS_ONLY);
                table.set_header(self.column_titles());
                table.add_rows(self.table_rows());
                let remark_lines: String = self.table_remarks().iter().map(|remark| format!("{remark}\n")).collect();
                format!("{table}\n{remark_lines}")
            }
        }
    }
}

/// Returns comma-separated values with a header line. The format is that of RFC 4180, but lines end with line feeds.
pub fn format_csv<C: AsRef<str>>(columns: &[C], rows: &[Vec<String>]) -> String {
    let format_csv_line =
        |cells: &mut dyn Iterator<Item = &str>| cells.map(format_csv_cell).collect::<Vec<_>>().join(",") + "\n";
    let header = format_csv_line(&mut columns.iter().map(AsRef::as_ref));
    rows.iter().fold(header, |text, row| text + &format_csv_line(&mut row.iter().map(String::as_str)))
}

fn format_csv_cell(cell_text: &str) -> String {
    if cell_text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", cell_text.replace('"', "\"\""))
    } else {
        cell_text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_cells_with_commas_or_quotes_are_quoted() {
        let rows = vec![vec!["a,b".to_owned(), "say \"x\"".to_owned()], vec!["1".to_owned(), "2".to_owned()]];
        assert_eq!(format_csv(&["p", "q"], &rows), "p,q\n\"a,b\",\"say \"\"x\"\"\"\n1,2\n");
    }
}
