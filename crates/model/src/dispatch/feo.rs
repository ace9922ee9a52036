//! First-eligible-out scheduler of requests that wait before the cores (RingLeader, NSDI'23, Sect. 3.2 and 4.3).

use std::collections::VecDeque;

/// Maximum number of services of one scheduler: eligibility is a mask of 64 bits, as in RingLeader (Sect. 6).
pub const MAX_SERVICES: usize = 64;

/// Rule by which the members of one level are ranked. The member of least rank is dispatched first; of equal ranks, the
/// member with the lowest index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ranking {
    /// A member's parameter is its priority; 0 is the highest.
    StrictPriority,
    /// A member's parameter is its weight, from 1. Members with waiting requests are dispatched in proportion to their
    /// weights (start-time fair queueing, one unit per request). A member that is not eligible catches up later.
    WeightedShare,
    /// A member's parameter is the time from a request's arrival to its deadline.
    EarliestDeadline,
}

/// Services among which [`FirstEligibleOut::pop`] selects the next request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    /// The eligible services; the one of least rank is selected.
    FirstEligible,
    /// All services. The one of least rank blocks the others if it is not eligible (PIFO, SIGCOMM'16).
    Pifo,
}

/// Token bucket of a service or a group, which is not dispatched while it is empty, under either [`Selection`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// Time in which one token is added, in the caller's unit of time.
    pub interval: u64,
    /// Maximum number of tokens in the bucket, at least 1.
    pub burst: u32,
}

/// Scheduling parameters of a service or a group within its level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulingParameters {
    /// Priority, weight or relative deadline, depending on the [`Ranking`].
    pub parameter: u32,
    /// Limit of the rate at which the member's requests are dispatched.
    pub limit: Option<RateLimit>,
}

impl SchedulingParameters {
    /// Returns the parameters of a member without rate limit.
    pub const fn new(parameter: u32) -> Self {
        Self { parameter, limit: None }
    }
}

/// Configuration of a group: a set of services that the first level ranks as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Scheduling parameters of the group among the groups.
    pub member: SchedulingParameters,
    /// Rule by which the group's services are ranked.
    pub ranking: Ranking,
}

/// Configuration of a service and its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// Index of the service's group.
    pub group: u8,
    /// Scheduling parameters of the service within its group.
    pub member: SchedulingParameters,
    /// Priority of the service when the buffer overflows: requests of the highest number are dropped first.
    pub priority: u8,
}

/// Configuration of a first-eligible-out scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeoConfig {
    /// Rule by which the groups are ranked.
    pub ranking: Ranking,
    /// Groups of services, from 1 to [`MAX_SERVICES`].
    pub groups: Vec<GroupConfig>,
    /// Services and their queues, from 1 to [`MAX_SERVICES`].
    pub queues: Vec<QueueConfig>,
    /// Services among which the next request is selected.
    pub selection: Selection,
    /// Maximum number of waiting requests, at least 1.
    pub capacity: usize,
}

impl FeoConfig {
    /// Returns a configuration of one level in strict priority, without a limit of waiting requests. `priorities` has
    /// the priority of each service.
    pub fn strict_priority(priorities: impl IntoIterator<Item = u8>) -> Self {
        let member = |priority: u8| SchedulingParameters::new(priority.into());
        let queue = |priority| QueueConfig { group: 0, member: member(priority), priority };
        Self {
            ranking: Ranking::StrictPriority,
            groups: vec![GroupConfig { member: SchedulingParameters::new(0), ranking: Ranking::StrictPriority }],
            queues: priorities.into_iter().map(queue).collect(),
            selection: Selection::FirstEligible,
            capacity: usize::MAX,
        }
    }
}

/// Error: a configuration that no scheduler can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FeoConfigError {
    /// Number of services that is 0 or above [`MAX_SERVICES`].
    #[error("{0} services: expected 1 to {MAX_SERVICES}")]
    ServiceCount(usize),
    /// Number of groups that is 0 or above [`MAX_SERVICES`].
    #[error("{0} groups: expected 1 to {MAX_SERVICES}")]
    GroupCount(usize),
    /// A service refers to a group that does not exist.
    #[error("service {service}: no group {group}")]
    UnknownGroup {
        /// Index of the service.
        service: usize,
        /// Index of the group to which it refers.
        group: u8,
    },
    /// A weight that is 0 or above [`MAX_WEIGHT`].
    #[error("weight {0}: expected 1 to {MAX_WEIGHT}")]
    WeightOutOfRange(u32),
    /// A token bucket with room for no token.
    #[error("burst 0: expected 1 or more")]
    ZeroBurst,
    /// A limit of 0 waiting requests.
    #[error("capacity 0: expected 1 or more")]
    ZeroCapacity,
}

