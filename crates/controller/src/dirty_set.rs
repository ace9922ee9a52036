//! Which servers of a service something new is known of, and since which table: by id, as ten thousand of them are looked through
//! for every table.

use coreward_model::ServerId;

/// What is new of a server since the newest table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Server {
    /// Its load: reported here, counted, or passed up by its rack.
    load: bool,
    /// More than what its rack passes up: it is to be looked at.
    more: bool,
    /// Generation of the first table with its newest load; 0: there was none.
    generation: u64,
}

#[derive(Debug, Default)]
pub struct DirtySet {
    /// By id.
    servers: Vec<Server>,
    /// Those of which something is new: few, as tables are made after a few reports.
    marked: Vec<ServerId>,
    /// Those of which something was when the newest table was made.
    before: Vec<ServerId>,
}

impl DirtySet {
    fn server(&mut self, id: ServerId) -> &mut Server {
        let position = usize::from(id.get());
        if position >= self.servers.len() {
            self.servers.resize(position + 1, Server::default());
        }
        &mut self.servers[position]
    }

    fn get(&self, id: ServerId) -> Server {
        self.servers.get(usize::from(id.get())).copied().unwrap_or_default()
    }

    /// Its load is new, and perhaps more.
    pub fn mark(&mut self, id: ServerId) {
        self.mark_passed_up(id);
        self.server(id).more = true;
    }

    pub fn mark_passed_up(&mut self, id: ServerId) {
        if !std::mem::replace(&mut self.server(id).load, true) {
            self.marked.push(id);
        }
    }

    /// Of whom something is new, or was when the newest table was made.
    pub fn changed(&self) -> impl Iterator<Item = ServerId> {
        self.before.iter().chain(&self.marked).copied()
    }

    /// Whether its load is newer than the newest table.
    pub fn is_fresh(&self, id: ServerId) -> bool {
        self.get(id).load
    }

    /// Whether more may be new of it than what its rack passes up.
    pub fn needs_refresh(&self, id: ServerId) -> bool {
        self.get(id).more
    }

    pub fn is_in_table(&mut self, generation: u64) {
        std::mem::swap(&mut self.before, &mut self.marked);
        self.marked.clear();
        for id in &self.before {
            self.servers[usize::from(id.get())] = Server { load: false, more: false, generation };
        }
    }

    /// Of the first table with its newest load; `None`: there was none.
    pub fn generation(&self, id: ServerId) -> Option<u64> {
        Some(self.get(id).generation).filter(|generation| *generation > 0)
    }

    /// Only these are in the service.
    pub fn retain(&mut self, is_there: impl Fn(ServerId) -> bool) {
        for (position, server) in self.servers.iter_mut().enumerate() {
            if !ServerId::try_from(position as u64).is_ok_and(&is_there) {
                *server = Server::default();
            }
        }
        self.marked.retain(|id| is_there(*id));
        self.before.retain(|id| is_there(*id));
    }
}
