//! Relay of socket queries from load balancers to agents, and of the answers. It never waits. A message to a full queue
//! or an absent peer is dropped, and the load balancer queries again. An agent may answer only queries that it
//! received, because a forged answer would free connections of other servers.

use std::collections::{HashMap, VecDeque};

use coreward_wire::{SocketAnswer, SocketQuery};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;

/// Maximum number of queries that wait for one agent, with up to 256 connections each, and also of answers that wait
/// for one load balancer.
const MAX_QUEUED_RELAY_MESSAGES: usize = 64;
/// Maximum number of one agent's open queries. It is twice the number that all load balancers with a connection table
/// send.
const MAX_OPEN_QUERIES_PER_AGENT: usize = 1024;

/// Relay of socket queries and answers. It identifies both load balancers and agents by their sessions.
#[derive(Default)]
pub struct SocketQueryRelay {
    agents_by_session: Mutex<HashMap<u64, QueriedAgent>>,
    answer_senders_by_session: Mutex<HashMap<u64, mpsc::Sender<SocketAnswer>>>,
}

struct QueriedAgent {
    query_sender: mpsc::Sender<SocketQuery>,
    /// Unanswered queries, each with the load balancer's session and the number that the load balancer assigned to it.
    unanswered_query_ids: VecDeque<(u64, u64)>,
}

fn lock_unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl SocketQueryRelay {
    /// Registers an agent's session, and returns the queue of queries to the agent.
    pub fn register_agent(&self, agent_session: u64) -> mpsc::Receiver<SocketQuery> {
        let (query_sender, receiver) = mpsc::channel(MAX_QUEUED_RELAY_MESSAGES);
        lock_unpoisoned(&self.agents_by_session)
            .insert(agent_session, QueriedAgent { query_sender, unanswered_query_ids: VecDeque::new() });
        receiver
    }

    /// Registers a load balancer's session, and returns the queue of answers to its queries.
    pub fn register_load_balancer_session(&self, load_balancer_session: u64) -> mpsc::Receiver<SocketAnswer> {
        let (sender, receiver) = mpsc::channel(MAX_QUEUED_RELAY_MESSAGES);
        lock_unpoisoned(&self.answer_senders_by_session).insert(load_balancer_session, sender);
        receiver
    }

    pub fn forget_agent(&self, agent_session: u64) {
        lock_unpoisoned(&self.agents_by_session).remove(&agent_session);
    }

    pub fn forget_load_balancer_session(&self, load_balancer_session: u64) {
        lock_unpoisoned(&self.answer_senders_by_session).remove(&load_balancer_session);
    }

    pub fn relay_query(&self, agent_session: u64, query: SocketQuery) {
        let mut agents = lock_unpoisoned(&self.agents_by_session);
        let Some(queried_agent) = agents.get_mut(&agent_session) else { return };
        let query_id = (query.load_balancer_session, query.query_number);
        if queried_agent.query_sender.try_send(query).is_ok() {
            queried_agent.unanswered_query_ids.truncate(MAX_OPEN_QUERIES_PER_AGENT - 1);
            queried_agent.unanswered_query_ids.push_front(query_id);
        }
    }

    /// Relays an answer to the load balancer that sent the query. Returns false if the query is not open.
    pub fn relay_answer(&self, agent_session: u64, answer: SocketAnswer) -> bool {
        let query_id = (answer.load_balancer_session, answer.query_number);
        let was_open = lock_unpoisoned(&self.agents_by_session).get_mut(&agent_session).is_some_and(|queried_agent| {
            let position = queried_agent.unanswered_query_ids.iter().position(|open_query| *open_query == query_id);
            position.and_then(|position| queried_agent.unanswered_query_ids.remove(position)).is_some()
        });
        if was_open {
            self.send_answer(answer);
        } else {
            tracing::debug!(
                event = "answer-unexpected",
                agent_session = agent_session,
                query = answer.query_number,
                "an agent has answered a query about open connections that is unknown or expired: the controller \
                 drops the answer"
            );
        }
        was_open
    }

    /// Sends an answer to the load balancer. Drops it if the load balancer is not connected or its queue is full.
    pub fn send_answer(&self, answer: SocketAnswer) {
        if let Some(sender) = lock_unpoisoned(&self.answer_senders_by_session).get(&answer.load_balancer_session) {
            let _ = sender.try_send(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use coreward_model::ServiceAddress;
    use coreward_model::tuple::TransportProtocol;

    use super::*;

    fn build_query(load_balancer_session: u64, query_number: u64) -> SocketQuery {
        let service =
            ServiceAddress { vip_and_port: "10.200.0.1:80".parse().unwrap(), protocol: TransportProtocol::Tcp };
        let clients = vec!["10.1.0.7:40000".parse().unwrap()];
        SocketQuery { query_number, load_balancer_session, server: 9.try_into().unwrap(), service, clients }
    }

    #[test]
    fn each_socket_query_is_answered_once() {
        let relay = SocketQueryRelay::default();
        let (mut queries, _other) = (relay.register_agent(1), relay.register_agent(2));
        let mut answers = relay.register_load_balancer_session(7);
        relay.relay_query(1, build_query(7, 5));
        let relayed_query = queries.try_recv().unwrap();
        relay.relay_answer(2, relayed_query.to_answer(vec![false]));
        relay.relay_answer(1, build_query(7, 6).to_answer(vec![false]));
        assert!(answers.try_recv().is_err(), "it was not asked that");
        relay.relay_answer(1, relayed_query.to_answer(vec![true]));
        assert_eq!(answers.try_recv().unwrap().socket_exists_by_client, [true]);
        relay.relay_answer(1, relayed_query.to_answer(vec![false]));
        assert!(answers.try_recv().is_err(), "it has answered");
    }

    #[test]
    fn oldest_unanswered_query_is_forgotten() {
        let relay = SocketQueryRelay::default();
        let (mut queries, mut answers) = (relay.register_agent(1), relay.register_load_balancer_session(7));
        for number in 0..=MAX_OPEN_QUERIES_PER_AGENT as u64 {
            relay.relay_query(1, build_query(7, number));
            queries.try_recv().unwrap();
        }
        relay.relay_answer(1, build_query(7, 0).to_answer(vec![false]));
        assert!(answers.try_recv().is_err());
        relay.relay_answer(1, build_query(7, 1).to_answer(vec![false]));
        assert!(answers.try_recv().is_ok());
    }
}
