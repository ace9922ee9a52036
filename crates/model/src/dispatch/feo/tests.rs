use proptest::prelude::*;

use super::*;

const ALL_SERVICES_MASK: u64 = u64::MAX;

/// Returns a configuration of one group, with one service per rank parameter. Requests of service 0 are dropped last.
fn one_level_config(ranking: SchedulingMemberRanking, rank_parameters: &[u32]) -> FirstEligibleOutConfig {
    let mut config = FirstEligibleOutConfig::strict_priority(0..rank_parameters.len() as u8);
    config.groups[0].service_ranking = ranking;
    for (queue, parameter) in config.queues.iter_mut().zip(rank_parameters) {
        queue.parameters = SchedulingParameters::new(*parameter);
    }
    config
}

fn pop_requests_and_list_services<T>(
    feo: &mut FirstEligibleOutScheduler<T>,
    now: u64,
    max_request_count: usize,
) -> Vec<u8> {
    (0..max_request_count).map_while(|_| feo.pop_request(now, ALL_SERVICES_MASK).map(|(service, _)| service)).collect()
}

fn scheduler_with_backlog(
    config: &FirstEligibleOutConfig,
    requests_per_service: u32,
) -> FirstEligibleOutScheduler<u32> {
    let mut scheduler = FirstEligibleOutScheduler::new(config).unwrap();
    for request in 0..requests_per_service {
        (0..config.queues.len() as u8)
            .for_each(|service| assert_eq!(scheduler.push_request(0, service, request), None));
    }
    scheduler
}

/// Tests the example of head-of-line blocking in RingLeader (NSDI'23), Sect. 4.3.
#[test]
fn ineligible_head_request_blocks_only_pifo() {
    let mut config = one_level_config(SchedulingMemberRanking::StrictPriority, &[0, 1]);
    let mut scheduler = scheduler_with_backlog(&config, 1);
    assert_eq!(scheduler.pop_request(0, 0b10), Some((1, 0)));
    assert_eq!((scheduler.pop_request(0, 0b10), scheduler.pop_request(0, 0b11)), (None, Some((0, 0))));

    config.eligibility_rule = DispatchEligibilityRule::Pifo;
    let mut pifo_scheduler = scheduler_with_backlog(&config, 1);
    assert_eq!(pifo_scheduler.pop_request(0, 0b10), None);
    assert_eq!(
        (pifo_scheduler.pop_request(0, 0b11), pifo_scheduler.pop_request(0, 0b10)),
        (Some((0, 0)), Some((1, 0)))
    );
}

#[test]
fn full_buffer_drops_the_youngest_request_of_the_lowest_priority() {
    let mut config = one_level_config(SchedulingMemberRanking::StrictPriority, &[0, 1, 1]);
    config.max_waiting_requests = 3;
    (config.queues[1].drop_priority, config.queues[2].drop_priority) = (1, 1);
    let mut scheduler = FirstEligibleOutScheduler::new(&config).unwrap();
    for (request, service) in [1, 1, 2].into_iter().enumerate() {
        assert_eq!(scheduler.push_request(0, service, request), None);
    }
    assert_eq!(scheduler.push_request(0, 0, 3), Some((1, 1)), "the longer queue of two with equal priority");
    assert_eq!(scheduler.push_request(0, 2, 4), Some((2, 4)), "its queue would be the longest");
    assert_eq!(scheduler.push_request(0, 0, 5), Some((2, 2)));
    assert_eq!(scheduler.push_request(0, 0, 6), Some((1, 0)));
    assert_eq!(scheduler.push_request(0, 0, 7), Some((0, 7)), "nothing of lower priority waits");
    let remaining_requests: Vec<_> = std::iter::from_fn(|| scheduler.pop_request(0, ALL_SERVICES_MASK)).collect();
    assert_eq!(remaining_requests, [(0, 3), (0, 5), (0, 6)]);
}

#[test]
fn dispatches_are_proportional_to_service_weights() {
    let mut scheduler = scheduler_with_backlog(&one_level_config(SchedulingMemberRanking::WeightedShare, &[3, 1]), 100);
    let service_order = pop_requests_and_list_services(&mut scheduler, 0, 40);
    assert_eq!(service_order.iter().filter(|service| **service == 0).count(), 30);
    assert!(service_order.windows(5).all(|five| five.contains(&1)), "not in bursts: {service_order:?}");
}

