//! Directory into which figures are written.

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::figure::atomic_file_writes::write_atomically;
use crate::figure::embedded::EmbeddedScenario;
use crate::figure::result::{FigureProvenance, FigureResult};
use crate::figure::scenario::FigureScenario;
use crate::figure::{draw, page};

pub struct FigureOutputDirectory {
    path: PathBuf,
    paper_scenarios: Vec<EmbeddedScenario>,
}

impl FigureOutputDirectory {
    /// Opens the directory, and creates it if necessary. Fails with the directory's path when it cannot be created.
    pub fn open(path: &Path, paper_scenarios: Vec<EmbeddedScenario>) -> anyhow::Result<Self> {
        std::fs::create_dir_all(path).with_context(|| format!("cannot create the directory {}", path.display()))?;
        Ok(Self { path: path.to_owned(), paper_scenarios })
    }

    /// Returns the figure that an earlier run has stored, if its JSON file is complete and it was produced from the
    /// same inputs.
    fn load_stored_result(&self, name: &str, provenance: &FigureProvenance) -> Option<FigureResult> {
        let text = std::fs::read_to_string(self.path.join(format!("{name}.json"))).ok()?;
        let result: FigureResult = serde_json::from_str(&text).ok()?;
        result.provenance.has_same_inputs(provenance).then_some(result)
    }

    /// Writes the files of one figure, then updates the page with all figures. Fails with the path of a file that
    /// cannot be written.
    pub fn write_figure(
        &self,
        result: &FigureResult,
        scenario: &FigureScenario,
        all_figures: &[(FigureResult, FigureScenario)],
    ) -> anyhow::Result<()> {
        let name = &result.name;
        let json = serde_json::to_string_pretty(result).expect("results have string keys only") + "\n";
        write_atomically(&self.path, &format!("{name}.csv"), &result.table.to_csv())?;
        write_atomically(&self.path, &format!("{name}.svg"), &draw::render_svg(scenario, &result.table))?;
        write_atomically(&self.path, &format!("{name}.json"), &json)?;
        write_atomically(&self.path, "index.html", &page::render_page(&self.merge_with_earlier_figures(all_figures)))
    }

    /// Returns the figures of this run, and the papers' figures that earlier runs with the same inputs have stored. The
    /// papers' figures come first, then those of the user's own scenarios.
    fn merge_with_earlier_figures(
        &self,
        new_figures: &[(FigureResult, FigureScenario)],
    ) -> Vec<(FigureResult, FigureScenario)> {
        let find_new_figure = |name: &str| new_figures.iter().find(|(result, _)| result.name == name).cloned();
        let paper_results = self.paper_scenarios.iter().filter_map(|figure| {
            let load_earlier_figure =
                || Some((self.load_stored_result(figure.name, &figure.provenance())?, figure.parse_scenario().ok()?));
            find_new_figure(figure.name).or_else(load_earlier_figure)
        });
        let user_figures = new_figures
            .iter()
            .filter(|(result, _)| !self.paper_scenarios.iter().any(|figure| figure.name == result.name));
        paper_results.chain(user_figures.cloned()).collect()
    }

    /// Returns the last line that a run prints: the numbers of figures and claims, and the path of the page.
    pub fn format_summary(&self, figures: &[(FigureResult, FigureScenario)]) -> String {
        let claim_count: usize = figures.iter().map(|(result, _)| result.claims.len()).sum();
        let holding_claim_count: usize = figures.iter().map(|(result, _)| result.holding_claim_count()).sum();
        let failing_claim_count = claim_count - holding_claim_count;
        let page_path = self.path.join("index.html");
        format!(
            "figures: {}; statements: {claim_count}, of which {holding_claim_count} hold and {failing_claim_count} do \
             not hold here; {}\n",
            figures.len(),
            page_path.display()
        )
    }
}
