//! The members of etcd. One is asked; when it does not answer, the next one is. So a member that hangs, or is cut off from the
//! others, costs a second and not the lease. (etcd-client can balance over members itself, but it leaves a request with the
//! member that has it.)

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use coreward_metrics::latency::Latencies;
use coreward_tls::failure::{Failure, Reason};
use etcd_client::{Client, ConnectOptions, Error, TlsOptions};
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tonic::Code;

use crate::EtcdError;
use crate::clock::Moment;

/// For one member to answer one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// For one question while nobody's lease depends on it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
/// After all members were asked in vain.
const ROUND_PAUSE: Duration = Duration::from_millis(100);
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// The members.
pub struct Cluster {
    endpoints: Vec<String>,
    /// One for each of them.
    clients: RwLock<Vec<Client>>,
    /// Which one answered last.
    preferred: AtomicUsize,
    latencies: Mutex<Latencies>,
    /// That were granted to this process and may go on. `None`: it has left.
    leases: Mutex<Option<BTreeSet<i64>>>,
    /// Its own thread: however busy the controller is, its lease is kept alive. `None`: it is ending.
    runtime: Option<Runtime>,
}

impl Cluster {
    /// Connects to nobody yet. Endpoints: `http://HOST:PORT` or `https://HOST:PORT`, at least one.
    ///
    /// # Errors
    /// When an endpoint is none, or TLS cannot be set up.
    pub fn new(endpoints: &[String], tls: Option<&TlsOptions>) -> Result<Self, EtcdError> {
        let thread = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("etcd")
            .enable_all()
            .build()
            .map_err(|error| EtcdError::Rejected(format!("no thread for it: {error}")))?;
        let clients = RwLock::new(thread.block_on(connect(endpoints, tls))?);
        let (preferred, latencies) = Default::default();
        let leases = Mutex::new(Some(BTreeSet::new()));
        Ok(Self { endpoints: endpoints.to_vec(), clients, preferred, latencies, leases, runtime: Some(thread) })
    }

    /// From now on requests go by connections with these certificates. What is under way goes on by those of before.
    ///
    /// # Errors
    /// When TLS cannot be set up: everything stays as it is.
    pub async fn renew(self: Arc<Self>, tls: TlsOptions) -> Result<(), EtcdError> {
        let cluster = self.clone();
        let connected = self.spawn(async move { connect(&cluster.endpoints, Some(&tls)).await }).await;
        let clients = connected.map_err(|_| EtcdError::Rejected("the thread for it has ended".to_owned()))??;
        *self.clients.write() = clients;
        Ok(())
    }

    fn client(&self, position: usize) -> Client {
        self.clients.read()[position].clone()
    }

    /// Where they are.
    pub fn endpoints(&self) -> String {
        self.endpoints.join(", ")
    }

    /// How long requests took that were answered.
    pub fn latencies(&self) -> Latencies {
        *self.latencies.lock()
    }

