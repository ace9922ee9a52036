//! Policy `pow2`, which selects the less loaded of two servers drawn by weight (Mitzenmacher, "The power of two
//! choices", 2001). A server's load is the mean of its cores, reported at the same rate as for `crossrss` (CrossRSS,
//! CoNEXT'20, Sect. 3). `pow2:connections` and so on compare another metric.

use super::wrr_schedule::evenly_spread_server_positions;
use super::{
    LoadMetric, PlacementPolicy, ServerPool, TelemetryLevel, hash_key_independent_of_rss, table_without_candidates,
};
use crate::load::load_to_fixed_point;
use crate::placement::{BucketCount, PlacementRule, PlacementTable};
use crate::rss::RssKey;

/// Names of the policy, one for each metric: core loads, connections, packets and bytes.
pub const POLICY_NAMES: [&str; 4] = ["pow2", "pow2:connections", "pow2:packets", "pow2:bytes"];

pub struct PowerOfTwoPolicy {
    hash_key: RssKey,
    metric: LoadMetric,
}

impl PowerOfTwoPolicy {
    pub fn new(metric: LoadMetric, seed: u64) -> Self {
        Self { hash_key: hash_key_independent_of_rss(seed), metric }
    }
}

impl PlacementPolicy for PowerOfTwoPolicy {
    fn name(&self) -> &'static str {
        match self.metric {
            LoadMetric::Cpu => POLICY_NAMES[0],
            LoadMetric::Connections => POLICY_NAMES[1],
            LoadMetric::Packets => POLICY_NAMES[2],
            LoadMetric::Bytes => POLICY_NAMES[3],
        }
    }

    fn telemetry_level(&self) -> TelemetryLevel {
        self.metric.telemetry_level()
    }

    fn reads_traffic(&self) -> bool {
        self.metric != LoadMetric::Cpu
    }

    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable {
        let mut table =
            table_without_candidates(pool, PlacementRule::PowerOfTwo, bucket_count, generation, self.hash_key.clone());
        if self.metric != LoadMetric::Cpu {
            let comparison_shares = self.metric.fair_metric_shares(pool);
            let relative_loads: Vec<f64> = self
                .metric
                .server_loads(pool)
                .iter()
                .zip(comparison_shares)
                .map(|(load, share)| load / share)
                .collect();
            let largest_relative_load = relative_loads.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
            for (member, relative_load) in table.members.iter_mut().zip(relative_loads) {
                member.fixed_point_load = load_to_fixed_point(relative_load / largest_relative_load);
            }
        }
        let shares: Vec<f64> = pool.new_connection_shares().into_iter().map(|(_, share)| share).collect();
        table.members =
            evenly_spread_server_positions(&shares).into_iter().map(|position| table.members[position]).collect();
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{PoolServer, ServerWeight, TrafficRates};

    fn table_members_by_metric(metric: LoadMetric, servers: Vec<PoolServer>) -> Vec<(u16, u32)> {
        let table =
            PowerOfTwoPolicy::new(metric, 1).compute_table(&ServerPool::new(servers, 1), BucketCount::PAPER_VALUE, 1);
        table.members.iter().map(|member| (member.server.get(), member.fixed_point_load)).collect()
    }

    #[test]
    fn each_metric_compares_its_own_load() {
        let build_pool_server = |id: u64, open_connections: u32, packets: f64, bytes: f64| PoolServer {
            open_connection_count: open_connections,
            traffic: Some(TrafficRates { packets_per_second: packets, bytes_per_second: bytes }),
            loads: Some(vec![0.25 * id as f64; 2].into()),
            ..PoolServer::new(id.try_into().unwrap())
        };
        let servers = vec![build_pool_server(1, 30, 100.0, 9.0), build_pool_server(2, 60, 50.0, 18.0)];
        let full_load = load_to_fixed_point(1.0);
        assert_eq!(
            table_members_by_metric(LoadMetric::Connections, servers.clone()),
            [(1, full_load / 2), (2, full_load)]
        );
        assert_eq!(table_members_by_metric(LoadMetric::Packets, servers.clone()), [(1, full_load), (2, full_load / 2)]);
        assert_eq!(table_members_by_metric(LoadMetric::Bytes, servers.clone()), [(1, full_load / 2), (2, full_load)]);
        assert_eq!(table_members_by_metric(LoadMetric::Cpu, servers), [(1, full_load / 4), (2, full_load / 2)]);
    }

    #[test]
    fn heavier_server_has_more_members_and_lower_relative_load() {
        let build_pool_server = |id: u64, weight: u64| PoolServer {
            open_connection_count: 30,
            weight: ServerWeight::new(weight).unwrap(),
            ..PoolServer::new(id.try_into().unwrap())
        };
        let members =
            table_members_by_metric(LoadMetric::Connections, vec![build_pool_server(1, 3), build_pool_server(2, 1)]);
        assert_eq!(members.iter().filter(|(id, _)| *id == 1).count(), 3);
        let load_of_server = |server: u16| members.iter().find(|(id, _)| *id == server).unwrap().1;
        assert_eq!((load_of_server(1), load_of_server(2)), (load_to_fixed_point(1.0 / 3.0), load_to_fixed_point(1.0)));
    }
}
