//! The command `coreward top`.

use crate::controller_contact::ControllerContactArgs;

#[derive(clap::Args)]
pub struct TopArgs {
    #[command(flatten)]
    contact: ControllerContactArgs,
    /// Print one page as text and exit; the default if standard output is no terminal
    #[arg(long)]
    once: bool,
}

/// Runs `coreward top`. Fails if the controller does not answer the first request, or if the terminal is unusable.
pub fn run(args: &TopArgs) -> anyhow::Result<()> {
    let page = coreward_top::terminal::run_top(&args.contact.build_client()?, args.once)?;
    page.map_or(Ok(()), |page| crate::print_to_stdout(&page))
}
