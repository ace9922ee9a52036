//! A client and a server in two network namespaces, connected by a veth.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_orchestrator::socket::BatchSocket;
use nix::sched::{CloneFlags, setns};

use super::PAYLOAD;
use crate::namespace::{enter_new, ip};

const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub const SERVER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 2), 4000);
pub const INTERFACE: &str = "eth0";
const CLIENT_MAC: &str = "02:00:00:00:09:01";
const SERVER_MAC: &str = "02:00:00:00:09:02";
const TIMEOUT: Duration = Duration::from_secs(10);

/// Runs `action` with a UDP socket of the client, in a new thread in the server's namespace. Fails without root.
pub fn with_client<T: Send>(action: impl FnOnce(&mut BatchSocket) -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut client = connect()?;
            action(&mut client)
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Connects two new namespaces by a veth, and leaves the thread in the server's one. Returns a socket of the client.
fn connect() -> anyhow::Result<BatchSocket> {
    enter_new()?;
    let client = own_namespace()?;
    enter_new()?;
    let server = own_namespace()?;
    let client_path = format!("/proc/{}/fd/{}", std::process::id(), client.as_raw_fd());
    ip(&format!(
        "link add {INTERFACE} address {SERVER_MAC} type veth peer name {INTERFACE} address {CLIENT_MAC} netns \
         {client_path}"
    ))?;
    configure(*SERVER.ip(), CLIENT, CLIENT_MAC)?;
    setns(&client, CloneFlags::CLONE_NEWNET).context("entering the client's namespace")?;
    configure(CLIENT, *SERVER.ip(), SERVER_MAC)?;
    wait_until_up()?;
    let socket = BatchSocket::bind(SocketAddrV4::new(CLIENT, 0), PAYLOAD.len())?;
    setns(&server, CloneFlags::CLONE_NEWNET).context("entering the server's namespace")?;
    wait_until_up()?;
    Ok(socket)
}

fn own_namespace() -> anyhow::Result<File> {
    File::open("/proc/thread-self/ns/net").context("the thread's network namespace")
}

/// Configures this end of the veth, with a static neighbour entry for the other end, so that no burst waits for ARP.
fn configure(own: Ipv4Addr, other: Ipv4Addr, other_mac: &str) -> anyhow::Result<()> {
    ip("link set lo up")?;
    ip(&format!("address add {own}/24 dev {INTERFACE}"))?;
    ip(&format!("link set {INTERFACE} up"))?;
    ip(&format!("neighbour replace {other} lladdr {other_mac} dev {INTERFACE} nud permanent"))
}

/// Waits until the veth has carrier, because it drops all frames before.
fn wait_until_up() -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let output = Command::new("ip").args(["-brief", "link", "show", INTERFACE]).output().context("ip")?;
        if String::from_utf8_lossy(&output.stdout).contains(" UP ") {
            return Ok(());
        }
        ensure!(started.elapsed() < TIMEOUT, "{INTERFACE} is not up after {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
