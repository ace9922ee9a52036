//! Members of an etcd cluster, which are tried in turn, so that a member that hangs costs a second and not the lease.
//! etcd-client can balance requests over members, but does not repeat a request at another member.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use coreward_metrics::latency_histogram::LatencyHistogram;
use coreward_tls::failure::{ConnectionFailureReason, PeerConnectionFailure};
use etcd_client::{Client, ConnectOptions, Error, TlsOptions};
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tonic::Code;

use crate::EtcdError;
use crate::clock::Deadline;

/// Time limit for one member to answer one request.
const MEMBER_REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for a request that need not end before a lease does, including retries at other members.
pub(crate) const CLUSTER_REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// Pause after a request has failed at all members, before the members are tried again.
const CLUSTER_RETRY_PAUSE: Duration = Duration::from_millis(100);
const ETCD_KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(2);

/// Connections to all members of an etcd cluster.
pub struct EtcdClusterClient {
    endpoints: Vec<String>,
    clients: RwLock<Vec<Client>>,
    /// Index of the member that answered most recently. The next request tries it first.
    preferred_member_index: AtomicUsize,
    request_latencies: Mutex<LatencyHistogram>,
    /// Ids of the leases that this process holds. `None` after [`EtcdClusterClient::revoke_all_leases`] has been
    /// called.
    lease_ids: Mutex<Option<BTreeSet<i64>>>,
    /// Runtime with a thread of its own, so that a busy controller still renews its lease. `None` only in `drop`.
    runtime: Option<Runtime>,
}

impl EtcdClusterClient {
    /// Prepares connections to the members at `endpoints` (`http://HOST:PORT` or `https://HOST:PORT`). Does no I/O.
    pub fn new(endpoints: &[String], tls: Option<&TlsOptions>) -> Result<Self, EtcdError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("etcd")
            .enable_all()
            .build()
            .map_err(|error| EtcdError::Rejected(format!("no thread for it: {error}")))?;
        let clients = RwLock::new(runtime.block_on(connect_all_members(endpoints, tls))?);
        let (preferred_member_index, latencies) = Default::default();
        let lease_ids = Mutex::new(Some(BTreeSet::new()));
        Ok(Self {
            endpoints: endpoints.to_vec(),
            clients,
            preferred_member_index,
            request_latencies: latencies,
            lease_ids,
            runtime: Some(runtime),
        })
    }

    /// Replaces the TLS certificates for later requests. Fails and keeps the old certificates if the new ones are
    /// unusable.
    pub async fn replace_certificates(self: Arc<Self>, tls: TlsOptions) -> Result<(), EtcdError> {
        let cluster = self.clone();
        let connect_result = self.spawn(async move { connect_all_members(&cluster.endpoints, Some(&tls)).await }).await;
        let clients = connect_result.map_err(|_| EtcdError::Rejected("the thread for it has ended".to_owned()))??;
        *self.clients.write() = clients;
        Ok(())
    }

    fn member_client(&self, member_index: usize) -> Client {
        self.clients.read()[member_index].clone()
    }

    pub fn joined_endpoints(&self) -> String {
        self.endpoints.join(", ")
    }

    /// Returns a histogram of the times that members took to answer requests.
    pub fn request_latencies(&self) -> LatencyHistogram {
        *self.request_latencies.lock()
    }

    fn lock_lease_ids(&self) -> MutexGuard<'_, Option<BTreeSet<i64>>> {
        self.lease_ids.lock()
    }

    /// Registers a lease of this process. Returns false if [`EtcdClusterClient::revoke_all_leases`] has already been
    /// called.
    pub(crate) fn register_lease(&self, lease_id: i64) -> bool {
        self.lock_lease_ids().as_mut().is_some_and(|lease_ids| lease_ids.insert(lease_id))
    }

    pub(crate) async fn revoke_lease(&self, lease_id: i64, deadline: Deadline) -> Result<(), EtcdError> {
        // If etcd does not answer, the lease expires by itself.
        if let Some(lease_ids) = self.lock_lease_ids().as_mut() {
            lease_ids.remove(&lease_id);
        }
        self.call_until_deadline(deadline, |mut client: Client| async move { client.lease_revoke(lease_id).await })
            .await
            .map(|_| ())
    }

    /// Revokes all leases of this process and prevents new ones. Returns whether there were any leases. If etcd is
    /// unreachable, the leases expire by themselves.
    pub async fn revoke_all_leases(&self) -> Result<bool, EtcdError> {
        let lease_ids = self.lock_lease_ids().take().unwrap_or_default();
        let deadline = Deadline::now() + CLUSTER_REQUEST_TIMEOUT;
        for lease_id in &lease_ids {
            self.revoke_lease(*lease_id, deadline).await?;
        }
        Ok(!lease_ids.is_empty())
    }

    /// Spawns a future on the thread that is reserved for etcd, so that a busy controller does not delay it.
    pub fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.runtime().spawn(work)
    }

    /// Blocks the calling thread until the future has finished. Panics if it is called from asynchronous code.
    pub fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime().block_on(work)
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is there until the cluster is dropped")
    }

    /// Sends an idempotent request repeatedly until a member answers it or `deadline` has passed.
    pub async fn call_until_deadline<T, F: Future<Output = Result<T, Error>>>(
        &self,
        deadline: Deadline,
        request: impl Fn(Client) -> F,
    ) -> Result<T, EtcdError> {
        let mut last_problem = "no member was tried: the time was over".to_owned();
        let mut is_tls_error = false;
        let first_member_index = self.preferred_member_index.load(Ordering::Relaxed);
        for attempt in 0.. {
            let remaining_time = deadline.remaining_time();
            if remaining_time.is_zero() {
                break;
            }
            let member_index = (first_member_index + attempt) % self.endpoints.len();
            let endpoint = &self.endpoints[member_index];
            let start_time = Instant::now();
            match tokio::time::timeout(
                remaining_time.min(MEMBER_REQUEST_TIMEOUT),
                request(self.member_client(member_index)),
            )
            .await
            {
                Ok(Ok(answer)) => {
                    self.preferred_member_index.store(member_index, Ordering::Relaxed);
                    self.request_latencies.lock().observe_latency(start_time.elapsed());
                    return Ok(answer);
                }
                Ok(Err(error)) if is_permanent_error(&error) => return Err(EtcdError::Rejected(error.to_string())),
                Ok(Err(error)) => {
                    let member_error = EtcdMemberError::from_etcd_error(&error);
                    if member_error.is_tls_error || !is_tls_error {
                        last_problem = format!("{endpoint}: {}", member_error.message);
                    }
                    is_tls_error |= member_error.is_tls_error;
                }
                Err(_) if is_tls_error => {}
                Err(_) => last_problem = format!("{endpoint}: no answer within {MEMBER_REQUEST_TIMEOUT:?}"),
            }
            if member_index + 1 == self.endpoints.len() {
                tokio::time::sleep(CLUSTER_RETRY_PAUSE.min(deadline.remaining_time())).await;
            }
        }
        Err(EtcdError::Unreachable { endpoints: self.joined_endpoints(), problem: last_problem })
    }
}

