//! Measures the time from a load balancer's start to its first forwarded packets, with many services and servers. Also
//! measures the time from a change of one server to its effect in the kernel. A real load balancer at a virtual device
//! and a real controller run in a network namespace that ends with this process.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_api::types::NewFleet;
use coreward_dataplane::lb::PinnedServers;
use coreward_model::{ServerId, ServiceAddress, tuple::TransportProtocol};
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{MsgFlags, recv};

use crate::agent::BpfPinDirectory;
use crate::controller::{self, build_fleet_document, service_vip};
use crate::controller_process::{ControllerProcess, ScratchDirectory};
use crate::fake_agent;
use crate::namespace;
use crate::report::{BenchReport, ReportTable};
use crate::test_env::{LoadBalancerProcess, make_veth_network};

/// Options of `coreward-lab bench start`.
#[derive(Debug, Clone, clap::Args)]
pub struct StartupBenchArgs {
    /// Number of services
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1024))]
    services: u32,
    /// Number of servers; each belongs to one service
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    servers: u32,
    /// Number of starts of the load balancer
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    starts: u32,
    /// Number of servers that change, one after the other
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    changes: u32,
}

/// Maximum time to wait for a forwarded packet, which is reached only after a fault.
const FORWARDED_PACKET_TIMEOUT: Duration = Duration::from_secs(60);

/// Measures starts of the load balancer and changes of servers in a new thread, which enters its own network namespace.
/// Fails without root, or when a process does not start.
pub fn run_startup_bench(args: &StartupBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::run_measurement_in_new_thread("start", args, measure_load_balancer_starts)
}

fn measure_load_balancer_starts(args: &StartupBenchArgs) -> anyhow::Result<BenchReport> {
    make_veth_network()?;
    let (scratch_directory, pin_directory) = (ScratchDirectory::new()?, BpfPinDirectory::new()?);
    let fleet_args = controller::ControllerBenchArgs {
        agents: args.servers,
        services: args.services,
        ..controller::ControllerBenchArgs::default()
    };
    let mut controller = ControllerProcess::start_without_fleet(&scratch_directory.0)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut fleet_document = build_fleet_document(&fleet_args);
    let first_generation = runtime.block_on(apply_fleet_document(&mut controller, &fleet_document, 0))?;
    let mut start_times = Vec::new();
    for _ in 0..args.starts {
        let _ = std::fs::remove_dir_all(pin_directory.0.join("lb1"));
        let start = Instant::now();
        let balancer = LoadBalancerProcess::start(&controller, &scratch_directory, &pin_directory)?;
        start_times.push(measure_start_times(args.services, start)?);
        drop(balancer);
    }
    let _balancer = LoadBalancerProcess::start(&controller, &scratch_directory, &pin_directory)?;
    measure_start_times(args.services, Instant::now())?;
    let mut change_times = Vec::new();
    for (generation, change_index) in (first_generation..).zip(0..args.changes) {
        let server_index = change_index * (args.servers / args.changes);
        let drain_times = runtime.block_on(measure_server_drain(
            &mut controller,
            &pin_directory,
            &mut fleet_document,
            generation,
            server_index,
            args,
        ))?;
        change_times.push(drain_times);
    }
    Ok(build_startup_report(args, &start_times, &change_times))
}

/// Applies a fleet document in place of the document with generation `generation`. Returns the new generation.
async fn apply_fleet_document(
    controller: &mut ControllerProcess,
    document: &str,
    generation: u64,
) -> anyhow::Result<u64> {
    let new_fleet = NewFleet { name: "bench".into(), text: document.to_owned(), generation, dry_run: false };
    Ok(controller.connect_operator_client().await?.apply_fleet(&new_fleet).await?.generation)
}

/// Times from a load balancer's start until its first forwarded packet, and until it has forwarded a packet for every
/// service.
struct LoadBalancerStartTimes {
    time_to_first_packet: Duration,
    time_to_all_services: Duration,
}

/// Packet socket at the servers' end of the veth pair. It receives forwarded packets, and also sends the clients'
/// packets.
struct ServerSidePacketSocket {
    socket: OwnedFd,
    own_mac: [u8; 6],
    lb_mac: [u8; 6],
}

const SYN_FRAME_BYTES: usize = 14 + 20 + 20;

