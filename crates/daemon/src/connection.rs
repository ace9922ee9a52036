//! Connection of a daemon to the controllers, which selects one, keeps the connection alive and retries.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use coreward_metrics::metric_declarations::MetricKind::MaxGauge;
use coreward_metrics::metric_declarations::{Component, MetricFamily, declare_family};
use coreward_metrics::metrics;
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_tls::connect::GrpcConnector;
use coreward_tls::{FleetRole, ReloadableTlsCredentials, TlsCredentialFiles, table};
use coreward_wire::{CONTROLLER_TERM_METADATA_KEY, LEADER_ADDRESS_METADATA_KEY};
use rand::TryRng as _;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use crate::controllers::ControllerAddresses;

metrics! {
    CERTIFICATE_NOT_AFTER_TIMESTAMP_SECONDS: MetricFamily<1> = declare_family(
        MaxGauge, "coreward_certificate_not_after_timestamp_seconds", &["certificate"],
        &[Component::Controller, Component::Lb, Component::Agent, Component::Rack],
        "End of the daemon's own certificate (own), and of the first authority's (ca), in Unix time",
    );
}

/// Minimum and maximum interval between connection attempts. It doubles each time all controllers have been tried.
const CONNECT_RETRY_INTERVAL_RANGE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Interval between attempts after a controller's rejection, whose cause only an operator can remove.
const CONNECT_RETRY_INTERVAL_AFTER_REJECTION: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Idle time after which the daemon sends an HTTP/2 ping to the controller, and time limit for the answer.
const HTTP2_KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// HTTP/2 flow-control window, in bytes. A thousand placement tables of 13 kB arrive per second, which would wait for
/// window updates with HTTP/2's default of 64 kB. The window also holds the configuration of ten thousand servers.
const HTTP2_FLOW_CONTROL_WINDOW_BYTES: u32 = 1 << 20;

/// Time after a leader's last message during which leaders with an older term are rejected. It equals the longest
/// lease, for which a frozen controller may continue to lead. It is not longer, because terms may restart with another
/// etcd (after `coreward store copy`, or from a restored snapshot).
const OLDER_TERM_REJECTION_TIME: Duration = Duration::from_secs(60);

pub struct ControllerConnection {
    controllers: ControllerAddresses,
    tls: Option<Arc<ReloadableTlsCredentials>>,
    expected_roles: &'static [FleetRole],
    attempt_order: ConnectionAttemptOrder,
    term_tracker: LeaderTermTracker,
}

impl ControllerConnection {
    /// Prepares the connection, and watches the certificate files on the current runtime. With `tls`, the controller
    /// must have one of the `expected_roles`. Without `tls`, the controller is not verified.
    pub fn new(
        controllers: ControllerAddresses,
        tls: Option<&TlsCredentialFiles>,
        expected_roles: &'static [FleetRole],
    ) -> anyhow::Result<Self> {
        let tls = table::load_tls_credentials(tls)?;
        match &tls {
            Some(tls) => drop(tokio::spawn(tls.clone().reload_credentials_on_change())),
            None if controllers.addresses().iter().all(|address| address.ip().is_loopback()) => {}
            None => tracing::warn!(
                event = "plaintext",
                %controllers,
                "without `[tls]` anyone on the path to the controllers can read the cookie keys and change updates"
            ),
        }
        let attempt_order = ConnectionAttemptOrder::new(controllers.addresses().len());
        Ok(Self { attempt_order, term_tracker: LeaderTermTracker::default(), tls, expected_roles, controllers })
    }

    /// Returns a warning for the operator about each certificate that expires soon.
    pub fn certificate_warnings(&self) -> Vec<String> {
        self.tls.as_ref().map(|tls| tls.expiry_warnings()).unwrap_or_default()
    }

    pub fn add_metrics(&self, snapshot: &mut MetricsSnapshot) {
        self.tls.iter().for_each(|tls| add_certificate_expiry_metrics(tls, snapshot));
    }

    /// Returns the address of the controller to which the next attempt connects.
    pub fn next_controller_address(&self) -> SocketAddr {
        self.controllers.addresses()[self.attempt_order.current_controller_index]
    }

