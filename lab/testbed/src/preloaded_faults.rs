//! Faults that need code inside a daemon, which are a wrong wall clock (CLOCK_REALTIME has no namespace) and rejected
//! writes. A library (`fault_shim.c`), which only the daemons of a test load, reads the faults from a file.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

/// Contents of the shared library that build.rs compiles from fault_shim.c. It emulates faults of wall clock and disk.
const FAULT_LIBRARY_BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));
/// Position of the clock offset in the faults file (bytes). The file contains `struct faults` of fault_shim.c, which is
/// two 64-bit numbers.
const CLOCK_OFFSET_FILE_POSITION: u64 = 0;
const DISK_FULL_FILE_POSITION: u64 = 8;
const FAULTS_FILE_BYTES: u64 = 16;

/// Faults of wall clock and disk, which a preloaded library emulates for each daemon in a testbed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreloadedFaults {
    directory: PathBuf,
}

impl PreloadedFaults {
    /// Writes the fault library into an existing directory. Fails when it cannot be written.
    pub fn create(directory: &Path) -> anyhow::Result<Self> {
        let preloaded_faults = Self { directory: directory.to_owned() };
        let library = preloaded_faults.fault_library_path();
        fs::write(&library, FAULT_LIBRARY_BYTES).with_context(|| format!("cannot write {}", library.display()))?;
        Ok(preloaded_faults)
    }

    /// Sets a daemon's wall clock to the machine's clock plus `offset_ns` (ns). The offset takes effect immediately and
    /// remains after the daemon's end. Fails when the daemon was never started.
    pub fn set_clock_offset(&self, daemon: &str, offset_ns: i64) -> anyhow::Result<()> {
        self.write_fault_value(daemon, CLOCK_OFFSET_FILE_POSITION, offset_ns)
    }

    /// Sets whether a daemon's writes at a file offset (pwrite(2)) and extensions of files fail, as they do on a full
    /// disk. Fails when the daemon was never started.
    pub fn set_disk_full(&self, daemon: &str, is_full: bool) -> anyhow::Result<()> {
        self.write_fault_value(daemon, DISK_FULL_FILE_POSITION, is_full.into())
    }

    /// Makes the process of `command` load the fault library, which emulates the faults set for `daemon`.
    pub(crate) fn preload_fault_library(&self, daemon: &str, command: &mut Command) -> anyhow::Result<()> {
        let faults_path = self.faults_file_path(daemon);
        let write_empty_faults = || -> io::Result<()> {
            File::options().write(true).create(true).truncate(false).open(&faults_path)?.set_len(FAULTS_FILE_BYTES)
        };
        write_empty_faults().with_context(|| format!("cannot make {}", faults_path.display()))?;
        command.env("LD_PRELOAD", self.fault_library_path()).env("COREWARD_FAULTS", faults_path);
        Ok(())
    }

    fn write_fault_value(&self, daemon: &str, file_position: u64, value: i64) -> anyhow::Result<()> {
        let faults_path = self.faults_file_path(daemon);
        let write_value =
            || File::options().write(true).open(&faults_path)?.write_all_at(&value.to_ne_bytes(), file_position);
        write_value().with_context(|| format!("cannot write {}", faults_path.display()))
    }

    fn fault_library_path(&self) -> PathBuf {
        self.directory.join("preload.so")
    }

    fn faults_file_path(&self, daemon: &str) -> PathBuf {
        self.directory.join(format!("faults-{daemon}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `date` with a daemon's faults, and returns the printed time (s since 1970).
    fn read_date(preload: &PreloadedFaults) -> i64 {
        let mut command = Command::new("date");
        preload.preload_fault_library("d", command.arg("+%s")).unwrap();
        String::from_utf8(command.output().unwrap().stdout).unwrap().trim().parse().unwrap()
    }

    #[test]
    fn clock_fault_affects_only_its_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let preloaded_faults = PreloadedFaults::create(directory.path()).unwrap();
        let time_before = read_date(&preloaded_faults);
        preloaded_faults.set_clock_offset("d", 86_400 * 1_000_000_000).unwrap();
        assert!((86_400..86_460).contains(&(read_date(&preloaded_faults) - time_before)));
        preloaded_faults.set_clock_offset("d", -3_600 * 1_000_000_000).unwrap();
        assert!((-3_600..-3_540).contains(&(read_date(&preloaded_faults) - time_before)));
        assert!(preloaded_faults.set_clock_offset("nobody", 1).is_err());
    }

    /// Checks that a disk fault makes truncate(1) fail, which extends files by ftruncate(2), until the fault ends.
    #[test]
    fn disk_fault_affects_only_its_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let preloaded_faults = PreloadedFaults::create(directory.path()).unwrap();
        let extend_file = |length: &str| {
            let mut command = Command::new("truncate");
            command.args(["--size", length]).arg(directory.path().join("file"));
            preloaded_faults.preload_fault_library("t", &mut command).unwrap();
            command.output().unwrap().status.success()
        };
        assert!(extend_file("1"));
        preloaded_faults.set_disk_full("t", true).unwrap();
        assert!(!extend_file("2"));
        preloaded_faults.set_disk_full("t", false).unwrap();
        assert!(extend_file("2"));
    }
}
