//! File system that a test may fill or remount.

use std::fs;
use std::path::PathBuf;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Mounted file system of 16 MiB. Dropping this value unmounts the file system.
pub struct MountedDisk(pub PathBuf);

impl MountedDisk {
    /// Mounts the file system at `mount_point`, which is created if it does not exist.
    pub fn mount(mount_point: PathBuf) -> Self {
        fs::create_dir_all(&mount_point).unwrap();
        let options = Some("size=16m,mode=700");
        mount(Some("tmpfs"), &mount_point, Some("tmpfs"), MsFlags::empty(), options).unwrap();
        Self(mount_point)
    }
}

impl Drop for MountedDisk {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).unwrap();
    }
}
