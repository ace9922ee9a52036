//! Clients, their connections, and the delivery of their packets.

use std::net::Ipv4Addr;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::cookie::{self, Cookie};
use coreward_model::lb::Mac;

use super::server::{self, Lifecycle, Socket};
use super::{Event, MAX_IDLE_MS, Simulation, load_balancer_mac};
use crate::frame::{self, ETHERNET_HEADER_BYTES, EthernetIpHeader, TcpHeader, UDP, timestamp_option};
use crate::ipv6;

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// Offset of TSecr in the TCP header of a SYN, whose timestamp follows two options of 6 bytes.
const SYN_TSECR_OFFSET: usize = 20 + 6 + 6;
const BROADCAST: Mac = [0xff; 6];
/// Number of transmissions of a packet after which the client gives up.
const MAX_ATTEMPTS: u32 = 25;
/// Mean number of packets per fault: a packet through another load balancer than its connection, or a lost answer.
const PACKETS_PER_FAULT: usize = 50;
/// Mean number of connections per connection that has no timestamps.
const WITHOUT_TIMESTAMPS: usize = 30;

/// State of a connection at its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The client has sent a SYN, and sends it again until it is answered.
    Opening,
    /// The connection is open, with this number of packets still to send.
    Open(u32),
}

/// Connection from the client's point of view, and its sockets at servers.
#[derive(Debug)]
pub(super) struct Connection {
    client: (Ipv4Addr, u16),
    timestamps: bool,
    stage: Stage,
    attempts: u32,
    /// Newest TSval that the client has received from the server, and returns in TSecr.
    tsecr: u32,
    /// Index of the server that sent the first SYN-ACK.
    server: Option<usize>,
    /// Sockets of this connection at servers. A retransmitted SYN may have created a second one.
    sockets: Vec<Socket>,
    /// Hash by which the network selects the load balancer.
    lb_hash: u32,
}

/// Result of sending one packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SendOutcome {
    /// Accepted by the server with this index.
    Accepted(usize),
    /// Dropped by the network or a load balancer, or not accepted by any server.
    Lost,
    /// Received by a server that does not have the connection, and answers with a reset.
    Rejected,
}

/// Returns an encapsulated frame without its outer headers.
fn decapsulated(frame: &[u8]) -> Vec<u8> {
    let outer = &frame[ETHERNET_HEADER_BYTES..];
    let (header, protocol) = if outer[0] >> 4 == 6 { (40, outer[6]) } else { (20, outer[9]) };
    let inner = &outer[header + if protocol == UDP { 8 } else { 0 }..];
    let ethertype = if inner[0] >> 4 == 6 { [0x86, 0xdd] } else { [8, 0] };
    [&frame[..ETHERNET_HEADER_BYTES - 2], &ethertype, inner].concat()
}

/// Returns the offset of the TCP header in a frame without IPv4 options or IPv6 extension headers.
fn transport_offset(frame: &[u8]) -> usize {
    ipv6::read(frame).map_or(ETHERNET_HEADER_BYTES + 20, |headers| headers.transport_offset)
}

impl Simulation {
    pub(super) fn open_next_connection(&mut self) -> anyhow::Result<()> {
        let number = self.opened_count;
        if number == self.config.connections {
            return Ok(());
        }
        self.opened_count += 1;
        // Client addresses of half a day; sometimes a port is used again.
        let client = if self.rng.chance(1, 50) && !self.ended_clients.is_empty() {
            let position = self.rng.below(self.ended_clients.len());
            self.ended_clients.swap_remove(position)
        } else {
            (Ipv4Addr::from(0x0b00_0000 + number / 50_000), 1_024 + (number % 50_000) as u16)
        };
        let timestamps = !self.rng.chance(1, WITHOUT_TIMESTAMPS);
        self.connections[number as usize] = Some(Connection {
            client,
            timestamps,
            stage: Stage::Opening,
            attempts: 0,
            tsecr: 0,
            server: None,
            sockets: Vec::new(),
            lb_hash: self.rng.u32(),
        });
        self.open_clients.insert(client);
        self.report.connections += 1;
        self.report.without_timestamps += u64::from(!timestamps);
        let next = u64::from(self.opened_count) * self.end_ms() / u64::from(self.config.connections);
        self.schedule(next.saturating_sub(self.now_ms), Event::Arrival);
        self.advance_connection(number)
    }

