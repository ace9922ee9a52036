//! Construction of the server that a policy requires.

use std::num::NonZeroU16;

use coreward_model::dispatch::{
    ClassBoundedShortestQueue, CoreAllocator, CoreAssignmentMode, FirstEligibleOutConfig,
    JoinBoundedShortestRankedQueue, JoinLightestQueue, JoinShortestQueue, RandomDispatcher, RankArrays, RankedService,
    RequestDispatcher, RoundRobinDispatcher, RssDispatcher,
};
use coreward_model::rss::IndirectionTable;

use super::{
    FifoCores, GroupedFcfsDispatcher, NicServer, PriorityCores, ProcessorSharingCores, QueueDisciplineCores,
    QueueingServer, RebalancedServer, ResponseSink, RingLeaderServer, ServerCores, StealingCores,
};
use crate::rpc::ticks::{Tick, time_units_to_ticks};
use crate::rpc::{CoreSelectionPolicy, JbsrqOptions};

#[derive(Debug, Clone, Copy)]
pub struct ServerSpec<'a> {
    pub policy: &'a CoreSelectionPolicy,
    /// Number of cores, at least 1.
    pub core_count: u16,
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

    /// Visits the server, whose concrete type is known at compile time, and returns the visitor's result.
    fn visit_server(self, server: impl QueueingServer<S> + 'static) -> Self::Output;
}

impl ServerSpec<'_> {
    /// Builds the server for the policy and passes it to `visitor`.
    pub fn build_and_visit<S: ResponseSink, V: ServerVisitor<S>>(&self, visitor: V) -> V::Output {
        let Self { core_count: cores, interface_latency: latency, .. } = *self;
        let build_fifo_cores = || FifoCores::new(cores, latency);
        match self.policy {
            CoreSelectionPolicy::CentralFcfs => {
                visit_nic_server(visitor, JoinShortestQueue::bounded(cores, NonZeroU16::MIN), build_fifo_cores())
            }
            CoreSelectionPolicy::Random => visit_nic_server(visitor, RandomDispatcher::new(cores), build_fifo_cores()),
            CoreSelectionPolicy::RoundRobin => {
                visit_nic_server(visitor, RoundRobinDispatcher::new(cores), build_fifo_cores())
            }
            CoreSelectionPolicy::ShortestQueue => {
                visit_nic_server(visitor, JoinShortestQueue::unbounded(cores), build_fifo_cores())
            }
            CoreSelectionPolicy::LightestQueue => {
                visit_nic_server(visitor, JoinLightestQueue::new(cores), build_fifo_cores())
            }
            CoreSelectionPolicy::BoundedShortestQueue(bound) => {
                visit_nic_server(visitor, JoinShortestQueue::bounded(cores, *bound), build_fifo_cores())
            }
            CoreSelectionPolicy::RankedQueue(options) => self.visit_ranked_queue_server(visitor, options),
            CoreSelectionPolicy::ClassBoundedQueue(options) => visit_nic_server(
                visitor,
                ClassBoundedShortestQueue::new(options.to_class_bounds(cores, self.class_count)),
                build_fifo_cores(),
            ),
            CoreSelectionPolicy::Rss => visit_nic_server(visitor, self.build_rss_dispatcher(), build_fifo_cores()),
            CoreSelectionPolicy::RssRebalancedEvery(regroup_interval) => visitor.visit_server(RebalancedServer::new(
                NicServer::new(self.build_rss_dispatcher(), build_fifo_cores(), 1),
                time_units_to_ticks(*regroup_interval),
            )),
            CoreSelectionPolicy::WorkStealingAtCost(cost) => {
                let stealing_cores = StealingCores::new(cores, time_units_to_ticks(*cost));
                visit_nic_server(
                    visitor,
                    self.build_rss_dispatcher(),
                    QueueDisciplineCores::new(cores, latency, stealing_cores),
                )
            }
            CoreSelectionPolicy::ProcessorSharing => {
                visit_nic_server(visitor, RoundRobinDispatcher::new(1), ProcessorSharingCores::new(cores, latency))
            }
            CoreSelectionPolicy::GroupedFcfs { groups, cores_per_group } => visit_nic_server(
                visitor,
                GroupedFcfsDispatcher::new(groups.get(), cores_per_group.get(), latency),
                build_fifo_cores(),
            ),
        }
    }

    fn build_rss_dispatcher(&self) -> RssDispatcher {
        RssDispatcher::new(self.indirection_table.clone())
    }

    fn visit_ranked_queue_server<S: ResponseSink, V: ServerVisitor<S>>(
        &self,
        visitor: V,
        options: &JbsrqOptions,
    ) -> V::Output {
        let Self { core_count: cores, interface_latency: latency, class_count: classes, .. } = *self;
        let service_count = options.priorities.service_count(classes);
        let priority_cores = PriorityCores::new(
            cores,
            service_count,
            time_units_to_ticks(options.preemption_quantum),
            time_units_to_ticks(options.service_switch_time),
        );
        let JbsrqOptions {
            lower_priority_weight: lambda,
            queue_depth: depth,
            rank_rule: rank,
            eligibility_rule: scheduler,
            ..
        } = *options;
        let ranked_services: Vec<_> = (0..service_count).map(|priority| RankedService { priority, lambda }).collect();
        let scheduler_config = FirstEligibleOutConfig {
            eligibility_rule: scheduler,
            ..FirstEligibleOutConfig::strict_priority(0..service_count)
        };
        let rank_arrays = RankArrays::new(cores, &ranked_services, rank, depth);
        let dispatcher =
            JoinBoundedShortestRankedQueue::with_ranks(rank_arrays, &scheduler_config).expect("1 to 64 services");
        let server =
            NicServer::new(dispatcher, QueueDisciplineCores::new(cores, latency, priority_cores), service_count);
        if options.core_assignment_mode == CoreAssignmentMode::CompleteShare {
            return visitor.visit_server(server);
        }
        let core_allocator =
            CoreAllocator::new(options.core_assignment_mode, options.serving_core_count(cores), options.reserved_cores);
        visitor.visit_server(RingLeaderServer::new(
            server,
            cores,
            core_allocator,
            time_units_to_ticks(options.load_monitor_interval),
            latency,
        ))
    }
}

fn visit_nic_server<S: ResponseSink, V: ServerVisitor<S>, D, C>(visitor: V, dispatcher: D, cores: C) -> V::Output
where
    D: RequestDispatcher + 'static,
    C: ServerCores + 'static,
{
    visitor.visit_server(NicServer::new(dispatcher, cores, 1))
}