    /// Connects to [`Self::next_controller_address`]. Fails after two seconds.
    pub fn connect(&self) -> impl Future<Output = anyhow::Result<Channel>> + use<> {
        let address = self.next_controller_address();
        let connector = GrpcConnector::new(address, self.tls.clone().map(|tls| (tls, self.expected_roles)));
        async move {
            let endpoint = Endpoint::from_shared(format!("http://{address}"))?
                .http2_keep_alive_interval(HTTP2_KEEP_ALIVE_INTERVAL)
                .keep_alive_timeout(HTTP2_KEEP_ALIVE_INTERVAL)
                .keep_alive_while_idle(true)
                .initial_stream_window_size(HTTP2_FLOW_CONTROL_WINDOW_BYTES)
                .initial_connection_window_size(HTTP2_FLOW_CONTROL_WINDOW_BYTES);
            let result = tokio::time::timeout(CONNECT_TIMEOUT, endpoint.connect_with_connector(connector)).await;
            Ok(result.map_err(|_| anyhow!("no connection within {CONNECT_TIMEOUT:?}"))??)
        }
    }

    /// Returns the stream in a response. Fails if the leader's term is older than the newest term that is known.
    pub fn accept_stream<T>(&mut self, response: Response<T>) -> anyhow::Result<T> {
        let term =
            response.metadata().get(CONTROLLER_TERM_METADATA_KEY).and_then(|term| term.to_str().ok()?.parse().ok());
        self.term_tracker.check_term(term, Instant::now())?;
        Ok(response.into_inner())
    }

    /// Records a message from the controller, which proves that the controller is the leader.
    pub fn record_controller_message(&mut self) {
        self.attempt_order.record_answer();
        self.term_tracker.record_message_time(Instant::now());
    }

    /// Logs the end of a stream, selects the controller for the next attempt, and returns the time to wait before it.
    /// This time is random, so that the daemons of a fleet do not all reconnect at once.
    pub fn record_stream_end(&mut self, error: Option<&anyhow::Error>) -> Duration {
        let (controller, end) = (self.next_controller_address(), self.classify_stream_end(error));
        let retry_pause = self.attempt_order.record_attempt_end(&end);
        let next_controller = self.next_controller_address();

        match (end, error) {
            (ControllerStreamEndReason::RejectedByController, Some(error)) => {
                let error = root_cause_text(error);
                tracing::warn!(
                    event = "controller-rejects",
                    %controller,
                    next_controller = %next_controller,
                    error,
                    "the controller rejects this daemon, which tries the next controller"
                );
            }
            (_, Some(error)) => {
                let error = root_cause_text(error);
                tracing::warn!(
                    event = "controller-lost",
                    %controller,
                    next_controller = %next_controller,
                    error,
                    "the daemon has lost the controller: it tries the next one and keeps its configuration"
                );
            }
            (_, None) => {
                tracing::warn!(
                    event = "controller-lost",
                    %controller,
                    next_controller = %next_controller,
                    "the controller has ended its stream: the daemon tries the next and keeps its configuration"
                );
            }
        }
        interval_with_jitter(retry_pause)
    }

    fn classify_stream_end(&self, error: Option<&anyhow::Error>) -> ControllerStreamEndReason {
        let Some(status) = error.and_then(|error| error.downcast_ref::<Status>()) else {
            return ControllerStreamEndReason::ControllerLost;
        };
        match status.code() {
            Code::NotFound | Code::AlreadyExists | Code::PermissionDenied | Code::Unauthenticated => {
                ControllerStreamEndReason::RejectedByController
            }
            Code::Unavailable => {
                let leader_address = status
                    .metadata()
                    .get(LEADER_ADDRESS_METADATA_KEY)
                    .and_then(|leader| leader.to_str().ok()?.parse().ok());
                let find_controller_index =
                    |leader| self.controllers.addresses().iter().position(|address| *address == leader);
                // The address is trusted only if the daemon's configuration contains it, too.
                leader_address.and_then(find_controller_index).map_or(
                    ControllerStreamEndReason::ControllerLost,
                    ControllerStreamEndReason::RedirectedToController,
                )
            }
            _ => ControllerStreamEndReason::ControllerLost,
        }
    }
}

/// Returns the text of the error's root cause, which an operator may be able to remove.
fn root_cause_text(error: &anyhow::Error) -> String {
    match error.downcast_ref::<Status>() {
        Some(status) if std::error::Error::source(status).is_some() => error.root_cause().to_string(),
        Some(status) if status.message().is_empty() => status.code().to_string(),
        Some(status) => status.message().to_owned(),
        None => error.root_cause().to_string(),
    }
}

