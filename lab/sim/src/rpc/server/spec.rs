//! Construction of the server that a policy requires.

use std::num::NonZeroU16;

use coreward_model::dispatch::{
    ClassBoundedShortestQueue, CoreAllocator, CoreAssignmentMode, Dispatcher, FirstEligibleOutConfig,
    JoinBoundedShortestRankedQueue, JoinLightestQueue, JoinShortestQueue, RandomDispatcher, RankArrays, RankedService,
    RoundRobinDispatcher, RssDispatcher,
};
use coreward_model::rss::IndirectionTable;

use super::{
    Cores, DisciplineCores, FifoCores, GroupedFcfsDispatcher, NicServer, PriorityCores, ProcessorSharing,
    RebalancedServer, ResponseSink, RingLeaderServer, Server, StealingCores,
};
use crate::rpc::ticks::{Tick, to_ticks};
use crate::rpc::{JbsrqOptions, Policy};

#[derive(Debug, Clone, Copy)]
pub struct ServerSpec<'a> {
    pub policy: &'a Policy,
    /// Number of cores, at least 1.
    pub cores: u16,
    /// Number of classes in the distribution of service times.
    pub class_count: u8,
    /// One-way latency between NIC and cores.
    pub interface_latency: Tick,
    /// Indirection table that policies with RSS use.
    pub indirection_table: &'a IndirectionTable,
}

/// Visitor that is generic over the server's type, so that the compiled code has no dynamic calls.
pub trait ServerVisitor<S: ResponseSink> {
    type Output;

    /// Uses the server, whose concrete type is known at compile time.
    fn visit(self, server: impl Server<S> + 'static) -> Self::Output;
}

impl ServerSpec<'_> {
    /// Builds the server for the policy and passes it to `visitor`.
    pub fn build_and_visit<S: ResponseSink, V: ServerVisitor<S>>(&self, visitor: V) -> V::Output {
        let Self { cores, interface_latency: latency, .. } = *self;
        let fifo_cores = || FifoCores::new(cores, latency);
        match self.policy {
            Policy::CentralFcfs => {
                visit_nic_server(visitor, JoinShortestQueue::bounded(cores, NonZeroU16::MIN), fifo_cores())
            }
            Policy::Random => visit_nic_server(visitor, RandomDispatcher::new(cores), fifo_cores()),
            Policy::RoundRobin => visit_nic_server(visitor, RoundRobinDispatcher::new(cores), fifo_cores()),
            Policy::ShortestQueue => visit_nic_server(visitor, JoinShortestQueue::unbounded(cores), fifo_cores()),
            Policy::LightestQueue => visit_nic_server(visitor, JoinLightestQueue::new(cores), fifo_cores()),
            Policy::BoundedShortestQueue(bound) => {
                visit_nic_server(visitor, JoinShortestQueue::bounded(cores, *bound), fifo_cores())
            }
            Policy::RankedQueue(options) => self.build_ranked_queue_server(visitor, options),
            Policy::ClassBoundedQueue(options) => visit_nic_server(
                visitor,
                ClassBoundedShortestQueue::new(options.class_bounds(cores, self.class_count)),
                fifo_cores(),
            ),
            Policy::Rss => visit_nic_server(visitor, self.rss_dispatcher(), fifo_cores()),
            Policy::RssRebalancedEvery(regroup_interval) => visitor.visit(RebalancedServer::new(
                NicServer::new(self.rss_dispatcher(), fifo_cores(), 1),
                to_ticks(*regroup_interval),
            )),
            Policy::WorkStealingAtCost(cost) => {
                let stealing_cores = StealingCores::new(cores, to_ticks(*cost));
                visit_nic_server(visitor, self.rss_dispatcher(), DisciplineCores::new(cores, latency, stealing_cores))
            }
            Policy::ProcessorSharing => {
                visit_nic_server(visitor, RoundRobinDispatcher::new(1), ProcessorSharing::new(cores, latency))
            }
            Policy::GroupedFcfs { groups, cores_per_group } => visit_nic_server(
                visitor,
                GroupedFcfsDispatcher::new(groups.get(), cores_per_group.get(), latency),
                fifo_cores(),
            ),
        }
    }

    fn rss_dispatcher(&self) -> RssDispatcher {
        RssDispatcher::new(self.indirection_table.clone())
    }

    fn build_ranked_queue_server<S: ResponseSink, V: ServerVisitor<S>>(
        &self,
        visitor: V,
        options: &JbsrqOptions,
    ) -> V::Output {
        let Self { cores, interface_latency: latency, class_count: classes, .. } = *self;
        let service_count = options.priorities.service_count(classes);
        let priority_cores =
            PriorityCores::new(cores, service_count, to_ticks(options.quantum), to_ticks(options.switch_cost));
        let JbsrqOptions { lambda, queue_depth: depth, rank_rule: rank, scheduler, .. } = *options;
        let ranked_services: Vec<_> = (0..service_count).map(|priority| RankedService { priority, lambda }).collect();
        let scheduler_config = FirstEligibleOutConfig {
            selection: scheduler,
            ..FirstEligibleOutConfig::strict_priority(0..service_count)
        };
        let rank_arrays = RankArrays::new(cores, &ranked_services, rank, depth);
        let dispatcher =
            JoinBoundedShortestRankedQueue::with_ranks(rank_arrays, &scheduler_config).expect("1 to 64 services");
        let server = NicServer::new(dispatcher, DisciplineCores::new(cores, latency, priority_cores), service_count);
        if options.core_assignment_mode == CoreAssignmentMode::CompleteShare {
            return visitor.visit(server);
        }
        let core_allocator =
            CoreAllocator::new(options.core_assignment_mode, options.worker_count(cores), options.reserved_cores);
        visitor.visit(RingLeaderServer::new(server, cores, core_allocator, to_ticks(options.monitor_interval), latency))
    }
}

fn visit_nic_server<S: ResponseSink, V: ServerVisitor<S>, D, C>(visitor: V, dispatcher: D, cores: C) -> V::Output
where
    D: Dispatcher + 'static,
    C: Cores + 'static,
{
    visitor.visit(NicServer::new(dispatcher, cores, 1))
}
