//! Loads of the cores that each bucket's connections reach in an RSS group, and the least loaded of these cores. Both
//! are kept from table to table.

use super::PoolServer;
use super::least_loaded::{LeastLoadedCores, RankedCore};
use super::loads::ServerLoads;
use crate::ServerId;
use crate::load::CoreLoads;
use crate::placement::{BucketCount, ServerCore};
use crate::rss::{RssConfig, RssKey};

/// Maximum number of loads that are kept for a group (32 MiB). In larger groups, each load is computed when needed.
const MAX_KEPT_LOADS_PER_GROUP: usize = 4 << 20;

/// For each bucket of an RSS group, the loads of the cores that the bucket's connections reach, one at each server.
#[derive(Debug, Default)]
pub struct BucketLoads {
    bucket_count: u32,
    server_columns: Vec<ServerLoadColumn>,
    /// Loads by bucket, then by server as in `server_columns`. The list is empty if the loads would be too many.
    loads_by_bucket_and_server: Vec<f64>,
    /// Least loaded cores by bucket. The list is empty if cores are compared by another value than their load.
    least_loaded_cores_by_bucket: Vec<LeastLoadedCores>,
}

#[derive(Debug)]
struct ServerLoadColumn {
    server: ServerId,
    /// Loads and RSS of the server, or `None` if it counts with the neutral load, which depends on other servers.
    loads_and_rss: Option<(CoreLoads, Option<RssConfig>)>,
}

impl BucketLoads {
    /// Updates the loads for `servers` of the group with RSS key `rss_key`. `needed_core_count` is the number of least
    /// loaded cores needed per bucket, or 0 if cores are compared by another value than their load.
    pub fn update_loads(
        &mut self,
        servers: &[&PoolServer],
        rss_key: &RssKey,
        bucket_count: BucketCount,
        neutral_load: f64,
        needed_core_count: usize,
    ) {
        let is_column_of_server = |(column, server): (&ServerLoadColumn, &&PoolServer)| column.server == server.id;
        let are_columns_current = self.server_columns.len() == servers.len()
            && self.server_columns.iter().zip(servers).all(is_column_of_server);
        if !are_columns_current || self.bucket_count != bucket_count.get() {
            self.bucket_count = bucket_count.get();
            self.server_columns =
                servers.iter().map(|server| ServerLoadColumn { server: server.id, loads_and_rss: None }).collect();
            let load_count = servers.len() * bucket_count.get() as usize;
            self.loads_by_bucket_and_server.clear();
            self.loads_by_bucket_and_server
                .resize(if load_count <= MAX_KEPT_LOADS_PER_GROUP { load_count } else { 0 }, neutral_load);
            self.least_loaded_cores_by_bucket.clear();
        }
        if self.loads_by_bucket_and_server.is_empty() {
            return;
        }
        if needed_core_count == 0 {
            self.least_loaded_cores_by_bucket.clear();
        } else {
            self.least_loaded_cores_by_bucket.resize_with(bucket_count.get() as usize, LeastLoadedCores::default);
        }
        for (position, server) in servers.iter().enumerate() {
            self.update_server_loads(position, server, rss_key, bucket_count, neutral_load);
        }
        self.refill_least_loaded_cores(servers, rss_key, needed_core_count);
    }

    fn update_server_loads(
        &mut self,
        server_position: usize,
        server: &PoolServer,
        rss_key: &RssKey,
        bucket_count: BucketCount,
        neutral_load: f64,
    ) {
        let column = &mut self.server_columns[server_position];
        let core_loads = server.loads.as_ref().and_then(ServerLoads::core_loads).filter(|cores| !cores.is_empty());
        let rss = server.rss.as_ref().filter(|rss| rss.key == *rss_key);
        let is_server_unchanged = |(known_loads, known_rss): &(CoreLoads, Option<RssConfig>)| {
            core_loads.is_some_and(|cores| cores == known_loads) && known_rss.as_ref() == rss
        };
        if column.loads_and_rss.as_ref().is_some_and(is_server_unchanged) {
            return;
        }
        column.loads_and_rss = core_loads.map(|cores| (cores.clone(), rss.cloned()));
        let server_count = self.server_columns.len();
        let (loads, least_cores_by_bucket) =
            (&mut self.loads_by_bucket_and_server, &mut self.least_loaded_cores_by_bucket);
        for_each_reachable_core(server, rss, bucket_count, neutral_load, |bucket, core, load| {
            let previous_load = std::mem::replace(&mut loads[bucket * server_count + server_position], load);
            if let Some(least_cores) = least_cores_by_bucket.get_mut(bucket) {
                least_cores.update_core_of_reporter(
                    previous_load,
                    RankedCore {
                        load,
                        core: ServerCore { server: server.id, core },
                        reporter_index: server_position as u32,
                    },
                );
            }
        });
    }

