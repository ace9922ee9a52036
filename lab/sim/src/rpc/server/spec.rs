//! Server of a policy.

use std::num::NonZeroU16;

use coreward_model::dispatch::{
    BucketHash, ClassBoundedShortestQueue, CoreAllocation, CoreAssignment, Dispatcher, FeoConfig,
    JoinBoundedShortestRankedQueue, JoinLightestQueue, JoinShortestQueue, RandomCore, RankArrays, RankedService,
    RoundRobinCore,
};
use coreward_model::rss::IndirectionTable;

use super::{
    Cores, DisciplineCores, FifoCores, GroupedFcfsDispatcher, NicServer, PriorityCores, ProcessorSharing,
    RebalancedServer, RingLeaderServer, Server, Sink, StealingCores,
};
use crate::rpc::ticks::{Tick, to_ticks};
use crate::rpc::{JbsrqOptions, Policy};

#[derive(Debug, Clone, Copy)]
pub struct ServerSpec<'a> {
    pub policy: &'a Policy,
    /// Number of cores, at least 1.
    pub cores: u16,
    /// Number of classes of service times.
    pub classes: u8,
    /// One-way latency between NIC and cores.
    pub latency: Tick,
    /// Indirection table for policies that use RSS.
    pub indirection_table: &'a IndirectionTable,
}

/// Generic visitor of a server: each server type gets specialized code without dynamic calls.
pub trait ServerVisitor<S: Sink> {
    type Output;

    /// Uses the server, whose type is known at compile time.
    fn visit(self, server: impl Server<S> + 'static) -> Self::Output;
}

impl ServerSpec<'_> {
    /// Builds the server and passes it to `visitor`.
    pub fn build<S: Sink, V: ServerVisitor<S>>(&self, visitor: V) -> V::Output {
        let Self { cores, latency, .. } = *self;
        let fifo = || FifoCores::new(cores, latency);
        match self.policy {
            Policy::CentralFcfs => {
                visit_nic_server(visitor, JoinShortestQueue::bounded(cores, NonZeroU16::MIN), fifo())
            }
            Policy::Random => visit_nic_server(visitor, RandomCore::new(cores), fifo()),
            Policy::RoundRobin => visit_nic_server(visitor, RoundRobinCore::new(cores), fifo()),
            Policy::ShortestQueue => visit_nic_server(visitor, JoinShortestQueue::unbounded(cores), fifo()),
            Policy::LightestQueue => visit_nic_server(visitor, JoinLightestQueue::new(cores), fifo()),
            Policy::BoundedShortestQueue(bound) => {
                visit_nic_server(visitor, JoinShortestQueue::bounded(cores, *bound), fifo())
            }
            Policy::RankedQueue(options) => self.build_ranked(visitor, options),
            Policy::ClassBoundedQueue(options) => {
                visit_nic_server(visitor, ClassBoundedShortestQueue::new(options.bounds(cores, self.classes)), fifo())
            }
            Policy::Rss => visit_nic_server(visitor, self.bucket_hash(), fifo()),
            Policy::RssRebalanced(every) => {
                visitor.visit(RebalancedServer::new(NicServer::new(self.bucket_hash(), fifo(), 1), to_ticks(*every)))
            }
            Policy::WorkStealing(cost) => {
                let stealing = StealingCores::new(cores, to_ticks(*cost));
                visit_nic_server(visitor, self.bucket_hash(), DisciplineCores::new(cores, latency, stealing))
            }
            Policy::ProcessorSharing => {
                visit_nic_server(visitor, RoundRobinCore::new(1), ProcessorSharing::new(cores, latency))
            }
            Policy::GroupedFcfs { groups, cores_each } => {
                visit_nic_server(visitor, GroupedFcfsDispatcher::new(groups.get(), cores_each.get(), latency), fifo())
            }
        }
    }

    fn bucket_hash(&self) -> BucketHash {
        BucketHash::new(self.indirection_table.clone())
    }

    fn build_ranked<S: Sink, V: ServerVisitor<S>>(&self, visitor: V, options: &JbsrqOptions) -> V::Output {
        let Self { cores, latency, classes, .. } = *self;
        let services = options.priorities.service_count(classes);
        let behind = PriorityCores::new(cores, services, to_ticks(options.quantum), to_ticks(options.switch_cost));
        let JbsrqOptions { lambda, depth, rank, scheduler, .. } = *options;
        let ranked: Vec<_> = (0..services).map(|priority| RankedService { priority, lambda }).collect();
        let feo = FeoConfig { selection: scheduler, ..FeoConfig::strict_priority(0..services) };
        let ranks = RankArrays::new(cores, &ranked, rank, depth);
        let dispatcher = JoinBoundedShortestRankedQueue::with_ranks(ranks, &feo).expect("1 to 64 services");
        let server = NicServer::new(dispatcher, DisciplineCores::new(cores, latency, behind), services);
        if options.assignment == CoreAssignment::CompleteShare {
            return visitor.visit(server);
        }
        let allocation = CoreAllocation::new(options.assignment, options.worker_count(cores), options.reserved);
        visitor.visit(RingLeaderServer::new(server, cores, allocation, to_ticks(options.interval), latency))
    }
}

fn visit_nic_server<S: Sink, V: ServerVisitor<S>, D, C>(visitor: V, dispatcher: D, cores: C) -> V::Output
where
    D: Dispatcher + 'static,
    C: Cores + 'static,
{
    visitor.visit(NicServer::new(dispatcher, cores, 1))
}
