//! Simulated clients with their connections, and the delivery of their packets to servers.

use std::net::Ipv4Addr;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::cookie::{self, Cookie};
use coreward_model::lb::MacAddress;

use super::server::{self, ServerLifecycle, ServerSocket};
use super::{ConsistencyCheck, ConsistencyCheckEvent, MAX_CONNECTION_IDLE_MS, load_balancer_mac};
use crate::frame::{self, ETHERNET_HEADER_BYTES, EthernetIpHeader, PROTOCOL_UDP, TcpHeader, timestamp_option};
use crate::ipv6_translation;

const TCP_FLAG_FIN: u8 = 0x01;
const TCP_FLAG_SYN: u8 = 0x02;
const TCP_FLAG_RST: u8 = 0x04;
const TCP_FLAG_ACK: u8 = 0x10;

/// Offset of TSecr in the TCP header of a SYN. It follows the fixed header, 6 bytes of other options, and 6 bytes of
/// the timestamp option.
const SYN_TSECR_OFFSET: usize = 20 + 6 + 6;
const BROADCAST_MAC: MacAddress = [0xff; 6];
/// Number of transmissions of a packet after which the client gives up.
const MAX_TRANSMISSIONS_PER_PACKET: u32 = 25;
/// Mean number of packets per fault. A fault is a lost answer, or a packet that reaches another load balancer than the
/// other packets of its connection.
const PACKETS_PER_FAULT: usize = 50;
/// Average number of connections among which one has no TCP timestamps.
const CONNECTIONS_PER_UNTIMESTAMPED_CONNECTION: usize = 30;

/// Phase of a connection at its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientConnectionState {
    /// The client has sent a SYN, and sends it again until it is answered.
    Opening,
    /// The connection is open, and the client still has to send this number of packets.
    EstablishedWithRemainingPackets(u32),
}

/// State of a connection at its client, with the connection's sockets at servers.
#[derive(Debug)]
pub(super) struct ClientConnection {
    client_address: (Ipv4Addr, u16),
    has_timestamps: bool,
    state: ClientConnectionState,
    transmission_count: u32,
    /// Newest TSval that the client has received from the server, which it returns in TSecr.
    newest_server_tsval: u32,
    /// Index of the server that sent the first SYN-ACK, or `None` before it is received.
    server_index: Option<usize>,
    /// Sockets of this connection at servers. A retransmitted SYN may have created a socket at a second server.
    server_sockets: Vec<ServerSocket>,
    /// Hash by which the network selects a load balancer for the connection's packets.
    lb_selection_hash: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PacketDeliveryResult {
    /// The server with this index accepted the packet.
    AcceptedByServer(usize),
    /// The network or a load balancer dropped the packet, or no server accepted it.
    Lost,
    /// The packet reached a server that does not have the connection. The server answers with a reset.
    Rejected,
}

/// Returns an encapsulated frame without its outer headers.
fn decapsulate_frame(frame: &[u8]) -> Vec<u8> {
    let outer_packet = &frame[ETHERNET_HEADER_BYTES..];
    let (outer_header_bytes, protocol) =
        if outer_packet[0] >> 4 == 6 { (40, outer_packet[6]) } else { (20, outer_packet[9]) };
    let inner_packet = &outer_packet[outer_header_bytes + if protocol == PROTOCOL_UDP { 8 } else { 0 }..];
    let ethertype = if inner_packet[0] >> 4 == 6 { [0x86, 0xdd] } else { [8, 0] };
    [&frame[..ETHERNET_HEADER_BYTES - 2], &ethertype, inner_packet].concat()
}

/// Returns the offset of the TCP header in a frame without IPv4 options or IPv6 extension headers.
fn tcp_header_offset(frame: &[u8]) -> usize {
    ipv6_translation::parse_frame(frame).map_or(ETHERNET_HEADER_BYTES + 20, |headers| headers.transport_offset)
}

impl ConsistencyCheck {
    pub(super) fn start_next_connection(&mut self) -> anyhow::Result<()> {
        let connection_index = self.opened_connection_count;
        if connection_index == self.config.connection_count {
            return Ok(());
        }
        self.opened_connection_count += 1;
        // Most connections have a new address and port, and some use those of an ended connection again.
        let client_address = if self.rng.random_bool(1, 50) && !self.clients_with_ended_connections.is_empty() {
            let position = self.rng.random_below(self.clients_with_ended_connections.len());
            self.clients_with_ended_connections.swap_remove(position)
        } else {
            (Ipv4Addr::from(0x0b00_0000 + connection_index / 50_000), 1_024 + (connection_index % 50_000) as u16)
        };
        let has_timestamps = !self.rng.random_bool(1, CONNECTIONS_PER_UNTIMESTAMPED_CONNECTION);
        self.connections[connection_index as usize] = Some(ClientConnection {
            client_address,
            has_timestamps,
            state: ClientConnectionState::Opening,
            transmission_count: 0,
            newest_server_tsval: 0,
            server_index: None,
            server_sockets: Vec::new(),
            lb_selection_hash: self.rng.next_u32(),
        });
        self.clients_with_open_connections.insert(client_address);
        self.report.connection_count += 1;
        self.report.connections_without_timestamps += u64::from(!has_timestamps);
        let next_arrival_ms =
            u64::from(self.opened_connection_count) * self.arrivals_end_ms() / u64::from(self.config.connection_count);
        self.schedule_event(next_arrival_ms.saturating_sub(self.now_ms), ConsistencyCheckEvent::OpenConnection);
        self.send_next_packet(connection_index)
    }

