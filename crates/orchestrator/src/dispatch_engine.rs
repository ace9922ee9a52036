//! The orchestrator without its sockets. It applies the decisions of `coreward-model` to the queues in shared memory.

use std::net::SocketAddrV4;
use std::num::NonZeroU16;
use std::path::Path;
use std::time::Duration;

use coreward_model::dispatch::{
    CoreRankRule, FirstEligibleOutConfig, FirstEligibleOutConfigError, JoinBoundedShortestRankedQueue, LoadMonitor,
    RankArrays, RankLambda, RankedService, ReleasedRequest, WorkerStallDetector,
};
use coreward_runtime::core_queues::{CoreQueues, RequestHeader};
use coreward_runtime::segment_layout::SegmentGeometry;
use coreward_runtime::worker_message::{LoadHintMessage, LoadHintTrigger, WorkerMessage};
use coreward_runtime::{RuntimeError, SegmentServiceEntry};

use crate::request_buffers::RequestBufferPool;

/// Maximum number of responses that are received from one core in one batch. The same limit applies to messages.
const MAX_RESPONSES_PER_BATCH: usize = 64;

#[derive(Debug, Clone)]
pub struct DispatchEngineConfig {
    /// Number of cores that can have a worker.
    pub core_count: u16,
    /// Upper bound of a core's rank. A core whose rank reaches this bound gets no further requests.
    pub rank_bound: NonZeroU16,
    /// Rule that determines how a core's outstanding requests count in its rank.
    pub rank_rule: CoreRankRule,
    /// Configuration of each service, in the order of `scheduler.queues`.
    pub services: Vec<EngineServiceConfig>,
    /// Scheduler, which decides the order in which waiting requests are sent to cores. Its capacity is the number of
    /// request buffers.
    pub scheduler_config: FirstEligibleOutConfig,
    /// Maximum payload of a request or response in bytes.
    pub max_payload_bytes: u16,
    /// Time after which a worker that has requests but completes none counts as stalled. It then gets no requests until
    /// it completes one.
    pub stall_after: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineServiceConfig {
    /// Address and priority of the service. The process that serves it must register the same values.
    pub service_entry: SegmentServiceEntry,
    pub lambda: RankLambda,
}

#[derive(Debug, thiserror::Error)]
pub enum DispatchEngineError {
    /// The shared memory cannot be created.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Scheduler(#[from] FirstEligibleOutConfigError),
}

/// Request counts of one service. Always received = dropped + rejected + waiting + outstanding + completed + lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServiceRequestCounters {
    pub received_requests: u64,
    /// Requests that were dropped because too many requests waited for a core.
    pub dropped_requests: u64,
    /// Requests that were too long, or that a core's queue rejected.
    pub rejected_requests: u64,
    pub completed_requests: u64,
    /// Requests that a core had not completed when its worker ended.
    pub lost_requests: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CoreRequestCounters {
    pub accepted_workers: u64,
    pub ended_workers: u64,
    /// Number of times that a worker stalled: it completed no request for so long that it got no further ones.
    pub worker_stalls: u64,
    pub sent_hints: u64,
    /// Messages that had an unknown kind or were about services or cores that do not exist.
    pub invalid_messages: u64,
    /// Requests to enable a service on a core whose worker had just ended. They do not count as errors.
    pub enable_messages_without_worker: u64,
    pub rejected_feedback: u64,
    /// Number of times that the head and tail of a core's queue had impossible positions.
    pub damaged_queues: u64,
}

/// Engine that dispatches requests to the cores' workers. All times are in nanoseconds on one monotonic clock.
#[derive(Debug)]
pub struct DispatchEngine {
    dispatch_policy: JoinBoundedShortestRankedQueue<u32>,
    queues: CoreQueues,
    buffers: RequestBufferPool,
    services: Vec<EngineServiceState>,
    cores: Vec<EngineCoreState>,
    core_counters: CoreRequestCounters,
    max_payload_bytes: usize,
    stall_after: Duration,
}

#[derive(Debug)]
struct EngineServiceState {
    priority: u8,
    load_monitor: LoadMonitor,
    /// Core whose worker has not yet acted on the service's last load hint, or `None` if no hint awaits action.
    hinted_core: Option<u16>,
    counters: ServiceRequestCounters,
}

#[derive(Debug)]
struct EngineCoreState {
    has_worker: bool,
    is_stalled: bool,
    /// Bit mask of the services that the worker has enabled. The mask is kept while the worker is stalled.
    enabled_service_mask: u64,
    completed_request_count: u64,
    stall_detector: WorkerStallDetector,
}

impl DispatchEngine {
    /// Creates an engine with shared memory at `path`. At first no service is enabled on any core. Fails when the
    /// configuration is out of range or the memory cannot be created.
    pub fn new(path: &Path, config: &DispatchEngineConfig) -> Result<Self, DispatchEngineError> {
        let to_ranked_service = |service: &EngineServiceConfig| RankedService {
            priority: service.service_entry.priority,
            lambda: service.lambda,
        };
        let ranked_services: Vec<_> = config.services.iter().map(to_ranked_service).collect();
        let rank_arrays = RankArrays::new(config.core_count, &ranked_services, config.rank_rule, config.rank_bound);
        let mut dispatch_policy = JoinBoundedShortestRankedQueue::with_ranks(rank_arrays, &config.scheduler_config)?;
        for service in 0..config.services.len() as u8 {
            (0..config.core_count).for_each(|core| dispatch_policy.set_service_enabled(service, core, false));
        }
        let service_entries: Vec<_> = config.services.iter().map(|service| service.service_entry).collect();
        let core_queues = CoreQueues::create(path, config.segment_geometry(), &service_entries)?;
        let payload_bytes = usize::from(config.max_payload_bytes);
        let services = service_entries.iter().map(|entry| EngineServiceState {
            priority: entry.priority,
            load_monitor: LoadMonitor::default(),
            hinted_core: None,
            counters: ServiceRequestCounters::default(),
        });
        let new_core_state = || EngineCoreState {
            has_worker: false,
            is_stalled: false,
            enabled_service_mask: 0,
            completed_request_count: 0,
            stall_detector: WorkerStallDetector::new(Duration::ZERO, 0),
        };
        Ok(Self {
            dispatch_policy,
            queues: core_queues,
            // One more buffer is needed because a request is stored in the full buffer before another one is dropped.
            buffers: RequestBufferPool::new(config.scheduler_config.max_waiting_requests + 1, payload_bytes),
            services: services.collect(),
            cores: (0..config.core_count).map(|_| new_core_state()).collect(),
            core_counters: CoreRequestCounters::default(),
            max_payload_bytes: payload_bytes,
            stall_after: config.stall_after,
        })
    }

