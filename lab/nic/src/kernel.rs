//! Kernel of a guest from a Debian package, with its image and the modules in the order of their dependencies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::host_commands::{command_tied_to_parent, run_command_to_end};

/// Kernel modules that guests load, without their dependencies. Some of them are built into Debian's kernels.
pub const GUEST_KERNEL_MODULES: [&str; 19] = [
    "virtio_pci",
    "virtio_net",
    "igb",
    "vmxnet3",
    "sch_ingress",
    "cls_bpf",
    "veth",
    "bridge",
    "virtio_blk",
    "ext4",
    // ext4 loads this module by its alias (fs/ext4/super.c, crypto_alloc_shash), which is not a dependency.
    "crc32c_generic",
    "tcp_diag",
    "ip_vs",
    "ip_vs_rr",
    "ip_vs_mh",
    "bonding",
    "8021q",
    "ipip",
    "fou",
];

/// Extracts the image and the needed modules of a kernel package into `kernel_directory`. Fails when one of them is
/// missing.
pub fn extract_kernel(archive: &Path, kernel_directory: &Path, busybox: &Path) -> Result<()> {
    let unpacked_package = kernel_directory.join("unpacked");
    fs::create_dir_all(kernel_directory.join("modules"))?;
    run_command_to_end(command_tied_to_parent("dpkg").arg("-x").arg(archive).arg(&unpacked_package))?;
    let boot_files = fs::read_dir(unpacked_package.join("boot"))?.collect::<std::io::Result<Vec<_>>>()?;
    let image_path =
        boot_files.iter().map(fs::DirEntry::path).find(|path| path.display().to_string().contains("/vmlinuz-"));
    fs::rename(
        image_path.with_context(|| format!("no vmlinuz in {}", archive.display()))?,
        kernel_directory.join("vmlinuz"),
    )?;
    let mut module_paths = BTreeMap::new();
    let mut built_in_list = String::new();
    collect_module_paths(&unpacked_package.join("lib/modules"), &mut module_paths, &mut built_in_list)?;
    let mut missing_modules: Vec<String> = GUEST_KERNEL_MODULES.map(str::to_string).to_vec();
    while let Some(name) = missing_modules.pop() {
        let target_path = kernel_directory.join("modules").join(format!("{name}.ko"));
        if target_path.exists() || is_built_in(&built_in_list, &name) {
            continue;
        }
        let module_path =
            module_paths.get(&name).with_context(|| format!("no module {name} in {}", archive.display()))?;
        fs::write(&target_path, read_uncompressed_module(module_path, busybox)?)?;
        missing_modules.extend(module_dependencies(&fs::read(&target_path)?));
    }
    fs::remove_dir_all(unpacked_package)?;
    Ok(())
}

/// Returns the names and contents of these modules and their dependencies, in loading order. Fails on read errors.
pub fn modules_in_load_order(kernel_directory: &Path, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
    let mut loaded_modules: Vec<(String, Vec<u8>)> = Vec::new();
    for name in names {
        add_module_with_dependencies(kernel_directory, name, &mut loaded_modules)?;
    }
    Ok(loaded_modules)
}

fn add_module_with_dependencies(
    kernel_directory: &Path,
    name: &str,
    loaded_modules: &mut Vec<(String, Vec<u8>)>,
) -> Result<()> {
    let module_path = kernel_directory.join("modules").join(format!("{name}.ko"));
    // A module without an extracted file is built into the kernel.
    if loaded_modules.iter().any(|(loaded_name, _)| loaded_name == name) || !module_path.exists() {
        return Ok(());
    }
    let module_bytes = fs::read(&module_path)?;
    for dependency in module_dependencies(&module_bytes) {
        add_module_with_dependencies(kernel_directory, &dependency, loaded_modules)?;
    }
    loaded_modules.push((name.to_string(), module_bytes));
    Ok(())
}

/// Adds the path of each module below `directory` to `module_paths`, by module name (with underscores). Adds the
/// contents of `modules.builtin` to `built_in_list`.
fn collect_module_paths(
    directory: &Path,
    module_paths: &mut BTreeMap<String, PathBuf>,
    built_in_list: &mut String,
) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let directory_entry = entry?;
        let name = directory_entry.file_name().to_string_lossy().into_owned();
        if directory_entry.file_type()?.is_dir() {
            collect_module_paths(&directory_entry.path(), module_paths, built_in_list)?;
        } else if name == "modules.builtin" {
            built_in_list.push_str(&fs::read_to_string(directory_entry.path())?);
        } else if let Some((stem, "" | ".xz")) = name.split_once(".ko") {
            module_paths.insert(stem.replace('-', "_"), directory_entry.path());
        }
    }
    Ok(())
}

fn is_built_in(built_in_list: &str, name: &str) -> bool {
    built_in_list
        .lines()
        .filter_map(|line| line.rsplit('/').next()?.strip_suffix(".ko"))
        .any(|stem| stem.replace('-', "_") == name)
}

fn read_uncompressed_module(path: &Path, busybox: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|extension| extension == "ko") {
        return Ok(fs::read(path)?);
    }
    let output = command_tied_to_parent(busybox).args(["xz", "-dc"]).arg(path).output()?;
    anyhow::ensure!(output.status.success(), "{} does not unpack", path.display());
    Ok(output.stdout)
}

/// Returns the names of a module's dependencies. modpost writes them as `depends=a,b` into the section .modinfo.
fn module_dependencies(module: &[u8]) -> Vec<String> {
    const MODULE_DEPENDENCIES_TAG: &[u8] = b"\0depends=";
    let Some(tag_offset) =
        module.windows(MODULE_DEPENDENCIES_TAG.len()).position(|window| window == MODULE_DEPENDENCIES_TAG)
    else {
        return Vec::new();
    };
    let bytes_after_tag = &module[tag_offset + MODULE_DEPENDENCIES_TAG.len()..];
    let dependency_list =
        String::from_utf8_lossy(&bytes_after_tag[..bytes_after_tag.iter().position(|byte| *byte == 0).unwrap_or(0)])
            .into_owned();
    dependency_list.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_dependencies_are_parsed_from_the_modinfo_section() {
        assert_eq!(module_dependencies(b"\x7fELF\0license=GPL\0depends=dca,i2c-algo-bit\0x"), ["dca", "i2c_algo_bit"]);
        assert!(module_dependencies(b"\0depends=\0").is_empty());
        assert!(module_dependencies(b"\x7fELF").is_empty());
    }

    #[test]
    fn only_whole_module_names_are_found_among_built_in_modules() {
        let built_in_list = "kernel/drivers/virtio/virtio_pci.ko\nkernel/drivers/dca/dca-core.ko\n";
        assert!(is_built_in(built_in_list, "virtio_pci") && is_built_in(built_in_list, "dca_core"));
        assert!(!is_built_in(built_in_list, "pci"));
    }
}
