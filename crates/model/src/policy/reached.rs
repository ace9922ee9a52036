//! What the buckets of a group reach at each of its servers, and the least of it: kept from one table to the next.
//!
//! A table is made after every few reports, and looks for the eight least loaded of perhaps thousands of cores in each bucket. So
//! each bucket remembers a few more than eight; a server whose load changes goes to its new place among them, or leaves them, and
//! only where too few are left all are looked at again.

use super::loads::Loads;
use super::{MOST_CANDIDATES, PoolServer};
use crate::ServerId;
use crate::load::CoreLoads;
use crate::placement::BucketCount;
use crate::rss::{Rss, RssKey};

/// At most so many loads are kept of a group: 32 MiB. Beyond, each is looked up when it is needed.
const MOST_LOADS: usize = 4 << 20;

/// How many of its least loaded servers a bucket remembers: twice as many as are wanted, so that those that leave seldom make
/// it look at all.
const REMEMBERED: usize = 2 * MOST_CANDIDATES as usize;

/// The load that each bucket of a group reaches at each of its servers.
#[derive(Debug, Default)]
pub struct ReachedLoads {
    buckets: u32,
    columns: Vec<Column>,
    /// By bucket, then by server as in `columns`; empty where they would be too many.
    loads: Vec<f64>,
    /// By bucket; empty where servers are compared by something else.
    least: Vec<LeastLoaded>,
}

/// Of one server.
#[derive(Debug)]
struct Column {
    server: ServerId,
    /// What its loads were made of; `None`: not of the server alone.
    made_of: Option<(CoreLoads, Option<Rss>)>,
}

/// A server's place in the order of a bucket's loads: equals by id, as CrossRSS has it.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The load that the bucket reaches there.
    pub load: f64,
    /// The server.
    pub server: ServerId,
    /// Where it stands among those of the group.
    pub position: u32,
}

impl Place {
    fn is_before(&self, other: &Place) -> bool {
        self.load.total_cmp(&other.load).then(self.server.cmp(&other.server)).is_lt()
    }
}

/// The least loaded servers of one bucket, the least first. No server that is not here is before the last one.
#[derive(Debug, Default)]
struct LeastLoaded(Vec<Place>);

impl LeastLoaded {
    /// A server has another load.
    #[inline]
    fn moved(&mut self, old: f64, new: Place) {
        let Some(bound) = self.0.last().copied() else { return };
        // Most are far behind, and stay there.
        if old > bound.load && new.load > bound.load {
            return;
        }
        self.0.retain(|known| known.server != new.server);
        // Of all others nobody who is not here is before the bound.
        if new.is_before(&bound) {
            let position = self.0.partition_point(|known| known.is_before(&new));
            self.0.insert(position, new);
            self.0.truncate(REMEMBERED);
        }
    }

    /// Of all, anew.
    fn find(&mut self, all: impl Iterator<Item = Place>) {
        self.0.clear();
        let mut bound = f64::INFINITY;
        for place in all {
            if place.load > bound {
                continue;
            }
            let position = self.0.partition_point(|known| known.is_before(&place));
            self.0.insert(position, place);
            if self.0.len() >= REMEMBERED {
                self.0.truncate(REMEMBERED);
                bound = self.0[REMEMBERED - 1].load;
            }
        }
    }
}

impl ReachedLoads {
    /// As it is now, for these servers of the group with that key. `most`: how many of each bucket's least loaded are wanted; 0:
    /// none are, as servers are compared by something else.
    pub fn follow(&mut self, servers: &[&PoolServer], key: &RssKey, buckets: BucketCount, neutral: f64, most: usize) {
        let is_known = |(column, server): (&Column, &&PoolServer)| column.server == server.id;
        let all_known = self.columns.len() == servers.len() && self.columns.iter().zip(servers).all(is_known);
        if !all_known || self.buckets != buckets.get() {
            self.buckets = buckets.get();
            self.columns = servers.iter().map(|server| Column { server: server.id, made_of: None }).collect();
            let count = servers.len() * buckets.get() as usize;
            self.loads.clear();
            self.loads.resize(if count <= MOST_LOADS { count } else { 0 }, neutral);
            self.least.clear();
        }
        if self.loads.is_empty() {
            return;
        }
        if most == 0 {
            self.least.clear();
        } else {
            self.least.resize_with(buckets.get() as usize, LeastLoaded::default);
        }
        for (position, server) in servers.iter().enumerate() {
            self.follow_server(position, server, key, buckets, neutral);
        }
        self.find_least(most);
    }

    fn follow_server(
        &mut self,
        position: usize,
        server: &PoolServer,
        key: &RssKey,
        buckets: BucketCount,
        neutral: f64,
    ) {
        let column = &mut self.columns[position];
        let cores = server.loads.as_ref().and_then(Loads::cores).filter(|cores| !cores.is_empty());
        let rss = server.rss.as_ref().filter(|rss| rss.key == *key);
        let is_same = |(known, known_rss): &(CoreLoads, Option<Rss>)| {
            cores.is_some_and(|cores| cores == known) && known_rss.as_ref() == rss
        };
        if column.made_of.as_ref().is_some_and(is_same) {
            return;
        }
        column.made_of = cores.map(|cores| (cores.clone(), rss.cloned()));
        let stride = self.columns.len();
        let (loads, least) = (&mut self.loads, &mut self.least);
        each_load(server, rss, buckets, neutral, |bucket, load| {
            let old = std::mem::replace(&mut loads[bucket * stride + position], load);
            if let Some(least) = least.get_mut(bucket) {
                least.moved(old, Place { load, server: server.id, position: position as u32 });
            }
        });
    }

