//! HTML page with all figures, in a single file that needs neither network access nor scripts.

use super::draw;
use super::result::FigureResult;
use super::scenario::FigureScenario;
use super::table::FIGURE_CSV_COLUMNS;

const FIGURE_PAGE_CSS: &str = "
body \
{ font-family: sans-serif; color: #282828; background: #fff; max-width: 1080px; \
  margin: 2em auto; padding: 0 1em; line-height: 1.45; }
section { margin: 3em 0; border-top: 2px solid #ddd; padding-top: 1em; }
svg { max-width: 100%; height: auto; display: block; margin: 1em 0; }
blockquote { margin: 0.5em 0; padding-left: 1em; border-left: 4px solid #0072b2; }
ul.claims { list-style: none; padding: 0; }
ul.claims li { margin: 0.4em 0; padding-left: 1em; border-left: 4px solid #009e73; }
ul.claims li.not { border-left-color: #d55e00; }
.word { font-weight: bold; color: #00664a; }
.not .word { color: #a84300; }
.small { color: #555; font-size: 90%; }
table { border-collapse: collapse; font-size: 85%; }
td, th { border: 1px solid #ddd; padding: 0.15em 0.6em; text-align: right; }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left; }
nav td { border: none; text-align: left; padding: 0.1em 0.8em 0.1em 0; }
nav table { font-size: 95%; }
";

pub fn render_page(figures: &[(FigureResult, FigureScenario)]) -> String {
    let (holding_count, claim_count) = figures.iter().fold((0, 0), |(holding, claims), (result, _)| {
        (holding + result.holding_claim_count(), claims + result.claims.len())
    });
    let contents_rows: String =
        figures.iter().map(|(result, scenario)| render_contents_row(result, scenario)).collect();
    let sections: String = figures.iter().map(|(result, scenario)| render_figure_section(result, scenario)).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>coreward: the papers' figures</title>\n\
         <style>{FIGURE_PAGE_CSS}</style>\n</head>\n<body>\n<h1>The papers' figures, simulated</h1>\n\
         <p>{holding_count} of {claim_count} statements hold here. {made} Published values are drawn in where the \
         paper or its artifact gives numbers. Each statement is judged by a number of the table below it; one that \
         does not hold is marked.</p>\n\
         <nav><table>\n{contents_rows}</table></nav>\n{sections}</body>\n</html>\n",
        made = describe_data_source(figures.iter().any(|(_, scenario)| scenario.live.is_some())),
    )
}

/// Returns a sentence that explains how the numbers on the page were obtained.
fn describe_data_source(has_live_figures: bool) -> String {
    let version = env!("CARGO_PKG_VERSION");
    if has_live_figures {
        return format!(
            "Figures whose names end in -live were measured, on the machine named below them; everything else on this \
             page was simulated by coreward {version}."
        );
    }
    format!("Everything on this page was simulated by coreward {version}; nothing was measured on hardware.")
}

fn render_contents_row(result: &FigureResult, scenario: &FigureScenario) -> String {
    let failing_claim_count = result.claims.len() - result.holding_claim_count();
    let claims_text = match (result.claims.len(), failing_claim_count) {
        (0, _) => "no statement to judge".to_owned(),
        (claim_count, 0) => format!("{claim_count} of {claim_count} hold"),
        (claim_count, failing_claims) => {
            format!("{} of {claim_count} hold, {failing_claims} do not", claim_count - failing_claims)
        }
    };
    format!(
        "<tr><td><a href=\"#{name}\">{name}</a></td><td>{title}</td><td>{claims_text}</td></tr>\n",
        name = escape_html(&result.name),
        title = escape_html(&scenario.title),
    )
}

fn render_claims(result: &FigureResult) -> String {
    let claim_items: String = result
        .claims
        .iter()
        .map(|claim| {
            format!(
                "<li{class}><span class=\"word\">{word}</span>: {statement}<br><span \
                 class=\"small\">{numbers}</span></li>\n",
                class = if claim.holds { "" } else { " class=\"not\"" },
                word = claim.verdict_text(),
                statement = escape_html(&claim.statement),
                numbers = escape_html(&claim.format_numbers()),
            )
        })
        .collect();
    if claim_items.is_empty() { String::new() } else { format!("<ul class=\"claims\">\n{claim_items}</ul>\n") }
}

fn render_figure_section(result: &FigureResult, scenario: &FigureScenario) -> String {
    format!(
        "<section id=\"{name}\">\n<h2>{name}: {title}</h2>\n<p class=\"small\">{paper}, {figure}</p>\n\
         <blockquote>{statement}</blockquote>\n{svg}\n{claims}<p><b>What is {done}.</b> \
         {modelled}</p>\n{sources}{table}\
         <p class=\"small\">{seeds}. Made by <code>{command}</code>, coreward {version}, scenario \
         {digest}{machine}.</p>\n</section>\n",
        done = if scenario.live.is_some() { "measured" } else { "simulated" },
        name = escape_html(&result.name),
        title = escape_html(&scenario.title),
        paper = escape_html(&scenario.paper),
        figure = escape_html(&scenario.figure),
        statement = render_paragraphs(&scenario.statement),
        svg = draw::render_svg(scenario, &result.table),
        claims = render_claims(result),
        modelled = escape_html(&collapse_whitespace(&scenario.modelled)),
        sources = render_sources(scenario),
        table = render_table(result),
        seeds = describe_seeds(scenario),
        command = escape_html(&result.provenance.command),
        version = escape_html(&result.provenance.version),
        digest = escape_html(&result.provenance.scenario),
        machine = result
            .provenance
            .measured_on
            .as_ref()
            .map_or(String::new(), |machine_text| format!(", on {}", escape_html(machine_text))),
    )
}

/// Describes how many seeds a simulated figure has, or how many runs a live figure has.
pub fn describe_seeds(scenario: &FigureScenario) -> String {
    match (scenario.live.is_some(), scenario.seeds.get_ref()) {
        (false, 1) => "One seed: 1".to_owned(),
        (false, seeds) => format!("Median, lowest and highest over seeds 1 to {seeds}"),
        (true, 1) => "One run".to_owned(),
        (true, runs) => format!("Median, lowest and highest over {runs} runs"),
    }
}

fn render_sources(scenario: &FigureScenario) -> String {
    let mut sources: Vec<&str> =
        scenario.published.iter().map(|published_curve| published_curve.source.as_str()).collect();
    sources.dedup();
    if sources.is_empty() {
        return String::new();
    }
    format!("<p class=\"small\">Published values: {}.</p>\n", escape_html(&sources.join("; ")))
}

fn render_table(result: &FigureResult) -> String {
    let render_row = |tag: &str, cell_texts: &mut dyn Iterator<Item = &str>| {
        let cells_html: String =
            cell_texts.map(|cell_text| format!("<{tag}>{}</{tag}>", escape_html(cell_text))).collect();
        format!("<tr>{cells_html}</tr>\n")
    };
    let header_row = render_row("th", &mut FIGURE_CSV_COLUMNS.into_iter());
    let rows = result.table.csv_rows();
    let body_rows: String = rows.iter().map(|row| render_row("td", &mut row.iter().map(String::as_str))).collect();
    format!(
        "<details><summary>The numbers ({} rows)</summary>\n<table>\n{header_row}{body_rows}</table></details>\n",
        rows.len()
    )
}

fn collapse_whitespace(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Renders `text` as HTML, with a paragraph for each part between empty lines.
fn render_paragraphs(text: &str) -> String {
    let paragraphs: Vec<String> =
        text.trim().split("\n\n").map(|paragraph| escape_html(&collapse_whitespace(paragraph))).collect();
    paragraphs.join("<br>")
}

fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
