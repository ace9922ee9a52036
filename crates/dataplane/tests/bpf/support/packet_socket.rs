//! A socket that sends complete frames.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// Packet socket (packet(7)) bound to an interface in the calling thread's network namespace.
#[derive(Debug)]
pub struct PacketSocket {
    socket: OwnedFd,
    link_layer_address: libc::sockaddr_ll,
}

impl PacketSocket {
    pub fn open(interface: &str) -> Self {
        // A socket with protocol 0 receives no packets.
        // SAFETY: socket() returns a new descriptor without another owner, or -1, which is checked.
        let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        nix::errno::Errno::result(socket).unwrap();
        // SAFETY: sockaddr_ll is plain data, for which all zeros is a value.
        let mut link_layer_address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        link_layer_address.sll_family = libc::AF_PACKET as u16;
        link_layer_address.sll_ifindex = nix::net::if_::if_nametoindex(interface).unwrap() as i32;
        // SAFETY: the descriptor is new and has no other owner.
        Self { socket: unsafe { OwnedFd::from_raw_fd(socket) }, link_layer_address }
    }

    pub fn send_frame(&self, frame: &[u8]) {
        // SAFETY: pointers and lengths are those of live values.
        let sent_bytes = unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const self.link_layer_address).cast(),
                size_of::<libc::sockaddr_ll>() as u32,
            )
        };
        assert_eq!(nix::errno::Errno::result(sent_bytes).unwrap() as usize, frame.len());
    }
}
