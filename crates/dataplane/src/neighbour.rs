//! Resolution of servers' MAC addresses in user space, by ARP (RFC 826) and neighbour discovery (RFC 4861).
//!
//! The kernel refreshes its neighbour table for packets that the host itself sends. XDP packets do not refresh it, so
//! the kernel would notice a new MAC address only after up to half a minute. Therefore this module probes every server
//! once a second at its known MAC address, and after a missed probe at the broadcast address. A changed MAC address is
//! applied within about two seconds, or at once if the server announces it (gratuitous ARP).
//!
//! [`ProbedNeighbours`] contains the state and the schedule without I/O. [`NeighbourResolver`] is the thread with the
//! sockets.

mod filter;
mod ndp;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_model::vlan::Vlan;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{MsgFlags, recv};
use parking_lot::Mutex;

use crate::lb::OuterSourceAddresses;
use crate::mac::MacAddress;
use crate::vlan_device;

/// Interval between probes of a neighbour whose MAC address is resolved.
pub const RESOLVED_NEIGHBOUR_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between probes of a neighbour whose MAC address is unresolved.
pub const UNRESOLVED_NEIGHBOUR_PROBE_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of probes in a burst, after which replies are read. With [`PROBE_BURST_INTERVAL`], it limits the rate
/// to 32,000 probes per second. This rate suffices to probe 10,000 servers within a third of a second, but does not
/// flood switches or servers.
pub const PROBES_PER_BURST: usize = 32;
/// Minimum time between two bursts of probes.
pub const PROBE_BURST_INTERVAL: Duration = Duration::from_millis(1);
/// Number of consecutive unanswered probes after which a neighbour counts as unresolved.
pub const MAX_MISSED_NEIGHBOUR_PROBES: u32 = 4;

/// Length in bytes of an Ethernet frame with an ARP packet for IPv4.
pub const ARP_FRAME_BYTES: usize = 42;
/// Maximum number of frames that are read before probes are sent again.
const MAX_REPLY_FRAMES_PER_BURST: usize = 256;
const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_VLAN: u16 = 0x8100;
/// First bytes of an ARP packet, with the hardware type Ethernet, the protocol IPv4, and the address lengths 6 and 4.
const ARP_ETHERNET_IPV4_HEADER: [u8; 6] = [0, 1, 8, 0, 6, 4];

/// Change of a neighbour's MAC address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeighbourMacChange {
    /// IP address of the neighbour.
    pub address: IpAddr,
    /// New MAC address of the neighbour, or `None` if the neighbour has become unresolved.
    pub mac: Option<MacAddress>,
}

/// Probe of a neighbour, which is sent as an ARP request or a neighbour solicitation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeighbourProbe {
    /// IP address of the neighbour to probe.
    pub address: IpAddr,
    /// MAC address to which the probe is sent, or `None` if the probe is broadcast or multicast.
    pub destination_mac: Option<MacAddress>,
}

#[derive(Debug, Clone)]
struct NeighbourState {
    mac: Option<MacAddress>,
    missed_probe_count: u32,
    next_probe_time: Duration,
}

/// State of all neighbours and the schedule of their probes. All times must be from the same monotonic clock.
#[derive(Debug, Clone, Default)]
pub struct ProbedNeighbours {
    states_by_address: BTreeMap<IpAddr, NeighbourState>,
    /// Next probe time and address of each neighbour, sorted by time.
    probe_schedule: BTreeSet<(Duration, IpAddr)>,
}

impl ProbedNeighbours {
    /// Sets the IP addresses to resolve. New addresses are due to be probed at `now`.
    pub fn set_addresses(&mut self, addresses: &[IpAddr], now: Duration) {
        let desired_addresses: BTreeSet<IpAddr> = addresses.iter().copied().collect();
        self.states_by_address.retain(|address, _| desired_addresses.contains(address));
        for address in desired_addresses {
            self.states_by_address.entry(address).or_insert(NeighbourState {
                mac: None,
                missed_probe_count: 0,
                next_probe_time: now,
            });
        }
        self.probe_schedule =
            self.states_by_address.iter().map(|(address, neighbour)| (neighbour.next_probe_time, *address)).collect();
    }

