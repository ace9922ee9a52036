//! Contents of the guests: Debian packages, fetched at run time into a separate directory, never installed.
//!
//! apt-get gets a private configuration: the machine's own Debian mirrors plus their backports (igb needs QEMU 8), its
//! own lists, and an empty package status. So QEMU has all its libraries down to libc (37 MB) and runs from the
//! directory, independent of the machine's packages. Nothing of the system changes.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::kernel;
use crate::process::{command_tied_to_parent, run};

/// Kernel versions, each with the metapackage that depends on the package of its current point release.
const KERNELS: [(&str, &str); 2] = [("6.1", "linux-image-amd64"), ("6.12", "linux-image-6.12-amd64")];
/// Maximum duration of a download in seconds.
const DOWNLOAD_SECONDS: &str = "300";
const NO_MIRROR: &str = "this machine's apt-get has no Debian mirror";
const ARCHITECTURE: &str = "x86_64-linux-gnu";

pub struct Packages {
    folder: PathBuf,
}

impl Packages {
    /// Uses the complete contents that an earlier run has left in `folder`, or fetches everything. Fails with one
    /// sentence that names the missing part.
    pub fn fetch(folder: &Path) -> Result<Self> {
        let packages = Self { folder: folder.to_path_buf() };
        let expected = format!("{KERNELS:?} {:?} debootstrap\n", kernel::MODULES);
        let complete = folder.join("complete");
        if fs::read_to_string(&complete).is_ok_and(|found| found == expected) {
            println!("packages: from {}", folder.display());
            return Ok(packages);
        }
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        for part in ["lists/partial", "archives/partial", "root", "kernels"] {
            fs::create_dir_all(folder.join(part))?;
        }
        let apt = Apt::configure(folder)?;
        println!("packages: fetching QEMU and the kernels into {}", folder.display());
        apt.get(&["update"])?;
        let backports = format!("{}-backports", apt.release);
        let programs = ["qemu-system-x86", "busybox-static", "ethtool", "debootstrap"];
        apt.get(&[&["install", "--download-only", "-t", &backports], &programs[..]].concat())?;
        for archive in archives(folder)? {
            run(command_tied_to_parent("dpkg").arg("-x").arg(&archive).arg(folder.join("root")))?;
            fs::remove_file(archive)?;
        }
        for (name, package) in KERNELS {
            apt.get(&["download", &apt.kernel_of(package)?])?;
            let [archive] = archives(folder)?.try_into().map_err(|found| anyhow::anyhow!("one kernel in {found:?}"))?;
            kernel::extract(&archive, &folder.join("kernels").join(name), &packages.busybox())?;
            fs::remove_file(archive)?;
        }
        for part in ["lists", "archives"] {
            fs::remove_dir_all(folder.join(part))?;
        }
        fs::write(complete, expected)?;
        Ok(packages)
    }

