//! Parts that the commands `coreward` and `coreward-lab` share, such as logging, exit status, man pages and shell
//! completions.

pub mod cli_documentation;
mod log;

use std::io::Write as _;
use std::process::ExitCode;

pub use log::start_logging;

/// Prints `text` to standard output. Fails if it cannot be written, unless the reader has closed the pipe (`| head`).
pub fn print_to_stdout(text: &str) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{}", text.trim_end()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Returns the exit status for a command's result. Prints an error to standard error, after the command's name.
#[must_use]
pub fn exit_status(command: &str, result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Writing fails if the reader has closed the pipe.
            let _ = writeln!(std::io::stderr(), "{command}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
