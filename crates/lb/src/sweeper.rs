//! Which entries of the connection table may be freed: those whose time is over, once the agent of their server has said that
//! they have no socket. No I/O: whoever asks and frees is [`crate::daemon`].

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use coreward_model::ServiceAddress;
use coreward_model::connection_table::{Connection, ConnectionIndex, Timers};
use coreward_wire::sockets::MAX_CLIENTS;
use coreward_wire::{SocketAnswer, SocketQuery};

/// Questions that may be under way at once; with more, connections wait for the next round.
const UNDER_WAY: usize = 32;
/// A question that has no answer after so long is forgotten: the agent is away, or it was lost on its way.
const PATIENCE: Duration = Duration::from_secs(5);
/// A connection that has a socket still is asked for again after so long, or after the time for idle ones if that is shorter.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// The questions that are under way.
#[derive(Debug)]
pub struct Sweeper {
    ask_again: Duration,
    number: u64,
    under_way: BTreeMap<u64, Asked>,
    /// Until when a connection is not asked for.
    asked: HashMap<ConnectionIndex, Duration>,
}

#[derive(Debug)]
struct Asked {
    connections: Vec<Connection>,
    forgotten: Duration,
}

impl Sweeper {
    /// Nothing is under way.
    pub fn new(timers: &Timers) -> Self {
        let ask_again = ASK_AGAIN.min(timers.idle);
        Self { ask_again, number: 0, under_way: BTreeMap::new(), asked: HashMap::new() }
    }

    /// What to ask for these connections, whose time is over.
    pub fn ask(&mut self, due: &[(Connection, ServiceAddress)], now: Duration) -> Vec<SocketQuery> {
        self.under_way.retain(|_, asked| asked.forgotten > now);
        self.asked.retain(|_, until| *until > now);
        let mut batches: BTreeMap<_, Vec<Connection>> = BTreeMap::new();
        for (connection, service) in due.iter().filter(|(connection, _)| !self.asked.contains_key(&connection.index)) {
            batches.entry((connection.identity.server, *service)).or_default().push(*connection);
        }
        let batches = batches.into_iter().flat_map(|(of, connections)| {
            let chunks: Vec<_> = connections.chunks(MAX_CLIENTS).map(<[Connection]>::to_vec).collect();
            chunks.into_iter().map(move |chunk| (of, chunk))
        });
        let room = UNDER_WAY - self.under_way.len();
        let mut queries = Vec::new();
        for ((server, service), connections) in batches.take(room) {
            self.number += 1;
            self.asked.extend(connections.iter().map(|connection| (connection.index, now + PATIENCE)));
            let clients = connections.iter().map(|connection| connection.client.into()).collect();
            self.under_way.insert(self.number, Asked { connections, forgotten: now + PATIENCE });
            // Who asks, the controller knows.
            queries.push(SocketQuery { number: self.number, asker: 0, server, service, clients });
        }
        queries
    }

    /// The connections that the answer says have no socket.
    pub fn answer(&mut self, answer: &SocketAnswer, now: Duration) -> Vec<Connection> {
        let Some(asked) = self.under_way.remove(&answer.number) else { return Vec::new() };
        if asked.connections.len() != answer.open.len() {
            return Vec::new();
        }
        let mut gone = Vec::new();
        for (connection, open) in asked.connections.into_iter().zip(&answer.open) {
            if *open {
                self.asked.insert(connection.index, now + self.ask_again);
            } else {
                self.asked.remove(&connection.index);
                gone.push(connection);
            }
        }
        gone
    }

    /// The stream to the controller has ended: no answer will come.
    pub fn forget(&mut self) {
        self.under_way.clear();
        self.asked.clear();
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::connection_table::{Clock, Identity};
    use coreward_model::tuple::Protocol;

    use super::*;

    fn due(place: u32, server: u64) -> (Connection, ServiceAddress) {
        let identity = Identity { tag: place, generation: 0, service: 0, server: server.try_into().unwrap() };
        let connection = Connection {
            index: ConnectionIndex::new(0, place),
            identity,
            client: format!("10.1.0.7:{}", 1000 + place).parse().unwrap(),
            packets: 2,
            bytes: 200,
            opened: Clock(0),
            last_seen: Clock(0),
            closing: false,
        };
        let service = ServiceAddress { socket: "10.200.0.1:80".parse().unwrap(), protocol: Protocol::Tcp };
        (connection, service)
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn who_has_no_socket_is_gone_and_who_has_is_asked_for_later() {
        let mut sweeper = Sweeper::new(&Timers::default());
        let all = [due(1, 7), due(2, 8), due(3, 7)];
        let queries = sweeper.ask(&all, at(0));
        let asked: Vec<_> = queries.iter().map(|query| (query.server.get(), query.clients.len())).collect();
        assert_eq!(asked, [(7, 2), (8, 1)]);
        assert_eq!(sweeper.ask(&all, at(1)), [], "they are under way");
        let gone = sweeper.answer(&queries[0].answer(vec![true, false]), at(1));
        assert_eq!(gone, [all[2].0]);
        // The answer for server 8 never comes; connection 1 is open.
        let again = sweeper.ask(&all[..2], at(6));
        assert_eq!(again.iter().map(|query| query.server.get()).collect::<Vec<_>>(), [8]);
        let again = sweeper.ask(&all[..1], at(61));
        assert_eq!(again.len(), 1);
    }

    #[test]
    fn what_is_under_way_is_bounded() {
        let mut sweeper = Sweeper::new(&Timers::default());
        let all: Vec<_> = (0..1000).map(|place| due(place, u64::from(place % 2))).collect();
        let queries = sweeper.ask(&all, at(0));
        assert_eq!(queries.iter().map(|query| query.clients.len()).collect::<Vec<_>>(), [256, 244, 256, 244]);
        let many: Vec<_> =
            (1000..1024).flat_map(|place| (0..2).map(move |n| due(place, 2 + u64::from(place) * 2 + n))).collect();
        assert_eq!(sweeper.ask(&many, at(1)).len(), UNDER_WAY - 4);
        assert_eq!(sweeper.ask(&many, at(2)).len(), 0);
        sweeper.forget();
        assert_eq!(sweeper.ask(&all, at(2)).len(), 4);
    }

    #[test]
    fn an_answer_to_nothing_or_of_another_length_frees_nothing() {
        let mut sweeper = Sweeper::new(&Timers::default());
        let query = sweeper.ask(&[due(1, 7)], at(0)).remove(0);
        assert_eq!(sweeper.answer(&SocketAnswer { number: 99, asker: 0, open: vec![false] }, at(0)), []);
        assert_eq!(sweeper.answer(&query.answer(vec![false, false]), at(0)), []);
        assert_eq!(sweeper.answer(&query.answer(vec![false]), at(0)), [], "it is answered");
    }
}
