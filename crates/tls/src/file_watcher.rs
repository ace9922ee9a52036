//! Watcher that detects changes of files by their modification times.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};

const FILE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Files to watch, with the modification time that each had when it was last read.
#[derive(Debug)]
pub struct FileWatcher {
    paths: Vec<PathBuf>,
    known_mtimes: Mutex<Vec<Option<SystemTime>>>,
}

impl FileWatcher {
    pub fn from_paths<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Self {
        let watcher = Self { paths: paths.into_iter().cloned().collect(), known_mtimes: Mutex::default() };
        watcher.record_modification_times();
        watcher
    }

    /// Records the current modification times. To miss no change, callers must do this before they read the files.
    pub fn record_modification_times(&self) {
        *self.lock_known_mtimes() = self.read_modification_times();
    }

    /// Waits until a file is changed, created or removed. Waits for at least one polling interval, because related
    /// files are written one after the other.
    pub async fn wait_for_change(&self) {
        loop {
            tokio::time::sleep(FILE_POLL_INTERVAL).await;
            if self.has_changes() {
                return;
            }
        }
    }

    fn has_changes(&self) -> bool {
        self.read_modification_times() != *self.lock_known_mtimes()
    }

    fn lock_known_mtimes(&self) -> MutexGuard<'_, Vec<Option<SystemTime>>> {
        self.known_mtimes.lock()
    }

    fn read_modification_times(&self) -> Vec<Option<SystemTime>> {
        self.paths.iter().map(|path| read_modification_time(path)).collect()
    }
}

/// Returns the file's modification time, or `None` if the file does not exist.
fn read_modification_time(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const FILE_CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn file_change_is_reported_until_modification_times_are_recorded() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("own.crt");
        let watcher = FileWatcher::from_paths([&path]);
        assert!(!watcher.has_changes(), "nothing has changed");
        std::fs::write(&path, "").unwrap();
        timeout(FILE_CHANGE_TIMEOUT, watcher.wait_for_change()).await.expect("the file is new");
        assert!(watcher.has_changes(), "it was not taken");
        watcher.record_modification_times();
        assert!(!watcher.has_changes(), "it is taken");
        std::fs::remove_file(&path).unwrap();
        assert!(watcher.has_changes(), "it is gone");
    }
}
