//! Guests that boot Debian's own root file system with systemd.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::guest::{GuestHardware, QemuGuest};
use crate::host_commands::{command_tied_to_parent, run_command_to_end};
use crate::initrd::{self, EXECUTABLE_MODE, WORLD_READABLE_MODE};
use crate::packages::{self, FetchedPackages};

/// Version of the guests' kernel, which is the default of the Debian release.
const DEBIAN_KERNEL_VERSION: &str = "6.1";
const DEBIAN_KERNEL_MODULES: [&str; 17] = [
    "virtio_pci",
    "virtio_blk",
    "crc32c_generic",
    "ext4",
    "veth",
    "bridge",
    "sch_ingress",
    "cls_bpf",
    // The agent's first listing of sockets cannot load this module itself, because the guest has no /lib/modules.
    "tcp_diag",
    "ip_vs",
    "ip_vs_rr",
    "ip_vs_mh",
    "virtio_net",
    "bonding",
    "8021q",
    "ipip",
    "fou",
];
/// Packages that are added to a minimal Debian. They are needed for booting, for the tests, or by the daemons'
/// packages.
const DEBIAN_PACKAGES: &str =
    "systemd-sysv,adduser,iproute2,procps,ethtool,libelf1,zlib1g,nginx-light,ipvsadm,keepalived,tcpdump";
/// Size of the root file system's image, which is twice the size of the installed programs.
const ROOT_IMAGE_SIZE: &str = "1500M";

/// Kernel arguments that disable login prompts (getty). systemd would wait for udev, which the guest lacks, to report
/// their terminals.
const DEBIAN_KERNEL_ARGUMENTS: &str = "systemd.getty_auto=no systemd.firstboot=no systemd.show_status=no";
const MULTI_USER_TARGET_DROP_IN: &str = "[Unit]\nRequires=test-network.service test-serial.service\n";
const SERIAL_COMMANDS_UNIT: &str = "[Unit]\nDescription=Commands of the \
                                    test\nDefaultDependencies=no\nAfter=basic.target\n\
                           [Service]\nExecStart=/usr/local/sbin/test-serial\nKillMode=process\n";
const TEST_NETWORK_SYSTEMD_UNIT: &str = "[Unit]\nDescription=Network of the test\n\
     Before=network-online.target nginx.service\n\
                            [Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/sh -e /etc/test-network\n";

/// File of the guest, as a pair of path (without leading slash) and content.
pub type NamedGuestFile = (&'static str, String);

/// Returns the path of an image with Debian's root file system. Creates the image unless an earlier run has done so.
/// Fails when debootstrap cannot fetch the packages.
pub fn create_root_image(packages: &FetchedPackages, cache_directory: &Path) -> Result<PathBuf> {
    let (mirror, release) = packages::debian_mirror_and_release()?;
    let image_description = format!("{release} {DEBIAN_PACKAGES} {ROOT_IMAGE_SIZE}\n");
    let [image_path, description_path] = ["debian.ext4", "debian.complete"].map(|name| cache_directory.join(name));
    if image_path.exists()
        && fs::read_to_string(&description_path).is_ok_and(|old_description| old_description == image_description)
    {
        return Ok(image_path);
    }
    println!("packages: fetching Debian's {release} into {}", image_path.display());
    // Users other than root run daemons in this directory, so that they must be able to read it.
    let root_directory =
        tempfile::Builder::new().permissions(Permissions::from_mode(0o755)).tempdir_in(cache_directory)?;
    let include_option = format!("--include={DEBIAN_PACKAGES}");
    let debootstrap_arguments = ["--variant=minbase", include_option.as_str(), release.as_str()];
    run_command_to_end(
        packages.debootstrap_command().args(debootstrap_arguments).arg(root_directory.path()).arg(mirror),
    )
    .with_context(|| debootstrap_log_tail(root_directory.path()))?;
    run_command_to_end(
        command_tied_to_parent("sh")
            .args(["-c", "rm -rf \"$0\"/var/cache/apt/archives/*.deb \"$0\"/var/lib/apt/lists/*"])
            .arg(root_directory.path()),
    )?;
    let _ = fs::remove_file(&image_path);
    run_command_to_end(
        command_tied_to_parent("mke2fs")
            .args(["-q", "-t", "ext4", "-d"])
            .arg(root_directory.path())
            .arg(&image_path)
            .arg(ROOT_IMAGE_SIZE),
    )?;
    fs::write(description_path, image_description)?;
    Ok(image_path)
}

fn debootstrap_log_tail(root_directory: &Path) -> String {
    let debootstrap_log = fs::read_to_string(root_directory.join("debootstrap/debootstrap.log")).unwrap_or_default();
    format!("debootstrap: {}", debootstrap_log.lines().rev().take(3).collect::<Vec<_>>().join(" < "))
}

/// Virtual machine with Debian and systemd, which can be booted repeatedly.
pub struct DebianMachine<'a> {
    packages: &'a FetchedPackages,
    kernel_directory: PathBuf,
    initrd: Vec<u8>,
    disk_paths: [PathBuf; 2],
    console_path: PathBuf,
}

