//! Command `coreward-lab figure`, which produces or lists figures.

mod output;
mod overrides;
mod session;

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context;

use super::library;
use super::live::LiveFigure;
use super::result::{FigureProvenance, FigureResult};
use super::scenario::FigureScenario;
use crate::output::{SimulationResultFormat, format_csv};
use output::FigureOutputDirectory;
use overrides::LiveFigureOverrides;
use session::FigureSession;

/// Arguments of `coreward-lab figure`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true))]
pub struct FigureArgs {
    /// Names of figures, such as turbo-2b; those ending in -live are measured on this machine, as root
    #[arg(group = "what", value_name = "NAME")]
    names: Vec<String>,
    /// Run all simulated figures
    #[arg(long, group = "what", conflicts_with_all = ["names", "scenario"])]
    all: bool,
    /// Run the scenario in this file (docs/simulator.md)
    #[arg(long, group = "what", value_name = "FILE")]
    scenario: Vec<PathBuf>,
    /// List the figures and exit
    #[arg(long, group = "what", conflicts_with_all = ["names", "all", "scenario", "out"])]
    list: bool,
    /// Write NAME.csv, NAME.svg, NAME.json and index.html (one page with all figures) into this directory
    #[arg(long, value_name = "DIR", required_if_eq("all", "true"))]
    out: Option<PathBuf>,
    /// Format of each figure on standard output, without --out
    #[arg(long, value_enum, default_value_t = SimulationResultFormat::Text, conflicts_with = "out")]
    format: SimulationResultFormat,
    #[command(flatten)]
    overrides: LiveFigureOverrides,
}

/// Figure that the user requested, with the scenario and, if it is a live figure, the measurement that produces it.
struct RequestedFigure {
    name: String,
    scenario: FigureScenario,
    provenance: FigureProvenance,
    /// Measurement that produces the figure, or `None` if the figure is simulated.
    live_figure: Option<LiveFigure>,
}

/// Produces or lists figures, including those of `live_figures`, which are measured on this machine.
///
/// Fails when a figure or file does not exist, a scenario is invalid, a directory cannot be written, or a measurement
/// fails. For an invalid scenario, the error names file, line and column.
pub fn run(args: FigureArgs, live_figures: &[LiveFigure]) -> anyhow::Result<()> {
    if args.list {
        return list_figures(args.format, live_figures);
    }
    let figures = load_requested_figures(&args, live_figures)?;
    let open_output_directory =
        |path| FigureOutputDirectory::open(path, library::simulated_and_live_figures(live_figures));
    let output_directory = args.out.as_deref().map(open_output_directory).transpose()?;
    let session = FigureSession::begin()?;
    let mut finished_figures: Vec<(FigureResult, FigureScenario)> = Vec::new();
    for figure in figures {
        let result = session.run_figure(&figure)?;
        finished_figures.push((result, figure.scenario));
        let (result, scenario) = finished_figures.last().expect("just pushed");
        match &output_directory {
            Some(directory) => {
                session.run_uninterrupted(|| directory.write_figure(result, scenario, &finished_figures))?;
                print_to_stdout(&format_claims(result, scenario))?;
            }
            None => print_to_stdout(&render_result(result, scenario, args.format))?,
        }
    }
    if let Some(directory) = &output_directory {
        print_to_stdout(&directory.format_summary(&finished_figures))?;
    }
    Ok(())
}

