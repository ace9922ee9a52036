//! `coreward apply`: what another document of the fleet changes, a question, and then all of it or nothing.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;

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
}

/// # Errors
/// When the document is wrong, the controller refuses it, or the answer is no.
pub fn run(args: &ApplyArgs) -> anyhow::Result<()> {
    let (client, format) = (args.ask.contact.client()?, args.ask.format.into());
    let wanted = Wanted::read(&client, &args.file)?;
    let only_looked = args.dry_run || wanted.is_in_force();
    // One object: of what is done, where something is.
    if only_looked || args.ask.format == Format::Text {
        print(&wanted.difference(format)?)?;
    }
    if only_looked {
        return Ok(());
    }
    // Who reads JSON has seen nothing yet.
    let may_ask = args.ask.format == Format::Text;
    anyhow::ensure!(args.yes || may_ask, "nothing was changed: `--format json` expects --yes or --dry-run");
    anyhow::ensure!(args.yes || asked()?, "nothing was changed");
    print(&shown(&wanted.apply()?, format)?)
}

fn asked() -> anyhow::Result<bool> {
    anyhow::ensure!(std::io::stdin().is_terminal(), "nobody is here to answer: expected --yes or --dry-run");
    write!(std::io::stdout(), "Apply this? [y/N] ")?;
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