/// Maximum weight of a member under [`Ranking::WeightedShare`].
pub const MAX_WEIGHT: u32 = 1 << 20;

/// Per-service FIFO queues, and the choice of the next request among their heads.
///
/// A dequeue has two steps: filter the services by eligibility, then select the one of least rank. Ranks have two
/// levels: the groups are ranked first, then the services of the selected group. `T` is the handle of a request.
#[derive(Debug, Clone)]
pub struct FirstEligibleOut<T> {
    ranking: Ranking,
    selection: Selection,
    capacity: usize,
    waiting_count: usize,
    /// Whether dispatching a request changes no rank and takes no token.
    is_stateless: bool,
    /// Bit mask of the services with waiting requests.
    backlogged_services: u64,
    /// Start tag of the group that was dispatched last.
    virtual_time: u64,
    groups: Vec<Group>,
    queues: Vec<Queue<T>>,
}

#[derive(Debug, Clone)]
struct Group {
    state: SchedulingState,
    ranking: Ranking,
    virtual_time: u64,
    /// Bit mask of the group's services.
    member_mask: u64,
}

#[derive(Debug, Clone)]
struct Queue<T> {
    state: SchedulingState,
    group: u8,
    priority: u8,
    /// Waiting requests in order of arrival: time of arrival, and handle.
    requests: VecDeque<(u64, T)>,
}

/// Scheduling state of a service or a group.
#[derive(Debug, Clone)]
struct SchedulingState {
    member: SchedulingParameters,
    /// Virtual time at which the member's next request starts.
    start_tag: u64,
    /// Time at which the member's token bucket would be full again.
    full_at: u64,
}

impl SchedulingState {
    fn new(member: SchedulingParameters, ranking: Ranking) -> Result<Self, FeoConfigError> {
        if ranking == Ranking::WeightedShare && !(1..=MAX_WEIGHT).contains(&member.parameter) {
            return Err(FeoConfigError::WeightOutOfRange(member.parameter));
        }
        if member.limit.is_some_and(|limit| limit.burst == 0) {
            return Err(FeoConfigError::ZeroBurst);
        }
        Ok(Self { member, start_tag: 0, full_at: 0 })
    }

    /// Returns the earliest time at which the member's token bucket has a token; 0 without a rate limit.
    #[inline]
    fn next_token_at(&self) -> u64 {
        self.member
            .limit
            .map_or(0, |limit| self.full_at.saturating_sub(limit.interval.saturating_mul(u64::from(limit.burst) - 1)))
    }

    #[inline]
    fn rank(&self, ranking: Ranking, arrived: u64) -> u64 {
        match ranking {
            Ranking::StrictPriority => u64::from(self.member.parameter),
            Ranking::WeightedShare => self.start_tag,
            Ranking::EarliestDeadline => arrived.saturating_add(u64::from(self.member.parameter)),
        }
    }

    /// Takes a token, and advances the member's start tag. Returns the new virtual time of the level.
    #[inline]
    fn record_dispatch(&mut self, now: u64, ranking: Ranking) -> u64 {
        if let Some(limit) = self.member.limit {
            self.full_at = self.full_at.max(now).saturating_add(limit.interval);
        }
        let started = self.start_tag;
        if ranking == Ranking::WeightedShare {
            self.start_tag += u64::from(MAX_WEIGHT / self.member.parameter);
        }
        started
    }
}