#[test]
fn service_or_group_gains_no_credit_while_idle() {
    let one_group = one_level_config(SchedulingMemberRanking::WeightedShare, &[1, 1]);
    let mut two_groups = one_group.clone();
    let group = SchedulingGroupConfig {
        parameters: SchedulingParameters::new(1),
        service_ranking: SchedulingMemberRanking::StrictPriority,
    };
    (two_groups.group_ranking, two_groups.groups) = (SchedulingMemberRanking::WeightedShare, vec![group; 2]);
    two_groups.queues[1].group_index = 1;
    for config in [one_group, two_groups] {
        let mut scheduler = FirstEligibleOutScheduler::new(&config).unwrap();
        (0..200).for_each(|request| assert_eq!(scheduler.push_request(0, 0, request), None));
        pop_requests_and_list_services(&mut scheduler, 0, 100);
        (0..50).for_each(|request| assert_eq!(scheduler.push_request(0, 1, request), None));
        let service_1_count =
            pop_requests_and_list_services(&mut scheduler, 0, 20).into_iter().filter(|service| *service == 1).count();
        assert!((9..=11).contains(&service_1_count), "{service_1_count} of 20");
    }
}

#[test]
fn request_with_the_earliest_deadline_is_first() {
    let mut scheduler =
        FirstEligibleOutScheduler::new(&one_level_config(SchedulingMemberRanking::EarliestDeadline, &[100, 10]))
            .unwrap();
    scheduler.push_request(0, 0, 'a');
    scheduler.push_request(80, 1, 'b');
    scheduler.push_request(95, 1, 'c');
    let request_order: Vec<_> = std::iter::from_fn(|| scheduler.pop_request(95, ALL_SERVICES_MASK)).collect();
    assert_eq!(request_order, [(1, 'b'), (0, 'a'), (1, 'c')], "deadlines 90, 100, 105");
}

#[test]
fn rate_limit_holds_requests_until_the_next_token() {
    for selection in [DispatchEligibilityRule::FirstEligible, DispatchEligibilityRule::Pifo] {
        let mut config = one_level_config(SchedulingMemberRanking::StrictPriority, &[0, 1]);
        config.eligibility_rule = selection;
        config.queues[0].parameters.rate_limit = Some(DispatchRateLimit { token_interval: 10, burst_tokens: 2 });
        let mut scheduler = scheduler_with_backlog(&config, 4);
        assert_eq!(
            pop_requests_and_list_services(&mut scheduler, 1000, 3),
            [0, 0, 1],
            "a burst of two, then the other service"
        );
        assert_eq!(pop_requests_and_list_services(&mut scheduler, 1009, 9), [1, 1, 1]);
        assert_eq!(scheduler.next_token_time(), Some(1010));
        assert_eq!(pop_requests_and_list_services(&mut scheduler, 1010, 9), [0]);
        assert_eq!(
            (pop_requests_and_list_services(&mut scheduler, 1020, 9), scheduler.next_token_time()),
            (vec![0], None)
        );
    }
}

/// Group 0 gets two thirds of the dispatches, and its service 0 precedes service 1. Group 1 has only service 2.
#[test]
fn groups_are_ranked_before_their_services() {
    let mut config = one_level_config(SchedulingMemberRanking::StrictPriority, &[0, 1, 0]);
    config.group_ranking = SchedulingMemberRanking::WeightedShare;
    config.groups[0].parameters = SchedulingParameters::new(2);
    config.groups.push(SchedulingGroupConfig {
        parameters: SchedulingParameters::new(1),
        service_ranking: SchedulingMemberRanking::StrictPriority,
    });
    config.queues[2].group_index = 1;
    let mut scheduler = scheduler_with_backlog(&config, 10);
    let service_order = pop_requests_and_list_services(&mut scheduler, 0, 15);
    let dispatch_count = |number: u8| service_order.iter().filter(|service| **service == number).count();
    assert_eq!((dispatch_count(0), dispatch_count(1), dispatch_count(2)), (10, 0, 5), "{service_order:?}");
    assert_eq!(pop_requests_and_list_services(&mut scheduler, 0, 6).iter().filter(|service| **service == 1).count(), 4);
}

