//! docs/cost.md: reports of one run between hand-written explanations.
//!
//! `<!-- begin NAME -->` and `<!-- end NAME -->` enclose a generated part: `run`, and one for each bench by its name.

use std::path::Path;

use anyhow::Context as _;

use crate::report::wrapped;

/// Name of the generated part that describes the run of the benches.
const RUN: &str = "run";

/// Part of the page that is generated and enclosed by markers.
pub struct GeneratedPart {
    pub name: &'static str,
    pub text: String,
}

/// Replaces all generated parts of a Markdown file. `run` describes machine, build and date in sentences. Fails when
/// the file cannot be read or written, or one of its parts has no end marker.
pub fn write(path: &Path, run: &str, mut parts: Vec<GeneratedPart>) -> anyhow::Result<()> {
    let page = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    parts.push(GeneratedPart { name: RUN, text: wrapped(run) });
    let page = with_parts(&page, &parts).with_context(|| path.display().to_string())?;
    std::fs::write(path, page).with_context(|| path.display().to_string())
}

/// Returns the page with these generated parts. Appends parts without markers, and removes parts of earlier runs.
fn with_parts(page: &str, parts: &[GeneratedPart]) -> anyhow::Result<String> {
    let mut pieces = page.split("<!-- begin ");
    let mut result = pieces.next().unwrap_or_default().to_owned();
    let mut placed = Vec::new();
    for piece in pieces {
        let (name, rest) = piece.split_once(" -->").context("`<!-- begin` without ` -->`")?;
        let end = format!("<!-- end {name} -->");
        let (_, after) = rest.split_once(&end).with_context(|| format!("`<!-- begin {name} -->` without `{end}`"))?;
        match parts.iter().find(|part| part.name == name) {
            Some(part) => result += &enclosed(part),
            None => result.truncate(result.trim_end().len()),
        }
        result += after;
        placed.push(name);
    }
    for part in parts.iter().filter(|part| !placed.contains(&part.name)) {
        result = format!("{}\n\n{}\n", result.trim_end(), enclosed(part));
    }
    Ok(result)
}

fn enclosed(part: &GeneratedPart) -> String {
    format!("<!-- begin {0} -->\n\n{1}\n\n<!-- end {0} -->", part.name, part.text.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Cost\n\n<!-- begin run -->\nold\n<!-- end run -->\n\nBy hand.\n\n\
                        <!-- begin gone -->\nold\n<!-- end gone -->\n\nAlso by hand.\n";

    #[test]
    fn generated_parts_are_replaced_and_hand_written_text_stays() {
        let part = |name, text: &str| GeneratedPart { name, text: text.to_owned() };
        let page = with_parts(PAGE, &[part("run", "new"), part("xdp", "## Section\n")]).unwrap();
        let expected = "# Cost\n\n<!-- begin run -->\n\nnew\n\n<!-- end run -->\n\nBy hand.\n\nAlso by hand.\n\n\
                        <!-- begin xdp -->\n\n## Section\n\n<!-- end xdp -->\n";
        assert_eq!(page, expected);
        assert_eq!(with_parts(&page, &[part("run", "new"), part("xdp", "## Section")]).unwrap(), expected);
    }

    #[test]
    fn part_without_end_is_an_error() {
        let error = with_parts("<!-- begin run -->\nold\n", &[]).unwrap_err().to_string();
        assert_eq!(error, "`<!-- begin run -->` without `<!-- end run -->`");
    }
}