impl<T> FirstEligibleOut<T> {
    /// Returns an empty scheduler. Fails when the configuration is out of range: see [`FeoConfigError`].
    pub fn new(config: &FeoConfig) -> Result<Self, FeoConfigError> {
        if !(1..=MAX_SERVICES).contains(&config.queues.len()) {
            return Err(FeoConfigError::ServiceCount(config.queues.len()));
        }
        if !(1..=MAX_SERVICES).contains(&config.groups.len()) {
            return Err(FeoConfigError::GroupCount(config.groups.len()));
        }
        if config.capacity == 0 {
            return Err(FeoConfigError::ZeroCapacity);
        }
        let mut groups = Vec::new();
        for group in &config.groups {
            let turn = SchedulingState::new(group.member, config.ranking)?;
            groups.push(Group { state: turn, ranking: group.ranking, virtual_time: 0, member_mask: 0 });
        }
        let mut queues = Vec::new();
        for (service, &QueueConfig { group, member, priority }) in config.queues.iter().enumerate() {
            let parent = groups.get_mut(usize::from(group));
            let parent = parent.ok_or(FeoConfigError::UnknownGroup { service, group })?;
            parent.member_mask |= 1 << service;
            let turn = SchedulingState::new(member, parent.ranking)?;
            queues.push(Queue { state: turn, group, priority, requests: VecDeque::new() });
        }
        let &FeoConfig { ranking, selection, capacity, .. } = config;
        let mut rankings = groups.iter().map(|group| group.ranking).chain([ranking]);
        let mut turns = groups.iter().map(|group| &group.state).chain(queues.iter().map(|queue| &queue.state));
        let is_stateless =
            rankings.all(|ranking| ranking != Ranking::WeightedShare) && turns.all(|turn| turn.member.limit.is_none());
        Ok(Self {
            ranking,
            selection,
            capacity,
            waiting_count: 0,
            is_stateless,
            backlogged_services: 0,
            virtual_time: 0,
            groups,
            queues,
        })
    }

    /// Returns the number of waiting requests of `service`.
    #[inline]
    pub fn waiting_count(&self, service: u8) -> usize {
        self.queues[usize::from(service)].requests.len()
    }

    /// Returns the arrival time of the oldest waiting request of `service`.
    pub fn oldest_arrival(&self, service: u8) -> Option<u64> {
        self.queues[usize::from(service)].requests.front().map(|(arrived, _)| *arrived)
    }

    /// Returns whether a request of an eligible service may skip the queue: a push and a pop would change nothing.
    #[inline]
    pub fn is_transparent(&self) -> bool {
        self.waiting_count == 0 && self.is_stateless
    }

    /// Appends a request to the queue of `service`; `now` must not decrease from call to call.
    ///
    /// Returns the request that a full buffer drops, with its service: the youngest of the lowest priority, the new
    /// request included. Of services of equal priority the one with the longest queue loses a request.
    #[inline]
    pub fn push(&mut self, now: u64, service: u8, request: T) -> Option<(u8, T)> {
        let mut dropped = None;
        if self.waiting_count == self.capacity {
            let victim = self.victim(service);
            if victim == service {
                return Some((service, request));
            }
            dropped = self.queues[usize::from(victim)].requests.pop_back().map(|(_, youngest)| (victim, youngest));
            self.record_removal(victim);
        }
        self.append(now, service, request);
        dropped
    }

    /// Removes and returns the next request, with its service. Bit s of `eligible` is set if a core would take a
    /// request of service s.
    #[inline]
    pub fn pop(&mut self, now: u64, eligible: u64) -> Option<(u8, T)> {
        let service = self.select(now, eligible)?;
        let queue = &mut self.queues[usize::from(service)];
        let group = &mut self.groups[usize::from(queue.group)];
        self.virtual_time = group.state.record_dispatch(now, self.ranking);
        group.virtual_time = queue.state.record_dispatch(now, group.ranking);
        let (_, request) = queue.requests.pop_front()?;
        self.record_removal(service);
        Some((service, request))
    }

    /// Returns the earliest time at which a rate limit ends; `None` unless only rate limits delay all requests.
    pub fn next_token_time(&self) -> Option<u64> {
        let next_token_at = |service| {
            let queue = &self.queues[usize::from(service)];
            queue.state.next_token_at().max(self.groups[usize::from(queue.group)].state.next_token_at())
        };
        bit_indices(self.backlogged_services).map(next_token_at).min()
    }

    fn append(&mut self, now: u64, service: u8, request: T) {
        let queue = &mut self.queues[usize::from(service)];
        if queue.requests.is_empty() {
            let group = &mut self.groups[usize::from(queue.group)];
            if self.backlogged_services & group.member_mask == 0 {
                group.state.start_tag = group.state.start_tag.max(self.virtual_time);
            }
            queue.state.start_tag = queue.state.start_tag.max(group.virtual_time);
            self.backlogged_services |= 1 << service;
        }
        queue.requests.push_back((now, request));
        self.waiting_count += 1;
    }

