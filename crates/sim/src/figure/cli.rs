//! `coreward figure`.

mod output;
mod session;

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context;

use super::library;
use super::result::{FigureResult, Provenance};
use super::scenario::Scenario;
use crate::output::{Format, csv};
use output::Directory;
use session::Session;

/// Arguments of `coreward figure`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true))]
pub struct FigureArgs {
    /// Figures by name, as turbo-2b
    #[arg(group = "what", value_name = "NAME")]
    names: Vec<String>,
    /// Every figure
    #[arg(long, group = "what", conflicts_with_all = ["names", "scenario"])]
    all: bool,
    /// A scenario of your own (docs/scenario.md)
    #[arg(long, group = "what", value_name = "FILE")]
    scenario: Vec<PathBuf>,
    /// Only say which figures there are
    #[arg(long, group = "what", conflicts_with_all = ["names", "all", "scenario", "out"])]
    list: bool,
    /// Write NAME.csv, NAME.svg, NAME.json and index.html (one page with all) into this directory
    #[arg(long, value_name = "DIR", required_if_eq("all", "true"))]
    out: Option<PathBuf>,
    /// Take over what is in DIR already, made by this version from the same scenario
    #[arg(long, requires = "out")]
    resume: bool,
    /// What to print of each figure when nothing is written
    #[arg(long, value_enum, default_value_t = Format::Text, conflicts_with = "out")]
    format: Format,
}

/// A figure to be made.
struct Asked {
    name: String,
    scenario: Scenario,
    provenance: Provenance,
}

/// Makes the figures, or lists them.
///
/// # Errors
/// A figure or a file that does not exist, a scenario that is wrong (file, line and column), a directory that cannot be
/// written.
pub fn run(args: FigureArgs) -> anyhow::Result<()> {
    if args.list {
        return list(args.format);
    }
    let asked = asked(&args)?;
    let directory = args.out.as_deref().map(Directory::open).transpose()?;
    let names = asked.iter().map(|figure| figure.name.clone()).collect();
    let session = Session::begin(names, directory.is_some())?;
    let mut page: Vec<(FigureResult, Scenario)> = Vec::new();
    for figure in asked {
        let found = match &directory {
            Some(directory) if args.resume => directory.resumed(&figure.name, &figure.provenance),
            _ => None,
        };
        let result = match found {
            Some(result) => {
                eprintln!("{}: taken over", figure.name);
                result
            }
            None => session.simulate(&figure)?,
        };
        page.push((result, figure.scenario));
        let (result, scenario) = page.last().expect("just pushed");
        match &directory {
            Some(directory) => {
                session.writing(|| directory.write(result, scenario, &page))?;
                say(&claims_of(result, scenario))?;
            }
            None => say(&printed(result, scenario, args.format))?,
        }
    }
    if let Some(directory) = &directory {
        say(&directory.summary(&page))?;
    }
    Ok(())
}

/// What the arguments ask for, everything read before anything is simulated.
fn asked(args: &FigureArgs) -> anyhow::Result<Vec<Asked>> {
    let mut asked = Vec::new();
    let embedded = if args.all {
        library::all()
    } else {
        args.names.iter().map(|name| library::named(name)).collect::<Result<_, _>>()?
    };
    for figure in embedded {
        let (scenario, provenance) = (figure.scenario()?, figure.provenance());
        asked.push(Asked { name: figure.name.to_owned(), scenario, provenance });
    }
    for path in &args.scenario {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read the scenario {}", path.display()))?;
        let scenario = Scenario::parse(&path.display().to_string(), &text)?;
        let name =
            path.file_stem().and_then(|stem| stem.to_str()).context("a scenario's file needs a name in UTF-8")?;
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or(name);
        let provenance = Provenance::new(format!("coreward figure --scenario {file}"), &text);
        asked.push(Asked { name: name.to_owned(), scenario, provenance });
    }
    if let Some(name) = twice(&asked) {
        anyhow::bail!("figure {name:?} is asked for twice: its files would overwrite each other");
    }
    Ok(asked)
}

fn twice(asked: &[Asked]) -> Option<&str> {
    let names: Vec<&str> = asked.iter().map(|figure| figure.name.as_str()).collect();
    names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)).map(|(_, name)| *name)
}

fn list(format: Format) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for figure in library::all() {
        let scenario = figure.scenario()?;
        rows.push(vec![figure.name.to_owned(), scenario.paper, scenario.figure, scenario.title]);
    }
    let columns = ["name", "paper", "figure", "title"];
    match format {
        Format::Csv => say(&csv(&columns, &rows)),
        Format::Json => {
            let object = |row: &Vec<String>| columns.iter().copied().zip(row.clone()).collect();
            let objects: Vec<std::collections::BTreeMap<&str, String>> = rows.iter().map(object).collect();
            say(&(serde_json::to_string_pretty(&objects)? + "\n"))
        }
        Format::Text => {
            let width = rows.iter().map(|row| row[0].len()).max().unwrap_or(0);
            say(&rows.iter().map(|row| format!("{:width$}  {}\n", row[0], row[3])).collect::<String>())
        }
    }
}

fn claims_of(result: &FigureResult, scenario: &Scenario) -> String {
    let lines: String = result.claim_lines().iter().map(|line| format!("{line}\n")).collect();
    format!("{}: {}\n{lines}", result.name, scenario.title)
}

fn printed(result: &FigureResult, scenario: &Scenario, format: Format) -> String {
    match format {
        Format::Csv => result.table.csv(),
        Format::Json => serde_json::to_string_pretty(result).expect("results have string keys only") + "\n",
        Format::Text => {
            let mut table = comfy_table::Table::new();
            table.load_style(comfy_table::presets::UTF8_BORDERS_ONLY);
            table.set_header(super::table::COLUMNS);
            table.add_rows(result.table.rows());
            let seeds = super::page::seeds(result.table.seeds);
            format!("{}{table}\n{seeds}. {}\n", claims_of(result, scenario), scenario.modelled.trim())
        }
    }
}

/// Prints; a reader that has gone (`| head`) is no error.
fn say(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        written => Ok(written?),
    }
}
