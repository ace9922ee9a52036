//! Shell completions and man pages of a command.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Arguments of the sub-command `completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

/// Arguments of the sub-command `man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Where the pages are written: one per sub-command
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

/// Returns the script that a shell reads to complete options and names.
#[must_use]
pub fn completions(args: &CompletionsArgs, mut command: clap::Command) -> String {
    let (mut text, name) = (Vec::new(), command.get_name().to_owned());
    clap_complete::generate(args.shell, &mut command, name, &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// Writes a page per sub-command.
///
/// # Errors
/// When the directory cannot be made or written to.
pub fn man(args: &ManArgs, command: clap::Command) -> anyhow::Result<()> {
    let write = |directory: &Path| {
        std::fs::create_dir_all(directory)?;
        clap_mangen::generate_to(command, directory)
    };
    write(&args.directory).with_context(|| format!("cannot write man pages to {}", args.directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sub_command_has_a_page_and_is_completed() {
        let directory = tempfile::tempdir().unwrap();
        let command = clap::Command::new("tool").subcommands([clap::Command::new("one"), clap::Command::new("two")]);
        man(&ManArgs { directory: directory.path().to_owned() }, command.clone()).unwrap();
        let bash = completions(&CompletionsArgs { shell: clap_complete::Shell::Bash }, command);
        for name in ["one", "two"] {
            assert!(directory.path().join(format!("tool-{name}.1")).is_file(), "{name}");
            assert!(bash.contains(&format!("tool,{name})")), "{name}");
        }
    }
}
