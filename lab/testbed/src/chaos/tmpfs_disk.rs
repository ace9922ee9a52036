//! Small disk for the controller's store, which a fault can fill.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Mount option that limits the disk's size to 8 MiB, many times the size of the controller's store for a few servers.
const TMPFS_SIZE_OPTION: &str = "size=8m";

/// Mounted tmpfs that emulates a small disk. Dropping this value unmounts the tmpfs.
#[derive(Debug)]
pub struct TmpfsDisk {
    mount_point: PathBuf,
}

impl TmpfsDisk {
    /// Creates the directory `path` and mounts a small tmpfs on it.
    pub fn mount(path: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(path)?;
        mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(TMPFS_SIZE_OPTION))
            .with_context(|| format!("cannot mount a file system at {}", path.display()))?;
        Ok(Self { mount_point: path.to_owned() })
    }

    pub fn path(&self) -> &Path {
        &self.mount_point
    }

    /// Writes a file that fills the disk to its last byte. Fails on any error other than a full disk.
    pub fn fill(&self) -> anyhow::Result<()> {
        let mut filler_file = File::create(self.filler_path())?;
        let mut filler_bytes = vec![0xff; 64 << 10];
        while !filler_bytes.is_empty() {
            match filler_file.write(&filler_bytes) {
                Ok(written_length) if written_length == filler_bytes.len() => {}
                // Halve the writes until not even one byte fits, so that no page stays free.
                Ok(_) => filler_bytes.truncate(filler_bytes.len() / 2),
                Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                    filler_bytes.truncate(filler_bytes.len() / 2)
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Removes the file that [`TmpfsDisk::fill`] wrote. Fails when the file does not exist.
    pub fn remove_filler(&self) -> anyhow::Result<()> {
        fs::remove_file(self.filler_path()).with_context(|| format!("nothing fills {}", self.mount_point.display()))
    }

    fn filler_path(&self) -> PathBuf {
        self.mount_point.join("filler")
    }
}

impl Drop for TmpfsDisk {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.mount_point, MntFlags::MNT_DETACH) {
            tracing::warn!(
                event = "disk-not-unmounted",
                path = %self.mount_point.display(),
                %error,
                "the disk of the chaos test stays mounted: unmount it"
            );
        }
    }
}
