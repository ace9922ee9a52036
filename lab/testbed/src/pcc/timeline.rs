//! Changes of servers, as in the paper's experiment, and of load balancers.

use coreward_model::rss::{seeded_rng, uniform_below};

/// Random number stream of [`seeded_rng`] for the selection of leaving servers.
const RNG_STREAM_REMOVED_SERVERS: u64 = 6;

/// Number of servers in the pool at the start.
pub const SERVER_COUNT: u16 = 24;
pub const LOAD_BALANCER_COUNT: u16 = 2;

/// Change of the server pool or of the load balancers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A server that was not in the pool before joins it.
    AddServer,
    /// A server is drained: it takes no new connections.
    DrainServer,
    /// A server is removed from the controller's file altogether.
    RemoveServer,
    AddLoadBalancer,
    KillLoadBalancer,
}

/// Changes with their times, in half seconds from the start of the changes.
///
/// The times of the servers follow the published counts of servers (`dynamic/BeamerNBSRV.csv` of
/// github.com/cheetahlb/experiments), by which 6 servers joined. In the text (Sect. 5.3) 7 join; the seventh joins here
/// with the sixth. Changes of load balancers are additional: the paper claims the same for them without an experiment.
pub const CHANGES_BY_HALF_SECOND: [(u64, &[Change]); 11] = [
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

/// Returns how often a change occurs in the whole run.
pub fn count(change: Change) -> u16 {
    CHANGES_BY_HALF_SECOND.iter().flat_map(|(_, changes)| *changes).filter(|other| **other == change).count() as u16
}

/// Returns the number of servers in the pool at the end of second `second`, counted from 0.
pub fn servers_after(second: u64) -> u16 {
    let before =
        CHANGES_BY_HALF_SECOND.iter().filter(|(half, _)| *half <= 2 * second + 1).flat_map(|(_, changes)| *changes);
    before.fold(SERVER_COUNT, |servers, change| match change {
        Change::AddServer => servers + 1,
        Change::DrainServer | Change::RemoveServer => servers - 1,
        Change::AddLoadBalancer | Change::KillLoadBalancer => servers,
    })
}

/// Returns the server of `pool` that leaves at leave number `turn`, which is the same under every method.
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
        assert!(CHANGES_BY_HALF_SECOND.is_sorted_by_key(|(half, _)| *half));
    }
}
