//! Watcher of changed files.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};

const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Watched files with their last modification times.
#[derive(Debug)]
pub struct FileWatcher {
    paths: Vec<PathBuf>,
    known: Mutex<Vec<Option<SystemTime>>>,
}

impl FileWatcher {
    pub fn of<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Self {
        let watcher = Self { paths: paths.into_iter().cloned().collect(), known: Mutex::default() };
        watcher.take();
        watcher
    }

    /// Stores the present modification times. Must be called before the files are read, so that no change is missed.
    pub fn take(&self) {
        *self.known() = self.now();
    }

    /// Waits for a changed, new or removed file, for at least one interval, because related files are written one after
    /// the other.
    pub async fn changed(&self) {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if self.has_any() {
                return;
            }
        }
    }

    fn has_any(&self) -> bool {
        self.now() != *self.known()
    }

    fn known(&self) -> MutexGuard<'_, Vec<Option<SystemTime>>> {
        self.known.lock()
    }

    fn now(&self) -> Vec<Option<SystemTime>> {
        self.paths.iter().map(|path| written(path)).collect()
    }
}

/// Returns the modification time; `None`: the file does not exist.
fn written(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn change_is_resent_until_acknowledged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("own.crt");
        let watcher = FileWatcher::of([&path]);
        assert!(!watcher.has_any(), "nothing has changed");
        std::fs::write(&path, "").unwrap();
        timeout(TIMEOUT, watcher.changed()).await.expect("the file is new");
        assert!(watcher.has_any(), "it was not taken");
        watcher.take();
        assert!(!watcher.has_any(), "it is taken");
        std::fs::remove_file(&path).unwrap();
        assert!(watcher.has_any(), "it is gone");
    }
}
