//! Tests that compare the simulator with a reference simulator without optimizations, response by response.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use coreward_model::dispatch::{
    JoinBoundedShortestRankedQueue, JoinLightestQueue, JoinShortestQueue, RankLambda, RequestDispatcher,
    RoundRobinDispatcher,
};
use coreward_sim::rpc::server::{
    FifoCores, NicServer, PriorityCores, ProcessorSharingCores, QueueDisciplineCores, QueueingServer, ResponseSink,
    ServerCores, SimulatedRequest, SimulatedResponse, StealingCores,
};
use proptest::prelude::*;

#[derive(Default)]
struct CollectedDepartures(Vec<(u64, u32)>);

impl ResponseSink for CollectedDepartures {
    fn handle_response(&mut self, response: &SimulatedResponse) {
        self.0.push((response.departed_at, response.request.request_hash));
    }
}

/// Simulates the requests, and returns the time and request number of each departure, sorted by time.
fn simulate_departures(
    requests: &[SimulatedRequest],
    dispatcher: impl RequestDispatcher,
    cores: impl ServerCores,
) -> Vec<(u64, u32)> {
    let mut server = NicServer::new(dispatcher, cores, 2);
    let mut responses = CollectedDepartures::default();
    for request in requests {
        server.advance(request.arrived_at, &mut responses);
        QueueingServer::<CollectedDepartures>::add_request(&mut server, *request);
    }
    server.advance(u64::MAX - 1, &mut responses);
    assert_eq!(QueueingServer::<CollectedDepartures>::outstanding_request_count(&server), 0);
    responses.0.sort_unstable();
    responses.0
}

/// Function by which the reference simulator chooses a core. Its input is each core's number of outstanding requests
/// and outstanding work (ticks).
type CoreChooser = fn(&[(u64, u64)], bound: u64) -> Option<usize>;

#[derive(PartialEq, Eq, PartialOrd, Ord, Clone, Copy)]
enum ReferenceEvent {
    ServiceEnds(usize, usize),
    ResponseAtNic(usize, usize),
    RequestAtCore(usize, usize),
    RequestAtNic(usize),
}

/// Simple reference simulator, which has one heap of events and searches all cores for every choice.
struct ReferenceSimulator<'a> {
    requests: &'a [SimulatedRequest],
    interface_latency: u64,
    events: BinaryHeap<Reverse<(u64, ReferenceEvent)>>,
    requests_and_work_by_core: Vec<(u64, u64)>,
    nic_queue: VecDeque<usize>,
    core_queues: Vec<VecDeque<usize>>,
    departures: Vec<(u64, u32)>,
}

impl<'a> ReferenceSimulator<'a> {
    fn new(requests: &'a [SimulatedRequest], cores: usize, interface_latency: u64) -> Self {
        let arrivals = requests.iter().enumerate();
        Self {
            requests,
            interface_latency,
            events: arrivals
                .map(|(i, request)| Reverse((request.arrived_at, ReferenceEvent::RequestAtNic(i))))
                .collect(),
            requests_and_work_by_core: vec![(0, 0); cores],
            nic_queue: VecDeque::new(),
            core_queues: vec![VecDeque::new(); cores],
            departures: Vec::new(),
        }
    }

    fn schedule_event(&mut self, time: u64, event: ReferenceEvent) {
        self.events.push(Reverse((time, event)));
    }

    fn handle_event(&mut self, now: u64, event: ReferenceEvent) {
        match event {
            ReferenceEvent::RequestAtNic(request) => self.nic_queue.push_back(request),
            ReferenceEvent::RequestAtCore(core, request) => {
                self.core_queues[core].push_back(request);
                if self.core_queues[core].len() == 1 {
                    self.schedule_event(
                        now + self.requests[request].service_time,
                        ReferenceEvent::ServiceEnds(core, request),
                    );
                }
            }
            ReferenceEvent::ServiceEnds(core, request) => {
                assert_eq!(self.core_queues[core].pop_front(), Some(request));
                if let Some(next) = self.core_queues[core].front().copied() {
                    self.schedule_event(
                        now + self.requests[next].service_time,
                        ReferenceEvent::ServiceEnds(core, next),
                    );
                }
                self.schedule_event(now + self.interface_latency, ReferenceEvent::ResponseAtNic(core, request));
            }
            ReferenceEvent::ResponseAtNic(core, request) => {
                self.requests_and_work_by_core[core].0 -= 1;
                self.requests_and_work_by_core[core].1 -= self.requests[request].service_time;
                self.departures.push((now, self.requests[request].request_hash));
            }
        }
    }

