//! Loads of the cores that each bucket's connections reach in a group, and the least loaded cores, kept between tables.

use super::PoolServer;
use super::least_loaded::{LeastLoadedCores, RankedCore};
use super::loads::ServerLoads;
use crate::ServerId;
use crate::load::CoreLoads;
use crate::placement::{BucketCount, ServerCore};
use crate::rss::{RssConfig, RssKey};

/// Maximum number of loads kept for a group (32 MiB). In larger groups, each load is computed when it is needed.
const MAX_KEPT_LOADS: usize = 4 << 20;

/// For each bucket of a group, the load of the core that it reaches at each of the group's servers.
#[derive(Debug, Default)]
pub struct BucketLoads {
    bucket_count: u32,
    server_columns: Vec<ServerColumn>,
    /// Loads by bucket, then by server as in `server_columns`, or an empty list if there would be too many.
    loads_by_bucket: Vec<f64>,
    /// Least loaded cores by bucket, or an empty list if cores are compared by another value than their load.
    least_cores_by_bucket: Vec<LeastLoadedCores>,
}

#[derive(Debug)]
struct ServerColumn {
    server: ServerId,
    /// Loads and RSS of the server, or `None` if it counts with the neutral load, which depends on other servers.
    loads_and_rss: Option<(CoreLoads, Option<RssConfig>)>,
}

impl BucketLoads {
    /// Updates the loads for these servers of the group with RSS key `key`. `needed_core_count` is the number of least
    /// loaded cores needed per bucket, or 0 if cores are compared by another value than their load.
    pub fn update(
        &mut self,
        servers: &[&PoolServer],
        key: &RssKey,
        buckets: BucketCount,
        neutral_load: f64,
        needed_core_count: usize,
    ) {
        let has_column = |(column, server): (&ServerColumn, &&PoolServer)| column.server == server.id;
        let are_all_known =
            self.server_columns.len() == servers.len() && self.server_columns.iter().zip(servers).all(has_column);
        if !are_all_known || self.bucket_count != buckets.get() {
            self.bucket_count = buckets.get();
            self.server_columns =
                servers.iter().map(|server| ServerColumn { server: server.id, loads_and_rss: None }).collect();
            let load_count = servers.len() * buckets.get() as usize;
            self.loads_by_bucket.clear();
            self.loads_by_bucket.resize(if load_count <= MAX_KEPT_LOADS { load_count } else { 0 }, neutral_load);
            self.least_cores_by_bucket.clear();
        }
        if self.loads_by_bucket.is_empty() {
            return;
        }
        if needed_core_count == 0 {
            self.least_cores_by_bucket.clear();
        } else {
            self.least_cores_by_bucket.resize_with(buckets.get() as usize, LeastLoadedCores::default);
        }
        for (position, server) in servers.iter().enumerate() {
            self.update_server_loads(position, server, key, buckets, neutral_load);
        }
        self.refill_least_cores(servers, key, needed_core_count);
    }

    fn update_server_loads(
        &mut self,
        position: usize,
        server: &PoolServer,
        key: &RssKey,
        buckets: BucketCount,
        neutral_load: f64,
    ) {
        let column = &mut self.server_columns[position];
        let cores = server.loads.as_ref().and_then(ServerLoads::cores).filter(|cores| !cores.is_empty());
        let rss = server.rss.as_ref().filter(|rss| rss.key == *key);
        let is_unchanged = |(known_loads, known_rss): &(CoreLoads, Option<RssConfig>)| {
            cores.is_some_and(|cores| cores == known_loads) && known_rss.as_ref() == rss
        };
        if column.loads_and_rss.as_ref().is_some_and(is_unchanged) {
            return;
        }
        column.loads_and_rss = cores.map(|cores| (cores.clone(), rss.cloned()));
        let server_count = self.server_columns.len();
        let (loads, least_cores_by_bucket) = (&mut self.loads_by_bucket, &mut self.least_cores_by_bucket);
        for_each_reached_core(server, rss, buckets, neutral_load, |bucket, core, load| {
            let old_load = std::mem::replace(&mut loads[bucket * server_count + position], load);
            if let Some(least_cores) = least_cores_by_bucket.get_mut(bucket) {
                least_cores.update_source(
                    old_load,
                    RankedCore { load, core: ServerCore { server: server.id, core }, source: position as u32 },
                );
            }
        });
    }

