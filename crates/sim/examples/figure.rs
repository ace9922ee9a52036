//! `coreward figure` without the rest of coreward, for work on the figures: builds in seconds and needs no libbpf
//! (and so has no live figures).

#[derive(clap::Parser)]
struct Cli {
    #[command(flatten)]
    figure: coreward_sim::figure::cli::FigureArgs,
}

fn main() -> anyhow::Result<()> {
    coreward_sim::figure::cli::run(<Cli as clap::Parser>::parse().figure, &[])
}
