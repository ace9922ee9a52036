//! A client, and a server with `bpf/server/server.bpf.c` at its device, both with the kernel's TCP.

use std::io::{Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::server::{ServerOptions, ServerPrograms};
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{self, Cookie, CookieKey, FleetKeys, KeyIndex};
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use socket2::{Domain, Socket, Type};

use super::network::{CLIENT, PinDirectory, SERVER, VIP, VethPair, pin_to_one_cpu};
use super::{ACK, FIN, Family, RST, SYN, now_ms, timestamp_offset, word};

pub const PORT: u16 = 80;
pub const CLIENT_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
pub const SERVER_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 2);
pub const VIP_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 200, 0, 0, 0, 0, 1);
pub const TIMEOUT: Duration = Duration::from_secs(30);

pub fn keys() -> FleetKeys {
    FleetKeys { keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }], current: KeyIndex::Second }
}

pub fn id() -> ServerId {
    ServerId::try_from(0x1234).unwrap()
}

/// Returns the address and port of the server's IPv4 or IPv6 service.
pub fn vip(family: Family) -> SocketAddr {
    let address = match family {
        Family::Ipv4 => IpAddr::from(VIP),
        Family::Ipv6 => VIP_IPV6.into(),
    };
    (address, PORT).into()
}

/// Returns the client's address of this family, with `port`.
pub fn client(family: Family, port: u16) -> SocketAddr {
    let address = match family {
        Family::Ipv4 => IpAddr::from(CLIENT),
        Family::Ipv6 => CLIENT_IPV6.into(),
    };
    (address, port).into()
}

/// Adds IPv6 addresses to the client and the server, and the IPv6 VIP to the server.
fn add_ipv6(pair: &VethPair) {
    for (host, address) in [(&pair.client, CLIENT_IPV6), (&pair.server, SERVER_IPV6)] {
        host.ip(&format!("address add {address}/64 dev eth0 nodad"));
    }
    pair.server.ip(&format!("address add {VIP_IPV6}/128 dev lo nodad"));
    pair.client.ip(&format!("route add {VIP_IPV6}/128 via {SERVER_IPV6}"));
}

/// Configures the IPv4 and the IPv6 service with this mode.
pub fn set_services(programs: &mut ServerPrograms, mode: ServiceMode) {
    let service = |family| (ServiceAddress { socket: vip(family), protocol: Protocol::Tcp }, id(), mode);
    programs.set_services(&Family::BOTH.map(service)).unwrap();
}

pub struct TestEnv {
    /// Address family of the connections that the test opens.
    pub family: Family,
    // The programs are dropped before the network.
    pub programs: ServerPrograms,
    pub pins: PinDirectory,
    pub pair: VethPair,
}

impl TestEnv {
    pub fn new() -> Self {
        Self::with(ServiceMode::default())
    }

    /// Starts a server whose services have this mode. Test connections use IPv4.
    pub fn with(mode: ServiceMode) -> Self {
        Self::of(Family::Ipv4, mode)
    }

    /// Starts a server whose services have this mode. Test connections use `family`.
    pub fn of(family: Family, mode: ServiceMode) -> Self {
        pin_to_one_cpu();
        let (pair, pins) = (VethPair::new(), PinDirectory::new());
        add_ipv6(&pair);
        let mut programs = attach(&pair, &pins);
        programs.set_keys(&keys(), now_ms().wrapping_sub(1000));
        set_services(&mut programs, mode);
        Self { family, programs, pins, pair }
    }

    pub fn counter(&self, counter: intf::server_counter) -> u64 {
        self.programs.counter(counter)
    }

    pub fn listen(&self) -> TcpListener {
        self.pair.server.run_inside(|| TcpListener::bind(vip(self.family)).unwrap())
    }

    pub fn connect(&self) -> TcpStream {
        let address = vip(self.family);
        let stream = self.pair.client.run_inside(|| TcpStream::connect_timeout(&address, TIMEOUT)).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    }

    /// Opens a connection. Returns its client end and its server end.
    pub fn connection(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let client = self.connect();
        let (server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        (client, server)
    }

    /// Asserts that neither side has counted an error. (Retransmissions are allowed: on few CPUs, veth sometimes loses
    /// a packet, with and without programs.)
    pub fn assert_no_errors(&self) {
        for host in [&self.pair.client, &self.pair.server] {
            for counter in
                ["TcpExtPAWSEstab", "TcpExtPAWSActive", "TcpExtTSEcrRejected", "TcpInErrs", "TcpInCsumErrors"]
            {
                assert_eq!(host.kernel_counter(counter), 0, "{counter}");
            }
        }
    }
}

pub fn attach(pair: &VethPair, pins: &PinDirectory) -> ServerPrograms {
    let options =
        ServerOptions { interface_index: pair.server_interface(), pin_directory: pins.path(), sample_every_syn: false };
    pair.server.run_inside(|| ServerPrograms::attach(options)).unwrap()
}

/// Socket that receives the packets of one address family at the client's device.
pub struct Sniffer {
    socket: Socket,
    family: Family,
}

impl Sniffer {
    pub fn new(env: &TestEnv) -> Self {
        let socket = env.pair.client.run_inside(|| {
            let every_protocol = i32::from((libc::ETH_P_ALL as u16).to_be());
            Socket::new(Domain::PACKET, Type::RAW, Some(every_protocol.into())).unwrap()
        });
        socket.set_recv_buffer_size(16 << 20).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, family: env.family }
    }