    fn client_connection(&self, connection_index: u32) -> &ClientConnection {
        self.connections[connection_index as usize].as_ref().expect("an open connection")
    }

    fn client_connection_mut(&mut self, connection_index: u32) -> &mut ClientConnection {
        self.connections[connection_index as usize].as_mut().expect("an open connection")
    }

    /// Returns a random time until a connection's next packet (ms). It is mostly short but sometimes nearly as long as
    /// a key's lifetime.
    fn random_packet_gap_ms(&mut self) -> u64 {
        let max_gap_ms = match self.rng.random_below(200) {
            0 => MAX_CONNECTION_IDLE_MS as usize,
            1..10 => 8_000,
            10..80 => 1_000,
            _ => 50,
        };
        1 + self.rng.random_below(max_gap_ms) as u64
    }

    pub(super) fn send_next_packet(&mut self, connection_index: u32) -> anyhow::Result<()> {
        let connection = self.client_connection(connection_index);
        if connection.server_index.is_some_and(|server| self.servers[server].lifecycle == ServerLifecycle::Gone) {
            self.report.connections_lost_with_server += 1;
            self.close_connection(connection_index);
            return Ok(());
        }
        match connection.state {
            ClientConnectionState::Opening => self.send_syn(connection_index),
            ClientConnectionState::EstablishedWithRemainingPackets(remaining_packets) => {
                self.send_established_packet(connection_index, remaining_packets)
            }
        }
    }

    fn send_syn(&mut self, connection_index: u32) -> anyhow::Result<()> {
        let delivery_result = self.send_packet(connection_index, TCP_FLAG_SYN)?;
        let is_syn_ack_late = self.rng.random_bool(1, 50);
        let max_extra_packets = if self.rng.random_bool(1, 20) { 40 } else { 8 };
        let packet_count = 2 + self.rng.random_below(max_extra_packets) as u32;
        let gap_ms = self.random_packet_gap_ms();
        let connection = self.client_connection_mut(connection_index);
        connection.transmission_count += 1;
        if connection.server_index.is_none() {
            match delivery_result {
                PacketDeliveryResult::AcceptedByServer(server_index) => connection.server_index = Some(server_index),
                _ if connection.transmission_count < MAX_TRANSMISSIONS_PER_PACKET => {
                    self.schedule_event(1_000, ConsistencyCheckEvent::SendPacket(connection_index));
                    return Ok(());
                }
                _ => return self.give_up_connection(connection_index),
            }
            self.report.established_connections += 1;
            if is_syn_ack_late {
                // The SYN-ACK was late, so the client has already sent another SYN.
                self.schedule_event(1_000, ConsistencyCheckEvent::SendPacket(connection_index));
                return Ok(());
            }
        } else if let PacketDeliveryResult::AcceptedByServer(server_index) = delivery_result
            && connection.server_index != Some(server_index)
        {
            self.report.syns_to_other_server += 1;
        }
        let connection = self.client_connection_mut(connection_index);
        connection.state = ClientConnectionState::EstablishedWithRemainingPackets(packet_count);
        connection.transmission_count = 0;
        self.schedule_event(gap_ms, ConsistencyCheckEvent::SendPacket(connection_index));
        Ok(())
    }

