//! Next hops of servers behind routers, from the kernel's routing table by rtnetlink(7).
//!
//! The XDP program could look up each packet's route (`bpf_fib_lookup`), at the cost of a helper call and a walk
//! through rules, tables and neighbours. Routes change seldom, so user space queries the kernel after notified changes
//! only.

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

use crate::veth::attribute;

const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
/// Route attribute for a gateway of another address family than the destination (struct rtvia; RFC 8950).
const RTA_VIA: u16 = 18;
/// Size of the field `rtvia_family` of struct rtvia in bytes; the address follows it.
const VIA_FAMILY: usize = 2;
/// Size of struct nlmsghdr and struct rtmsg together, in bytes.
const NETLINK_HEADER_BYTES: usize = 16 + 12;
/// Size of struct rtattr in bytes.
const ATTRIBUTE_HEADER: usize = 4;
/// Bytes of the sequence number `nlmsg_seq` in struct nlmsghdr.
const SEQUENCE_RANGE: Range<usize> = 8..12;
/// Offset of `rtm_type` from the start of the message, in bytes.
const ROUTE_TYPE_OFFSET: usize = 16 + 7;
/// Multicast groups of changes of links, and of addresses, routes and rules of IPv4 and IPv6: RTMGRP_* of
/// include/uapi/linux/rtnetlink.h. The last group is 1 << (RTNLGRP_IPV6_RULE - 1).
const MULTICAST_GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x80 | 0x100 | 0x400 | 1 << 18;

/// Reason why packets to a server cannot be sent by the load balancer's interface.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// The kernel has no route to the server.
    #[error("no route ({0}): expected one by the load balancer's interface")]
    NoRoute(Errno),
    /// The route to the server is not a unicast route.
    #[error("a route of type {0}: expected a unicast route by the load balancer's interface")]
    NotUnicast(u8),
    /// The route leads to another interface, but XDP can send packets only by the interface that received them.
    #[error("a route by the interface of index {found}: expected index {expected}, the load balancer's interface")]
    OtherInterface {
        /// Index of the interface to which the route leads.
        found: u32,
        /// Index of the load balancer's interface.
        expected: u32,
    },
}

/// Netlink sockets for the kernel's routes and notifications of their changes, in the network namespace of the thread
/// that called [`open`](Self::open).
#[derive(Debug)]
pub struct Routes {
    notification_socket: OwnedFd,
    query_socket: OwnedFd,
    /// Sequence number of the latest query.
    sequence: u32,
}

