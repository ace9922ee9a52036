//! Decides which expired entries of the connection table are freed. An entry is freed when its server's agent answers
//! that the connection has no socket. This module does no I/O. [`crate::daemon`] sends the queries and frees entries.
//!
//! Entries wait in a queue for each server and service. Servers are queried in rotation with few open queries each, so
//! that silent agents do not delay other queries. An absent agent proves nothing about its connections. Their age alone
//! then decides, because the table would otherwise fill. If a connection is freed too early, its next packet is
//! broadcast, and later packets follow the server's id.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use coreward_model::connection_table::{ConnectionEntry, ConnectionIndex, ConnectionTimeouts};
use coreward_model::{ServerId, ServiceAddress};
use coreward_wire::sockets::MAX_CLIENTS_PER_SOCKET_QUERY;
use coreward_wire::{SocketAnswer, SocketQuery};

const MAX_OPEN_SOCKET_QUERIES: usize = 64;
/// Maximum number of open queries to one server. A second query waits at the server while it answers the first.
const MAX_OPEN_QUERIES_PER_SERVER: usize = 2;
/// Time after which an open query without an answer counts as lost.
const SOCKET_QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which a connection that still has a socket is checked again, unless the idle time is shorter.
const SOCKET_RECHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Interval between queries to a server whose agent is absent. The queries detect the agent's return.
const ABSENT_AGENT_QUERY_INTERVAL: Duration = Duration::from_secs(5);
/// Duration of an agent's absence after which connections are freed by age alone. A shorter absence may be a restart of
/// the agent or the controller.
const MAX_AGENT_ABSENCE: Duration = Duration::from_secs(60);
/// Interval at which outdated state is removed from the sweeper.
const SWEEPER_STATE_PRUNE_INTERVAL: Duration = Duration::from_secs(10);

/// Server and service whose connections share a queue. A query is about one service and goes to one server's agent.
type SocketQueryQueueKey = (ServerId, ServiceAddress);

/// Sweeper of the connection table. It holds the connections that wait for a query, and the open queries to agents.
#[derive(Debug)]
pub struct ConnectionSweeper {
    requery_interval: Duration,
    last_query_number: u64,
    queued_connections: BTreeMap<SocketQueryQueueKey, Vec<ConnectionEntry>>,
    open_queries: BTreeMap<u64, OpenSocketQuery>,
    open_query_counts: HashMap<ServerId, usize>,
    /// Earliest time at which each connection (by table index) may be queued for another query.
    earliest_requery_times: HashMap<ConnectionIndex, Duration>,
    absent_agents: HashMap<ServerId, AbsentAgent>,
    last_queried_queue: Option<SocketQueryQueueKey>,
    last_pruned_at: Duration,
}

#[derive(Debug)]
struct OpenSocketQuery {
    server_id: ServerId,
    connections: Vec<ConnectionEntry>,
    expires_at: Duration,
}

#[derive(Debug)]
struct AbsentAgent {
    absent_since: Duration,
    next_query_at: Duration,
}

impl ConnectionSweeper {
    pub fn new(timers: &ConnectionTimeouts) -> Self {
        Self {
            requery_interval: SOCKET_RECHECK_INTERVAL.min(timers.idle),
            last_query_number: 0,
            queued_connections: BTreeMap::new(),
            open_queries: BTreeMap::new(),
            open_query_counts: HashMap::new(),
            earliest_requery_times: HashMap::new(),
            absent_agents: HashMap::new(),
            last_queried_queue: None,
            last_pruned_at: Duration::ZERO,
        }
    }

