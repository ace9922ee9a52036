//! Gathering of facts, which neither judges nor changes the machine.

mod announcement;
mod certificates;
mod controller;
mod device;
mod netfilter;
mod polling_threads;
mod settings;
mod sockets;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use coreward_dataplane::{capabilities, lb, server, verifier_check};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::resource::{Resource, getrlimit};

use crate::facts::{
    BpfFileSystem, ClockFacts, DaemonSettings, DeviceAddress, IPV6_FORWARDING_SYSCTL, KernelFacts, MachineFacts,
    MachineRole, ServiceFacts, ipv4_device_sysctl_path, ipv6_disabling_sysctl_path,
};
pub use settings::DoctorOptions;

const DEFAULT_PIN_DIRECTORY: &str = "/sys/fs/bpf/coreward";

/// Returns facts about this machine. Facts that cannot be read are recorded as unknown. Fails if the configuration file
/// or the options are invalid.
pub fn gather_facts(options: &DoctorOptions) -> anyhow::Result<MachineFacts> {
    let gathered_settings = options.gather_settings()?;
    let (role, settings) = (gathered_settings.role, gathered_settings.settings);
    let (tls_files, machine_name) = (gathered_settings.tls_files.as_ref(), gathered_settings.machine_name.as_deref());
    let fleet_facts = controller::query_controllers(role, &settings.controllers, tls_files, machine_name);
    let missing_capabilities = capabilities::missing_capabilities()?;
    let pin_directory = settings.pin_directory.as_deref().unwrap_or(Path::new(DEFAULT_PIN_DIRECTORY));
    Ok(MachineFacts {
        role,
        kernel: gather_kernel(role, missing_capabilities.is_empty()),
        open_files_limit: getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard),
        sysctl_values: read_sysctls(settings.interface.as_deref()),
        bpf_file_system: find_bpf_file_system(pin_directory),
        pin_takeover_problem: if missing_capabilities.is_empty() {
            find_pin_takeover_problem(role, &settings)
        } else {
            None
        },
        device: settings
            .interface
            .as_deref()
            .and_then(|name| device::gather_device(name, &settings, gathered_settings.rss_device)),
        addresses: gather_addresses(),
        default_route_devices: parse_default_route_devices(
            &fs::read_to_string("/proc/thread-self/net/route").unwrap_or_default(),
        ),
        online_cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
        clock: gather_clock(),
        netfilter: netfilter::gather_netfilter(),
        answering_controller: fleet_facts.answering_controller,
        services: gather_services(role, gathered_settings.services, fleet_facts.services),
        servers_by_name: fleet_facts.servers_by_name,
        future_dated_report_count: fleet_facts.future_dated_report_count,
        announcement: settings.announcement_table_number.map(announcement::gather_announcement),
        controller_facts: gathered_settings.controller_facts,
        polling_threads: if role == MachineRole::Server { polling_threads::find_polling_threads() } else { Vec::new() },
        certificates: certificates::gather_certificates(role, tls_files, machine_name)?,
        settings,
        missing_capabilities,
    })
}

/// Returns all services to check. On a server, each service includes facts about its sockets.
fn gather_services(
    role: MachineRole,
    additional_services: Vec<ServiceFacts>,
    fleet_services: Vec<ServiceFacts>,
) -> Vec<ServiceFacts> {
    let mut services = additional_services;
    services.extend(fleet_services);
    if role == MachineRole::Server {
        services.iter_mut().for_each(|service| service.sockets = Some(sockets::gather_sockets(&service.address)));
    }
    services
}

fn gather_kernel(role: MachineRole, has_capabilities: bool) -> KernelFacts {
    let kernel_release =
        nix::sys::utsname::uname().map_or_else(|_| String::new(), |name| name.release().to_string_lossy().into());
    let program_names: &[&str] = match role {
        MachineRole::Lb => &["lb"],
        MachineRole::Server => &["server", "steer", "cpu_load"],
        MachineRole::Controller => &[],
    };
    let load_results = if has_capabilities { verifier_check::try_load_programs(program_names) } else { Vec::new() };
    KernelFacts {
        release: kernel_release,
        has_btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        program_load_results: load_results
            .into_iter()
            .map(|(name, answer)| (name, answer.map_err(|error| format!("{error:#}"))))
            .collect(),
    }
}

fn read_sysctls(interface: Option<&str>) -> BTreeMap<String, String> {
    let mut sysctl_paths = vec!["net/core/bpf_jit_enable".to_owned(), "net/ipv4/tcp_timestamps".to_owned()];
    for device in ["all"].into_iter().chain(interface) {
        for name in ["arp_ignore", "arp_announce", "rp_filter", "forwarding", "send_redirects"] {
            sysctl_paths.push(ipv4_device_sysctl_path(device, name));
        }
    }
    sysctl_paths.extend(["lo"].into_iter().chain(interface).map(ipv6_disabling_sysctl_path));
    sysctl_paths.push(IPV6_FORWARDING_SYSCTL.to_owned());
    let read_sysctl = |path: String| {
        let value = fs::read_to_string(Path::new("/proc/sys").join(&path)).ok()?;
        Some((path, value.trim().to_owned()))
    };
    sysctl_paths.into_iter().filter_map(read_sysctl).collect()
}

