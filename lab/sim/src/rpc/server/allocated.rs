//! Server that moves cores between two services by load hints (RingLeader, NSDI'23, Sect. 4.4). The policy is
//! `jbsrq:assignment=dedicated` or `jbsrq:assignment=hybrid`.

use std::num::NonZeroU64;

use coreward_model::dispatch::{
    CoreAllocator, CoreAssignmentChange, EpochLength, JoinBoundedShortestRankedQueue, LoadHint, LoadMonitor,
    ScaleDownCondition, ScaleUpCondition,
};

use super::delay::DelayLine;
use super::priority::PriorityCores;
use super::queued::QueueDisciplineCores;
use super::{NicServer, QueueingServer, ResponseSink, SimulatedRequest};
use crate::rpc::ticks::{NEVER, Tick};

type PriorityNicServer = NicServer<JoinBoundedShortestRankedQueue, QueueDisciplineCores<PriorityCores>>;

/// Server whose load monitors at the NIC send hints to the core allocator. The allocator runs at the cores, and its
/// decisions return to the NIC. Each way takes the latency of the interface. A core that is moved to another service
/// first serves its queued requests.
#[derive(Debug)]
pub struct RingLeaderServer {
    server: PriorityNicServer,
    core_allocator: CoreAllocator,
    load_monitors: [LoadMonitor; 2],
    check_interval: Tick,
    next_check_at: Tick,
    hints_to_allocator: DelayLine<(u8, LoadHint)>,
    assignment_changes_to_nic: DelayLine<(u8, Vec<CoreAssignmentChange>)>,
}

/// Number of consecutive checks without waiting requests after which a service gives up a core. RingLeader's paper does
/// not state this number.
const EPOCHS_WITHOUT_WAITING_REQUESTS: u32 = 4;

impl RingLeaderServer {
    /// Creates a server with `cores` cores, of which only those in `core_allocator` serve requests. Load monitors check
    /// the queues every `check_interval`. `latency` is the one-way latency between NIC and cores.
    pub fn new(
        mut server: PriorityNicServer,
        cores: u16,
        core_allocator: CoreAllocator,
        check_interval: Tick,
        latency: Tick,
    ) -> Self {
        for core in 0..cores {
            for service in [0, 1] {
                let is_running = core < core_allocator.core_count() && core_allocator.is_service_running(service, core);
                server.dispatcher.set_service_enabled(service, core, is_running);
            }
        }
        let epoch = EpochLength::new(NonZeroU64::new(check_interval).unwrap_or(NonZeroU64::MIN));
        let mut monitor = LoadMonitor::default();
        monitor.enable_scale_up(0, ScaleUpCondition { epoch_length: epoch });
        monitor.enable_scale_down(
            0,
            ScaleDownCondition {
                epoch_length: epoch,
                max_calm_queue_length: 0,
                required_calm_epochs: EPOCHS_WITHOUT_WAITING_REQUESTS,
            },
        );
        Self {
            server,
            core_allocator,
            load_monitors: [monitor.clone(), monitor],
            check_interval,
            next_check_at: check_interval,
            hints_to_allocator: DelayLine::new(latency),
            assignment_changes_to_nic: DelayLine::new(latency),
        }
    }

    fn process_event(&mut self, now: Tick) {
        if self.assignment_changes_to_nic.next_arrival_time() == now {
            let Some((_, (service, changes))) = self.assignment_changes_to_nic.receive() else { return };
            for CoreAssignmentChange { service, core, is_running } in changes {
                self.server.dispatcher.set_service_enabled(service, core, is_running);
            }
            self.load_monitors[usize::from(service)].rearm_hints();
            self.server.release_waiting_requests(now);
        } else if self.hints_to_allocator.next_arrival_time() == now {
            let Some((_, (service, hint))) = self.hints_to_allocator.receive() else { return };
            let dispatcher = &self.server.dispatcher;
            let is_other_service_waiting = dispatcher.waiting_request_count(1 - service) > 0;
            let changes =
                self.core_allocator.apply_load_hint(service, hint, is_other_service_waiting, |service, core| {
                    dispatcher.ranks().service_outstanding_count(service, core)
                });
            self.assignment_changes_to_nic.send(now, (service, changes));
        } else {
            for service in [0, 1] {
                let oldest_arrival =
                    self.server.waiting_requests[usize::from(service)].front().map(|request| request.arrived_at);
                let peak_waiting_count = self.server.dispatcher.take_peak_waiting_count(service);
                if let Some(hint) =
                    self.load_monitors[usize::from(service)].check_for_hint(now, oldest_arrival, peak_waiting_count)
                {
                    self.hints_to_allocator.send(now, (service, hint));
                }
            }
            self.next_check_at += self.check_interval;
        }
    }

    fn next_event_time(&self) -> Tick {
        self.next_check_at
            .min(self.hints_to_allocator.next_arrival_time())
            .min(self.assignment_changes_to_nic.next_arrival_time())
    }
}

impl<S: ResponseSink> QueueingServer<S> for RingLeaderServer {
    fn advance(&mut self, end_time: Tick, sink: &mut S) {
        // At the end of a run, monitoring continues until every request is answered.
        let is_run_ending = end_time == NEVER - 1;
        while self.next_event_time() <= end_time && !(is_run_ending && self.server.outstanding_count == 0) {
            let now = self.next_event_time();
            self.server.advance(now, sink);
            self.process_event(now);
        }
        self.server.advance(end_time, sink);
    }

    fn add_request(&mut self, request: SimulatedRequest) {
        QueueingServer::<S>::add_request(&mut self.server, request);
    }

    fn outstanding_count(&self) -> u64 {
        self.server.outstanding_count
    }

    fn core_busy_times(&self, now: Tick) -> Vec<Tick> {
        QueueingServer::<S>::core_busy_times(&self.server, now)
    }
}
