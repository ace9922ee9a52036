//! Expired entries of the connection table, which are freed when the agent of their server answers that they have no
//! socket. No I/O: [`crate::daemon`] sends queries and frees entries.
//!
//! Entries wait in a queue for each server and service. Servers are queried by rotation with few open queries each, so
//! that silent agents do not delay other queries. An absent agent proves nothing about its connections; then age alone
//! decides, or the table would fill. The next packet of a connection that was freed too early is broadcast; later
//! packets go by the server's id.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use coreward_model::connection_table::{Connection, ConnectionIndex, Timeouts};
use coreward_model::{ServerId, ServiceAddress};
use coreward_wire::sockets::MAX_CLIENTS_PER_QUERY;
use coreward_wire::{SocketAnswer, SocketQuery};

/// Maximum number of open queries to all servers.
const MAX_OPEN_QUERIES: usize = 64;
/// Maximum number of open queries to one server: the second one waits there while the server answers the first.
const MAX_OPEN_QUERIES_PER_SERVER: usize = 2;
/// Time after which an open query without an answer counts as lost.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which a connection that still has a socket is checked again; the idle time, if that is shorter.
const RECHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Interval of queries to a server whose agent is absent, to detect its return.
const ABSENT_AGENT_RETRY: Duration = Duration::from_secs(5);
/// Time of absence after which connections are freed by age alone. Before, agent or controller may be restarting.
const MAX_AGENT_ABSENCE: Duration = Duration::from_secs(60);
/// Interval at which outdated state of the sweeper is removed.
const PRUNE_INTERVAL: Duration = Duration::from_secs(10);

/// Key of a queue of connections: server and service, because a query is about one service of one agent.
type QueueKey = (ServerId, ServiceAddress);

/// Sweeper of the connection table, with connections that wait for a query, and open queries to agents.
#[derive(Debug)]
pub struct Sweeper {
    requery_interval: Duration,
    last_query_number: u64,
    queued_connections: BTreeMap<QueueKey, Vec<Connection>>,
    open_queries: BTreeMap<u64, OpenQuery>,
    open_query_counts: HashMap<ServerId, usize>,
    /// Time from which a connection may be queued again, by table index.
    requery_times: HashMap<ConnectionIndex, Duration>,
    absent_agents: HashMap<ServerId, AbsentAgent>,
    last_queried_key: Option<QueueKey>,
    last_prune: Duration,
}

#[derive(Debug)]
struct OpenQuery {
    server: ServerId,
    connections: Vec<Connection>,
    expires_at: Duration,
}

#[derive(Debug)]
struct AbsentAgent {
    absent_since: Duration,
    next_query_at: Duration,
}

impl Sweeper {
    pub fn new(timers: &Timeouts) -> Self {
        Self {
            requery_interval: RECHECK_INTERVAL.min(timers.idle),
            last_query_number: 0,
            queued_connections: BTreeMap::new(),
            open_queries: BTreeMap::new(),
            open_query_counts: HashMap::new(),
            requery_times: HashMap::new(),
            absent_agents: HashMap::new(),
            last_queried_key: None,
            last_prune: Duration::ZERO,
        }
    }

    /// Queues expired connections for queries. Returns the connections to free without an answer, because their agent
    /// has been absent for too long.
    pub fn queue(&mut self, due: &[(Connection, ServiceAddress)], now: Duration) -> Vec<Connection> {
        let mut free = Vec::new();
        for (connection, service) in due {
            if self.requery_times.get(&connection.index).is_some_and(|until| *until > now) {
                continue;
            }
            let queue = (connection.identity.server, *service);
            if self.is_agent_lost(queue.0, now)
                && self.queued_connections.get(&queue).is_some_and(|waiting| !waiting.is_empty())
            {
                // One connection stays queued: its query detects the agent's return.
                free.push(*connection);
                continue;
            }
            self.requery_times.insert(connection.index, Duration::MAX);
            self.queued_connections.entry(queue).or_default().push(*connection);
        }
        free
    }

    fn is_agent_lost(&self, server: ServerId, now: Duration) -> bool {
        self.absent_agents.get(&server).is_some_and(|away| now.saturating_sub(away.absent_since) >= MAX_AGENT_ABSENCE)
    }

    fn can_query(&self, server: ServerId, now: Duration) -> bool {
        let most = match self.absent_agents.get(&server) {
            Some(away) if now < away.next_query_at => 0,
            Some(_) => 1,
            None => MAX_OPEN_QUERIES_PER_SERVER,
        };
        self.open_query_counts.get(&server).copied().unwrap_or(0) < most
    }

