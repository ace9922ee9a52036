//! Parts that the commands `coreward` and `coreward-lab` share: log, standard output, exit status, man pages,
//! completions.

pub mod shell;

use std::io::Write as _;
use std::process::ExitCode;

/// Starts logging to standard error; `RUST_LOG` sets the level (default: info).
///
/// A line that cannot be written (a full disk) is lost: by default tracing-subscriber reports that with `eprintln!`,
/// which panics then.
pub fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let format = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi).with_target(false);
    format.with_writer(std::io::stderr).log_internal_errors(false).init();
}

/// Prints `text` to standard output; a reader that has gone (`| head`) is no error.
///
/// # Errors
/// When standard output cannot be written for another reason.
pub fn print(text: &str) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{}", text.trim_end()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Returns a command's exit status; an error goes to standard error, with the command's name.
#[must_use]
pub fn exit_status(command: &str, result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The reader may have gone.
            let _ = writeln!(std::io::stderr(), "{command}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
