//! Debian packages for the guests, which are fetched at run time into a separate directory and never installed.
//!
//! apt-get gets a private configuration with its own lists and an empty package status. The sources are the machine's
//! own Debian mirrors and their backports, because igb needs QEMU 8. In this way, QEMU gets all its libraries down to
//! libc (37 MB). It runs from the directory, independently of the machine's packages. The system is not changed.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::host_commands::{command_tied_to_parent, run_command_to_end};
use crate::kernel;

/// Kernel versions, each with the metapackage that depends on the package of its newest point release.
const KERNEL_PACKAGES: [(&str, &str); 2] = [("6.1", "linux-image-amd64"), ("6.12", "linux-image-6.12-amd64")];
/// Maximum duration of a download in seconds.
const DOWNLOAD_TIMEOUT_SECONDS: &str = "300";
const NO_MIRROR_MESSAGE: &str = "this machine's apt-get has no Debian mirror";
const LIBRARY_ARCHITECTURE: &str = "x86_64-linux-gnu";

pub struct FetchedPackages {
    package_directory: PathBuf,
}

impl FetchedPackages {
    /// Uses the complete packages that an earlier run has left in `package_directory`, or fetches everything. Fails
    /// with one sentence that names the missing part.
    pub fn load_or_fetch(package_directory: &Path) -> Result<Self> {
        let packages = Self { package_directory: package_directory.to_path_buf() };
        let contents_description = format!("{KERNEL_PACKAGES:?} {:?} debootstrap\n", kernel::GUEST_KERNEL_MODULES);
        let description_path = package_directory.join("complete");
        if fs::read_to_string(&description_path).is_ok_and(|old_description| old_description == contents_description) {
            println!("packages: from {}", package_directory.display());
            return Ok(packages);
        }
        if package_directory.exists() {
            fs::remove_dir_all(package_directory)?;
        }
        for subdirectory in ["lists/partial", "archives/partial", "root", "kernels"] {
            fs::create_dir_all(package_directory.join(subdirectory))?;
        }
        let private_apt = PrivateAptGet::write_configuration(package_directory)?;
        println!("packages: fetching QEMU and the kernels into {}", package_directory.display());
        private_apt.run_apt_get(&["update"])?;
        let backports_suite = format!("{}-backports", private_apt.debian_release);
        let program_packages = ["qemu-system-x86", "busybox-static", "ethtool", "debootstrap"];
        private_apt
            .run_apt_get(&[&["install", "--download-only", "-t", &backports_suite], &program_packages[..]].concat())?;
        for archive in downloaded_package_paths(package_directory)? {
            run_command_to_end(
                command_tied_to_parent("dpkg").arg("-x").arg(&archive).arg(package_directory.join("root")),
            )?;
            fs::remove_file(archive)?;
        }
        for (name, package) in KERNEL_PACKAGES {
            private_apt.run_apt_get(&["download", &private_apt.current_kernel_package_name(package)?])?;
            let [archive] = downloaded_package_paths(package_directory)?
                .try_into()
                .map_err(|kernel_archives| anyhow::anyhow!("one kernel in {kernel_archives:?}"))?;
            kernel::extract_kernel(&archive, &package_directory.join("kernels").join(name), &packages.busybox_path())?;
            fs::remove_file(archive)?;
        }
        for subdirectory in ["lists", "archives"] {
            fs::remove_dir_all(package_directory.join(subdirectory))?;
        }
        fs::write(description_path, contents_description)?;
        Ok(packages)
    }

