//! Leadership among controllers. A controller with a store of its own always leads. If several controllers use etcd,
//! one leads and the others refer to it.

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use coreward_config::read_secret;
use coreward_etcd::cluster::EtcdClusterClient;
use coreward_etcd::leadership::{FleetLeaderState, LeaderCandidate, Leadership};
use coreward_etcd::{Certificate, EtcdError, Identity, TlsOptions};
use coreward_http::endpoints::RequestCountsByStatus;
use coreward_metrics::message_metrics;
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_tls::FileWatcher;
use coreward_wire::LEADER_ADDRESS_METADATA_KEY;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tonic::Status;
use tonic::metadata::MetadataValue;

use super::controller_state::ControllerState;
use crate::config::etcd::{EtcdConfig, EtcdTlsConfig};
use coreward_listener::security::ListenerSecurity;
use coreward_metrics::metric_declarations::MetricKind::{Counter, Gauge};
use coreward_metrics::metric_declarations::{
    Component, HistogramMetric, MetricFamily, declare_family, declare_histogram,
};
use coreward_metrics::metrics;
use coreward_store::FleetStoreError;

metrics! {
    API_REQUESTS_TOTAL: MetricFamily<1> = declare_family(
        Counter, "coreward_api_requests_total", &["status"], &[Component::Controller],
        "Requests to the HTTP API, by status",
    );
    CONTROLLER_IS_LEADER: MetricFamily<0> = declare_family(
        Gauge, "coreward_controller_is_leader", &[], &[Component::Controller],
        "1: this controller leads; 0: another one does, or none",
    );
    LEADER_TERM: MetricFamily<0> = declare_family(
        Gauge, "coreward_leader_term", &[], &[Component::Controller],
        "Term of this leader, with etcd",
    );
    LEADER_LEASE_SECONDS: MetricFamily<0> = declare_family(
        Gauge, "coreward_leader_lease_seconds", &[], &[Component::Controller],
        "Remaining lease of this leader, with etcd",
    );
    ETCD_REQUEST_SECONDS: HistogramMetric = declare_histogram(
        "coreward_etcd_request_seconds", &[Component::Controller],
        "Duration of requests to etcd",
    );
}

/// Record in etcd that describes the leader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaderRecord {
    pub address: SocketAddr,
    /// URL (`https://HOST:PORT`) of the leader's API. `None` if the API listens on its own host only, or if the
    /// leader's version is too old to report the URL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api: Option<String>,
}

impl fmt::Display for LeaderRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.api {
            Some(api) => write!(f, "{} (API: {api})", self.address),
            None => self.address.fmt(f),
        }
    }
}

#[derive(Clone)]
enum ElectionRole {
    Leader(Arc<ControllerState>),
    /// Another controller leads, whose record this contains, or no controller leads (`None`).
    Follower(Option<LeaderRecord>),
}

/// Last known role of this controller in the leader election, and the state that does not depend on the role.
pub struct LeaderElection {
    role: Mutex<ElectionRole>,
    cluster: Option<Arc<EtcdClusterClient>>,
    pub security: Arc<ListenerSecurity>,
    pub api_request_counts: Arc<RequestCountsByStatus>,
}

impl LeaderElection {
    /// Returns an election without a leader. `cluster` is the connection to the etcd cluster in which the election
    /// takes place.
    pub fn new(cluster: Option<Arc<EtcdClusterClient>>, security: ListenerSecurity) -> Self {
        Self {
            role: Mutex::new(ElectionRole::Follower(None)),
            cluster,
            security: Arc::new(security),
            api_request_counts: Arc::default(),
        }
    }

    pub fn become_leader(&self, state: Arc<ControllerState>) {
        self.set_role(ElectionRole::Leader(state));
    }

    /// Records that another controller leads, or that none does.
    pub fn become_follower(&self, leader: Option<LeaderRecord>) {
        self.set_role(ElectionRole::Follower(leader));
    }

    fn set_role(&self, role: ElectionRole) {
        *self.role.lock() = role;
    }

    fn role(&self) -> ElectionRole {
        self.role.lock().clone()
    }

