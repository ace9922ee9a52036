//! Scenario files that are embedded in the executable.

use coreward_config::ConfigDiagnostic;

use super::result::FigureProvenance;
use super::scenario::FigureScenario;

/// Scenario file whose text is embedded in the executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbeddedScenario {
    /// Name of the scenario's file without `.toml`.
    pub name: &'static str,
    pub toml_text: &'static str,
}

impl EmbeddedScenario {
    /// Parses the scenario. An error names the invalid value with its line and column.
    pub fn parse_scenario(&self) -> Result<FigureScenario, ConfigDiagnostic> {
        FigureScenario::parse(&format!("lab/scenarios/{}.toml", self.name), self.toml_text)
    }

    pub fn provenance(&self) -> FigureProvenance {
        FigureProvenance::new(format!("coreward-lab figure {}", self.name), self.toml_text)
    }
}
