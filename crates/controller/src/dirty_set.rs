//! Servers of a service that have changed since its newest table, indexed by id because every table scans all servers.

use coreward_model::ServerId;

/// Changes of one server since the newest table, as far as placement tables depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct ServerInputChanges {
    /// Whether the server's agent or rack has reported a new load, or load balancers have sent new traffic counts.
    has_new_load: bool,
    /// Whether an input other than the load in the rack's summary has changed, so that all inputs must be read again.
    needs_refresh: bool,
    /// Generation of the first table that contains the server's newest load, or 0 if no table contains it.
    load_generation: u64,
}

#[derive(Debug, Default)]
pub struct DirtyServerSet {
    servers: Vec<ServerInputChanges>,
    /// Servers with changes since the newest table. They are few, because a table follows after a few reports.
    changed_servers: Vec<ServerId>,
    /// Servers whose changes are contained in the newest table.
    previously_changed_servers: Vec<ServerId>,
}

impl DirtyServerSet {
    fn changes_of_server_mut(&mut self, id: ServerId) -> &mut ServerInputChanges {
        let position = usize::from(id.get());
        if position >= self.servers.len() {
            self.servers.resize(position + 1, ServerInputChanges::default());
        }
        &mut self.servers[position]
    }

    fn changes_of_server(&self, id: ServerId) -> ServerInputChanges {
        self.servers.get(usize::from(id.get())).copied().unwrap_or_default()
    }

    pub fn mark_changed(&mut self, id: ServerId) {
        self.mark_relayed_load(id);
        self.changes_of_server_mut(id).needs_refresh = true;
    }

    pub fn mark_relayed_load(&mut self, id: ServerId) {
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
    pub fn needs_refresh(&self, id: ServerId) -> bool {
        self.changes_of_server(id).needs_refresh
    }

    pub fn record_new_table(&mut self, generation: u64) {
        std::mem::swap(&mut self.previously_changed_servers, &mut self.changed_servers);
        self.changed_servers.clear();
        for id in &self.previously_changed_servers {
            self.servers[usize::from(id.get())] =
                ServerInputChanges { has_new_load: false, needs_refresh: false, load_generation: generation };
        }
    }

    /// Returns the generation of the first table that contains the server's newest load.
    pub fn load_generation(&self, id: ServerId) -> Option<u64> {
        Some(self.changes_of_server(id).load_generation).filter(|generation| *generation > 0)
    }

    pub fn retain_fleet_servers(&mut self, is_in_fleet: impl Fn(ServerId) -> bool) {
        for (position, server) in self.servers.iter_mut().enumerate() {
            if !ServerId::try_from(position as u64).is_ok_and(&is_in_fleet) {
                *server = ServerInputChanges::default();
            }
        }
        self.changed_servers.retain(|id| is_in_fleet(*id));
        self.previously_changed_servers.retain(|id| is_in_fleet(*id));
    }
}
