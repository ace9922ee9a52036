//! The orchestrator's main thread, which receives requests, sends them to cores, and returns the responses to clients.

use std::net::SocketAddrV4;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_daemon::service_manager::WatchdogNotifier;
use coreward_daemon::{metrics_endpoint, service_manager};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use crate::classify::RequestClassifier;
use crate::config::OrchestratorConfig;
use crate::dispatch_engine::{DispatchEngine, ServiceRequestCounters};
use crate::intake::RequestIntake;
use crate::report::{OrchestratedServiceStatus, OrchestratorStatus, SharedOrchestratorStatus};
use crate::socket::UdpBatchSocket;

/// Interval in nanoseconds between checks of the workers. A new worker is accepted after at most this time.
const WORKER_CHECK_INTERVAL_NS: u64 = 10_000_000;
/// Time for which the idle daemon polls before it sleeps, in nanoseconds.
const IDLE_SPIN_NS: u64 = 20_000;

#[derive(Debug)]
pub struct OrchestratorDaemon {
    engine: DispatchEngine,
    intake: RequestIntake,
    listeners: Vec<RequestListener>,
    listener_index_by_service: Vec<usize>,
    started_at: Instant,
    idle_sleep: Duration,
    next_maintenance_ns: u64,
    unclassified_datagrams: u64,
    /// Status that is shared with the metrics server, or `None` if no metrics are served.
    shared_status: Option<Arc<SharedOrchestratorStatus>>,
}

#[derive(Debug)]
struct RequestListener {
    address: SocketAddrV4,
    batch_socket: UdpBatchSocket,
    classifier: RequestClassifier,
}

impl OrchestratorDaemon {
    /// Creates the daemon, which binds its sockets and creates the workers' shared memory. The `intake` is already
    /// open, because opening it needs capabilities. Fails when a socket cannot be bound or the memory cannot be
    /// created.
    pub fn start(config: &OrchestratorConfig, intake: RequestIntake) -> anyhow::Result<Self> {
        let mut listeners = Vec::new();
        let mut listener_index_of_service = vec![0; config.engine_config.services.len()];
        for (address, classifier) in &config.listeners {
            let payload_bytes = usize::from(config.engine_config.max_payload_bytes);
            let socket = UdpBatchSocket::bind(*address, payload_bytes);
            let batch_socket = socket.with_context(|| format!("cannot listen on {address}"))?;
            classifier
                .services_and_patterns
                .iter()
                .for_each(|(service, _)| listener_index_of_service[usize::from(*service)] = listeners.len());
            listeners.push(RequestListener { address: *address, batch_socket, classifier: classifier.clone() });
        }
        let engine = DispatchEngine::new(&config.shared_memory_path, &config.engine_config)?;
        let (started_at, idle_sleep) = (Instant::now(), config.idle_sleep);
        let (next_maintenance_ns, unclassified_datagrams, shared_status) = (0, 0, None);
        let mut daemon = Self {
            engine,
            intake,
            listeners,
            listener_index_by_service: listener_index_of_service,
            started_at,
            idle_sleep,
            next_maintenance_ns,
            unclassified_datagrams,
            shared_status,
        };
        if config.metrics_address.is_some() {
            let shared_status = Arc::new(SharedOrchestratorStatus::new(daemon.current_status()));
            daemon.shared_status = Some(shared_status.clone());
            let metrics_snapshot = move || shared_status.request_status().metrics_snapshot();
            metrics_endpoint::serve_metrics(config.metrics_address, || (), metrics_snapshot)?;
        }
        Ok(daemon)
    }

    /// Runs the daemon until `stop_flag` is set. Fails when a socket fails.
    pub fn run_until_stopped(&mut self, stop_flag: &AtomicBool) -> anyhow::Result<()> {
        // The default timer slack of 50 us would double the daemon's sleep.
        nix::sys::prctl::set_timerslack(1).context("cannot set the timer slack")?;
        let mut idle_since_ns = 0;
        service_manager::notify_ready();
        let mut watchdog = WatchdogNotifier::default();
        while !stop_flag.load(Relaxed) {
            let processed_count = self.run_one_iteration()?;
            let now_ns = self.now_ns();
            watchdog.notify_if_due(Duration::from_nanos(now_ns));
            if processed_count > 0 {
                idle_since_ns = now_ns;
            } else if now_ns - idle_since_ns < IDLE_SPIN_NS || self.idle_sleep.is_zero() {
                std::hint::spin_loop();
            } else {
                self.wait_for_work(now_ns)?;
            }
        }
        service_manager::notify_stopping();
        Ok(())
    }

