//! What an earlier process left, for those who only want to look.

use std::path::Path;

use super::link::XdpLink;
use super::program::Maps;

/// What [`LoadBalancer::load`](super::LoadBalancer::load) would not take over of what is pinned below `pin_directory`;
/// `None`: all is well, or nothing is at work there.
pub fn pinned_problem(pin_directory: &Path) -> Option<String> {
    let directory = pin_directory.join("lb");
    if !directory.join("link").exists() {
        return None;
    }
    Maps::take_over(&directory).err().map(|error| format!("{error:#}"))
}

/// The id of the program at the device by the link that is pinned below `pin_directory`; `None`: there is no such link.
///
/// # Errors
/// When the link cannot be read.
pub fn pinned_program(pin_directory: &Path) -> anyhow::Result<Option<u32>> {
    XdpLink::pinned(&pin_directory.join("lb").join("link"))?.map(|link| link.program()).transpose()
}
