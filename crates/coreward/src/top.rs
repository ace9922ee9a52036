//! The command `coreward top`.

use crate::contact::ControllerArgs;

#[derive(clap::Args)]
pub struct TopArgs {
    #[command(flatten)]
    contact: ControllerArgs,
    /// Print one page as text and exit; the default if standard output is no terminal
    #[arg(long)]
    once: bool,
}

/// Runs `coreward top`. Fails if the controller does not answer the first request, or if the terminal is unusable.
pub fn run(args: &TopArgs) -> anyhow::Result<()> {
    let page = coreward_top::terminal::run(&args.contact.build_client()?, args.once)?;
    page.map_or(Ok(()), |page| crate::print(&page))
}