    /// Returns the state of this controller if it leads. At a follower, this fails with
    /// UNAVAILABLE and the leader's address.
    pub fn leader_state(&self) -> Result<Arc<ControllerState>, Status> {
        match self.role() {
            ElectionRole::Leader(state) if state.is_leading() => Ok(state),
            ElectionRole::Leader(_) => Err(not_leading_status(None)),
            ElectionRole::Follower(leader) => Err(not_leading_status(leader)),
        }
    }

    /// Returns the record of the leader if another controller leads.
    pub fn other_leader(&self) -> Option<LeaderRecord> {
        match self.role() {
            ElectionRole::Leader(_) => None,
            ElectionRole::Follower(leader) => leader,
        }
    }

    pub fn metrics_snapshot(&self) -> MetricsSnapshot {
        let leader_state = self.leader_state().ok();
        let mut snapshot = match &leader_state {
            Some(state) => state.metrics_snapshot(),
            None => message_metrics::base_metrics_snapshot(Component::Controller),
        };
        self.security.add_metrics(&mut snapshot);
        for (status, count) in self.api_request_counts.request_counts_by_status() {
            snapshot.add_value(&API_REQUESTS_TOTAL, [&status.to_string()], count as f64);
        }
        snapshot.add_value(&CONTROLLER_IS_LEADER, [], f64::from(u8::from(leader_state.is_some())));
        if let Some(leadership) = leader_state.as_ref().and_then(|state| state.leadership()) {
            snapshot.add_value(&LEADER_TERM, [], leadership.term() as f64);
            snapshot.add_value(&LEADER_LEASE_SECONDS, [], leadership.lease_deadline().remaining_time().as_secs_f64());
        }
        if let Some(cluster) = &self.cluster {
            snapshot.add_histogram(&ETCD_REQUEST_SECONDS, cluster.request_latencies());
        }
        snapshot
    }

    /// Resigns the leadership, even during an election. Does nothing if there are no other controllers.
    pub async fn resign(&self) {
        let Some(cluster) = &self.cluster else { return };
        self.become_follower(None);
        match cluster.revoke_all_leases().await {
            Ok(true) => tracing::info!(event = "resigned", "this controller has resigned: another controller can lead"),
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(
                    event = "lease-not-revoked",
                    %error,
                    "this controller cannot revoke its lease in etcd: other controllers wait until the lease expires"
                )
            }
        }
    }
}

/// Returns the error with which a follower answers requests. It contains the leader's address.
pub fn not_leading_status(leader: Option<LeaderRecord>) -> Status {
    let Some(LeaderRecord { address, .. }) = leader else {
        return Status::unavailable("this controller does not lead, and no other one does at this moment");
    };
    let mut status = Status::unavailable(format!("this controller does not lead: {address} does"));
    if let Ok(address) = MetadataValue::try_from(address.to_string()) {
        status.metadata_mut().insert(LEADER_ADDRESS_METADATA_KEY, address);
    }
    status
}

/// Returns whether the error means that a change failed, or may have failed, because this controller was deposed.
pub fn is_caused_by_deposition(error: &anyhow::Error) -> bool {
    let etcd_error = error.chain().find_map(|cause| match cause.downcast_ref::<FleetStoreError>() {
        Some(FleetStoreError::Etcd(error)) => Some(error),
        _ => cause.downcast_ref::<EtcdError>(),
    });
    matches!(etcd_error, Some(EtcdError::Deposed(_) | EtcdError::Unreachable { .. }))
}

/// Waits until this controller leads. Until then, records in `election` which controller leads.
pub async fn campaign_for_leadership(
    election: &Arc<LeaderElection>,
    cluster: &Arc<EtcdClusterClient>,
    config: &EtcdConfig,
) -> anyhow::Result<Leadership> {
    let candidate = build_candidate(config)?;
    let (election, campaign_cluster) = (election.clone(), cluster.clone());
    let on_leader_state = move |leader_state| match leader_state {
        FleetLeaderState::NoLeader => {
            tracing::info!(event = "no-leader", "no controller leads: this controller tries to become the leader");
            election.become_follower(None);
        }
        FleetLeaderState::Leader(value) => {
            let leader = serde_json::from_str::<LeaderRecord>(&value).ok();
            let name = leader.as_ref().map_or(value, LeaderRecord::to_string);
            tracing::info!(
                event = "following",
                leader = name,
                "another controller (`leader`) leads: this controller is a follower and rejects daemons"
            );
            election.become_follower(leader);
        }
        FleetLeaderState::Unknown(problem) => {
            tracing::warn!(
                event = "leader-unknown",
                error = problem,
                "this controller cannot read from etcd which controller leads: it rejects daemons and retries"
            );
            election.become_follower(None);
        }
    };
    let campaign =
        cluster.spawn(async move { candidate.campaign_until_elected(campaign_cluster, on_leader_state).await });
    campaign.await.context("the thread for etcd has ended")
}

