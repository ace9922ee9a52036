//! Debian kernel: its image, and the guest's modules in the order of their dependencies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::process::{command_tied_to_parent, run};

/// Kernel modules that guests load, without their dependencies. Some of them are built into Debian's kernels.
pub const MODULES: [&str; 19] = [
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
    // ext4 loads it by its alias (fs/ext4/super.c, crypto_alloc_shash), which is not a dependency.
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

/// Extracts the image and the needed modules of a kernel package into `folder`. Fails when the package lacks one of
/// them.
pub fn extract(archive: &Path, folder: &Path, busybox: &Path) -> Result<()> {
    let unpacked = folder.join("unpacked");
    fs::create_dir_all(folder.join("modules"))?;
    run(command_tied_to_parent("dpkg").arg("-x").arg(archive).arg(&unpacked))?;
    let images = fs::read_dir(unpacked.join("boot"))?.collect::<std::io::Result<Vec<_>>>()?;
    let image = images.iter().map(fs::DirEntry::path).find(|path| path.display().to_string().contains("/vmlinuz-"));
    fs::rename(image.with_context(|| format!("no vmlinuz in {}", archive.display()))?, folder.join("vmlinuz"))?;
    let mut found = BTreeMap::new();
    let mut built_in = String::new();
    list_modules(&unpacked.join("lib/modules"), &mut found, &mut built_in)?;
    let mut missing: Vec<String> = MODULES.map(str::to_string).to_vec();
    while let Some(name) = missing.pop() {
        let target = folder.join("modules").join(format!("{name}.ko"));
        if target.exists() || is_built_in(&built_in, &name) {
            continue;
        }
        let path = found.get(&name).with_context(|| format!("no module {name} in {}", archive.display()))?;
        fs::write(&target, read_module(path, busybox)?)?;
        missing.extend(dependencies(&fs::read(&target)?));
    }
    fs::remove_dir_all(unpacked)?;
    Ok(())
}

/// Returns names and contents of these modules and their dependencies, in the order of loading. Fails on read errors.
pub fn load_order(folder: &Path, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
    let mut order: Vec<(String, Vec<u8>)> = Vec::new();
    for name in names {
        add_with_dependencies(folder, name, &mut order)?;
    }
    Ok(order)
}

fn add_with_dependencies(folder: &Path, name: &str, order: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let path = folder.join("modules").join(format!("{name}.ko"));
    // A module without an extracted file is built into the kernel.
    if order.iter().any(|(present, _)| present == name) || !path.exists() {
        return Ok(());
    }
    let content = fs::read(&path)?;
    for dependency in dependencies(&content) {
        add_with_dependencies(folder, &dependency, order)?;
    }
    order.push((name.to_string(), content));
    Ok(())
}

/// Adds the paths of all modules below `folder` by name (with underscores), and the contents of `modules.builtin`.
fn list_modules(folder: &Path, found: &mut BTreeMap<String, PathBuf>, built_in: &mut String) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            list_modules(&entry.path(), found, built_in)?;
        } else if name == "modules.builtin" {
            built_in.push_str(&fs::read_to_string(entry.path())?);
        } else if let Some((stem, "" | ".xz")) = name.split_once(".ko") {
            found.insert(stem.replace('-', "_"), entry.path());
        }
    }
    Ok(())
}

fn is_built_in(list: &str, name: &str) -> bool {
    list.lines()
        .filter_map(|line| line.rsplit('/').next()?.strip_suffix(".ko"))
        .any(|stem| stem.replace('-', "_") == name)
}

fn read_module(path: &Path, busybox: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|extension| extension == "ko") {
        return Ok(fs::read(path)?);
    }
    let output = command_tied_to_parent(busybox).args(["xz", "-dc"]).arg(path).output()?;
    anyhow::ensure!(output.status.success(), "{} does not unpack", path.display());
    Ok(output.stdout)
}

/// Returns the names of a module's dependencies, from the line `depends=a,b` of modpost in its section .modinfo.
fn dependencies(module: &[u8]) -> Vec<String> {
    const TAG: &[u8] = b"\0depends=";
    let Some(at) = module.windows(TAG.len()).position(|window| window == TAG) else { return Vec::new() };
    let rest = &module[at + TAG.len()..];
    let value = String::from_utf8_lossy(&rest[..rest.iter().position(|byte| *byte == 0).unwrap_or(0)]).into_owned();
    value.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_modinfo() {
        assert_eq!(dependencies(b"\x7fELF\0license=GPL\0depends=dca,i2c-algo-bit\0x"), ["dca", "i2c_algo_bit"]);
        assert!(dependencies(b"\0depends=\0").is_empty());
        assert!(dependencies(b"\x7fELF").is_empty());
    }

    #[test]
    fn built_in_names_match_whole() {
        let list = "kernel/drivers/virtio/virtio_pci.ko\nkernel/drivers/dca/dca-core.ko\n";
        assert!(is_built_in(list, "virtio_pci") && is_built_in(list, "dca_core"));
        assert!(!is_built_in(list, "pci"));
    }
}
