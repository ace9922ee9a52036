//! Next hops of servers behind routers, which are read from the kernel's routing table by rtnetlink(7).
//!
//! The XDP program could look up each packet's route (`bpf_fib_lookup`), but that would cost a helper call and a walk
//! through rules, tables and neighbours. Routes seldom change, so user space queries the kernel only after it was
//! notified of a change.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket,
    sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike as _};

use crate::veth::find_attribute;

const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
/// Route attribute for a gateway whose address family differs from the destination's (struct rtvia, RFC 8950).
const RTA_VIA: u16 = 18;
/// Size in bytes of the field `rtvia_family` in struct rtvia. The address follows this field.
const RTVIA_FAMILY_BYTES: usize = 2;
/// Size of struct nlmsghdr and struct rtmsg together, in bytes.
const NETLINK_ROUTE_HEADERS_BYTES: usize = 16 + 12;
/// Size of struct rtattr in bytes.
const NETLINK_ATTRIBUTE_HEADER_BYTES: usize = 4;
/// Byte range of the sequence number `nlmsg_seq` in struct nlmsghdr.
const NETLINK_SEQUENCE_NUMBER_RANGE: Range<usize> = 8..12;
/// Offset of `rtm_type` from the start of the message, in bytes.
const ROUTE_TYPE_OFFSET: usize = 16 + 7;
/// Bits of the netlink multicast groups for changes of links, addresses, routes and rules (IPv4 and IPv6). The values
/// are RTMGRP_* of include/uapi/linux/rtnetlink.h, and 1 << (RTNLGRP_IPV6_RULE - 1) for the last group.
const ROUTE_NETLINK_GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x80 | 0x100 | 0x400 | 1 << 18;

/// Reason why the load balancer's interface cannot send packets to a server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// The kernel has no route to the server.
    #[error("no route ({0}): expected one by the load balancer's interface")]
    NoRoute(Errno),
    /// The route to the server is not a unicast route.
    #[error("a route of type {0}: expected a unicast route by the load balancer's interface")]
    UnexpectedRouteType(u8),
    /// The route leads to another interface. XDP can send packets only by the interface that received them.
    #[error("a route by the interface of index {found}: expected index {expected}, the load balancer's interface")]
    RouteToOtherInterface {
        /// Index of the interface to which the route leads.
        found: u32,
        /// Index of the load balancer's interface.
        expected: u32,
    },
}

/// Netlink sockets that query the kernel's routes and receive notifications of changes. They belong to the network
/// namespace of the thread that called [`open`](Self::open).
#[derive(Debug)]
pub struct RouteSockets {
    notification_socket: OwnedFd,
    query_socket: OwnedFd,
    /// Sequence number of the latest query.
    last_query_sequence: u32,
}

