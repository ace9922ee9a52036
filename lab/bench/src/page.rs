//! Updates docs/cost.md, which has the reports of one run between hand-written explanations.
//!
//! `<!-- begin NAME -->` and `<!-- end NAME -->` enclose a generated part. NAME is `run` or a bench's name.

use std::path::Path;

use anyhow::Context as _;

use crate::report::wrap_text;

/// Name of the page's generated part that describes the run of the benches.
const RUN_DESCRIPTION_PART_NAME: &str = "run";

/// Part of the page that is generated and enclosed by markers.
pub struct GeneratedPagePart {
    pub name: &'static str,
    pub markdown_text: String,
}

/// Replaces all generated parts of a Markdown file. `run_description` describes machine, build and date in sentences.
/// Fails when the file cannot be read or written, or when a part has no end marker.
pub fn replace_generated_parts_in_file(
    path: &Path,
    run_description: &str,
    mut generated_parts: Vec<GeneratedPagePart>,
) -> anyhow::Result<()> {
    let page = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    generated_parts
        .push(GeneratedPagePart { name: RUN_DESCRIPTION_PART_NAME, markdown_text: wrap_text(run_description) });
    let new_page = replace_generated_parts(&page, &generated_parts).with_context(|| path.display().to_string())?;
    std::fs::write(path, new_page).with_context(|| path.display().to_string())
}

/// Returns the page, in which `generated_parts` replace the parts with the same names. Appends parts that the page
/// lacks, and removes generated parts that are not in the list.
fn replace_generated_parts(page: &str, generated_parts: &[GeneratedPagePart]) -> anyhow::Result<String> {
    let mut text_pieces = page.split("<!-- begin ");
    let mut new_page = text_pieces.next().unwrap_or_default().to_owned();
    let mut written_part_names = Vec::new();
    for text_after_begin in text_pieces {
        let (name, text_after_name) = text_after_begin.split_once(" -->").context("`<!-- begin` without ` -->`")?;
        let end_marker = format!("<!-- end {name} -->");
        let (_, text_after_part) = text_after_name
            .split_once(&end_marker)
            .with_context(|| format!("`<!-- begin {name} -->` without `{end_marker}`"))?;
        match generated_parts.iter().find(|generated_part| generated_part.name == name) {
            Some(generated_part) => new_page += &enclose_in_markers(generated_part),
            None => new_page.truncate(new_page.trim_end().len()),
        }
        new_page += text_after_part;
        written_part_names.push(name);
    }
    for generated_part in generated_parts.iter().filter(|part| !written_part_names.contains(&part.name)) {
        new_page = format!("{}\n\n{}\n", new_page.trim_end(), enclose_in_markers(generated_part));
    }
    Ok(new_page)
}

fn enclose_in_markers(generated_part: &GeneratedPagePart) -> String {
    format!(
        "<!-- begin {0} -->\n\n{1}\n\n<!-- end {0} -->",
        generated_part.name,
        generated_part.markdown_text.trim_end()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD_COST_PAGE: &str = "# Cost\n\n<!-- begin run -->\nold\n<!-- end run -->\n\nBy hand.\n\n\
                        <!-- begin gone -->\nold\n<!-- end gone -->\n\nAlso by hand.\n";

    #[test]
    fn generated_parts_are_replaced_and_hand_written_text_is_kept() {
        let generated_part = |name, text: &str| GeneratedPagePart { name, markdown_text: text.to_owned() };
        let page = replace_generated_parts(
            OLD_COST_PAGE,
            &[generated_part("run", "new"), generated_part("xdp", "## Section\n")],
        )
        .unwrap();
        let expected_page = "# Cost\n\n<!-- begin run -->\n\nnew\n\n<!-- end run -->\n\nBy hand.\n\nAlso by hand.\n\n\
                        <!-- begin xdp -->\n\n## Section\n\n<!-- end xdp -->\n";
        assert_eq!(page, expected_page);
        assert_eq!(
            replace_generated_parts(&page, &[generated_part("run", "new"), generated_part("xdp", "## Section")])
                .unwrap(),
            expected_page
        );
    }

    #[test]
    fn part_without_end_marker_is_an_error() {
        let error = replace_generated_parts("<!-- begin run -->\nold\n", &[]).unwrap_err().to_string();
        assert_eq!(error, "`<!-- begin run -->` without `<!-- end run -->`");
    }
}