    /// Records the sender of a received ARP or neighbour discovery packet (reply, request or announcement). Returns the
    /// change of the sender's MAC address, or `None` if it has not changed.
    pub fn record_observed_mac(
        &mut self,
        address: IpAddr,
        mac: MacAddress,
        now: Duration,
    ) -> Option<NeighbourMacChange> {
        let neighbour = self.states_by_address.get_mut(&address)?;
        neighbour.missed_probe_count = 0;
        self.probe_schedule.remove(&(neighbour.next_probe_time, address));
        neighbour.next_probe_time = now + RESOLVED_NEIGHBOUR_PROBE_INTERVAL;
        self.probe_schedule.insert((neighbour.next_probe_time, address));
        (neighbour.mac.replace(mac) != Some(mac)).then_some(NeighbourMacChange { address, mac: Some(mac) })
    }

    /// Returns the probes that are due, at most [`PROBES_PER_BURST`], and the neighbours that have become unresolved.
    /// Schedules the next probe of each probed neighbour.
    pub fn take_due_probes(&mut self, now: Duration) -> (Vec<NeighbourProbe>, Vec<NeighbourMacChange>) {
        let (mut probes, mut changes) = (Vec::new(), Vec::new());
        while probes.len() < PROBES_PER_BURST {
            let Some((_, address)) = self.probe_schedule.first().copied().filter(|(probe_time, _)| *probe_time <= now)
            else {
                break;
            };
            self.probe_schedule.pop_first();
            let Some(neighbour) = self.states_by_address.get_mut(&address) else { continue };
            if neighbour.missed_probe_count >= MAX_MISSED_NEIGHBOUR_PROBES && neighbour.mac.take().is_some() {
                changes.push(NeighbourMacChange { address, mac: None });
            }
            probes.push(NeighbourProbe {
                address,
                destination_mac: neighbour.mac.filter(|_| neighbour.missed_probe_count == 0),
            });
            neighbour.missed_probe_count = neighbour.missed_probe_count.saturating_add(1);
            // A missed probe is repeated sooner.
            let waits_full_interval = neighbour.mac.is_some() && neighbour.missed_probe_count == 1;
            neighbour.next_probe_time = now
                + if waits_full_interval {
                    RESOLVED_NEIGHBOUR_PROBE_INTERVAL
                } else {
                    UNRESOLVED_NEIGHBOUR_PROBE_INTERVAL
                };
            self.probe_schedule.insert((neighbour.next_probe_time, address));
        }
        (probes, changes)
    }

    /// Returns the time at which the next probe is due, or `None` if there are no neighbours.
    pub fn next_probe_time(&self) -> Option<Duration> {
        self.probe_schedule.first().map(|(probe_time, _)| *probe_time)
    }
}

/// Returns the frame of an ARP request for `address`, with the destination `mac`, or broadcast if `mac` is `None`.
pub fn arp_request_frame(
    address: Ipv4Addr,
    mac: Option<MacAddress>,
    own_mac: MacAddress,
    own_address: Ipv4Addr,
) -> [u8; ARP_FRAME_BYTES] {
    let mut frame = [0; ARP_FRAME_BYTES];
    frame[..6].copy_from_slice(&mac.unwrap_or(MacAddress::BROADCAST).0);
    frame[6..12].copy_from_slice(&own_mac.0);
    frame[12..14].copy_from_slice(&ETHERTYPE_ARP.to_be_bytes());
    frame[14..20].copy_from_slice(&ARP_ETHERNET_IPV4_HEADER);
    frame[20..22].copy_from_slice(&1u16.to_be_bytes());
    frame[22..28].copy_from_slice(&own_mac.0);
    frame[28..32].copy_from_slice(&own_address.octets());
    frame[38..42].copy_from_slice(&address.octets());
    frame
}

