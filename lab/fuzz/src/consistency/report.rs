//! Report of the consistency check.

use std::fmt;

use coreward_intf as intf;

/// Counts of connections, packets and changes in one consistency check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConsistencyCheckReport {
    pub connection_count: u64,
    /// Number of connections that were accepted by a server.
    pub established_connections: u64,
    /// Number of connections that ended with a FIN or reset after all their packets.
    pub completed_connections: u64,
    pub connections_lost_with_server: u64,
    /// Number of connections whose client gave up, because its packets were dropped repeatedly.
    pub connections_given_up: u64,
    pub sent_packets: u64,
    pub accepted_packets: u64,
    /// Number of packets with timestamps that reached a server without their connection, which resets the connection.
    /// Must be 0.
    pub misdelivered_packets: u64,
    /// Number of packets with timestamps that were accepted by another server than their connection's first server.
    /// Must be 0.
    pub packets_accepted_by_other_server: u64,
    /// Number of retransmitted SYNs that reached another server than the first SYN.
    pub syns_to_other_server: u64,
    /// Number of resets without timestamps that reached a server without their connection, and so had no effect. The
    /// flow table still had an earlier connection of the same client address and port.
    pub misdelivered_resets: u64,
    pub connections_without_timestamps: u64,
    /// Number of packets that a bucket's server forwarded to the bucket's previous server.
    pub packets_chained_to_previous_server: u64,
    /// Number of connections without timestamps that broke because a packet reached a server without the connection.
    pub broken_untimestamped_connections: u64,
    /// Number of packets that a load balancer forwarded to the load balancer that owns the connection's table entry.
    pub packets_forwarded_to_owner: u64,
    /// Number of packets with each outcome, indexed by the value of `enum lb_counter`.
    pub packets_by_outcome: Vec<u64>,
    pub servers_joined: u64,
    /// Number of servers that were drained, and left after their last connection.
    pub servers_drained: u64,
    pub servers_failed: u64,
    /// Number of load balancers that were stopped, and returned with empty tables.
    pub load_balancers_restarted: u64,
    /// Number of changes to a server's health or MAC address.
    pub server_state_changes: u64,
    /// Number of times that a new key became the current one.
    pub key_switches: u64,
    pub table_count: u64,
}

impl ConsistencyCheckReport {
    pub(super) fn new() -> Self {
        Self { packets_by_outcome: vec![0; intf::LB_COUNTER_COUNT as usize], ..Self::default() }
    }

    /// Returns the number of changes to servers and load balancers.
    pub fn change_count(&self) -> u64 {
        self.servers_joined
            + self.servers_drained
            + self.servers_failed
            + self.load_balancers_restarted
            + self.server_state_changes
    }

    /// Returns whether no packet with timestamps reached or was accepted by a wrong server.
    pub fn are_guarantees_kept(&self) -> bool {
        self.misdelivered_packets == 0 && self.packets_accepted_by_other_server == 0
    }
}

impl fmt::Display for ConsistencyCheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} connections, {} established, {} completed, {} lost with their server, {} gave up",
            self.connection_count,
            self.established_connections,
            self.completed_connections,
            self.connections_lost_with_server,
            self.connections_given_up
        )?;
        writeln!(
            f,
            "{} changes: {} servers joined, {} drained, {} failed; {} load balancers restarted; {} of health or \
             address; {} key switches, {} tables",
            self.change_count(),
            self.servers_joined,
            self.servers_drained,
            self.servers_failed,
            self.load_balancers_restarted,
            self.server_state_changes,
            self.key_switches,
            self.table_count
        )?;
        writeln!(f, "{} packets, {} accepted; by the load balancers:", self.sent_packets, self.accepted_packets)?;
        for (name, count) in
            intf::LB_COUNTER_NAMES.iter().zip(&self.packets_by_outcome).filter(|(_, count)| **count > 0)
        {
            writeln!(f, "  {name:28}{count:12}")?;
        }
        writeln!(f, "to the owner of an entry first: {}", self.packets_forwarded_to_owner)?;
        writeln!(f, "bare resets that reached a server without the connection: {}", self.misdelivered_resets)?;
        writeln!(f, "SYNs sent again that reached another server: {}", self.syns_to_other_server)?;
        writeln!(
            f,
            "without timestamps: {} connections, {} packets handed to the server before, {} connections broken",
            self.connections_without_timestamps,
            self.packets_chained_to_previous_server,
            self.broken_untimestamped_connections
        )?;
        writeln!(f, "with timestamps, packets to a server without the connection: {}", self.misdelivered_packets)?;
        write!(f, "with timestamps, packets accepted by a second server: {}", self.packets_accepted_by_other_server)
    }
}