    /// Updates the counters after a request left the queue of `service`.
    fn record_removal(&mut self, service: u8) {
        self.waiting_count -= 1;
        if self.queues[usize::from(service)].requests.is_empty() {
            self.backlogged_services &= !(1 << service);
        }
    }

    /// Returns the service that must drop a request when a request of service `arriving` arrives at a full buffer.
    fn victim(&self, arriving: u8) -> u8 {
        let key = |service: u8| {
            let arrives = usize::from(service == arriving);
            (self.queues[usize::from(service)].priority, self.waiting_count(service) + arrives, arrives)
        };
        bit_indices(self.backlogged_services | 1 << arriving).max_by_key(|service| key(*service)).unwrap_or(arriving)
    }

    #[inline]
    fn select(&self, now: u64, eligible: u64) -> Option<u8> {
        let considered = match self.selection {
            Selection::FirstEligible => self.backlogged_services & eligible,
            Selection::Pifo => self.backlogged_services,
        };
        let mut first: Option<(u64, u8)> = None;
        for group in self.groups.iter().filter(|group| group.state.next_token_at() <= now) {
            let Some((arrived, _, service)) = self.next_service_of(group, now, considered) else { continue };
            let rank = group.state.rank(self.ranking, arrived);
            if first.is_none_or(|(least, _)| rank < least) {
                first = Some((rank, service));
            }
        }
        let (_, service) = first?;
        (eligible >> service & 1 == 1).then_some(service)
    }

    /// Returns the next service of a group: the earliest arrival of the group's requests, the service's rank, the
    /// service.
    #[inline]
    fn next_service_of(&self, group: &Group, now: u64, considered: u64) -> Option<(u64, u64, u8)> {
        let mut first: Option<(u64, u64, u8)> = None;
        for service in bit_indices(considered & group.member_mask) {
            let queue = &self.queues[usize::from(service)];
            if queue.state.next_token_at() > now {
                continue;
            }
            let Some((arrived, _)) = queue.requests.front() else { continue };
            let rank = queue.state.rank(group.ranking, *arrived);
            first = Some(match first {
                Some((earliest, least, other)) if least <= rank => (earliest.min(*arrived), least, other),
                Some((earliest, ..)) => (earliest.min(*arrived), rank, service),
                None => (*arrived, rank, service),
            });
        }
        first
    }
}

