//! Gathering of facts, without judgement and without changes to the machine.

mod announcement;
mod certificates;
mod controller;
mod device;
mod netfilter;
mod polling;
mod settings;
mod sockets;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use coreward_dataplane::{capabilities, check, lb, server};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::resource::{Resource, getrlimit};

use crate::facts::{
    Address, BpfFileSystem, Clock, Facts, IPV6_FORWARDING, Kernel, Role, Settings, device_sysctl, disable_ipv6_sysctl,
};
pub use settings::CliOptions;

const PIN_DIRECTORY: &str = "/sys/fs/bpf/coreward";

/// Gathers facts about this machine, even that a property is not visible. Fails if file or options are wrong.
pub fn gather(options: &CliOptions) -> anyhow::Result<Facts> {
    let options = options.read()?;
    let (role, settings) = (options.role, options.settings);
    let fleet = controller::query_controllers(
        role,
        &settings.controllers,
        options.tls.as_ref(),
        options.machine_name.as_deref(),
    );
    let mut services = options.services;
    services.extend(fleet.services);
    if role == Role::Server {
        services.iter_mut().for_each(|service| service.sockets = Some(sockets::gather_sockets(&service.address)));
    }
    let missing_rights = capabilities::missing_capabilities()?;
    Ok(Facts {
        role,
        kernel: kernel(role, missing_rights.is_empty()),
        open_files_limit: getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard),
        sysctls: sysctls(settings.interface.as_deref()),
        bpf_file_system: bpf_file_system(settings.pin_directory.as_deref().unwrap_or(Path::new(PIN_DIRECTORY))),
        pins_problem: if missing_rights.is_empty() { pins_problem(role, &settings) } else { None },
        device: settings.interface.as_deref().and_then(|name| device::gather(name, &settings, options.rss)),
        addresses: addresses(),
        default_routes: default_routes(&fs::read_to_string("/proc/thread-self/net/route").unwrap_or_default()),
        cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
        clock: clock(),
        netfilter: netfilter::gather(),
        reachable_controller: fleet.reachable_controller,
        services,
        servers: fleet.servers,
        future_report_count: fleet.future_report_count,
        announcement: settings.announce_table.map(announcement::gather),
        controller_facts: options.controller_facts,
        polling_threads: if role == Role::Server { polling::find_polling_threads() } else { Vec::new() },
        certificates: certificates::gather(role, options.tls.as_ref(), options.machine_name.as_deref())?,
        settings,
        missing_rights,
    })
}

fn kernel(role: Role, with_rights: bool) -> Kernel {
    let release =
        nix::sys::utsname::uname().map_or_else(|_| String::new(), |name| name.release().to_string_lossy().into());
    let needed: &[&str] = match role {
        Role::Lb => &["lb"],
        Role::Server => &["server", "steer", "cpu_load"],
        Role::Controller => &[],
    };
    let programs = if with_rights { check::load_programs(needed) } else { Vec::new() };
    Kernel {
        release,
        has_btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        programs: programs
            .into_iter()
            .map(|(name, answer)| (name, answer.map_err(|error| format!("{error:#}"))))
            .collect(),
    }
}

fn sysctls(interface: Option<&str>) -> BTreeMap<String, String> {
    let mut paths = vec!["net/core/bpf_jit_enable".to_owned(), "net/ipv4/tcp_timestamps".to_owned()];
    for device in ["all"].into_iter().chain(interface) {
        for name in ["arp_ignore", "arp_announce", "rp_filter", "forwarding", "send_redirects"] {
            paths.push(device_sysctl(device, name));
        }
    }
    paths.extend(["lo"].into_iter().chain(interface).map(disable_ipv6_sysctl));
    paths.push(IPV6_FORWARDING.to_owned());
    let read = |path: String| {
        let value = fs::read_to_string(Path::new("/proc/sys").join(&path)).ok()?;
        Some((path, value.trim().to_owned()))
    };
    paths.into_iter().filter_map(read).collect()
}

fn bpf_file_system(pins: &Path) -> BpfFileSystem {
    let directory = pins.ancestors().find(|directory| directory.exists()).unwrap_or(Path::new("/"));
    let kind = nix::sys::statfs::statfs(directory).map(|status| status.filesystem_type());
    BpfFileSystem { directory: directory.to_owned(), is_bpf: kind == Ok(nix::sys::statfs::BPF_FS_MAGIC) }
}

fn pins_problem(role: Role, settings: &Settings) -> Option<String> {
    let pins = settings.pin_directory.as_deref()?;
    match role {
        Role::Lb => lb::pinned_problem(pins),
        Role::Server => server::pinned_problem(pins).unwrap_or_else(|error| Some(format!("{error:#}"))),
        Role::Controller => None,
    }
}

fn addresses() -> Vec<Address> {
    let entries = getifaddrs().into_iter().flatten().filter(|entry| entry.flags.contains(InterfaceFlags::IFF_UP));
    let address = |entry: nix::ifaddrs::InterfaceAddress| {
        let ip = |address: Option<nix::sys::socket::SockaddrStorage>| {
            let address = address?;
            let ipv4 = address.as_sockaddr_in().map(|socket| IpAddr::from(socket.ip()));
            ipv4.or_else(|| address.as_sockaddr_in6().map(|socket| IpAddr::from(socket.ip())))
        };
        Some(Address { address: ip(entry.address)?, mask: ip(entry.netmask)?, device: entry.interface_name })
    };
    entries.filter_map(address).collect()
}

/// Returns the devices of default routes (0.0.0.0/0) in the text of /proc/net/route.
fn default_routes(text: &str) -> BTreeSet<String> {
    let device = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (device, destination, mask) = (words.first()?, words.get(1)?, words.get(7)?);
        (*destination == "00000000" && *mask == "00000000").then(|| (*device).to_owned())
    };
    text.lines().skip(1).filter_map(device).collect()
}

fn clock() -> Clock {
    let source = fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    // SAFETY: the struct consists of integers, for which zero is valid; with modes 0 the call changes nothing.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the struct outlives the call.
    let answer = unsafe { libc::adjtimex(&raw mut timex) };
    Clock {
        source: source.unwrap_or_default().trim().to_owned(),
        synchronised: (answer >= 0).then_some(timex.status & libc::STA_UNSYNC == 0),
    }
}

/// Returns the directory of a file, whose path may be a bare name.
fn directory_of(path: &Path) -> PathBuf {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

/// Returns the error of binding a TCP socket to the address, if any.
fn bind_problem(listen: SocketAddr) -> Option<String> {
    std::net::TcpListener::bind(listen).err().map(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_route_has_prefix_length_0() {
        let text = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                    eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                    eth1\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n";
        assert_eq!(default_routes(text), BTreeSet::from(["eth0".to_owned()]));
        assert!(default_routes("").is_empty());
    }

    #[test]
    fn facts_include_loopback_and_kernel() {
        assert!(addresses().iter().any(|held| held.device == "lo" && held.address.is_loopback()));
        assert!(kernel(Role::Lb, false).release.starts_with(|digit: char| digit.is_ascii_digit()));
        assert!(sysctls(Some("lo")).contains_key("net/ipv4/conf/lo/arp_ignore"));
        assert!(!bpf_file_system(Path::new("/proc/no/such/place")).is_bpf);
    }

    #[test]
    fn port_in_use_cannot_be_bound() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(bind_problem(taken.local_addr().unwrap()).unwrap().contains("in use"));
        assert_eq!(bind_problem("127.0.0.1:0".parse().unwrap()), None);
    }
}