    /// Searches the least loaded cores again in those buckets that have too few of them left.
    fn refill_least_cores(&mut self, servers: &[&PoolServer], key: &RssKey, needed_core_count: usize) {
        let server_count = self.server_columns.len();
        let needed_count = needed_core_count.min(server_count);
        for (bucket, least_cores) in (0..)
            .zip(&mut self.least_cores_by_bucket)
            .filter(|(_, least_cores)| least_cores.ranked_cores().len() < needed_count)
        {
            let bucket_loads = &self.loads_by_bucket[bucket as usize * server_count..][..server_count];
            let ranked_core = |((source, load), server): ((u32, &f64), &&PoolServer)| {
                std::iter::once(RankedCore { load: *load, core: reached_core(server, key, bucket), source })
            };
            least_cores.refill((0..).zip(bucket_loads).zip(servers).map(ranked_core));
        }
    }

    /// Returns the loads that the bucket reaches, by server, or `None` if no loads are kept.
    pub fn bucket_loads(&self, bucket: u32) -> Option<&[f64]> {
        let start = bucket as usize * self.server_columns.len();
        self.loads_by_bucket.get(start..start + self.server_columns.len()).filter(|loads| !loads.is_empty())
    }

    /// Returns the least loaded cores of the bucket, as many as needed if they exist, or `None` if they are not kept.
    pub fn least_loaded_cores(&self, bucket: u32) -> Option<&[RankedCore]> {
        self.least_cores_by_bucket.get(bucket as usize).map(LeastLoadedCores::ranked_cores)
    }
}

/// Calls `visit_core` for each bucket with the bucket, the core that it reaches at the server, and the core's load.
fn for_each_reached_core(
    server: &PoolServer,
    rss: Option<&RssConfig>,
    buckets: BucketCount,
    neutral_load: f64,
    mut visit_core: impl FnMut(usize, u16, f64),
) {
    let queues = rss.map(|rss| rss.indirection_table.queues());
    match (server.loads.as_ref().and_then(ServerLoads::cores), queues) {
        // Each bucket reaches one entry, so this loop gives the result of `core_and_load` without its divisions.
        (Some(cores), Some(queues)) if queues.len() <= buckets.get() as usize => {
            let unreported_core_load = server.mean_load(neutral_load);
            for (bucket, queue) in (0..buckets.get() as usize).zip(queues.iter().cycle()) {
                visit_core(bucket, *queue, cores.get(usize::from(*queue)).copied().unwrap_or(unreported_core_load));
            }
        }
        _ => (0..buckets.get()).for_each(|bucket| {
            let (core, load) = core_and_load(server, rss, bucket, buckets, neutral_load);
            visit_core(bucket as usize, core, load);
        }),
    }
}

/// Returns the core that connections of a bucket reach at a server of the group with RSS key `key`.
pub fn reached_core(server: &PoolServer, key: &RssKey, bucket: u32) -> ServerCore {
    let rss = server.rss.as_ref().filter(|rss| rss.key == *key);
    ServerCore { server: server.id, core: rss.map_or(0, |rss| reached_queue(rss, bucket)) }
}

/// Returns the core of the server that a bucket's connections reach, and its load. A server without `rss` of the
/// group's key only shares the group's table, and counts as one core.
pub fn core_and_load(
    server: &PoolServer,
    rss: Option<&RssConfig>,
    bucket: u32,
    buckets: BucketCount,
    neutral_load: f64,
) -> (u16, f64) {
    match rss {
        Some(rss) => reached_core_and_load(server, rss, bucket, buckets, neutral_load),
        None => (0, server.mean_load(neutral_load)),
    }
}

/// Returns the core of a server with this RSS that a bucket's connections reach, and its load, or `neutral_load` if
/// unknown. If the server's table is longer than the number of buckets, a bucket reaches several of its entries,
/// evenly.
pub fn reached_core_and_load(
    server: &PoolServer,
    rss: &RssConfig,
    bucket: u32,
    buckets: BucketCount,
    neutral_load: f64,
) -> (u16, f64) {
    let indirection_table = &rss.indirection_table;
    let entries_per_bucket = (indirection_table.entry_count() / buckets.get() as usize).max(1);
    let entry_cores =
        (0..entries_per_bucket as u32).map(|step| indirection_table.queue_of_hash(bucket + step * buckets.get()));
    let load = entry_cores.map(|core| server.core_load(core, neutral_load)).sum::<f64>() / entries_per_bucket as f64;
    (reached_queue(rss, bucket), load)
}

/// Returns the receive queue that a bucket's connections reach, or the first of several.
fn reached_queue(rss: &RssConfig, bucket: u32) -> u16 {
    rss.indirection_table.queue_of_hash(bucket)
}
