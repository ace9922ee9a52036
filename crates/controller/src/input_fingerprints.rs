//! Fingerprints of the inputs of a service's tables, apart from loads, at the last poll. Servers are polled in shards:
//! reports wait during a poll, and a service may have ten thousand servers.

use std::collections::BTreeMap;
use std::ops::Range;

use coreward_model::ServerId;

/// Number of server ids in a shard, which is polled in about a millisecond. A service of ten thousand servers has five
/// shards, of which one is polled per report interval.
const SHARD_SIZE: u64 = 2048;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shard(u64);

impl Shard {
    fn of(id: ServerId) -> Self {
        Self(u64::from(id.get()) / SHARD_SIZE)
    }

    fn ids(self) -> Range<u64> {
        self.0 * SHARD_SIZE..(self.0 + 1) * SHARD_SIZE
    }

    pub fn members<T>(self, members: &BTreeMap<ServerId, T>) -> impl Iterator<Item = ServerId> {
        let ids = self.ids();
        let first = ServerId::try_from(ids.start).expect("a shard begins with the id of a server");
        members.range(first..).map(|(id, _)| *id).take_while(move |id| ids.contains(&u64::from(id.get())))
    }
}

/// Fingerprints of the inputs of a service's tables: one for each shard of its servers, and one for the service itself.
#[derive(Debug, Default)]
pub struct InputFingerprints {
    service_fingerprint: Option<u64>,
    shards: BTreeMap<Shard, u64>,
    last: Option<Shard>,
}

impl InputFingerprints {
    /// Returns the shards to poll: the next one, or all shards if `all` is set or in the first call.
    pub fn next<T>(&mut self, members: &BTreeMap<ServerId, T>, all: bool) -> Vec<Shard> {
        let from = |first: u64| {
            let first = ServerId::try_from(first).ok()?;
            members.range(first..).next().map(|(id, _)| Shard::of(*id))
        };
        if all || self.service_fingerprint.is_none() {
            return std::iter::successors(from(0), |shard| from(shard.ids().end)).collect();
        }
        self.last = self.last.and_then(|last| from(last.ids().end)).or_else(|| from(0));
        self.last.into_iter().collect()
    }

    /// Stores new fingerprints. Returns whether any differs from the previous one.
    pub fn update(&mut self, service: u64, shards: &[(Shard, u64)]) -> bool {
        let mut is_new = self.service_fingerprint.replace(service) != Some(service);
        for (shard, found) in shards {
            is_new |= self.shards.insert(*shard, *found) != Some(*found);
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(ids: &[u64]) -> BTreeMap<ServerId, ()> {
        ids.iter().map(|id| ((*id).try_into().unwrap(), ())).collect()
    }

    #[test]
    fn first_poll_takes_all_shards_and_the_next_take_turns() {
        let members = members(&[3, 2047, 9_000, 16_383]);
        let mut fingerprints = InputFingerprints::default();
        let all = fingerprints.next(&members, false);
        assert_eq!(all, [Shard(0), Shard(4), Shard(7)]);
        let of = |shard: Shard| shard.members(&members).map(|id| id.get()).collect::<Vec<_>>();
        assert_eq!([of(all[0]), of(all[1]), of(all[2])], [vec![3, 2047], vec![9_000], vec![16_383]]);
        assert!(fingerprints.update(1, &[(Shard(0), 5), (Shard(4), 6), (Shard(7), 7)]));
        let mut next = || fingerprints.next(&members, false);
        assert_eq!([next(), next(), next(), next()], [[Shard(0)], [Shard(4)], [Shard(7)], [Shard(0)]]);
        assert_eq!(fingerprints.next(&members, true), all);
        assert!(!fingerprints.update(1, &[(Shard(4), 6)]));
        assert!(fingerprints.update(1, &[(Shard(4), 8)]));
        assert!(fingerprints.update(2, &[(Shard(4), 8)]));
    }

    #[test]
    fn service_without_servers_has_no_shard() {
        let mut fingerprints = InputFingerprints::default();
        assert_eq!(fingerprints.next(&members(&[]), true), []);
        assert!(fingerprints.update(1, &[]));
        assert_eq!(fingerprints.next(&members(&[]), false), []);
    }
}
