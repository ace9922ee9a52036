//! File system of a guest, as a cpio archive in the format "newc"
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::host_commands::{command_tied_to_parent, run_command_to_end};
use crate::kernel;
use crate::packages::FetchedPackages;

const DIRECTORY_MODE: u32 = 0o040_755;
pub const EXECUTABLE_MODE: u32 = 0o100_755;
/// Mode of a file that all users may read.
pub const WORLD_READABLE_MODE: u32 = 0o100_644;
/// Mode of a file that only its owner may read, because `coreward` rejects secrets that other users can read.
const OWNER_ONLY_MODE: u32 = 0o100_600;

/// cpio archive to which files are added.
#[derive(Default)]
struct CpioArchive {
    archive_bytes: Vec<u8>,
    entry_names: BTreeSet<String>,
}

impl CpioArchive {
    /// Adds a file and its parent folders. `name` has no leading slash. A second file with the same name is ignored.
    fn add_entry_with_parents(&mut self, name: &str, mode: u32, content: &[u8]) {
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.add_entry_with_parents(parent, DIRECTORY_MODE, &[]);
        }
        if self.entry_names.insert(name.to_string()) {
            self.append_entry(name, mode, content);
        }
    }

    fn append_entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        let inode_number = self.entry_names.len() as u32;
        let [content_size, name_size] = [content.len() as u32, name.len() as u32 + 1];
        self.archive_bytes.extend_from_slice(b"070701");
        // Fields: inode, mode, user, group, links, time, size, device (2), device of a node (2), length of the name,
        // checksum
        for field in [inode_number, mode, 0, 0, 1, 0, content_size, 0, 0, 0, 0, name_size, 0] {
            self.archive_bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.archive_bytes.extend_from_slice(name.as_bytes());
        self.archive_bytes.push(0);
        self.pad_to_alignment();
        self.archive_bytes.extend_from_slice(content);
        self.pad_to_alignment();
    }

    fn pad_to_alignment(&mut self) {
        self.archive_bytes.resize(self.archive_bytes.len().next_multiple_of(4), 0);
    }

    fn append_trailer(mut self) -> Vec<u8> {
        self.append_entry("TRAILER!!!", 0, &[]);
        self.archive_bytes
    }
}

/// Builds the file system of a guest. It contains busybox, ethtool, the `coreward_binary` binary with its libraries,
/// the kernel modules and `files` (pairs of name without leading slash and content). Fails with the name of a missing
/// part.
pub fn build_guest_initrd(
    packages: &FetchedPackages,
    kernel_directory: &Path,
    modules: &[&str],
    coreward_binary: &Path,
    files: &[(&str, String)],
) -> Result<Vec<u8>> {
    let mut archive = CpioArchive::default();
    for directory in ["proc", "sys", "dev", "tmp", "run", "etc"] {
        archive.add_entry_with_parents(directory, DIRECTORY_MODE, &[]);
    }
    archive.add_entry_with_parents("init", EXECUTABLE_MODE, include_bytes!("../guest/init"));
    archive.add_entry_with_parents("bin/busybox", EXECUTABLE_MODE, &read_file(&packages.busybox_path())?);
    add_modules(&mut archive, kernel_directory, modules)?;
    add_ethtool(&mut archive, packages)?;
    add_coreward(&mut archive, coreward_binary, &packages.stripped_binary_path())?;
    for (name, content) in files {
        archive.add_entry_with_parents(name, OWNER_ONLY_MODE, content.as_bytes());
    }
    Ok(archive.append_trailer())
}