    /// Runs one iteration of the main loop without sleeping. Returns how many requests, responses and messages it has
    /// processed. Fails when a socket fails.
    pub fn run_one_iteration(&mut self) -> anyhow::Result<usize> {
        let now_ns = self.now_ns();
        let received_request_count = self.receive_from_af_xdp(now_ns) + self.receive_from_sockets(now_ns)?;
        let response_and_message_count = self.poll_cores(now_ns);
        self.engine.check_load_monitors(now_ns);
        if now_ns >= self.next_maintenance_ns {
            self.next_maintenance_ns = now_ns + WORKER_CHECK_INTERVAL_NS;
            self.check_workers(now_ns);
            self.intake.fall_back_if_device_gone();
            if let Some(shared_status) = &self.shared_status {
                shared_status.publish_if_requested(|| self.current_status());
            }
        }
        self.listeners.iter_mut().for_each(|listener| listener.batch_socket.flush());
        Ok(received_request_count + response_and_message_count)
    }

    fn now_ns(&self) -> u64 {
        self.started_at.elapsed().as_nanos() as u64
    }

    /// Submits a batch of requests that arrived through AF_XDP to the engine. Returns their number.
    fn receive_from_af_xdp(&mut self, now_ns: u64) -> usize {
        let Self { engine, intake, listeners, unclassified_datagrams: unclassified_count, .. } = self;
        intake.receive_batches(&mut |datagram| {
            let listener = listeners.iter().find(|listener| listener.address == datagram.destination);
            match listener.and_then(|listener| listener.classifier.classify_request(datagram.payload)) {
                Some(service) => engine.submit_request(now_ns, service, datagram.source, datagram.payload),
                None => *unclassified_count += 1,
            }
        })
    }

    /// Submits a batch of requests from each UDP socket to the engine. Returns their number.
    fn receive_from_sockets(&mut self, now_ns: u64) -> anyhow::Result<usize> {
        let Self { engine, listeners, unclassified_datagrams: unclassified_count, .. } = self;
        let mut received_request_count = 0;
        for RequestListener { address, batch_socket: socket, classifier } in listeners {
            let mut submit_request = |client, payload: &[u8]| match classifier.classify_request(payload) {
                Some(service) => engine.submit_request(now_ns, service, client, payload),
                None => *unclassified_count += 1,
            };
            received_request_count +=
                socket.receive_batch(&mut submit_request).with_context(|| format!("{address}: cannot receive"))?;
        }
        Ok(received_request_count)
    }

    fn poll_cores(&mut self, now_ns: u64) -> usize {
        let Self { engine, listeners, listener_index_by_service: listener_of_service, .. } = self;
        engine.poll(now_ns, &mut |service, client, response| {
            listeners[listener_of_service[usize::from(service)]].batch_socket.queue_datagram(client, response);
        })
    }

    fn check_workers(&mut self, now_ns: u64) {
        let Self { engine, listeners, listener_index_by_service: listener_of_service, .. } = self;
        engine.check_workers(now_ns, &mut |service, client, response| {
            listeners[listener_of_service[usize::from(service)]].batch_socket.queue_datagram(client, response);
        });
    }

    /// Sleeps until a request arrives or a timer is due. Workers' responses do not end the sleep, so it is short while
    /// cores have requests.
    fn wait_for_work(&self, now_ns: u64) -> anyhow::Result<()> {
        let next_timer_ns = self.engine.next_timer_due_ns(now_ns).unwrap_or(u64::MAX).min(self.next_maintenance_ns);
        let mut timeout = Duration::from_nanos(next_timer_ns.saturating_sub(now_ns));
        if self.engine.has_outstanding_requests() {
            timeout = timeout.min(self.idle_sleep);
        }
        let listener_sockets = self.listeners.iter().map(|listener| listener.batch_socket.as_fd());
        let polled_sockets = listener_sockets.chain(self.intake.af_xdp_sockets());
        let mut polled_sockets: Vec<PollFd<'_>> =
            polled_sockets.map(|socket| PollFd::new(socket, PollFlags::POLLIN)).collect();
        match ppoll(&mut polled_sockets, Some(TimeSpec::from_duration(timeout)), None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error).context("cannot wait for requests"),
        }
    }

    pub fn engine(&self) -> &DispatchEngine {
        &self.engine
    }

    pub fn current_status(&self) -> OrchestratorStatus {
        let dispatch_policy = self.engine.dispatch_policy();
        let all_cores = 0..dispatch_policy.ranks().core_count();
        let to_service_status = |(service, counters): (u8, &ServiceRequestCounters)| OrchestratedServiceStatus {
            listen_address: self.listeners[self.listener_index_by_service[usize::from(service)]].address,
            counters: *counters,
            waiting_requests: dispatch_policy.waiting_request_count(service),
            outstanding_requests: all_cores
                .clone()
                .map(|core| u64::from(dispatch_policy.ranks().service_outstanding_request_count(service, core)))
                .sum(),
        };
        OrchestratorStatus {
            service_statuses: (0..).zip(&self.engine.service_counters()).map(to_service_status).collect(),
            core_counters: *self.engine.core_counters(),
            attached_worker_count: self.engine.attached_worker_count(),
            intake_status: self.intake.status(),
            unclassified_datagrams: self.unclassified_datagrams,
            unsent_responses: self.listeners.iter().map(|listener| listener.batch_socket.unsent_datagram_count()).sum(),
        }
    }
}