    /// Where too few are remembered, all are looked at.
    fn find_least(&mut self, most: usize) {
        let stride = self.columns.len();
        let wanted = most.min(stride);
        for (least, loads) in self.least.iter_mut().zip(self.loads.chunks_exact(stride.max(1))) {
            if least.0.len() < wanted {
                let places = (0..).zip(loads).zip(&self.columns);
                least.find(places.map(|((position, load), column)| Place {
                    load: *load,
                    server: column.server,
                    position,
                }));
            }
        }
    }

    /// The loads that the bucket reaches, by server; `None`: they are not kept.
    pub fn of_bucket(&self, bucket: u32) -> Option<&[f64]> {
        let start = bucket as usize * self.columns.len();
        self.loads.get(start..start + self.columns.len()).filter(|loads| !loads.is_empty())
    }

    /// The least loaded servers of the bucket, at least as many as were wanted, as far as there are; `None`: they are not kept.
    pub fn least(&self, bucket: u32) -> Option<&[Place]> {
        self.least.get(bucket as usize).map(|least| &least.0[..])
    }
}

/// Calls `take` with each bucket and the load that it reaches at the server.
fn each_load(
    server: &PoolServer,
    rss: Option<&Rss>,
    buckets: BucketCount,
    neutral: f64,
    mut take: impl FnMut(usize, f64),
) {
    let queues = rss.map(|rss| rss.indirection_table.queues());
    match (server.loads.as_ref().and_then(Loads::cores), queues) {
        // Each bucket reaches one entry: what `core_of` says, in a loop without its divisions.
        (Some(cores), Some(queues)) if queues.len() <= buckets.get() as usize => {
            let beyond = server.mean_load(neutral);
            for (bucket, queue) in (0..buckets.get() as usize).zip(queues.iter().cycle()) {
                take(bucket, cores.get(usize::from(*queue)).copied().unwrap_or(beyond));
            }
        }
        _ => (0..buckets.get()).for_each(|bucket| {
            take(bucket as usize, core_of(server, rss, bucket, buckets, neutral).1);
        }),
    }
}

/// The core of the server that a bucket's connections reach, and its load. Of a server that only shares the group's table
/// (`rss`: none of that key) it is not known: all its cores count as one.
pub fn core_of(server: &PoolServer, rss: Option<&Rss>, bucket: u32, buckets: BucketCount, neutral: f64) -> (u16, f64) {
    match rss {
        Some(rss) => reached(server, rss, bucket, buckets, neutral),
        None => (0, server.mean_load(neutral)),
    }
}

/// The core of a server with this RSS that a bucket's connections reach, and its load; `neutral` where none is known. Where
/// the server's table is longer than the buckets are many, a bucket reaches several of its entries, evenly.
pub fn reached(server: &PoolServer, rss: &Rss, bucket: u32, buckets: BucketCount, neutral: f64) -> (u16, f64) {
    let table = &rss.indirection_table;
    let entries = (table.entry_count() / buckets.get() as usize).max(1);
    let cores = (0..entries as u32).map(|step| table.queue(bucket + step * buckets.get()));
    let load = cores.map(|core| server.core_load(core, neutral)).sum::<f64>() / entries as f64;
    (reached_queue(rss, bucket), load)
}

/// The queue that a bucket's connections reach; where they reach several, the first.
pub fn reached_queue(rss: &Rss, bucket: u32) -> u16 {
    rss.indirection_table.queue(bucket)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SERVERS: usize = 60;

    proptest! {
        /// What a bucket remembers is the least of all, however loads move.
        #[test]
        fn remembered_are_the_least(moves in prop::collection::vec((0..SERVERS, 0u32..20), 1..400)) {
            let mut loads = vec![1.0; SERVERS];
            let place = |position: usize, load: f64| Place {
                load,
                server: ServerId::try_from((position as u64 * 37) % 61).unwrap(),
                position: position as u32,
            };
            let mut least = LeastLoaded::default();
            for (position, twentieths) in moves {
                let load = f64::from(twentieths) / 20.0;
                let old = std::mem::replace(&mut loads[position], load);
                least.moved(old, place(position, load));
                let mut all: Vec<Place> = loads.iter().enumerate().map(|(at, load)| place(at, *load)).collect();
                if least.0.len() < usize::from(MOST_CANDIDATES) {
                    least.find(all.iter().copied());
                    prop_assert_eq!(least.0.len(), REMEMBERED);
                }
                all.sort_by(|one, other| one.load.total_cmp(&other.load).then(one.server.cmp(&other.server)));
                let found: Vec<u32> = least.0.iter().map(|place| place.position).collect();
                let expected: Vec<u32> = all[..found.len()].iter().map(|place| place.position).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
