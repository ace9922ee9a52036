//! Instances, which are the named testbeds of a machine. Each has an owner process and directories. The remains of
//! killed instances are removed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::fcntl::{FcntlArg, fcntl};

use crate::namespace::{self, NetworkNamespace};

const RUN_DIRECTORY: &str = "/run/coreward-testbed";
const BPF_FILESYSTEM_PATH: &str = "/sys/fs/bpf";
const PIN_DIRECTORY: &str = "/sys/fs/bpf/coreward-testbed";
/// Name of the file in the testbed's directory that the owning process locks. The file contains that process's id.
const OWNER_FILE_NAME: &str = "owner";
/// Maximum length of a testbed name. It keeps namespace names readable, and socket paths below the limit of 107 bytes.
const MAX_TESTBED_NAME_LENGTH: usize = 40;
/// Environment variable with a prefix of all testbed names. Two checkouts with different prefixes can run tests on one
/// machine.
const TESTBED_PREFIX_ENV_VARIABLE: &str = "COREWARD_TESTBED_PREFIX";

/// Ownership of a testbed's name, by a lock on the testbed's owner file. The kernel releases the lock when the owning
/// process ends.
#[derive(Debug)]
pub(crate) struct TestbedInstance {
    /// Full name of the testbed, which includes the prefix.
    name: String,
    _owner_file_lock: File,
}

impl TestbedInstance {
    /// Acquires a testbed name, and removes the remains of a killed testbed with this name.
    pub(crate) fn acquire(name: &str) -> anyhow::Result<Self> {
        if name.is_empty() {
            bail!("testbed instance \"\": expected a name");
        }
        Self::acquire_prefixed_name(&add_prefix_from_env(name))
    }

    fn acquire_prefixed_name(name: &str) -> anyhow::Result<Self> {
        if name.len() > MAX_TESTBED_NAME_LENGTH || !name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) {
            bail!("testbed instance {name:?}: expected 1 to {MAX_TESTBED_NAME_LENGTH} lower-case letters and digits");
        }
        let owner_file_lock = lock_owner_file(name)?;
        let instance = Self { name: name.to_owned(), _owner_file_lock: owner_file_lock };
        fs::write(instance.directory().join(OWNER_FILE_NAME), format!("{}\n", std::process::id()))?;
        instance.remove_leftovers()?;
        mount_bpf_filesystem()?;
        fs::create_dir_all(instance.pin_directory())
            .with_context(|| format!("cannot create {}", instance.pin_directory().display()))?;
        Ok(instance)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the directory for the testbed's configurations, logs and results.
    pub(crate) fn directory(&self) -> PathBuf {
        testbed_directory(&self.name)
    }

    /// Returns the directory for the testbed's pinned BPF objects.
    pub(crate) fn pin_directory(&self) -> PathBuf {
        testbed_pin_directory(&self.name)
    }

    pub(crate) fn namespace(&self, role: &str) -> NetworkNamespace {
        NetworkNamespace::new(format!("{}{role}", namespace_name_prefix(&self.name)))
    }

    /// Removes the testbed's processes, then its namespaces, then its pins and files. Continues after a failure and
    /// returns the first failure.
    fn remove_leftovers(&self) -> anyhow::Result<()> {
        let mut first_failure = Ok(());
        for namespace in namespace::list_namespaces_with_prefix(&namespace_name_prefix(&self.name)) {
            first_failure = first_failure.and(namespace.remove());
        }
        first_failure = first_failure.and(ok_if_not_found(fs::remove_dir_all(self.pin_directory())));
        for entry in fs::read_dir(self.directory()).into_iter().flatten().flatten() {
            if entry.file_name() == OWNER_FILE_NAME {
                continue;
            }
            let path = entry.path();
            // Unmount a file system that a killed testbed has mounted here. This fails for all other paths.
            let _ = nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH);
            let removal_result = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            first_failure = first_failure.and(ok_if_not_found(removal_result));
        }
        first_failure
    }
}

impl Drop for TestbedInstance {
    fn drop(&mut self) {
        if let Err(error) = self.remove_leftovers() {
            tracing::warn!(
                event = "testbed-left",
                testbed = self.name,
                error = format!("{error:#}"),
                "cannot remove a testbed"
            );
        }
        // The parent directories stay, because another testbed may be creating its directory in them.
        let _ = fs::remove_file(self.directory().join(OWNER_FILE_NAME));
        let _ = fs::remove_dir(self.directory());
    }
}

