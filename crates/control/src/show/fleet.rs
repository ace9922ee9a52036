//! `coreward fleet` and `coreward apply`: the fleet's document in force, and another one in its place.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::ensure;
use coreward_config::Source;
use coreward_wire::v1;
use serde_json::json;

use super::{Contact, Format, ask, json};
use crate::config::{Change, FleetConfig, difference};

/// What `coreward fleet show` prints: the document as the operator wrote it.
///
/// # Errors
/// When the controller cannot be reached.
pub fn show(controller: impl Into<Contact>, format: Format) -> anyhow::Result<String> {
    let document = in_force(controller)?;
    Ok(match format {
        Format::Json => json::pretty(&json!({
            "generation": document.generation,
            "file": (!document.file.is_empty()).then_some(&document.file),
            "text": document.text,
        })),
        Format::Text => {
            let from = match document.file.as_str() {
                "" => "applied".to_owned(),
                file => format!("of {file}"),
            };
            format!("# generation {}, {from}\n{}", document.generation, document.text)
        }
    })
}

fn in_force(controller: impl Into<Contact>) -> anyhow::Result<v1::FleetDocument> {
    ask(controller, async |client| client.get_fleet(v1::GetFleetRequest {}).await)
}

/// A document that could be in force, compared with the one that is.
pub struct Wanted {
    contact: Contact,
    request: v1::ApplyFleetRequest,
    /// Server by server, service by service, key by key.
    pub changes: Vec<Change>,
    /// Whether the text is the one in force.
    pub is_in_force: bool,
}

impl Wanted {
    /// Reads the file and has the controller look whether it could be in force.
    ///
    /// # Errors
    /// Everything that is wrong with it; when the controller cannot be reached, or its fleet stands in a file.
    pub fn read(controller: impl Into<Contact>, file: &Path) -> anyhow::Result<Self> {
        let contact = controller.into();
        let new = Source::read(file)?;
        FleetConfig::parse(&new)?;
        let old = in_force(contact.clone())?;
        let request = v1::ApplyFleetRequest {
            name: file.display().to_string(),
            text: new.text().to_string(),
            generation: old.generation,
            dry_run: true,
        };
        ask(contact.clone(), async |client| client.apply_fleet(request.clone()).await)?;
        let is_in_force = old.text == request.text && old.generation > 0;
        let changes = difference(&Source::from_text("the fleet in force", &old.text), &new);
        Ok(Self { contact, request, changes, is_in_force })
    }

    /// What it would change, a line each.
    pub fn difference(&self) -> String {
        let generation = self.request.generation;
        if self.is_in_force {
            return format!("generation {generation} is the same: nothing changes\n");
        }
        let mut text = format!("against generation {generation}:\n");
        for change in &self.changes {
            let _ = writeln!(text, "  {change}");
        }
        if self.changes.is_empty() {
            text += "  no value changes, only how the document is written\n";
        }
        text
    }

    /// Puts it in force, whole or not at all, and gives its generation.
    ///
    /// # Errors
    /// When another document is in force by now, or this one cannot be written down.
    pub fn apply(self) -> anyhow::Result<u64> {
        let request = v1::ApplyFleetRequest { dry_run: false, ..self.request };
        let reply = ask(self.contact, async |client| client.apply_fleet(request).await)?;
        ensure!(reply.generation > 0, "the controller names no generation: expected one from 1 on");
        Ok(reply.generation)
    }
}