impl Routes {
    /// Opens a socket for notifications and one for queries. Fails when the kernel does not offer netlink.
    pub fn open() -> io::Result<Self> {
        let open = || socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute);
        let (notification_socket, query_socket) = (open()?, open()?);
        bind(notification_socket.as_raw_fd(), &NetlinkAddr::new(0, MULTICAST_GROUPS))?;
        setsockopt(&query_socket, sockopt::ReceiveTimeout, &TimeVal::seconds(1))?;
        Ok(Self { notification_socket, query_socket, sequence: 0 })
    }

    /// Returns whether a link, address, route or rule has changed since the last call.
    pub fn has_changed(&self) -> bool {
        let mut changed = false;
        let mut notification = [0; 4096];
        loop {
            match recv(self.notification_socket.as_raw_fd(), &mut notification, MsgFlags::MSG_DONTWAIT) {
                // ENOBUFS: notifications were lost.
                Ok(_) | Err(Errno::ENOBUFS) => changed = true,
                Err(Errno::EINTR) => {}
                Err(_) => return changed,
            }
        }
    }

    /// Returns the next hop of packets to `server`: a gateway, or the server itself. Fails when the packets do not
    /// leave by the device with the index `interface`.
    pub fn next_hop(&mut self, interface: u32, server: IpAddr) -> Result<IpAddr, RouteError> {
        self.send_query(server).map_err(RouteError::NoRoute)?;
        let mut answer = [0; 4096];
        loop {
            let length = match recv(self.query_socket.as_raw_fd(), &mut answer, MsgFlags::empty()) {
                Err(Errno::EINTR) => continue,
                result => result.map_err(RouteError::NoRoute)?,
            };
            // An answer to an earlier query may have come after its time limit.
            if answer.get(SEQUENCE_RANGE) == Some(&self.sequence.to_ne_bytes()[..]) {
                return read_route(&answer[..length], interface, server);
            }
        }
    }

    /// Sends a query for the route to `server`, with the next sequence number.
    fn send_query(&mut self, server: IpAddr) -> Result<(), Errno> {
        self.sequence = self.sequence.wrapping_add(1);
        let (family, destination) = match server {
            IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
            IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
        };
        let mut request = Vec::new();
        request.extend(((NETLINK_HEADER_BYTES + ATTRIBUTE_HEADER + destination.len()) as u32).to_ne_bytes());
        request.extend(libc::RTM_GETROUTE.to_ne_bytes());
        request.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
        request.extend(self.sequence.to_ne_bytes());
        // nlmsg_pid: assigned by the kernel.
        request.extend([0; 4]);
        // struct rtmsg: family, length of the destination in bits, zeros.
        request.extend([family as u8, destination.len() as u8 * 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        request.extend(((ATTRIBUTE_HEADER + destination.len()) as u16).to_ne_bytes());
        request.extend(RTA_DST.to_ne_bytes());
        request.extend(destination);
        send(self.query_socket.as_raw_fd(), &request, MsgFlags::empty())?;
        Ok(())
    }
}

fn read_route(answer: &[u8], interface: u32, server: IpAddr) -> Result<IpAddr, RouteError> {
    let number = |bytes: &[u8]| bytes.try_into().map(u32::from_ne_bytes).unwrap_or_default();
    let kind = answer.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    if kind != Some(libc::RTM_NEWROUTE) {
        let code = answer.get(16..20).map_or(0, |code| number(code) as i32);
        return Err(RouteError::NoRoute(Errno::from_raw(-code)));
    }
    let attributes = answer.get(NETLINK_HEADER_BYTES..).unwrap_or_default();
    match answer[ROUTE_TYPE_OFFSET] {
        libc::RTN_UNICAST => {}
        other => return Err(RouteError::NotUnicast(other)),
    }
    let found = attribute(attributes, RTA_OIF).map_or(0, number);
    if found != interface {
        return Err(RouteError::OtherInterface { found, expected: interface });
    }
    let via = || attribute(attributes, RTA_VIA).and_then(|via| via.get(VIA_FAMILY..));
    Ok(attribute(attributes, RTA_GATEWAY).or_else(via).and_then(read_address).unwrap_or(server))
}

fn read_address(bytes: &[u8]) -> Option<IpAddr> {
    let ipv4 = || <[u8; 4]>::try_from(bytes).ok().map(|octets| Ipv4Addr::from(octets).into());
    let ipv6 = || <[u8; 16]>::try_from(bytes).ok().map(|octets| Ipv6Addr::from(octets).into());
    ipv4().or_else(ipv6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_answer_to_an_earlier_query_is_discarded() {
        let index = nix::net::if_::if_nametoindex("lo").unwrap();
        let broadcast = Routes::open().unwrap().next_hop(index, Ipv4Addr::BROADCAST.into());
        let mut routes = Routes::open().unwrap();
        // The answer to this query waits in the socket, as after a timeout.
        routes.send_query(Ipv4Addr::LOCALHOST.into()).unwrap();
        assert_ne!(broadcast, Err(RouteError::NotUnicast(libc::RTN_LOCAL)));
        assert_eq!(routes.next_hop(index, Ipv4Addr::BROADCAST.into()), broadcast);
    }

    #[test]
    fn route_by_loopback_is_rejected() {
        let mut routes = Routes::open().unwrap();
        let index = nix::net::if_::if_nametoindex("lo").unwrap();
        for loopback in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
            assert_eq!(routes.next_hop(index, loopback), Err(RouteError::NotUnicast(libc::RTN_LOCAL)));
        }
        assert!(!routes.has_changed(), "a query changes nothing");
    }

    #[test]
    fn gateway_interface_and_missing_route_are_read() {
        let server = IpAddr::from([10, 9, 0, 1]);
        let attribute = |kind: u16, value: &[u8]| {
            [&((ATTRIBUTE_HEADER + value.len()) as u16).to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat()
        };
        let answer = |kind: u16, attributes: &[Vec<u8>]| {
            let mut answer = vec![0; NETLINK_HEADER_BYTES];
            answer[4..6].copy_from_slice(&kind.to_ne_bytes());
            answer[ROUTE_TYPE_OFFSET] = libc::RTN_UNICAST;
            answer.extend(attributes.concat());
            answer
        };
        let by = attribute(RTA_OIF, &3u32.to_ne_bytes());
        let gateway_ipv6: Ipv6Addr = "fe80::1".parse().unwrap();
        for (gateway, bytes) in
            [(IpAddr::from([10, 2, 0, 1]), &[10, 2, 0, 1][..]), (gateway_ipv6.into(), &gateway_ipv6.octets())]
        {
            let routed = answer(libc::RTM_NEWROUTE, &[by.clone(), attribute(RTA_GATEWAY, bytes)]);
            assert_eq!(read_route(&routed, 3, server), Ok(gateway));
        }
        let via = [&(libc::AF_INET6 as u16).to_ne_bytes()[..], &gateway_ipv6.octets()].concat();
        let routed = answer(libc::RTM_NEWROUTE, &[by.clone(), attribute(RTA_VIA, &via)]);
        assert_eq!(read_route(&routed, 3, server), Ok(gateway_ipv6.into()));
        let routed = answer(libc::RTM_NEWROUTE, &[by.clone(), attribute(RTA_GATEWAY, &[10, 2, 0, 1])]);
        assert_eq!(read_route(&routed, 4, server), Err(RouteError::OtherInterface { found: 3, expected: 4 }));
        assert_eq!(read_route(&answer(libc::RTM_NEWROUTE, &[by]), 3, server), Ok(server));
        let mut error = vec![0; 16];
        error[4..6].copy_from_slice(&(libc::NLMSG_ERROR as u16).to_ne_bytes());
        error.extend((-libc::ENETUNREACH).to_ne_bytes());
        assert_eq!(read_route(&error, 3, server), Err(RouteError::NoRoute(Errno::ENETUNREACH)));
    }
}
