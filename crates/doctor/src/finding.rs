//! What a check says.

use std::path::PathBuf;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// It could not be seen.
    Unknown,
    /// It works, but slower, or on other cores than coreward believes.
    Warning,
    /// Packets or connections are lost, or the daemon does not start.
    Fault,
}

impl Severity {
    /// As the report prints it.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Ok => "ok",
            Severity::Unknown => "unknown",
            Severity::Warning => "warning",
            Severity::Fault => "fault",
        }
    }
}

/// One thing that was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What there is.
    pub found: String,
    /// Why it matters; empty where all is well.
    pub why: String,
    /// What mends it, in this order.
    pub remedy: Vec<Remediation>,
}

/// A step that mends something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remediation {
    /// For a shell.
    pub command: String,
    /// The same, where `--fix` may do it.
    pub fix: Option<Fix>,
}

/// What `--fix` may do: nothing of it can cut a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fix {
    /// Sets a sysctl, now and in a drop-in file for the next boot.
    Sysctl {
        /// Below /proc/sys.
        path: String,
        /// What it is to be.
        value: &'static str,
    },
    /// Writes into a file of /sys: until the next boot.
    Write {
        /// The file.
        path: PathBuf,
        /// What is written.
        value: &'static str,
    },
    /// Mounts the BPF file system at /sys/fs/bpf, until the next boot (systemd does it at boot).
    MountBpf,
    /// Takes a file from everybody but its owner.
    OwnerOnly(PathBuf),
}

impl Finding {
    fn new(severity: Severity, found: impl Into<String>, why: &str) -> Self {
        Self { severity, found: found.into(), why: why.to_owned(), remedy: Vec::new() }
    }

    /// All is well.
    pub fn ok(found: impl Into<String>) -> Self {
        Self::new(Severity::Ok, found, "")
    }

    /// It could not be seen.
    pub fn unknown(found: impl Into<String>) -> Self {
        Self::new(Severity::Unknown, found, "")
    }

    /// It works, but slower or elsewhere.
    pub fn warning(found: impl Into<String>, why: &str) -> Self {
        Self::new(Severity::Warning, found, why)
    }

    /// It does not work.
    pub fn fault(found: impl Into<String>, why: &str) -> Self {
        Self::new(Severity::Fault, found, why)
    }

    /// A fault if `worse`, otherwise a warning.
    pub fn fault_if(worse: bool, found: impl Into<String>, why: &str) -> Self {
        Self::new(if worse { Severity::Fault } else { Severity::Warning }, found, why)
    }

    /// A step that a person must take.
    pub fn remedy(mut self, command: impl Into<String>) -> Self {
        self.remedy.push(Remediation { command: command.into(), fix: None });
        self
    }

    /// A step that `--fix` takes.
    pub fn fix(mut self, fix: Fix) -> Self {
        self.remedy.push(Remediation { command: fix.command(), fix: Some(fix) });
        self
    }

    /// A sysctl to set; `--fix` does it if that is `safe`.
    pub fn sysctl(self, path: String, value: &'static str, safe: bool) -> Self {
        let fix = Fix::Sysctl { path, value };
        if safe { self.fix(fix) } else { self.remedy(fix.command()) }
    }
}

impl Fix {
    /// The same for a shell.
    pub fn command(&self) -> String {
        match self {
            // With slashes: a device's name may have dots.
            Fix::Sysctl { path, value } => format!("sysctl -w {}={value}", sysctl_name(path)),
            Fix::Write { path, value } => format!("echo {value} > {}", path.display()),
            Fix::MountBpf => "mount -t bpf bpf /sys/fs/bpf".to_owned(),
            Fix::OwnerOnly(path) => format!("chmod 600 {}", path.display()),
        }
    }
}

/// As sysctl(8) and sysctl.d(5) take it: dots for slashes, unless a device's name has dots of its own.
pub fn sysctl_name(path: &str) -> String {
    if path.contains('.') { path.to_owned() } else { path.replace('/', ".") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_of_a_shell() {
        let sysctl = |device: &str| Fix::Sysctl { path: format!("net/ipv4/conf/{device}/arp_ignore"), value: "1" };
        assert_eq!(sysctl("eth0").command(), "sysctl -w net.ipv4.conf.eth0.arp_ignore=1");
        assert_eq!(sysctl("eth0.7").command(), "sysctl -w net/ipv4/conf/eth0.7/arp_ignore=1");
        assert_eq!(Fix::OwnerOnly("/s".into()).command(), "chmod 600 /s");
    }
}
