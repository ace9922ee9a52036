//! Instances: named testbeds of a machine, with owner, directories, and removal of their remains.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::fcntl::{FcntlArg, fcntl};

use crate::namespace::{self, Namespace};

const RUN_DIRECTORY: &str = "/run/coreward-testbed";
const BPF_FILESYSTEM: &str = "/sys/fs/bpf";
const PIN_DIRECTORY: &str = "/sys/fs/bpf/coreward-testbed";
/// Name of the file in the testbed's directory that the owner locks; the file contains the owner's process id.
const OWNER_FILE: &str = "owner";
/// Maximum length of a name, which keeps namespace names readable and socket paths below their limit of 107 bytes.
const NAME_MAX: usize = 40;
/// Environment variable with a prefix of all testbed names, so that two checkouts can run tests on one machine.
const PREFIX_VARIABLE: &str = "COREWARD_TESTBED_PREFIX";

/// Ownership of a testbed's name: a lock on its owner file, which the kernel releases when the process ends.
#[derive(Debug)]
pub(crate) struct Instance {
    /// Full name of the testbed, with the prefix.
    name: String,
    _lock: File,
}

impl Instance {
    /// Acquires a testbed name, and removes the remains of a killed testbed of this name.
    pub(crate) fn acquire(name: &str) -> anyhow::Result<Self> {
        if name.is_empty() {
            bail!("testbed instance \"\": expected a name");
        }
        Self::lock_name(&prefixed(name))
    }

    fn lock_name(name: &str) -> anyhow::Result<Self> {
        if name.len() > NAME_MAX || !name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) {
            bail!("testbed instance {name:?}: expected 1 to {NAME_MAX} lower-case letters and digits");
        }
        let lock = lock_owner_file(name)?;
        let instance = Self { name: name.to_owned(), _lock: lock };
        fs::write(instance.directory().join(OWNER_FILE), format!("{}\n", std::process::id()))?;
        instance.remove_remains()?;
        mount_bpf_filesystem()?;
        fs::create_dir_all(instance.pin_directory())
            .with_context(|| format!("cannot create {}", instance.pin_directory().display()))?;
        Ok(instance)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the directory for configurations, logs and results of this testbed.
    pub(crate) fn directory(&self) -> PathBuf {
        directory(&self.name)
    }

    /// Returns the directory for pinned BPF objects of this testbed.
    pub(crate) fn pin_directory(&self) -> PathBuf {
        pin_directory(&self.name)
    }

    pub(crate) fn namespace(&self, role: &str) -> Namespace {
        Namespace::new(format!("{}{role}", namespace_prefix(&self.name)))
    }

    /// Removes processes, then namespaces, then pins and files. Continues after a failure and returns the first one.
    fn remove_remains(&self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        for namespace in namespace::with_prefix(&namespace_prefix(&self.name)) {
            outcome = outcome.and(namespace.remove());
        }
        outcome = outcome.and(ignore_not_found(fs::remove_dir_all(self.pin_directory())));
        for entry in fs::read_dir(self.directory()).into_iter().flatten().flatten() {
            if entry.file_name() == OWNER_FILE {
                continue;
            }
            let path = entry.path();
            // Unmounts a file system that a killed testbed has mounted; fails for all other paths.
            let _ = nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH);
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            outcome = outcome.and(ignore_not_found(removed));
        }
        outcome
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Err(error) = self.remove_remains() {
            tracing::warn!(
                event = "testbed-left",
                testbed = self.name,
                error = format!("{error:#}"),
                "cannot remove a testbed"
            );
        }
        // The parent directories stay: another testbed may be creating its directory in them.
        let _ = fs::remove_file(self.directory().join(OWNER_FILE));
        let _ = fs::remove_dir(self.directory());
    }
}

/// Returns a testbed name that is unique to this process, so that two processes can run `command` at a time. Removes
/// the remains of killed processes of the same command. Fails when something cannot be removed.
pub fn unique_name(command: &str) -> anyhow::Result<String> {
    let own = |name: &String| {
        let pid = name.strip_prefix(&prefixed(command)).unwrap_or_default();
        !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit())
    };
    remove_unowned(all_names().filter(own))?;
    Ok(format!("{command}{}", std::process::id()))
}

/// Removes the remains of killed testbeds with these names, or of all killed testbeds if there are no names. Testbeds
/// in use are kept. Returns the removed names, with the prefix. Fails when something cannot be removed.
pub fn clean(names: &[String]) -> anyhow::Result<Vec<String>> {
    if names.is_empty() {
        return remove_unowned(all_names());
    }
    let named: Vec<String> = names.iter().map(|name| prefixed(name)).collect();
    remove_unowned(all_names().filter(|name| named.contains(name)))
}

/// Returns the paths of a testbed's directories and namespaces, whether it runs or was killed.
pub fn find_remains(name: &str) -> Vec<PathBuf> {
    let name = prefixed(name);
    let directories = [directory(&name), pin_directory(&name)].into_iter().filter(|path| path.exists());
    let namespaces = namespace::with_prefix(&namespace_prefix(&name));
    directories.chain(namespaces.iter().map(Namespace::path)).collect()
}

