//! Servers of a service that have changed since a table. Indexed by id, because every table scans all servers.

use coreward_model::ServerId;

/// Changes of one server since the newest table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct ServerChanges {
    /// Whether a new load of the server is known: reported by its agent or its rack, or counted by load balancers.
    has_new_load: bool,
    /// Whether more than the rack's summary has changed, so that all of the server's inputs must be read again.
    needs_refresh: bool,
    /// Generation of the first table that contains the server's newest load; 0: no table contains it.
    generation: u64,
}

#[derive(Debug, Default)]
pub struct DirtySet {
    servers: Vec<ServerChanges>,
    /// Servers with changes since the newest table: few, because a table follows after a few reports.
    marked: Vec<ServerId>,
    /// Servers whose changes came before the newest table and are contained in it.
    previously_marked: Vec<ServerId>,
}

impl DirtySet {
    fn server(&mut self, id: ServerId) -> &mut ServerChanges {
        let position = usize::from(id.get());
        if position >= self.servers.len() {
            self.servers.resize(position + 1, ServerChanges::default());
        }
        &mut self.servers[position]
    }

    fn get(&self, id: ServerId) -> ServerChanges {
        self.servers.get(usize::from(id.get())).copied().unwrap_or_default()
    }

    pub fn mark(&mut self, id: ServerId) {
        self.mark_relayed(id);
        self.server(id).needs_refresh = true;
    }

    pub fn mark_relayed(&mut self, id: ServerId) {
        if !std::mem::replace(&mut self.server(id).has_new_load, true) {
            self.marked.push(id);
        }
    }

    /// Returns the servers with changes since the newest table or contained in it.
    pub fn changed(&self) -> impl Iterator<Item = ServerId> {
        self.previously_marked.iter().chain(&self.marked).copied()
    }

    /// Returns whether a load of the server arrived after the newest table was made.
    pub fn is_fresh(&self, id: ServerId) -> bool {
        self.get(id).has_new_load
    }

    /// Returns whether other inputs of the server than its rack's summary may have changed.
    pub fn needs_refresh(&self, id: ServerId) -> bool {
        self.get(id).needs_refresh
    }

    pub fn mark_in_table(&mut self, generation: u64) {
        std::mem::swap(&mut self.previously_marked, &mut self.marked);
        self.marked.clear();
        for id in &self.previously_marked {
            self.servers[usize::from(id.get())] =
                ServerChanges { has_new_load: false, needs_refresh: false, generation };
        }
    }

    /// Returns the generation of the first table that contains the server's newest load.
    pub fn generation(&self, id: ServerId) -> Option<u64> {
        Some(self.get(id).generation).filter(|generation| *generation > 0)
    }

    pub fn retain(&mut self, is_there: impl Fn(ServerId) -> bool) {
        for (position, server) in self.servers.iter_mut().enumerate() {
            if !ServerId::try_from(position as u64).is_ok_and(&is_there) {
                *server = ServerChanges::default();
            }
        }
        self.marked.retain(|id| is_there(*id));
        self.previously_marked.retain(|id| is_there(*id));
    }
}