pub fn build_candidate(config: &EtcdConfig) -> anyhow::Result<LeaderCandidate> {
    let leader_record = serde_json::to_string(&LeaderRecord {
        address: config.advertised_address,
        api: config.advertised_api_url.clone(),
    })?;
    Ok(LeaderCandidate { key_prefix: config.key_prefix.clone(), leader_record, lease_duration: config.lease_duration })
}

/// Returns a description of the present leader. Fails if etcd does not answer. Asynchronous code must not call it.
pub fn describe_leader(config: &EtcdConfig) -> anyhow::Result<String> {
    let cluster = connect_cluster(config)?;
    Ok(match cluster.block_on(build_candidate(config)?.read_leader(&cluster))? {
        FleetLeaderState::Leader(value) => match serde_json::from_str::<LeaderRecord>(&value) {
            Ok(leader) => format!("controller {leader} leads"),
            Err(_) => format!("{value} leads"),
        },
        FleetLeaderState::NoLeader | FleetLeaderState::Unknown(_) => "no controller leads".to_owned(),
    })
}

/// Connects to etcd. Must not be called from asynchronous code. Fails if a file of `[etcd.tls]` is unusable.
pub fn connect_cluster(config: &EtcdConfig) -> anyhow::Result<Arc<EtcdClusterClient>> {
    let tls = config.tls.as_ref().map(read_tls_options).transpose()?;
    Ok(Arc::new(EtcdClusterClient::new(&config.endpoints, tls.as_ref())?))
}

/// Loads the files of `[etcd.tls]` again when they change. An unusable file changes nothing. Never returns.
pub async fn reload_changed_certificates(cluster: &Arc<EtcdClusterClient>, config: &EtcdConfig) -> Infallible {
    let Some(files) = &config.tls else { return std::future::pending().await };
    let client_files = files.client_certificate_and_key_files.iter().flat_map(|(certificate, key)| [certificate, key]);
    let watcher = FileWatcher::from_paths(std::iter::once(&files.ca_file).chain(client_files));
    loop {
        watcher.wait_for_change().await;
        watcher.record_modification_times();
        let reload_result = match read_tls_options(files) {
            Ok(tls) => cluster.clone().replace_certificates(tls).await.map_err(anyhow::Error::from),
            Err(error) => Err(error),
        };
        match reload_result {
            Ok(()) => tracing::info!(
                event = "etcd-certificates-reloaded",
                ca = %files.ca_file.display(),
                "the controller has reloaded the files of `[etcd.tls]`"
            ),
            Err(error) => {
                tracing::warn!(
                    event = "etcd-certificates-not-reloaded",
                    ca = %files.ca_file.display(),
                    error = format!("{error:#}"),
                    "the controller cannot use the changed files of `[etcd.tls]` and keeps the previous certificates"
                );
            }
        }
    }
}

fn read_tls_options(files: &EtcdTlsConfig) -> anyhow::Result<TlsOptions> {
    let read_file = |path: &std::path::Path| {
        let describe_expected_file = || format!("{}: expected a readable file in PEM", path.display());
        std::fs::read(path).with_context(describe_expected_file)
    };
    let mut tls_options = TlsOptions::new().ca_certificate(Certificate::from_pem(read_file(&files.ca_file)?));
    if let Some((certificate, key)) = &files.client_certificate_and_key_files {
        let client_key = read_secret(key).map_err(anyhow::Error::msg)?;
        tls_options = tls_options.identity(Identity::from_pem(read_file(certificate)?, client_key));
    }
    Ok(tls_options)
}