fn remove_unowned(names: impl Iterator<Item = String>) -> anyhow::Result<Vec<String>> {
    let mut removed = Vec::new();
    for name in names {
        if running_owner_pid(&name).is_some() {
            continue;
        }
        match Instance::lock_name(&name) {
            Ok(instance) => drop(instance),
            // Another process has acquired the name meanwhile.
            Err(_) if running_owner_pid(&name).is_some() => continue,
            Err(error) => return Err(error),
        }
        removed.push(name);
    }
    Ok(removed)
}

/// Returns the full names of all testbeds whose names start with the prefix, running or killed.
fn all_names() -> impl Iterator<Item = String> {
    let entries = fs::read_dir(RUN_DIRECTORY).into_iter().flatten().flatten();
    let prefix = prefixed("");
    entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(move |name| name.starts_with(&prefix))
}

fn prefixed(name: &str) -> String {
    std::env::var(PREFIX_VARIABLE).unwrap_or_default() + name
}

fn directory(name: &str) -> PathBuf {
    Path::new(RUN_DIRECTORY).join(name)
}

fn pin_directory(name: &str) -> PathBuf {
    Path::new(PIN_DIRECTORY).join(name)
}

/// Returns the prefix of a testbed's namespaces. Names have no dash, so that no prefix is the start of another.
fn namespace_prefix(name: &str) -> String {
    format!("cw{name}-")
}

/// Returns the process id of the owner of testbed `name`; `None`: it has no running owner. Does not lock the file, so
/// that another process can acquire the name.
fn running_owner_pid(name: &str) -> Option<String> {
    let path = directory(name).join(OWNER_FILE);
    let file = File::open(&path).ok()?;
    let mut lock = exclusive_lock();
    let asked = fcntl(&file, FcntlArg::F_OFD_GETLK(&mut lock));
    // A file without a process id belongs to an owner that is about to lock it.
    let locked = asked.is_err() || lock.l_type != libc::F_UNLCK as libc::c_short;
    (locked || owner_pid(name).is_none()).then(|| owner_pid(name).unwrap_or_else(|| "unknown".to_owned()))
}

fn owner_pid(name: &str) -> Option<String> {
    let pid = fs::read_to_string(directory(name).join(OWNER_FILE)).ok()?;
    (!pid.is_empty()).then(|| pid.trim().to_owned())
}

fn lock_owner_file(name: &str) -> anyhow::Result<File> {
    let directory = directory(name);
    let path = directory.join(OWNER_FILE);
    loop {
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let file = match File::options().read(true).write(true).create(true).truncate(false).open(&path) {
            Ok(file) => file,
            // The former owner has just removed the directory.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot open {}", path.display())),
        };
        if fcntl(&file, FcntlArg::F_OFD_SETLK(&exclusive_lock())).is_err() {
            let pid = owner_pid(name).unwrap_or_else(|| "unknown".to_owned());
            bail!("testbed {name} is in use by process {pid}");
        }
        // The former owner may have removed the file after it was opened here and before it was locked.
        let same = |there: fs::Metadata| file.metadata().is_ok_and(|here| here.ino() == there.ino());
        if fs::metadata(&path).is_ok_and(same) {
            return Ok(file);
        }
    }
}

/// Returns an exclusive lock that belongs to the open file, so that even one process cannot acquire a name twice.
fn exclusive_lock() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

fn ignore_not_found(outcome: io::Result<()>) -> anyhow::Result<()> {
    match outcome {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Mounts bpffs, as Debian does at boot; in containers and rescue systems it may be missing.
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
    use crate::{missing_testbed_rights, skip_if};

    #[test]
    fn invalid_names_are_rejected() {
        for name in ["a-b", "UPPER", &"a".repeat(41), "a/b"] {
            let error = Instance::acquire(name).unwrap_err().to_string();
            assert!(error.contains("expected 1 to 40 lower-case letters and digits"), "{error}");
        }
        assert!(Instance::acquire("").unwrap_err().to_string().contains("expected a name"));
    }

    #[test]
    fn owner_query_takes_no_entry() {
        skip_if!(missing_testbed_rights());
        let short = unique_name("tinstance").unwrap();
        let name = prefixed(&short);
        assert_eq!(running_owner_pid(&name), None);
        let instance = Instance::acquire(&short).unwrap();
        assert_eq!(running_owner_pid(&name), Some(std::process::id().to_string()));
        assert!(Instance::acquire(&short).unwrap_err().to_string().contains("is in use by process"));
        assert_eq!(clean(std::slice::from_ref(&short)).unwrap(), Vec::<String>::new());
        assert!(!find_remains(&short).is_empty());
        drop(instance);
        assert_eq!(find_remains(&short), Vec::<PathBuf>::new());

        // Remains of a killed testbed.
        fs::create_dir_all(directory(&name)).unwrap();
        fs::write(directory(&name).join(OWNER_FILE), "1\n").unwrap();
        fs::write(directory(&name).join("log"), "").unwrap();
        assert_eq!(running_owner_pid(&name), None);
        assert_eq!(clean(std::slice::from_ref(&short)).unwrap(), [name]);
        assert_eq!(find_remains(&short), Vec::<PathBuf>::new());
    }
}
