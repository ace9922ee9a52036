//! `make test-nic` boots QEMU guests with real NIC drivers and real RSS, and runs the real agent in them. It checks,
//! flow by flow, that packets arrive on the receive queue that our Toeplitz hash and the indirection table predict.
//!
//! * [`packages`]: QEMU, busybox, ethtool and the kernels, which are fetched from Debian but not installed
//! * [`kernel`], [`initrd`]: kernel and initial file system that a guest boots
//! * [`guest`]: QEMU, and commands over the serial line
//! * [`guest_tap`]: the network namespace and the sender of SYNs
//! * [`rss`]: settings that the NIC shows, and its actual behaviour
//! * [`agent`]: the tested agent in the guest
//! * [`forwarding`], [`emulated_hosts`]: a server that forwards packets, and the other machines of its network
//! * [`cases`]: guests and their checks
//!
//! `make test-units` (option `--units`) runs [`systemd_unit_checks`], [`ipvs`] and [`networks`], in guests with Debian
//! and systemd ([`debian`]).

mod agent;
mod cases;
mod check_tally;
mod debian;
mod emulated_hosts;
mod forwarding;
mod guest;
mod guest_tap;
mod host_commands;
mod initrd;
mod ipvs;
mod kernel;
mod networks;
mod packages;
mod rss;
mod systemd_unit_checks;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::cases::{GUEST_CASES, HostTestFiles};
use crate::check_tally::CheckTally;
use crate::packages::FetchedPackages;

/// Checks the agent against real NIC drivers in QEMU guests.
#[derive(Parser)]
struct NicTestArguments {
    /// Binary of `coreward` to test.
    #[arg(long)]
    coreward: PathBuf,
    /// Directory of downloaded packages.
    #[arg(long)]
    cache: PathBuf,
    /// Run only guests whose name contains this text.
    #[arg(long, default_value = "")]
    only: String,
    /// Run only this command (one line of shell) in the guests.
    #[arg(long)]
    run: Option<String>,
    /// Check Debian packages instead, under systemd. This directory has them in `old` and `new`.
    #[arg(long)]
    units: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = NicTestArguments::parse();
    let mut tally = CheckTally::default();
    if let Some(package_directory) = &arguments.units {
        check_debian_guests(&arguments, package_directory, &mut tally);
        return tally.print_summary();
    }
    let selected_cases = GUEST_CASES.iter().filter(|case| case.name_contains(&arguments.only));
    match prepare_test_files(&arguments) {
        Err(error) => {
            println!("No guest can be booted here: {error:#}");
            selected_cases.for_each(|case| tally.record_skipped(&case.name(), "no guest"));
        }
        Ok((test_files, _lock)) => {
            for case in selected_cases {
                if let Err(error) = case.boot_and_check(&test_files, arguments.run.as_deref(), &mut tally) {
                    tally.record_result(&case.name(), Err(error));
                }
            }
        }
    }
    tally.print_summary()
}

type CheckDebianGuest = fn(&FetchedPackages, &Path, &Path, Option<&str>, &mut CheckTally) -> Result<()>;

/// Names of the guests with Debian, with the functions that check them.
const DEBIAN_GUEST_CHECKS: [(&str, CheckDebianGuest); 3] = [
    ("Debian with systemd", systemd_unit_checks::check_debian_packages),
    ("Debian with IPVS", ipvs::check_migration_from_ipvs),
    ("Debian with bonds, VLANs and tunnels", networks::check_networks),
];

fn check_debian_guests(arguments: &NicTestArguments, package_directory: &Path, tally: &mut CheckTally) {
    match prepare_test_files(arguments) {
        Err(error) => {
            DEBIAN_GUEST_CHECKS.iter().for_each(|(name, _)| tally.record_skipped(name, &format!("{error:#}")));
        }
        Ok((test_files, _lock)) => {
            let command = arguments.run.as_deref();
            for (name, check) in DEBIAN_GUEST_CHECKS.iter().filter(|(name, _)| name.contains(&arguments.only)) {
                let check_result =
                    check(&test_files.packages, &test_files.log_directory, package_directory, command, tally);
                check_result.unwrap_or_else(|error| tally.record_result(name, Err(error)));
            }
        }
    }
}

/// Returns the files that guests need, and a lock that prevents a second run with the same directory. Fails when the
/// machine lacks a requirement, such as root or /dev/net/tun.
fn prepare_test_files(arguments: &NicTestArguments) -> Result<(HostTestFiles, Flock<fs::File>)> {
    if !nix::unistd::geteuid().is_root() {
        bail!("root is needed for a network namespace and a tap");
    }
    if !cfg!(target_arch = "x86_64") {
        bail!("an x86-64 machine is needed, for Debian's amd64 packages");
    }
    fs::metadata("/dev/net/tun").context("/dev/net/tun is needed")?;
    fs::create_dir_all(&arguments.cache).with_context(|| arguments.cache.display().to_string())?;
    let cache_directory = arguments.cache.canonicalize()?;
    let directory_lock = lock_exclusively(&cache_directory.join("lock"))?;
    let packages = FetchedPackages::load_or_fetch(&cache_directory.join("packages"))?;
    // A guest with systemd has its network inside, so this process needs no namespace. The guest's root file system is
    // fetched later.
    if arguments.units.is_none() {
        guest_tap::enter_network_namespace()?;
    }
    Ok((
        HostTestFiles { packages, coreward_binary: arguments.coreward.clone(), log_directory: cache_directory },
        directory_lock,
    ))
}

/// Returns an exclusive lock on a file, which the kernel releases however this process ends. Waits while another run
/// has it.
fn lock_exclusively(path: &Path) -> Result<Flock<fs::File>> {
    let lock_file = fs::File::create(path)?;
    let busy_file = match Flock::lock(lock_file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => return Ok(lock),
        Err((file, Errno::EWOULDBLOCK)) => file,
        Err((_, error)) => return Err(error).with_context(|| path.display().to_string()),
    };
    println!("another run is at work: waiting for its end");
    Flock::lock(busy_file, FlockArg::LockExclusive)
        .map_err(|(_, error)| error)
        .with_context(|| path.display().to_string())
}