    /// Searches the least loaded cores of those buckets that have too few of them left.
    fn refill_least_loaded_cores(&mut self, servers: &[&PoolServer], rss_key: &RssKey, needed_core_count: usize) {
        let server_count = self.server_columns.len();
        let available_needed_count = needed_core_count.min(server_count);
        for (bucket, least_cores) in (0..)
            .zip(&mut self.least_loaded_cores_by_bucket)
            .filter(|(_, least_cores)| least_cores.ranked_cores().len() < available_needed_count)
        {
            let bucket_loads = &self.loads_by_bucket_and_server[bucket as usize * server_count..][..server_count];
            let ranked_core = |((source, load), server): ((u32, &f64), &&PoolServer)| {
                std::iter::once(RankedCore {
                    load: *load,
                    core: reachable_core(server, rss_key, bucket),
                    reporter_index: source,
                })
            };
            least_cores.refill_from_ascending_lists((0..).zip(bucket_loads).zip(servers).map(ranked_core));
        }
    }

    /// Returns the loads of the cores that the bucket's connections reach, by server, or `None` if no loads are kept.
    pub fn loads_by_server(&self, bucket: u32) -> Option<&[f64]> {
        let first_load_index = bucket as usize * self.server_columns.len();
        self.loads_by_bucket_and_server
            .get(first_load_index..first_load_index + self.server_columns.len())
            .filter(|loads| !loads.is_empty())
    }

    /// Returns the bucket's least loaded cores (as many as needed, or all), or `None` if they are not kept.
    pub fn least_loaded_cores(&self, bucket: u32) -> Option<&[RankedCore]> {
        self.least_loaded_cores_by_bucket.get(bucket as usize).map(LeastLoadedCores::ranked_cores)
    }
}

/// Calls `visit_core` for each bucket with the bucket, the core that its connections reach at the server, and the
/// core's load.
fn for_each_reachable_core(
    server: &PoolServer,
    rss: Option<&RssConfig>,
    bucket_count: BucketCount,
    neutral_load: f64,
    mut visit_core: impl FnMut(usize, u16, f64),
) {
    let queues = rss.map(|rss| rss.indirection_table.queue_by_entry());
    match (server.loads.as_ref().and_then(ServerLoads::core_loads), queues) {
        // Each bucket reaches one entry, so this loop gives the result of `reachable_core_or_mean_load` without its
        // divisions.
        (Some(cores), Some(queues)) if queues.len() <= bucket_count.get() as usize => {
            let unreported_core_load = server.mean_load(neutral_load);
            for (bucket, queue) in (0..bucket_count.get() as usize).zip(queues.iter().cycle()) {
                visit_core(bucket, *queue, cores.get(usize::from(*queue)).copied().unwrap_or(unreported_core_load));
            }
        }
        _ => (0..bucket_count.get()).for_each(|bucket| {
            let (core, load) = reachable_core_or_mean_load(server, rss, bucket, bucket_count, neutral_load);
            visit_core(bucket as usize, core, load);
        }),
    }
}

/// Returns the core that connections of a bucket reach at a server of the group with RSS key `rss_key`.
pub fn reachable_core(server: &PoolServer, rss_key: &RssKey, bucket: u32) -> ServerCore {
    let rss = server.rss.as_ref().filter(|rss| rss.key == *rss_key);
    ServerCore { server: server.id, core: rss.map_or(0, |rss| reachable_queue(rss, bucket)) }
}

/// Returns the core of the server that a bucket's connections reach, and the core's load. Without `rss`, the core is
/// unknown, so the server counts as one core with the mean load of its cores.
pub fn reachable_core_or_mean_load(
    server: &PoolServer,
    rss: Option<&RssConfig>,
    bucket: u32,
    bucket_count: BucketCount,
    neutral_load: f64,
) -> (u16, f64) {
    match rss {
        Some(rss) => reachable_core_and_load(server, rss, bucket, bucket_count, neutral_load),
        None => (0, server.mean_load(neutral_load)),
    }
}

/// Returns the core that a bucket's connections reach at a server with RSS settings `rss`, and its load or
/// `neutral_load`. If the server's indirection table is longer than the number of buckets, a bucket covers several
/// entries, whose mean load is returned.
pub fn reachable_core_and_load(
    server: &PoolServer,
    rss: &RssConfig,
    bucket: u32,
    bucket_count: BucketCount,
    neutral_load: f64,
) -> (u16, f64) {
    let indirection_table = &rss.indirection_table;
    let entries_per_bucket = (indirection_table.entry_count() / bucket_count.get() as usize).max(1);
    let entry_cores =
        (0..entries_per_bucket as u32).map(|step| indirection_table.queue_for_hash(bucket + step * bucket_count.get()));
    let load = entry_cores.map(|core| server.core_load(core, neutral_load)).sum::<f64>() / entries_per_bucket as f64;
    (reachable_queue(rss, bucket), load)
}

/// Returns the receive queue that a bucket's connections reach, or the first of several queues.
fn reachable_queue(rss: &RssConfig, bucket: u32) -> u16 {
    rss.indirection_table.queue_for_hash(bucket)
}
