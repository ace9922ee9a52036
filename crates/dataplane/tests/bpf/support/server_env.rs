//! A client, and a server with `bpf/server/server.bpf.c` at its device. Both use the kernel's TCP.

use std::io::{Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::server::{ServerProgramOptions, ServerPrograms};
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{self, Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use socket2::{Domain, Socket, Type};

use super::network::{CLIENT_IPV4, PinDirectory, SERVER_IPV4, VIP, VethPair, pin_thread_to_one_cpu};
use super::{ACK, AddressFamily, FIN, RST, SYN, read_u32, tsval_clock_ms, tsval_offset};

pub const SERVICE_PORT: u16 = 80;
pub const CLIENT_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
pub const SERVER_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 2);
pub const VIP_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 200, 0, 0, 0, 0, 1);
pub const SOCKET_TIMEOUT: Duration = Duration::from_secs(30);

pub fn fleet_keys() -> FleetCookieKeys {
    FleetCookieKeys {
        keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }],
        current_key_index: CookieKeyIndex::Second,
    }
}

pub fn test_server_id() -> ServerId {
    ServerId::try_from(0x1234).unwrap()
}

pub fn vip_address(family: AddressFamily) -> SocketAddr {
    let address = match family {
        AddressFamily::Ipv4 => IpAddr::from(VIP),
        AddressFamily::Ipv6 => VIP_IPV6.into(),
    };
    (address, SERVICE_PORT).into()
}

pub fn client_address(family: AddressFamily, port: u16) -> SocketAddr {
    let address = match family {
        AddressFamily::Ipv4 => IpAddr::from(CLIENT_IPV4),
        AddressFamily::Ipv6 => CLIENT_IPV6.into(),
    };
    (address, port).into()
}

fn add_ipv6_addresses(veth_pair: &VethPair) {
    for (host, address) in [(&veth_pair.client, CLIENT_IPV6), (&veth_pair.server, SERVER_IPV6)] {
        host.run_ip_command(&format!("address add {address}/64 dev eth0 nodad"));
    }
    veth_pair.server.run_ip_command(&format!("address add {VIP_IPV6}/128 dev lo nodad"));
    veth_pair.client.run_ip_command(&format!("route add {VIP_IPV6}/128 via {SERVER_IPV6}"));
}

/// Configures the IPv4 and the IPv6 service with this mode.
pub fn set_services(programs: &mut ServerPrograms, mode: ServiceSettings) {
    let service_of_family = |family| {
        (ServiceAddress { vip_and_port: vip_address(family), protocol: TransportProtocol::Tcp }, test_server_id(), mode)
    };
    programs.set_services(&AddressFamily::BOTH.map(service_of_family)).unwrap();
}

pub struct ServerTestEnv {
    /// Address family of the connections that the test opens.
    pub family: AddressFamily,
    // The programs are dropped before the network.
    pub programs: ServerPrograms,
    pub pins: PinDirectory,
    pub veth_pair: VethPair,
}

impl ServerTestEnv {
    pub fn new() -> Self {
        Self::start_with_settings(ServiceSettings::default())
    }

    /// Starts a server whose services have this mode. Test connections use IPv4.
    pub fn start_with_settings(mode: ServiceSettings) -> Self {
        Self::start_for_family(AddressFamily::Ipv4, mode)
    }

    /// Starts a server whose services have this mode. Test connections use `family`.
    pub fn start_for_family(family: AddressFamily, mode: ServiceSettings) -> Self {
        pin_thread_to_one_cpu();
        let (veth_pair, pins) = (VethPair::new(), PinDirectory::new());
        add_ipv6_addresses(&veth_pair);
        let mut programs = attach_programs(&veth_pair, &pins);
        programs.set_cookie_keys(&fleet_keys(), tsval_clock_ms().wrapping_sub(1000));
        set_services(&mut programs, mode);
        Self { family, programs, pins, veth_pair }
    }

    pub fn server_counter(&self, counter: intf::server_counter) -> u64 {
        self.programs.counter(counter)
    }

    pub fn listen_at_vip(&self) -> TcpListener {
        self.veth_pair.server.run_in_namespace(|| TcpListener::bind(vip_address(self.family)).unwrap())
    }