/// Returns the sender's IP and MAC address in an ARP frame. Returns `None` if the frame is not ARP for IPv4, or the
/// sender's MAC address is a group address or 0.
pub fn parse_arp_sender(frame: &[u8]) -> Option<(Ipv4Addr, MacAddress)> {
    if frame.len() < ARP_FRAME_BYTES
        || frame[12..14] != ETHERTYPE_ARP.to_be_bytes()
        || frame[14..20] != ARP_ETHERNET_IPV4_HEADER
    {
        return None;
    }
    let mac = MacAddress(frame[22..28].try_into().ok()?);
    let address = Ipv4Addr::from(<[u8; 4]>::try_from(&frame[28..32]).ok()?);
    (!mac.is_group_address() && mac != MacAddress([0; 6])).then_some((address, mac))
}

/// Thread that resolves neighbours until the value is dropped.
#[derive(Debug)]
pub struct NeighbourResolver {
    pending_addresses: Arc<Mutex<Option<Vec<IpAddr>>>>,
    /// Sender of a channel. Dropping the sender closes the channel, which ends the thread.
    liveness_sender: Sender<()>,
}

impl NeighbourResolver {
    /// Starts a resolver thread for the device `interface` of the caller's network namespace. The returned receiver
    /// gets the changes of MAC addresses. Fails when the interface does not exist, or packet sockets are not allowed.
    pub fn start(interface: &str) -> anyhow::Result<(Self, Receiver<NeighbourMacChange>)> {
        let (changes, receiver) = mpsc::channel();
        let send_mac_change = move |change| changes.send(change).is_ok();
        let resolver = Self::start_in_vlan(interface, Vlan::UNTAGGED, send_mac_change)?;
        Ok((resolver, receiver))
    }

    /// Starts a resolver thread, as [`start`](Self::start) does, for neighbours in a VLAN. The thread sends tagged
    /// frames itself, so it needs no VLAN device. `handle_change` gets the changes, and ends the thread by returning
    /// false.
    pub fn start_in_vlan(
        interface: &str,
        vlan: Vlan,
        handle_change: impl Fn(NeighbourMacChange) -> bool + Send + 'static,
    ) -> anyhow::Result<Self> {
        let probe_sockets = ArpNdpSockets::open(interface, vlan)?;
        let (liveness_sender, liveness_receiver) = mpsc::channel();
        let pending_addresses = Arc::new(Mutex::new(None));
        let addresses_for_thread = pending_addresses.clone();
        std::thread::Builder::new()
            .name("neighbours".to_owned())
            .spawn(move || {
                if let Err(error) =
                    probe_sockets.run_resolver_loop(&addresses_for_thread, handle_change, &liveness_receiver)
                {
                    tracing::error!(
                        event = "resolver-ended",
                        interface = probe_sockets.interface_name,
                        vlan = probe_sockets.vlan.id_or_zero(),
                        error = format!("{error:#}"),
                        "the thread that resolves MAC addresses has ended, so changes are missed: restart the daemon"
                    );
                }
            })
            .context("a thread for neighbours")?;
        Ok(Self { pending_addresses, liveness_sender })
    }

    /// Sets the addresses to resolve.
    pub fn set_addresses(&self, addresses: Vec<IpAddr>) {
        *self.pending_addresses.lock() = Some(addresses);
    }

    /// Returns whether the thread is still running.
    pub fn is_alive(&self) -> bool {
        self.liveness_sender.send(()).is_ok()
    }
}

/// Packet sockets for ARP and neighbour discovery at one device.
struct ArpNdpSockets {
    arp_socket: OwnedFd,
    ndp_socket: OwnedFd,
    interface_name: String,
    vlan: Vlan,
}