    /// Accepts a request from a client. The request is then sent to a core, queued, dropped, or rejected because it is
    /// too long.
    #[inline]
    pub fn submit_request(&mut self, now_ns: u64, service: u8, client: SocketAddrV4, payload: &[u8]) {
        let counters = &mut self.services[usize::from(service)].counters;
        counters.received_requests += 1;
        if payload.len() > self.max_payload_bytes {
            counters.rejected_requests += 1;
            return;
        }
        let handle = self.buffers.store_request(client, now_ns, payload);
        let submit_outcome = self.dispatch_policy.submit_request(now_ns, service, handle);
        if let Some((service, handle)) = submit_outcome.dropped_request {
            self.services[usize::from(service)].counters.dropped_requests += 1;
            self.buffers.release(handle);
        }
        if let Some((released_request, handle)) = submit_outcome.sent_request {
            self.send_request_to_core(released_request, handle);
        }
    }

    #[inline]
    pub fn dispatch_waiting_requests(&mut self, now_ns: u64) {
        while let Some((released_request, handle)) = self.dispatch_policy.release_next_request(now_ns) {
            self.send_request_to_core(released_request, handle);
        }
    }

    #[inline]
    fn send_request_to_core(&mut self, ReleasedRequest { service, core }: ReleasedRequest, handle: u32) {
        let buffer = self.buffers.get(handle);
        let header = RequestHeader { client: buffer.client, service, arrival_time_ns: buffer.arrival_time_ns };
        let priority = self.services[usize::from(service)].priority;
        let send_result = self.queues.send_request(core, priority, &header, buffer.payload());
        self.buffers.release(handle);
        if let Err(error) = send_result {
            tracing::warn!(
                event = "request-rejected",
                core,
                service,
                %error,
                "the request queue of a core does not accept a request: the orchestrator drops the request"
            );
            self.services[usize::from(service)].counters.rejected_requests += 1;
            self.core_counters.damaged_queues += u64::from(matches!(error, RuntimeError::DamagedQueue { .. }));
            self.dispatch_policy.record_feedback(service, core, 1).expect("the request was counted");
            self.release_core(core);
        }
    }

