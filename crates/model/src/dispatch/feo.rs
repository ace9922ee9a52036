//! First-eligible-out scheduler for requests that wait before the cores (RingLeader, NSDI'23, Sect. 3.2 and 4.3).

use std::collections::VecDeque;

/// Maximum number of services in one scheduler. The set of eligible services is a mask of 64 bits, as in RingLeader
/// (Sect. 6).
pub const MAX_SCHEDULED_SERVICES: usize = 64;

/// Rule by which the members of one level, either groups or a group's services, are ranked. The member of least rank is
/// dispatched first. Among equal ranks, the member with the lowest index is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulingMemberRanking {
    /// Strict priority. A member's parameter is its priority, where 0 is the highest.
    StrictPriority,
    /// Members with waiting requests are dispatched in proportion to their weights (start-time fair queueing, one unit
    /// per request). A member's parameter is its weight (at least 1). A member that is not eligible catches up later.
    WeightedShare,
    /// Earliest deadline first. A member's parameter is the time from a request's arrival to its deadline.
    EarliestDeadline,
}

/// Rule by which eligibility affects the choice of the next request in [`FirstEligibleOutScheduler::pop_request`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DispatchEligibilityRule {
    /// Only the eligible services compete, and the one of least rank is selected.
    FirstEligible,
    /// All services compete. If the one of least rank is not eligible, it blocks the others (PIFO, SIGCOMM'16).
    Pifo,
}

/// Rate limit of a service or a group by a token bucket. The member is not dispatched while the bucket is empty, under
/// either [`DispatchEligibilityRule`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DispatchRateLimit {
    /// Time after which one token is added, in the caller's unit of time.
    pub token_interval: u64,
    /// Maximum number of tokens in the bucket, at least 1.
    pub burst_tokens: u32,
}

/// Scheduling parameters of a service or a group within its level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulingParameters {
    /// Priority, weight or relative deadline, depending on the [`SchedulingMemberRanking`].
    pub priority_weight_or_deadline: u32,
    /// Limit on the rate at which the member's requests are dispatched.
    pub rate_limit: Option<DispatchRateLimit>,
}

impl SchedulingParameters {
    /// Returns the parameters of a member without rate limit.
    pub const fn new(priority_weight_or_deadline: u32) -> Self {
        Self { priority_weight_or_deadline, rate_limit: None }
    }
}

/// Configuration of a group, which is a set of services that the scheduler's first level ranks as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulingGroupConfig {
    /// Scheduling parameters by which the group is ranked among the groups.
    pub parameters: SchedulingParameters,
    /// Rule by which the group's services are ranked.
    pub service_ranking: SchedulingMemberRanking,
}

/// Configuration of a service and its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceQueueConfig {
    /// Index of the service's group.
    pub group_index: u8,
    /// Scheduling parameters by which the service is ranked within its group.
    pub parameters: SchedulingParameters,
    /// Priority of the service when the buffer overflows. Requests of the highest number are dropped first.
    pub drop_priority: u8,
}

/// Configuration of a first-eligible-out scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstEligibleOutConfig {
    /// Rule by which the groups are ranked.
    pub group_ranking: SchedulingMemberRanking,
    /// Groups of services (1 to [`MAX_SCHEDULED_SERVICES`]).
    pub groups: Vec<SchedulingGroupConfig>,
    /// Services and their queues (1 to [`MAX_SCHEDULED_SERVICES`]).
    pub queues: Vec<ServiceQueueConfig>,
    /// Rule by which eligibility affects the choice of the next request.
    pub eligibility_rule: DispatchEligibilityRule,
    /// Maximum number of waiting requests, at least 1.
    pub max_waiting_requests: usize,
}