impl ArpNdpSockets {
    fn open(interface: &str, vlan: Vlan) -> anyhow::Result<Self> {
        let interface_index = nix::net::if_::if_nametoindex(interface)
            .with_context(|| format!("interface {interface:?} does not exist here"))?;
        let open_socket = |ethertype, filter: &[libc::sock_filter]| {
            // A VLAN device takes tagged frames away from sockets for one EtherType, but not from those for all types.
            let received_ethertype = if vlan.is_tagged() { libc::ETH_P_ALL as u16 } else { ethertype };
            let filter = filter::restrict_filter_to_vlan(vlan, filter);
            open_packet_socket(interface_index, received_ethertype, &filter)
                .with_context(|| format!("a packet socket at {interface}"))
        };
        let (arp, ndp) = (
            open_socket(ETHERTYPE_ARP, &filter::ARP_SOCKET_FILTER)?,
            open_socket(ndp::ETHERTYPE_IPV6, &ndp::NDP_SOCKET_FILTER)?,
        );
        Ok(Self { arp_socket: arp, ndp_socket: ndp, interface_name: interface.to_owned(), vlan })
    }

    fn run_resolver_loop(
        &self,
        pending_addresses: &Mutex<Option<Vec<IpAddr>>>,
        notify: impl Fn(NeighbourMacChange) -> bool,
        liveness_receiver: &Receiver<()>,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        let mut neighbours = ProbedNeighbours::default();
        let mut next_burst_time = Duration::ZERO;
        let mut own_addresses = OwnAddressCache::default();
        while !matches!(liveness_receiver.try_recv(), Err(mpsc::TryRecvError::Disconnected)) {
            let new_addresses = pending_addresses.lock().take();
            if let Some(addresses) = new_addresses {
                neighbours.set_addresses(&addresses, start.elapsed());
            }
            let mut lost_neighbours = Vec::new();
            if start.elapsed() >= next_burst_time {
                lost_neighbours = self.send_due_probes(&mut neighbours, &mut own_addresses, start.elapsed());
                next_burst_time = start.elapsed() + PROBE_BURST_INTERVAL;
            }
            let senders = self.wait_for_frame_senders(&neighbours, start)?;
            let senders = senders
                .into_iter()
                .filter_map(|(address, mac)| neighbours.record_observed_mac(address, mac, start.elapsed()));
            for change in lost_neighbours.into_iter().chain(senders.collect::<Vec<_>>()) {
                if !notify(change) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Sends the probes that are due. Returns the changes of neighbours that have become unresolved.
    fn send_due_probes(
        &self,
        neighbours: &mut ProbedNeighbours,
        own_addresses: &mut OwnAddressCache,
        now: Duration,
    ) -> Vec<NeighbourMacChange> {
        let (probes, lost_changes) = neighbours.take_due_probes(now);
        // Own addresses are read once per interval, not once per burst of probes.
        if !probes.is_empty()
            && own_addresses.read_at.is_none_or(|read_time| read_time + UNRESOLVED_NEIGHBOUR_PROBE_INTERVAL <= now)
        {
            let addresses = InterfaceAddresses::read_for_vlan(&self.interface_name, self.vlan);
            *own_addresses = OwnAddressCache { addresses, read_at: Some(now) };
        }
        if let Some(addresses) = &own_addresses.addresses {
            self.send_probes(&probes, addresses);
        }
        lost_changes
    }

    /// Sends the probes. A probe that cannot be sent because the link is down counts as missed.
    fn send_probes(&self, probes: &[NeighbourProbe], own_addresses: &InterfaceAddresses) {
        for NeighbourProbe { address, destination_mac: mac } in probes {
            let send_result = match *address {
                IpAddr::V4(address) => self.send_frame(
                    &self.arp_socket,
                    &arp_request_frame(address, *mac, own_addresses.mac, own_addresses.ipv4),
                ),
                IpAddr::V6(address) => self.send_frame(
                    &self.ndp_socket,
                    &ndp::neighbour_solicitation_frame(address, *mac, own_addresses.mac, own_addresses.ipv6),
                ),
            };
            if let Err(error) = send_result {
                tracing::debug!(
                    event = "probe-not-sent",
                    interface = self.interface_name,
                    %address,
                    %error,
                    "the daemon cannot send an ARP or neighbour-discovery probe for the address"
                );
            }
        }
    }

    /// Sends a frame, with a VLAN tag if the VLAN is tagged.
    fn send_frame(&self, socket: &OwnedFd, frame: &[u8]) -> nix::Result<usize> {
        const MAC_ADDRESSES_BYTES: usize = 12;
        if !self.vlan.is_tagged() {
            return nix::unistd::write(socket, frame);
        }
        let vlan_tag = [ETHERTYPE_VLAN.to_be_bytes(), self.vlan.id_or_zero().to_be_bytes()].concat();
        nix::unistd::write(socket, &[&frame[..MAC_ADDRESSES_BYTES], &vlan_tag, &frame[MAC_ADDRESSES_BYTES..]].concat())
    }

    /// Waits until a frame arrives or a probe is due, but at most 51 ms, so that new addresses are probed soon. Returns
    /// the senders of received frames.
    fn wait_for_frame_senders(
        &self,
        neighbours: &ProbedNeighbours,
        start: Instant,
    ) -> anyhow::Result<Vec<(IpAddr, MacAddress)>> {
        let time_until_probe = neighbours
            .next_probe_time()
            .map_or(UNRESOLVED_NEIGHBOUR_PROBE_INTERVAL, |probe_time| probe_time.saturating_sub(start.elapsed()));
        let timeout_ms = time_until_probe.min(Duration::from_millis(50)).as_millis() as u16 + 1;
        let mut poll_fds =
            [&self.arp_socket, &self.ndp_socket].map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN));
        match poll(&mut poll_fds, timeout_ms) {
            Ok(0) | Err(Errno::EINTR) => return Ok(Vec::new()),
            Ok(_) => {}
            Err(error) => return Err(error).context("waiting for ARP or neighbour discovery"),
        }
        let mut senders = self.read_frame_senders(&self.arp_socket, |frame| {
            parse_arp_sender(frame).map(|(address, mac)| (address.into(), mac))
        })?;
        senders.extend(self.read_frame_senders(&self.ndp_socket, |frame| {
            ndp::parse_ndp_sender(frame).map(|(address, mac)| (address.into(), mac))
        })?);
        Ok(senders)
    }

    fn read_frame_senders(
        &self,
        socket: &OwnedFd,
        parse_frame: impl Fn(&[u8]) -> Option<(IpAddr, MacAddress)>,
    ) -> anyhow::Result<Vec<(IpAddr, MacAddress)>> {
        let mut senders = Vec::new();
        let mut frame = [0; 128];
        while senders.len() < MAX_REPLY_FRAMES_PER_BURST {
            match recv(socket.as_raw_fd(), &mut frame, MsgFlags::MSG_DONTWAIT) {
                Ok(length) => senders.extend(parse_frame(&frame[..length])),
                // ENETDOWN means that the device is down. It may be set up again.
                Err(Errno::EAGAIN | Errno::EINTR | Errno::ENETDOWN) => break,
                Err(error) => {
                    return Err(error).with_context(|| format!("reading neighbours at {}", self.interface_name));
                }
            }
        }
        Ok(senders)
    }
}

/// Opens a packet socket for those frames of one EtherType that pass the filter. An empty filter passes all frames.
/// Fails without CAP_NET_RAW.
fn open_packet_socket(interface_index: u32, ethertype: u16, filter: &[libc::sock_filter]) -> anyhow::Result<OwnedFd> {
    // SAFETY: socket() returns a new descriptor that nothing else owns, or -1, which is checked. Protocol 0 receives
    // nothing before bind(), so no frame evades the filter.
    let raw_fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    Errno::result(raw_fd).context("needs CAP_NET_RAW")?;
    // SAFETY: the descriptor was just made and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(raw_fd) };
    if !filter.is_empty() {
        let socket_filter = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: the kernel copies the instructions, which live until the call returns.
        let attach_result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const socket_filter).cast(),
                size_of::<libc::sock_fprog>() as u32,
            )
        };
        Errno::result(attach_result).context("the filter of received frames")?;
    }
    // SAFETY: sockaddr_ll is plain data, for which all zeros is a value.
    let mut link_layer_address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    link_layer_address.sll_family = libc::AF_PACKET as u16;
    link_layer_address.sll_protocol = ethertype.to_be();
    link_layer_address.sll_ifindex = interface_index as i32;
    // SAFETY: the pointer and the length are those of a sockaddr_ll that lives until the call returns.
    let bind_result = unsafe {
        libc::bind(socket.as_raw_fd(), (&raw const link_layer_address).cast(), size_of::<libc::sockaddr_ll>() as u32)
    };
    Errno::result(bind_result).context("bind")?;
    Ok(socket)
}

