//! Simulated servers, which behave like `bpf/server/server.bpf.c` and the kernel's TCP, as far as clients can observe.

use coreward_intf as intf;
use coreward_model::cookie::{self, Cookie, FleetCookieKeys};
use coreward_model::lb::MacAddress;
use coreward_model::{FourTuple, ServerId};

use crate::harness::TIME_KEY;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServerLifecycle {
    Serving,
    /// The server takes no new connections, and leaves the fleet when its last connection has ended.
    Draining,
    Gone,
}

#[derive(Debug)]
pub(super) struct SimulatedServer {
    pub id: ServerId,
    pub mac: MacAddress,
    pub lifecycle: ServerLifecycle,
    pub is_healthy: bool,
    pub connection_count: u32,
    /// Newest keys that this server has received.
    pub cookie_keys: FleetCookieKeys,
    /// First TSval at which the server stamps packets with the current key. Before it, the server uses the previous
    /// key.
    pub key_switch_tsval: u32,
    /// Value of this server's TSval clock at virtual time 0 (ms).
    pub initial_clock_ms: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct ServerSocket {
    pub server_index: usize,
    /// Cookie in the packets that the server sends, with the server's id or the table index from the SYN.
    pub cookie: Cookie,
}

/// Returns the MAC address of a server, whose first bytes differ from those of a load balancer's address.
pub(super) fn server_mac(server_index: usize) -> MacAddress {
    let [index_high_byte, index_low_byte] = (server_index as u16).to_be_bytes();
    [2, 0, 1, 0, index_high_byte, index_low_byte]
}

pub(super) fn server_index_from_mac(mac: &[u8]) -> Option<usize> {
    (mac[..4] == [2, 0, 1, 0]).then(|| usize::from(u16::from_be_bytes([mac[4], mac[5]])))
}

impl SimulatedServer {
    /// Returns the socket that a SYN creates. Its cookie holds a table index if a load balancer has written one into
    /// `tsecr`.
    pub fn socket_for_syn(&self, server_index: usize, tsecr: u32) -> ServerSocket {
        let cookie = if tsecr & intf::SYN_TSECR_HOLDS_COOKIE != 0 {
            Cookie::TableIndex((tsecr & intf::COOKIE_ID_MASK) as u16)
        } else {
            Cookie::Server(self.id)
        };
        ServerSocket { server_index, cookie }
    }

    /// Replaces the keys. As a real agent does, the server starts to stamp with a new current key one second later.
    pub fn replace_cookie_keys(&mut self, keys: FleetCookieKeys, now_ms: u64) {
        let switch_delay_ms = if keys.current_key_index == self.cookie_keys.current_key_index { 0 } else { 1_000 };
        self.key_switch_tsval = self.tsval_clock_ms(now_ms).wrapping_add(switch_delay_ms);
        self.cookie_keys = keys;
    }

    fn tsval_clock_ms(&self, now_ms: u64) -> u32 {
        self.initial_clock_ms.wrapping_add(now_ms as u32)
    }

    /// Returns the TSval that the server stamps into a packet to the client at time `now_ms`.
    pub fn stamped_tsval(&self, tuple: &FourTuple, socket: &ServerSocket, now_ms: u64) -> u32 {
        let clock_ms = self.tsval_clock_ms(now_ms);
        cookie::stamp_tsval(
            &self.cookie_keys.keys_for_tsval(clock_ms, self.key_switch_tsval),
            &TIME_KEY,
            tuple,
            socket.cookie,
            clock_ms,
        )
    }
}