    /// Receives responses and messages from all cores, accepts new workers, and dispatches waiting requests. Passes
    /// each response to `send_response` with its service and client. Returns the number of responses and messages.
    pub fn poll(&mut self, now_ns: u64, send_response: &mut dyn FnMut(u8, SocketAddrV4, &[u8])) -> usize {
        let mut response_and_message_count = 0;
        for core in 0..self.cores.len() as u16 {
            if self.queues.has_new_worker(core) {
                self.replace_worker(now_ns, core, send_response);
            }
            if self.cores[usize::from(core)].has_worker {
                response_and_message_count += self.poll_core(now_ns, core, send_response);
            }
        }
        self.dispatch_waiting_requests(now_ns);
        response_and_message_count
    }

    #[inline]
    fn poll_core(&mut self, now_ns: u64, core: u16, send_response: &mut dyn FnMut(u8, SocketAddrV4, &[u8])) -> usize {
        self.receive_responses(core, send_response) + self.receive_messages(now_ns, core)
    }

    #[inline]
    fn receive_responses(&mut self, core: u16, send_response: &mut dyn FnMut(u8, SocketAddrV4, &[u8])) -> usize {
        let Self { queues, dispatch_policy, services, cores, core_counters: counters, .. } = self;
        let mut engine_state = EngineStateRefs { dispatch_policy, services, cores, core_counters: counters };
        queues.receive_responses(core, MAX_RESPONSES_PER_BATCH, |header, payload| {
            if engine_state.record_completions(header.service, core, header.completed_count)
                && let Some(payload) = payload
            {
                send_response(header.service, header.client, payload);
            }
        })
    }

    #[inline]
    fn receive_messages(&mut self, now_ns: u64, core: u16) -> usize {
        let Self { queues, dispatch_policy, services, cores, core_counters: counters, .. } = self;
        let mut engine_state = EngineStateRefs { dispatch_policy, services, cores, core_counters: counters };
        queues.receive_messages(core, MAX_RESPONSES_PER_BATCH, |message| {
            engine_state.apply_worker_message(now_ns, message)
        })
    }

    /// Accepts a core's new worker. Requests that the previous worker has not completed are lost.
    fn replace_worker(&mut self, now_ns: u64, core: u16, send_response: &mut dyn FnMut(u8, SocketAddrV4, &[u8])) {
        if self.cores[usize::from(core)].has_worker {
            self.end_worker(now_ns, core, send_response);
        }
        self.queues.accept_worker(core);
        self.core_counters.accepted_workers += 1;
        let core_state = &mut self.cores[usize::from(core)];
        core_state.has_worker = true;
        core_state.stall_detector =
            WorkerStallDetector::new(Duration::from_nanos(now_ns), core_state.completed_request_count);
        tracing::info!(
            event = "worker-attached",
            core,
            "a worker has attached to the core, which gets requests once the worker enables services"
        );
    }

    /// Checks whether workers have ended or stalled. Must be called every few milliseconds.
    pub fn check_workers(&mut self, now_ns: u64, send_response: &mut dyn FnMut(u8, SocketAddrV4, &[u8])) {
        for core in 0..self.cores.len() as u16 {
            if !self.cores[usize::from(core)].has_worker {
                continue;
            }
            if self.queues.has_worker(core) {
                self.update_worker_stall_state(now_ns, core);
            } else {
                self.end_worker(now_ns, core, send_response);
            }
        }
        self.dispatch_waiting_requests(now_ns);
    }

    fn update_worker_stall_state(&mut self, now_ns: u64, core: u16) {
        let outstanding_request_count = self.dispatch_policy.ranks().core_outstanding_request_count(core) as usize;
        let core_state = &mut self.cores[usize::from(core)];
        let now = Duration::from_nanos(now_ns);
        let is_stalled = core_state.stall_detector.detect_stall(
            now,
            core_state.completed_request_count,
            outstanding_request_count,
            self.stall_after,
        );
        if is_stalled == core_state.is_stalled {
            return;
        }
        core_state.is_stalled = is_stalled;
        self.core_counters.worker_stalls += u64::from(is_stalled);
        let enabled_services = core_state.enabled_service_mask;
        for service in (0..self.services.len() as u8).filter(|service| enabled_services >> service & 1 == 1) {
            self.dispatch_policy.set_service_enabled(service, core, !is_stalled);
        }
        match is_stalled {
            true => tracing::warn!(
                event = "worker-stalled",
                core,
                outstanding = outstanding_request_count,
                stall_after = ?self.stall_after,
                "the core's worker completes no requests: the orchestrator sends the core no new requests"
            ),
            false => tracing::info!(
                event = "worker-recovered",
                core,
                "the core's stalled worker has completed a request: the core gets new requests again"
            ),
        }
    }