impl ServerSidePacketSocket {
    fn open_packet_socket() -> anyhow::Result<Self> {
        let protocol = libc::ETH_P_IP as u16;
        let socket_type = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket() returns a new descriptor, owned by nothing else, or -1, which is checked.
        let descriptor = unsafe { libc::socket(libc::AF_PACKET, socket_type, i32::from(protocol.to_be())) };
        Errno::result(descriptor).context("a packet socket")?;
        // SAFETY: the descriptor is new and owned by nothing else.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // SAFETY: sockaddr_ll is plain data, for which all zeros is a value.
        let mut bind_address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        bind_address.sll_family = libc::AF_PACKET as u16;
        bind_address.sll_protocol = protocol.to_be();
        bind_address.sll_ifindex = if_nametoindex("eth1")? as i32;
        // SAFETY: the pointer and the length are those of a sockaddr_ll that lives until the call returns.
        let bind_result = unsafe {
            libc::bind(socket.as_raw_fd(), (&raw const bind_address).cast(), size_of::<libc::sockaddr_ll>() as u32)
        };
        Errno::result(bind_result).context("eth1")?;
        Ok(Self { socket, own_mac: read_device_mac("eth1")?, lb_mac: read_device_mac("eth0")? })
    }

    /// Sends a SYN for a service's VIP from client port `client_port` to the load balancer.
    fn send_syn(&self, vip: Ipv4Addr, client_port: u16) {
        let mut frame = [0u8; SYN_FRAME_BYTES];
        frame[..6].copy_from_slice(&self.lb_mac);
        frame[6..12].copy_from_slice(&self.own_mac);
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14..24].copy_from_slice(&[0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6]);
        frame[26..30].copy_from_slice(&[10, 1, 0, 7]);
        frame[30..34].copy_from_slice(&vip.octets());
        frame[34..36].copy_from_slice(&client_port.to_be_bytes());
        frame[36..38].copy_from_slice(&80u16.to_be_bytes());
        frame[46] = 5 << 4;
        frame[47] = 2;
        // The device's queue may be full briefly, but later SYNs follow.
        let _ = nix::unistd::write(&self.socket, &frame);
    }

    /// Receives all waiting packets that the load balancer has forwarded, and returns their VIPs.
    fn receive_forwarded_vips(&self) -> Vec<Ipv4Addr> {
        let mut vips = Vec::new();
        let mut frame = [0u8; 256];
        while let Ok(length) = recv(self.socket.as_raw_fd(), &mut frame, MsgFlags::MSG_DONTWAIT) {
            if length >= SYN_FRAME_BYTES && frame[6..12] == self.lb_mac {
                vips.extend(<[u8; 4]>::try_from(&frame[30..34]).map(Ipv4Addr::from));
            }
        }
        vips
    }
}

fn read_device_mac(device: &str) -> anyhow::Result<[u8; 6]> {
    let is_requested_device = |entry: &nix::ifaddrs::InterfaceAddress| entry.interface_name == device;
    let addresses = nix::ifaddrs::getifaddrs()?.filter(is_requested_device);
    let mut mac_addresses = addresses.filter_map(|entry| entry.address?.as_link_addr()?.addr());
    mac_addresses.next().with_context(|| format!("{device} has no MAC address"))
}

/// Sends SYNs to each service until the load balancer has forwarded one of them. Returns the start times, counted from
/// `start`.
fn measure_start_times(service_count: u32, start: Instant) -> anyhow::Result<LoadBalancerStartTimes> {
    let server_socket = ServerSidePacketSocket::open_packet_socket()?;
    let mut waiting_vips: BTreeSet<Ipv4Addr> = (0..service_count).map(|service| *service_vip(service).ip()).collect();
    let (mut until_first_packet, mut client_port) = (None, 1024);
    while !waiting_vips.is_empty() {
        ensure!(
            start.elapsed() < FORWARDED_PACKET_TIMEOUT,
            "{} services forward nothing after {FORWARDED_PACKET_TIMEOUT:?}",
            waiting_vips.len()
        );
        // A batch is at most as long as a short queue. The other services follow in the next iteration.
        for vip in waiting_vips.iter().copied().take(64).collect::<Vec<_>>() {
            server_socket.send_syn(vip, client_port);
        }
        client_port = if client_port == u16::MAX { 1024 } else { client_port + 1 };
        std::thread::sleep(Duration::from_micros(500));
        for vip in server_socket.receive_forwarded_vips() {
            until_first_packet.get_or_insert_with(|| start.elapsed());
            waiting_vips.remove(&vip);
        }
    }
    let time_to_all_services = start.elapsed();
    Ok(LoadBalancerStartTimes {
        time_to_first_packet: until_first_packet.unwrap_or(time_to_all_services),
        time_to_all_services,
    })
}

