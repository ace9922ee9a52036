//! Output directory of figures.

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::figure::embedded::EmbeddedScenario;
use crate::figure::result::{FigureResult, Provenance};
use crate::figure::scenario::Scenario;
use crate::figure::write::write_atomically;
use crate::figure::{draw, page};

pub struct Directory {
    path: PathBuf,
    paper_figures: Vec<EmbeddedScenario>,
}

impl Directory {
    /// Opens the directory, and creates it if necessary. Fails when it cannot be created; the error names its path.
    pub fn open(path: &Path, paper_figures: Vec<EmbeddedScenario>) -> anyhow::Result<Self> {
        std::fs::create_dir_all(path).with_context(|| format!("cannot create the directory {}", path.display()))?;
        Ok(Self { path: path.to_owned(), paper_figures })
    }

    /// Returns the figure that an earlier run stored, if its file is complete and it had the same inputs.
    fn load_stored(&self, name: &str, provenance: &Provenance) -> Option<FigureResult> {
        let text = std::fs::read_to_string(self.path.join(format!("{name}.json"))).ok()?;
        let result: FigureResult = serde_json::from_str(&text).ok()?;
        result.provenance.has_same_inputs(provenance).then_some(result)
    }

    /// Writes the files of one figure, then the page of all figures. Fails when a file cannot be written (with its
    /// path).
    pub fn write(
        &self,
        result: &FigureResult,
        scenario: &Scenario,
        all: &[(FigureResult, Scenario)],
    ) -> anyhow::Result<()> {
        let name = &result.name;
        let json = serde_json::to_string_pretty(result).expect("results have string keys only") + "\n";
        write_atomically(&self.path, &format!("{name}.csv"), &result.table.csv())?;
        write_atomically(&self.path, &format!("{name}.svg"), &draw::render_svg(scenario, &result.table))?;
        write_atomically(&self.path, &format!("{name}.json"), &json)?;
        write_atomically(&self.path, "index.html", &page::render_page(&self.with_earlier_figures(all)))
    }

    /// Returns the figures of this run, and those of papers that an earlier run of this version has stored, in the
    /// papers' order. A user's own scenarios are last.
    fn with_earlier_figures(&self, made: &[(FigureResult, Scenario)]) -> Vec<(FigureResult, Scenario)> {
        let made_named = |name: &str| made.iter().find(|(result, _)| result.name == name).cloned();
        let of_papers = self.paper_figures.iter().filter_map(|figure| {
            let earlier = || Some((self.load_stored(figure.name, &figure.provenance())?, figure.scenario().ok()?));
            made_named(figure.name).or_else(earlier)
        });
        let own = made.iter().filter(|(result, _)| !self.paper_figures.iter().any(|figure| figure.name == result.name));
        of_papers.chain(own.cloned()).collect()
    }

    /// Returns the last line of a run: the numbers of figures and of claims that hold or do not, and the page's path.
    pub fn summary(&self, figures: &[(FigureResult, Scenario)]) -> String {
        let claims: usize = figures.iter().map(|(result, _)| result.claims.len()).sum();
        let holding: usize = figures.iter().map(|(result, _)| result.holding_claim_count()).sum();
        let failing = claims - holding;
        let path = self.path.join("index.html");
        format!(
            "figures: {}; statements: {claims}, of which {holding} hold and {failing} do not hold here; {}\n",
            figures.len(),
            path.display()
        )
    }
}