    /// Sends a frame by the client's device.
    pub fn send(&self, env: &TestEnv, frame: &[u8]) {
        env.pair.client.run_inside(|| {
            let index = nix::net::if_::if_nametoindex("eth0").unwrap();
            let mut address: libc::sockaddr_ll = unsafe_zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_ifindex = index as i32;
            let length = size_of::<libc::sockaddr_ll>() as u32;
            let mut storage = socket2::SockAddrStorage::zeroed();
            // SAFETY: the storage is large enough for any address and holds nothing else.
            unsafe { *storage.view_as::<libc::sockaddr_ll>() = address };
            // SAFETY: a link-layer address of that length was just written.
            let address = unsafe { socket2::SockAddr::new(storage, length) };
            assert_eq!(self.socket.send_to(frame, &address).unwrap(), frame.len());
        });
    }

    /// Returns the first 160 bytes of each TCP packet from the VIP since the last call.
    pub fn received_from_vip(&self) -> Vec<Vec<u8>> {
        self.received().into_iter().filter(|frame| is_from_vip(self.family, frame)).collect()
    }

    /// Returns the packets from the VIP that [`collect_until_processed`](Self::collect_until_processed) receives.
    pub fn collect_from_vip(&self, env: &TestEnv) -> Vec<Vec<u8>> {
        self.collect(env).into_iter().filter(|frame| is_from_vip(self.family, frame)).collect()
    }

    /// Returns the first 160 bytes of each packet of the address family that was received since the last call.
    pub fn received(&self) -> Vec<Vec<u8>> {
        self.received_of_all().into_iter().filter(|frame| is_of(self.family, frame)).collect()
    }

    /// Returns the first 160 bytes of each frame that was received since the last call.
    fn received_of_all(&self) -> Vec<Vec<u8>> {
        let mut frames = vec![];
        loop {
            let mut buffer = [MaybeUninit::uninit(); 160];
            let Ok(length) = self.socket.recv(&mut buffer) else { return frames };
            // SAFETY: recv() has filled this many bytes.
            frames.push(buffer[..length.min(160)].iter().map(|byte| unsafe { byte.assume_init() }).collect());
        }
    }

    /// Waits until the server has processed all packets sent so far and its replies have arrived. Returns the first 160
    /// bytes of each packet until then. On the one CPU an ARP request follows the packets, and its reply their replies.
    pub fn collect(&self, env: &TestEnv) -> Vec<Vec<u8>> {
        static ARP_REQUESTS: AtomicU32 = AtomicU32::new(0);
        let number = ARP_REQUESTS.fetch_add(1, Ordering::Relaxed).to_be_bytes();
        // Each ARP request has another sender, so that its reply can be identified.
        let asking = [2, 9, number[0], number[1], number[2], number[3]];
        self.send(env, &arp_request(asking, SERVER));
        let is_answer = |frame: &Vec<u8>| frame.len() >= 42 && frame[12..14] == [8, 6] && frame[32..38] == asking;
        let (mut frames, end) = (Vec::new(), Instant::now() + TIMEOUT);
        loop {
            let new = self.received_of_all();
            let is_over = new.iter().any(is_answer);
            frames.extend(new.into_iter().filter(|frame| is_of(self.family, frame)));
            if is_over {
                return frames;
            }
            assert!(Instant::now() < end, "the server does not answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn is_of(family: Family, frame: &[u8]) -> bool {
    match family {
        Family::Ipv4 => frame.len() >= 34 && frame[12..14] == [8, 0],
        Family::Ipv6 => frame.len() >= 54 && frame[12..14] == [0x86, 0xdd],
    }
}

fn is_from_vip(family: Family, frame: &[u8]) -> bool {
    is_of(family, frame)
        && match family {
            Family::Ipv4 => frame.len() >= 54 && frame[23] == 6 && frame[26..30] == VIP.octets(),
            Family::Ipv6 => frame.len() >= 74 && frame[20] == 6 && frame[22..38] == VIP_IPV6.octets(),
        }
}

/// Returns an ARP request (RFC 826) for `target` from the MAC address `asking`, with a sender address in the client's
/// network.
fn arp_request(asking: [u8; 6], target: Ipv4Addr) -> Vec<u8> {
    const ARP_SENDER: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 78);
    let ethernet = [&[0xff; 6][..], &asking, &[8, 6]].concat();
    let addresses = [&asking[..], &ARP_SENDER.octets(), &[0; 6], &target.octets()].concat();
    [&ethernet[..], &[0, 1, 8, 0, 6, 4, 0, 1], &addresses].concat()
}

fn unsafe_zeroed() -> libc::sockaddr_ll {
    // SAFETY: a struct of integers.
    unsafe { std::mem::zeroed() }
}

pub fn flags(frame: &[u8]) -> u8 {
    frame[super::tcp_offset(frame) + 13] & (SYN | ACK | FIN | RST)
}

/// Returns the cookie in a packet to the client, as the load balancer reads it from TSecr.
pub fn cookie_of(frame: &[u8]) -> Cookie {
    let tcp = super::tcp_offset(frame);
    let port = u16::from_be_bytes([frame[tcp + 2], frame[tcp + 3]]);
    let value = word(frame, timestamp_offset(frame).expect("a timestamp"));
    let family = Family::of(frame);
    cookie::decode_cookie(&keys(), &FourTuple::new(client(family, port), vip(family)).unwrap(), value)
}

pub fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 + i / 251) as u8).collect()
}

pub fn send_and_receive(from: &mut TcpStream, to: &mut TcpStream, data: &[u8]) {
    std::thread::scope(|scope| {
        scope.spawn(|| from.write_all(data).unwrap());
        let mut received = vec![0; data.len()];
        to.read_exact(&mut received).unwrap();
        assert!(received == data);
    });
}
