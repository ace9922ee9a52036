//! `coreward apply`: what another document of the fleet changes, a question, and then all of it or nothing.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;

use coreward_control::show::fleet::Wanted;

use crate::contact::ContactArgs;
use crate::print;

#[derive(clap::Args)]
pub struct ApplyArgs {
    /// The fleet's document (docs/config.md)
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    contact: ContactArgs,
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
    let wanted = Wanted::read(&args.contact, &args.file)?;
    print(&wanted.difference())?;
    if args.dry_run || wanted.is_in_force {
        return Ok(());
    }
    anyhow::ensure!(args.yes || asked()?, "nothing was changed");
    print(&format!("generation {} is in force", wanted.apply()?))
}

fn asked() -> anyhow::Result<bool> {
    anyhow::ensure!(std::io::stdin().is_terminal(), "nobody is here to answer: expected --yes or --dry-run");
    write!(std::io::stdout(), "Apply this? [y/N] ")?;
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
