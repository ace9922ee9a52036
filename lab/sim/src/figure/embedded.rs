//! Scenarios of the executable.

use coreward_config::Diagnostic;

use super::result::Provenance;
use super::scenario::Scenario;

/// A scenario that coreward carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Embedded {
    /// File name without `.toml`.
    pub name: &'static str,
    pub text: &'static str,
}

impl Embedded {
    /// The error names the mistake and its place.
    pub fn scenario(&self) -> Result<Scenario, Diagnostic> {
        Scenario::parse(&format!("lab/scenarios/{}.toml", self.name), self.text)
    }

    pub fn provenance(&self) -> Provenance {
        Provenance::new(format!("coreward-lab figure {}", self.name), self.text)
    }
}
