//! Tests that the MSS in a server's SYN-ACK limits the segments of the client's kernel (`bpf/server/mss.h`).

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd as _;

use coreward_intf as intf;
use coreward_model::consistency::{CookieStamper, ServiceSettings};
use coreward_model::forwarding::ForwardingMode;
use nix::sys::socket::{getsockopt, sockopt};

use crate::support::server_env::{ServerTestEnv, set_services};
use crate::support::{AddressFamily, missing_bpf_rights, skip_if};

/// Returns the maximum segment size in bytes: Ethernet's MTU less the IP header, the TCP header and the padded
/// timestamp option.
fn max_segment_size_bytes(family: AddressFamily) -> u32 {
    let ip_header_bytes = if family == AddressFamily::Ipv4 { 20 } else { 40 };
    1500 - ip_header_bytes - 20 - 12
}

/// Server addresses, each with the length in bytes of the GUE outer headers of a packet to it (IP-in-IP needs less).
const OUTER_HEADER_BYTES_BY_ADDRESS: [(IpAddr, u32); 2] =
    [(IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)), 28), (IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 1)), 48)];

/// Opens a connection and sends a request. Returns the client's maximum segment size in bytes and the number of
/// SYN-ACKs whose MSS was reduced. `server` is the server's address in outer headers.
fn connect_and_get_segment_size(family: AddressFamily, mode: ServiceSettings, server: IpAddr) -> (u32, u64) {
    let mut env = ServerTestEnv::start_for_family(family, mode);
    env.programs.set_outer_family_from_address(server);
    set_services(&mut env.programs, mode);
    let listener = env.listen_at_vip();
    let (mut client, mut server) = env.open_connection(&listener);
    client.write_all(&[7; 100_000]).unwrap();
    server.read_exact(&mut [0; 100_000]).unwrap();
    env.assert_no_kernel_errors();
    (getsockopt(&client.as_fd(), sockopt::TcpMaxSeg).unwrap(), env.server_counter(intf::SERVER_COUNTER_MSS_CLAMPED))
}

#[test]
fn syn_ack_mss_leaves_room_for_the_outer_header() {
    skip_if!(missing_bpf_rights());
    let (server, off) = (CookieStamper::Server, CookieStamper::Off);
    for (timestamps, forwarding) in [
        (server, ForwardingMode::Ipip),
        (server, ForwardingMode::Gue),
        (off, ForwardingMode::Ipip),
        (off, ForwardingMode::Gue),
    ] {
        for family in AddressFamily::BOTH {
            let mode = ServiceSettings { timestamps, forwarding, ..ServiceSettings::default() };
            for (server, outer_header) in OUTER_HEADER_BYTES_BY_ADDRESS {
                let (size, clamped) = connect_and_get_segment_size(family, mode, server);
                assert_eq!(size, max_segment_size_bytes(family) - outer_header, "{family:?} {mode:?} {server}");
                assert!(clamped >= 1);
            }
        }
    }
}

#[test]
fn syn_ack_without_encapsulation_is_unchanged() {
    skip_if!(missing_bpf_rights());
    for family in AddressFamily::BOTH {
        for (server, _) in OUTER_HEADER_BYTES_BY_ADDRESS {
            assert_eq!(
                connect_and_get_segment_size(family, ServiceSettings::default(), server),
                (max_segment_size_bytes(family), 0)
            );
        }
    }
}