impl FirstEligibleOutConfig {
    /// Returns a configuration with one group of services in strict priority and without a limit on waiting requests.
    /// `priorities` has the priority of each service.
    pub fn strict_priority(priorities: impl IntoIterator<Item = u8>) -> Self {
        let parameters_for_priority = |priority: u8| SchedulingParameters::new(priority.into());
        let queue = |priority| ServiceQueueConfig {
            group_index: 0,
            parameters: parameters_for_priority(priority),
            drop_priority: priority,
        };
        Self {
            group_ranking: SchedulingMemberRanking::StrictPriority,
            groups: vec![SchedulingGroupConfig {
                parameters: SchedulingParameters::new(0),
                service_ranking: SchedulingMemberRanking::StrictPriority,
            }],
            queues: priorities.into_iter().map(queue).collect(),
            eligibility_rule: DispatchEligibilityRule::FirstEligible,
            max_waiting_requests: usize::MAX,
        }
    }

    /// Checks the numbers of services and groups, and the limit on waiting requests.
    fn check_sizes(&self) -> Result<(), FirstEligibleOutConfigError> {
        if !(1..=MAX_SCHEDULED_SERVICES).contains(&self.queues.len()) {
            return Err(FirstEligibleOutConfigError::InvalidServiceCount(self.queues.len()));
        }
        if !(1..=MAX_SCHEDULED_SERVICES).contains(&self.groups.len()) {
            return Err(FirstEligibleOutConfigError::InvalidGroupCount(self.groups.len()));
        }
        if self.max_waiting_requests == 0 {
            return Err(FirstEligibleOutConfigError::ZeroCapacity);
        }
        Ok(())
    }
}

/// Error returned for an invalid configuration of a first-eligible-out scheduler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FirstEligibleOutConfigError {
    /// The number of services is 0 or above [`MAX_SCHEDULED_SERVICES`].
    #[error("{0} services: expected 1 to {MAX_SCHEDULED_SERVICES}")]
    InvalidServiceCount(usize),
    /// The number of groups is 0 or above [`MAX_SCHEDULED_SERVICES`].
    #[error("{0} groups: expected 1 to {MAX_SCHEDULED_SERVICES}")]
    InvalidGroupCount(usize),
    /// A service refers to a group that does not exist.
    #[error("service {service}: no group {group}")]
    UnknownGroup {
        /// Index of the service.
        service: usize,
        /// Index of the missing group.
        group: u8,
    },
    /// A weight is 0 or above [`MAX_SHARE_WEIGHT`].
    #[error("weight {0}: expected 1 to {MAX_SHARE_WEIGHT}")]
    WeightOutOfRange(u32),
    /// A token bucket has no room for a token.
    #[error("burst 0: expected 1 or more")]
    ZeroBurst,
    /// The limit on waiting requests is 0.
    #[error("capacity 0: expected 1 or more")]
    ZeroCapacity,
}

/// Maximum weight of a member under [`SchedulingMemberRanking::WeightedShare`].
pub const MAX_SHARE_WEIGHT: u32 = 1 << 20;

/// Scheduler with a FIFO queue for each service, which chooses the next request among the heads of the queues.
///
/// A dequeue first filters the services by eligibility, then selects the one of least rank. The groups are ranked
/// first, then the services of the selected group. `T` is the handle of a request.
#[derive(Debug, Clone)]
pub struct FirstEligibleOutScheduler<T> {
    group_ranking: SchedulingMemberRanking,
    eligibility_rule: DispatchEligibilityRule,
    max_waiting_requests: usize,
    waiting_request_count: usize,
    /// Whether dispatches change no rank and take no token.
    is_dispatch_stateless: bool,
    /// Bit mask of the services with waiting requests.
    backlogged_service_mask: u64,
    /// Virtual time of the fair queueing between groups, which is the start tag of the group dispatched last.
    virtual_time: u64,
    groups: Vec<SchedulingGroup>,
    queues: Vec<ServiceQueue<T>>,
}

#[derive(Debug, Clone)]
struct SchedulingGroup {
    state: SchedulingState,
    service_ranking: SchedulingMemberRanking,
    virtual_time: u64,
    /// Bit mask of the group's services.
    service_mask: u64,
}

