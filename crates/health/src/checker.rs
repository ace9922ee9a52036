//! Health checker, which checks each target at its own interval. It has its own thread and runtime, so that connections
//! to servers cannot delay the load balancer.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use coreward_model::health::{HealthCheck, HealthTracker, HealthVerdict};
use parking_lot::{Mutex, MutexGuard};
use rand::RngExt as _;
use rand::rand_core::UnwrapErr;
use rand::rngs::SysRng;
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use crate::path::NatTable;
use crate::probe::Prober;

/// Maximum number of concurrent checks. It equals the number of NAT entries in the data plane. Further checks wait.
pub const MAX_CONCURRENT_CHECKS: usize = 1024;

/// Maximum random delay of a target's first check. The delay is also at most the check's interval.
const MAX_FIRST_DELAY: Duration = Duration::from_millis(500);

pub struct CheckedService<K> {
    pub check: Arc<HealthCheck>,
    /// VIP and port that clients connect to.
    pub vip: SocketAddr,
    /// Keys and own addresses of the service's servers. No key may occur twice, even in different services.
    pub servers: Vec<(K, IpAddr)>,
    /// NAT table of the data plane, which is required for checks at the VIP.
    pub nat_table: Option<Arc<dyn NatTable>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct CheckResult {
    tracker: HealthTracker,
    /// Time at which the verdict last changed, or at which the first check was due.
    pub since: Instant,
    /// Error of the newest check. It is empty if that check passed, or if no check has finished yet.
    pub last_error: String,
    /// Response time of the newest check that got an answer, or zero if none did.
    pub latency: Duration,
    pub check_count: u64,
    pub failure_count: u64,
}

impl CheckResult {
    fn unchecked() -> Self {
        let verdict_since = Instant::now();
        Self {
            tracker: HealthTracker::default(),
            since: verdict_since,
            last_error: String::new(),
            latency: Duration::ZERO,
            check_count: 0,
            failure_count: 0,
        }
    }

    /// Returns the verdict on the server, or `None` before enough checks have finished.
    pub fn verdict(&self) -> Option<HealthVerdict> {
        self.tracker.verdict()
    }
}

/// Properties of a target. The target's results are kept as long as all of them are unchanged.
#[derive(Clone, PartialEq)]
struct TargetSpec {
    check: Arc<HealthCheck>,
    vip: SocketAddr,
    server: IpAddr,
}

struct CheckedTarget<K> {
    spec: TargetSpec,
    prober: Arc<Prober>,
    key: K,
}

/// Health checker of all targets. Its thread ends when `desired_targets` is dropped, so this field must come first.
pub struct Checker<K> {
    desired_targets: watch::Sender<Arc<Vec<CheckedTarget<K>>>>,
    shared_results: Arc<SharedResults<K>>,
    _thread: CheckerThread,
}

struct CheckerThread(Option<JoinHandle<()>>);

impl Drop for CheckerThread {
    fn drop(&mut self) {
        if self.0.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(
                event = "thread-panicked",
                thread = "health",
                "the thread of health checks has panicked: restart the load balancer, which has no new results"
            );
        }
    }
}

struct SharedResults<K> {
    results_by_target: Mutex<BTreeMap<K, CheckResult>>,
    change_count: watch::Sender<u64>,
    permits: Semaphore,
}