/// Adds the expiry time of each kind of certificate to the metrics snapshot.
pub fn add_certificate_expiry_metrics(tls: &ReloadableTlsCredentials, snapshot: &mut MetricsSnapshot) {
    let mut expiry_times = std::collections::BTreeMap::new();
    for (usage, certificate) in tls.labelled_certificates() {
        let expiry_unix_s = certificate.not_after.as_secs_f64();
        expiry_times
            .entry(usage)
            .and_modify(|earliest_expiry: &mut f64| *earliest_expiry = earliest_expiry.min(expiry_unix_s))
            .or_insert(expiry_unix_s);
    }
    expiry_times
        .into_iter()
        .for_each(|(usage, expiry)| snapshot.add_value(&CERTIFICATE_NOT_AFTER_TIMESTAMP_SECONDS, [usage], expiry));
}

/// Reason why a stream from the controller ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ControllerStreamEndReason {
    /// The controller is unreachable or is not the leader.
    ControllerLost,
    RejectedByController,
    /// The controller is not the leader, and has named the leader. Contains the leader's index in the configured
    /// addresses.
    RedirectedToController(usize),
}

/// Order in which a daemon tries the controllers. It does not depend on the clock or on random numbers.
struct ConnectionAttemptOrder {
    controller_count: usize,
    current_controller_index: usize,
    /// Number of failed attempts since a controller last answered.
    failed_attempt_count: usize,
    has_controller_answered: bool,
    retry_interval: Duration,
}

impl ConnectionAttemptOrder {
    fn new(controller_count: usize) -> Self {
        Self {
            controller_count,
            current_controller_index: 0,
            failed_attempt_count: 0,
            has_controller_answered: false,
            retry_interval: CONNECT_RETRY_INTERVAL_RANGE.0,
        }
    }

    fn record_answer(&mut self) {
        (self.has_controller_answered, self.failed_attempt_count, self.retry_interval) =
            (true, 0, CONNECT_RETRY_INTERVAL_RANGE.0);
    }

    /// Records the end of an attempt, and returns the interval before the next attempt.
    fn record_attempt_end(&mut self, end: &ControllerStreamEndReason) -> Duration {
        let had_answered = std::mem::take(&mut self.has_controller_answered);
        self.failed_attempt_count += usize::from(!had_answered);
        match end {
            ControllerStreamEndReason::RedirectedToController(leader) => self.current_controller_index = *leader,
            // The controller that answered last is tried again, because it probably returns first and has this daemon's
            // state.
            _ if had_answered => {}
            _ => self.current_controller_index = (self.current_controller_index + 1) % self.controller_count,
        }
        let were_all_controllers_tried =
            self.failed_attempt_count > 0 && self.failed_attempt_count.is_multiple_of(self.controller_count);
        match end {
            ControllerStreamEndReason::RejectedByController => CONNECT_RETRY_INTERVAL_AFTER_REJECTION,
            _ if were_all_controllers_tried => {
                let retry_pause = self.retry_interval;
                self.retry_interval = (retry_pause * 2).min(CONNECT_RETRY_INTERVAL_RANGE.1);
                retry_pause
            }
            _ => CONNECT_RETRY_INTERVAL_RANGE.0,
        }
    }
}

/// Newest term that a leader has had, and the time of the leader's last message. The caller supplies the current time.
#[derive(Default)]
struct LeaderTermTracker {
    newest_term_and_message_time: Option<(u64, Instant)>,
}

impl LeaderTermTracker {
    /// Fails if the term of a new stream is too old. Accepts `None`, because a controller with a local store has no
    /// terms.
    fn check_term(&mut self, term: Option<u64>, now: Instant) -> anyhow::Result<()> {
        match (term, self.newest_term_and_message_time) {
            (Some(term), Some((newest_term, last_message)))
                if term < newest_term && now.duration_since(last_message) < OLDER_TERM_REJECTION_TIME =>
            {
                Err(anyhow!(
                    "its term is older than that of the last controller (term {term}, expected {newest_term} or more)"
                ))
            }
            _ => {
                self.newest_term_and_message_time = term.map(|term| (term, now));
                Ok(())
            }
        }
    }

    fn record_message_time(&mut self, now: Instant) {
        if let Some((_, last_message)) = &mut self.newest_term_and_message_time {
            *last_message = now;
        }
    }
}

/// Returns a random duration between half of the interval and the full interval.
fn interval_with_jitter(interval: Duration) -> Duration {
    // If no random number is available, all daemons wait equally long, which is harmless.
    let random_number = rand::rngs::SysRng.try_next_u32().unwrap_or(u32::MAX);
    interval.mul_f64(0.5 + 0.5 * f64::from(random_number) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests;