#[derive(Debug, Clone)]
struct ServiceQueue<T> {
    state: SchedulingState,
    group_index: u8,
    drop_priority: u8,
    /// Arrival time and handle of each waiting request, in order of arrival.
    arrival_times_and_requests: VecDeque<(u64, T)>,
}

/// Scheduling state of a service or a group.
#[derive(Debug, Clone)]
struct SchedulingState {
    parameters: SchedulingParameters,
    /// Start tag of the member's next request (virtual time).
    start_tag: u64,
    /// Time at which the member's token bucket will be full if no request is dispatched.
    token_bucket_full_at: u64,
}

impl SchedulingState {
    fn new(
        parameters: SchedulingParameters,
        ranking: SchedulingMemberRanking,
    ) -> Result<Self, FirstEligibleOutConfigError> {
        if ranking == SchedulingMemberRanking::WeightedShare
            && !(1..=MAX_SHARE_WEIGHT).contains(&parameters.priority_weight_or_deadline)
        {
            return Err(FirstEligibleOutConfigError::WeightOutOfRange(parameters.priority_weight_or_deadline));
        }
        if parameters.rate_limit.is_some_and(|rate_limit| rate_limit.burst_tokens == 0) {
            return Err(FirstEligibleOutConfigError::ZeroBurst);
        }
        Ok(Self { parameters, start_tag: 0, token_bucket_full_at: 0 })
    }

    /// Returns the earliest time at which the member's token bucket has a token, or 0 without a rate limit.
    #[inline]
    fn next_token_at(&self) -> u64 {
        self.parameters.rate_limit.map_or(0, |rate_limit| {
            self.token_bucket_full_at
                .saturating_sub(rate_limit.token_interval.saturating_mul(u64::from(rate_limit.burst_tokens) - 1))
        })
    }

    #[inline]
    fn compute_rank(&self, ranking: SchedulingMemberRanking, arrival_time: u64) -> u64 {
        match ranking {
            SchedulingMemberRanking::StrictPriority => u64::from(self.parameters.priority_weight_or_deadline),
            SchedulingMemberRanking::WeightedShare => self.start_tag,
            SchedulingMemberRanking::EarliestDeadline => {
                arrival_time.saturating_add(u64::from(self.parameters.priority_weight_or_deadline))
            }
        }
    }

    /// Takes a token, and advances the member's start tag. Returns the new virtual time of the member's level.
    #[inline]
    fn record_dispatch(&mut self, now: u64, ranking: SchedulingMemberRanking) -> u64 {
        if let Some(rate_limit) = self.parameters.rate_limit {
            self.token_bucket_full_at = self.token_bucket_full_at.max(now).saturating_add(rate_limit.token_interval);
        }
        let dispatched_start_tag = self.start_tag;
        if ranking == SchedulingMemberRanking::WeightedShare {
            self.start_tag += u64::from(MAX_SHARE_WEIGHT / self.parameters.priority_weight_or_deadline);
        }
        dispatched_start_tag
    }
}

impl<T> FirstEligibleOutScheduler<T> {
    /// Returns an empty scheduler. Fails with a [`FirstEligibleOutConfigError`] if the configuration is out of range.
    pub fn new(config: &FirstEligibleOutConfig) -> Result<Self, FirstEligibleOutConfigError> {
        config.check_sizes()?;
        let mut groups = Vec::new();
        for group in &config.groups {
            let state = SchedulingState::new(group.parameters, config.group_ranking)?;
            groups.push(SchedulingGroup {
                state,
                service_ranking: group.service_ranking,
                virtual_time: 0,
                service_mask: 0,
            });
        }
        let mut queues = Vec::new();
        for (service, &ServiceQueueConfig { group_index: group, parameters, drop_priority: priority }) in
            config.queues.iter().enumerate()
        {
            let parent_group = groups.get_mut(usize::from(group));
            let parent = parent_group.ok_or(FirstEligibleOutConfigError::UnknownGroup { service, group })?;
            parent.service_mask |= 1 << service;
            let state = SchedulingState::new(parameters, parent.service_ranking)?;
            queues.push(ServiceQueue {
                state,
                group_index: group,
                drop_priority: priority,
                arrival_times_and_requests: VecDeque::new(),
            });
        }
        let &FirstEligibleOutConfig {
            group_ranking, eligibility_rule: selection, max_waiting_requests: capacity, ..
        } = config;
        let mut rankings = groups.iter().map(|group| group.service_ranking).chain([group_ranking]);
        let mut states = groups.iter().map(|group| &group.state).chain(queues.iter().map(|queue| &queue.state));
        let is_stateless = rankings.all(|ranking| ranking != SchedulingMemberRanking::WeightedShare)
            && states.all(|state| state.parameters.rate_limit.is_none());
        Ok(Self {
            group_ranking,
            eligibility_rule: selection,
            max_waiting_requests: capacity,
            waiting_request_count: 0,
            is_dispatch_stateless: is_stateless,
            backlogged_service_mask: 0,
            virtual_time: 0,
            groups,
            queues,
        })
    }

