//! Guests with Debian's own root file system and systemd.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::guest::{Guest, Hardware};
use crate::initrd::{self, EXECUTABLE_MODE, READABLE_MODE};
use crate::packages::{self, Packages};
use crate::process::{command_tied_to_parent, run};

/// Version of the guests' kernel, which is the default of the Debian release.
const KERNEL_VERSION: &str = "6.1";
const MODULES: [&str; 17] = [
    "virtio_pci",
    "virtio_blk",
    "crc32c_generic",
    "ext4",
    "veth",
    "bridge",
    "sch_ingress",
    "cls_bpf",
    // The guest has no /lib/modules from which the agent's first listing of sockets could load the module.
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
/// Packages that a minimal Debian lacks: for booting, as dependencies of the daemons' packages, and for the tests.
const PACKAGES: &str =
    "systemd-sysv,adduser,iproute2,procps,ethtool,libelf1,zlib1g,nginx-light,ipvsadm,keepalived,tcpdump";
/// Size of the root file system, which is twice the size of the installed programs.
const IMAGE_SIZE: &str = "1500M";

/// Kernel arguments without gettys, because systemd would wait for udev, which the guest lacks, to report the lines.
const KERNEL_ARGUMENTS: &str = "systemd.getty_auto=no systemd.firstboot=no systemd.show_status=no";
const TARGET_DROP_IN: &str = "[Unit]\nRequires=test-network.service test-serial.service\n";
const SERIAL_UNIT: &str = "[Unit]\nDescription=Commands of the test\nDefaultDependencies=no\nAfter=basic.target\n\
                           [Service]\nExecStart=/usr/local/sbin/test-serial\nKillMode=process\n";
const NETWORK_UNIT: &str = "[Unit]\nDescription=Network of the test\nBefore=network-online.target nginx.service\n\
                            [Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/sh -e /etc/test-network\n";

/// File of the guest, as path (without leading slash) and content.
pub type File = (&'static str, String);

/// Returns the path of an image with Debian's root file system. Creates it unless an earlier run has done so.
///
/// # Errors
/// When debootstrap cannot fetch the packages.
pub fn root_image(packages: &Packages, cache: &Path) -> Result<PathBuf> {
    let (mirror, release) = packages::mirror()?;
    let expected = format!("{release} {PACKAGES} {IMAGE_SIZE}\n");
    let [image, complete] = ["debian.ext4", "debian.complete"].map(|name| cache.join(name));
    if image.exists() && fs::read_to_string(&complete).is_ok_and(|found| found == expected) {
        return Ok(image);
    }
    println!("packages: fetching Debian's {release} into {}", image.display());
    // Readable for users other than root, who run daemons in it.
    let root = tempfile::Builder::new().permissions(Permissions::from_mode(0o755)).tempdir_in(cache)?;
    let include = format!("--include={PACKAGES}");
    let arguments = ["--variant=minbase", include.as_str(), release.as_str()];
    run(packages.debootstrap().args(arguments).arg(root.path()).arg(mirror))
        .with_context(|| debootstrap_log_tail(root.path()))?;
    run(command_tied_to_parent("sh")
        .args(["-c", "rm -rf \"$0\"/var/cache/apt/archives/*.deb \"$0\"/var/lib/apt/lists/*"])
        .arg(root.path()))?;
    let _ = fs::remove_file(&image);
    run(command_tied_to_parent("mke2fs")
        .args(["-q", "-t", "ext4", "-d"])
        .arg(root.path())
        .arg(&image)
        .arg(IMAGE_SIZE))?;
    fs::write(complete, expected)?;
    Ok(image)
}

/// Returns the last lines of debootstrap's log.
fn debootstrap_log_tail(root: &Path) -> String {
    let text = fs::read_to_string(root.join("debootstrap/debootstrap.log")).unwrap_or_default();
    format!("debootstrap: {}", text.lines().rev().take(3).collect::<Vec<_>>().join(" < "))
}

/// Virtual machine with Debian and systemd, which can be booted repeatedly.
pub struct Debian<'a> {
    packages: &'a Packages,
    kernel: PathBuf,
    initrd: Vec<u8>,
    disks: [PathBuf; 2],
    console: PathBuf,
}

impl<'a> Debian<'a> {
    /// Creates the machine. `files` are copied to its root file system; its script `/etc/test-network` runs before the
    /// services. `/dev/vdb` is a tar archive of the directory `content`.
    ///
    /// # Errors
    /// When Debian's packages cannot be fetched.
    pub fn new(packages: &'a Packages, cache: &Path, name: &str, files: &[File], content: &Path) -> Result<Self> {
        let image = root_image(packages, cache)?;
        let kernel = packages.kernel_directory(KERNEL_VERSION);
        let units = [
            ("etc/systemd/system/test-serial.service", SERIAL_UNIT.to_owned()),
            ("etc/systemd/system/test-network.service", NETWORK_UNIT.to_owned()),
            ("etc/systemd/system/multi-user.target.d/test.conf", TARGET_DROP_IN.to_owned()),
        ];
        let serial = ("usr/local/sbin/test-serial", EXECUTABLE_MODE, include_str!("../guest/serial").to_owned());
        let readable = units.iter().chain(files).map(|(path, content)| (*path, READABLE_MODE, content.clone()));
        let all: Vec<_> = readable.chain([serial]).collect();
        let initrd = initrd::build_for_disk(packages, &kernel, &MODULES, &all)?;
        let disks = [cache.join(format!("{name}.ext4")), cache.join(format!("{name}.tar"))];
        run(command_tied_to_parent("cp").arg("--sparse=always").arg(image).arg(&disks[0]))?;
        run(command_tied_to_parent("tar").arg("-C").arg(content).arg("-cf").arg(&disks[1]).arg("."))?;
        Ok(Self { packages, kernel, initrd, disks, console: cache.join(format!("{name}.console")) })
    }

    /// Boots the machine. Fails when QEMU or Debian does not start.
    pub fn boot(&self) -> Result<Guest> {
        let hardware = Hardware { nics: &[], disks: &self.disks, memory: "1536M" };
        Guest::boot(self.packages, &self.kernel, &self.initrd, hardware, KERNEL_ARGUMENTS, &self.console)
    }
}

impl Drop for Debian<'_> {
    fn drop(&mut self) {
        for disk in &self.disks {
            let _ = fs::remove_file(disk);
        }
    }
}