fn find_bpf_file_system(pin_directory: &Path) -> BpfFileSystem {
    let existing_directory = pin_directory.ancestors().find(|directory| directory.exists()).unwrap_or(Path::new("/"));
    let file_system_type = nix::sys::statfs::statfs(existing_directory).map(|status| status.filesystem_type());
    BpfFileSystem {
        nearest_existing_directory: existing_directory.to_owned(),
        is_bpf_file_system: file_system_type == Ok(nix::sys::statfs::BPF_FS_MAGIC),
    }
}

fn find_pin_takeover_problem(role: MachineRole, settings: &DaemonSettings) -> Option<String> {
    let pin_directory = settings.pin_directory.as_deref()?;
    match role {
        MachineRole::Lb => lb::find_takeover_problem(pin_directory),
        MachineRole::Server => {
            server::find_takeover_problem(pin_directory).unwrap_or_else(|error| Some(format!("{error:#}")))
        }
        MachineRole::Controller => None,
    }
}

fn gather_addresses() -> Vec<DeviceAddress> {
    let interface_entries =
        getifaddrs().into_iter().flatten().filter(|entry| entry.flags.contains(InterfaceFlags::IFF_UP));
    let to_device_address = |entry: nix::ifaddrs::InterfaceAddress| {
        let to_ip_address = |address: Option<nix::sys::socket::SockaddrStorage>| {
            let socket_address = address?;
            let ipv4_address = socket_address.as_sockaddr_in().map(|socket| IpAddr::from(socket.ip()));
            ipv4_address.or_else(|| socket_address.as_sockaddr_in6().map(|socket| IpAddr::from(socket.ip())))
        };
        Some(DeviceAddress {
            address: to_ip_address(entry.address)?,
            mask: to_ip_address(entry.netmask)?,
            device_name: entry.interface_name,
        })
    };
    interface_entries.filter_map(to_device_address).collect()
}

/// Returns the devices of the default routes (0.0.0.0/0) in the text of /proc/net/route.
fn parse_default_route_devices(text: &str) -> BTreeSet<String> {
    let parse_default_route_device = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (device, destination, mask) = (columns.first()?, columns.get(1)?, columns.get(7)?);
        (*destination == "00000000" && *mask == "00000000").then(|| (*device).to_owned())
    };
    text.lines().skip(1).filter_map(parse_default_route_device).collect()
}

fn gather_clock() -> ClockFacts {
    let clock_source = fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    // SAFETY: the struct consists of integers, for which zero is valid; with modes 0 the call changes nothing.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the struct outlives the call.
    let adjtimex_result = unsafe { libc::adjtimex(&raw mut timex) };
    ClockFacts {
        clock_source: clock_source.unwrap_or_default().trim().to_owned(),
        is_synchronised: (adjtimex_result >= 0).then_some(timex.status & libc::STA_UNSYNC == 0),
    }
}

/// Returns the directory that contains a file. `path` may be a file name without a directory.
fn parent_directory(path: &Path) -> PathBuf {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

/// Returns the reason why a TCP socket cannot be bound to the address, or `None` if it can.
fn find_bind_problem(listen_address: SocketAddr) -> Option<String> {
    std::net::TcpListener::bind(listen_address).err().map(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_routes_with_prefix_length_0_are_default_routes() {
        let text = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                    eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                    eth1\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n";
        assert_eq!(parse_default_route_devices(text), BTreeSet::from(["eth0".to_owned()]));
        assert!(parse_default_route_devices("").is_empty());
    }

    #[test]
    fn gathered_facts_include_loopback_address_and_kernel_release() {
        assert!(
            gather_addresses()
                .iter()
                .any(|device_address| device_address.device_name == "lo" && device_address.address.is_loopback())
        );
        assert!(gather_kernel(MachineRole::Lb, false).release.starts_with(|digit: char| digit.is_ascii_digit()));
        assert!(read_sysctls(Some("lo")).contains_key("net/ipv4/conf/lo/arp_ignore"));
        assert!(!find_bpf_file_system(Path::new("/proc/no/such/place")).is_bpf_file_system);
    }

    #[test]
    fn address_in_use_is_a_bind_problem() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(find_bind_problem(listener.local_addr().unwrap()).unwrap().contains("in use"));
        assert_eq!(find_bind_problem("127.0.0.1:0".parse().unwrap()), None);
    }
}
