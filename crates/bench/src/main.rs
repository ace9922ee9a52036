//! `coreward-bench`: what the packet path, the agent and the controller cost, and what the policies give.

mod placement;

use clap::Parser;

#[derive(Parser)]
#[command(name = "coreward-bench", version, about = "Measures coreward on this machine")]
enum Command {
    /// The policies side by side in virtual time
    Placement(placement::Args),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Placement(args) => {
            placement::run(&args);
            Ok(())
        }
    }
}