    /// Returns up to `most` queries, taken from all queues in turn.
    pub fn next_queries(&mut self, now: Duration, most: usize) -> Vec<SocketQuery> {
        self.expire_queries(now);
        self.prune(now);
        let most = most.min(MAX_OPEN_QUERIES - self.open_queries.len().min(MAX_OPEN_QUERIES));
        let mut queries = Vec::new();
        for queue in self.rotated_queues() {
            if queries.len() == most {
                break;
            }
            if self.can_query(queue.0, now) {
                queries.extend(self.next_query_of(queue, now));
                self.last_queried_key = Some(queue);
            }
        }
        queries
    }

    /// Returns the keys of all queues, starting after the queue of the last query.
    fn rotated_queues(&self) -> Vec<QueueKey> {
        let queues = self.queued_connections.keys().copied();
        let Some(cursor) = self.last_queried_key else { return queues.collect() };
        let (before, behind): (Vec<_>, Vec<_>) = queues.partition(|queue| *queue <= cursor);
        behind.into_iter().chain(before).collect()
    }

    fn next_query_of(&mut self, queue: QueueKey, now: Duration) -> Option<SocketQuery> {
        let waiting = self.queued_connections.get_mut(&queue)?;
        let connections: Vec<Connection> = waiting.drain(..waiting.len().min(MAX_CLIENTS_PER_QUERY)).collect();
        if waiting.is_empty() {
            self.queued_connections.remove(&queue);
        }
        let (server, service) = queue;
        let clients = connections.iter().map(|connection| connection.client).collect();
        self.last_query_number += 1;
        *self.open_query_counts.entry(server).or_default() += 1;
        self.open_queries
            .insert(self.last_query_number, OpenQuery { server, connections, expires_at: now + QUERY_TIMEOUT });
        Some(SocketQuery { number: self.last_query_number, load_balancer_session: 0, server, service, clients })
    }

    pub fn handle_answer(&mut self, answer: &SocketAnswer, now: Duration) -> Vec<Connection> {
        let Some(asked) = self.close_query(answer.number) else { return Vec::new() };
        if answer.is_absent() {
            return self.mark_agent_absent(asked, now);
        }
        if asked.connections.len() != answer.is_open.len() {
            self.allow_requery(&asked.connections);
            return Vec::new();
        }
        self.absent_agents.remove(&asked.server);
        let mut gone = Vec::new();
        for (connection, open) in asked.connections.into_iter().zip(&answer.is_open) {
            if *open {
                self.requery_times.insert(connection.index, now + self.requery_interval);
            } else {
                self.requery_times.remove(&connection.index);
                gone.push(connection);
            }
        }
        gone
    }

    fn close_query(&mut self, number: u64) -> Option<OpenQuery> {
        let asked = self.open_queries.remove(&number)?;
        if let Some(count) = self.open_query_counts.get_mut(&asked.server) {
            *count -= 1;
            if *count == 0 {
                self.open_query_counts.remove(&asked.server);
            }
        }
        Some(asked)
    }

    /// Records that an agent is absent. Returns the connections that may be freed nevertheless.
    fn mark_agent_absent(&mut self, asked: OpenQuery, now: Duration) -> Vec<Connection> {
        self.allow_requery(&asked.connections);
        let away =
            self.absent_agents.entry(asked.server).or_insert(AbsentAgent { absent_since: now, next_query_at: now });
        away.next_query_at = now + ABSENT_AGENT_RETRY;
        if self.is_agent_lost(asked.server, now) { asked.connections } else { Vec::new() }
    }

    fn allow_requery(&mut self, connections: &[Connection]) {
        for connection in connections {
            self.requery_times.remove(&connection.index);
        }
    }

    /// Removes queries that have timed out. The next sweep queues their connections again.
    fn expire_queries(&mut self, now: Duration) {
        let over: Vec<u64> =
            self.open_queries.iter().filter(|(_, asked)| asked.expires_at <= now).map(|(number, _)| *number).collect();
        for asked in over.into_iter().filter_map(|number| self.close_query(number)).collect::<Vec<_>>() {
            self.mark_agent_absent(asked, now);
        }
    }