    /// Receives everything that a worker sent before it ended, and then releases its core.
    fn end_worker(&mut self, now_ns: u64, core: u16, send_response: &mut dyn FnMut(u8, SocketAddrV4, &[u8])) {
        while self.poll_core(now_ns, core, send_response) > 0 {}
        if self.cores[usize::from(core)].has_worker {
            self.release_core(core);
        }
    }

    /// Counts the core's outstanding requests as lost, and disables all services on the core.
    fn release_core(&mut self, core: u16) {
        self.queues.release_core(core);
        self.core_counters.ended_workers += 1;
        let mut lost_request_count = 0;
        for service in 0..self.services.len() as u8 {
            self.dispatch_policy.set_service_enabled(service, core, false);
            let outstanding_request_count =
                self.dispatch_policy.ranks().service_outstanding_request_count(service, core);
            self.dispatch_policy
                .record_feedback(service, core, outstanding_request_count)
                .expect("so many are outstanding");
            let service_state = &mut self.services[usize::from(service)];
            service_state.counters.lost_requests += u64::from(outstanding_request_count);
            lost_request_count += outstanding_request_count;
            if service_state.hinted_core == Some(core) {
                service_state.rearm_load_monitor();
            }
        }
        let core_state = &mut self.cores[usize::from(core)];
        (core_state.has_worker, core_state.is_stalled, core_state.enabled_service_mask) = (false, false, 0);
        tracing::info!(
            event = "worker-ended",
            core,
            lost = lost_request_count,
            "the core's worker has ended with `lost` outstanding requests, which get no response"
        );
    }

    /// Performs the load monitors' checks that are due, and sends the resulting hints to workers.
    pub fn check_load_monitors(&mut self, now_ns: u64) {
        for service in 0..self.services.len() as u8 {
            let service_state = &mut self.services[usize::from(service)];
            if service_state.load_monitor.next_check_time().is_none_or(|check_time| now_ns < check_time) {
                continue;
            }
            let (oldest_arrival_time, waiting_peak) = (
                self.dispatch_policy.scheduler().oldest_arrival_time(service),
                self.dispatch_policy.take_peak_waiting_request_count(service),
            );
            let Some(hint) = service_state.load_monitor.check_for_hint(now_ns, oldest_arrival_time, waiting_peak)
            else {
                continue;
            };
            let has_waiting_requests = |service: &u8| self.dispatch_policy.waiting_request_count(*service) > 0;
            let waiting_services = (0..self.services.len() as u8)
                .filter(has_waiting_requests)
                .fold(0, |mask, service| mask | 1 << service);
            let least_loaded_core = self.dispatch_policy.ranks().least_loaded_core(service);
            let message = LoadHintMessage { service, hint, waiting_service_mask: waiting_services };
            let hinted_core = least_loaded_core.filter(|core| self.queues.send_hint(*core, message).is_ok());
            let service_state = &mut self.services[usize::from(service)];
            service_state.hinted_core = hinted_core;
            match hinted_core {
                Some(_) => self.core_counters.sent_hints += 1,
                None => service_state.rearm_load_monitor(),
            }
        }
    }

    /// Returns the time at which the next load monitor is due or a rate limit permits the next request, if any.
    pub fn next_timer_due_ns(&self, now_ns: u64) -> Option<u64> {
        let monitor_check_times = self.services.iter().filter_map(|service| service.load_monitor.next_check_time());
        // If that time has passed, the requests wait for a core and not for the rate limit.
        let rate_limit_end_time =
            self.dispatch_policy.scheduler().next_token_time().filter(|token_time| *token_time > now_ns);
        monitor_check_times.chain(rate_limit_end_time).min()
    }

    pub fn has_outstanding_requests(&self) -> bool {
        (0..self.cores.len() as u16).any(|core| self.dispatch_policy.ranks().core_outstanding_request_count(core) > 0)
    }

    pub fn dispatch_policy(&self) -> &JoinBoundedShortestRankedQueue<u32> {
        &self.dispatch_policy
    }