    /// Sends requests from the NIC's queue to cores until `choose` finds no core or the queue is empty.
    fn dispatch_requests(&mut self, now: u64, queue_bound: u64, choose: CoreChooser) {
        while let Some(request) = self.nic_queue.front().copied() {
            let Some(core) = choose(&self.requests_and_work_by_core, queue_bound) else { break };
            self.nic_queue.pop_front();
            self.requests_and_work_by_core[core].0 += 1;
            self.requests_and_work_by_core[core].1 += self.requests[request].service_time;
            self.schedule_event(now + self.interface_latency, ReferenceEvent::RequestAtCore(core, request));
        }
    }
}

/// Simulates the requests with the reference simulator. Returns the time and request number of each departure, sorted.
fn simulate_reference_departures(
    requests: &[SimulatedRequest],
    cores: usize,
    latency: u64,
    queue_bound: u64,
    choose: CoreChooser,
) -> Vec<(u64, u32)> {
    let mut simulator = ReferenceSimulator::new(requests, cores, latency);
    while let Some(Reverse((now, event))) = simulator.events.pop() {
        simulator.handle_event(now, event);
        simulator.dispatch_requests(now, queue_bound, choose);
    }
    simulator.departures.sort_unstable();
    simulator.departures
}

fn choose_shortest_queue(core_loads: &[(u64, u64)], queue_bound: u64) -> Option<usize> {
    let shortest_core = (0..core_loads.len()).min_by_key(|core| core_loads[*core].0)?;
    (core_loads[shortest_core].0 < queue_bound).then_some(shortest_core)
}

fn choose_lightest_queue(core_loads: &[(u64, u64)], _queue_bound: u64) -> Option<usize> {
    (0..core_loads.len()).min_by_key(|core| core_loads[*core].1)
}

/// Returns a strategy that generates requests of two services, in bursts with gaps between them. No two requests arrive
/// at the same time.
fn request_list_strategy() -> impl Strategy<Value = Vec<SimulatedRequest>> {
    prop::collection::vec((1u64..40, 1u64..200, any::<bool>()), 1..120).prop_map(|drawn_requests| {
        let mut arrived_at = 0;
        let build_request = |(index, (arrival_gap, work, is_low_priority)): (usize, (u64, u64, bool))| {
            arrived_at += arrival_gap;
            SimulatedRequest {
                arrived_at,
                service_time: work,
                request_hash: index as u32,
                flow_hash: 0,
                connection_number: 0,
                class_index: 0,
                service: u8::from(is_low_priority),
            }
        };
        drawn_requests.into_iter().enumerate().map(build_request).collect()
    })
}

/// Returns a copy of the requests in which each request's service is 0.
fn copy_with_single_service(requests: &[SimulatedRequest]) -> Vec<SimulatedRequest> {
    requests.iter().map(|request| SimulatedRequest { service: 0, ..*request }).collect()
}

