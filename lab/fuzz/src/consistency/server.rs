//! Servers that behave like `bpf/server/server.bpf.c` and the kernel's TCP, as far as clients can observe.

use coreward_intf as intf;
use coreward_model::cookie::{self, Cookie, FleetKeys};
use coreward_model::lb::Mac;
use coreward_model::{FourTuple, ServerId};

use crate::harness::TIME_KEY;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lifecycle {
    Serving,
    /// Takes no new connections, and leaves when the last one has ended.
    Draining,
    Gone,
}

#[derive(Debug)]
pub(super) struct Server {
    pub id: ServerId,
    pub mac: Mac,
    pub life: Lifecycle,
    pub healthy: bool,
    pub connections: u32,
    /// Newest keys that it received.
    pub keys: FleetKeys,
    /// TSval of its own clock from which on `keys.current` stamps.
    pub key_switch_tsval: u32,
    /// Value of its clock at time 0 (ms).
    pub initial_clock_ms: u32,
}

/// Server's state of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Socket {
    /// Position in the list of servers.
    pub server: usize,
    /// Cookie: the id, or the index from the SYN.
    pub cookie: Cookie,
}

/// Returns a server's MAC address; its first bytes distinguish it from a load balancer's.
pub(super) fn mac(server: usize) -> Mac {
    let [high, low] = (server as u16).to_be_bytes();
    [2, 0, 1, 0, high, low]
}

pub(super) fn server_index(mac: &[u8]) -> Option<usize> {
    (mac[..4] == [2, 0, 1, 0]).then(|| usize::from(u16::from_be_bytes([mac[4], mac[5]])))
}

impl Server {
    /// Returns the socket that a SYN creates. A load balancer may have put an index into `tsecr`.
    pub fn socket(&self, server: usize, tsecr: u32) -> Socket {
        let cookie = if tsecr & intf::SYN_TSECR_HOLDS_COOKIE != 0 {
            Cookie::TableIndex((tsecr & intf::COOKIE_ID_MASK) as u16)
        } else {
            Cookie::Server(self.id)
        };
        Socket { server, cookie }
    }

    /// Updates the keys. As in agents, a new current key stamps from one second later on.
    pub fn set_keys(&mut self, keys: FleetKeys, now_ms: u64) {
        let switch_in = if keys.current == self.keys.current { 0 } else { 1_000 };
        self.key_switch_tsval = self.clock(now_ms).wrapping_add(switch_in);
        self.keys = keys;
    }

    fn clock(&self, now_ms: u64) -> u32 {
        self.initial_clock_ms.wrapping_add(now_ms as u32)
    }

    /// Returns TSval of a packet to the client at `now_ms`.
    pub fn stamp(&self, tuple: &FourTuple, socket: &Socket, now_ms: u64) -> u32 {
        let milliseconds = self.clock(now_ms);
        cookie::stamp_tsval(
            &self.keys.at_tsval(milliseconds, self.key_switch_tsval),
            &TIME_KEY,
            tuple,
            socket.cookie,
            milliseconds,
        )
    }
}