    fn connection(&self, number: u32) -> &Connection {
        self.connections[number as usize].as_ref().expect("an open connection")
    }

    fn connection_mut(&mut self, number: u32) -> &mut Connection {
        self.connections[number as usize].as_mut().expect("an open connection")
    }

    /// Returns a random time until the next packet (ms): mostly short, sometimes nearly the lifetime of a key.
    fn packet_gap_ms(&mut self) -> u64 {
        let most = match self.rng.below(200) {
            0 => MAX_IDLE_MS as usize,
            1..10 => 8_000,
            10..80 => 1_000,
            _ => 50,
        };
        1 + self.rng.below(most) as u64
    }

    pub(super) fn advance_connection(&mut self, number: u32) -> anyhow::Result<()> {
        let connection = self.connection(number);
        if connection.server.is_some_and(|server| self.servers[server].life == Lifecycle::Gone) {
            self.report.lost_with_server += 1;
            self.close(number);
            return Ok(());
        }
        match connection.stage {
            Stage::Opening => self.open(number),
            Stage::Open(left) => self.send_next(number, left),
        }
    }

    fn open(&mut self, number: u32) -> anyhow::Result<()> {
        let delivery = self.send(number, SYN)?;
        let again = self.rng.chance(1, 50);
        let most = if self.rng.chance(1, 20) { 40 } else { 8 };
        let packets = 2 + self.rng.below(most) as u32;
        let gap = self.packet_gap_ms();
        let connection = self.connection_mut(number);
        connection.attempts += 1;
        if connection.server.is_none() {
            match delivery {
                SendOutcome::Accepted(server) => connection.server = Some(server),
                _ if connection.attempts < MAX_ATTEMPTS => {
                    self.schedule(1_000, Event::Packet(number));
                    return Ok(());
                }
                _ => return self.give_up(number),
            }
            self.report.established += 1;
            if again {
                // The SYN-ACK was late: the client has sent another SYN.
                self.schedule(1_000, Event::Packet(number));
                return Ok(());
            }
        } else if let SendOutcome::Accepted(server) = delivery
            && connection.server != Some(server)
        {
            self.report.syns_to_other_server += 1;
        }
        let connection = self.connection_mut(number);
        connection.stage = Stage::Open(packets);
        connection.attempts = 0;
        self.schedule(gap, Event::Packet(number));
        Ok(())
    }

    fn send_next(&mut self, number: u32, left: u32) -> anyhow::Result<()> {
        let flags = match left {
            0 if self.rng.chance(1, 10) => RST,
            0 => ACK | FIN,
            _ => ACK,
        };
        let delivery = self.send(number, flags)?;
        let timestamps = self.connection(number).timestamps;
        let server = self.connection(number).server;
        match delivery {
            SendOutcome::Accepted(by) => {
                if Some(by) != server && timestamps {
                    self.report.accepted_elsewhere += 1;
                }
                let Some(left) = left.checked_sub(1) else {
                    self.report.completed += 1;
                    self.close(number);
                    return Ok(());
                };
                let connection = self.connection_mut(number);
                connection.stage = Stage::Open(left);
                connection.attempts = 0;
                let gap = self.packet_gap_ms();
                self.schedule(gap, Event::Packet(number));
            }
            SendOutcome::Rejected => {
                if flags == RST {
                    self.report.misdelivered_resets += 1;
                } else if timestamps {
                    self.report.misdelivered += 1;
                } else {
                    self.report.broken_without_timestamps += 1;
                }
                self.close(number);
            }
            SendOutcome::Lost => {
                let connection = self.connection_mut(number);
                connection.attempts += 1;
                if connection.attempts == MAX_ATTEMPTS {
                    return self.give_up(number);
                }
                self.schedule(400, Event::Packet(number));
            }
        }
        Ok(())
    }

