//! Runs the commands in documents as written. A shell block names its machines after the language (` ```sh lb1 lb2 `).
//! Each machine is a network namespace of the testbed with its own `/etc`, `/var` and `/sys/fs/bpf`. Substitutes
//! replace systemd and copying over ssh.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use crate::fleet::coreward_binary_path;
use crate::namespace::NetworkNamespace;
use crate::process::{DEFAULT_WAIT_TIMEOUT, TestbedProcess};
use crate::topology::Testbed;

/// Maximum run time of a document's shell block (s).
const SHELL_BLOCK_TIMEOUT_S: &str = "90";
/// Path at which an emulated machine mounts the testbed's directory, because the machine's `/run` is private.
const MACHINE_MOUNT_PATH: &str = "/mnt";
/// Id of the user `coreward`, which the packages create.
const COREWARD_USER_ID: u32 = 64_007;
const MACHINE_LIFETIME_SECONDS: &str = "600";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShellBlock {
    /// Line number of the block in the document, counted from 1.
    pub line_number: usize,
    /// Names of the machines on which the block runs, in this order.
    pub machine_names: Vec<String>,
    pub shell_commands: String,
}

/// Returns the shell blocks in a Markdown document that name a machine. Fails when a block has no end.
pub fn parse_shell_blocks(document: &str) -> anyhow::Result<Vec<ShellBlock>> {
    let mut blocks = Vec::new();
    let mut lines = (1..).zip(document.lines());
    while let Some((line, text)) = lines.next() {
        let Some(language) = text.strip_prefix("```") else { continue };
        let block_lines: Vec<&str> = lines.by_ref().map(|(_, text)| text).take_while(|text| *text != "```").collect();
        ensure!(line + block_lines.len() < document.lines().count(), "line {line}: a block without an end");
        let machine_names: Vec<String> = language.split_whitespace().skip(1).map(str::to_owned).collect();
        if language.starts_with("sh") && !machine_names.is_empty() {
            blocks.push(ShellBlock { line_number: line, machine_names, shell_commands: block_lines.join("\n") });
        }
    }
    Ok(blocks)
}

/// Emulated machine that a document's commands name. It consists of a network namespace of the testbed and a mount
/// namespace, which exists as long as a sleeping process.
#[derive(Debug)]
pub struct DocumentMachine {
    name: String,
    namespace_holder: TestbedProcess,
}

impl DocumentMachine {
    /// Starts a machine. Fails when the kernel has no overlay file system, or rejects a mount.
    pub fn start(testbed: &Testbed, name: &str, namespace: &NetworkNamespace) -> anyhow::Result<Self> {
        let machine_directory = testbed.directory().join(format!("machine-{name}"));
        let pin_directory = testbed.pin_directory().join(format!("machine-{name}"));
        for subdirectory in ["etc", "etc.work", "var", "var.work", "bin"] {
            fs::create_dir_all(machine_directory.join(subdirectory))?;
        }
        fs::create_dir_all(&pin_directory)?;
        fs::create_dir_all(machine_directory.join("etc/coreward"))?;
        fs::create_dir_all(machine_directory.join("var/lib/coreward"))?;
        install_replacement_commands(&machine_directory.join("bin"))?;
        let ready_file_path = machine_directory.join("ready");
        let mount_script = build_mount_script(name, &machine_directory, &pin_directory, &testbed.directory());
        let log_path = testbed.directory().join(format!("machine-{name}.log"));
        let mut command = Command::new("unshare");
        command.args(["--mount", "--uts", "sh", "-eu", "-c", &mount_script]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log_path)?);
        let mut namespace_holder = testbed.spawn(namespace, command)?;
        let deadline = std::time::Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        while !ready_file_path.exists() {
            let has_failed = namespace_holder.try_wait()?.is_some() || std::time::Instant::now() > deadline;
            ensure!(!has_failed, "machine {name}: {}", fs::read_to_string(&log_path).unwrap_or_default().trim());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { name: name.to_owned(), namespace_holder })
    }

    /// Runs the commands of a block and returns their output. Fails with their output when a command fails.
    pub fn run_shell_block(&self, block: &ShellBlock, log: &Path) -> anyhow::Result<String> {
        let mut command = Command::new("timeout");
        command.args([
            SHELL_BLOCK_TIMEOUT_S,
            "nsenter",
            "--target",
            &self.namespace_holder.pid().to_string(),
            "--mount",
            "--net",
            "--uts",
        ]);
        // Use a login shell, which applies the settings in /etc/profile.d.
        command.args(["sh", "-l", "-c", &format!("set -eu\n{}", block.shell_commands)]);
        // Write the output to a file, because a background process of the block would keep a pipe open.
        let log_file = fs::File::create(log)?;
        command.stdin(Stdio::null()).stdout(log_file.try_clone()?).stderr(log_file);
        let status = command.status().context("timeout (Debian package coreutils)")?;
        let output_text = fs::read_to_string(log)?;
        if !status.success() {
            bail!(
                "line {}, on {}: {status}:\n{}\nprinted:\n{output_text}",
                block.line_number,
                self.name,
                block.shell_commands
            );
        }
        Ok(output_text)
    }
}