    pub fn connect_client(&self) -> TcpStream {
        let address = vip_address(self.family);
        let stream =
            self.veth_pair.client.run_in_namespace(|| TcpStream::connect_timeout(&address, SOCKET_TIMEOUT)).unwrap();
        stream.set_read_timeout(Some(SOCKET_TIMEOUT)).unwrap();
        stream
    }

    pub fn open_connection(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let client = self.connect_client();
        let (server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(SOCKET_TIMEOUT)).unwrap();
        (client, server)
    }

    /// Asserts that neither the client's nor the server's kernel has counted an error. Retransmissions are allowed,
    /// because veth sometimes loses a packet on few CPUs, even without BPF programs.
    pub fn assert_no_kernel_errors(&self) {
        for host in [&self.veth_pair.client, &self.veth_pair.server] {
            for counter in
                ["TcpExtPAWSEstab", "TcpExtPAWSActive", "TcpExtTSEcrRejected", "TcpInErrs", "TcpInCsumErrors"]
            {
                assert_eq!(host.kernel_counter(counter), 0, "{counter}");
            }
        }
    }
}

pub fn attach_programs(veth_pair: &VethPair, pins: &PinDirectory) -> ServerPrograms {
    let server_options = ServerProgramOptions {
        interface_index: veth_pair.server_interface_index(),
        pin_directory: pins.path(),
        sample_every_syn: false,
    };
    veth_pair.server.run_in_namespace(|| ServerPrograms::attach(server_options)).unwrap()
}

/// Socket that receives the packets of one address family at the client's device.
pub struct PacketSniffer {
    socket: Socket,
    family: AddressFamily,
}