    fn give_up(&mut self, number: u32) -> anyhow::Result<()> {
        self.report.gave_up += 1;
        self.close(number);
        Ok(())
    }

    fn close(&mut self, number: u32) {
        let connection = self.connections[number as usize].take().expect("an open connection");
        for socket in &connection.sockets {
            self.servers[socket.server].connections -= 1;
            self.leave_if_empty(socket.server);
        }
        self.open_clients.remove(&connection.client);
        if self.ended_clients.len() < 10_000 {
            self.ended_clients.push(connection.client);
        }
    }

    fn frame(&mut self, number: u32, to: Mac, flags: u8) -> Vec<u8> {
        let value = self.now_ms as u32;
        let connection = self.connection(number);
        let options = match flags {
            _ if !connection.timestamps || flags == RST => Vec::new(),
            SYN => [&[2, 4, 5, 0xb4, 4, 2][..], &timestamp_option(value, 0), &[1, 3, 3, 7]].concat(),
            _ => [&[1, 1][..], &timestamp_option(value, connection.tsecr)].concat(),
        };
        let ip = EthernetIpHeader {
            mac: to,
            source: connection.client.0,
            destination: self.config.vip().0,
            protocol: frame::TCP,
            identification: value as u16,
            fragment: 0x4000,
            option_words: 0,
            tos_and_ttl: [0, 64],
        };
        let segment = TcpHeader { ports: (connection.client.1, self.config.vip().1), flags, options };
        let mut packet = Vec::new();
        ip.append_frame(&mut packet, |packet| segment.append_segment(packet, (number, number), 0));
        ipv6::translate(&mut self.rng, &mut packet);
        packet
    }

    /// Sends a packet of a connection through one of the load balancers, and returns whether a server accepted it.
    fn send(&mut self, number: u32, flags: u8) -> anyhow::Result<SendOutcome> {
        let alive: Vec<usize> = (0..self.load_balancers.len()).filter(|at| self.load_balancers[*at].alive).collect();
        let is_rerouted = self.rng.chance(1, PACKETS_PER_FAULT);
        let choice = self.connection(number).lb_hash as usize + usize::from(is_rerouted);
        let first = alive[choice % alive.len()];
        self.report.packets += 1;
        let frame = self.frame(number, load_balancer_mac(first), flags);
        let delivery = self.forward(number, flags, first, &frame)?;
        if let SendOutcome::Accepted(server) = delivery {
            self.report.accepted += 1;
            self.answer(number, server);
        }
        Ok(delivery)
    }

    fn forward(&mut self, number: u32, flags: u8, through: usize, frame: &[u8]) -> anyhow::Result<SendOutcome> {
        let (counter, frame) = self.forward_through(through, frame)?;
        if counter >= intf::LB_COUNTER_DROP_MALFORMED_IPV4 || counter == intf::LB_COUNTER_PASSED_NOT_SERVICE {
            return Ok(SendOutcome::Lost);
        }
        let to = &frame[..6];
        if to == BROADCAST {
            return Ok(self.deliver_broadcast(number));
        }
        let owner = (0..self.load_balancers.len()).find(|other| load_balancer_mac(*other) == to);
        if let Some(owner) = owner {
            self.report.owner_forwarded += 1;
            anyhow::ensure!(owner != through, "load balancer {owner} sends to itself");
            if !self.load_balancers[owner].alive {
                return Ok(SendOutcome::Lost);
            }
            return self.forward(number, flags, owner, &frame);
        }
        let server = server::server_index(to).expect("a server's MAC address");
        let frame = if self.config.forwarding.encapsulates() { decapsulated(&frame) } else { frame };
        Ok(self.deliver(number, flags, server, &frame))
    }

