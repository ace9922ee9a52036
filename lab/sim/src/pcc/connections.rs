//! Open connections, ordered by the times at which they end.

use std::collections::VecDeque;

use super::mix::ConnectionMix;
use super::simulated_nanoseconds::Nanoseconds;

#[derive(Debug, Clone, PartialEq)]
pub struct OpenConnection {
    /// Random number that identifies the connection. Its hashes and its 4-tuple are derived from this number.
    pub identity: u64,
    /// State that the method stores for the connection, in the load balancers or in the connection's packets.
    pub stored_state: u64,
    pub started_at: Nanoseconds,
    /// First time at which an added or removed load balancer sent the connection's packets to another server.
    pub rerouted_at: Option<Nanoseconds>,
    /// Server that received the connection's first packet.
    pub server: u16,
    pub core: u16,
    /// Index of the connection's [`super::mix::ConnectionKind`].
    pub kind_index: u8,
}

/// Set of all open connections, with a queue per kind. Connections of one kind have equal durations, so they end in the
/// order of their starts.
#[derive(Debug)]
pub struct OpenConnectionSet {
    slots: Vec<Option<OpenConnection>>,
    free_slots: Vec<u32>,
    /// End times of the connections of each kind in ascending order, with their indices in `slots`.
    end_times_by_kind: Vec<VecDeque<(Nanoseconds, u32)>>,
    durations_by_kind: Vec<Nanoseconds>,
    /// Earliest end time of the open connections of each kind, or [`NO_END_TIME`] if there are none.
    next_end_times_by_kind: Vec<Nanoseconds>,
    next_ending_kind_index: usize,
    open_connection_count: usize,
}

const NO_END_TIME: Nanoseconds = Nanoseconds::MAX;

impl OpenConnectionSet {
    pub fn new(mix: &ConnectionMix) -> Self {
        let kinds = mix.kinds();
        Self {
            slots: Vec::new(),
            free_slots: Vec::new(),
            end_times_by_kind: vec![VecDeque::new(); kinds.len()],
            durations_by_kind: kinds.iter().map(|kind| kind.duration).collect(),
            next_end_times_by_kind: vec![NO_END_TIME; kinds.len()],
            next_ending_kind_index: 0,
            open_connection_count: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.open_connection_count
    }

    /// Returns all open connections in no particular order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut OpenConnection> {
        self.slots.iter_mut().flatten()
    }

    /// Adds a new connection. It must not start earlier than any connection added before.
    pub fn open(&mut self, connection: OpenConnection) {
        let kind_index = usize::from(connection.kind_index);
        let end = connection.started_at + self.durations_by_kind[kind_index];
        let slot = match self.free_slots.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(connection);
                slot
            }
            None => {
                self.slots.push(Some(connection));
                (self.slots.len() - 1) as u32
            }
        };
        if self.end_times_by_kind[kind_index].is_empty() {
            self.next_end_times_by_kind[kind_index] = end;
            if end < self.next_end_times_by_kind[self.next_ending_kind_index] {
                self.next_ending_kind_index = kind_index;
            }
        }
        self.end_times_by_kind[kind_index].push_back((end, slot));
        self.open_connection_count += 1;
    }

    pub fn next_end_time(&self) -> Option<Nanoseconds> {
        (self.open_connection_count > 0).then(|| self.next_end_times_by_kind[self.next_ending_kind_index])
    }

    pub fn close_next(&mut self) -> Option<OpenConnection> {
        let kind_index = self.next_ending_kind_index;
        let (_, slot) = self.end_times_by_kind[kind_index].pop_front()?;
        self.next_end_times_by_kind[kind_index] =
            self.end_times_by_kind[kind_index].front().map_or(NO_END_TIME, |(end, _)| *end);
        self.next_ending_kind_index = index_of_minimum(&self.next_end_times_by_kind);
        self.free_slots.push(slot);
        self.open_connection_count -= 1;
        self.slots[slot as usize].take()
    }
}

/// Returns the index of the smallest value, or of the first one if several are equal.
fn index_of_minimum(values: &[Nanoseconds]) -> usize {
    let minimum = values.iter().copied().fold(NO_END_TIME, Nanoseconds::min);
    values.iter().position(|value| *value == minimum).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use coreward_model::rss::seeded_rng;

    use super::*;

    #[test]
    fn connections_are_closed_in_the_order_of_their_ends() {
        let mix = ConnectionMix::for_web_server();
        let mut connections = OpenConnectionSet::new(&mix);
        let mut rng = seeded_rng(1, 0);
        let (mut expected, mut closed_connections) = (Vec::new(), Vec::new());
        for start in 0..5_000 {
            let kind_index = mix.draw_kind(&mut rng);
            let start = start * 100_000;
            while connections.next_end_time().is_some_and(|end| end <= start) {
                closed_connections
                    .push((connections.next_end_time().unwrap(), connections.close_next().unwrap().identity));
            }
            expected.push((start + mix.kinds()[usize::from(kind_index)].duration, start));
            let connection = OpenConnection {
                identity: start,
                stored_state: 0,
                started_at: start,
                rerouted_at: None,
                server: 0,
                core: 0,
                kind_index,
            };
            connections.open(connection);
            assert_eq!(connections.len() + closed_connections.len(), expected.len());
        }
        while let Some(end) = connections.next_end_time() {
            closed_connections.push((end, connections.close_next().unwrap().identity));
        }
        let extract_end_times = |entries: &[(u64, u64)]| entries.iter().map(|(end, _)| *end).collect::<Vec<_>>();
        assert!(extract_end_times(&closed_connections).is_sorted());
        expected.sort_unstable();
        closed_connections.sort_unstable();
        assert_eq!(closed_connections, expected);
        assert_eq!(connections.close_next(), None);
    }
}