impl<K: Ord + Hash + Copy + Send + Sync + 'static> Checker<K> {
    /// Starts the checker's thread, at first without targets.
    pub fn start() -> anyhow::Result<Self> {
        let (desired_targets, receiver) = watch::channel(Arc::new(Vec::new()));
        let shared_results = Arc::new(SharedResults {
            results_by_target: Mutex::new(BTreeMap::new()),
            change_count: watch::Sender::new(0),
            permits: Semaphore::new(MAX_CONCURRENT_CHECKS),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread_results = shared_results.clone();
        let checker_thread = std::thread::Builder::new()
            .name("health".to_owned())
            .spawn(move || runtime.block_on(run_checks(receiver, thread_results)))
            .context("a thread for health checks")?;
        Ok(Self { desired_targets, shared_results, _thread: CheckerThread(Some(checker_thread)) })
    }

    /// Sets the services whose servers are checked. Targets that have not changed keep their results.
    pub fn set_services(&self, services: Vec<CheckedService<K>>) {
        let mut desired_targets = Vec::new();
        for service in services {
            let prober = Arc::new(Prober::new(service.check.clone(), service.vip, service.nat_table));
            for (key, server) in service.servers {
                let target_spec = TargetSpec { check: service.check.clone(), vip: service.vip, server };
                desired_targets.push(CheckedTarget { spec: target_spec, prober: prober.clone(), key });
            }
        }
        self.desired_targets.send_replace(Arc::new(desired_targets));
    }

    pub fn results(&self) -> Vec<(K, CheckResult)> {
        self.shared_results.results().iter().map(|(key, found)| (*key, found.clone())).collect()
    }

    pub fn subscribe_to_verdict_changes(&self) -> watch::Receiver<u64> {
        self.shared_results.change_count.subscribe()
    }
}

impl<K> SharedResults<K> {
    fn results(&self) -> MutexGuard<'_, BTreeMap<K, CheckResult>> {
        self.results_by_target.lock()
    }
}

/// Task that checks one target. It is aborted when this value is dropped.
struct TargetTask {
    spec: TargetSpec,
    handle: AbortHandle,
}

impl Drop for TargetTask {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

async fn run_checks<K: Ord + Hash + Copy + Send + Sync + 'static>(
    mut desired: watch::Receiver<Arc<Vec<CheckedTarget<K>>>>,
    shared: Arc<SharedResults<K>>,
) {
    let mut checked: HashMap<K, TargetTask> = HashMap::new();
    while desired.changed().await.is_ok() {
        let targets = desired.borrow_and_update().clone();
        let tasks: HashMap<K, &TargetSpec> = targets.iter().map(|target| (target.key, &target.spec)).collect();
        checked.retain(|key, running| tasks.get(key).is_some_and(|task| **task == running.spec));
        shared.results().retain(|key, _| checked.contains_key(key));
        for target in targets.iter() {
            checked.entry(target.key).or_insert_with(|| {
                shared.results().insert(target.key, CheckResult::unchecked());
                let checks = check_target(target.key, target.spec.server, target.prober.clone(), shared.clone());
                TargetTask { spec: target.spec.clone(), handle: tokio::spawn(checks).abort_handle() }
            });
        }
        shared.change_count.send_modify(|count| *count += 1);
    }
}

async fn check_target<K: Ord + Copy>(key: K, server: IpAddr, prober: Arc<Prober>, shared: Arc<SharedResults<K>>) {
    let draw = || UnwrapErr(SysRng).random::<f64>();
    let check = prober.check();
    let mut due = Instant::now() + check.interval.min(MAX_FIRST_DELAY).mul_f64(draw());
    loop {
        sleep_until(due).await;
        let turn = shared.permits.acquire().await;
        let began = Instant::now();
        let outcome = prober.probe(server).await;
        drop(turn);
        let latency = began.elapsed();
        if let Some(found) = shared.results().get_mut(&key) {
            found.latency = if outcome.is_ok() { latency } else { Duration::ZERO };
            found.last_error = outcome.as_ref().err().map_or_else(String::new, ToString::to_string);
            let verdict_changed = match &outcome {
                Err(unwell) if unwell.is_local() => found.tracker.record_local_fault(check.thresholds),
                _ => {
                    found.check_count += 1;
                    found.failure_count += u64::from(outcome.is_err());
                    found.tracker.record_result(outcome.is_ok(), check.thresholds)
                }
            };
            if verdict_changed {
                found.since = Instant::now();
                shared.change_count.send_modify(|count| *count += 1);
            }
        }
        // The next check is due one interval after the due time of this one. Missed checks are not repeated.
        due = (due + check.jitter.jittered_interval(check.interval, draw())).max(Instant::now());
    }
}
