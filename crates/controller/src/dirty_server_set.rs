//! Servers of a service that have changed since its newest table, indexed by id because every table scans all servers.

use coreward_model::ServerId;

/// Changes of one server since the newest table, as far as placement tables depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct ServerTableInputChanges {
    /// Whether the server's agent or rack has reported a new load, or load balancers have sent new traffic counts.
    has_new_load: bool,
    /// Whether an input other than the load in the rack's summary has changed, so that all inputs must be read again.
    needs_input_reread: bool,
    /// Generation of the first table that contains the server's newest load, or 0 if no table contains it.
    load_table_generation: u64,
}

#[derive(Debug, Default)]
pub struct DirtyServerSet {
    changes_by_server_id: Vec<ServerTableInputChanges>,
    /// Servers with changes since the newest table. They are few, because a table follows after a few reports.
    changed_servers: Vec<ServerId>,
    /// Servers whose changes are contained in the newest table.
    previously_changed_servers: Vec<ServerId>,
}

impl DirtyServerSet {
    fn changes_of_server_mut(&mut self, id: ServerId) -> &mut ServerTableInputChanges {
        let position = usize::from(id.get());
        if position >= self.changes_by_server_id.len() {
            self.changes_by_server_id.resize(position + 1, ServerTableInputChanges::default());
        }
        &mut self.changes_by_server_id[position]
    }

    fn changes_of_server(&self, id: ServerId) -> ServerTableInputChanges {
        self.changes_by_server_id.get(usize::from(id.get())).copied().unwrap_or_default()
    }

    pub fn mark_changed(&mut self, id: ServerId) {
        self.mark_relayed_load_changed(id);
        self.changes_of_server_mut(id).needs_input_reread = true;
    }

    pub fn mark_relayed_load_changed(&mut self, id: ServerId) {
        if !std::mem::replace(&mut self.changes_of_server_mut(id).has_new_load, true) {
            self.changed_servers.push(id);
        }
    }

    /// Returns the servers that have changed since the newest table, or whose changes that table contains.
    pub fn changed_servers(&self) -> impl Iterator<Item = ServerId> {
        self.previously_changed_servers.iter().chain(&self.changed_servers).copied()
    }

    /// Returns whether a new load of the server has arrived since the newest table was made.
    pub fn has_new_load(&self, id: ServerId) -> bool {
        self.changes_of_server(id).has_new_load
    }

    /// Returns whether inputs of the server may have changed that are not in its rack's summary.
    pub fn needs_input_reread(&self, id: ServerId) -> bool {
        self.changes_of_server(id).needs_input_reread
    }

    pub fn record_new_table(&mut self, generation: u64) {
        std::mem::swap(&mut self.previously_changed_servers, &mut self.changed_servers);
        self.changed_servers.clear();
        for id in &self.previously_changed_servers {
            self.changes_by_server_id[usize::from(id.get())] = ServerTableInputChanges {
                has_new_load: false,
                needs_input_reread: false,
                load_table_generation: generation,
            };
        }
    }

    /// Returns the generation of the first table that contains the server's newest load.
    pub fn load_table_generation(&self, id: ServerId) -> Option<u64> {
        Some(self.changes_of_server(id).load_table_generation).filter(|generation| *generation > 0)
    }

    pub fn retain_fleet_servers(&mut self, is_in_fleet: impl Fn(ServerId) -> bool) {
        for (position, server) in self.changes_by_server_id.iter_mut().enumerate() {
            if !ServerId::try_from(position as u64).is_ok_and(&is_in_fleet) {
                *server = ServerTableInputChanges::default();
            }
        }
        self.changed_servers.retain(|id| is_in_fleet(*id));
        self.previously_changed_servers.retain(|id| is_in_fleet(*id));
    }
}