    /// Returns the number of waiting requests of `service`.
    #[inline]
    pub fn waiting_request_count(&self, service: u8) -> usize {
        self.queues[usize::from(service)].arrival_times_and_requests.len()
    }

    /// Returns the arrival time of the oldest waiting request of `service`, if any waits.
    pub fn oldest_arrival_time(&self, service: u8) -> Option<u64> {
        self.queues[usize::from(service)].arrival_times_and_requests.front().map(|(arrival_time, _)| *arrival_time)
    }

    /// Returns whether a request of an eligible service may bypass the queue, because a push and a pop would change no
    /// state.
    #[inline]
    pub fn can_bypass_queue(&self) -> bool {
        self.waiting_request_count == 0 && self.is_dispatch_stateless
    }

    /// Appends a request to the queue of `service`. `now` must not decrease from call to call.
    ///
    /// If the buffer is full, returns the dropped request with its service. This is the youngest request of the lowest
    /// priority, the new request included. Among services of equal priority, the longest queue loses a request.
    #[inline]
    pub fn push_request(&mut self, now: u64, service: u8, request: T) -> Option<(u8, T)> {
        let mut dropped_request = None;
        if self.waiting_request_count == self.max_waiting_requests {
            let victim_service = self.overflow_victim_service(service);
            if victim_service == service {
                return Some((service, request));
            }
            dropped_request = self.queues[usize::from(victim_service)]
                .arrival_times_and_requests
                .pop_back()
                .map(|(_, youngest_request)| (victim_service, youngest_request));
            self.record_removed_request(victim_service);
        }
        self.append_to_queue(now, service, request);
        dropped_request
    }

    /// Removes and returns the next request with its service, or `None` if no request may be dispatched now. Bit s of
    /// `eligible_service_mask` is set if a core would take a request of service s.
    #[inline]
    pub fn pop_request(&mut self, now: u64, eligible_service_mask: u64) -> Option<(u8, T)> {
        let service = self.select_service(now, eligible_service_mask)?;
        let queue = &mut self.queues[usize::from(service)];
        let group = &mut self.groups[usize::from(queue.group_index)];
        self.virtual_time = group.state.record_dispatch(now, self.group_ranking);
        group.virtual_time = queue.state.record_dispatch(now, group.service_ranking);
        let (_, request) = queue.arrival_times_and_requests.pop_front()?;
        self.record_removed_request(service);
        Some((service, request))
    }

    /// Returns the earliest time at which the rate limits permit the dispatch of a waiting request, or `None` if none
    /// waits.
    pub fn next_token_time(&self) -> Option<u64> {
        let next_token_at = |service| {
            let service_queue = &self.queues[usize::from(service)];
            service_queue
                .state
                .next_token_at()
                .max(self.groups[usize::from(service_queue.group_index)].state.next_token_at())
        };
        set_bit_indices(self.backlogged_service_mask).map(next_token_at).min()
    }

