//! Current and previous server of each of a service's buckets, for the field `previous_consistent` of placement tables.
//!
//! Packets without a cookie go to their bucket's server. When a bucket moves, older connections remain at the previous
//! server, to which the new server forwards unknown packets (Beamer, Olteanu et al., NSDI'18, Sect. 4.2, "daisy
//! chaining"). As in Beamer, the history is one step deep.

use std::collections::{BTreeMap, BTreeSet};

use crate::ServerId;

/// Current and previous server of every hash bucket of one service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BucketHistory {
    /// Current server of each bucket, or an empty list before the first placement table.
    current_servers: Vec<ServerId>,
    previous_servers: Vec<Option<ServerId>>,
}

impl BucketHistory {
    /// Restores a history from stored lists with one element per bucket. Returns `None` if the lists differ in length.
    pub fn from_stored_servers(
        current_servers: Vec<ServerId>,
        previous_servers: Vec<Option<ServerId>>,
    ) -> Option<Self> {
        (current_servers.len() == previous_servers.len()).then_some(Self { current_servers, previous_servers })
    }

    /// Returns the current server of each bucket, or an empty list before the first placement table.
    pub fn current_servers(&self) -> &[ServerId] {
        &self.current_servers
    }

    /// Returns the server that each bucket had before its last move, or `None` for a bucket that never moved.
    pub fn previous_servers(&self) -> &[Option<ServerId>] {
        &self.previous_servers
    }

    /// Records the servers of the buckets in a new placement table, and returns whether a bucket moved. If no server is
    /// eligible, the buckets keep their last servers. If the number of buckets changes, a new history starts, because
    /// no bucket remains the same.
    pub fn update_bucket_servers(&mut self, new_servers: &[ServerId]) -> bool {
        if new_servers.is_empty() || new_servers == self.current_servers {
            return false;
        }
        if new_servers.len() != self.current_servers.len() {
            *self = Self { current_servers: new_servers.to_vec(), previous_servers: vec![None; new_servers.len()] };
            return true;
        }
        for ((new_server, current_server), previous_server) in
            new_servers.iter().zip(&mut self.current_servers).zip(&mut self.previous_servers)
        {
            if new_server != current_server {
                *previous_server = Some(std::mem::replace(current_server, *new_server));
            }
        }
        true
    }

    /// Returns each bucket's previous server for a placement table, or an empty list if no bucket has moved.
    pub fn previous_servers_or_empty(&self) -> Vec<Option<ServerId>> {
        if self.previous_servers.iter().all(Option::is_none) { Vec::new() } else { self.previous_servers.clone() }
    }

    /// Returns, for each current server, the previous servers of its buckets.
    pub fn previous_servers_by_current_server(&self) -> BTreeMap<ServerId, BTreeSet<ServerId>> {
        let mut previous_by_current_server: BTreeMap<ServerId, BTreeSet<ServerId>> = BTreeMap::new();
        for (current_server, previous_server) in self.current_servers.iter().zip(&self.previous_servers) {
            if let Some(previous_server) = previous_server {
                previous_by_current_server.entry(*current_server).or_default().insert(*previous_server);
            }
        }
        previous_by_current_server
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_ids(numbers: &[u64]) -> Vec<ServerId> {
        numbers.iter().map(|number| ServerId::try_from(*number).unwrap()).collect()
    }

    #[test]
    fn history_keeps_only_the_latest_previous_server_of_a_bucket() {
        let mut history = BucketHistory::default();
        assert!(history.update_bucket_servers(&server_ids(&[1, 2, 3, 1])));
        assert_eq!(history.previous_servers_or_empty(), []);
        assert!(!history.update_bucket_servers(&server_ids(&[1, 2, 3, 1])));
        // Server 1 leaves, then server 2. Bucket 0 was last at server 2, and bucket 3 moved when server 1 left.
        assert!(history.update_bucket_servers(&server_ids(&[2, 2, 3, 3])));
        assert!(history.update_bucket_servers(&server_ids(&[3, 3, 3, 3])));
        let previous_server_ids: Vec<u64> =
            history.previous_servers_or_empty().iter().map(|id| id.map_or(0, |id| id.get().into())).collect();
        assert_eq!(previous_server_ids, [2, 2, 0, 1]);
        assert_eq!(
            history.previous_servers_by_current_server(),
            BTreeMap::from([(server_ids(&[3])[0], server_ids(&[1, 2]).into_iter().collect())])
        );
    }

    #[test]
    fn empty_table_keeps_history_but_new_bucket_count_resets_it() {
        let mut history = BucketHistory::default();
        history.update_bucket_servers(&server_ids(&[1, 2]));
        assert!(!history.update_bucket_servers(&[]));
        history.update_bucket_servers(&server_ids(&[2, 2]));
        assert_eq!(history.previous_servers(), [Some(server_ids(&[1])[0]), None]);
        assert!(history.update_bucket_servers(&server_ids(&[2, 2, 2, 2])));
        assert_eq!((history.previous_servers_or_empty(), history.previous_servers().len()), (Vec::new(), 4));
        assert_eq!(BucketHistory::from_stored_servers(server_ids(&[1]), vec![]), None);
    }
}
