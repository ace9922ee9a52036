//! Look-up of a veth device's other end, which may be in another network namespace, by rtnetlink(7).
//!
//! veth puts a frame that XDP sends into the other end's ring. It wakes the other end's poll only if an XDP program is
//! attached there (veth_xdp_flush() in drivers/net/veth.c). With GRO but no program, frames wait until the kernel
//! itself sends through the ring. Without both, frames are dropped.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::socket::MsgFlags;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};

const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_XDP: u16 = 43;
const IFLA_TARGET_NETNSID: u16 = 46;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_XDP_ATTACHED: u16 = 2;
/// XDP modes in which the program runs in the driver: XDP_ATTACHED_DRV and XDP_ATTACHED_MULTI of
/// include/uapi/linux/if_link.h.
const XDP_DRIVER_ATTACH_MODES: [u8; 2] = [1, 4];
/// Size of struct nlmsghdr and struct ifinfomsg together, in bytes.
const NETLINK_LINK_HEADERS_BYTES: usize = 16 + 16;

/// Returns whether the other end of a veth pair has a native XDP program. Returns `None` if the device is not a veth
/// device, or the kernel does not reveal the other end.
pub fn peer_has_native_xdp(interface_index: u32) -> Option<bool> {
    let own_attributes = query_link_attributes(interface_index, None).ok()?;
    let link_kind = find_attribute(find_attribute(&own_attributes, IFLA_LINKINFO)?, IFLA_INFO_KIND)?;
    if link_kind.strip_suffix(b"\0").unwrap_or(link_kind) != b"veth" {
        return None;
    }
    let read_u32_attribute = |attribute_type: u16| {
        Some(u32::from_ne_bytes(find_attribute(&own_attributes, attribute_type)?.try_into().ok()?))
    };
    let peer_attributes =
        query_link_attributes(read_u32_attribute(IFLA_LINK)?, read_u32_attribute(IFLA_LINK_NETNSID)).ok()?;
    let attach_mode = find_attribute(find_attribute(&peer_attributes, IFLA_XDP)?, IFLA_XDP_ATTACHED)?;
    Some(attach_mode.first().is_some_and(|mode| XDP_DRIVER_ATTACH_MODES.contains(mode)))
}

/// Returns a network device's netlink attributes. `namespace` is the id of the device's network namespace in the
/// caller's namespace.
fn query_link_attributes(interface_index: u32, namespace: Option<u32>) -> io::Result<Vec<u8>> {
    let namespace_attribute = namespace.map(|namespace| {
        [&8u16.to_ne_bytes()[..], &IFLA_TARGET_NETNSID.to_ne_bytes(), &namespace.to_ne_bytes()].concat()
    });
    let namespace_attribute = namespace_attribute.unwrap_or_default();
    let mut query_message = Vec::new();
    query_message.extend(((NETLINK_LINK_HEADERS_BYTES + namespace_attribute.len()) as u32).to_ne_bytes());
    query_message.extend(libc::RTM_GETLINK.to_ne_bytes());
    query_message.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    // Sequence number and port of the header, then family, padding and type.
    query_message.extend([0; 4 + 4 + 4]);
    query_message.extend(interface_index.to_ne_bytes());
    // Flags and change mask.
    query_message.extend([0; 4 + 4]);
    query_message.extend(namespace_attribute);
    let socket = open_route_socket()?;
    send(socket.as_raw_fd(), &query_message, MsgFlags::empty())?;
    let mut answer_buffer = vec![0; 1 << 16];
    let answer_length = recv(socket.as_raw_fd(), &mut answer_buffer, MsgFlags::empty())?;
    answer_buffer.truncate(answer_length);
    let message_type = answer_buffer.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    match (message_type, answer_buffer.get(NETLINK_LINK_HEADERS_BYTES..)) {
        (Some(libc::RTM_NEWLINK), Some(attributes)) => Ok(attributes.to_vec()),
        _ => Err(io::Error::other("the kernel does not show the link")),
    }
}

/// Opens a route netlink socket with a receive timeout of one second.
fn open_route_socket() -> io::Result<OwnedFd> {
    let protocol = SockProtocol::NetlinkRoute;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(1))?;
    Ok(socket)
}

pub(crate) fn find_attribute(mut attributes: &[u8], attribute_type: u16) -> Option<&[u8]> {
    // Mask without the bits NLA_F_NESTED and NLA_F_NET_BYTEORDER.
    const NETLINK_ATTRIBUTE_TYPE_MASK: u16 = 0x3fff;
    loop {
        let length = usize::from(u16::from_ne_bytes(attributes.get(..2)?.try_into().ok()?));
        let current_type = u16::from_ne_bytes(attributes.get(2..4)?.try_into().ok()?) & NETLINK_ATTRIBUTE_TYPE_MASK;
        if current_type == attribute_type {
            return attributes.get(4..length);
        }
        attributes = attributes.get(length.max(4).next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netlink_attribute_is_found_by_type() {
        let encoded_attributes = [5, 0, 1, 0, 7, 0, 0, 0, 6, 0, 2, 0x80, 8, 9, 0, 0];
        assert_eq!(find_attribute(&encoded_attributes, 1), Some(&[7][..]));
        assert_eq!(find_attribute(&encoded_attributes, 2), Some(&[8, 9][..]));
        assert_eq!(find_attribute(&encoded_attributes, 3), None);
        assert_eq!(find_attribute(&[0, 0, 1, 0], 2), None, "a length of 0 does not make a loop without end");
    }

    #[test]
    fn loopback_is_no_veth() {
        let loopback_index = nix::net::if_::if_nametoindex("lo").unwrap();
        assert!(query_link_attributes(loopback_index, None).is_ok());
        assert_eq!(peer_has_native_xdp(loopback_index), None);
        assert_eq!(peer_has_native_xdp(u32::MAX), None);
    }
}