impl<'a> DebianMachine<'a> {
    /// Creates the machine. `files` are copied to its root file system, and their script `/etc/test-network` runs
    /// before the services. `/dev/vdb` is a tar archive of the directory `content_directory`. Fails when Debian's
    /// packages cannot be fetched.
    pub fn new(
        packages: &'a FetchedPackages,
        cache_directory: &Path,
        name: &str,
        files: &[NamedGuestFile],
        content_directory: &Path,
    ) -> Result<Self> {
        let root_image = create_root_image(packages, cache_directory)?;
        let kernel_directory = packages.kernel_directory(DEBIAN_KERNEL_VERSION);
        let systemd_units = [
            ("etc/systemd/system/test-serial.service", SERIAL_COMMANDS_UNIT.to_owned()),
            ("etc/systemd/system/test-network.service", TEST_NETWORK_SYSTEMD_UNIT.to_owned()),
            ("etc/systemd/system/multi-user.target.d/test.conf", MULTI_USER_TARGET_DROP_IN.to_owned()),
        ];
        let serial_script = ("usr/local/sbin/test-serial", EXECUTABLE_MODE, include_str!("../guest/serial").to_owned());
        let readable_files =
            systemd_units.iter().chain(files).map(|(path, content)| (*path, WORLD_READABLE_MODE, content.clone()));
        let guest_files: Vec<_> = readable_files.chain([serial_script]).collect();
        let initrd = initrd::build_disk_boot_initrd(packages, &kernel_directory, &DEBIAN_KERNEL_MODULES, &guest_files)?;
        let disk_paths = [cache_directory.join(format!("{name}.ext4")), cache_directory.join(format!("{name}.tar"))];
        run_command_to_end(command_tied_to_parent("cp").arg("--sparse=always").arg(root_image).arg(&disk_paths[0]))?;
        run_command_to_end(
            command_tied_to_parent("tar").arg("-C").arg(content_directory).arg("-cf").arg(&disk_paths[1]).arg("."),
        )?;
        Ok(Self {
            packages,
            kernel_directory,
            initrd,
            disk_paths,
            console_path: cache_directory.join(format!("{name}.console")),
        })
    }

    /// Boots the machine. Fails when QEMU or Debian does not start.
    pub fn boot(&self) -> Result<QemuGuest> {
        let hardware = GuestHardware { nics: &[], disk_images: &self.disk_paths, memory_size: "1536M" };
        QemuGuest::boot(
            self.packages,
            &self.kernel_directory,
            &self.initrd,
            hardware,
            DEBIAN_KERNEL_ARGUMENTS,
            &self.console_path,
        )
    }
}

impl Drop for DebianMachine<'_> {
    fn drop(&mut self) {
        for disk_path in &self.disk_paths {
            let _ = fs::remove_file(disk_path);
        }
    }
}
