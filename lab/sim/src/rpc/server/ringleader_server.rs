//! Server that moves cores between two services by load hints (RingLeader, NSDI'23, Sect. 4.4). The policy is
//! `jbsrq:assignment=dedicated` or `jbsrq:assignment=hybrid`.

use std::num::NonZeroU64;

use coreward_model::dispatch::{
    CoreAllocator, CoreAssignmentChange, JoinBoundedShortestRankedQueue, LoadCheckInterval, LoadHint, LoadMonitor,
    ScaleDownCondition, ScaleUpCondition,
};

use super::interface_delay::DelayLine;
use super::priority::PriorityCores;
use super::queue_discipline::QueueDisciplineCores;
use super::{NicServer, QueueingServer, ResponseSink, SimulatedRequest};
use crate::rpc::ticks::{NEVER, Tick};

type PriorityNicServer = NicServer<JoinBoundedShortestRankedQueue, QueueDisciplineCores<PriorityCores>>;

/// Server whose load monitors at the NIC send hints to the core allocator. The allocator runs at the cores, and its
/// decisions return to the NIC. Each way takes the latency of the interface. A core that is moved to another service
/// first serves its queued requests.
#[derive(Debug)]
pub struct RingLeaderServer {
    nic_server: PriorityNicServer,
    core_allocator: CoreAllocator,
    load_monitors: [LoadMonitor; 2],
    load_check_interval: Tick,
    next_load_check_at: Tick,
    load_hints_to_allocator: DelayLine<(u8, LoadHint)>,
    assignment_changes_to_nic: DelayLine<(u8, Vec<CoreAssignmentChange>)>,
}

/// Number of consecutive checks without waiting requests after which a service gives up a core. RingLeader's paper does
/// not state this number.
const EPOCHS_WITHOUT_WAITING_REQUESTS: u32 = 4;

impl RingLeaderServer {
    /// Creates a server with `cores` cores, of which only those in `core_allocator` serve requests. Load monitors check
    /// the queues every `load_check_interval`. `latency` is the one-way latency between NIC and cores.
    pub fn new(
        mut nic_server: PriorityNicServer,
        cores: u16,
        core_allocator: CoreAllocator,
        load_check_interval: Tick,
        latency: Tick,
    ) -> Self {
        for core in 0..cores {
            for service in [0, 1] {
                let is_running =
                    core < core_allocator.core_count() && core_allocator.is_service_assigned(service, core);
                nic_server.dispatcher.set_service_enabled(service, core, is_running);
            }
        }
        let epoch = LoadCheckInterval::new(NonZeroU64::new(load_check_interval).unwrap_or(NonZeroU64::MIN));
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
            nic_server,
            core_allocator,
            load_monitors: [monitor.clone(), monitor],
            load_check_interval,
            next_load_check_at: load_check_interval,
            load_hints_to_allocator: DelayLine::new(latency),
            assignment_changes_to_nic: DelayLine::new(latency),
        }
    }

    fn process_due_event(&mut self, now: Tick) {
        if self.assignment_changes_to_nic.next_arrival_time() == now {
            let Some((_, (service, changes))) = self.assignment_changes_to_nic.receive() else { return };
            for CoreAssignmentChange { service, core, is_assigned: is_running } in changes {
                self.nic_server.dispatcher.set_service_enabled(service, core, is_running);
            }
            self.load_monitors[usize::from(service)].rearm_hints();
            self.nic_server.dispatch_waiting_requests(now);
        } else if self.load_hints_to_allocator.next_arrival_time() == now {
            let Some((_, (service, hint))) = self.load_hints_to_allocator.receive() else { return };
            let dispatcher = &self.nic_server.dispatcher;
            let is_other_service_waiting = dispatcher.waiting_request_count(1 - service) > 0;
            let changes =
                self.core_allocator.apply_load_hint(service, hint, is_other_service_waiting, |service, core| {
                    dispatcher.ranks().service_outstanding_request_count(service, core)
                });
            self.assignment_changes_to_nic.send(now, (service, changes));
        } else {
            for service in [0, 1] {
                let oldest_arrival = self.nic_server.waiting_requests_by_service[usize::from(service)]
                    .front()
                    .map(|request| request.arrived_at);
                let peak_waiting_count = self.nic_server.dispatcher.take_peak_waiting_request_count(service);
                if let Some(hint) =
                    self.load_monitors[usize::from(service)].check_for_hint(now, oldest_arrival, peak_waiting_count)
                {
                    self.load_hints_to_allocator.send(now, (service, hint));
                }
            }
            self.next_load_check_at += self.load_check_interval;
        }
    }

    fn next_event_time(&self) -> Tick {
        self.next_load_check_at
            .min(self.load_hints_to_allocator.next_arrival_time())
            .min(self.assignment_changes_to_nic.next_arrival_time())
    }
}

impl<S: ResponseSink> QueueingServer<S> for RingLeaderServer {
    fn advance(&mut self, end_time: Tick, sink: &mut S) {
        // At the end of a run, monitoring continues until every request is answered.
        let is_run_ending = end_time == NEVER - 1;
        while self.next_event_time() <= end_time && !(is_run_ending && self.nic_server.outstanding_request_count == 0) {
            let now = self.next_event_time();
            self.nic_server.advance(now, sink);
            self.process_due_event(now);
        }
        self.nic_server.advance(end_time, sink);
    }

    fn add_request(&mut self, request: SimulatedRequest) {
        QueueingServer::<S>::add_request(&mut self.nic_server, request);
    }

    fn outstanding_request_count(&self) -> u64 {
        self.nic_server.outstanding_request_count
    }

    fn core_busy_times(&self, now: Tick) -> Vec<Tick> {
        QueueingServer::<S>::core_busy_times(&self.nic_server, now)
    }
}
