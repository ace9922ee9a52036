//! Execution of the repairs that `coreward doctor --fix` may make.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use nix::mount::{MsFlags, mount};

use crate::checks::DoctorCheck;
use crate::finding::{AutomaticFix, Finding, sysctl_name};

/// Path of the drop-in file that sets sysctls at the next boot.
pub const SYSCTL_DROP_IN_PATH: &str = "/etc/sysctl.d/90-coreward.conf";

/// Executes the repairs of all findings. Returns a sentence about each repair that was executed or has failed.
pub fn apply_fixes(findings: &[(&'static DoctorCheck, Finding)]) -> Vec<String> {
    let mut repair_reports = Vec::new();
    for (check, finding) in findings {
        for fix in finding.remedies.iter().filter_map(|remedy| remedy.automatic_fix.as_ref()) {
            repair_reports.push(match apply_fix(fix, check.name) {
                Ok(report) => report,
                Err(error) => format!("NOT done: {}: {error:#}", fix.shell_command()),
            });
        }
    }
    repair_reports
}

fn apply_fix(fix: &AutomaticFix, check_name: &str) -> anyhow::Result<String> {
    match fix {
        AutomaticFix::SetSysctl { path, value } => {
            let file = Path::new("/proc/sys").join(path);
            let previous_value = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
            fs::write(&file, value).with_context(|| file.display().to_string())?;
            let sysctl_name = sysctl_name(path);
            let persistence_note =
                match write_drop_in_line(Path::new(SYSCTL_DROP_IN_PATH), &sysctl_name, value, check_name) {
                    Ok(()) => format!("also at the next boot, by {SYSCTL_DROP_IN_PATH}"),
                    Err(error) => format!("until the next boot only ({SYSCTL_DROP_IN_PATH}: {error})"),
                };
            Ok(format!("{sysctl_name}: {} -> {value}, {persistence_note}", previous_value.trim()))
        }
        AutomaticFix::WriteFile { path, value } => {
            let previous_value = fs::read_to_string(path).with_context(|| path.display().to_string())?;
            fs::write(path, value).with_context(|| path.display().to_string())?;
            let until_next_boot_note = "until the next boot, unless another program sets it again";
            Ok(format!("{}: {} -> {value}, {until_next_boot_note}", path.display(), previous_value.trim()))
        }
        AutomaticFix::MountBpf => {
            let mount_point = PathBuf::from("/sys/fs/bpf");
            mount(Some("bpf"), &mount_point, Some("bpf"), MsFlags::empty(), None::<&str>)
                .with_context(|| format!("mounting at {}", mount_point.display()))?;
            Ok(format!("{}: mounted, until the next boot (systemd does it at boot)", mount_point.display()))
        }
        AutomaticFix::RestrictToOwner(path) => {
            let previous_mode =
                fs::metadata(path).with_context(|| path.display().to_string())?.permissions().mode() & 0o777;
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).with_context(|| path.display().to_string())?;
            Ok(format!("{}: mode {previous_mode:o} -> 600", path.display()))
        }
    }
}

const SYSCTL_DROP_IN_HEADER: &str = "\
# By `coreward doctor --fix`. The name behind each line is the check (`coreward doctor --list`).\n\
                    # Delete a line, or the file, to undo it for the next boot.\n";

/// Writes a line `NAME = VALUE` into the drop-in file, and removes an earlier line for the same sysctl.
fn write_drop_in_line(file: &Path, sysctl_name: &str, value: &str, check_name: &str) -> io::Result<()> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => SYSCTL_DROP_IN_HEADER.to_owned(),
        text => text?,
    };
    let sets_same_sysctl = |line: &&str| line.split('=').next().is_some_and(|key| key.trim() == sysctl_name);
    let mut new_text: String =
        text.lines().filter(|line| !sets_same_sysctl(line)).map(|line| format!("{line}\n")).collect();
    new_text += &format!("# {check_name}\n{sysctl_name} = {value}\n");
    fs::write(file, remove_orphan_comments(&new_text))
}

/// Returns the text without comments whose sysctl line has been removed.
fn remove_orphan_comments(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let is_orphan_comment = |line_index: usize| {
        let is_comment = |line: &str| line.starts_with("# ") && !SYSCTL_DROP_IN_HEADER.contains(line);
        is_comment(lines[line_index]) && lines.get(line_index + 1).is_none_or(|next| is_comment(next))
    };
    (0..lines.len()).filter(|line_index| !is_orphan_comment(*line_index)).map(|at| format!("{}\n", lines[at])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_in_file_has_one_line_per_sysctl() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("90.conf");
        write_drop_in_line(&file, "net.ipv4.conf.eth0.arp_ignore", "1", "arp-ignore").unwrap();
        write_drop_in_line(&file, "net.core.bpf_jit_enable", "1", "jit").unwrap();
        write_drop_in_line(&file, "net.ipv4.conf.eth0.arp_ignore", "2", "arp-ignore").unwrap();
        let expected = "# jit\nnet.core.bpf_jit_enable = 1\n# arp-ignore\nnet.ipv4.conf.eth0.arp_ignore = 2\n";
        assert_eq!(fs::read_to_string(&file).unwrap(), format!("{SYSCTL_DROP_IN_HEADER}{expected}"));
        assert!(write_drop_in_line(&directory.path().join("no/90.conf"), "a", "1", "jit").is_err());
    }

    #[test]
    fn applied_and_failed_fixes_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("rps_cpus");
        fs::write(&file, "f\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        let write_fix = AutomaticFix::WriteFile { path: file.clone(), value: "0" };
        assert!(apply_fix(&write_fix, "rps").unwrap().contains("rps_cpus: f -> 0, until the next boot"));
        assert_eq!(fs::read_to_string(&file).unwrap(), "0");
        assert_eq!(
            apply_fix(&AutomaticFix::RestrictToOwner(file.clone()), "store").unwrap(),
            format!("{}: mode 644 -> 600", file.display())
        );
        let failing_finding = Finding::warning("x", "y")
            .with_automatic_fix(AutomaticFix::WriteFile { path: directory.path().join("no"), value: "0" });
        let repair_reports = apply_fixes(&[(&crate::checks::DOCTOR_CHECKS[0], failing_finding)]);
        assert!(
            repair_reports.len() == 1
                && repair_reports[0].starts_with("NOT done: echo 0 > ")
                && repair_reports[0].contains("No such file"),
            "{repair_reports:?}"
        );
    }
}
