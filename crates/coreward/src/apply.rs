//! `coreward apply`: what another document of the fleet changes, a question, and then all of it or nothing.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coreward_api::client::Client;
use coreward_api::types::{Acknowledgements, RefusedUpdate, Waiting};
use coreward_control::show::ask;
use coreward_control::show::fleet::{Wanted, shown};

use crate::{AskArgs, Format, print};

#[derive(clap::Args)]
pub struct ApplyArgs {
    /// The fleet's document (docs/config.md)
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    ask: AskArgs,
    /// Without the question
    #[arg(long)]
    yes: bool,
    /// Only show what it would change
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// End when all load balancers and agents that are connected have it in force; an error names who has not, and why
    #[arg(long, conflicts_with = "dry_run")]
    wait: bool,
    /// How long to wait at most
    #[arg(long, value_name = "TIME", default_value = "30s", requires = "wait")]
    timeout: humantime::Duration,
}

/// How often it is looked who has it in force.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// # Errors
/// When the document is wrong, the controller refuses it, or the answer is no.
pub fn run(args: &ApplyArgs) -> anyhow::Result<()> {
    let client = args.ask.contact.client()?;
    let wanted = Wanted::read(&client, &args.file)?;
    let is_done = put_in_force(wanted, args.ask.format, (args.dry_run, args.yes))?;
    if is_done && args.wait { wait(&client, args.timeout.into()) } else { Ok(()) }
}

/// Shows what it changes, asks, and puts it in force; whether it has.
fn put_in_force(wanted: Wanted, format: Format, (dry_run, yes): (bool, bool)) -> anyhow::Result<bool> {
    let only_looked = dry_run || wanted.is_in_force();
    // One object: of what is done, where something is.
    if only_looked || format == Format::Text {
        print(&wanted.difference(format.into())?)?;
    }
    if only_looked {
        return Ok(!dry_run);
    }
    // Who reads JSON has seen nothing yet.
    let may_ask = format == Format::Text;
    anyhow::ensure!(yes || may_ask, "nothing was changed: `--format json` expects --yes or --dry-run");
    anyhow::ensure!(yes || asked()?, "nothing was changed");
    print(&shown(&wanted.apply()?, format.into())?)?;
    Ok(true)
}

fn wait(client: &Client, timeout: Duration) -> anyhow::Result<()> {
    let limit = Instant::now() + timeout;
    loop {
        let seen = ask(client.acknowledgements())?;
        let is_over = Instant::now() >= limit;
        if seen.waiting_count == 0 && seen.refused_count == 0 {
            return Ok(());
        }
        if is_over || seen.waiting_count == 0 {
            anyhow::bail!("{}", not_in_force(&seen));
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// Who has the newest configuration not, or not all of it, in force.
fn not_in_force(seen: &Acknowledgements) -> String {
    let mut lines = vec![format!(
        "configuration {} is in force at {}, not at {}, and {} of it or of tables refused:",
        seen.configuration_generation, seen.acknowledged_count, seen.waiting_count, seen.refused_count
    )];
    let waiting = |waiting: &Waiting| {
        format!("  {} {}: has configuration {}", waiting.part, waiting.name, waiting.configuration_generation)
    };
    let refused = |refused: &RefusedUpdate| {
        let service = refused.service.as_ref().map_or_else(String::new, |service| format!(" of service {service}"));
        let RefusedUpdate { part, name, what, generation, reason, .. } = refused;
        format!("  {part} {name}: refuses {what} {generation}{service}: {reason}")
    };
    lines.extend(seen.waiting.iter().map(waiting));
    lines.extend(seen.refused.iter().map(refused));
    lines.join("\n")
}

fn asked() -> anyhow::Result<bool> {
    anyhow::ensure!(std::io::stdin().is_terminal(), "nobody is here to answer: expected --yes or --dry-run");
    write!(std::io::stdout(), "Apply this? [y/N] ")?;
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
