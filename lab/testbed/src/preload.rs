//! Faults that need code inside one daemon: a wrong wall clock (CLOCK_REALTIME has no namespace), and rejected writes.
//! A library (`fault_shim.c`), loaded only into the daemons of a test, reads the faults from a file.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

/// Contents of the shared library that build.rs compiles from fault_shim.c.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));
/// Offset in the faults file, which is `struct faults` of fault_shim.c: two 64-bit numbers.
const CLOCK_OFFSET_POSITION: u64 = 0;
const DISK_FULL_POSITION: u64 = 8;
const FAULTS_FILE_BYTES: u64 = 16;

/// Faults of wall clock and disk, which a preloaded library emulates for each daemon of a testbed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreloadedFaults {
    directory: PathBuf,
}

impl PreloadedFaults {
    /// Writes the library into an existing directory. Fails when it cannot be written.
    pub fn create(directory: &Path) -> anyhow::Result<Self> {
        let preload = Self { directory: directory.to_owned() };
        let library = preload.library_path();
        fs::write(&library, LIBRARY).with_context(|| format!("cannot write {}", library.display()))?;
        Ok(preload)
    }

    /// Sets the offset of a daemon's wall clock from the machine's clock (ns). It takes effect immediately and remains
    /// after the daemon's end. Fails when the daemon was never started.
    pub fn set_clock(&self, daemon: &str, offset_ns: i64) -> anyhow::Result<()> {
        self.write_fault(daemon, CLOCK_OFFSET_POSITION, offset_ns)
    }

    /// Sets whether a daemon's writes at a file position fail, as on a full disk. Fails when the daemon was never
    /// started.
    pub fn set_disk_full(&self, daemon: &str, full: bool) -> anyhow::Result<()> {
        self.write_fault(daemon, DISK_FULL_POSITION, full.into())
    }

    /// Lets the process of `command` load the library, with the faults of `daemon`.
    pub(crate) fn apply_faults(&self, daemon: &str, command: &mut Command) -> anyhow::Result<()> {
        let path = self.faults_path(daemon);
        let build = || -> io::Result<()> {
            File::options().write(true).create(true).truncate(false).open(&path)?.set_len(FAULTS_FILE_BYTES)
        };
        build().with_context(|| format!("cannot make {}", path.display()))?;
        command.env("LD_PRELOAD", self.library_path()).env("COREWARD_FAULTS", path);
        Ok(())
    }

    fn write_fault(&self, daemon: &str, position: u64, value: i64) -> anyhow::Result<()> {
        let path = self.faults_path(daemon);
        let write = || File::options().write(true).open(&path)?.write_all_at(&value.to_ne_bytes(), position);
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    fn library_path(&self) -> PathBuf {
        self.directory.join("preload.so")
    }

    fn faults_path(&self, daemon: &str) -> PathBuf {
        self.directory.join(format!("faults-{daemon}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the time that `date` prints under the faults of a daemon (s).
    fn read_date(preload: &PreloadedFaults) -> i64 {
        let mut command = Command::new("date");
        preload.apply_faults("d", command.arg("+%s")).unwrap();
        String::from_utf8(command.output().unwrap().stdout).unwrap().trim().parse().unwrap()
    }

    #[test]
    fn clock_shift_affects_one_process_only() {
        let directory = tempfile::tempdir().unwrap();
        let preload = PreloadedFaults::create(directory.path()).unwrap();
        let before = read_date(&preload);
        preload.set_clock("d", 86_400 * 1_000_000_000).unwrap();
        assert!((86_400..86_460).contains(&(read_date(&preload) - before)));
        preload.set_clock("d", -3_600 * 1_000_000_000).unwrap();
        assert!((-3_600..-3_540).contains(&(read_date(&preload) - before)));
        assert!(preload.set_clock("nobody", 1).is_err());
    }

    /// Uses truncate(1), which extends files by ftruncate.
    #[test]
    fn full_disk_affects_one_process_only() {
        let directory = tempfile::tempdir().unwrap();
        let preload = PreloadedFaults::create(directory.path()).unwrap();
        let grow = |length: &str| {
            let mut command = Command::new("truncate");
            command.args(["--size", length]).arg(directory.path().join("file"));
            preload.apply_faults("t", &mut command).unwrap();
            command.output().unwrap().status.success()
        };
        assert!(grow("1"));
        preload.set_disk_full("t", true).unwrap();
        assert!(!grow("2"));
        preload.set_disk_full("t", false).unwrap();
        assert!(grow("2"));
    }
}
