//! Parser of scenario files.

use coreward_config::{ConfigDiagnostic, TomlSource};

use super::{FigureScenario, check};

impl FigureScenario {
    /// Parses a scenario file's text. An error names the file and the invalid value with its line and column.
    pub fn parse(file_name: &str, text: &str) -> Result<Self, ConfigDiagnostic> {
        let source = TomlSource::from_text(file_name, text);
        let scenario: Self = source.parse()?;
        check::check_scenario(&scenario, &source)?;
        Ok(scenario)
    }
}