async fn connect_all_members(endpoints: &[String], tls: Option<&TlsOptions>) -> Result<Vec<Client>, EtcdError> {
    let mut options = ConnectOptions::new()
        .with_connect_timeout(MEMBER_REQUEST_TIMEOUT)
        .with_keep_alive(ETCD_KEEP_ALIVE_INTERVAL, ETCD_KEEP_ALIVE_INTERVAL)
        .with_keep_alive_while_idle(true);
    if let Some(tls) = tls {
        options = options.with_tls(tls.clone());
    }
    let mut clients = Vec::with_capacity(endpoints.len());
    for endpoint in endpoints {
        let client = Client::connect([endpoint], Some(options.clone())).await;
        clients.push(client.map_err(|error| EtcdError::Rejected(format!("{endpoint}: {error}")))?);
    }
    Ok(clients)
}

impl Drop for EtcdClusterClient {
    fn drop(&mut self) {
        // The last owner may drop the cluster in asynchronous code, where waiting for the runtime's end is not allowed.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct EtcdMemberError {
    message: String,
    /// Whether a TLS certificate is known to have caused the error. When etcd rejects a certificate, it often only
    /// closes the connection.
    is_tls_error: bool,
}

impl EtcdMemberError {
    fn from_etcd_error(error: &Error) -> Self {
        let outer_error: &dyn std::error::Error = match error {
            Error::GRpcStatus(status) => status,
            other => other,
        };
        let causes: Vec<_> = std::iter::successors(Some(outer_error), |cause| cause.source()).collect();
        let mut tls_failures =
            causes.iter().rev().filter_map(|cause| Some(PeerConnectionFailure::from_io_error(cause.downcast_ref()?)));
        if let Some(failure) = tls_failures.find(|failure| failure.reason != ConnectionFailureReason::OtherFailure) {
            return Self { message: failure.to_string(), is_tls_error: true };
        }
        let error_text = causes.last().map_or_else(|| error.to_string(), ToString::to_string);
        // The HTTP/2 layer passes on only the text of the TLS error.
        match error_text.split_once("received fatal alert: ") {
            Some((_, alert)) => {
                let expected_files = "expected `certificate` and `key` of [etcd.tls] that an authority of its \
                                --trusted-ca-file has signed";
                Self {
                    message: format!("etcd rejects our certificate, or that we show none ({alert}): {expected_files}"),
                    is_tls_error: true,
                }
            }
            None => Self { message: error_text, is_tls_error: false },
        }
    }
}

/// Returns whether every member would return the same error, so that a retry cannot succeed.
fn is_permanent_error(error: &Error) -> bool {
    match error {
        Error::GRpcStatus(status) => matches!(
            status.code(),
            Code::InvalidArgument
                | Code::NotFound
                | Code::AlreadyExists
                | Code::PermissionDenied
                | Code::Unauthenticated
                | Code::ResourceExhausted
                | Code::FailedPrecondition
                | Code::OutOfRange
                | Code::Unimplemented
        ),
        Error::TransportError(_) | Error::IoError(_) | Error::WatchError(_) => false,
        _ => true,
    }
}
