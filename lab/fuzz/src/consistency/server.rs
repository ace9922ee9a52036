//! Servers like `bpf/server/server.bpf.c` and the kernel's TCP, as far as a client can observe.

use coreward_intf as intf;
use coreward_model::cookie::{self, Cookie, FleetKeys};
use coreward_model::lb::Mac;
use coreward_model::{FourTuple, ServerId};

use crate::harness::TIME_KEY;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    Serving,
    /// Takes no new connections, and leaves when the last one has ended.
    Draining,
    Gone,
}

#[derive(Debug)]
pub(super) struct Server {
    pub id: ServerId,
    pub mac: Mac,
    pub life: Life,
    pub healthy: bool,
    pub connections: u32,
    /// Its keys, as received.
    pub keys: FleetKeys,
    /// Its own TSval from which on `keys.current` stamps.
    pub switch_ms: u32,
    /// Its clock at time 0 (ms).
    pub uptime: u32,
}

/// A server's end of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Socket {
    /// Position in the list of servers.
    pub server: usize,
    /// Its cookie: the id, or the index that the SYN brought.
    pub cookie: Cookie,
}

/// The first bytes distinguish servers from load balancers.
pub(super) fn mac(server: usize) -> Mac {
    let [high, low] = (server as u16).to_be_bytes();
    [2, 0, 1, 0, high, low]
}

pub(super) fn position(mac: &[u8]) -> Option<usize> {
    (mac[..4] == [2, 0, 1, 0]).then(|| usize::from(u16::from_be_bytes([mac[4], mac[5]])))
}

impl Server {
    /// The socket that a SYN makes. `tsecr`: its TSecr, in which a load balancer may have put an index.
    pub fn socket(&self, server: usize, tsecr: u32) -> Socket {
        let cookie = if tsecr & intf::SYN_TSECR_HOLDS_COOKIE != 0 {
            Cookie::TableIndex((tsecr & intf::COOKIE_ID_MASK) as u16)
        } else {
            Cookie::Server(self.id)
        };
        Socket { server, cookie }
    }

    /// The newest keys arrive: a new current one counts from a second from now on, as agents have it.
    pub fn set_keys(&mut self, keys: FleetKeys, now_ms: u64) {
        let switch_in = if keys.current == self.keys.current { 0 } else { 1_000 };
        self.switch_ms = self.clock(now_ms).wrapping_add(switch_in);
        self.keys = keys;
    }

    fn clock(&self, now_ms: u64) -> u32 {
        self.uptime.wrapping_add(now_ms as u32)
    }

    /// TSval of a packet to the client at `now_ms`.
    pub fn stamp(&self, tuple: &FourTuple, socket: &Socket, now_ms: u64) -> u32 {
        let milliseconds = self.clock(now_ms);
        cookie::stamp(&self.keys.at(milliseconds, self.switch_ms), &TIME_KEY, tuple, socket.cookie, milliseconds)
    }
}
