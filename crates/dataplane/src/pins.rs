//! The directory in which a daemon's data plane is pinned: on a BPF file system, and one process's at a time.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

/// A directory that this process alone changes, until this is dropped or the process ends in whatever way.
///
/// Two daemons on the same pins would both free entries of one connection table and undo each other's configuration; the
/// controller refuses the second one only after it has taken over. Who only reads (`coreward connections`) needs none of this.
#[derive(Debug)]
pub struct PinLock(#[allow(dead_code, reason = "held")] Flock<File>);

/// A process that has just ended, and a child of it that has not yet become another program, hold its claim for a moment.
const TIMEOUT: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

/// How many folders deep pin directories are looked for.
const DEEPEST: usize = 5;

impl PinLock {
    /// Makes the directory if it is missing. Fails when it is not on a BPF file system, or another process has claimed
    /// it for two seconds from now on.
    pub fn new(directory: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        ensure_bpf_file_system(directory)?;
        let mut file = File::open(directory).with_context(|| directory.display().to_string())?;
        let began = Instant::now();
        loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self(lock)),
                Err((file, Errno::EWOULDBLOCK)) if began.elapsed() < TIMEOUT => file,
                Err((_, Errno::EWOULDBLOCK)) => bail!(
                    "{}: another process works with what is pinned there: expected it stopped first (systemctl stop), or a \
                     pin directory of one's own",
                    directory.display()
                ),
                Err((_, error)) => return Err(error).with_context(|| directory.display().to_string()),
            };
            thread::sleep(PAUSE);
        }
    }
}

/// The other directories of the same BPF file system in which `file` (with its folder) is pinned; those that this process may not
/// read are left out. (What is at a device cannot be asked by name: that takes CAP_SYS_ADMIN, which daemons do not have.)
pub fn others(directory: &Path, file: &str) -> Vec<PathBuf> {
    let Some(root) = directory.ancestors().filter(|folder| ensure_bpf_file_system(folder).is_ok()).last() else {
        return Vec::new();
    };
    let own = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    let (mut found, mut folders) = (Vec::new(), vec![(root.to_owned(), 0)]);
    while let Some((folder, depth)) = folders.pop() {
        if folder.join(file).exists() && folder.canonicalize().is_ok_and(|folder| folder != own) {
            found.push(folder.clone());
        }
        let inside = fs::read_dir(&folder).into_iter().flatten().flatten();
        let more = inside.filter(|entry| depth < DEEPEST && entry.file_type().is_ok_and(|kind| kind.is_dir()));
        folders.extend(more.map(|entry| (entry.path(), depth + 1)));
    }
    found
}

/// Removes a pin directory; one with something else in it, which is somebody else's, stays. Fails when it cannot be
/// removed.
pub fn remove_if_empty(directory: &Path) -> anyhow::Result<()> {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        outcome => outcome.with_context(|| directory.display().to_string()),
    }
}

/// Fails when the directory does not exist, or is on another kind of file system.
pub fn ensure_bpf_file_system(directory: &Path) -> anyhow::Result<()> {
    let file_system = statfs(directory).with_context(|| directory.display().to_string())?;
    ensure!(
        file_system.filesystem_type() == BPF_FS_MAGIC,
        "{}: expected a directory on a BPF file system (`mount -t bpf bpf /sys/fs/bpf`)",
        directory.display()
    );
    Ok(())
}
