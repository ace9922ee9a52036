//! `pow2`: the less loaded of two servers drawn by weight. A server's load is the mean of its cores, reported at the
//! same rate as for `crossrss` (CrossRSS, CoNEXT'20, Sect. 3; Mitzenmacher, "The power of two choices", 2001).
//! `pow2:connections` and so on compare another metric.

use super::wrr_schedule::turns;
use super::{LoadMetric, Policy, Pool, TelemetryLevel, base_table, independent_key};
use crate::load::to_fixed_point;
use crate::placement::{BucketCount, PlacementRule, PlacementTable};
use crate::rss::RssKey;

/// Names of the policy with each metric: core loads, connections, packets and bytes.
pub const NAMES: [&str; 4] = ["pow2", "pow2:connections", "pow2:packets", "pow2:bytes"];

pub struct PowerOfTwo {
    key: RssKey,
    metric: LoadMetric,
}

impl PowerOfTwo {
    pub fn new(metric: LoadMetric, seed: u64) -> Self {
        Self { key: independent_key(seed), metric }
    }
}

impl Policy for PowerOfTwo {
    fn name(&self) -> &'static str {
        match self.metric {
            LoadMetric::Cpu => NAMES[0],
            LoadMetric::Connections => NAMES[1],
            LoadMetric::Packets => NAMES[2],
            LoadMetric::Bytes => NAMES[3],
        }
    }

    fn telemetry_level(&self) -> TelemetryLevel {
        self.metric.telemetry_level()
    }

    fn reads_traffic(&self) -> bool {
        self.metric != LoadMetric::Cpu
    }

    fn compute_table(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        let mut table = base_table(pool, PlacementRule::PowerOfTwo, buckets, generation, self.key.clone());
        if self.metric != LoadMetric::Cpu {
            let parts = self.metric.comparison_shares(pool);
            let full: Vec<f64> = self.metric.server_loads(pool).iter().zip(parts).map(|(of, part)| of / part).collect();
            let fullest = full.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
            for (member, full) in table.members.iter_mut().zip(full) {
                member.load = to_fixed_point(full / fullest);
            }
        }
        let shares: Vec<f64> = pool.shares().into_iter().map(|(_, share)| share).collect();
        table.members = turns(&shares).into_iter().map(|position| table.members[position]).collect();
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{PoolServer, TrafficRates, Weight};

    fn members(measure: LoadMetric, servers: Vec<PoolServer>) -> Vec<(u16, u32)> {
        let table = PowerOfTwo::new(measure, 1).compute_table(&Pool::new(servers, 1), BucketCount::PUBLISHED, 1);
        table.members.iter().map(|member| (member.server.get(), member.load)).collect()
    }

    #[test]
    fn each_metric_compares_its_own_load() {
        let server = |id: u64, open_connections: u32, packets: f64, bytes: f64| PoolServer {
            open_connections,
            traffic: Some(TrafficRates { packets, bytes }),
            loads: Some(vec![0.25 * id as f64; 2].into()),
            ..PoolServer::new(id.try_into().unwrap())
        };
        let servers = vec![server(1, 30, 100.0, 9.0), server(2, 60, 50.0, 18.0)];
        let full = to_fixed_point(1.0);
        assert_eq!(members(LoadMetric::Connections, servers.clone()), [(1, full / 2), (2, full)]);
        assert_eq!(members(LoadMetric::Packets, servers.clone()), [(1, full), (2, full / 2)]);
        assert_eq!(members(LoadMetric::Bytes, servers.clone()), [(1, full / 2), (2, full)]);
        assert_eq!(members(LoadMetric::Cpu, servers), [(1, full / 4), (2, full / 2)]);
    }

    #[test]
    fn heavy_server_is_drawn_more_often_and_may_be_fuller() {
        let server = |id: u64, weight: u64| PoolServer {
            open_connections: 30,
            weight: Weight::new(weight).unwrap(),
            ..PoolServer::new(id.try_into().unwrap())
        };
        let members = members(LoadMetric::Connections, vec![server(1, 3), server(2, 1)]);
        assert_eq!(members.iter().filter(|(id, _)| *id == 1).count(), 3);
        let load = |server: u16| members.iter().find(|(id, _)| *id == server).unwrap().1;
        assert_eq!((load(1), load(2)), (to_fixed_point(1.0 / 3.0), to_fixed_point(1.0)));
    }
}