    /// Delivers a packet to all servers. The server of the connection accepts it, the others ignore it.
    fn deliver_broadcast(&mut self, number: u32) -> SendOutcome {
        let Some(server) = self.connection(number).server else { return SendOutcome::Lost };
        if self.servers[server].life == Lifecycle::Gone {
            return SendOutcome::Lost;
        }
        let connection = self.connection(number);
        let tuple = ipv6::tuple(connection.client, self.config.vip());
        let returned = cookie::decode_cookie(&self.servers[server].keys, &tuple, connection.tsecr);
        let id = self.servers[server].id;
        // The load balancer has lost the entry: from now on the cookie holds the server's id.
        if let Cookie::TableIndex(_) = returned
            && let Some(socket) = self.connection_mut(number).sockets.iter_mut().find(|socket| socket.server == server)
        {
            socket.cookie = Cookie::Server(id);
        }
        SendOutcome::Accepted(server)
    }

    fn deliver(&mut self, number: u32, flags: u8, server: usize, frame: &[u8]) -> SendOutcome {
        if self.servers[server].life == Lifecycle::Gone {
            return SendOutcome::Lost;
        }
        if flags == SYN {
            let tsecr_at = transport_offset(frame) + SYN_TSECR_OFFSET;
            let tsecr = frame.get(tsecr_at..tsecr_at + 4).filter(|_| self.connection(number).timestamps);
            let tsecr = tsecr.map_or(0, |bytes| u32::from_be_bytes(bytes.try_into().expect("four bytes")));
            let socket = self.servers[server].socket(server, tsecr);
            let sockets = &mut self.connection_mut(number).sockets;
            match sockets.iter_mut().find(|socket| socket.server == server) {
                Some(half_open) => *half_open = socket,
                None => {
                    sockets.push(socket);
                    self.servers[server].connections += 1;
                }
            }
            return SendOutcome::Accepted(server);
        }
        let connection = self.connection(number);
        if connection.server == Some(server) {
            return SendOutcome::Accepted(server);
        }
        // After a retransmitted SYN this server has a half-open socket, but not for this connection.
        if connection.timestamps || connection.sockets.iter().any(|socket| socket.server == server) {
            return SendOutcome::Rejected;
        }
        self.forward_to_previous_server(number, server, frame)
    }

    /// Forwards a packet without a cookie to the previous server, whose id the load balancer has written into the
    /// packet. The server that received it does not know the connection.
    fn forward_to_previous_server(&mut self, number: u32, server: usize, frame: &[u8]) -> SendOutcome {
        // The IP identification, or the end of the IPv6 flow label.
        let named_at = ETHERNET_HEADER_BYTES + if frame[ETHERNET_HEADER_BYTES] >> 4 == 6 { 2 } else { 4 };
        let named = u16::from_be_bytes([frame[named_at], frame[named_at + 1]]);
        let before = ServerId::try_from(u64::from(named)).ok().filter(|id| *id != self.servers[server].id);
        let Some(before) = before.and_then(|id| self.servers.iter().position(|server| server.id == id)) else {
            return SendOutcome::Rejected;
        };
        self.report.chained += 1;
        match self.servers[before].life {
            Lifecycle::Gone => SendOutcome::Lost,
            _ if self.connection(number).server == Some(before) => SendOutcome::Accepted(before),
            _ => SendOutcome::Rejected,
        }
    }

    /// Sends the server's answer to the client. It may be lost.
    fn answer(&mut self, number: u32, server: usize) {
        let lost = self.rng.chance(1, PACKETS_PER_FAULT);
        let now = self.now_ms;
        let connection = self.connection(number);
        // The connection ignores another server's answer to a retransmitted SYN.
        let from_another = connection.server.is_some_and(|first| first != server);
        let Some(socket) = connection.sockets.iter().find(|socket| socket.server == server) else { return };
        let tuple = ipv6::tuple(connection.client, self.config.vip());
        let value = self.servers[server].stamp(&tuple, socket, now);
        // The first answer opens the connection.
        if !from_another && (!lost || connection.tsecr == 0) {
            self.connection_mut(number).tsecr = value;
        }
    }
}
