//! What the command says of itself to shells and to man(1).

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::CommandFactory as _;

/// Arguments of `coreward completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

/// Arguments of `coreward man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Where the pages are written: coreward.1, coreward-lb.1 ...
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

/// What the shell reads to complete options and names.
pub fn completions(args: &CompletionsArgs) -> String {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "coreward", &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// Writes a page per sub-command.
///
/// # Errors
/// When the directory cannot be made or written to.
pub fn man(args: &ManArgs) -> anyhow::Result<()> {
    let write = |directory: &Path| {
        std::fs::create_dir_all(directory)?;
        clap_mangen::generate_to(crate::Cli::command(), directory)
    };
    write(&args.directory).with_context(|| format!("cannot write man pages to {}", args.directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sub_command_has_a_page_and_is_completed() {
        let directory = tempfile::tempdir().unwrap();
        man(&ManArgs { directory: directory.path().to_owned() }).unwrap();
        let command = crate::Cli::command();
        let names: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        assert!(names.contains(&"lb") && names.contains(&"agent"), "{names:?}");
        let bash = completions(&CompletionsArgs { shell: clap_complete::Shell::Bash });
        for name in names {
            assert!(directory.path().join(format!("coreward-{name}.1")).is_file(), "{name}");
            assert!(bash.contains(&format!("coreward,{name})")), "{name}");
        }
    }
}
