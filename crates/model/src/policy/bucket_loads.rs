//! Loads that the buckets of a group reach at each of its servers, and the least loaded cores, kept between tables.

use super::PoolServer;
use super::least_loaded::{LeastLoadedCores, RankedCore};
use super::loads::ServerLoads;
use crate::ServerId;
use crate::load::CoreLoads;
use crate::placement::{BucketCount, ServerCore};
use crate::rss::{RssConfig, RssKey};

/// Maximum number of loads that are kept for a group: 32 MiB. In larger groups each load is computed when it is needed.
const MAX_LOADS: usize = 4 << 20;

/// For each bucket of a group, the load of the core that it reaches at each of the group's servers.
#[derive(Debug, Default)]
pub struct BucketLoads {
    buckets: u32,
    columns: Vec<Column>,
    /// Loads by bucket, then by server as in `columns`; empty if there would be too many.
    loads: Vec<f64>,
    /// Least loaded cores by bucket; empty where cores are compared by another value than their load.
    least_loaded_cores: Vec<LeastLoadedCores>,
}

#[derive(Debug)]
struct Column {
    server: ServerId,
    /// Loads and RSS of the server; `None` if it counts with the neutral load, which depends on other servers.
    source: Option<(CoreLoads, Option<RssConfig>)>,
}

impl BucketLoads {
    /// Updates the loads for these servers of the group with RSS key `key`. `most` is the number of least loaded cores
    /// needed per bucket; 0 if cores are compared by another value than their load.
    pub fn update(&mut self, servers: &[&PoolServer], key: &RssKey, buckets: BucketCount, neutral: f64, most: usize) {
        let is_known = |(column, server): (&Column, &&PoolServer)| column.server == server.id;
        let all_known = self.columns.len() == servers.len() && self.columns.iter().zip(servers).all(is_known);
        if !all_known || self.buckets != buckets.get() {
            self.buckets = buckets.get();
            self.columns = servers.iter().map(|server| Column { server: server.id, source: None }).collect();
            let count = servers.len() * buckets.get() as usize;
            self.loads.clear();
            self.loads.resize(if count <= MAX_LOADS { count } else { 0 }, neutral);
            self.least_loaded_cores.clear();
        }
        if self.loads.is_empty() {
            return;
        }
        if most == 0 {
            self.least_loaded_cores.clear();
        } else {
            self.least_loaded_cores.resize_with(buckets.get() as usize, LeastLoadedCores::default);
        }
        for (position, server) in servers.iter().enumerate() {
            self.follow_server(position, server, key, buckets, neutral);
        }
        self.find_least(servers, key, most);
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
        let cores = server.loads.as_ref().and_then(ServerLoads::cores).filter(|cores| !cores.is_empty());
        let rss = server.rss.as_ref().filter(|rss| rss.key == *key);
        let is_same = |(known, known_rss): &(CoreLoads, Option<RssConfig>)| {
            cores.is_some_and(|cores| cores == known) && known_rss.as_ref() == rss
        };
        if column.source.as_ref().is_some_and(is_same) {
            return;
        }
        column.source = cores.map(|cores| (cores.clone(), rss.cloned()));
        let stride = self.columns.len();
        let (loads, least) = (&mut self.loads, &mut self.least_loaded_cores);
        for_each_reached(server, rss, buckets, neutral, |bucket, core, load| {
            let old = std::mem::replace(&mut loads[bucket * stride + position], load);
            if let Some(least) = least.get_mut(bucket) {
                least.update_source(
                    old,
                    RankedCore { load, core: ServerCore { server: server.id, core }, source: position as u32 },
                );
            }
        });
    }

