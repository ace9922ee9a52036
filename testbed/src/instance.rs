//! One named testbed among several on a machine: who owns it, its directories, and the removal of all it left.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::fcntl::{Flock, FlockArg};

use crate::namespace::{self, Namespace};

const RUN_DIRECTORY: &str = "/run/coreward-testbed";
const BPF_FILESYSTEM: &str = "/sys/fs/bpf";
const PIN_DIRECTORY: &str = "/sys/fs/bpf/coreward-testbed";
const OWNER_FILE: &str = "owner";
/// Keeps names of namespaces readable.
const NAME_MAX: usize = 16;

/// The right to be the testbed of one name. Held by a lock on its directory, which the kernel lets go when we die,
/// however we die.
#[derive(Debug)]
pub(crate) struct Instance {
    name: String,
    _lock: Flock<File>,
}

impl Instance {
    /// Takes the name, and removes what an earlier testbed of this name left when it was killed.
    pub(crate) fn take(name: &str) -> anyhow::Result<Self> {
        if name.is_empty()
            || name.len() > NAME_MAX
            || !name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        {
            bail!("testbed instance {name:?}: expected 1 to {NAME_MAX} lower-case letters and digits");
        }
        let lock = lock_directory(name)?;
        let instance = Self { name: name.to_owned(), _lock: lock };
        instance.remove_remains()?;
        fs::write(instance.directory().join(OWNER_FILE), format!("{}\n", std::process::id()))?;
        mount_bpf_filesystem()?;
        fs::create_dir_all(instance.pin_directory())
            .with_context(|| format!("cannot create {}", instance.pin_directory().display()))?;
        Ok(instance)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// For configurations, logs and results of this testbed.
    pub(crate) fn directory(&self) -> PathBuf {
        Path::new(RUN_DIRECTORY).join(&self.name)
    }

    /// For pinned BPF objects of this testbed.
    pub(crate) fn pin_directory(&self) -> PathBuf {
        Path::new(PIN_DIRECTORY).join(&self.name)
    }

    pub(crate) fn namespace(&self, role: &str) -> Namespace {
        Namespace::new(format!("cw{}-{role}", self.name))
    }

    /// Processes, then namespaces, then pins and files; goes on after a failure and returns the first.
    fn remove_remains(&self) -> anyhow::Result<()> {
        // Names of instances have no dash, so that no instance's prefix is the beginning of another's.
        let namespaces = namespace::with_prefix(&format!("cw{}-", self.name));
        let mut outcome = Ok(());
        for namespace in namespaces {
            outcome = outcome.and(namespace.remove());
        }
        outcome = outcome.and(absent_is_fine(fs::remove_dir_all(self.pin_directory())));
        for entry in fs::read_dir(self.directory()).into_iter().flatten().flatten() {
            let path = entry.path();
            // A file system that a killed testbed has mounted; for all else this fails.
            let _ = nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH);
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            outcome = outcome.and(absent_is_fine(removed));
        }
        outcome
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Err(error) = self.remove_remains() {
            tracing::warn!("testbed {} left something behind: {error:#}", self.name);
        }
        // The parents go when they are empty: when this was the last testbed.
        let _ = fs::remove_dir(self.directory());
        let _ = fs::remove_dir(RUN_DIRECTORY);
        let _ = fs::remove_dir(PIN_DIRECTORY);
    }
}

/// Removes what killed testbeds left; those in use stay. Returns the names of those removed.
///
/// # Errors
/// When something cannot be removed.
pub fn clean() -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(RUN_DIRECTORY).into_iter().flatten().flatten();
    let names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let mut removed = Vec::new();
    for name in names {
        if owner(&name).is_none() {
            drop(Instance::take(&name)?);
            removed.push(name);
        }
    }
    Ok(removed)
}

/// The process that owns the living testbed `name`; `None` without one.
fn owner(name: &str) -> Option<String> {
    let directory = File::open(Path::new(RUN_DIRECTORY).join(name)).ok()?;
    match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
        Ok(_) => None,
        Err(_) => Some(owner_pid(name)),
    }
}

fn owner_pid(name: &str) -> String {
    let pid = fs::read_to_string(Path::new(RUN_DIRECTORY).join(name).join(OWNER_FILE)).unwrap_or_default();
    if pid.is_empty() { "unknown".to_owned() } else { pid.trim().to_owned() }
}

fn lock_directory(name: &str) -> anyhow::Result<Flock<File>> {
    let path = Path::new(RUN_DIRECTORY).join(name);
    loop {
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let Ok(directory) = File::open(&path) else { continue };
        let Ok(lock) = Flock::lock(directory, FlockArg::LockExclusiveNonblock) else {
            bail!("testbed {name} is in use by process {}", owner_pid(name));
        };
        // Its former owner may have removed the directory between our opening and our locking it.
        let same = |there: fs::Metadata| lock.metadata().is_ok_and(|here| here.ino() == there.ino());
        if fs::metadata(&path).is_ok_and(same) {
            return Ok(lock);
        }
    }
}

fn absent_is_fine(outcome: io::Result<()>) -> anyhow::Result<()> {
    match outcome {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Debian mounts it at boot; a container's or a rescue system's init may not.
fn mount_bpf_filesystem() -> anyhow::Result<()> {
    let kind = nix::sys::statfs::statfs(BPF_FILESYSTEM).map(|status| status.filesystem_type());
    if kind == Ok(nix::sys::statfs::BPF_FS_MAGIC) {
        return Ok(());
    }
    nix::mount::mount(Some("bpf"), BPF_FILESYSTEM, Some("bpf"), nix::mount::MsFlags::empty(), None::<&str>)
        .with_context(|| format!("cannot mount the BPF file system at {BPF_FILESYSTEM}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_cannot_be_are_refused() {
        for name in ["", "a-b", "UPPER", "seventeen00000000", "a/b"] {
            let error = Instance::take(name).unwrap_err().to_string();
            assert!(error.contains("expected 1 to 16 lower-case letters and digits"), "{error}");
        }
    }
}