/// Times from the request for a change of the fleet until the API's answer, and until the kernel has the change.
struct FleetChangeTimes {
    time_to_api_answer: Duration,
    time_to_kernel_update: Duration,
}

async fn measure_server_drain(
    controller: &mut ControllerProcess,
    pin_directory: &BpfPinDirectory,
    document: &mut String,
    generation: u64,
    server_index: u32,
    args: &StartupBenchArgs,
) -> anyhow::Result<FleetChangeTimes> {
    let api_client = controller.connect_operator_client().await?;
    let status = api_client.status(false).await?;
    let server_name = fake_agent::server_name_of_agent(server_index);
    let server_status =
        status.servers.iter().find(|known| known.name == server_name).context("the server is not known")?;
    let server_id = ServerId::try_from(u64::from(server_status.id))?;
    let service_address = ServiceAddress {
        vip_and_port: service_vip(server_index % args.services).into(),
        protocol: TransportProtocol::Tcp,
    };
    let pinned_servers = PinnedServers::open(&pin_directory.0.join("lb1"))?;
    let service = pinned_servers.service_index(&service_address).context("the service is not known")?;
    let name_line = format!("name = \"{server_name}\"\n");
    *document = document.replacen(&name_line, &format!("{name_line}state = \"draining\"\n"), 1);
    let new_fleet = NewFleet { name: "bench".into(), text: document.clone(), generation, dry_run: false };
    let start = Instant::now();
    let watcher_thread = std::thread::spawn(move || {
        while start.elapsed() < FORWARDED_PACKET_TIMEOUT {
            if pinned_servers.server(service, server_id).is_some_and(|server| !server.is_eligible) {
                return Some(start.elapsed());
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        None
    });
    api_client.apply_fleet(&new_fleet).await?;
    let time_to_api_answer = start.elapsed();
    let watcher_result = tokio::task::spawn_blocking(move || watcher_thread.join()).await?;
    let time_to_kernel = watcher_result.ok().flatten().context("the change never came")?;
    Ok(FleetChangeTimes { time_to_api_answer, time_to_kernel_update: time_to_kernel })
}

fn build_startup_report(
    args: &StartupBenchArgs,
    start_times: &[LoadBalancerStartTimes],
    change_times: &[FleetChangeTimes],
) -> BenchReport {
    let mut table = ReportTable::new(&["ms", "median", "least", "most"]);
    let mut add_times_row = |row_name: &str, values: Vec<f64>| table.add_summary_row(row_name, values, []);
    let to_ms = |time: Duration| time.as_secs_f64() * 1e3;
    add_times_row(
        "from exec to the first packet forwarded",
        start_times.iter().map(|start| to_ms(start.time_to_first_packet)).collect(),
    );
    add_times_row(
        "from exec to a packet of every service",
        start_times.iter().map(|start| to_ms(start.time_to_all_services)).collect(),
    );
    add_times_row(
        "a server drained: from apply to its answer",
        change_times.iter().map(|change| to_ms(change.time_to_api_answer)).collect(),
    );
    let ms_after_api_answer =
        |change: &FleetChangeTimes| to_ms(change.time_to_kernel_update.saturating_sub(change.time_to_api_answer));
    add_times_row("  from the answer to the kernel", change_times.iter().map(ms_after_api_answer).collect());
    add_times_row(
        "  from apply to the kernel",
        change_times.iter().map(|change| to_ms(change.time_to_kernel_update)).collect(),
    );
    BenchReport {
        name: "start",
        heading: "The start of a load balancer",
        method_description: format!(
            "A load balancer without state from before (generic XDP at a veth device) starts next to a controller with \
             {} services and {} servers, each of one service, which answer ARP; SYNs for every service come all the \
             while. {} starts. Then {} servers are drained, one after the other. To reach: less than 1 s to the first \
             packet, less than 10 ms from the answer to the kernel.",
            args.services, args.servers, args.starts, args.changes,
        ),
        tables: vec![table],
    }
}