/// Returns an interface's first IPv4 address or, if it has none, its first IPv6 address that is not link-local.
pub fn interface_routable_address(interface: &str) -> Option<IpAddr> {
    let own_addresses = InterfaceAddresses::read_from_interface(interface)?;
    [own_addresses.ipv4.into(), own_addresses.routable_ipv6.into()]
        .into_iter()
        .find(|address: &IpAddr| !address.is_unspecified())
}

/// Returns the source addresses for outer headers: the interface's first IPv4 address, and its first IPv6 address that
/// is not link-local.
pub fn outer_source_addresses(interface: &str) -> OuterSourceAddresses {
    let own_addresses = InterfaceAddresses::read_from_interface(interface);
    let (ipv4, ipv6) = own_addresses
        .map_or((Ipv4Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED), |addresses| (addresses.ipv4, addresses.routable_ipv6));
    OuterSourceAddresses { ipv4, ipv6 }
}

/// Addresses of an interface, of which the first IPv4 and the first IPv6 address are the source addresses of probes.
struct InterfaceAddresses {
    mac: MacAddress,
    /// First IPv4 address of the device, or 0.0.0.0 if it has none. With 0.0.0.0, requests are "ARP probes" (RFC 5227,
    /// Sect. 1.1).
    ipv4: Ipv4Addr,
    /// First IPv6 address of the device, or the unspecified address if it has none. Solicitations from the unspecified
    /// address are those of duplicate address detection.
    ipv6: Ipv6Addr,
    /// First IPv6 address of the device that is not link-local, or the unspecified address if it has none.
    routable_ipv6: Ipv6Addr,
}

