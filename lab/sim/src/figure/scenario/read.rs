//! Reading of a scenario file.

use coreward_config::{Diagnostic, Source};

use super::{Scenario, check};

impl Scenario {
    /// Reads the scenario `text`; `name` is what errors show. The error names the mistake and its place.
    pub fn parse(name: &str, text: &str) -> Result<Self, Diagnostic> {
        let source = Source::from_text(name, text);
        let scenario: Self = source.parse()?;
        check::check(&scenario, &source)?;
        Ok(scenario)
    }
}
