//! Agents of the fleet's servers, by name and by id.

use std::collections::HashMap;

use coreward_model::ServerId;

use super::agent::Agent;
use coreward_fleet::fleet::Fleet;

#[derive(Debug, Default)]
pub struct FleetAgents {
    agents: Vec<Agent>,
    positions_by_name: HashMap<String, usize>,
    /// Positions in `agents` by server id, for fast lookups of all servers when a table is made. If the operator has
    /// replaced an id by another one, the old id has no agent.
    positions_by_id: Vec<Option<usize>>,
}

impl FleetAgents {
    /// Removes the agents of servers that have left the fleet.
    pub fn retain_fleet_agents(&mut self, fleet: &Fleet) {
        let mut old_agents: Vec<Option<Agent>> = std::mem::take(&mut self.agents).into_iter().map(Some).collect();
        let positions_by_name = std::mem::take(&mut self.positions_by_name);
        self.positions_by_id.clear();
        for (name, position) in positions_by_name {
            if let (Some(id), Some(agent)) = (fleet.server_id(&name), old_agents[position].take()) {
                self.insert(name, id, agent);
            }
        }
    }

    fn insert(&mut self, name: String, id: ServerId, agent: Agent) {
        let id_index = usize::from(id.get());
        if self.positions_by_id.len() <= id_index {
            self.positions_by_id.resize(id_index + 1, None);
        }
        self.positions_by_id[id_index] = Some(self.agents.len());
        self.positions_by_name.insert(name, self.agents.len());
        self.agents.push(agent);
    }

    /// Returns the agent of the server with this name and id. Adds an agent if there is none.
    pub fn get_or_insert(&mut self, name: &str, id: ServerId) -> &mut Agent {
        let position = match self.positions_by_name.get(name) {
            Some(position) => *position,
            None => {
                self.insert(name.to_owned(), id, Agent::default());
                self.agents.len() - 1
            }
        };
        &mut self.agents[position]
    }

    pub fn find_by_name_mut(&mut self, name: &str) -> Option<&mut Agent> {
        self.positions_by_name.get(name).map(|position| &mut self.agents[*position])
    }

    pub fn get(&self, id: ServerId) -> Option<&Agent> {
        self.positions_by_id.get(usize::from(id.get())).copied().flatten().map(|position| &self.agents[position])
    }

    pub fn iter(&self) -> impl Iterator<Item = &Agent> {
        self.agents.iter()
    }
}
