//! Shell completions and man pages of a command.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Sub-commands that print or write the documentation of a command line.
#[derive(Debug, clap::Subcommand)]
pub enum CliDocumentationCommand {
    /// Print the completion script of a shell
    Completions {
        /// Name of the shell
        shell: clap_complete::Shell,
    },
    /// Write man pages of every sub-command
    Man {
        /// Directory of the pages: one per sub-command
        #[arg(value_name = "DIRECTORY")]
        directory: PathBuf,
    },
}

impl CliDocumentationCommand {
    /// Prints the completion script of `command`, or writes its man pages. Fails if the output cannot be written.
    pub fn run(&self, command: clap::Command) -> anyhow::Result<()> {
        match self {
            Self::Completions { shell } => crate::print_to_stdout(&completion_script(*shell, command)),
            Self::Man { directory } => write_man_pages(directory, command),
        }
    }
}

/// Returns the script with which a shell completes the command's options and subcommands.
fn completion_script(shell: clap_complete::Shell, mut command: clap::Command) -> String {
    let (mut text, name) = (Vec::new(), command.get_name().to_owned());
    clap_complete::generate(shell, &mut command, name, &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

fn write_man_pages(directory: &Path, command: clap::Command) -> anyhow::Result<()> {
    let generate_pages = || {
        std::fs::create_dir_all(directory)?;
        clap_mangen::generate_to(command, directory)
    };
    generate_pages().with_context(|| format!("cannot write man pages to {}", directory.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subcommand_has_a_man_page_and_shell_completion() {
        let directory = tempfile::tempdir().unwrap();
        let command = clap::Command::new("tool").subcommands([clap::Command::new("one"), clap::Command::new("two")]);
        write_man_pages(directory.path(), command.clone()).unwrap();
        let bash_script = completion_script(clap_complete::Shell::Bash, command);
        for name in ["one", "two"] {
            assert!(directory.path().join(format!("tool-{name}.1")).is_file(), "{name}");
            assert!(bash_script.contains(&format!("tool,{name})")), "{name}");
        }
    }
}
