//! Client and server in two network namespaces that are connected by a veth.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_orchestrator::socket::UdpBatchSocket;
use nix::sched::{CloneFlags, setns};

use super::REQUEST_PAYLOAD;
use crate::namespace::{enter_new_network_namespace, run_ip_command};

const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub const SERVER_ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 2), 4000);
pub const VETH_DEVICE_NAME: &str = "eth0";
const CLIENT_MAC: &str = "02:00:00:00:09:01";
const SERVER_MAC: &str = "02:00:00:00:09:02";
const VETH_CARRIER_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs `action` with the client's UDP socket, in a new thread in the server's namespace. Fails without root.
pub fn run_with_client_socket<T: Send>(
    action: impl FnOnce(&mut UdpBatchSocket) -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    std::thread::scope(|scope| {
        let server_thread = scope.spawn(|| {
            let mut client = connect_namespaces()?;
            action(&mut client)
        });
        server_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Connects two new namespaces by a veth, and leaves the calling thread in the server's namespace. Returns a socket in
/// the client's namespace.
fn connect_namespaces() -> anyhow::Result<UdpBatchSocket> {
    enter_new_network_namespace()?;
    let client_namespace = open_own_namespace()?;
    enter_new_network_namespace()?;
    let server_namespace = open_own_namespace()?;
    let client_namespace_path = format!("/proc/{}/fd/{}", std::process::id(), client_namespace.as_raw_fd());
    run_ip_command(&format!(
        "link add {VETH_DEVICE_NAME} address {SERVER_MAC} type veth peer name {VETH_DEVICE_NAME} address {CLIENT_MAC} \
         netns {client_namespace_path}"
    ))?;
    configure_veth_end(*SERVER_ADDRESS.ip(), CLIENT_ADDRESS, CLIENT_MAC)?;
    setns(&client_namespace, CloneFlags::CLONE_NEWNET).context("entering the client's namespace")?;
    configure_veth_end(CLIENT_ADDRESS, *SERVER_ADDRESS.ip(), SERVER_MAC)?;
    wait_for_veth_carrier()?;
    let socket = UdpBatchSocket::bind(SocketAddrV4::new(CLIENT_ADDRESS, 0), REQUEST_PAYLOAD.len())?;
    setns(&server_namespace, CloneFlags::CLONE_NEWNET).context("entering the server's namespace")?;
    wait_for_veth_carrier()?;
    Ok(socket)
}

fn open_own_namespace() -> anyhow::Result<File> {
    File::open("/proc/thread-self/ns/net").context("the thread's network namespace")
}

/// Configures this end of the veth. The neighbour entry for the other end is static, so that no burst waits for ARP.
fn configure_veth_end(own_address: Ipv4Addr, other_address: Ipv4Addr, other_mac: &str) -> anyhow::Result<()> {
    run_ip_command("link set lo up")?;
    run_ip_command(&format!("address add {own_address}/24 dev {VETH_DEVICE_NAME}"))?;
    run_ip_command(&format!("link set {VETH_DEVICE_NAME} up"))?;
    run_ip_command(&format!(
        "neighbour replace {other_address} lladdr {other_mac} dev {VETH_DEVICE_NAME} nud permanent"
    ))
}

/// Waits until the veth has a carrier. Before this, the veth drops all frames.
fn wait_for_veth_carrier() -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let link_listing =
            Command::new("ip").args(["-brief", "link", "show", VETH_DEVICE_NAME]).output().context("ip")?;
        if String::from_utf8_lossy(&link_listing.stdout).contains(" UP ") {
            return Ok(());
        }
        ensure!(start.elapsed() < VETH_CARRIER_TIMEOUT, "{VETH_DEVICE_NAME} is not up after {VETH_CARRIER_TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