/// Returns a testbed name that is unique to this process, so that two processes can run `command` at the same time.
/// Removes the remains of killed testbeds with the same command. Fails when a removal fails.
pub fn unique_testbed_name(command: &str) -> anyhow::Result<String> {
    let has_pid_after_command = |name: &String| {
        let pid_text = name.strip_prefix(&add_prefix_from_env(command)).unwrap_or_default();
        !pid_text.is_empty() && pid_text.bytes().all(|b| b.is_ascii_digit())
    };
    remove_unowned_testbeds(list_testbed_names().filter(has_pid_after_command))?;
    Ok(format!("{command}{}", std::process::id()))
}

/// Removes the remains of killed testbeds with these names, or of all killed testbeds if `names` is empty. Keeps
/// testbeds in use. Returns the full names of the removed testbeds. Fails when a removal fails.
pub fn remove_killed_testbeds(names: &[String]) -> anyhow::Result<Vec<String>> {
    if names.is_empty() {
        return remove_unowned_testbeds(list_testbed_names());
    }
    let full_names: Vec<String> = names.iter().map(|name| add_prefix_from_env(name)).collect();
    remove_unowned_testbeds(list_testbed_names().filter(|name| full_names.contains(name)))
}

/// Returns the paths of the directories and namespaces of a running or killed testbed.
pub fn find_leftover_paths(name: &str) -> Vec<PathBuf> {
    let full_name = add_prefix_from_env(name);
    let directories =
        [testbed_directory(&full_name), testbed_pin_directory(&full_name)].into_iter().filter(|path| path.exists());
    let namespaces = namespace::list_namespaces_with_prefix(&namespace_name_prefix(&full_name));
    directories.chain(namespaces.iter().map(NetworkNamespace::namespace_file_path)).collect()
}

fn remove_unowned_testbeds(names: impl Iterator<Item = String>) -> anyhow::Result<Vec<String>> {
    let mut removed_names = Vec::new();
    for name in names {
        if find_running_owner_pid(&name).is_some() {
            continue;
        }
        match TestbedInstance::acquire_prefixed_name(&name) {
            Ok(instance) => drop(instance),
            // Another process has acquired the name in the meantime.
            Err(_) if find_running_owner_pid(&name).is_some() => continue,
            Err(error) => return Err(error),
        }
        removed_names.push(name);
    }
    Ok(removed_names)
}

/// Returns the full names of all running or killed testbeds whose names start with this process's prefix.
fn list_testbed_names() -> impl Iterator<Item = String> {
    let directory_entries = fs::read_dir(RUN_DIRECTORY).into_iter().flatten().flatten();
    let name_prefix = add_prefix_from_env("");
    directory_entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(move |name| name.starts_with(&name_prefix))
}

fn add_prefix_from_env(name: &str) -> String {
    std::env::var(TESTBED_PREFIX_ENV_VARIABLE).unwrap_or_default() + name
}

fn testbed_directory(name: &str) -> PathBuf {
    Path::new(RUN_DIRECTORY).join(name)
}

fn testbed_pin_directory(name: &str) -> PathBuf {
    Path::new(PIN_DIRECTORY).join(name)
}

/// Returns the prefix of a testbed's namespace names. Testbed names have no dash, so no prefix is the start of another.
fn namespace_name_prefix(name: &str) -> String {
    format!("cw{name}-")
}

/// Returns the process id of the owner of testbed `name`, or `None` if it has no running owner. Does not lock the owner
/// file, so another process can acquire the name.
fn find_running_owner_pid(name: &str) -> Option<String> {
    let owner_file_path = testbed_directory(name).join(OWNER_FILE_NAME);
    let owner_file = File::open(&owner_file_path).ok()?;
    let mut lock = build_exclusive_file_lock();
    let query_result = fcntl(&owner_file, FcntlArg::F_OFD_GETLK(&mut lock));
    // A file without a process id belongs to an owner that is about to lock it.
    let is_locked = query_result.is_err() || lock.l_type != libc::F_UNLCK as libc::c_short;
    (is_locked || read_owner_pid(name).is_none()).then(|| read_owner_pid(name).unwrap_or_else(|| "unknown".to_owned()))
}