    fn send_established_packet(&mut self, connection_index: u32, remaining_packets: u32) -> anyhow::Result<()> {
        let tcp_flags = match remaining_packets {
            0 if self.rng.random_bool(1, 10) => TCP_FLAG_RST,
            0 => TCP_FLAG_ACK | TCP_FLAG_FIN,
            _ => TCP_FLAG_ACK,
        };
        let delivery_result = self.send_packet(connection_index, tcp_flags)?;
        let &ClientConnection { has_timestamps, server_index, .. } = self.client_connection(connection_index);
        match delivery_result {
            PacketDeliveryResult::AcceptedByServer(accepting_index) => {
                if Some(accepting_index) != server_index && has_timestamps {
                    self.report.packets_accepted_by_other_server += 1;
                }
                let Some(remaining_packets) = remaining_packets.checked_sub(1) else {
                    self.report.completed_connections += 1;
                    self.close_connection(connection_index);
                    return Ok(());
                };
                let connection = self.client_connection_mut(connection_index);
                connection.state = ClientConnectionState::EstablishedWithRemainingPackets(remaining_packets);
                connection.transmission_count = 0;
                let gap_ms = self.random_packet_gap_ms();
                self.schedule_event(gap_ms, ConsistencyCheckEvent::SendPacket(connection_index));
            }
            PacketDeliveryResult::Rejected => {
                if tcp_flags == TCP_FLAG_RST {
                    self.report.misdelivered_resets += 1;
                } else if has_timestamps {
                    self.report.misdelivered_packets += 1;
                } else {
                    self.report.broken_untimestamped_connections += 1;
                }
                self.close_connection(connection_index);
            }
            PacketDeliveryResult::Lost => return self.retransmit_or_give_up_connection(connection_index),
        }
        Ok(())
    }

    /// Schedules another transmission of a lost packet. After the last permitted transmission, gives up the connection
    /// instead.
    fn retransmit_or_give_up_connection(&mut self, connection_index: u32) -> anyhow::Result<()> {
        let connection = self.client_connection_mut(connection_index);
        connection.transmission_count += 1;
        if connection.transmission_count == MAX_TRANSMISSIONS_PER_PACKET {
            return self.give_up_connection(connection_index);
        }
        self.schedule_event(400, ConsistencyCheckEvent::SendPacket(connection_index));
        Ok(())
    }

    fn give_up_connection(&mut self, connection_index: u32) -> anyhow::Result<()> {
        self.report.connections_given_up += 1;
        self.close_connection(connection_index);
        Ok(())
    }

    fn close_connection(&mut self, connection_index: u32) {
        let connection = self.connections[connection_index as usize].take().expect("an open connection");
        for socket in &connection.server_sockets {
            self.servers[socket.server_index].connection_count -= 1;
            self.remove_server_if_drained(socket.server_index);
        }
        self.clients_with_open_connections.remove(&connection.client_address);
        if self.clients_with_ended_connections.len() < 10_000 {
            self.clients_with_ended_connections.push(connection.client_address);
        }
    }

    fn build_client_frame(&mut self, connection_index: u32, destination_mac: MacAddress, flags: u8) -> Vec<u8> {
        let tsval = self.now_ms as u32;
        let connection = self.client_connection(connection_index);
        let tcp_options = match flags {
            _ if !connection.has_timestamps || flags == TCP_FLAG_RST => Vec::new(),
            TCP_FLAG_SYN => [&[2, 4, 5, 0xb4, 4, 2][..], &timestamp_option(tsval, 0), &[1, 3, 3, 7]].concat(),
            _ => [&[1, 1][..], &timestamp_option(tsval, connection.newest_server_tsval)].concat(),
        };
        let ip_header = EthernetIpHeader {
            destination_mac,
            source: connection.client_address.0,
            destination: self.config.service_address().0,
            protocol: frame::PROTOCOL_TCP,
            ip_identification: tsval as u16,
            fragment_flags_and_offset: 0x4000,
            option_word_count: 0,
            tos_and_ttl: [0, 64],
        };
        let tcp_header = TcpHeader {
            source_and_destination_ports: (connection.client_address.1, self.config.service_address().1),
            tcp_flags: flags,
            options: tcp_options,
        };
        let mut packet = Vec::new();
        ip_header.append_frame(&mut packet, |packet| {
            tcp_header.append_segment(packet, (connection_index, connection_index), 0)
        });
        ipv6_translation::translate_to_ipv6(&mut self.rng, &mut packet);
        packet
    }