    fn leases(&self) -> MutexGuard<'_, Option<BTreeSet<i64>>> {
        self.leases.lock()
    }

    /// Remembers a lease that was granted to this process; whether it may use it: not when it has left meanwhile.
    pub(crate) fn hold(&self, lease: i64) -> bool {
        self.leases().as_mut().is_some_and(|held| held.insert(lease))
    }

    /// Ends a lease now.
    pub(crate) async fn revoke(&self, lease: i64, until: Moment) -> Result<(), EtcdError> {
        // Where etcd cannot be told it ends by itself.
        if let Some(held) = self.leases().as_mut() {
            held.remove(&lease);
        }
        self.call(until, |mut client: Client| async move { client.lease_revoke(lease).await }).await.map(|_| ())
    }

    /// Ends what this process holds in etcd, so that others need not wait; from now on it cannot lead. Returns whether it held
    /// anything.
    ///
    /// # Errors
    /// When etcd cannot be told; then it ends by itself.
    pub async fn leave(&self) -> Result<bool, EtcdError> {
        let held = self.leases().take().unwrap_or_default();
        let until = Moment::now() + PATIENCE;
        for lease in &held {
            self.revoke(*lease, until).await?;
        }
        Ok(!held.is_empty())
    }

    /// Does something on the thread that is for etcd alone.
    pub fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.runtime().spawn(work)
    }

    /// Does something, and waits for it. Not to be called from asynchronous code.
    pub fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime().block_on(work)
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is there until the cluster is dropped")
    }

    /// Makes a request; again when no answer comes, until `until`. So it must be one that may be made twice.
    ///
    /// # Errors
    /// When nobody answers until then, or etcd refuses it.
    pub async fn call<T, F: Future<Output = Result<T, Error>>>(
        &self,
        until: Moment,
        request: impl Fn(Client) -> F,
    ) -> Result<T, EtcdError> {
        let mut problem = "nobody was asked: the time was over".to_owned();
        let mut is_of_tls = false;
        let first = self.preferred.load(Ordering::Relaxed);
        for attempt in 0.. {
            let left = until.left();
            if left.is_zero() {
                break;
            }
            let position = (first + attempt) % self.endpoints.len();
            let endpoint = &self.endpoints[position];
            let began = Instant::now();
            match tokio::time::timeout(left.min(REQUEST_TIMEOUT), request(self.client(position))).await {
                Ok(Ok(answer)) => {
                    self.preferred.store(position, Ordering::Relaxed);
                    self.latencies.lock().observe(began.elapsed());
                    return Ok(answer);
                }
                Ok(Err(error)) if is_final(&error) => return Err(EtcdError::Rejected(error.to_string())),
                Ok(Err(error)) => {
                    let silence = Silence::of(&error);
                    if silence.is_of_tls || !is_of_tls {
                        problem = format!("{endpoint}: {}", silence.words);
                    }
                    is_of_tls |= silence.is_of_tls;
                }
                Err(_) if is_of_tls => {}
                Err(_) => problem = format!("{endpoint}: no answer within {REQUEST_TIMEOUT:?}"),
            }
            if position + 1 == self.endpoints.len() {
                tokio::time::sleep(ROUND_PAUSE.min(until.left())).await;
            }
        }
        Err(EtcdError::Unreachable { endpoints: self.endpoints(), problem })
    }
}

/// A client for each; nobody is asked yet.
async fn connect(endpoints: &[String], tls: Option<&TlsOptions>) -> Result<Vec<Client>, EtcdError> {
    let mut options = ConnectOptions::new()
        .with_connect_timeout(REQUEST_TIMEOUT)
        .with_keep_alive(KEEP_ALIVE, KEEP_ALIVE)
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

impl Drop for Cluster {
    fn drop(&mut self) {
        // Waiting for its thread is not possible everywhere where the last user may go.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Why a member did not answer.
struct Silence {
    words: String,
    /// It is known whose certificate is wrong. Of a connection that is refused after the handshake often no more is heard than
    /// that it broke.
    is_of_tls: bool,
}

impl Silence {
    fn of(error: &Error) -> Self {
        let first: &dyn std::error::Error = match error {
            Error::GRpcStatus(status) => status,
            other => other,
        };
        let causes: Vec<_> = std::iter::successors(Some(first), |cause| cause.source()).collect();
        let mut failures = causes.iter().rev().filter_map(|cause| Some(Failure::of(cause.downcast_ref()?)));
        if let Some(failure) = failures.find(|failure| failure.reason != Reason::Broken) {
            return Self { words: failure.to_string(), is_of_tls: true };
        }
        let words = causes.last().map_or_else(|| error.to_string(), ToString::to_string);
        // HTTP/2 hands on the text alone.
        match words.split_once("received fatal alert: ") {
            Some((_, alert)) => {
                let expected = "expected `certificate` and `key` of [etcd.tls] that an authority of its --trusted-ca-file has signed";
                Self {
                    words: format!("etcd refuses our certificate, or that we show none ({alert}): {expected}"),
                    is_of_tls: true,
                }
            }
            None => Self { words, is_of_tls: false },
        }
    }
}

/// Whether another member would say the same.
fn is_final(error: &Error) -> bool {
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
