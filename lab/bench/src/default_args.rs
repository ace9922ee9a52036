//! Default options for benches that other commands start.

/// Returns the default values of a bench's options, as for a command line without options.
pub(crate) fn parse_default_args<A: clap::Args>() -> A {
    let command = A::augment_args(clap::Command::new("bench"));
    A::from_arg_matches(&command.get_matches_from(["bench"])).expect("every option has a default")
}
