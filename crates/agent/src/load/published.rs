//! Reads busy times from a file that the server application writes, with one little-endian u64 in ns per core.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};

use super::LoadSource;

/// Maximum size of the load file in bytes. It suffices for the maximum number of cores in a report.
const MAX_LOAD_FILE_BYTES: usize = coreward_intf::MAX_CPUS as usize * 8;

#[derive(Debug)]
pub struct PublishedLoadFile {
    load_file_path: PathBuf,
    open_file: Option<File>,
}

impl PublishedLoadFile {
    /// Returns a source that reads the busy times from the file at `load_file_path`. The file may be created later.
    pub fn new(load_file_path: PathBuf) -> Self {
        Self { load_file_path, open_file: None }
    }

    fn try_append_busy_times(&mut self, busy_ns: &mut Vec<u64>) -> anyhow::Result<()> {
        let file = match &self.open_file {
            Some(file) => file,
            None => self.open_file.insert(File::open(&self.load_file_path)?),
        };
        let mut bytes = [0; MAX_LOAD_FILE_BYTES];
        let length = file.read_at(&mut bytes, 0)?;
        ensure!(length > 0 && length.is_multiple_of(8), "the file has {length} bytes: expected 8 per core");
        busy_ns.extend(
            bytes[..length].chunks_exact(8).map(|core_bytes| u64::from_le_bytes(core_bytes.try_into().expect("eight"))),
        );
        Ok(())
    }
}

impl LoadSource for PublishedLoadFile {
    fn append_busy_times(&mut self, busy_ns: &mut Vec<u64>) -> anyhow::Result<()> {
        self.try_append_busy_times(busy_ns).with_context(|| self.load_file_path.display().to_string())
    }

    /// Ignores the CPUs, but makes the next read open the file again. A restarted application creates a new file with
    /// the same name.
    fn set_queue_cpus(&mut self, _cpu_of_queue: &[usize]) {
        self.open_file = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_load_file_is_reopened_and_wrong_size_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let load_file_path = directory.path().join("busy");
        let mut load_source = PublishedLoadFile::new(load_file_path.clone());
        let mut busy_ns = vec![];
        let error = load_source.append_busy_times(&mut busy_ns).unwrap_err();
        assert!(format!("{error:#}").contains("busy: No such file"), "{error:#}");
        std::fs::write(&load_file_path, [1u64.to_le_bytes(), 2u64.to_le_bytes()].concat()).unwrap();
        load_source.append_busy_times(&mut busy_ns).unwrap();
        assert_eq!(busy_ns, [1, 2]);
        std::fs::remove_file(&load_file_path).unwrap();
        std::fs::write(&load_file_path, [7; 9]).unwrap();
        load_source.set_queue_cpus(&[0, 1]);
        let error = load_source.append_busy_times(&mut busy_ns).unwrap_err();
        assert!(format!("{error:#}").ends_with("the file has 9 bytes: expected 8 per core"), "{error:#}");
    }
}