/// Returns the requested figures with their scenarios. All scenarios are read first, so that an error appears at once.
fn load_requested_figures(args: &FigureArgs, live_figures: &[LiveFigure]) -> anyhow::Result<Vec<RequestedFigure>> {
    let mut figures = Vec::new();
    let known_figures = library::simulated_and_live_figures(live_figures);
    let embedded_figures = if args.all {
        library::simulated_figures()
    } else {
        args.names.iter().map(|name| library::find_figure(name, &known_figures)).collect::<Result<_, _>>()?
    };
    for figure in embedded_figures {
        let (mut scenario, mut provenance) = (figure.parse_scenario()?, figure.provenance());
        args.overrides.apply_to_scenario(&mut scenario).with_context(|| figure.name)?;
        provenance.command += &args.overrides.to_command_line_options();
        let live_figure = LiveFigure::find_by_name(live_figures, figure.name).copied();
        figures.push(RequestedFigure { name: figure.name.to_owned(), scenario, provenance, live_figure });
    }
    for path in &args.scenario {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read the scenario {}", path.display()))?;
        let scenario = FigureScenario::parse(&path.display().to_string(), &text)?;
        anyhow::ensure!(
            scenario.live.is_none(),
            "{}: [live] has no meaning in a scenario of your own: who measures is part of coreward",
            path.display()
        );
        let name =
            path.file_stem().and_then(|stem| stem.to_str()).context("a scenario's file needs a name in UTF-8")?;
        let file_name = path.file_name().and_then(|file| file.to_str()).unwrap_or(name);
        let provenance = FigureProvenance::new(format!("coreward-lab figure --scenario {file_name}"), &text);
        figures.push(RequestedFigure { name: name.to_owned(), scenario, provenance, live_figure: None });
    }
    if let Some(name) = find_duplicate_name(&figures) {
        anyhow::bail!("figure {name:?} is asked for twice: its files would overwrite each other");
    }
    Ok(figures)
}

fn find_duplicate_name(figures: &[RequestedFigure]) -> Option<&str> {
    let names: Vec<&str> = figures.iter().map(|figure| figure.name.as_str()).collect();
    names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)).map(|(_, name)| *name)
}

fn list_figures(format: SimulationResultFormat, live_figures: &[LiveFigure]) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for figure in library::simulated_and_live_figures(live_figures) {
        let scenario = figure.parse_scenario()?;
        let origin = scenario.live.map_or_else(|| "simulated".to_owned(), |live| live.to_string());
        rows.push(vec![figure.name.to_owned(), scenario.paper, scenario.figure, scenario.title, origin]);
    }
    let list_columns = ["name", "paper", "figure", "title", "made"];
    match format {
        SimulationResultFormat::Csv => print_to_stdout(&format_csv(&list_columns, &rows)),
        SimulationResultFormat::Json => {
            let row_to_object = |row: &Vec<String>| list_columns.iter().copied().zip(row.clone()).collect();
            let row_objects: Vec<std::collections::BTreeMap<&str, String>> = rows.iter().map(row_to_object).collect();
            print_to_stdout(&(serde_json::to_string_pretty(&row_objects)? + "\n"))
        }
        SimulationResultFormat::Text => {
            let name_width = rows.iter().map(|row| row[0].len()).max().unwrap_or(0);
            let format_figure_row = |row: &Vec<String>| {
                let origin_suffix = if row[4] == "simulated" { String::new() } else { format!(" [{}]", row[4]) };
                format!("{:name_width$}  {}{origin_suffix}\n", row[0], row[3])
            };
            print_to_stdout(&rows.iter().map(format_figure_row).collect::<String>())
        }
    }
}

fn format_claims(result: &FigureResult, scenario: &FigureScenario) -> String {
    let claim_lines: String = result.claim_lines().iter().map(|line| format!("{line}\n")).collect();
    format!("{}: {}\n{claim_lines}", result.name, scenario.title)
}

fn render_result(result: &FigureResult, scenario: &FigureScenario, format: SimulationResultFormat) -> String {
    match format {
        SimulationResultFormat::Csv => result.table.to_csv(),
        SimulationResultFormat::Json => {
            serde_json::to_string_pretty(result).expect("results have string keys only") + "\n"
        }
        SimulationResultFormat::Text => {
            let mut table = comfy_table::Table::new();
            table.load_style(comfy_table::presets::UTF8_BORDERS_ONLY);
            table.set_header(super::table::FIGURE_CSV_COLUMNS);
            table.add_rows(result.table.csv_rows());
            let seeds_description = super::page::describe_seeds(scenario);
            format!("{}{table}\n{seeds_description}. {}\n", format_claims(result, scenario), scenario.modelled.trim())
        }
    }
}

/// Prints `text` on standard output. If the reader has closed the pipe (like `head`), the process ends without error.
fn print_to_stdout(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        write_result => Ok(write_result?),
    }
}
