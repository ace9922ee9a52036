//! Changes of servers, as in Cheetah's experiment (NSDI'20, Sect. 5.3), and additional changes of load balancers.

use coreward_model::rss::{seeded_rng, uniform_below};

/// Number of the [`seeded_rng`] stream with which leaving servers are chosen.
const RNG_STREAM_LEAVING_SERVERS: u64 = 6;

/// Number of servers in the pool at the start.
pub const INITIAL_SERVER_COUNT: u16 = 24;
pub const INITIAL_LOAD_BALANCER_COUNT: u16 = 2;

/// Change of the server pool or of the set of load balancers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PccFleetChange {
    /// A new server joins the pool.
    AddServer,
    /// A server in the pool is drained and thus gets no new connections.
    DrainServer,
    /// A server is removed from the controller's file without a drain.
    RemoveServer,
    AddLoadBalancer,
    KillLoadBalancer,
}

/// Changes with their times, in half seconds from the start of the changes.
///
/// The times follow the published numbers of servers (`dynamic/BeamerNBSRV.csv` of github.com/cheetahlb/experiments),
/// according to which 6 servers joined. The text of the Cheetah paper (NSDI'20, Sect. 5.3) has 7, so the seventh joins
/// here together with the sixth. The changes of load balancers are additional, because the paper claims the same
/// consistency for them without an experiment.
pub const FLEET_CHANGES_BY_HALF_SECOND: [(u64, &[PccFleetChange]); 11] = [
    (9, &[PccFleetChange::AddServer]),
    (11, &[PccFleetChange::AddServer; 2]),
    (13, &[PccFleetChange::AddServer; 2]),
    (19, &[PccFleetChange::AddLoadBalancer]),
    (25, &[PccFleetChange::AddServer; 2]),
    (31, &[PccFleetChange::DrainServer, PccFleetChange::RemoveServer]),
    (39, &[PccFleetChange::DrainServer]),
    (41, &[PccFleetChange::RemoveServer]),
    (43, &[PccFleetChange::DrainServer, PccFleetChange::RemoveServer, PccFleetChange::DrainServer]),
    (45, &[PccFleetChange::RemoveServer]),
    (61, &[PccFleetChange::KillLoadBalancer]),
];

/// Returns the number of times that `change` occurs in the whole run.
pub fn count_change_occurrences(change: PccFleetChange) -> u16 {
    FLEET_CHANGES_BY_HALF_SECOND.iter().flat_map(|(_, changes)| *changes).filter(|other| **other == change).count()
        as u16
}

/// Returns the number of servers in the pool at the end of second `second`, counted from 0.
pub fn server_count_after(second: u64) -> u16 {
    let changes_before = FLEET_CHANGES_BY_HALF_SECOND
        .iter()
        .filter(|(half_second, _)| *half_second <= 2 * second + 1)
        .flat_map(|(_, changes)| *changes);
    changes_before.fold(INITIAL_SERVER_COUNT, |servers, change| match change {
        PccFleetChange::AddServer => servers + 1,
        PccFleetChange::DrainServer | PccFleetChange::RemoveServer => servers - 1,
        PccFleetChange::AddLoadBalancer | PccFleetChange::KillLoadBalancer => servers,
    })
}

/// Returns the server in `pool` that is the `leave_number`-th to leave. For a given seed, it is the same under every
/// method.
pub fn choose_leaving_server(pool: &[u16], seed: u64, leave_number: u64) -> u16 {
    let mut rng = seeded_rng(seed << 8 | leave_number, RNG_STREAM_LEAVING_SERVERS);
    pool[uniform_below(&mut rng, pool.len() as u32) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seven_servers_join_and_eight_leave() {
        let leaving_server_count = count_change_occurrences(PccFleetChange::DrainServer)
            + count_change_occurrences(PccFleetChange::RemoveServer);
        assert_eq!((count_change_occurrences(PccFleetChange::AddServer), leaving_server_count), (7, 8));
        assert_eq!([0, 4, 5, 6, 12, 15, 22, 44].map(server_count_after), [24, 25, 27, 29, 31, 29, 23, 23]);
        assert!(FLEET_CHANGES_BY_HALF_SECOND.is_sorted_by_key(|(half_second, _)| *half_second));
    }
}