    fn append_to_queue(&mut self, now: u64, service: u8, request: T) {
        let queue = &mut self.queues[usize::from(service)];
        if queue.arrival_times_and_requests.is_empty() {
            let group = &mut self.groups[usize::from(queue.group_index)];
            if self.backlogged_service_mask & group.service_mask == 0 {
                group.state.start_tag = group.state.start_tag.max(self.virtual_time);
            }
            queue.state.start_tag = queue.state.start_tag.max(group.virtual_time);
            self.backlogged_service_mask |= 1 << service;
        }
        queue.arrival_times_and_requests.push_back((now, request));
        self.waiting_request_count += 1;
    }

    fn record_removed_request(&mut self, service: u8) {
        self.waiting_request_count -= 1;
        if self.queues[usize::from(service)].arrival_times_and_requests.is_empty() {
            self.backlogged_service_mask &= !(1 << service);
        }
    }

    /// Returns the service that must drop a request when a request of service `arriving_service` arrives at a full
    /// buffer.
    fn overflow_victim_service(&self, arriving_service: u8) -> u8 {
        let drop_order_key = |service: u8| {
            let arriving_request_count = usize::from(service == arriving_service);
            (
                self.queues[usize::from(service)].drop_priority,
                self.waiting_request_count(service) + arriving_request_count,
                arriving_request_count,
            )
        };
        set_bit_indices(self.backlogged_service_mask | 1 << arriving_service)
            .max_by_key(|service| drop_order_key(*service))
            .unwrap_or(arriving_service)
    }

    #[inline]
    fn select_service(&self, now: u64, eligible_service_mask: u64) -> Option<u8> {
        let considered_service_mask = match self.eligibility_rule {
            DispatchEligibilityRule::FirstEligible => self.backlogged_service_mask & eligible_service_mask,
            DispatchEligibilityRule::Pifo => self.backlogged_service_mask,
        };
        let mut best_candidate: Option<(u64, u8)> = None;
        for group in self.groups.iter().filter(|group| group.state.next_token_at() <= now) {
            let Some((arrival_time, _, service)) = self.next_service_in_group(group, now, considered_service_mask)
            else {
                continue;
            };
            let rank = group.state.compute_rank(self.group_ranking, arrival_time);
            if best_candidate.is_none_or(|(least_rank, _)| rank < least_rank) {
                best_candidate = Some((rank, service));
            }
        }
        let (_, service) = best_candidate?;
        (eligible_service_mask >> service & 1 == 1).then_some(service)
    }

    /// Returns the earliest arrival time in a group, and the rank and the index of the group's next service.
    #[inline]
    fn next_service_in_group(
        &self,
        group: &SchedulingGroup,
        now: u64,
        considered_service_mask: u64,
    ) -> Option<(u64, u64, u8)> {
        let mut best_candidate: Option<(u64, u64, u8)> = None;
        for service in set_bit_indices(considered_service_mask & group.service_mask) {
            let queue = &self.queues[usize::from(service)];
            if queue.state.next_token_at() > now {
                continue;
            }
            let Some((arrival_time, _)) = queue.arrival_times_and_requests.front() else { continue };
            let rank = queue.state.compute_rank(group.service_ranking, *arrival_time);
            best_candidate = Some(match best_candidate {
                Some((earliest_arrival, least_rank, other_service)) if least_rank <= rank => {
                    (earliest_arrival.min(*arrival_time), least_rank, other_service)
                }
                Some((earliest_arrival, ..)) => (earliest_arrival.min(*arrival_time), rank, service),
                None => (*arrival_time, rank, service),
            });
        }
        best_candidate
    }
}

/// Returns the indices of the bits that are set in `mask`, in ascending order.
#[inline]
fn set_bit_indices(mut mask: u64) -> impl Iterator<Item = u8> {
    std::iter::from_fn(move || {
        let index = (mask != 0).then(|| mask.trailing_zeros() as u8)?;
        mask &= mask - 1;
        Some(index)
    })
}

#[cfg(test)]
mod tests;
