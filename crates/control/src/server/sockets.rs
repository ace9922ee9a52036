//! Questions for sockets on their way from load balancers to agents, and the answers on their way back. Nothing waits: what
//! finds its queue full, or nobody there, is dropped, and asked again by who wants to know.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use coreward_wire::{SocketAnswer, SocketQuery};
use tokio::sync::mpsc;

/// Questions of up to 256 connections that wait for one agent, or answers that wait for one load balancer.
const QUEUED: usize = 64;

/// Who can be asked, and who waits for answers; by session.
#[derive(Default)]
pub struct Sockets {
    agents: Mutex<HashMap<u64, mpsc::Sender<SocketQuery>>>,
    askers: Mutex<HashMap<u64, mpsc::Sender<SocketAnswer>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sockets {
    /// An agent's session has begun: its questions come here.
    pub fn expect_questions(&self, agent: u64) -> mpsc::Receiver<SocketQuery> {
        let (sender, receiver) = mpsc::channel(QUEUED);
        locked(&self.agents).insert(agent, sender);
        receiver
    }

    /// A load balancer's session has begun: its answers come here.
    pub fn expect_answers(&self, asker: u64) -> mpsc::Receiver<SocketAnswer> {
        let (sender, receiver) = mpsc::channel(QUEUED);
        locked(&self.askers).insert(asker, sender);
        receiver
    }

    /// The agent's session is over.
    pub fn forget_agent(&self, agent: u64) {
        locked(&self.agents).remove(&agent);
    }

    /// The load balancer's session is over.
    pub fn forget_asker(&self, asker: u64) {
        locked(&self.askers).remove(&asker);
    }

    /// Asks the agent.
    pub fn ask(&self, agent: u64, query: SocketQuery) {
        if let Some(sender) = locked(&self.agents).get(&agent) {
            let _ = sender.try_send(query);
        }
    }

    /// An agent has answered.
    pub fn answer(&self, answer: SocketAnswer) {
        if let Some(sender) = locked(&self.askers).get(&answer.asker) {
            let _ = sender.try_send(answer);
        }
    }
}
