//! Atomic and durable writing of files.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::Context as _;

pub(crate) fn write_public_file(path: &Path, text: &str) -> anyhow::Result<()> {
    write_file_with_mode(path, text.as_bytes(), 0o644)
}

/// Atomically writes a file that only its owner can read. On an error, the old file remains.
pub fn write_secret(path: &Path, content: impl AsRef<[u8]>) -> anyhow::Result<()> {
    write_file_with_mode(path, content.as_ref(), 0o600)
}

fn write_file_with_mode(path: &Path, content: &[u8], mode: u32) -> anyhow::Result<()> {
    let temporary_path = path.with_extension("new");
    let write_temporary_file = || {
        // The temporary file of an earlier attempt may be readable by others.
        match fs::remove_file(&temporary_path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary_path)?;
        file.write_all(content)?;
        file.sync_all()
    };
    write_temporary_file().with_context(|| path.display().to_string())?;
    rename_durably(&temporary_path, path)
}

pub(crate) fn rename_durably(from: &Path, to: &Path) -> anyhow::Result<()> {
    change_and_sync_directory(to, || fs::rename(from, to))
}

pub(crate) fn remove_durably(path: &Path) -> anyhow::Result<()> {
    change_and_sync_directory(path, || fs::remove_file(path))
}

fn change_and_sync_directory(path: &Path, change: impl FnOnce() -> io::Result<()>) -> anyhow::Result<()> {
    let apply_synced_change = || {
        #[cfg(test)]
        interruption::fail_if_interrupted()?;
        change()?;
        // A rename is durable only after its directory has been synced.
        path.parent().map_or(Ok(()), |directory| fs::File::open(directory)?.sync_all())
    };
    apply_synced_change().with_context(|| path.display().to_string())
}

/// Emulation of a process that is killed between two changes of files, for tests.
#[cfg(test)]
pub(crate) mod interruption {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static FILE_CHANGES_BEFORE_FAILURE: Cell<Option<usize>> = const { Cell::new(None) };
    }

    pub(crate) fn run_with_interrupt_after_changes<T>(change_count: usize, operation: impl FnOnce() -> T) -> T {
        FILE_CHANGES_BEFORE_FAILURE.set(Some(change_count));
        let operation_result = operation();
        FILE_CHANGES_BEFORE_FAILURE.set(None);
        operation_result
    }

    pub(super) fn fail_if_interrupted() -> io::Result<()> {
        match FILE_CHANGES_BEFORE_FAILURE.get() {
            Some(0) => Err(io::Error::new(io::ErrorKind::Interrupted, "interrupted")),
            remaining_changes => {
                FILE_CHANGES_BEFORE_FAILURE.set(remaining_changes.map(|change_count| change_count - 1));
                Ok(())
            }
        }
    }
}