impl PacketSniffer {
    pub fn new(env: &ServerTestEnv) -> Self {
        let socket = env.veth_pair.client.run_in_namespace(|| {
            let all_protocols = i32::from((libc::ETH_P_ALL as u16).to_be());
            Socket::new(Domain::PACKET, Type::RAW, Some(all_protocols.into())).unwrap()
        });
        socket.set_recv_buffer_size(16 << 20).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, family: env.family }
    }

    /// Sends a frame from the client's device.
    pub fn send_frame(&self, env: &ServerTestEnv, frame: &[u8]) {
        env.veth_pair.client.run_in_namespace(|| {
            let interface_index = nix::net::if_::if_nametoindex("eth0").unwrap();
            let mut link_layer_address: libc::sockaddr_ll = zeroed_link_layer_address();
            link_layer_address.sll_family = libc::AF_PACKET as u16;
            link_layer_address.sll_ifindex = interface_index as i32;
            let address_length = size_of::<libc::sockaddr_ll>() as u32;
            let mut address_storage = socket2::SockAddrStorage::zeroed();
            // SAFETY: the storage is large enough for any address and holds nothing else.
            unsafe { *address_storage.view_as::<libc::sockaddr_ll>() = link_layer_address };
            // SAFETY: a link-layer address of that length was just written.
            let socket_address = unsafe { socket2::SockAddr::new(address_storage, address_length) };
            assert_eq!(self.socket.send_to(frame, &socket_address).unwrap(), frame.len());
        });
    }

    /// Returns the first 160 bytes of each TCP packet from the VIP that was received since the last call.
    pub fn receive_frames_from_vip(&self) -> Vec<Vec<u8>> {
        self.receive_frames_of_family().into_iter().filter(|frame| is_frame_from_vip(self.family, frame)).collect()
    }

    /// Returns only the packets from the VIP among those that
    /// [`collect_frames_until_processed`](Self::collect_frames_until_processed) returns.
    pub fn collect_frames_from_vip(&self, env: &ServerTestEnv) -> Vec<Vec<u8>> {
        self.collect_frames_until_processed(env)
            .into_iter()
            .filter(|frame| is_frame_from_vip(self.family, frame))
            .collect()
    }

    /// Returns the first 160 bytes of each packet of the sniffer's family that was received since the last call.
    pub fn receive_frames_of_family(&self) -> Vec<Vec<u8>> {
        self.receive_frames().into_iter().filter(|frame| is_frame_of_family(self.family, frame)).collect()
    }

    fn receive_frames(&self) -> Vec<Vec<u8>> {
        let mut frames = vec![];
        loop {
            let mut frame_buffer = [MaybeUninit::uninit(); 160];
            let Ok(length) = self.socket.recv(&mut frame_buffer) else { return frames };
            // SAFETY: recv() has filled this many bytes.
            frames.push(frame_buffer[..length.min(160)].iter().map(|byte| unsafe { byte.assume_init() }).collect());
        }
    }

    /// Waits until the server has processed all packets sent so far and its replies have arrived. Returns the first 160
    /// bytes of each packet of the sniffer's family that was received until then. An ARP request follows the packets,
    /// and the wait ends with its reply, because on a single CPU the server answers it last.
    pub fn collect_frames_until_processed(&self, env: &ServerTestEnv) -> Vec<Vec<u8>> {
        static ARP_REQUEST_COUNT: AtomicU32 = AtomicU32::new(0);
        let request_number = ARP_REQUEST_COUNT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
        // Each ARP request has another sender, so that its reply can be identified.
        let sender_mac = [2, 9, request_number[0], request_number[1], request_number[2], request_number[3]];
        self.send_frame(env, &arp_request_frame(sender_mac, SERVER_IPV4));
        let is_arp_reply =
            |frame: &Vec<u8>| frame.len() >= 42 && frame[12..14] == [8, 6] && frame[32..38] == sender_mac;
        let (mut frames, deadline) = (Vec::new(), Instant::now() + SOCKET_TIMEOUT);
        loop {
            let new_frames = self.receive_frames();
            let has_arp_reply = new_frames.iter().any(is_arp_reply);
            frames.extend(new_frames.into_iter().filter(|frame| is_frame_of_family(self.family, frame)));
            if has_arp_reply {
                return frames;
            }
            assert!(Instant::now() < deadline, "the server does not answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn is_frame_of_family(family: AddressFamily, frame: &[u8]) -> bool {
    match family {
        AddressFamily::Ipv4 => frame.len() >= 34 && frame[12..14] == [8, 0],
        AddressFamily::Ipv6 => frame.len() >= 54 && frame[12..14] == [0x86, 0xdd],
    }
}

fn is_frame_from_vip(family: AddressFamily, frame: &[u8]) -> bool {
    is_frame_of_family(family, frame)
        && match family {
            AddressFamily::Ipv4 => frame.len() >= 54 && frame[23] == 6 && frame[26..30] == VIP.octets(),
            AddressFamily::Ipv6 => frame.len() >= 74 && frame[20] == 6 && frame[22..38] == VIP_IPV6.octets(),
        }
}

/// Returns an ARP request (RFC 826) for `target` from the MAC address `sender_mac`. Its sender IP address is in the
/// client's network.
fn arp_request_frame(sender_mac: [u8; 6], target: Ipv4Addr) -> Vec<u8> {
    const ARP_SENDER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 78);
    let ethernet_header = [&[0xff; 6][..], &sender_mac, &[8, 6]].concat();
    let arp_addresses = [&sender_mac[..], &ARP_SENDER_ADDRESS.octets(), &[0; 6], &target.octets()].concat();
    [&ethernet_header[..], &[0, 1, 8, 0, 6, 4, 0, 1], &arp_addresses].concat()
}

fn zeroed_link_layer_address() -> libc::sockaddr_ll {
    // SAFETY: a struct of integers.
    unsafe { std::mem::zeroed() }
}

pub fn read_tcp_flags(frame: &[u8]) -> u8 {
    frame[super::tcp_header_offset(frame) + 13] & (SYN | ACK | FIN | RST)
}

/// Returns the cookie in a packet to the client, as the load balancer reads it from TSecr.
pub fn read_cookie(frame: &[u8]) -> Cookie {
    let tcp_start = super::tcp_header_offset(frame);
    let client_port = u16::from_be_bytes([frame[tcp_start + 2], frame[tcp_start + 3]]);
    let tsval = read_u32(frame, tsval_offset(frame).expect("a timestamp"));
    let family = AddressFamily::from_frame(frame);
    cookie::decode_cookie(
        &fleet_keys(),
        &FourTuple::new(client_address(family, client_port), vip_address(family)).unwrap(),
        tsval,
    )
}

pub fn byte_pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 + i / 251) as u8).collect()
}

pub fn send_and_receive(sender: &mut TcpStream, receiver: &mut TcpStream, data: &[u8]) {
    std::thread::scope(|scope| {
        scope.spawn(|| sender.write_all(data).unwrap());
        let mut received_data = vec![0; data.len()];
        receiver.read_exact(&mut received_data).unwrap();
        assert!(received_data == data);
    });
}