impl RouteSockets {
    /// Opens a socket for notifications and one for queries. Fails when the kernel does not offer netlink.
    pub fn open() -> io::Result<Self> {
        let open_socket =
            || socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute);
        let (notification_socket, query_socket) = (open_socket()?, open_socket()?);
        bind(notification_socket.as_raw_fd(), &NetlinkAddr::new(0, ROUTE_NETLINK_GROUPS))?;
        setsockopt(&query_socket, sockopt::ReceiveTimeout, &TimeVal::seconds(1))?;
        Ok(Self { notification_socket, query_socket, last_query_sequence: 0 })
    }

    /// Returns whether a link, address, route or routing rule has changed since the last call.
    pub fn have_routes_changed(&self) -> bool {
        let mut has_changed = false;
        let mut notification_buffer = [0; 4096];
        loop {
            match recv(self.notification_socket.as_raw_fd(), &mut notification_buffer, MsgFlags::MSG_DONTWAIT) {
                // ENOBUFS means that notifications were lost.
                Ok(_) | Err(Errno::ENOBUFS) => has_changed = true,
                Err(Errno::EINTR) => {}
                Err(_) => return has_changed,
            }
        }
    }

    /// Returns the next hop of packets to `server`, which is a gateway or the server itself. Fails when the packets do
    /// not leave by the device with the index `interface`.
    pub fn find_next_hop(&mut self, interface: u32, server: IpAddr) -> Result<IpAddr, RouteError> {
        self.send_route_query(server).map_err(RouteError::NoRoute)?;
        let mut answer_buffer = [0; 4096];
        loop {
            let answer_length = match recv(self.query_socket.as_raw_fd(), &mut answer_buffer, MsgFlags::empty()) {
                Err(Errno::EINTR) => continue,
                result => result.map_err(RouteError::NoRoute)?,
            };
            // An answer to an earlier query may have arrived after that query's timeout.
            if answer_buffer.get(NETLINK_SEQUENCE_NUMBER_RANGE) == Some(&self.last_query_sequence.to_ne_bytes()[..]) {
                return parse_next_hop(&answer_buffer[..answer_length], interface, server);
            }
        }
    }

    /// Sends a query for the route to `server` with the next sequence number.
    fn send_route_query(&mut self, server: IpAddr) -> Result<(), Errno> {
        self.last_query_sequence = self.last_query_sequence.wrapping_add(1);
        let (family, destination) = match server {
            IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
            IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
        };
        let mut query_message = Vec::new();
        query_message.extend(
            ((NETLINK_ROUTE_HEADERS_BYTES + NETLINK_ATTRIBUTE_HEADER_BYTES + destination.len()) as u32).to_ne_bytes(),
        );
        query_message.extend(libc::RTM_GETROUTE.to_ne_bytes());
        query_message.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
        query_message.extend(self.last_query_sequence.to_ne_bytes());
        // The kernel assigns nlmsg_pid.
        query_message.extend([0; 4]);
        // struct rtmsg contains the address family, the destination's length in bits, and zeros.
        query_message.extend([family as u8, destination.len() as u8 * 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        query_message.extend(((NETLINK_ATTRIBUTE_HEADER_BYTES + destination.len()) as u16).to_ne_bytes());
        query_message.extend(RTA_DST.to_ne_bytes());
        query_message.extend(destination);
        send(self.query_socket.as_raw_fd(), &query_message, MsgFlags::empty())?;
        Ok(())
    }
}

fn parse_next_hop(answer: &[u8], interface: u32, server: IpAddr) -> Result<IpAddr, RouteError> {
    let parse_u32 = |bytes: &[u8]| bytes.try_into().map(u32::from_ne_bytes).unwrap_or_default();
    let message_type = answer.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    if message_type != Some(libc::RTM_NEWROUTE) {
        let error_code = answer.get(16..20).map_or(0, |code| parse_u32(code) as i32);
        return Err(RouteError::NoRoute(Errno::from_raw(-error_code)));
    }
    let attributes = answer.get(NETLINK_ROUTE_HEADERS_BYTES..).unwrap_or_default();
    match answer[ROUTE_TYPE_OFFSET] {
        libc::RTN_UNICAST => {}
        route_type => return Err(RouteError::UnexpectedRouteType(route_type)),
    }
    let route_interface_index = find_attribute(attributes, RTA_OIF).map_or(0, parse_u32);
    if route_interface_index != interface {
        return Err(RouteError::RouteToOtherInterface { found: route_interface_index, expected: interface });
    }
    let find_rtvia_address = || find_attribute(attributes, RTA_VIA).and_then(|via| via.get(RTVIA_FAMILY_BYTES..));
    Ok(find_attribute(attributes, RTA_GATEWAY).or_else(find_rtvia_address).and_then(parse_ip_address).unwrap_or(server))
}

fn parse_ip_address(bytes: &[u8]) -> Option<IpAddr> {
    let parse_ipv4 = || <[u8; 4]>::try_from(bytes).ok().map(|octets| Ipv4Addr::from(octets).into());
    let parse_ipv6 = || <[u8; 16]>::try_from(bytes).ok().map(|octets| Ipv6Addr::from(octets).into());
    parse_ipv4().or_else(parse_ipv6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_answer_to_an_earlier_route_query_is_ignored() {
        let loopback_index = nix::net::if_::if_nametoindex("lo").unwrap();
        let broadcast_result = RouteSockets::open().unwrap().find_next_hop(loopback_index, Ipv4Addr::BROADCAST.into());
        let mut routes = RouteSockets::open().unwrap();
        // The answer to this query waits in the socket, as after a timeout.
        routes.send_route_query(Ipv4Addr::LOCALHOST.into()).unwrap();
        assert_ne!(broadcast_result, Err(RouteError::UnexpectedRouteType(libc::RTN_LOCAL)));
        assert_eq!(routes.find_next_hop(loopback_index, Ipv4Addr::BROADCAST.into()), broadcast_result);
    }

    #[test]
    fn route_through_loopback_is_rejected() {
        let mut routes = RouteSockets::open().unwrap();
        let loopback_index = nix::net::if_::if_nametoindex("lo").unwrap();
        for loopback in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
            assert_eq!(
                routes.find_next_hop(loopback_index, loopback),
                Err(RouteError::UnexpectedRouteType(libc::RTN_LOCAL))
            );
        }
        assert!(!routes.have_routes_changed(), "a query changes nothing");
    }

    #[test]
    fn route_answers_are_parsed_or_rejected() {
        let server = IpAddr::from([10, 9, 0, 1]);
        let encode_route_attribute = |kind: u16, value: &[u8]| {
            [&((NETLINK_ATTRIBUTE_HEADER_BYTES + value.len()) as u16).to_ne_bytes()[..], &kind.to_ne_bytes(), value]
                .concat()
        };
        let encode_route_answer = |kind: u16, attributes: &[Vec<u8>]| {
            let mut message = vec![0; NETLINK_ROUTE_HEADERS_BYTES];
            message[4..6].copy_from_slice(&kind.to_ne_bytes());
            message[ROUTE_TYPE_OFFSET] = libc::RTN_UNICAST;
            message.extend(attributes.concat());
            message
        };
        let oif_attribute = encode_route_attribute(RTA_OIF, &3u32.to_ne_bytes());
        let gateway_ipv6: Ipv6Addr = "fe80::1".parse().unwrap();
        for (gateway, bytes) in
            [(IpAddr::from([10, 2, 0, 1]), &[10, 2, 0, 1][..]), (gateway_ipv6.into(), &gateway_ipv6.octets())]
        {
            let gateway_answer = encode_route_answer(
                libc::RTM_NEWROUTE,
                &[oif_attribute.clone(), encode_route_attribute(RTA_GATEWAY, bytes)],
            );
            assert_eq!(parse_next_hop(&gateway_answer, 3, server), Ok(gateway));
        }
        let rtvia_bytes = [&(libc::AF_INET6 as u16).to_ne_bytes()[..], &gateway_ipv6.octets()].concat();
        let rtvia_answer = encode_route_answer(
            libc::RTM_NEWROUTE,
            &[oif_attribute.clone(), encode_route_attribute(RTA_VIA, &rtvia_bytes)],
        );
        assert_eq!(parse_next_hop(&rtvia_answer, 3, server), Ok(gateway_ipv6.into()));
        let ipv4_gateway_answer = encode_route_answer(
            libc::RTM_NEWROUTE,
            &[oif_attribute.clone(), encode_route_attribute(RTA_GATEWAY, &[10, 2, 0, 1])],
        );
        assert_eq!(
            parse_next_hop(&ipv4_gateway_answer, 4, server),
            Err(RouteError::RouteToOtherInterface { found: 3, expected: 4 })
        );
        assert_eq!(parse_next_hop(&encode_route_answer(libc::RTM_NEWROUTE, &[oif_attribute]), 3, server), Ok(server));
        let mut error_answer = vec![0; 16];
        error_answer[4..6].copy_from_slice(&(libc::NLMSG_ERROR as u16).to_ne_bytes());
        error_answer.extend((-libc::ENETUNREACH).to_ne_bytes());
        assert_eq!(parse_next_hop(&error_answer, 3, server), Err(RouteError::NoRoute(Errno::ENETUNREACH)));
    }
}
