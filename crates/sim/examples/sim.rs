//! `coreward sim` without the rest of coreward, for work on the simulator: builds in seconds and needs no libbpf.

#[derive(clap::Parser)]
struct Cli {
    #[command(flatten)]
    sim: coreward_sim::cli::SimArgs,
}

fn main() -> anyhow::Result<()> {
    print!("{}", coreward_sim::cli::run(<Cli as clap::Parser>::parse().sim)?);
    Ok(())
}
