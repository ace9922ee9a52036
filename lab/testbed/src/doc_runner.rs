//! Runs the commands of documents as written. A shell block lists its machines after the language (` ```sh lb1 lb2 `).
//! Each machine is a namespace of the testbed with its own `/etc`, `/var` and `/sys/fs/bpf`, and with substitutes for
//! systemd and for copying over ssh.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use crate::fleet::coreward_command;
use crate::namespace::Namespace;
use crate::process::{Process, TIMEOUT};
use crate::topology::Testbed;

/// Maximum run time of a block (s).
const BLOCK_TIMEOUT_S: &str = "90";
/// Path of the testbed's directory on a machine, which has a `/run` of its own.
const MACHINE_MOUNT_PATH: &str = "/mnt";
/// Id of the user `coreward`, whom the packages create.
const USER_ID: u32 = 64_007;
const HOLD_SECONDS: &str = "600";

/// Shell block of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShellBlock {
    /// Line number of the block in the document, counted from 1.
    pub line: usize,
    /// Names of the machines on which the block runs, one after the other.
    pub machines: Vec<String>,
    /// Shell commands of the block.
    pub commands: String,
}

/// Returns the shell blocks of a Markdown document that name a machine. Fails when a block has no end.
pub fn parse_shell_blocks(document: &str) -> anyhow::Result<Vec<ShellBlock>> {
    let mut blocks = Vec::new();
    let mut lines = (1..).zip(document.lines());
    while let Some((line, text)) = lines.next() {
        let Some(language) = text.strip_prefix("```") else { continue };
        let inside: Vec<&str> = lines.by_ref().map(|(_, text)| text).take_while(|text| *text != "```").collect();
        ensure!(line + inside.len() < document.lines().count(), "line {line}: a block without an end");
        let machines: Vec<String> = language.split_whitespace().skip(1).map(str::to_owned).collect();
        if language.starts_with("sh") && !machines.is_empty() {
            blocks.push(ShellBlock { line, machines, commands: inside.join("\n") });
        }
    }
    Ok(blocks)
}

/// Machine of the document: a namespace of the testbed with its own mounts, which a sleeping process keeps.
#[derive(Debug)]
pub struct Host {
    name: String,
    holder: Process,
}

impl Host {
    /// Starts a machine. Fails when the kernel has no overlay file system, or rejects a mount.
    pub fn start(testbed: &Testbed, name: &str, namespace: &Namespace) -> anyhow::Result<Self> {
        let folder = testbed.directory().join(format!("machine-{name}"));
        let pins = testbed.pin_directory().join(format!("machine-{name}"));
        for part in ["etc", "etc.work", "var", "var.work", "bin"] {
            fs::create_dir_all(folder.join(part))?;
        }
        fs::create_dir_all(&pins)?;
        fs::create_dir_all(folder.join("etc/coreward"))?;
        fs::create_dir_all(folder.join("var/lib/coreward"))?;
        let bin = folder.join("bin");
        std::os::unix::fs::symlink(coreward_command()?, bin.join("coreward"))?;
        let copied = include_str!("scp.sh").replace("@MACHINES@", MACHINE_MOUNT_PATH);
        for (command, text) in [("systemctl", include_str!("systemctl.sh")), ("scp", &copied)] {
            fs::write(bin.join(command), text)?;
            fs::set_permissions(bin.join(command), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        }
        let ready = folder.join("ready");
        let all = testbed.directory();
        let [folder, pins, bin, all] = [&folder, &pins, &bin, &all].map(|path: &PathBuf| path.display());
        let script = format!(
            "echo {name} > /proc/sys/kernel/hostname
             mount --make-rprivate /
             mount -t overlay overlay -o lowerdir=/etc,upperdir={folder}/etc,workdir={folder}/etc.work /etc
             mount -t overlay overlay -o lowerdir=/var,upperdir={folder}/var,workdir={folder}/var.work /var
             mount -t overlay overlay -o lowerdir={bin}:/usr/bin /usr/bin
             mount --bind {pins} /sys/fs/bpf
             # What the packages do (packaging/debian/controller.postinst).
             getent passwd coreward >/dev/null || {{
                 echo coreward:x:{USER_ID}:{USER_ID}::/nonexistent:/usr/sbin/nologin >> /etc/passwd
                 echo coreward:x:{USER_ID}: >> /etc/group
             }}
             chown coreward: /var/lib/coreward
             # For scp.
             mount --bind {all} {MACHINE_MOUNT_PATH}
             echo $$ > {folder}/pid
             touch {folder}/ready
             mount -t tmpfs tmpfs /run
             exec sleep {HOLD_SECONDS}"
        );
        let log = testbed.directory().join(format!("machine-{name}.log"));
        let mut command = Command::new("unshare");
        command.args(["--mount", "--uts", "sh", "-eu", "-c", &script]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log)?);
        let mut holder = testbed.spawn(namespace, command)?;
        let end = std::time::Instant::now() + *TIMEOUT;
        while !ready.exists() {
            let ended = holder.try_wait()?.is_some() || std::time::Instant::now() > end;
            ensure!(!ended, "machine {name}: {}", fs::read_to_string(&log).unwrap_or_default().trim());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { name: name.to_owned(), holder })
    }

    /// Runs the commands of a block and returns their output. Fails with the output when a command fails.
    pub fn run(&self, block: &ShellBlock, log: &Path) -> anyhow::Result<String> {
        let mut command = Command::new("timeout");
        command.args([
            BLOCK_TIMEOUT_S,
            "nsenter",
            "--target",
            &self.holder.pid().to_string(),
            "--mount",
            "--net",
            "--uts",
        ]);
        // A login shell, with the settings of /etc/profile.d.
        command.args(["sh", "-l", "-c", &format!("set -eu\n{}", block.commands)]);
        // Output to a file: a background process of the block would keep a pipe open.
        let file = fs::File::create(log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let status = command.status().context("timeout (Debian package coreutils)")?;
        let printed = fs::read_to_string(log)?;
        if !status.success() {
            bail!("line {}, on {}: {status}:\n{}\nprinted:\n{printed}", block.line, self.name, block.commands);
        }
        Ok(printed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_blocks_name_their_machines() {
        let text = "a\n```sh s1 s2\nx\ny\n```\n```sh\nnot me\n```\n```toml s1\nnor me\n```\n";
        let taken = ShellBlock { line: 2, machines: vec!["s1".into(), "s2".into()], commands: "x\ny".into() };
        assert_eq!(parse_shell_blocks(text).unwrap(), [taken]);
        assert_eq!(parse_shell_blocks("```sh s1\nx\n").unwrap_err().to_string(), "line 1: a block without an end");
    }
}