    /// Searches the least loaded cores again in those buckets that have too few of them left.
    fn find_least(&mut self, servers: &[&PoolServer], key: &RssKey, most: usize) {
        let stride = self.columns.len();
        let limit = most.min(stride);
        for (bucket, least) in
            (0..).zip(&mut self.least_loaded_cores).filter(|(_, least)| least.ranked_cores().len() < limit)
        {
            let loads = &self.loads[bucket as usize * stride..][..stride];
            let place = |((source, load), server): ((u32, &f64), &&PoolServer)| {
                std::iter::once(RankedCore { load: *load, core: core_at(server, key, bucket), source })
            };
            least.find((0..).zip(loads).zip(servers).map(place));
        }
    }

    /// Returns the loads that the bucket reaches, by server; `None` if no loads are kept.
    pub fn bucket_loads(&self, bucket: u32) -> Option<&[f64]> {
        let start = bucket as usize * self.columns.len();
        self.loads.get(start..start + self.columns.len()).filter(|loads| !loads.is_empty())
    }

    /// Returns the least loaded cores of the bucket, as many as needed if they exist; `None` if they are not kept.
    pub fn least_loaded_cores(&self, bucket: u32) -> Option<&[RankedCore]> {
        self.least_loaded_cores.get(bucket as usize).map(LeastLoadedCores::ranked_cores)
    }
}

/// Calls `take` for each bucket with the bucket, the core that it reaches at the server, and the core's load.
fn for_each_reached(
    server: &PoolServer,
    rss: Option<&RssConfig>,
    buckets: BucketCount,
    neutral: f64,
    mut take: impl FnMut(usize, u16, f64),
) {
    let queues = rss.map(|rss| rss.indirection_table.queues());
    match (server.loads.as_ref().and_then(ServerLoads::cores), queues) {
        // Each bucket reaches one entry: the result of `core_of`, in a loop without its divisions.
        (Some(cores), Some(queues)) if queues.len() <= buckets.get() as usize => {
            let beyond = server.mean_load(neutral);
            for (bucket, queue) in (0..buckets.get() as usize).zip(queues.iter().cycle()) {
                take(bucket, *queue, cores.get(usize::from(*queue)).copied().unwrap_or(beyond));
            }
        }
        _ => (0..buckets.get()).for_each(|bucket| {
            let (core, load) = core_of(server, rss, bucket, buckets, neutral);
            take(bucket as usize, core, load);
        }),
    }
}

/// Returns the core that connections of a bucket reach at a server of the group with RSS key `key`.
pub fn core_at(server: &PoolServer, key: &RssKey, bucket: u32) -> ServerCore {
    let rss = server.rss.as_ref().filter(|rss| rss.key == *key);
    ServerCore { server: server.id, core: rss.map_or(0, |rss| reached_queue(rss, bucket)) }
}

/// Returns the core of the server that connections of a bucket reach, and its load. Without `rss` of the group's key
/// the server only shares the group's table, and counts as one core.
pub fn core_of(
    server: &PoolServer,
    rss: Option<&RssConfig>,
    bucket: u32,
    buckets: BucketCount,
    neutral: f64,
) -> (u16, f64) {
    match rss {
        Some(rss) => reached_core(server, rss, bucket, buckets, neutral),
        None => (0, server.mean_load(neutral)),
    }
}

/// Returns the core of a server with this RSS that a bucket's connections reach, and its load; `neutral` if unknown.
/// If the server's table is longer than the number of buckets, a bucket reaches several of its entries, evenly.
pub fn reached_core(
    server: &PoolServer,
    rss: &RssConfig,
    bucket: u32,
    buckets: BucketCount,
    neutral: f64,
) -> (u16, f64) {
    let table = &rss.indirection_table;
    let entries = (table.entry_count() / buckets.get() as usize).max(1);
    let cores = (0..entries as u32).map(|step| table.queue(bucket + step * buckets.get()));
    let load = cores.map(|core| server.core_load(core, neutral)).sum::<f64>() / entries as f64;
    (reached_queue(rss, bucket), load)
}

/// Returns the receive queue that connections of a bucket reach; the first if there are several.
fn reached_queue(rss: &RssConfig, bucket: u32) -> u16 {
    rss.indirection_table.queue(bucket)
}