    pub fn service_counters(&self) -> Vec<ServiceRequestCounters> {
        self.services.iter().map(|service| service.counters).collect()
    }

    pub fn attached_worker_count(&self) -> usize {
        self.cores.iter().filter(|core| core.has_worker).count()
    }

    pub fn core_counters(&self) -> &CoreRequestCounters {
        &self.core_counters
    }
}

impl DispatchEngineConfig {
    fn segment_geometry(&self) -> SegmentGeometry {
        let queues_per_core = match self.rank_rule {
            CoreRankRule::Ranked | CoreRankRule::Global => 1,
            CoreRankRule::PerService => self.services.len().max(1),
        };
        let priority_count = self.services.iter().map(|service| service.service_entry.priority + 1).max().unwrap_or(1);
        let slots_per_queue = (u32::from(self.rank_bound.get()) * queues_per_core as u32).next_power_of_two();
        SegmentGeometry {
            core_count: self.core_count,
            priority_count,
            slots_per_queue,
            slot_bytes: SegmentGeometry::slot_bytes_for_payload(self.max_payload_bytes),
        }
    }
}

impl EngineServiceState {
    fn rearm_load_monitor(&mut self) {
        self.hinted_core = None;
        self.load_monitor.rearm_hints();
    }
}

struct EngineStateRefs<'e> {
    dispatch_policy: &'e mut JoinBoundedShortestRankedQueue<u32>,
    services: &'e mut [EngineServiceState],
    cores: &'e mut [EngineCoreState],
    core_counters: &'e mut CoreRequestCounters,
}

impl EngineStateRefs<'_> {
    #[inline]
    fn record_completions(&mut self, service: u8, core: u16, completion_count: u32) -> bool {
        let Some(service_state) = self.services.get_mut(usize::from(service)) else {
            self.core_counters.invalid_messages += 1;
            return false;
        };
        if let Err(error) = self.dispatch_policy.record_feedback(service, core, completion_count) {
            if self.core_counters.rejected_feedback == 0 {
                tracing::warn!(
                    event = "feedback-rejected",
                    core,
                    service,
                    count = completion_count,
                    %error,
                    "a worker reports more completed requests than it was sent: the orchestrator ignores the report, \
                     and logs no further ones"
                );
            }
            self.core_counters.rejected_feedback += 1;
            return false;
        }
        service_state.counters.completed_requests += u64::from(completion_count);
        self.cores[usize::from(core)].completed_request_count += u64::from(completion_count);
        true
    }

    #[inline]
    fn apply_worker_message(&mut self, now_ns: u64, message: Option<WorkerMessage>) {
        let (service_count, core_count) = (self.services.len(), self.cores.len());
        let is_in_range =
            |service: u8, core: u16| usize::from(service) < service_count && usize::from(core) < core_count;
        match message {
            Some(WorkerMessage::LoadFeedback { service, core, count }) if is_in_range(service, core) => {
                self.record_completions(service, core, count);
            }
            Some(WorkerMessage::EnableService { service, core }) if is_in_range(service, core) => {
                self.set_service_enabled(service, core, true);
            }
            Some(WorkerMessage::DisableService { service, core }) if is_in_range(service, core) => {
                self.set_service_enabled(service, core, false);
            }
            Some(WorkerMessage::EnableLoadMonitor { service, trigger }) if is_in_range(service, 0) => {
                let load_monitor = &mut self.services[usize::from(service)].load_monitor;
                match trigger {
                    LoadHintTrigger::ScaleUp(condition) => load_monitor.enable_scale_up(now_ns, condition),
                    LoadHintTrigger::ScaleDown(condition) => load_monitor.enable_scale_down(now_ns, condition),
                }
            }
            Some(WorkerMessage::RearmLoadMonitor { service }) if is_in_range(service, 0) => {
                self.services[usize::from(service)].rearm_load_monitor();
            }
            _ => self.core_counters.invalid_messages += 1,
        }
    }

    fn set_service_enabled(&mut self, service: u8, core: u16, is_enabled: bool) {
        let core_state = &mut self.cores[usize::from(core)];
        if is_enabled && !core_state.has_worker {
            self.core_counters.enable_messages_without_worker += 1;
            return;
        }
        core_state.enabled_service_mask =
            core_state.enabled_service_mask & !(1 << service) | u64::from(is_enabled) << service;
        self.dispatch_policy.set_service_enabled(service, core, is_enabled && !core_state.is_stalled);
    }
}
