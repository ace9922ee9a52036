//! Fingerprints of the inputs of a service's tables, apart from loads, at the last poll. Servers are polled in shards,
//! because reports wait during a poll and a service may have ten thousand servers.

use std::collections::BTreeMap;
use std::ops::Range;

use coreward_model::ServerId;

/// Number of server ids in a shard of a service's servers. Polling a shard's inputs takes about a millisecond. A
/// service of ten thousand servers has five shards, of which one is polled per report interval.
const SERVER_IDS_PER_SHARD: u64 = 2048;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerShard(u64);

impl ServerShard {
    fn containing(id: ServerId) -> Self {
        Self(u64::from(id.get()) / SERVER_IDS_PER_SHARD)
    }

    fn server_id_range(self) -> Range<u64> {
        self.0 * SERVER_IDS_PER_SHARD..(self.0 + 1) * SERVER_IDS_PER_SHARD
    }

    pub fn members_in_shard<T>(self, members: &BTreeMap<ServerId, T>) -> impl Iterator<Item = ServerId> {
        let id_range = self.server_id_range();
        let first_id = ServerId::try_from(id_range.start).expect("a shard begins with the id of a server");
        members.range(first_id..).map(|(id, _)| *id).take_while(move |id| id_range.contains(&u64::from(id.get())))
    }
}

/// Fingerprints (hashes) of the inputs of a service's tables: one of each shard of its servers, and one of the service
/// itself.
#[derive(Debug, Default)]
pub struct TableInputFingerprints {
    service_fingerprint: Option<u64>,
    fingerprints_by_shard: BTreeMap<ServerShard, u64>,
    last_polled_shard: Option<ServerShard>,
}

impl TableInputFingerprints {
    /// Returns the shards to poll: the next shard, or all shards in the first call or if `is_full_poll` is set.
    pub fn next_shards_to_poll<T>(&mut self, members: &BTreeMap<ServerId, T>, is_full_poll: bool) -> Vec<ServerShard> {
        let first_shard_from = |lowest_number: u64| {
            let first_id = ServerId::try_from(lowest_number).ok()?;
            members.range(first_id..).next().map(|(id, _)| ServerShard::containing(*id))
        };
        if is_full_poll || self.service_fingerprint.is_none() {
            return std::iter::successors(first_shard_from(0), |shard| first_shard_from(shard.server_id_range().end))
                .collect();
        }
        self.last_polled_shard = self
            .last_polled_shard
            .and_then(|last_shard| first_shard_from(last_shard.server_id_range().end))
            .or_else(|| first_shard_from(0));
        self.last_polled_shard.into_iter().collect()
    }

    /// Stores new fingerprints. Returns whether any fingerprint differs from the previous one.
    pub fn store_and_compare(
        &mut self,
        service_fingerprint: u64,
        fingerprints_by_shard: &[(ServerShard, u64)],
    ) -> bool {
        let mut has_changed = self.service_fingerprint.replace(service_fingerprint) != Some(service_fingerprint);
        for (shard, fingerprint) in fingerprints_by_shard {
            has_changed |= self.fingerprints_by_shard.insert(*shard, *fingerprint) != Some(*fingerprint);
        }
        has_changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members_with_ids(ids: &[u64]) -> BTreeMap<ServerId, ()> {
        ids.iter().map(|id| ((*id).try_into().unwrap(), ())).collect()
    }

    #[test]
    fn first_poll_returns_all_shards_and_later_polls_one_each() {
        let members = members_with_ids(&[3, 2047, 9_000, 16_383]);
        let mut fingerprints = TableInputFingerprints::default();
        let first_polled_shards = fingerprints.next_shards_to_poll(&members, false);
        assert_eq!(first_polled_shards, [ServerShard(0), ServerShard(4), ServerShard(7)]);
        let member_ids_of =
            |shard: ServerShard| shard.members_in_shard(&members).map(|id| id.get()).collect::<Vec<_>>();
        assert_eq!(
            [
                member_ids_of(first_polled_shards[0]),
                member_ids_of(first_polled_shards[1]),
                member_ids_of(first_polled_shards[2])
            ],
            [vec![3, 2047], vec![9_000], vec![16_383]]
        );
        assert!(fingerprints.store_and_compare(1, &[(ServerShard(0), 5), (ServerShard(4), 6), (ServerShard(7), 7)]));
        let mut next_polled_shards = || fingerprints.next_shards_to_poll(&members, false);
        assert_eq!(
            [next_polled_shards(), next_polled_shards(), next_polled_shards(), next_polled_shards()],
            [[ServerShard(0)], [ServerShard(4)], [ServerShard(7)], [ServerShard(0)]]
        );
        assert_eq!(fingerprints.next_shards_to_poll(&members, true), first_polled_shards);
        assert!(!fingerprints.store_and_compare(1, &[(ServerShard(4), 6)]));
        assert!(fingerprints.store_and_compare(1, &[(ServerShard(4), 8)]));
        assert!(fingerprints.store_and_compare(2, &[(ServerShard(4), 8)]));
    }

    #[test]
    fn service_without_servers_has_no_shard() {
        let mut fingerprints = TableInputFingerprints::default();
        assert_eq!(fingerprints.next_shards_to_poll(&members_with_ids(&[]), true), []);
        assert!(fingerprints.store_and_compare(1, &[]));
        assert_eq!(fingerprints.next_shards_to_poll(&members_with_ids(&[]), false), []);
    }
}
