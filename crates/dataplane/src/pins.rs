//! Pin directory of a daemon. It is on a BPF file system and is locked by one process at a time.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

/// Lock of a directory of pins. It is released when the value is dropped or the process ends.
///
/// The lock excludes a second daemon with the same pins. Two daemons would both free entries of the connection table,
/// and undo each other's configuration. The controller would reject the second daemon only after that daemon has taken
/// over the pins. Processes that only read (`coreward connections`) need no lock.
#[derive(Debug)]
pub struct PinDirectoryLock(#[allow(dead_code, reason = "held")] Flock<File>);

/// Maximum time to wait for the lock. A process that has just ended, or its child before execve(2), may still hold it.
const PIN_LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const PIN_LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum depth of the directories that are searched for pins.
const MAX_PIN_SEARCH_DEPTH: usize = 5;

impl PinDirectoryLock {
    /// Locks the directory, and creates it if it is missing. Fails when the directory is not on a BPF file system, or
    /// another process holds the lock for two seconds.
    pub fn new(directory: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        ensure_bpf_file_system(directory)?;
        let mut directory_file = File::open(directory).with_context(|| directory.display().to_string())?;
        let wait_start = Instant::now();
        loop {
            directory_file = match Flock::lock(directory_file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self(lock)),
                Err((file, Errno::EWOULDBLOCK)) if wait_start.elapsed() < PIN_LOCK_TIMEOUT => file,
                Err((_, Errno::EWOULDBLOCK)) => bail!(
                    "{}: another process works with what is pinned there: expected it stopped first (systemctl stop), \
                     or a pin directory of one's own",
                    directory.display()
                ),
                Err((_, error)) => return Err(error).with_context(|| directory.display().to_string()),
            };
            thread::sleep(PIN_LOCK_RETRY_INTERVAL);
        }
    }
}

/// Returns the other directories on the BPF file system of `directory` in which the relative path `file` is pinned.
/// Unreadable directories are skipped. The search is by pins, because the names of programs are visible only with
/// CAP_SYS_ADMIN, which daemons lack.
pub fn find_other_pin_directories(directory: &Path, file: &str) -> Vec<PathBuf> {
    let Some(root) = directory.ancestors().filter(|ancestor| ensure_bpf_file_system(ancestor).is_ok()).last() else {
        return Vec::new();
    };
    let own_directory = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    let (mut pin_directories, mut pending_directories) = (Vec::new(), vec![(root.to_owned(), 0)]);
    while let Some((canonical_path, depth)) = pending_directories.pop() {
        if canonical_path.join(file).exists()
            && canonical_path.canonicalize().is_ok_and(|folder| folder != own_directory)
        {
            pin_directories.push(canonical_path.clone());
        }
        let directory_entries = fs::read_dir(&canonical_path).into_iter().flatten().flatten();
        let subdirectories = directory_entries
            .filter(|entry| depth < MAX_PIN_SEARCH_DEPTH && entry.file_type().is_ok_and(|kind| kind.is_dir()));
        pending_directories.extend(subdirectories.map(|entry| (entry.path(), depth + 1)));
    }
    pin_directories
}

/// Removes a pin directory if it is empty. Fails when an empty directory cannot be removed.
pub fn remove_pin_directory_if_empty(directory: &Path) -> anyhow::Result<()> {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        outcome => outcome.with_context(|| directory.display().to_string()),
    }
}

/// Checks that the directory is on a BPF file system. Fails when it is not or does not exist.
pub fn ensure_bpf_file_system(directory: &Path) -> anyhow::Result<()> {
    let file_system = statfs(directory).with_context(|| directory.display().to_string())?;
    ensure!(
        file_system.filesystem_type() == BPF_FS_MAGIC,
        "{}: expected a directory on a BPF file system (`mount -t bpf bpf /sys/fs/bpf`)",
        directory.display()
    );
    Ok(())
}
