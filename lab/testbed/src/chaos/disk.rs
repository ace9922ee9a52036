//! A disk of its own for the controller's store, small enough to be filled.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Many times what a store of some servers needs.
const SIZE: &str = "size=8m";

/// A file system in memory; unmounted when dropped.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
}

impl Disk {
    /// Mounts it on `path`, which is made.
    pub fn mount(path: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(path)?;
        mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(SIZE))
            .with_context(|| format!("cannot mount a file system at {}", path.display()))?;
        Ok(Self { path: path.to_owned() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills it to the last byte. Fails when something else than room is missing.
    pub fn fill(&self) -> anyhow::Result<()> {
        let mut file = File::create(self.filler())?;
        let mut piece = vec![0xff; 64 << 10];
        while !piece.is_empty() {
            match file.write(&piece) {
                Ok(written) if written == piece.len() => {}
                // Smaller and smaller pieces, so that no page is left.
                Ok(_) => piece.truncate(piece.len() / 2),
                Err(error) if error.kind() == io::ErrorKind::StorageFull => piece.truncate(piece.len() / 2),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Makes room again. Fails when it was not full.
    pub fn empty(&self) -> anyhow::Result<()> {
        fs::remove_file(self.filler()).with_context(|| format!("nothing fills {}", self.path.display()))
    }

    fn filler(&self) -> PathBuf {
        self.path.join("filler")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.path, MntFlags::MNT_DETACH) {
            tracing::warn!(event = "still-mounted", path = %self.path.display(), %error, "cannot unmount");
        }
    }
}
