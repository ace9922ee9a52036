//! Directory that contains a load balancer's pinned maps.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use super::program::has_pinned_map;
use crate::pins::ensure_bpf_file_system;

/// Returns the load balancer's directory below the configured `pin_directory`, and creates it if it is missing. Fails
/// when the directory is not on a BPF file system.
pub(super) fn ensure_lb_directory(pin_directory: &Path) -> anyhow::Result<PathBuf> {
    let lb_directory = pin_directory.join("lb");
    fs::create_dir_all(&lb_directory).with_context(|| lb_directory.display().to_string())?;
    ensure_bpf_file_system(pin_directory)?;
    Ok(lb_directory)
}

/// Returns the load balancer's directory below `pin_directory`. Fails when no map is pinned there.
pub(super) fn find_lb_directory(pin_directory: &Path) -> anyhow::Result<PathBuf> {
    let lb_directory = pin_directory.join("lb");
    ensure!(
        has_pinned_map(&lb_directory),
        "no load balancer has pinned anything in {}: expected its `pin_directory`",
        pin_directory.display()
    );
    Ok(lb_directory)
}
