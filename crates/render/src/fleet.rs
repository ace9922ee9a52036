//! Output of the commands `coreward fleet` and `coreward apply`.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use coreward_api::types::{FleetApplied, FleetChange, NewFleet};
use coreward_http::client::ControllerClient;

use super::{RenderedOutputFormat, block_on, to_json};

/// Returns the active fleet document as the operator wrote it. Fails if the controller cannot be reached.
pub fn fetch_document(client: &ControllerClient, format: RenderedOutputFormat) -> anyhow::Result<String> {
    let document = block_on(client.fleet())?;
    match format {
        RenderedOutputFormat::Json => to_json(&document),
        RenderedOutputFormat::Text => {
            let origin = document.file.map_or_else(|| "applied".to_owned(), |file| format!("of {file}"));
            Ok(format!("# generation {}, {origin}\n{}", document.generation, document.text))
        }
    }
}

/// Fleet document to apply, and its differences from the document that is active now.
pub struct ProposedFleet {
    client: ControllerClient,
    document: NewFleet,
    preview: FleetApplied,
}

impl ProposedFleet {
    /// Reads a fleet document and has the controller check it. The error lists all mistakes.
    pub fn read_and_check(client: &ControllerClient, file: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("{}: expected a readable TOML file", file.display()))?;
        let name = file.display().to_string();
        let (document, preview) = block_on(async {
            let generation = client.fleet().await?.generation;
            let document = NewFleet { name, text, generation, dry_run: true };
            let preview = client.apply_fleet(&document).await?;
            anyhow::Ok((document, preview))
        })?;
        Ok(Self { client: client.clone(), document, preview })
    }

    pub fn is_already_active(&self) -> bool {
        self.preview.is_active
    }

    pub fn changes(&self) -> &[FleetChange] {
        &self.preview.changes
    }

    /// Formats the differences from the active document. Fails if they cannot be encoded in JSON.
    pub fn format_changes(&self, format: RenderedOutputFormat) -> anyhow::Result<String> {
        if format == RenderedOutputFormat::Json {
            return to_json(&self.preview);
        }
        let generation = self.document.generation;
        if self.is_already_active() {
            return Ok(format!("generation {generation} is the same: nothing changes\n"));
        }
        let mut text = format!("against generation {generation}:\n");
        for change in &self.preview.changes {
            let _ = writeln!(text, "  {}", change.message);
            if let Some(breaks) = &change.breakage_reason {
                let _ = writeln!(text, "    ! {breaks}");
            }
        }
        if self.preview.changes.is_empty() {
            text += "  no value changes, only how the document is written\n";
        }
        Ok(text)
    }

    /// Applies the document completely or not at all. Fails if another document was applied meanwhile, or the store is
    /// full.
    pub fn apply(self) -> anyhow::Result<FleetApplied> {
        let document = NewFleet { dry_run: false, ..self.document };
        block_on(self.client.apply_fleet(&document))
    }
}

/// Formats the result of `coreward apply`. Fails if it cannot be encoded in JSON.
pub fn format_apply_result(reply: &FleetApplied, format: RenderedOutputFormat) -> anyhow::Result<String> {
    match format {
        RenderedOutputFormat::Json => to_json(reply),
        RenderedOutputFormat::Text => Ok(format!("generation {} is in force", reply.generation)),
    }
}