    /// Sends a packet of a connection through one of the load balancers, and returns the result of the delivery.
    fn send_packet(&mut self, connection_index: u32, flags: u8) -> anyhow::Result<PacketDeliveryResult> {
        let running_load_balancers: Vec<usize> =
            (0..self.load_balancers.len()).filter(|index| self.load_balancers[*index].is_running).collect();
        let is_rerouted = self.rng.random_bool(1, PACKETS_PER_FAULT);
        let lb_hash = self.client_connection(connection_index).lb_selection_hash as usize + usize::from(is_rerouted);
        let lb_index = running_load_balancers[lb_hash % running_load_balancers.len()];
        self.report.sent_packets += 1;
        let frame = self.build_client_frame(connection_index, load_balancer_mac(lb_index), flags);
        let delivery_result = self.forward_to_server(connection_index, flags, lb_index, &frame)?;
        if let PacketDeliveryResult::AcceptedByServer(server_index) = delivery_result {
            self.report.accepted_packets += 1;
            self.deliver_answer_to_client(connection_index, server_index);
        }
        Ok(delivery_result)
    }

    fn forward_to_server(
        &mut self,
        connection_index: u32,
        flags: u8,
        lb_index: usize,
        frame: &[u8],
    ) -> anyhow::Result<PacketDeliveryResult> {
        let (counter, frame) = self.process_frame(lb_index, frame)?;
        if counter >= intf::LB_COUNTER_DROP_MALFORMED_IPV4 || counter == intf::LB_COUNTER_PASSED_NOT_SERVICE {
            return Ok(PacketDeliveryResult::Lost);
        }
        let destination_mac = &frame[..6];
        if destination_mac == BROADCAST_MAC {
            return Ok(self.deliver_packet_to_all_servers(connection_index));
        }
        let owner_index =
            (0..self.load_balancers.len()).find(|other_index| load_balancer_mac(*other_index) == destination_mac);
        if let Some(owner_index) = owner_index {
            self.report.packets_forwarded_to_owner += 1;
            anyhow::ensure!(owner_index != lb_index, "load balancer {owner_index} sends to itself");
            if !self.load_balancers[owner_index].is_running {
                return Ok(PacketDeliveryResult::Lost);
            }
            return self.forward_to_server(connection_index, flags, owner_index, &frame);
        }
        let server_index = server::server_index_from_mac(destination_mac).expect("a server's MAC address");
        let frame = if self.config.forwarding.encapsulates() { decapsulate_frame(&frame) } else { frame };
        Ok(self.deliver_packet_to_server(connection_index, flags, server_index, &frame))
    }

    /// Delivers a broadcast packet to every server. Only the server that has the connection accepts it.
    fn deliver_packet_to_all_servers(&mut self, connection_index: u32) -> PacketDeliveryResult {
        let Some(server_index) = self.client_connection(connection_index).server_index else {
            return PacketDeliveryResult::Lost;
        };
        if self.servers[server_index].lifecycle == ServerLifecycle::Gone {
            return PacketDeliveryResult::Lost;
        }
        let connection = self.client_connection(connection_index);
        let four_tuple = ipv6_translation::four_tuple(connection.client_address, self.config.service_address());
        let returned_cookie =
            cookie::decode_cookie(&self.servers[server_index].cookie_keys, &four_tuple, connection.newest_server_tsval);
        let server_id = self.servers[server_index].id;
        // The load balancer has lost the connection's table entry, so the cookie holds the server's id from now on.
        if let Cookie::TableIndex(_) = returned_cookie
            && let Some(socket) = self
                .client_connection_mut(connection_index)
                .server_sockets
                .iter_mut()
                .find(|socket| socket.server_index == server_index)
        {
            socket.cookie = Cookie::Server(server_id);
        }
        PacketDeliveryResult::AcceptedByServer(server_index)
    }