fn read_owner_pid(name: &str) -> Option<String> {
    let pid = fs::read_to_string(testbed_directory(name).join(OWNER_FILE_NAME)).ok()?;
    (!pid.is_empty()).then(|| pid.trim().to_owned())
}

fn lock_owner_file(name: &str) -> anyhow::Result<File> {
    let directory = testbed_directory(name);
    let owner_file_path = directory.join(OWNER_FILE_NAME);
    loop {
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let owner_file =
            match File::options().read(true).write(true).create(true).truncate(false).open(&owner_file_path) {
                Ok(file) => file,
                // The former owner has just removed the directory.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error).with_context(|| format!("cannot open {}", owner_file_path.display())),
            };
        if fcntl(&owner_file, FcntlArg::F_OFD_SETLK(&build_exclusive_file_lock())).is_err() {
            let owner_pid = read_owner_pid(name).unwrap_or_else(|| "unknown".to_owned());
            bail!("testbed {name} is in use by process {owner_pid}");
        }
        // The former owner may have removed the file after it was opened here and before it was locked.
        let is_same_file = |path_metadata: fs::Metadata| {
            owner_file.metadata().is_ok_and(|file_metadata| file_metadata.ino() == path_metadata.ino())
        };
        if fs::metadata(&owner_file_path).is_ok_and(is_same_file) {
            return Ok(owner_file);
        }
    }
}

/// Returns the description of an exclusive lock of a whole file, for fcntl(2). The lock belongs to the open file, so
/// even the same process cannot acquire a name twice.
fn build_exclusive_file_lock() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

fn ok_if_not_found(outcome: io::Result<()>) -> anyhow::Result<()> {
    match outcome {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Mounts the BPF file system unless it is mounted. Debian mounts it at boot, but containers and rescue systems do not.
fn mount_bpf_filesystem() -> anyhow::Result<()> {
    let filesystem_type = nix::sys::statfs::statfs(BPF_FILESYSTEM_PATH).map(|status| status.filesystem_type());
    if filesystem_type == Ok(nix::sys::statfs::BPF_FS_MAGIC) {
        return Ok(());
    }
    nix::mount::mount(Some("bpf"), BPF_FILESYSTEM_PATH, Some("bpf"), nix::mount::MsFlags::empty(), None::<&str>)
        .with_context(|| format!("cannot mount the BPF file system at {BPF_FILESYSTEM_PATH}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{find_missing_testbed_rights, skip_if};

    #[test]
    fn invalid_testbed_names_are_rejected() {
        for name in ["a-b", "UPPER", &"a".repeat(41), "a/b"] {
            let error = TestbedInstance::acquire(name).unwrap_err().to_string();
            assert!(error.contains("expected 1 to 40 lower-case letters and digits"), "{error}");
        }
        assert!(TestbedInstance::acquire("").unwrap_err().to_string().contains("expected a name"));
    }

    #[test]
    fn owner_query_does_not_create_a_directory() {
        skip_if!(find_missing_testbed_rights());
        let short_name = unique_testbed_name("tinstance").unwrap();
        let full_name = add_prefix_from_env(&short_name);
        assert_eq!(find_running_owner_pid(&full_name), None);
        let instance = TestbedInstance::acquire(&short_name).unwrap();
        assert_eq!(find_running_owner_pid(&full_name), Some(std::process::id().to_string()));
        assert!(TestbedInstance::acquire(&short_name).unwrap_err().to_string().contains("is in use by process"));
        assert_eq!(remove_killed_testbeds(std::slice::from_ref(&short_name)).unwrap(), Vec::<String>::new());
        assert!(!find_leftover_paths(&short_name).is_empty());
        drop(instance);
        assert_eq!(find_leftover_paths(&short_name), Vec::<PathBuf>::new());

        fs::create_dir_all(testbed_directory(&full_name)).unwrap();
        fs::write(testbed_directory(&full_name).join(OWNER_FILE_NAME), "1\n").unwrap();
        fs::write(testbed_directory(&full_name).join("log"), "").unwrap();
        assert_eq!(find_running_owner_pid(&full_name), None);
        assert_eq!(remove_killed_testbeds(std::slice::from_ref(&short_name)).unwrap(), [full_name]);
        assert_eq!(find_leftover_paths(&short_name), Vec::<PathBuf>::new());
    }
}