impl InterfaceAddresses {
    /// Returns the addresses of the VLAN's device. If there is no such device, returns the interface's addresses
    /// without the IPv4 address, which belongs to another network.
    fn read_for_vlan(interface: &str, vlan: Vlan) -> Option<Self> {
        match vlan_device::vlan_device_name(interface, vlan) {
            Some(device) => Self::read_from_interface(&device),
            None => {
                Self::read_from_interface(interface).map(|addresses| Self { ipv4: Ipv4Addr::UNSPECIFIED, ..addresses })
            }
        }
    }

    fn read_from_interface(interface: &str) -> Option<Self> {
        let (mut mac, mut ipv4) = (None, Ipv4Addr::UNSPECIFIED);
        let mut ipv6_addresses: Vec<Ipv6Addr> = Vec::new();
        for entry in nix::ifaddrs::getifaddrs().ok()?.filter(|entry| entry.interface_name == interface) {
            let Some(storage) = entry.address else { continue };
            if let Some(link_address) = storage.as_link_addr() {
                mac = link_address.addr().map(MacAddress);
            } else if let Some(socket_address) = storage.as_sockaddr_in().filter(|_| ipv4.is_unspecified()) {
                ipv4 = socket_address.ip();
            } else if let Some(socket_address) = storage.as_sockaddr_in6() {
                ipv6_addresses.push(socket_address.ip());
            }
        }
        let first_or_unspecified =
            |addresses: &mut dyn Iterator<Item = &Ipv6Addr>| addresses.next().copied().unwrap_or(Ipv6Addr::UNSPECIFIED);
        let ipv6 = first_or_unspecified(&mut ipv6_addresses.iter());
        let routable_ipv6 =
            first_or_unspecified(&mut ipv6_addresses.iter().filter(|address| !address.is_unicast_link_local()));
        mac.map(|mac| Self { mac, ipv4, ipv6, routable_ipv6 })
    }
}

/// Cache of the interface's own addresses, with the time at which they were read.
#[derive(Default)]
struct OwnAddressCache {
    addresses: Option<InterfaceAddresses>,
    read_at: Option<Duration>,
}

#[cfg(test)]
mod tests;