    /// Queues expired connections, about which agents will be queried. Returns those to free without a query, because
    /// their agent has been absent for too long.
    pub fn queue_expired_connections(
        &mut self,
        expired_connections: &[(ConnectionEntry, ServiceAddress)],
        now: Duration,
    ) -> Vec<ConnectionEntry> {
        let mut connections_to_free = Vec::new();
        for (connection, service) in expired_connections {
            if self.earliest_requery_times.get(&connection.index).is_some_and(|requery_at| *requery_at > now) {
                continue;
            }
            let queue_key = (connection.identity.server, *service);
            if self.is_agent_absent_too_long(queue_key.0, now)
                && self.queued_connections.get(&queue_key).is_some_and(|connections| !connections.is_empty())
            {
                // One connection always stays queued, because the query about it detects the agent's return.
                connections_to_free.push(*connection);
                continue;
            }
            self.earliest_requery_times.insert(connection.index, Duration::MAX);
            self.queued_connections.entry(queue_key).or_default().push(*connection);
        }
        connections_to_free
    }

    fn is_agent_absent_too_long(&self, server: ServerId, now: Duration) -> bool {
        self.absent_agents
            .get(&server)
            .is_some_and(|absent_agent| now.saturating_sub(absent_agent.absent_since) >= MAX_AGENT_ABSENCE)
    }

    fn can_query_server(&self, server: ServerId, now: Duration) -> bool {
        let max_open_queries = match self.absent_agents.get(&server) {
            Some(absent_agent) if now < absent_agent.next_query_at => 0,
            Some(_) => 1,
            None => MAX_OPEN_QUERIES_PER_SERVER,
        };
        self.open_query_counts.get(&server).copied().unwrap_or(0) < max_open_queries
    }

    pub fn next_socket_queries(&mut self, now: Duration, max_queries: usize) -> Vec<SocketQuery> {
        self.remove_timed_out_queries(now);
        self.prune_expired_requery_times(now);
        let max_queries =
            max_queries.min(MAX_OPEN_SOCKET_QUERIES - self.open_queries.len().min(MAX_OPEN_SOCKET_QUERIES));
        let mut socket_queries = Vec::new();
        for queue in self.rotated_queue_keys() {
            if socket_queries.len() == max_queries {
                break;
            }
            if self.can_query_server(queue.0, now) {
                socket_queries.extend(self.next_query_of_queue(queue, now));
                self.last_queried_queue = Some(queue);
            }
        }
        socket_queries
    }

    /// Returns the keys of all queues, starting after the queue that was queried last.
    fn rotated_queue_keys(&self) -> Vec<SocketQueryQueueKey> {
        let queue_keys = self.queued_connections.keys().copied();
        let Some(cursor) = self.last_queried_queue else { return queue_keys.collect() };
        let (queues_up_to_cursor, queues_after_cursor): (Vec<_>, Vec<_>) =
            queue_keys.partition(|queue| *queue <= cursor);
        queues_after_cursor.into_iter().chain(queues_up_to_cursor).collect()
    }

    fn next_query_of_queue(&mut self, queue: SocketQueryQueueKey, now: Duration) -> Option<SocketQuery> {
        let queued_connections = self.queued_connections.get_mut(&queue)?;
        let connections: Vec<ConnectionEntry> =
            queued_connections.drain(..queued_connections.len().min(MAX_CLIENTS_PER_SOCKET_QUERY)).collect();
        if queued_connections.is_empty() {
            self.queued_connections.remove(&queue);
        }
        let (server_id, service) = queue;
        let client_addresses = connections.iter().map(|connection| connection.client).collect();
        self.last_query_number += 1;
        *self.open_query_counts.entry(server_id).or_default() += 1;
        self.open_queries.insert(
            self.last_query_number,
            OpenSocketQuery { server_id, connections, expires_at: now + SOCKET_QUERY_TIMEOUT },
        );
        Some(SocketQuery {
            query_number: self.last_query_number,
            load_balancer_session: 0,
            server: server_id,
            service,
            clients: client_addresses,
        })
    }