#[test]
fn configurations_out_of_range_are_rejected() {
    let valid_config = one_level_config(SchedulingMemberRanking::WeightedShare, &[1, 1]);
    let config_error_after = |change: fn(&mut FirstEligibleOutConfig)| {
        let mut config = valid_config.clone();
        change(&mut config);
        FirstEligibleOutScheduler::<()>::new(&config).unwrap_err().to_string()
    };
    assert_eq!(config_error_after(|config| config.queues.clear()), "0 services: expected 1 to 64");
    assert_eq!(
        config_error_after(|config| config.queues = vec![config.queues[0]; 65]),
        "65 services: expected 1 to 64"
    );
    assert_eq!(config_error_after(|config| config.groups.clear()), "0 groups: expected 1 to 64");
    assert_eq!(config_error_after(|config| config.queues[1].group_index = 1), "service 1: no group 1");
    assert_eq!(
        config_error_after(|config| config.queues[1].parameters.priority_weight_or_deadline = 0),
        "weight 0: expected 1 to 1048576"
    );
    assert_eq!(config_error_after(|config| config.max_waiting_requests = 0), "capacity 0: expected 1 or more");
    let zero_burst_limit = DispatchRateLimit { token_interval: 1, burst_tokens: 0 };
    let mut config = valid_config.clone();
    config.groups[0].parameters.rate_limit = Some(zero_burst_limit);
    assert_eq!(FirstEligibleOutScheduler::<()>::new(&config).unwrap_err().to_string(), "burst 0: expected 1 or more");
}

proptest! {
    /// Each request leaves once, in order within its service, and each choice agrees with a search over all queue
    /// heads.
    #[test]
    fn scheduler_decisions_match_a_linear_search(
        is_deadline_ranking in any::<bool>(),
        is_pifo in any::<bool>(),
        rank_parameters in prop::collection::vec(0u32..20, 1..5),
        capacity in 1usize..20,
        steps in prop::collection::vec((any::<bool>(), 0u8..4, 0u64..5, 0u64..16), 0..200),
    ) {
        let ranking = match is_deadline_ranking {
            true => SchedulingMemberRanking::EarliestDeadline,
            false => SchedulingMemberRanking::StrictPriority,
        };
        let mut config = one_level_config(ranking, &rank_parameters);
        config.max_waiting_requests = capacity;
        config.eligibility_rule = match is_pifo {
            true => DispatchEligibilityRule::Pifo,
            false => DispatchEligibilityRule::FirstEligible,
        };
        let mut scheduler = FirstEligibleOutScheduler::new(&config).unwrap();
        let (mut model, mut now) = (vec![VecDeque::<(u64, usize)>::new(); rank_parameters.len()], 0);
        for (index, (is_arrival, service, pause, eligible_service_mask)) in steps.into_iter().enumerate() {
            now += pause;
            if is_arrival {
                model[usize::from(service) % rank_parameters.len()].push_back((now, index));
                // The lowest priority is the highest index.
                let is_full = model.iter().map(VecDeque::len).sum::<usize>() > capacity;
                let victim_service = (0..model.len()).rfind(|service| is_full && !model[*service].is_empty());
                let expected_dropped_request =
                    victim_service.map(|victim| (victim as u8, model[victim].pop_back().unwrap().1));
                prop_assert_eq!(
                    scheduler.push_request(now, service % rank_parameters.len() as u8, index),
                    expected_dropped_request,
                );
            } else {
                let compute_rank = |service: &usize| {
                    let (arrival_time, _) = model[*service].front()?;
                    Some(u64::from(rank_parameters[*service]) + if is_deadline_ranking { *arrival_time } else { 0 })
                };
                let is_service_eligible = |service: &usize| eligible_service_mask >> service & 1 == 1;
                let is_service_considered =
                    |service: &usize| compute_rank(service).is_some() && (is_pifo || is_service_eligible(service));
                let first_service =
                    (0..model.len()).filter(is_service_considered).min_by_key(compute_rank).filter(is_service_eligible);
                let expected_request =
                    first_service.map(|service| (service as u8, model[service].pop_front().unwrap().1));
                prop_assert_eq!(scheduler.pop_request(now, eligible_service_mask), expected_request);
            }
            for (service, queue) in model.iter().enumerate() {
                prop_assert_eq!(scheduler.waiting_request_count(service as u8), queue.len());
                prop_assert_eq!(scheduler.oldest_arrival_time(service as u8),
                    queue.front().map(|(arrival_time, _)| *arrival_time));
            }
        }
    }
}