    /// Returns a command that runs a program of the packages with the libraries of the packages.
    pub fn command(&self, program: &str) -> Command {
        let root = self.folder.join("root");
        let mut command = command_tied_to_parent(root.join("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(self.library_path()).arg(root.join(program));
        command
    }

    /// Returns the directories in which QEMU searches its firmware.
    pub fn firmware(&self) -> [PathBuf; 3] {
        ["qemu", "seabios", "../lib/ipxe/qemu"].map(|part| self.folder.join("root/usr/share").join(part))
    }

    /// Returns the path of the statically linked busybox.
    pub fn busybox(&self) -> PathBuf {
        self.folder.join("root/bin/busybox")
    }

    /// Returns the path of the ethtool program, and those of its loader and libraries.
    pub fn ethtool(&self) -> (PathBuf, Vec<PathBuf>) {
        let root = self.folder.join("root");
        let libraries = root.join("lib").join(ARCHITECTURE);
        let mut files = vec![root.join("lib64/ld-linux-x86-64.so.2")];
        for name in ["libc.so.6", "libm.so.6", "libmnl.so.0"] {
            let usr = root.join("usr/lib").join(ARCHITECTURE).join(name);
            files.push(if usr.exists() { usr } else { libraries.join(name) });
        }
        (root.join("sbin/ethtool"), files)
    }

    /// Returns a command that runs debootstrap, without arguments.
    pub fn debootstrap(&self) -> Command {
        let root = self.folder.join("root");
        // debootstrap mounts file systems in its target, which end with the mount namespace.
        let mut command = command_tied_to_parent("unshare");
        command.args(["--mount", "sh"]).arg(root.join("usr/sbin/debootstrap"));
        command.env("DEBOOTSTRAP_DIR", root.join("usr/share/debootstrap"));
        command
    }

    /// Returns the path for the tested binary without its debug information. It is fixed, so that a run overwrites the
    /// file of an earlier run.
    pub fn stripped(&self) -> PathBuf {
        self.folder.join("coreward")
    }

    /// Returns the directory of the kernel with this version in `KERNELS`.
    pub fn kernel_directory(&self, name: &str) -> PathBuf {
        self.folder.join("kernels").join(name)
    }

    fn library_path(&self) -> String {
        let root = self.folder.join("root").display().to_string();
        format!("{root}/lib/{ARCHITECTURE}:{root}/usr/lib/{ARCHITECTURE}")
    }
}

/// apt-get of this machine, with a private configuration.
struct Apt {
    folder: PathBuf,
    /// Name of the Debian release, such as `bookworm`.
    release: String,
}

impl Apt {
    fn configure(folder: &Path) -> Result<Self> {
        let (sources, release) = sources()?;
        fs::write(folder.join("sources.list"), sources)?;
        fs::write(folder.join("status"), "")?;
        let mut configuration = fs::File::create(folder.join("apt.conf"))?;
        let at = folder.display();
        write!(
            configuration,
            r#"Dir::State "{at}"; Dir::State::lists "lists"; Dir::State::status "{at}/status";
            Dir::Cache "{at}"; Dir::Cache::archives "archives"; Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";
            Dir::Etc::sourcelist "{at}/sources.list"; Dir::Etc::sourceparts "/dev/null";
            Dir::Etc::preferences "/dev/null"; Dir::Etc::preferencesparts "/dev/null";
            APT::Install-Recommends "false"; APT::Get::Assume-Yes "true"; APT::Sandbox::User "root";
            Acquire::Languages "none"; Acquire::http::Timeout "20";
            Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false"; APT::Update::Post-Invoke-Success "";
            APT::Update::Error-Mode "any";
            "#
        )?;
        Ok(Self { folder: folder.to_path_buf(), release })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = command_tied_to_parent("timeout");
        command.args([DOWNLOAD_SECONDS, program]);
        command.env("APT_CONFIG", self.folder.join("apt.conf")).env("LC_ALL", "C");
        command.current_dir(self.folder.join("archives"));
        command
    }

    fn get(&self, arguments: &[&str]) -> Result<()> {
        run(self.command("apt-get").arg("-q").args(arguments)).map(drop)
    }

    /// Returns the name of the current kernel package, on which a metapackage depends.
    fn kernel_of(&self, package: &str) -> Result<String> {
        let shown = run(self.command("apt-cache").args(["show", "--no-all-versions", package]))?;
        let names: BTreeSet<&str> = shown
            .lines()
            .filter_map(|line| line.strip_prefix("Depends: "))
            .flat_map(|depends| depends.split([',', ' ']))
            .filter(|name| name.starts_with("linux-image-"))
            .collect();
        names.into_iter().next().map(str::to_string).with_context(|| format!("{package} depends on no kernel image"))
    }
}

/// Returns this machine's Debian sources and their backports, as lines of sources.list, and the name of the release.
fn sources() -> Result<(String, String)> {
    let mut lines = BTreeSet::new();
    let mut release = None;
    for (uri, suite) in repositories()? {
        lines.insert(format!("deb {uri} {suite} main\n"));
        if !suite.contains('-') {
            lines.insert(format!("deb {uri} {suite}-backports main\n"));
            release = Some(suite);
        }
    }
    Ok((lines.into_iter().collect(), release.context(NO_MIRROR)?))
}

/// Returns the URI of this machine's Debian mirror and the name of its release, for debootstrap.
///
/// # Errors
/// Without a Debian source of apt-get.
pub fn mirror() -> Result<(String, String)> {
    repositories()?.into_iter().find(|(_, suite)| !suite.contains('-')).context(NO_MIRROR)
}

/// Returns the URIs and suites of this machine's Debian sources of programs.
fn repositories() -> Result<Vec<(String, String)>> {
    let mut targets = debian_targets()?;
    if targets.is_empty() {
        // The lists show which sources are Debian's, so they must have been fetched once.
        run(command_tied_to_parent("timeout").args([DOWNLOAD_SECONDS, "apt-get", "-q", "update"]))?;
        targets = debian_targets()?;
    }
    let repository = |target: &str| match target.split(' ').collect::<Vec<_>>()[..] {
        [uri, suite, "main"] => Some((uri.to_owned(), suite.to_owned())),
        _ => None,
    };
    Ok(targets.lines().filter_map(repository).collect())
}

fn debian_targets() -> Result<String> {
    let format = "$(REPO_URI) $(CODENAME) $(COMPONENT)";
    let filter = ["Created-By: Packages", "Origin: Debian", "Architecture: amd64"];
    run(command_tied_to_parent("apt-get").args(["indextargets", "--format", format]).args(filter))
}

/// Returns the paths of the downloaded packages that have not been unpacked yet.
fn archives(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder.join("archives"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            found.push(path);
        }
    }
    Ok(found)
}