    pub fn handle_socket_answer(&mut self, answer: &SocketAnswer, now: Duration) -> Vec<ConnectionEntry> {
        let Some(closed_query) = self.close_query(answer.query_number) else { return Vec::new() };
        if answer.is_agent_absent() {
            return self.mark_agent_absent(closed_query, now);
        }
        if closed_query.connections.len() != answer.socket_exists_by_client.len() {
            self.forget_earliest_requery_times(&closed_query.connections);
            return Vec::new();
        }
        self.absent_agents.remove(&closed_query.server_id);
        let mut closed_connections = Vec::new();
        for (connection, is_open) in closed_query.connections.into_iter().zip(&answer.socket_exists_by_client) {
            if *is_open {
                self.earliest_requery_times.insert(connection.index, now + self.requery_interval);
            } else {
                self.earliest_requery_times.remove(&connection.index);
                closed_connections.push(connection);
            }
        }
        closed_connections
    }

    fn close_query(&mut self, query_number: u64) -> Option<OpenSocketQuery> {
        let closed_query = self.open_queries.remove(&query_number)?;
        if let Some(count) = self.open_query_counts.get_mut(&closed_query.server_id) {
            *count -= 1;
            if *count == 0 {
                self.open_query_counts.remove(&closed_query.server_id);
            }
        }
        Some(closed_query)
    }

    /// Records that an agent is absent. Returns the query's connections if the absence is so long
    /// that they may be freed.
    fn mark_agent_absent(&mut self, closed_query: OpenSocketQuery, now: Duration) -> Vec<ConnectionEntry> {
        self.forget_earliest_requery_times(&closed_query.connections);
        let absent_agent = self
            .absent_agents
            .entry(closed_query.server_id)
            .or_insert(AbsentAgent { absent_since: now, next_query_at: now });
        absent_agent.next_query_at = now + ABSENT_AGENT_QUERY_INTERVAL;
        if self.is_agent_absent_too_long(closed_query.server_id, now) { closed_query.connections } else { Vec::new() }
    }

    fn forget_earliest_requery_times(&mut self, connections: &[ConnectionEntry]) {
        for connection in connections {
            self.earliest_requery_times.remove(&connection.index);
        }
    }

    /// Removes queries that have timed out. Their connections are queued again by the next sweep.
    fn remove_timed_out_queries(&mut self, now: Duration) {
        let timed_out_numbers: Vec<u64> = self
            .open_queries
            .iter()
            .filter(|(_, open_query)| open_query.expires_at <= now)
            .map(|(number, _)| *number)
            .collect();
        for closed_query in
            timed_out_numbers.into_iter().filter_map(|number| self.close_query(number)).collect::<Vec<_>>()
        {
            self.mark_agent_absent(closed_query, now);
        }
    }

