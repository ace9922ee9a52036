//! Events: the servers of the paper's experiment, and load balancers.

use coreward_model::rss::{seeded_rng, uniform_below};

/// [`seeded_rng`]'s stream for the servers that go.
const RNG_STREAM_REMOVED_SERVERS: u64 = 6;

/// Servers in the pool at the start.
pub const SERVERS: u16 = 24;
pub const LOAD_BALANCERS: u16 = 2;

/// Change of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A server that was not in the pool joins.
    AddServer,
    /// A server takes no new connections.
    DrainServer,
    /// A server leaves the controller's file altogether.
    RemoveServer,
    AddLoadBalancer,
    KillLoadBalancer,
}

/// Half seconds from the wave's beginning on, and what happens then.
///
/// The times of the servers are those of the published counts of servers (`dynamic/BeamerNBSRV.csv` of
/// github.com/cheetahlb/experiments), by which 6 servers joined; the text (Sect. 5.3) has 7: the seventh joins with the
/// sixth. The load balancers are ours: the paper claims the same for their changes and has no experiment.
pub const CHANGES: [(u64, &[Change]); 11] = [
    (9, &[Change::AddServer]),
    (11, &[Change::AddServer; 2]),
    (13, &[Change::AddServer; 2]),
    (19, &[Change::AddLoadBalancer]),
    (25, &[Change::AddServer; 2]),
    (31, &[Change::DrainServer, Change::RemoveServer]),
    (39, &[Change::DrainServer]),
    (41, &[Change::RemoveServer]),
    (43, &[Change::DrainServer, Change::RemoveServer, Change::DrainServer]),
    (45, &[Change::RemoveServer]),
    (61, &[Change::KillLoadBalancer]),
];

/// Number of changes of a kind.
pub fn count(change: Change) -> u16 {
    CHANGES.iter().flat_map(|(_, changes)| *changes).filter(|other| **other == change).count() as u16
}

/// Servers in the pool at the end of second `second`, from 0.
pub fn servers_after(second: u64) -> u16 {
    let before = CHANGES.iter().filter(|(half, _)| *half <= 2 * second + 1).flat_map(|(_, changes)| *changes);
    before.fold(SERVERS, |servers, change| match change {
        Change::AddServer => servers + 1,
        Change::DrainServer | Change::RemoveServer => servers - 1,
        Change::AddLoadBalancer | Change::KillLoadBalancer => servers,
    })
}

/// The server of these that goes as number `turn`: the same under every method.
pub fn leaving_server(pool: &[u16], seed: u64, turn: u64) -> u16 {
    let mut rng = seeded_rng(seed << 8 | turn, RNG_STREAM_REMOVED_SERVERS);
    pool[uniform_below(&mut rng, pool.len() as u32) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seven_servers_join_and_eight_leave() {
        let gone = count(Change::DrainServer) + count(Change::RemoveServer);
        assert_eq!((count(Change::AddServer), gone), (7, 8));
        assert_eq!([0, 4, 5, 6, 12, 15, 22, 44].map(servers_after), [24, 25, 27, 29, 31, 29, 23, 23]);
        assert!(CHANGES.is_sorted_by_key(|(half, _)| *half));
    }
}