proptest! {
    #[test]
    fn fifo_core_departures_match_reference_simulator(
        requests in request_list_strategy(), cores in 1u16..9, latency in 0u64..50, queue_bound in 1u16..5,
    ) {
        let requests = copy_with_single_service(&requests);
        let build_fifo_cores = || FifoCores::new(cores, latency);
        let expected_departures =
            |queue_bound, choose| {
                simulate_reference_departures(&requests, usize::from(cores), latency, queue_bound, choose)
            };
        let bounded_dispatcher = JoinShortestQueue::bounded(cores, queue_bound.try_into().unwrap());
        let unbounded_dispatcher = JoinShortestQueue::unbounded(cores);
        prop_assert_eq!(simulate_departures(&requests, unbounded_dispatcher, build_fifo_cores()),
            expected_departures(u64::MAX, choose_shortest_queue));
        prop_assert_eq!(simulate_departures(&requests, bounded_dispatcher, build_fifo_cores()),
            expected_departures(u64::from(queue_bound), choose_shortest_queue));
        prop_assert_eq!(simulate_departures(&requests, JoinLightestQueue::new(cores), build_fifo_cores()),
            expected_departures(0, choose_lightest_queue));
    }

    /// Checks that JBSRQ without priorities is the same as JBSQ, and that cores then serve in order of arrival.
    #[test]
    fn ranked_queues_of_one_service_act_like_bounded_queues(
        requests in request_list_strategy(),
        cores in 1u16..9,
        latency in 0u64..50,
        depth in 1u16..5,
    ) {
        let requests = copy_with_single_service(&requests);
        let queue_depth = depth.try_into().unwrap();
        let ranked_dispatcher = JoinBoundedShortestRankedQueue::new(cores, 1, RankLambda::PAPER_VALUE, queue_depth);
        let ranked_cores = QueueDisciplineCores::new(cores, latency, PriorityCores::new(cores, 1, 10, 0));
        let bounded_dispatcher = JoinShortestQueue::bounded(cores, queue_depth);
        prop_assert_eq!(
            simulate_departures(&requests, ranked_dispatcher, ranked_cores),
            simulate_departures(&requests, bounded_dispatcher, FifoCores::new(cores, latency))
        );
    }

    /// Checks that every request is answered once, and never earlier than its work can be done, even if its service is
    /// often interrupted.
    #[test]
    fn yielding_and_stealing_lose_no_request(
        requests in request_list_strategy(),
        cores in 1u16..5,
        latency in 0u64..50,
        quantum in 1u64..100,
        cost in 0u64..30,
    ) {
        let ranked_dispatcher =
            JoinBoundedShortestRankedQueue::new(cores, 2, RankLambda::PAPER_VALUE, 4.try_into().unwrap());
        let yielding_cores = QueueDisciplineCores::new(cores, latency, PriorityCores::new(cores, 2, quantum, cost));
        let stealing_cores = QueueDisciplineCores::new(cores, latency, StealingCores::new(cores, cost));
        let departure_lists =
            [simulate_departures(&requests, ranked_dispatcher, yielding_cores),
                simulate_departures(&requests, RoundRobinDispatcher::new(cores), stealing_cores)];
        for departures in departure_lists {
            prop_assert_eq!(departures.len(), requests.len());
            let mut is_answered = vec![false; requests.len()];
            for (departed_at, index) in departures {
                let request = &requests[index as usize];
                prop_assert!(departed_at >= request.arrived_at + request.service_time + 2 * latency);
                prop_assert!(!std::mem::replace(&mut is_answered[index as usize], true));
            }
        }
    }

    /// Checks that no core is idle while a request is queued if stealing costs no time. Equally long requests then
    /// depart at the same times as from one ideal queue, though perhaps in a different order.
    #[test]
    fn stealing_without_cost_conserves_work(requests in request_list_strategy(), cores in 1u16..5) {
        let equal_requests: Vec<SimulatedRequest> =
            requests.iter().map(|request| SimulatedRequest { service_time: 50, service: 0, ..*request }).collect();
        let stealing = QueueDisciplineCores::new(cores, 0, StealingCores::new(cores, 0));
        let central_dispatcher = JoinShortestQueue::bounded(cores, std::num::NonZeroU16::MIN);
        let collect_departure_times =
            |left: Vec<(u64, u32)>| left.into_iter().map(|(left, _)| left).collect::<Vec<_>>();
        prop_assert_eq!(
            collect_departure_times(simulate_departures(&equal_requests, RoundRobinDispatcher::new(cores), stealing)),
            collect_departure_times(simulate_departures(&equal_requests, central_dispatcher, FifoCores::new(cores, 0)))
        );
    }
}

#[test]
fn busy_time_grows_continuously_during_service() {
    let build_request = |arrived_at, work| SimulatedRequest {
        arrived_at,
        service_time: work,
        request_hash: 0,
        flow_hash: 0,
        connection_number: 0,
        class_index: 0,
        service: 0,
    };
    fn assert_busy_time_grows_continuously<C: ServerCores>(cores: C, requests: &[SimulatedRequest]) {
        let mut server = NicServer::new(RoundRobinDispatcher::new(1), cores, 1);
        let mut departures = CollectedDepartures::default();
        for request in requests {
            server.advance(request.arrived_at, &mut departures);
            QueueingServer::<CollectedDepartures>::add_request(&mut server, *request);
        }
        // The interface delays requests by 5, so the core works from 15 to 115 and then until 165.
        for (now, busy_time) in [(40, 25), (120, 105), (165, 150), (200, 150)] {
            server.advance(now, &mut departures);
            assert_eq!(QueueingServer::<CollectedDepartures>::core_busy_times(&server, now), [busy_time], "at {now}");
        }
    }
    let requests = [build_request(10, 100), build_request(20, 50)];
    assert_busy_time_grows_continuously(FifoCores::new(1, 5), &requests);
    assert_busy_time_grows_continuously(QueueDisciplineCores::new(1, 5, StealingCores::new(1, 0)), &requests);
    assert_busy_time_grows_continuously(QueueDisciplineCores::new(1, 5, PriorityCores::new(1, 1, 10, 0)), &requests);
    assert_busy_time_grows_continuously(ProcessorSharingCores::new(1, 5), &requests);
}