/// Returns the indices of the bits that are set in `mask`, in ascending order.
#[inline]
fn bit_indices(mut mask: u64) -> impl Iterator<Item = u8> {
    std::iter::from_fn(move || {
        let index = (mask != 0).then(|| mask.trailing_zeros() as u8)?;
        mask &= mask - 1;
        Some(index)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: u64 = u64::MAX;

    /// Returns a configuration of one level with these parameters. Requests of the first service are dropped last.
    fn config(ranking: Ranking, parameters: &[u32]) -> FeoConfig {
        let mut config = FeoConfig::strict_priority(0..parameters.len() as u8);
        config.groups[0].ranking = ranking;
        for (queue, parameter) in config.queues.iter_mut().zip(parameters) {
            queue.member = SchedulingParameters::new(*parameter);
        }
        config
    }

    fn popped<T>(feo: &mut FirstEligibleOut<T>, now: u64, count: usize) -> Vec<u8> {
        (0..count).map_while(|_| feo.pop(now, ALL).map(|(service, _)| service)).collect()
    }

    /// Returns a scheduler with `count` waiting requests of each service.
    fn backlogged(config: &FeoConfig, count: u32) -> FirstEligibleOut<u32> {
        let mut feo = FirstEligibleOut::new(config).unwrap();
        for request in 0..count {
            (0..config.queues.len() as u8).for_each(|service| assert_eq!(feo.push(0, service, request), None));
        }
        feo
    }

    /// The example of a blocked head in RingLeader (NSDI'23), Sect. 4.3.
    #[test]
    fn ineligible_head_blocks_only_pifo() {
        let mut config = config(Ranking::StrictPriority, &[0, 1]);
        let mut feo = backlogged(&config, 1);
        assert_eq!(feo.pop(0, 0b10), Some((1, 0)));
        assert_eq!((feo.pop(0, 0b10), feo.pop(0, 0b11)), (None, Some((0, 0))));

        config.selection = Selection::Pifo;
        let mut pifo = backlogged(&config, 1);
        assert_eq!(pifo.pop(0, 0b10), None);
        assert_eq!((pifo.pop(0, 0b11), pifo.pop(0, 0b10)), (Some((0, 0)), Some((1, 0))));
    }

    #[test]
    fn full_buffer_drops_the_youngest_of_the_lowest_priority() {
        let mut config = config(Ranking::StrictPriority, &[0, 1, 1]);
        config.capacity = 3;
        (config.queues[1].priority, config.queues[2].priority) = (1, 1);
        let mut feo = FirstEligibleOut::new(&config).unwrap();
        for (request, service) in [1, 1, 2].into_iter().enumerate() {
            assert_eq!(feo.push(0, service, request), None);
        }
        assert_eq!(feo.push(0, 0, 3), Some((1, 1)), "the longer queue of two with equal priority");
        assert_eq!(feo.push(0, 2, 4), Some((2, 4)), "its queue would be the longest");
        assert_eq!(feo.push(0, 0, 5), Some((2, 2)));
        assert_eq!(feo.push(0, 0, 6), Some((1, 0)));
        assert_eq!(feo.push(0, 0, 7), Some((0, 7)), "nothing of lower priority waits");
        let left: Vec<_> = std::iter::from_fn(|| feo.pop(0, ALL)).collect();
        assert_eq!(left, [(0, 3), (0, 5), (0, 6)]);
    }

    #[test]
    fn service_shares_follow_weights() {
        let mut feo = backlogged(&config(Ranking::WeightedShare, &[3, 1]), 100);
        let order = popped(&mut feo, 0, 40);
        assert_eq!(order.iter().filter(|service| **service == 0).count(), 30);
        assert!(order.windows(5).all(|five| five.contains(&1)), "not in bursts: {order:?}");
    }

    #[test]
    fn idle_service_or_group_saves_no_share() {
        let one_group = config(Ranking::WeightedShare, &[1, 1]);
        let mut two_groups = one_group.clone();
        let group = GroupConfig { member: SchedulingParameters::new(1), ranking: Ranking::StrictPriority };
        (two_groups.ranking, two_groups.groups) = (Ranking::WeightedShare, vec![group; 2]);
        two_groups.queues[1].group = 1;
        for config in [one_group, two_groups] {
            let mut feo = FirstEligibleOut::new(&config).unwrap();
            (0..200).for_each(|request| assert_eq!(feo.push(0, 0, request), None));
            popped(&mut feo, 0, 100);
            (0..50).for_each(|request| assert_eq!(feo.push(0, 1, request), None));
            let ones = popped(&mut feo, 0, 20).into_iter().filter(|service| *service == 1).count();
            assert!((9..=11).contains(&ones), "{ones} of 20");
        }
    }

    #[test]
    fn earliest_deadline_is_first() {
        let mut feo = FirstEligibleOut::new(&config(Ranking::EarliestDeadline, &[100, 10])).unwrap();
        feo.push(0, 0, 'a');
        feo.push(80, 1, 'b');
        feo.push(95, 1, 'c');
        let order: Vec<_> = std::iter::from_fn(|| feo.pop(95, ALL)).collect();
        assert_eq!(order, [(1, 'b'), (0, 'a'), (1, 'c')], "deadlines 90, 100, 105");
    }

    #[test]
    fn rate_limit_holds_requests_until_the_next_token() {
        for selection in [Selection::FirstEligible, Selection::Pifo] {
            let mut config = config(Ranking::StrictPriority, &[0, 1]);
            config.selection = selection;
            config.queues[0].member.limit = Some(RateLimit { interval: 10, burst: 2 });
            let mut feo = backlogged(&config, 4);
            assert_eq!(popped(&mut feo, 1000, 3), [0, 0, 1], "a burst of two, then the other service");
            assert_eq!(popped(&mut feo, 1009, 9), [1, 1, 1]);
            assert_eq!(feo.next_token_time(), Some(1010));
            assert_eq!(popped(&mut feo, 1010, 9), [0]);
            assert_eq!((popped(&mut feo, 1020, 9), feo.next_token_time()), (vec![0], None));
        }
    }

    /// Group 0 has two thirds of the dispatches: service 0 before service 1. Group 1 has one third: service 2.
    #[test]
    fn groups_are_ranked_before_their_services() {
        let mut config = config(Ranking::StrictPriority, &[0, 1, 0]);
        config.ranking = Ranking::WeightedShare;
        config.groups[0].member = SchedulingParameters::new(2);
        config.groups.push(GroupConfig { member: SchedulingParameters::new(1), ranking: Ranking::StrictPriority });
        config.queues[2].group = 1;
        let mut feo = backlogged(&config, 10);
        let order = popped(&mut feo, 0, 15);
        let count = |number: u8| order.iter().filter(|service| **service == number).count();
        assert_eq!((count(0), count(1), count(2)), (10, 0, 5), "{order:?}");
        assert_eq!(popped(&mut feo, 0, 6).iter().filter(|service| **service == 1).count(), 4);
    }

    #[test]
    fn configurations_out_of_range_are_rejected() {
        let base = config(Ranking::WeightedShare, &[1, 1]);
        let error = |change: fn(&mut FeoConfig)| {
            let mut config = base.clone();
            change(&mut config);
            FirstEligibleOut::<()>::new(&config).unwrap_err().to_string()
        };
        assert_eq!(error(|config| config.queues.clear()), "0 services: expected 1 to 64");
        assert_eq!(error(|config| config.queues = vec![config.queues[0]; 65]), "65 services: expected 1 to 64");
        assert_eq!(error(|config| config.groups.clear()), "0 groups: expected 1 to 64");
        assert_eq!(error(|config| config.queues[1].group = 1), "service 1: no group 1");
        assert_eq!(error(|config| config.queues[1].member.parameter = 0), "weight 0: expected 1 to 1048576");
        assert_eq!(error(|config| config.capacity = 0), "capacity 0: expected 1 or more");
        let limit = RateLimit { interval: 1, burst: 0 };
        let mut config = base.clone();
        config.groups[0].member.limit = Some(limit);
        assert_eq!(FirstEligibleOut::<()>::new(&config).unwrap_err().to_string(), "burst 0: expected 1 or more");
    }

    proptest! {
        /// Every request leaves once, in order within its service; the choice agrees with a search over all heads.
        #[test]
        fn decisions_equal_a_linear_search(
            deadline in any::<bool>(),
            pifo in any::<bool>(),
            parameters in prop::collection::vec(0u32..20, 1..5),
            capacity in 1usize..20,
            steps in prop::collection::vec((any::<bool>(), 0u8..4, 0u64..5, 0u64..16), 0..200),
        ) {
            let ranking = if deadline { Ranking::EarliestDeadline } else { Ranking::StrictPriority };
            let mut config = config(ranking, &parameters);
            config.capacity = capacity;
            config.selection = if pifo { Selection::Pifo } else { Selection::FirstEligible };
            let mut feo = FirstEligibleOut::new(&config).unwrap();
            let (mut model, mut now) = (vec![VecDeque::<(u64, usize)>::new(); parameters.len()], 0);
            for (index, (arrives, service, pause, eligible)) in steps.into_iter().enumerate() {
                now += pause;
                if arrives {
                    model[usize::from(service) % parameters.len()].push_back((now, index));
                    // The lowest priority is the highest index.
                    let full = model.iter().map(VecDeque::len).sum::<usize>() > capacity;
                    let victim = (0..model.len()).rfind(|service| full && !model[*service].is_empty());
                    let dropped = victim.map(|victim| (victim as u8, model[victim].pop_back().unwrap().1));
                    prop_assert_eq!(feo.push(now, service % parameters.len() as u8, index), dropped);
                } else {
                    let rank = |service: &usize| {
                        let (arrived, _) = model[*service].front()?;
                        Some(u64::from(parameters[*service]) + if deadline { *arrived } else { 0 })
                    };
                    let is_eligible = |service: &usize| eligible >> service & 1 == 1;
                    let considered = |service: &usize| rank(service).is_some() && (pifo || is_eligible(service));
                    let first = (0..model.len()).filter(considered).min_by_key(rank).filter(is_eligible);
                    let expected = first.map(|service| (service as u8, model[service].pop_front().unwrap().1));
                    prop_assert_eq!(feo.pop(now, eligible), expected);
                }
                for (service, queue) in model.iter().enumerate() {
                    prop_assert_eq!(feo.waiting_count(service as u8), queue.len());
                    prop_assert_eq!(feo.oldest_arrival(service as u8), queue.front().map(|(arrived, _)| *arrived));
                }
            }
        }
    }
}
