//! RSS with a periodic redistribution of the buckets that costs nothing (policy `rss-rebalanced:T`).

use coreward_model::dispatch::{RssDispatcher, assign_buckets_to_cores};
use coreward_model::rss::IndirectionTable;

use super::{FifoCores, NicServer, QueueingServer, ResponseSink, SimulatedRequest};
use crate::rpc::ticks::Tick;

/// Server that redistributes its RSS buckets over the cores at intervals of T. It equalizes, as far as possible, the
/// expected load of each core. This load is the core's queued work, plus the work that its buckets will bring within T
/// according to their shares so far.
///
/// Queued requests stay at their cores, because the NIC cannot move requests that it has delivered to a core's memory.
/// If they moved, the tail would be shorter than published. For exponential service on 12 cores at 80 % load, with
/// latency 0.275 and T of 50 service times, p99 would be 2.2 times JSQ's. Without moves, it is 2.7 times. Turbo
/// (HPCA'23, Sect. I and VII-E) reports 2.7 for T of 100 us and 3.4 for 1 ms, close to this simulation
/// (docs/figures.md).
#[derive(Debug)]
pub struct RebalancedServer {
    nic_server: NicServer<RssDispatcher, FifoCores>,
    rebalance_interval: Tick,
    next_rebalance_at: Tick,
    /// Total work of the requests that have arrived so far, for each bucket (ticks).
    service_time_by_bucket: Vec<u64>,
}

impl RebalancedServer {
    /// Creates a server that redistributes its buckets every `rebalance_interval` ticks.
    pub fn new(nic_server: NicServer<RssDispatcher, FifoCores>, rebalance_interval: Tick) -> Self {
        let bucket_count = nic_server.dispatcher.indirection_table().entry_count();
        Self {
            nic_server,
            rebalance_interval,
            next_rebalance_at: rebalance_interval,
            service_time_by_bucket: vec![0; bucket_count],
        }
    }

    fn rebalance_buckets(&mut self, now: Tick) {
        let expected_work =
            |work: &u64| (u128::from(*work) * u128::from(self.rebalance_interval) / u128::from(now)) as u64;
        let expected_bucket_work: Vec<u64> = self.service_time_by_bucket.iter().map(expected_work).collect();
        let core_backlogs: Vec<u64> = self.nic_server.cores.core_backlogs(now).collect();
        let table = IndirectionTable::new(&assign_buckets_to_cores(&expected_bucket_work, &core_backlogs))
            .expect("as long as the table was");
        self.nic_server.dispatcher.set_indirection_table(table);
    }
}

impl<S: ResponseSink> QueueingServer<S> for RebalancedServer {
    fn advance(&mut self, end_time: Tick, sink: &mut S) {
        // While no request is outstanding, several redistributions have the same result as one.
        while self.next_rebalance_at <= end_time && self.nic_server.outstanding_request_count > 0 {
            self.nic_server.advance(self.next_rebalance_at, sink);
            self.rebalance_buckets(self.next_rebalance_at);
            self.next_rebalance_at += self.rebalance_interval;
        }
        self.nic_server.advance(end_time, sink);
    }

    fn add_request(&mut self, request: SimulatedRequest) {
        if self.next_rebalance_at <= request.arrived_at {
            let last_rebalance_at = request.arrived_at / self.rebalance_interval * self.rebalance_interval;
            self.rebalance_buckets(last_rebalance_at);
            self.next_rebalance_at = last_rebalance_at + self.rebalance_interval;
        }
        let bucket = request.flow_hash as usize & (self.service_time_by_bucket.len() - 1);
        self.service_time_by_bucket[bucket] += request.service_time;
        QueueingServer::<S>::add_request(&mut self.nic_server, request);
    }

    fn outstanding_request_count(&self) -> u64 {
        self.nic_server.outstanding_request_count
    }

    fn core_busy_times(&self, now: Tick) -> Vec<Tick> {
        QueueingServer::<S>::core_busy_times(&self.nic_server, now)
    }
}