    fn prune_expired_requery_times(&mut self, now: Duration) {
        if now.saturating_sub(self.last_pruned_at) >= SWEEPER_STATE_PRUNE_INTERVAL {
            self.earliest_requery_times.retain(|_, requery_at| *requery_at > now);
            self.last_pruned_at = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::connection_table::{DecisecondTicks, TableEntryIdentity};
    use coreward_model::tuple::TransportProtocol;

    use super::*;

    fn expired_connection(slot: u32, server: u64) -> (ConnectionEntry, ServiceAddress) {
        let entry_identity =
            TableEntryIdentity { tag: slot, generation: 0, service_slot: 0, server: server.try_into().unwrap() };
        let connection = ConnectionEntry {
            index: ConnectionIndex::new(slot / 1024, slot % 1024),
            identity: entry_identity,
            client: format!("10.1.0.7:{}", 1000 + slot % 1024).parse().unwrap(),
            packet_count: 2,
            byte_count: 200,
            opened_at: DecisecondTicks(0),
            last_packet_at: DecisecondTicks(0),
            is_closing: false,
        };
        let service_address =
            ServiceAddress { vip_and_port: "10.200.0.1:80".parse().unwrap(), protocol: TransportProtocol::Tcp };
        (connection, service_address)
    }

    fn time_at_second(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn queried_servers_and_client_counts(queries: &[SocketQuery]) -> Vec<(u16, usize)> {
        queries.iter().map(|query| (query.server.get(), query.clients.len())).collect()
    }

    #[test]
    fn connection_with_a_socket_is_checked_again() {
        let mut sweeper = ConnectionSweeper::new(&ConnectionTimeouts::default());
        let expired_connections = [expired_connection(1, 7), expired_connection(2, 8), expired_connection(3, 7)];
        assert_eq!(sweeper.queue_expired_connections(&expired_connections, time_at_second(0)), []);
        let socket_queries = sweeper.next_socket_queries(time_at_second(0), 10);
        assert_eq!(queried_servers_and_client_counts(&socket_queries), [(7, 2), (8, 1)]);
        sweeper.queue_expired_connections(&expired_connections, time_at_second(1));
        assert_eq!(sweeper.next_socket_queries(time_at_second(1), 10), [], "they are under way");
        assert_eq!(
            sweeper.handle_socket_answer(&socket_queries[0].to_answer(vec![true, false]), time_at_second(1)),
            [expired_connections[2].0]
        );
        sweeper.next_socket_queries(time_at_second(6), 10);
        sweeper.queue_expired_connections(&expired_connections[..2], time_at_second(6));
        assert_eq!(queried_servers_and_client_counts(&sweeper.next_socket_queries(time_at_second(11), 10)), [(8, 1)]);
        sweeper.queue_expired_connections(&expired_connections[..1], time_at_second(61));
        assert_eq!(queried_servers_and_client_counts(&sweeper.next_socket_queries(time_at_second(61), 10)), [(7, 1)]);
    }

    #[test]
    fn number_of_open_queries_is_limited() {
        let mut sweeper = ConnectionSweeper::new(&ConnectionTimeouts::default());
        let expired_connections: Vec<_> = (0..2000).map(|slot| expired_connection(slot, u64::from(slot % 2))).collect();
        sweeper.queue_expired_connections(&expired_connections, time_at_second(0));
        assert_eq!(
            queried_servers_and_client_counts(&sweeper.next_socket_queries(time_at_second(0), 100)),
            [(0, 256), (1, 256)]
        );
        assert_eq!(
            queried_servers_and_client_counts(&sweeper.next_socket_queries(time_at_second(0), 100)),
            [(0, 256), (1, 256)]
        );
        assert_eq!(sweeper.next_socket_queries(time_at_second(0), 100), []);
        let more_expired_connections: Vec<_> =
            (2000..2200).map(|slot| expired_connection(slot, u64::from(slot))).collect();
        sweeper.queue_expired_connections(&more_expired_connections, time_at_second(1));
        assert_eq!(sweeper.next_socket_queries(time_at_second(1), 10).len(), 10);
        assert_eq!(sweeper.next_socket_queries(time_at_second(1), 1000).len(), MAX_OPEN_SOCKET_QUERIES - 4 - 10);
        assert_eq!(sweeper.next_socket_queries(time_at_second(2), 1000), []);
    }

    #[test]
    fn servers_are_queried_in_turn() {
        let mut sweeper = ConnectionSweeper::new(&ConnectionTimeouts::default());
        let expired_connections: Vec<_> = (0..90).map(|slot| expired_connection(slot, u64::from(slot % 9))).collect();
        sweeper.queue_expired_connections(&expired_connections, time_at_second(0));
        let mut all_queried_servers = Vec::new();
        for _ in 0..3 {
            let socket_queries = sweeper.next_socket_queries(time_at_second(0), 3);
            all_queried_servers
                .extend(queried_servers_and_client_counts(&socket_queries).into_iter().map(|(server, _)| server));
        }
        assert_eq!(all_queried_servers, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn unexpected_socket_answer_frees_no_connection() {
        let mut sweeper = ConnectionSweeper::new(&ConnectionTimeouts::default());
        sweeper.queue_expired_connections(&[expired_connection(1, 7)], time_at_second(0));
        let query = sweeper.next_socket_queries(time_at_second(0), 10).remove(0);
        assert_eq!(
            sweeper.handle_socket_answer(
                &SocketAnswer { query_number: 99, load_balancer_session: 0, socket_exists_by_client: vec![false] },
                time_at_second(0)
            ),
            []
        );
        assert_eq!(sweeper.handle_socket_answer(&query.to_answer(vec![false, false]), time_at_second(0)), []);
        assert_eq!(
            sweeper.handle_socket_answer(&query.to_answer(vec![false]), time_at_second(0)),
            [],
            "it is answered"
        );
    }

    #[test]
    fn connections_of_an_absent_agent_are_freed_after_a_minute() {
        let mut sweeper = ConnectionSweeper::new(&ConnectionTimeouts::default());
        let expired_connections: Vec<_> = (0..1000).map(|slot| expired_connection(slot, 7)).collect();
        let mut freed_connections = Vec::new();
        for second in 0..100 {
            let mut newly_freed_connections =
                sweeper.queue_expired_connections(&expired_connections, time_at_second(second));
            for query in sweeper.next_socket_queries(time_at_second(second), 10) {
                newly_freed_connections
                    .extend(sweeper.handle_socket_answer(&query.to_absent_agent_answer(), time_at_second(second)));
            }
            assert!(second >= 60 || newly_freed_connections.is_empty(), "after {second} s");
            freed_connections.extend(newly_freed_connections);
        }
        assert!(expired_connections.iter().all(|(connection, _)| freed_connections.contains(connection)));
        sweeper.queue_expired_connections(&expired_connections, time_at_second(100));
        let query = sweeper.next_socket_queries(time_at_second(100), 10).remove(0);
        let are_open = vec![true; query.clients.len()];
        assert_eq!(sweeper.handle_socket_answer(&query.to_answer(are_open), time_at_second(100)), []);
        assert_eq!(sweeper.queue_expired_connections(&expired_connections, time_at_second(200)), []);
    }

    /// Simulation of the connection table in virtual time.
    struct ConnectionTableSimulation {
        sweeper: ConnectionSweeper,
        table_entries: Vec<Option<ConnectionEntry>>,
        free_slots: Vec<usize>,
        /// Tick at which the socket of each slot's connection is closed.
        socket_end_tick_by_slot: Vec<u32>,
        next_swept_slot: usize,
    }

    const SERVER_COUNT: u64 = 1000;
    const TICKS_PER_SECOND: u32 = 10;
    const CONNECTION_DURATION_TICKS: u32 = 60 * TICKS_PER_SECOND;
    const TICKS_PER_SWEEP: usize = 10;

    impl ConnectionTableSimulation {
        fn new(entry_count: usize) -> Self {
            Self {
                sweeper: ConnectionSweeper::new(&ConnectionTimeouts::default()),
                table_entries: vec![None; entry_count],
                free_slots: (0..entry_count).rev().collect(),
                socket_end_tick_by_slot: vec![0; entry_count],
                next_swept_slot: 0,
            }
        }

        fn open_connection(&mut self, server: u64, tick: u32) -> bool {
            let Some(position) = self.free_slots.pop() else { return false };
            let (mut connection, _) = expired_connection(position as u32, server);
            connection.is_closing = true;
            // The connection sends its last packet after a minute, and then its socket stays in TIME-WAIT.
            connection.last_packet_at = DecisecondTicks(tick + CONNECTION_DURATION_TICKS);
            self.table_entries[position] = Some(connection);
            self.socket_end_tick_by_slot[position] = tick + 2 * CONNECTION_DURATION_TICKS;
            true
        }

        fn slot_of_connection(connection: &ConnectionEntry) -> usize {
            (connection.index.partition() * 1024 + connection.index.slot()) as usize
        }

        fn free_entries(&mut self, connections: Vec<ConnectionEntry>) {
            for connection in connections {
                let entry_slot = Self::slot_of_connection(&connection);
                if self.table_entries[entry_slot].take().is_some() {
                    self.free_slots.push(entry_slot);
                }
            }
        }

        /// Advances the simulation by a tenth of a second. `behaviour_of_server` returns how a server's agent behaves.
        fn advance_to_tick(&mut self, tick: u32, behaviour_of_server: impl Fn(u64) -> SimulatedAgentBehaviour) {
            let service_address = expired_connection(0, 0).1;
            let swept_entry_count = self.table_entries.len() / TICKS_PER_SWEEP;
            let swept_connections = (0..swept_entry_count)
                .filter_map(|n| self.table_entries[(self.next_swept_slot + n) % self.table_entries.len()]);
            let expired_connections = swept_connections
                .filter(|connection| connection.last_packet_at.0 + CONNECTION_DURATION_TICKS <= tick)
                .map(|connection| (connection, service_address));
            let expired_connections: Vec<_> = expired_connections.collect();
            self.next_swept_slot = (self.next_swept_slot + swept_entry_count) % self.table_entries.len();
            let now = Duration::from_millis(u64::from(tick) * 100);
            let connections_freed_without_answer = self.sweeper.queue_expired_connections(&expired_connections, now);
            self.free_entries(connections_freed_without_answer);
            for query in self.sweeper.next_socket_queries(now, 32) {
                let queried_connections = &self.sweeper.open_queries[&query.query_number].connections;
                let are_open = queried_connections
                    .iter()
                    .map(|connection| self.socket_end_tick_by_slot[Self::slot_of_connection(connection)] > tick)
                    .collect();
                let connections_freed_by_answer = match behaviour_of_server(query.server.get().into()) {
                    SimulatedAgentBehaviour::Responsive => {
                        self.sweeper.handle_socket_answer(&query.to_answer(are_open), now)
                    }
                    SimulatedAgentBehaviour::Absent => {
                        self.sweeper.handle_socket_answer(&query.to_absent_agent_answer(), now)
                    }
                    SimulatedAgentBehaviour::Silent => Vec::new(),
                };
                self.free_entries(connections_freed_by_answer);
            }
        }

        fn used_entry_count(&self) -> usize {
            self.table_entries.len() - self.free_slots.len()
        }
    }

    #[derive(Clone, Copy)]
    enum SimulatedAgentBehaviour {
        Responsive,
        Absent,
        Silent,
    }

    /// Returns the number of used table entries after ten simulated minutes, divided by the number of connections that
    /// are open or in TIME-WAIT.
    fn table_occupancy_ratio(
        connections_per_second: u32,
        behaviour_of_server: impl Fn(u64) -> SimulatedAgentBehaviour,
    ) -> f64 {
        let mut simulation = ConnectionTableSimulation::new(262_144);
        let mut next_server = 0;
        for tick in 0..10 * 60 * TICKS_PER_SECOND {
            for _ in 0..connections_per_second / TICKS_PER_SECOND {
                next_server = (next_server + 1) % SERVER_COUNT;
                assert!(
                    simulation.open_connection(next_server, tick),
                    "the table is full after {} s",
                    tick / TICKS_PER_SECOND
                );
            }
            simulation.advance_to_tick(tick, &behaviour_of_server);
        }
        let live_connection_count =
            f64::from(connections_per_second) * f64::from(2 * CONNECTION_DURATION_TICKS / TICKS_PER_SECOND);
        simulation.used_entry_count() as f64 / live_connection_count
    }

    #[test]
    fn table_holds_only_live_connections_although_some_agents_are_dead() {
        for dead_agent_behaviour in
            [SimulatedAgentBehaviour::Responsive, SimulatedAgentBehaviour::Absent, SimulatedAgentBehaviour::Silent]
        {
            // The dead servers come first in the rotation.
            let occupancy_ratio = table_occupancy_ratio(1000, |server| {
                if server < SERVER_COUNT / 10 { dead_agent_behaviour } else { SimulatedAgentBehaviour::Responsive }
            });
            assert!((0.9..1.1).contains(&occupancy_ratio), "{occupancy_ratio}");
        }
    }
}
