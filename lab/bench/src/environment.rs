//! Build, machine, kernel and day of a figure.

use std::fs;
use std::process::Command;

/// The cargo profile that built this program: "dist" for published figures.
pub const PROFILE: &str = env!("COREWARD_PROFILE");

/// Describes build, commit, machine, kernel and day in one sentence.
pub fn sentence() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpu_info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|(_, name)| name);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let commit = output("git", &["describe", "--always", "--dirty"]).unwrap_or_else(|| "unknown".to_owned());
    let day = output("date", &["-u", "+%F"]).unwrap_or_default();
    format!(
        "Measured {day} at commit {commit}, profile {PROFILE}, on {} ({cpus} CPUs), Linux {}.",
        model.unwrap_or("an unknown CPU"),
        kernel.trim(),
    )
}

fn output(command: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(command).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentence_names_profile_and_kernel() {
        let sentence = sentence();
        assert!(sentence.contains(&format!("profile {PROFILE}")) && sentence.contains("Linux "), "{sentence}");
        assert!(!PROFILE.is_empty() && PROFILE != "build", "{PROFILE}");
    }
}
