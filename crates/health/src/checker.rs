//! Health checker, which checks each target at its own interval. It has its own thread and runtime, so that connections
//! to servers cannot delay the load balancer.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use coreward_model::health::{HealthCheck, HealthVerdict, ServerHealthTracker};
use parking_lot::{Mutex, MutexGuard};
use rand::RngExt as _;
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use crate::nat_path::NatTable;
use crate::probe::HealthProber;

/// Maximum number of concurrent checks. It equals the number of NAT entries in the data plane. Further checks wait.
pub const MAX_CONCURRENT_HEALTH_CHECKS: usize = 1024;

/// Maximum random delay of a target's first check. The delay is also at most the check's interval.
const MAX_FIRST_HEALTH_CHECK_DELAY: Duration = Duration::from_millis(500);

pub struct CheckedService<K> {
    pub health_check: Arc<HealthCheck>,
    /// VIP and port that clients connect to.
    pub vip: SocketAddr,
    /// Keys and own addresses of the service's servers. No key may occur twice, even in different services.
    pub server_addresses_by_key: Vec<(K, IpAddr)>,
    /// NAT table of the data plane, which is required for checks at the VIP.
    pub nat_table: Option<Arc<dyn NatTable>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct TargetHealthCheckResult {
    health_tracker: ServerHealthTracker,
    /// Time at which the verdict last changed, or at which the first check was due.
    pub verdict_since: Instant,
    /// Error of the newest check. It is empty if that check passed, or if no check has finished yet.
    pub last_error: String,
    /// Response time of the newest check that got an answer, or zero if none did.
    pub last_latency: Duration,
    pub check_count: u64,
    pub failure_count: u64,
}

impl TargetHealthCheckResult {
    fn before_first_check() -> Self {
        let verdict_since = Instant::now();
        Self {
            health_tracker: ServerHealthTracker::default(),
            verdict_since,
            last_error: String::new(),
            last_latency: Duration::ZERO,
            check_count: 0,
            failure_count: 0,
        }
    }

    /// Returns the verdict on the server, or `None` before enough checks have finished.
    pub fn verdict(&self) -> Option<HealthVerdict> {
        self.health_tracker.verdict()
    }
}

/// Settings of the checks of one server. Its earlier results are kept as long as no setting changes.
#[derive(Clone, PartialEq)]
struct HealthCheckTargetSpec {
    health_check: Arc<HealthCheck>,
    vip: SocketAddr,
    server_address: IpAddr,
}

struct CheckedTarget<K> {
    spec: HealthCheckTargetSpec,
    prober: Arc<HealthProber>,
    key: K,
}

/// Health checker of all targets, which runs in its own thread. Its thread ends when `desired_target_sender` is
/// dropped, so this field must come first.
pub struct HealthChecker<K> {
    desired_target_sender: watch::Sender<Arc<Vec<CheckedTarget<K>>>>,
    shared_results: Arc<SharedHealthCheckResults<K>>,
    _thread: HealthCheckerThread,
}

struct HealthCheckerThread(Option<JoinHandle<()>>);

impl Drop for HealthCheckerThread {
    fn drop(&mut self) {
        if self.0.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(
                event = "thread-panicked",
                thread = "health",
                "the thread of health checks has panicked, so there are no new results: restart the load balancer"
            );
        }
    }
}

struct SharedHealthCheckResults<K> {
    results_by_target: Mutex<BTreeMap<K, TargetHealthCheckResult>>,
    verdict_change_count_sender: watch::Sender<u64>,
    check_permits: Semaphore,
}