    fn prune(&mut self, now: Duration) {
        if now.saturating_sub(self.last_prune) >= PRUNE_INTERVAL {
            self.requery_times.retain(|_, until| *until > now);
            self.last_prune = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::connection_table::{ClockTicks, EntryIdentity};
    use coreward_model::tuple::Protocol;

    use super::*;

    fn due(slot: u32, server: u64) -> (Connection, ServiceAddress) {
        let identity = EntryIdentity { tag: slot, generation: 0, service: 0, server: server.try_into().unwrap() };
        let connection = Connection {
            index: ConnectionIndex::new(slot / 1024, slot % 1024),
            identity,
            client: format!("10.1.0.7:{}", 1000 + slot % 1024).parse().unwrap(),
            packets: 2,
            bytes: 200,
            opened_at: ClockTicks(0),
            last_seen: ClockTicks(0),
            is_closing: false,
        };
        let service = ServiceAddress { socket: "10.200.0.1:80".parse().unwrap(), protocol: Protocol::Tcp };
        (connection, service)
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn servers(queries: &[SocketQuery]) -> Vec<(u16, usize)> {
        queries.iter().map(|query| (query.server.get(), query.clients.len())).collect()
    }

    #[test]
    fn connection_with_a_socket_is_checked_again() {
        let mut sweeper = Sweeper::new(&Timeouts::default());
        let all = [due(1, 7), due(2, 8), due(3, 7)];
        assert_eq!(sweeper.queue(&all, at(0)), []);
        let queries = sweeper.next_queries(at(0), 10);
        assert_eq!(servers(&queries), [(7, 2), (8, 1)]);
        sweeper.queue(&all, at(1));
        assert_eq!(sweeper.next_queries(at(1), 10), [], "they are under way");
        assert_eq!(sweeper.handle_answer(&queries[0].answer(vec![true, false]), at(1)), [all[2].0]);
        sweeper.next_queries(at(6), 10);
        sweeper.queue(&all[..2], at(6));
        assert_eq!(servers(&sweeper.next_queries(at(11), 10)), [(8, 1)]);
        sweeper.queue(&all[..1], at(61));
        assert_eq!(servers(&sweeper.next_queries(at(61), 10)), [(7, 1)]);
    }

    #[test]
    fn outstanding_socket_queries_are_bounded() {
        let mut sweeper = Sweeper::new(&Timeouts::default());
        let all: Vec<_> = (0..2000).map(|slot| due(slot, u64::from(slot % 2))).collect();
        sweeper.queue(&all, at(0));
        assert_eq!(servers(&sweeper.next_queries(at(0), 100)), [(0, 256), (1, 256)]);
        assert_eq!(servers(&sweeper.next_queries(at(0), 100)), [(0, 256), (1, 256)]);
        assert_eq!(sweeper.next_queries(at(0), 100), []);
        let many: Vec<_> = (2000..2200).map(|slot| due(slot, u64::from(slot))).collect();
        sweeper.queue(&many, at(1));
        assert_eq!(sweeper.next_queries(at(1), 10).len(), 10);
        assert_eq!(sweeper.next_queries(at(1), 1000).len(), MAX_OPEN_QUERIES - 4 - 10);
        assert_eq!(sweeper.next_queries(at(2), 1000), []);
    }

    #[test]
    fn servers_are_asked_in_turn() {
        let mut sweeper = Sweeper::new(&Timeouts::default());
        let all: Vec<_> = (0..90).map(|slot| due(slot, u64::from(slot % 9))).collect();
        sweeper.queue(&all, at(0));
        let mut asked = Vec::new();
        for _ in 0..3 {
            let queries = sweeper.next_queries(at(0), 3);
            asked.extend(servers(&queries).into_iter().map(|(server, _)| server));
        }
        assert_eq!(asked, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn unexpected_socket_answer_frees_no_entry() {
        let mut sweeper = Sweeper::new(&Timeouts::default());
        sweeper.queue(&[due(1, 7)], at(0));
        let query = sweeper.next_queries(at(0), 10).remove(0);
        assert_eq!(
            sweeper.handle_answer(&SocketAnswer { number: 99, load_balancer_session: 0, is_open: vec![false] }, at(0)),
            []
        );
        assert_eq!(sweeper.handle_answer(&query.answer(vec![false, false]), at(0)), []);
        assert_eq!(sweeper.handle_answer(&query.answer(vec![false]), at(0)), [], "it is answered");
    }

    #[test]
    fn connections_of_an_agent_that_stays_away_are_freed_after_a_minute() {
        let mut sweeper = Sweeper::new(&Timeouts::default());
        let all: Vec<_> = (0..1000).map(|slot| due(slot, 7)).collect();
        let mut freed = Vec::new();
        for second in 0..100 {
            let mut now = sweeper.queue(&all, at(second));
            for query in sweeper.next_queries(at(second), 10) {
                now.extend(sweeper.handle_answer(&query.absent_answer(), at(second)));
            }
            assert!(second >= 60 || now.is_empty(), "after {second} s");
            freed.extend(now);
        }
        assert!(all.iter().all(|(connection, _)| freed.contains(connection)));
        sweeper.queue(&all, at(100));
        let query = sweeper.next_queries(at(100), 10).remove(0);
        let open = vec![true; query.clients.len()];
        assert_eq!(sweeper.handle_answer(&query.answer(open), at(100)), []);
        assert_eq!(sweeper.queue(&all, at(200)), []);
    }

    /// Simulation of the connection table in virtual time: used entries, and connections with a socket.
    struct Simulation {
        sweeper: Sweeper,
        entries: Vec<Option<Connection>>,
        free: Vec<usize>,
        /// Tick at which each entry's socket ends, by slot.
        open_until: Vec<u32>,
        next_position: usize,
    }

    const SERVER_COUNT: u64 = 1000;
    const CALLS_PER_SECOND: u32 = 10;
    const CONNECTION_CALLS: u32 = 60 * CALLS_PER_SECOND;
    const SWEEP_CALLS: usize = 10;

    impl Simulation {
        fn new(entries: usize) -> Self {
            Self {
                sweeper: Sweeper::new(&Timeouts::default()),
                entries: vec![None; entries],
                free: (0..entries).rev().collect(),
                open_until: vec![0; entries],
                next_position: 0,
            }
        }

        fn open(&mut self, server: u64, beat: u32) -> bool {
            let Some(position) = self.free.pop() else { return false };
            let (mut connection, _) = due(position as u32, server);
            connection.is_closing = true;
            // The connection ends, with its last packet, after a minute; TIME-WAIT follows.
            connection.last_seen = ClockTicks(beat + CONNECTION_CALLS);
            self.entries[position] = Some(connection);
            self.open_until[position] = beat + 2 * CONNECTION_CALLS;
            true
        }

        fn position(connection: &Connection) -> usize {
            (connection.index.partition() * 1024 + connection.index.slot()) as usize
        }

        fn release(&mut self, connections: Vec<Connection>) {
            for connection in connections {
                let position = Self::position(&connection);
                if self.entries[position].take().is_some() {
                    self.free.push(position);
                }
            }
        }

        /// Advances the simulation by a tenth of a second. `answers` returns the behaviour of a server's agent.
        fn tick(&mut self, beat: u32, answers: impl Fn(u64) -> Agent) {
            let service = due(0, 0).1;
            let slice = self.entries.len() / SWEEP_CALLS;
            let inspected = (0..slice).filter_map(|n| self.entries[(self.next_position + n) % self.entries.len()]);
            let over = inspected
                .filter(|connection| connection.last_seen.0 + CONNECTION_CALLS <= beat)
                .map(|connection| (connection, service));
            let over: Vec<_> = over.collect();
            self.next_position = (self.next_position + slice) % self.entries.len();
            let now = Duration::from_millis(u64::from(beat) * 100);
            let free = self.sweeper.queue(&over, now);
            self.release(free);
            for query in self.sweeper.next_queries(now, 32) {
                let asked = &self.sweeper.open_queries[&query.number].connections;
                let open = asked.iter().map(|connection| self.open_until[Self::position(connection)] > beat).collect();
                let gone = match answers(query.server.get().into()) {
                    Agent::Responsive => self.sweeper.handle_answer(&query.answer(open), now),
                    Agent::Absent => self.sweeper.handle_answer(&query.absent_answer(), now),
                    Agent::Silent => Vec::new(),
                };
                self.release(gone);
            }
        }

        fn in_use(&self) -> usize {
            self.entries.len() - self.free.len()
        }
    }

    #[derive(Clone, Copy)]
    enum Agent {
        Responsive,
        Absent,
        Silent,
    }

    /// Returns the ratio of the entries used after ten minutes to the connections that live or are in TIME-WAIT.
    fn occupancy(per_second: u32, dead: impl Fn(u64) -> Agent) -> f64 {
        let mut simulation = Simulation::new(262_144);
        let mut server = 0;
        for beat in 0..10 * 60 * CALLS_PER_SECOND {
            for _ in 0..per_second / CALLS_PER_SECOND {
                server = (server + 1) % SERVER_COUNT;
                assert!(simulation.open(server, beat), "the table is full after {} s", beat / CALLS_PER_SECOND);
            }
            simulation.tick(beat, &dead);
        }
        let live = f64::from(per_second) * f64::from(2 * CONNECTION_CALLS / CALLS_PER_SECOND);
        simulation.in_use() as f64 / live
    }

    #[test]
    fn occupancy_is_that_of_live_connections_with_a_tenth_of_the_agents_dead() {
        for dead in [Agent::Responsive, Agent::Absent, Agent::Silent] {
            // The dead servers are the first ones of the rotation.
            let occupancy = occupancy(1000, |server| if server < SERVER_COUNT / 10 { dead } else { Agent::Responsive });
            assert!((0.9..1.1).contains(&occupancy), "{occupancy}");
        }
    }
}