/// Builds an initial file system that loads the kernel modules, mounts the first disk, copies `files` onto it and
/// starts its init. Fails with the name of a missing part.
pub fn build_disk_boot_initrd(
    packages: &FetchedPackages,
    kernel_directory: &Path,
    modules: &[&str],
    files: &[(&str, u32, String)],
) -> Result<Vec<u8>> {
    let mut archive = CpioArchive::default();
    for directory in ["dev", "disk"] {
        archive.add_entry_with_parents(directory, DIRECTORY_MODE, &[]);
    }
    archive.add_entry_with_parents("init", EXECUTABLE_MODE, include_bytes!("../guest/init-disk"));
    archive.add_entry_with_parents("bin/busybox", EXECUTABLE_MODE, &read_file(&packages.busybox_path())?);
    add_modules(&mut archive, kernel_directory, modules)?;
    for (name, mode, content) in files {
        archive.add_entry_with_parents(&format!("files/{name}"), *mode, content.as_bytes());
    }
    Ok(archive.append_trailer())
}

/// Adds the kernel modules with their dependencies, and the file `modules/order`, which has the order of loading.
fn add_modules(archive: &mut CpioArchive, kernel_directory: &Path, modules: &[&str]) -> Result<()> {
    let mut loading_order = String::new();
    for (name, content) in kernel::modules_in_load_order(kernel_directory, modules)? {
        archive.add_entry_with_parents(&format!("modules/{name}.ko"), EXECUTABLE_MODE, &content);
        loading_order += &format!("{name}\n");
    }
    archive.add_entry_with_parents("modules/order", EXECUTABLE_MODE, loading_order.as_bytes());
    Ok(())
}

/// Adds ethtool and its libraries in a separate folder. They come from Debian's packages, whereas `coreward` comes from
/// this machine and has another C library.
fn add_ethtool(archive: &mut CpioArchive, packages: &FetchedPackages) -> Result<()> {
    let (program, libraries) = packages.ethtool_and_library_paths();
    archive.add_entry_with_parents("ethtool/ethtool", EXECUTABLE_MODE, &read_file(&program)?);
    for library in libraries {
        let file_name = library.file_name().context("a library has a name")?.to_string_lossy().into_owned();
        archive.add_entry_with_parents(&format!("ethtool/{file_name}"), EXECUTABLE_MODE, &read_file(&library)?);
    }
    let wrapper_script =
        "#!/bin/sh\nexec /ethtool/ld-linux-x86-64.so.2 --library-path /ethtool /ethtool/ethtool \"$@\"\n";
    archive.add_entry_with_parents("bin/ethtool", EXECUTABLE_MODE, wrapper_script.as_bytes());
    Ok(())
}

/// Adds the `coreward` binary without its debug information, by way of the temporary file `stripped_path`. Also adds
/// the libraries that `ldd` lists, at the same paths.
fn add_coreward(archive: &mut CpioArchive, coreward_binary: &Path, stripped_path: &Path) -> Result<()> {
    run_command_to_end(command_tied_to_parent("strip").arg("-o").arg(stripped_path).arg(coreward_binary))
        .context("binutils' strip is needed")?;
    archive.add_entry_with_parents("bin/coreward", EXECUTABLE_MODE, &read_file(stripped_path)?);
    for library_path in run_command_to_end(command_tied_to_parent("ldd").arg(coreward_binary))?
        .split_whitespace()
        .filter(|ldd_word| ldd_word.starts_with('/'))
    {
        archive.add_entry_with_parents(
            library_path.trim_start_matches('/'),
            EXECUTABLE_MODE,
            &read_file(Path::new(library_path))?,
        );
    }
    Ok(())
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("{} cannot be read", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_has_folders_before_files_and_is_padded_to_4_bytes() {
        let mut archive = CpioArchive::default();
        archive.add_entry_with_parents("a/b/file", EXECUTABLE_MODE, b"12345");
        archive.add_entry_with_parents("a/b/other", EXECUTABLE_MODE, b"");
        let bytes = archive.append_trailer();
        let archive_text = String::from_utf8_lossy(&bytes).into_owned();
        let entry_names: Vec<_> =
            archive_text.split("070701").skip(1).map(|entry| entry[104..].split('\0').next().unwrap()).collect();
        assert_eq!(entry_names, ["a", "a/b", "a/b/file", "a/b/other", "TRAILER!!!"]);
        assert_eq!(bytes.len() % 4, 0);
    }
}