impl<K: Ord + Hash + Copy + Send + Sync + 'static> HealthChecker<K> {
    /// Starts the checker's thread, at first without targets.
    pub fn start() -> anyhow::Result<Self> {
        let (desired_targets, receiver) = watch::channel(Arc::new(Vec::new()));
        let shared_results = Arc::new(SharedHealthCheckResults {
            results_by_target: Mutex::new(BTreeMap::new()),
            verdict_change_count_sender: watch::Sender::new(0),
            check_permits: Semaphore::new(MAX_CONCURRENT_HEALTH_CHECKS),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread_results = shared_results.clone();
        let checker_thread = std::thread::Builder::new()
            .name("health".to_owned())
            .spawn(move || runtime.block_on(run_health_checks(receiver, thread_results)))
            .context("a thread for health checks")?;
        Ok(Self {
            desired_target_sender: desired_targets,
            shared_results,
            _thread: HealthCheckerThread(Some(checker_thread)),
        })
    }

    /// Sets the services whose servers are checked. Targets that have not changed keep their results.
    pub fn set_checked_services(&self, services: Vec<CheckedService<K>>) {
        let mut desired_targets = Vec::new();
        for service in services {
            let prober = Arc::new(HealthProber::new(service.health_check.clone(), service.vip, service.nat_table));
            for (key, server) in service.server_addresses_by_key {
                let target_spec = HealthCheckTargetSpec {
                    health_check: service.health_check.clone(),
                    vip: service.vip,
                    server_address: server,
                };
                desired_targets.push(CheckedTarget { spec: target_spec, prober: prober.clone(), key });
            }
        }
        self.desired_target_sender.send_replace(Arc::new(desired_targets));
    }

    pub fn check_results(&self) -> Vec<(K, TargetHealthCheckResult)> {
        self.shared_results.lock_results().iter().map(|(key, result)| (*key, result.clone())).collect()
    }

    pub fn subscribe_to_verdict_changes(&self) -> watch::Receiver<u64> {
        self.shared_results.verdict_change_count_sender.subscribe()
    }
}

impl<K> SharedHealthCheckResults<K> {
    fn lock_results(&self) -> MutexGuard<'_, BTreeMap<K, TargetHealthCheckResult>> {
        self.results_by_target.lock()
    }
}

/// Task that checks one target. It is aborted when this value is dropped.
struct TargetHealthCheckTask {
    spec: HealthCheckTargetSpec,
    abort_handle: AbortHandle,
}

impl Drop for TargetHealthCheckTask {
    fn drop(&mut self) {
        self.abort_handle.abort();
    }
}

async fn run_health_checks<K: Ord + Hash + Copy + Send + Sync + 'static>(
    mut target_receiver: watch::Receiver<Arc<Vec<CheckedTarget<K>>>>,
    shared_results: Arc<SharedHealthCheckResults<K>>,
) {
    let mut target_tasks: HashMap<K, TargetHealthCheckTask> = HashMap::new();
    while target_receiver.changed().await.is_ok() {
        let targets = target_receiver.borrow_and_update().clone();
        let specs_by_key: HashMap<K, &HealthCheckTargetSpec> =
            targets.iter().map(|target| (target.key, &target.spec)).collect();
        target_tasks.retain(|key, target_task| specs_by_key.get(key).is_some_and(|spec| **spec == target_task.spec));
        shared_results.lock_results().retain(|key, _| target_tasks.contains_key(key));
        for target in targets.iter() {
            target_tasks.entry(target.key).or_insert_with(|| {
                shared_results.lock_results().insert(target.key, TargetHealthCheckResult::before_first_check());
                let checks =
                    check_target(target.key, target.spec.server_address, target.prober.clone(), shared_results.clone());
                TargetHealthCheckTask { spec: target.spec.clone(), abort_handle: tokio::spawn(checks).abort_handle() }
            });
        }
        shared_results.verdict_change_count_sender.send_modify(|count| *count += 1);
    }
}

async fn check_target<K: Ord + Copy>(
    key: K,
    server: IpAddr,
    prober: Arc<HealthProber>,
    shared_results: Arc<SharedHealthCheckResults<K>>,
) {
    let draw_random_fraction = || UnwrapErr(SysRng).random::<f64>();
    let health_check = prober.health_check();
    let mut next_check_time =
        Instant::now() + health_check.interval.min(MAX_FIRST_HEALTH_CHECK_DELAY).mul_f64(draw_random_fraction());
    loop {
        sleep_until(next_check_time).await;
        let permit = shared_results.check_permits.acquire().await;
        let start_time = Instant::now();
        let probe_result = prober.probe_server(server).await;
        drop(permit);
        let latency = start_time.elapsed();
        if let Some(result) = shared_results.lock_results().get_mut(&key) {
            result.last_latency = if probe_result.is_ok() { latency } else { Duration::ZERO };
            result.last_error = probe_result.as_ref().err().map_or_else(String::new, ToString::to_string);
            let has_verdict_changed = match &probe_result {
                Err(error) if error.is_local_failure() => {
                    result.health_tracker.record_local_fault(health_check.thresholds)
                }
                _ => {
                    result.check_count += 1;
                    result.failure_count += u64::from(probe_result.is_err());
                    result.health_tracker.record_check_result(probe_result.is_ok(), health_check.thresholds)
                }
            };
            if has_verdict_changed {
                result.verdict_since = Instant::now();
                shared_results.verdict_change_count_sender.send_modify(|count| *count += 1);
            }
        }
        // The next check is due one interval after the due time of this one. Missed checks are not repeated.
        next_check_time = (next_check_time
            + health_check.jitter.jittered_interval(health_check.interval, draw_random_fraction()))
        .max(Instant::now());
    }
}
