//! Findings of checks, and remedies for them.

use std::path::PathBuf;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FindingSeverity {
    /// The observed state is the expected state.
    Ok,
    /// The state cannot be observed.
    Unknown,
    /// Packets are processed more slowly, or on other cores than predicted.
    Warning,
    /// Packets or connections are lost, or the daemon does not start.
    Fault,
}

impl FindingSeverity {
    pub fn name(self) -> &'static str {
        match self {
            FindingSeverity::Ok => "ok",
            FindingSeverity::Unknown => "unknown",
            FindingSeverity::Warning => "warning",
            FindingSeverity::Fault => "fault",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub severity: FindingSeverity,
    /// Observed value or state that caused the finding.
    pub observation: String,
    /// Consequence for the operator if the state remains. Empty for `Ok`.
    pub consequence: String,
    /// Steps that solve the problem.
    pub remedies: Vec<RemedyStep>,
}

/// Step of a remedy, which an operator or `--fix` executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemedyStep {
    pub shell_command: String,
    /// Repair that `--fix` executes in place of the command, or `None` if only an operator may execute the step.
    pub automatic_fix: Option<AutomaticFix>,
}

/// Repair that `--fix` can execute. No repair breaks connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AutomaticFix {
    /// Sets a sysctl now, and by a drop-in file at the next boot.
    SetSysctl {
        /// Path of the sysctl, below /proc/sys.
        path: String,
        value: &'static str,
    },
    /// Writes to a file in /sys, with effect until the next boot.
    WriteFile { path: PathBuf, value: &'static str },
    /// Mounts the BPF file system at /sys/fs/bpf. At the next boot, systemd mounts it.
    MountBpf,
    /// Removes all permissions of a file except its owner's permissions.
    RestrictToOwner(PathBuf),
}

impl Finding {
    fn new(severity: FindingSeverity, observation: impl Into<String>, consequence: &str) -> Self {
        Self { severity, observation: observation.into(), consequence: consequence.to_owned(), remedies: Vec::new() }
    }

    pub fn ok(observation: impl Into<String>) -> Self {
        Self::new(FindingSeverity::Ok, observation, "")
    }

    pub fn unknown(observation: impl Into<String>) -> Self {
        Self::new(FindingSeverity::Unknown, observation, "")
    }

    pub fn warning(observation: impl Into<String>, consequence: &str) -> Self {
        Self::new(FindingSeverity::Warning, observation, consequence)
    }

    pub fn fault(observation: impl Into<String>, consequence: &str) -> Self {
        Self::new(FindingSeverity::Fault, observation, consequence)
    }

    /// Returns a fault if `is_fault` is true, and otherwise a warning.
    pub fn fault_or_warning(is_fault: bool, observation: impl Into<String>, consequence: &str) -> Self {
        Self::new(if is_fault { FindingSeverity::Fault } else { FindingSeverity::Warning }, observation, consequence)
    }

    /// Adds a remedy step that only an operator may execute.
    pub fn with_remedy_step(mut self, command: impl Into<String>) -> Self {
        self.remedies.push(RemedyStep { shell_command: command.into(), automatic_fix: None });
        self
    }

    /// Adds a remedy step that `--fix` can execute.
    pub fn with_automatic_fix(mut self, fix: AutomaticFix) -> Self {
        self.remedies.push(RemedyStep { shell_command: fix.shell_command(), automatic_fix: Some(fix) });
        self
    }

    /// Adds a remedy step that sets a sysctl. `--fix` executes it only if `is_safe_to_fix` is true.
    pub fn with_sysctl_remedy(self, path: String, value: &'static str, is_safe_to_fix: bool) -> Self {
        let fix = AutomaticFix::SetSysctl { path, value };
        if is_safe_to_fix { self.with_automatic_fix(fix) } else { self.with_remedy_step(fix.shell_command()) }
    }
}

impl AutomaticFix {
    pub fn shell_command(&self) -> String {
        match self {
            // The name contains slashes, because device names may contain dots.
            AutomaticFix::SetSysctl { path, value } => format!("sysctl -w {}={value}", sysctl_name(path)),
            AutomaticFix::WriteFile { path, value } => format!("echo {value} > {}", path.display()),
            AutomaticFix::MountBpf => "mount -t bpf bpf /sys/fs/bpf".to_owned(),
            AutomaticFix::RestrictToOwner(path) => format!("chmod 600 {}", path.display()),
        }
    }
}

/// Returns the name of a sysctl in the syntax of sysctl.d(5). Dots replace the slashes, unless the path contains a dot.
pub fn sysctl_name(path: &str) -> String {
    if path.contains('.') { path.to_owned() } else { path.replace('/', ".") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixes_are_shown_as_shell_commands() {
        let arp_ignore_fix =
            |device: &str| AutomaticFix::SetSysctl { path: format!("net/ipv4/conf/{device}/arp_ignore"), value: "1" };
        assert_eq!(arp_ignore_fix("eth0").shell_command(), "sysctl -w net.ipv4.conf.eth0.arp_ignore=1");
        assert_eq!(arp_ignore_fix("eth0.7").shell_command(), "sysctl -w net/ipv4/conf/eth0.7/arp_ignore=1");
        assert_eq!(AutomaticFix::RestrictToOwner("/s".into()).shell_command(), "chmod 600 /s");
    }
}