/// Writes `coreward` and replacements for systemctl and scp into `command_directory`.
fn install_replacement_commands(command_directory: &Path) -> anyhow::Result<()> {
    std::os::unix::fs::symlink(coreward_binary_path()?, command_directory.join("coreward"))?;
    let scp_script = include_str!("scp.sh").replace("@MACHINES@", MACHINE_MOUNT_PATH);
    for (command, text) in [("systemctl", include_str!("systemctl.sh")), ("scp", &scp_script)] {
        fs::write(command_directory.join(command), text)?;
        fs::set_permissions(command_directory.join(command), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    }
    Ok(())
}

/// Returns the shell script that sets a machine's host name, creates its mounts, and then sleeps.
fn build_mount_script(name: &str, machine_directory: &Path, pin_directory: &Path, testbed_directory: &Path) -> String {
    let (machine_path, pin_path) = (machine_directory.display(), pin_directory.display());
    let testbed_path = testbed_directory.display();
    format!(
        "echo {name} > /proc/sys/kernel/hostname
         mount --make-rprivate /
         mount -t overlay overlay -o lowerdir=/etc,upperdir={machine_path}/etc,workdir={machine_path}/etc.work /etc
         mount -t overlay overlay -o lowerdir=/var,upperdir={machine_path}/var,workdir={machine_path}/var.work /var
         mount -t overlay overlay -o lowerdir={machine_path}/bin:/usr/bin /usr/bin
         mount --bind {pin_path} /sys/fs/bpf
         # What the packages do (packaging/debian/controller.postinst).
         getent passwd coreward >/dev/null || {{
             echo coreward:x:{COREWARD_USER_ID}:{COREWARD_USER_ID}::/nonexistent:/usr/sbin/nologin >> /etc/passwd
             echo coreward:x:{COREWARD_USER_ID}: >> /etc/group
         }}
         chown coreward: /var/lib/coreward
         # For scp.
         mount --bind {testbed_path} {MACHINE_MOUNT_PATH}
         echo $$ > {machine_path}/pid
         touch {machine_path}/ready
         mount -t tmpfs tmpfs /run
         exec sleep {MACHINE_LIFETIME_SECONDS}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_shell_blocks_that_name_machines_are_parsed() {
        let text = "a\n```sh s1 s2\nx\ny\n```\n```sh\nnot me\n```\n```toml s1\nnor me\n```\n";
        let expected_block =
            ShellBlock { line_number: 2, machine_names: vec!["s1".into(), "s2".into()], shell_commands: "x\ny".into() };
        assert_eq!(parse_shell_blocks(text).unwrap(), [expected_block]);
        assert_eq!(parse_shell_blocks("```sh s1\nx\n").unwrap_err().to_string(), "line 1: a block without an end");
    }
}