    /// Returns a command that runs one of the packages' programs with the packages' own libraries.
    pub fn program_command(&self, program: &str) -> Command {
        let root_directory = self.package_directory.join("root");
        let mut command = command_tied_to_parent(root_directory.join("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(self.library_search_path()).arg(root_directory.join(program));
        command
    }

    /// Returns the directories in which QEMU searches for its firmware.
    pub fn qemu_firmware_directories(&self) -> [PathBuf; 3] {
        ["qemu", "seabios", "../lib/ipxe/qemu"]
            .map(|firmware_name| self.package_directory.join("root/usr/share").join(firmware_name))
    }

    /// Returns the path of the statically linked busybox.
    pub fn busybox_path(&self) -> PathBuf {
        self.package_directory.join("root/bin/busybox")
    }

    /// Returns the path of the ethtool program, and the paths of its loader and libraries.
    pub fn ethtool_and_library_paths(&self) -> (PathBuf, Vec<PathBuf>) {
        let root_directory = self.package_directory.join("root");
        let library_directory = root_directory.join("lib").join(LIBRARY_ARCHITECTURE);
        let mut library_paths = vec![root_directory.join("lib64/ld-linux-x86-64.so.2")];
        for name in ["libc.so.6", "libm.so.6", "libmnl.so.0"] {
            let usr_path = root_directory.join("usr/lib").join(LIBRARY_ARCHITECTURE).join(name);
            library_paths.push(if usr_path.exists() { usr_path } else { library_directory.join(name) });
        }
        (root_directory.join("sbin/ethtool"), library_paths)
    }

    pub fn debootstrap_command(&self) -> Command {
        let root_directory = self.package_directory.join("root");
        // debootstrap mounts file systems in its target directory, which disappear with the mount namespace.
        let mut command = command_tied_to_parent("unshare");
        command.args(["--mount", "sh"]).arg(root_directory.join("usr/sbin/debootstrap"));
        command.env("DEBOOTSTRAP_DIR", root_directory.join("usr/share/debootstrap"));
        command
    }

    /// Returns the path for a copy of the tested binary without its debug information. The path is fixed, so that a run
    /// overwrites an earlier run's file.
    pub fn stripped_binary_path(&self) -> PathBuf {
        self.package_directory.join("coreward")
    }

    /// Returns the directory of the kernel with this version in `KERNEL_PACKAGES`.
    pub fn kernel_directory(&self, version: &str) -> PathBuf {
        self.package_directory.join("kernels").join(version)
    }

    fn library_search_path(&self) -> String {
        let root_path = self.package_directory.join("root").display().to_string();
        format!("{root_path}/lib/{LIBRARY_ARCHITECTURE}:{root_path}/usr/lib/{LIBRARY_ARCHITECTURE}")
    }
}

/// This machine's apt-get, with a private configuration.
struct PrivateAptGet {
    state_directory: PathBuf,
    /// Name of the Debian release, such as `bookworm`.
    debian_release: String,
}

impl PrivateAptGet {
    fn write_configuration(package_directory: &Path) -> Result<Self> {
        let (sources, release) = debian_sources_and_release()?;
        fs::write(package_directory.join("sources.list"), sources)?;
        fs::write(package_directory.join("status"), "")?;
        let mut configuration_file = fs::File::create(package_directory.join("apt.conf"))?;
        let state_path = package_directory.display();
        write!(
            configuration_file,
            r#"Dir::State "{state_path}"; Dir::State::lists "lists"; Dir::State::status "{state_path}/status";
            Dir::Cache "{state_path}"; Dir::Cache::archives "archives";
            Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";
            Dir::Etc::sourcelist "{state_path}/sources.list"; Dir::Etc::sourceparts "/dev/null";
            Dir::Etc::preferences "/dev/null"; Dir::Etc::preferencesparts "/dev/null";
            APT::Install-Recommends "false"; APT::Get::Assume-Yes "true"; APT::Sandbox::User "root";
            Acquire::Languages "none"; Acquire::http::Timeout "20";
            Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false"; APT::Update::Post-Invoke-Success "";
            APT::Update::Error-Mode "any";
            "#
        )?;
        Ok(Self { state_directory: package_directory.to_path_buf(), debian_release: release })
    }

    fn apt_command(&self, program: &str) -> Command {
        let mut command = command_tied_to_parent("timeout");
        command.args([DOWNLOAD_TIMEOUT_SECONDS, program]);
        command.env("APT_CONFIG", self.state_directory.join("apt.conf")).env("LC_ALL", "C");
        command.current_dir(self.state_directory.join("archives"));
        command
    }

    fn run_apt_get(&self, arguments: &[&str]) -> Result<()> {
        run_command_to_end(self.apt_command("apt-get").arg("-q").args(arguments)).map(drop)
    }

    /// Returns the name of the current kernel package, on which the metapackage `package` depends.
    fn current_kernel_package_name(&self, package: &str) -> Result<String> {
        let package_description =
            run_command_to_end(self.apt_command("apt-cache").args(["show", "--no-all-versions", package]))?;
        let kernel_packages: BTreeSet<&str> = package_description
            .lines()
            .filter_map(|line| line.strip_prefix("Depends: "))
            .flat_map(|dependency_list| dependency_list.split([',', ' ']))
            .filter(|name| name.starts_with("linux-image-"))
            .collect();
        kernel_packages
            .into_iter()
            .next()
            .map(str::to_string)
            .with_context(|| format!("{package} depends on no kernel image"))
    }
}

/// Returns this machine's Debian sources and their backports in the format of sources.list, and the name of the
/// release.
fn debian_sources_and_release() -> Result<(String, String)> {
    let mut source_lines = BTreeSet::new();
    let mut release = None;
    for (uri, suite) in debian_repositories()? {
        source_lines.insert(format!("deb {uri} {suite} main\n"));
        if !suite.contains('-') {
            source_lines.insert(format!("deb {uri} {suite}-backports main\n"));
            release = Some(suite);
        }
    }
    Ok((source_lines.into_iter().collect(), release.context(NO_MIRROR_MESSAGE)?))
}

/// Returns the URI of this machine's Debian mirror and the name of its release, for debootstrap. Fails when apt-get has
/// no Debian source.
pub fn debian_mirror_and_release() -> Result<(String, String)> {
    debian_repositories()?.into_iter().find(|(_, suite)| !suite.contains('-')).context(NO_MIRROR_MESSAGE)
}

/// Returns the URI and suite of each Debian source that this machine's apt-get uses.
fn debian_repositories() -> Result<Vec<(String, String)>> {
    let mut index_targets = debian_index_targets()?;
    if index_targets.is_empty() {
        // The lists show which sources are Debian's, so they must have been fetched once.
        run_command_to_end(command_tied_to_parent("timeout").args([
            DOWNLOAD_TIMEOUT_SECONDS,
            "apt-get",
            "-q",
            "update",
        ]))?;
        index_targets = debian_index_targets()?;
    }
    let parse_repository = |target: &str| match target.split(' ').collect::<Vec<_>>()[..] {
        [uri, suite, "main"] => Some((uri.to_owned(), suite.to_owned())),
        _ => None,
    };
    Ok(index_targets.lines().filter_map(parse_repository).collect())
}

fn debian_index_targets() -> Result<String> {
    let output_format = "$(REPO_URI) $(CODENAME) $(COMPONENT)";
    let target_filter = ["Created-By: Packages", "Origin: Debian", "Architecture: amd64"];
    run_command_to_end(
        command_tied_to_parent("apt-get").args(["indextargets", "--format", output_format]).args(target_filter),
    )
}

/// Returns the paths of the downloaded packages that have not been unpacked yet.
fn downloaded_package_paths(package_directory: &Path) -> Result<Vec<PathBuf>> {
    let mut package_paths = Vec::new();
    for entry in fs::read_dir(package_directory.join("archives"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            package_paths.push(path);
        }
    }
    Ok(package_paths)
}
