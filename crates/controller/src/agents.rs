//! Agents of the fleet's servers, by name and by id.

use std::collections::HashMap;

use coreward_model::ServerId;

use super::agent::Agent;
use coreward_fleet::fleet::Fleet;

#[derive(Debug, Default)]
pub struct Agents {
    agents: Vec<Agent>,
    by_name: HashMap<String, usize>,
    /// Positions of the agents by server id, because every table looks up all servers. An id that the operator has
    /// replaced by another one has no agent.
    by_id: Vec<Option<usize>>,
}

impl Agents {
    /// Removes the agents of servers that have left the fleet.
    pub fn retain(&mut self, fleet: &Fleet) {
        let mut old: Vec<Option<Agent>> = std::mem::take(&mut self.agents).into_iter().map(Some).collect();
        let by_name = std::mem::take(&mut self.by_name);
        self.by_id.clear();
        for (name, position) in by_name {
            if let (Some(id), Some(agent)) = (fleet.server_id(&name), old[position].take()) {
                self.insert(name, id, agent);
            }
        }
    }

    fn insert(&mut self, name: String, id: ServerId, agent: Agent) {
        let at = usize::from(id.get());
        if self.by_id.len() <= at {
            self.by_id.resize(at + 1, None);
        }
        self.by_id[at] = Some(self.agents.len());
        self.by_name.insert(name, self.agents.len());
        self.agents.push(agent);
    }

    /// Returns the agent of the server with this name and id, which is created if it is missing.
    pub fn entry(&mut self, name: &str, id: ServerId) -> &mut Agent {
        let position = match self.by_name.get(name) {
            Some(position) => *position,
            None => {
                self.insert(name.to_owned(), id, Agent::default());
                self.agents.len() - 1
            }
        };
        &mut self.agents[position]
    }

    pub fn find_mut(&mut self, name: &str) -> Option<&mut Agent> {
        self.by_name.get(name).map(|position| &mut self.agents[*position])
    }

    pub fn get(&self, id: ServerId) -> Option<&Agent> {
        self.by_id.get(usize::from(id.get())).copied().flatten().map(|position| &self.agents[position])
    }

    pub fn iter(&self) -> impl Iterator<Item = &Agent> {
        self.agents.iter()
    }
}