    fn deliver_packet_to_server(
        &mut self,
        connection_index: u32,
        flags: u8,
        server_index: usize,
        frame: &[u8],
    ) -> PacketDeliveryResult {
        if self.servers[server_index].lifecycle == ServerLifecycle::Gone {
            return PacketDeliveryResult::Lost;
        }
        if flags == TCP_FLAG_SYN {
            let tsecr_offset = tcp_header_offset(frame) + SYN_TSECR_OFFSET;
            let tsecr_bytes = frame
                .get(tsecr_offset..tsecr_offset + 4)
                .filter(|_| self.client_connection(connection_index).has_timestamps);
            let tsecr = tsecr_bytes.map_or(0, |bytes| u32::from_be_bytes(bytes.try_into().expect("four bytes")));
            let new_socket = self.servers[server_index].socket_for_syn(server_index, tsecr);
            let sockets = &mut self.client_connection_mut(connection_index).server_sockets;
            match sockets.iter_mut().find(|socket| socket.server_index == server_index) {
                Some(half_open_socket) => *half_open_socket = new_socket,
                None => {
                    sockets.push(new_socket);
                    self.servers[server_index].connection_count += 1;
                }
            }
            return PacketDeliveryResult::AcceptedByServer(server_index);
        }
        let connection = self.client_connection(connection_index);
        if connection.server_index == Some(server_index) {
            return PacketDeliveryResult::AcceptedByServer(server_index);
        }
        // A retransmitted SYN may have left a half-open socket at this server, which does not accept the packet either.
        if connection.has_timestamps
            || connection.server_sockets.iter().any(|socket| socket.server_index == server_index)
        {
            return PacketDeliveryResult::Rejected;
        }
        self.chain_packet_to_previous_server(connection_index, server_index, frame)
    }

    /// Forwards a packet without a cookie to the bucket's previous server, because this server does not know the
    /// connection. The load balancer has written the previous server's id into the packet.
    fn chain_packet_to_previous_server(
        &mut self,
        connection_index: u32,
        server_index: usize,
        frame: &[u8],
    ) -> PacketDeliveryResult {
        // The id is in the IP identification, or in the low bits of the IPv6 flow label.
        let previous_id_offset = ETHERNET_HEADER_BYTES + if frame[ETHERNET_HEADER_BYTES] >> 4 == 6 { 2 } else { 4 };
        let previous_id = u16::from_be_bytes([frame[previous_id_offset], frame[previous_id_offset + 1]]);
        let previous_server_id =
            ServerId::try_from(u64::from(previous_id)).ok().filter(|id| *id != self.servers[server_index].id);
        let Some(previous_server_index) =
            previous_server_id.and_then(|id| self.servers.iter().position(|server| server.id == id))
        else {
            return PacketDeliveryResult::Rejected;
        };
        self.report.packets_chained_to_previous_server += 1;
        match self.servers[previous_server_index].lifecycle {
            ServerLifecycle::Gone => PacketDeliveryResult::Lost,
            _ if self.client_connection(connection_index).server_index == Some(previous_server_index) => {
                PacketDeliveryResult::AcceptedByServer(previous_server_index)
            }
            _ => PacketDeliveryResult::Rejected,
        }
    }

    /// Delivers the server's answer to the client, unless the network loses it.
    fn deliver_answer_to_client(&mut self, connection_index: u32, server_index: usize) {
        let is_answer_lost = self.rng.random_bool(1, PACKETS_PER_FAULT);
        let now_ms = self.now_ms;
        let connection = self.client_connection(connection_index);
        // Another server may answer a retransmitted SYN, but the connection ignores that answer.
        let is_from_other_server = connection.server_index.is_some_and(|first_index| first_index != server_index);
        let Some(socket) = connection.server_sockets.iter().find(|socket| socket.server_index == server_index) else {
            return;
        };
        let four_tuple = ipv6_translation::four_tuple(connection.client_address, self.config.service_address());
        let tsval = self.servers[server_index].stamped_tsval(&four_tuple, socket, now_ms);
        // The first answer always arrives, because it opens the connection.
        if !is_from_other_server && (!is_answer_lost || connection.newest_server_tsval == 0) {
            self.client_connection_mut(connection_index).newest_server_tsval = tsval;
        }
    }
}
