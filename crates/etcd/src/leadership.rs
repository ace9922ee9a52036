//! Leader election. The owner of the key PREFIX/leader leads for the duration of its lease. Every write requires the
//! key's create revision (the term), so a deposed leader that was stopped or disconnected cannot write.
//!
//! A leader measures its lease by its own clock, beginning before it sends the request. So its leadership ends before
//! the lease ends in etcd, and there are never two leaders. [`LEASE_MARGIN_DIVISOR`] allows for clocks of different
//! speed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, GetOptions, GetResponse, PutOptions, Txn, TxnOp, TxnOpResponse, WatchOptions,
};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::EtcdError;
use crate::clock::Deadline;
use crate::cluster::{CLUSTER_REQUEST_TIMEOUT, EtcdClusterClient};

/// Divisor of the lease duration that yields the safety margin (one tenth). The leader stops by this margin before its
/// lease ends.
const LEASE_MARGIN_DIVISOR: u32 = 10;
/// Number of renewals within one lease duration, so that the lease survives several failed renewals.
const RENEWALS_PER_LEASE: u32 = 5;
/// Maximum time to wait for a watch event, after which the leader's key is read again.
const LEADER_POLL_INTERVAL: Duration = Duration::from_secs(1);
const LEASE_CLOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);
const LEADERSHIP_RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Controller that competes with others for the leader's key in etcd.
#[derive(Debug, Clone)]
pub struct LeaderCandidate {
    pub key_prefix: String,
    /// Text that the leader writes as the value of its key, for followers to read.
    pub leader_record: String,
    /// Time after which a leader that cannot reach etcd stops. It is also the maximum time without a leader after a
    /// failure. It must be a whole number of seconds, at least 2.
    pub lease_duration: Duration,
}

/// State of the fleet's leadership, according to the leader's key in etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FleetLeaderState {
    NoLeader,
    /// Another process is the leader. Contains the value that it wrote to the leader's key.
    Leader(String),
    /// etcd did not answer. Contains the reason.
    Unknown(String),
}

/// Leadership that this process has acquired. It lasts until its lease ends or this value is dropped.
pub struct Leadership {
    cluster: Arc<EtcdClusterClient>,
    leader_key: String,
    lease_id: i64,
    term: i64,
    lease_end_ns: Arc<AtomicU64>,
    end_reason_receiver: watch::Receiver<Option<String>>,
    renewal_task: AbortHandle,
}

impl LeaderCandidate {
    fn leader_key(&self) -> String {
        format!("{}/leader", self.key_prefix)
    }

    /// Waits until this process has acquired the leader's key, and so has become the leader. Meanwhile, calls
    /// `on_leader_change` whenever the leader changes.
    pub async fn campaign_until_elected(
        &self,
        cluster: Arc<EtcdClusterClient>,
        mut on_leader_change: impl FnMut(FleetLeaderState),
    ) -> Leadership {
        let mut reported_state = None;
        loop {
            let state = match self.try_campaign(&cluster).await {
                Ok(LeaderCampaignOutcome::Elected(leadership)) => return leadership,
                Ok(LeaderCampaignOutcome::Lost { leader_record: leader, leader_key_revision: revision }) => {
                    let state = FleetLeaderState::Leader(leader);
                    if reported_state.as_ref() != Some(&state) {
                        on_leader_change(state.clone());
                    }
                    reported_state = Some(state);
                    self.wait_for_leader_key_change(&cluster, revision).await;
                    continue;
                }
                Ok(LeaderCampaignOutcome::NoLeader) => FleetLeaderState::NoLeader,
                Err(error) => FleetLeaderState::Unknown(error.to_string()),
            };
            let is_leader_unknown = matches!(state, FleetLeaderState::Unknown(_));
            if reported_state.as_ref() != Some(&state) {
                on_leader_change(state.clone());
            }
            reported_state = Some(state);
            if is_leader_unknown {
                tokio::time::sleep(LEADERSHIP_RETRY_INTERVAL).await;
            }
        }
    }

    /// Tries once to acquire the leader's key. Fails if another process holds it.
    pub async fn campaign_once(&self, cluster: Arc<EtcdClusterClient>) -> Result<Leadership, EtcdError> {
        match self.try_campaign(&cluster).await? {
            LeaderCampaignOutcome::Elected(leadership) => Ok(leadership),
            LeaderCampaignOutcome::Lost { leader_record: leader, .. } => {
                Err(EtcdError::Deposed(format!("{leader} leads")))
            }
            LeaderCampaignOutcome::NoLeader => {
                Err(EtcdError::Deposed("other controllers campaign at the same time".to_owned()))
            }
        }
    }

    pub async fn read_leader(&self, cluster: &EtcdClusterClient) -> Result<FleetLeaderState, EtcdError> {
        let response = self.read_leader_key(cluster).await?;
        let value = response.kvs().first().map(|leader| String::from_utf8_lossy(leader.value()).into_owned());
        Ok(value.map_or(FleetLeaderState::NoLeader, FleetLeaderState::Leader))
    }

    async fn read_leader_key(&self, cluster: &EtcdClusterClient) -> Result<GetResponse, EtcdError> {
        let get_leader_key = |mut client: Client| {
            let leader_key = self.leader_key();
            async move { client.get(leader_key, None).await }
        };
        cluster.call_until_deadline(Deadline::now() + CLUSTER_REQUEST_TIMEOUT, get_leader_key).await
    }

    async fn try_campaign(&self, cluster: &Arc<EtcdClusterClient>) -> Result<LeaderCampaignOutcome, EtcdError> {
        let response = self.read_leader_key(cluster).await?;
        if let Some(leader) = response.kvs().first() {
            return Ok(LeaderCampaignOutcome::from_leader_key(leader));
        }
        let start_time = Deadline::now();
        let lease_seconds = self.lease_duration.as_secs() as i64;
        let grant_request = cluster
            .call_until_deadline(start_time + CLUSTER_REQUEST_TIMEOUT, |mut client| async move {
                client.lease_grant(lease_seconds, None).await
            });
        let lease_grant = grant_request.await?;
        let (lease_id, lease_duration) = (lease_grant.id(), Duration::from_secs(lease_grant.ttl().unsigned_abs()));
        // The process may be ending while a campaign continues. If it acquired the key, no other controller could lead
        // until the lease expires.
        if !cluster.register_lease(lease_id) {
            return Err(EtcdError::Deposed("this process is ending".to_owned()));
        }
        let campaign_result = self.write_leader_key(cluster, lease_id, start_time, lease_duration).await;
        if !matches!(campaign_result, Ok(LeaderCampaignOutcome::Elected(_))) {
            // The unused lease would also expire by itself, but revoking it is faster.
            let cluster_clone = cluster.clone();
            drop(cluster.spawn(async move {
                cluster_clone.revoke_lease(lease_id, Deadline::now() + CLUSTER_REQUEST_TIMEOUT).await
            }));
        }
        campaign_result
    }

    /// Writes the leader's key with a lease that was requested at `start_time` and is valid for `lease_duration`.
    async fn write_leader_key(
        &self,
        cluster: &Arc<EtcdClusterClient>,
        lease_id: i64,
        start_time: Deadline,
        lease_duration: Duration,
    ) -> Result<LeaderCampaignOutcome, EtcdError> {
        // The lease is measured from before the first attempt, so that it never seems longer than it is.
        let lease_end = start_time + (lease_duration - lease_duration / LEASE_MARGIN_DIVISOR);
        let send_transaction = |mut client: Client| {
            let transaction = self.build_leader_transaction(lease_id);
            async move { client.txn(transaction).await }
        };
        let transaction_result = cluster.call_until_deadline(lease_end, send_transaction).await?;
        let revision = transaction_result.header().map_or(0, etcd_client::ResponseHeader::revision);
        let start_leadership = |term| {
            LeaderCampaignOutcome::Elected(self.start_leadership(cluster, lease_id, term, lease_duration, lease_end))
        };
        if transaction_result.succeeded() {
            return Ok(start_leadership(revision));
        }
        for response in transaction_result.op_responses() {
            let TxnOpResponse::Get(get_response) = response else { continue };
            // An earlier attempt has succeeded, but its answer was lost.
            if let Some(own_entry) = get_response.kvs().iter().find(|leader| leader.lease() == lease_id) {
                return Ok(start_leadership(own_entry.create_revision()));
            }
            if let Some(leader) = get_response.kvs().first() {
                return Ok(LeaderCampaignOutcome::from_leader_key(leader));
            }
        }
        Ok(LeaderCampaignOutcome::NoLeader)
    }

    /// Returns the transaction that writes the leader's key if the key does not exist, and otherwise reads it.
    fn build_leader_transaction(&self, lease_id: i64) -> Txn {
        let leader_key = self.leader_key();
        let leader_key_is_absent = Compare::create_revision(leader_key.clone(), CompareOp::Equal, 0);
        let put_options = PutOptions::new().with_lease(lease_id);
        let put_operation = TxnOp::put(leader_key.clone(), self.leader_record.clone(), Some(put_options));
        Txn::new().when([leader_key_is_absent]).and_then([put_operation]).or_else([TxnOp::get(leader_key, None)])
    }

    fn start_leadership(
        &self,
        cluster: &Arc<EtcdClusterClient>,
        lease_id: i64,
        term: i64,
        lease_duration: Duration,
        lease_end: Deadline,
    ) -> Leadership {
        let (end_reason_sender, end_reason) = watch::channel(None);
        let lease_end_ns = Arc::new(AtomicU64::new(lease_end.time_since_boot().as_nanos() as u64));
        let renewal_task = cluster
            .spawn(renew_lease_until_end(
                cluster.clone(),
                lease_id,
                lease_duration,
                lease_end_ns.clone(),
                end_reason_sender,
            ))
            .abort_handle();
        Leadership {
            cluster: cluster.clone(),
            leader_key: self.leader_key(),
            lease_id,
            term,
            lease_end_ns,
            end_reason_receiver: end_reason,
            renewal_task,
        }
    }

    /// Waits until the leader's key has changed after `revision`, but at most for [`LEADER_POLL_INTERVAL`].
    async fn wait_for_leader_key_change(&self, cluster: &EtcdClusterClient, revision: i64) {
        let watch_options = WatchOptions::new().with_start_revision(revision + 1);
        let start_watch = |mut client: Client| {
            let (key, watch_options) = (self.leader_key(), watch_options.clone());
            async move { client.watch(key, Some(watch_options)).await }
        };
        let wait_for_first_change = async {
            let mut watch_stream =
                cluster.call_until_deadline(Deadline::now() + LEADER_POLL_INTERVAL, start_watch).await.ok()?;
            while watch_stream.message().await.ok()??.events().is_empty() {}
            Some(())
        };
        if let Ok(None) = tokio::time::timeout(LEADER_POLL_INTERVAL, wait_for_first_change).await {
            tokio::time::sleep(LEADERSHIP_RETRY_INTERVAL).await;
        }
    }
}

enum LeaderCampaignOutcome {
    Elected(Leadership),
    Lost { leader_record: String, leader_key_revision: i64 },
    NoLeader,
}

impl LeaderCampaignOutcome {
    fn from_leader_key(leader: &etcd_client::KeyValue) -> Self {
        let leader_record = String::from_utf8_lossy(leader.value()).into_owned();
        Self::Lost { leader_record, leader_key_revision: leader.mod_revision() }
    }
}

/// Renews the lease until renewal is no longer possible. Then sends the reason to `end_reason_sender`.
async fn renew_lease_until_end(
    cluster: Arc<EtcdClusterClient>,
    lease_id: i64,
    lease_duration: Duration,
    lease_end: Arc<AtomicU64>,
    end_reason_sender: watch::Sender<Option<String>>,
) {
    let lease_deadline = || Deadline::from_time_since_boot(Duration::from_nanos(lease_end.load(Ordering::Relaxed)));
    loop {
        tokio::time::sleep((lease_duration / RENEWALS_PER_LEASE).min(lease_deadline().remaining_time())).await;
        if lease_deadline().remaining_time().is_zero() {
            let _ = end_reason_sender.send(Some("its lease has ended: etcd has not renewed it in time".to_owned()));
            return;
        }
        let start_time = Deadline::now();
        let renewal_result = cluster
            .call_until_deadline(lease_deadline(), |mut client: Client| async move {
                client.lease_keep_alive(lease_id).await
            })
            .await;
        match renewal_result {
            Ok(_) => {
                let next_lease_end = start_time + (lease_duration - lease_duration / LEASE_MARGIN_DIVISOR);
                lease_end.store(next_lease_end.time_since_boot().as_nanos() as u64, Ordering::Relaxed);
            }
            Err(EtcdError::Rejected(reason)) => {
                lease_end.store(0, Ordering::Relaxed);
                let _ = end_reason_sender.send(Some(format!("etcd has ended its lease: {reason}")));
                return;
            }
            Err(error) => tracing::warn!(
                event = "lease-not-renewed",
                remaining = ?lease_deadline().remaining_time(),
                %error,
                "the leader cannot renew its lease in etcd and retries until the lease ends"
            ),
        }
    }
}

impl Leadership {
    /// Returns the leader's term, which is the create revision of the leader's key. It grows with every new leader.
    pub fn term(&self) -> u64 {
        self.term.unsigned_abs()
    }

    /// Returns whether the lease is still valid by this machine's clock, so that this process is the leader.
    pub fn is_valid(&self) -> bool {
        !self.lease_deadline().remaining_time().is_zero()
    }

    pub fn lease_deadline(&self) -> Deadline {
        Deadline::from_time_since_boot(Duration::from_nanos(self.lease_end_ns.load(Ordering::Relaxed)))
    }

    /// Waits until the leadership ends, and returns the reason.
    pub async fn wait_for_end(&self) -> String {
        let mut end_reason = self.end_reason_receiver.clone();
        loop {
            match tokio::time::timeout(LEASE_CLOCK_POLL_INTERVAL, end_reason.wait_for(Option::is_some)).await {
                Ok(Ok(reason)) => return reason.clone().unwrap_or_default(),
                Ok(Err(_)) => return "its lease is not renewed".to_owned(),
                // The task that renews the lease may be late, too.
                Err(_) if !self.is_valid() => return "its lease has ended".to_owned(),
                Err(_) => {}
            }
        }
    }

    /// Revokes the lease, so that another controller can become the leader before the lease expires.
    pub async fn resign(&self) -> Result<(), EtcdError> {
        self.renewal_task.abort();
        self.lease_end_ns.store(0, Ordering::Relaxed);
        self.cluster.revoke_lease(self.lease_id, Deadline::now() + CLUSTER_REQUEST_TIMEOUT).await
    }

    /// Executes operations in one transaction if this process is still the leader. `required_revision`, if given, is
    /// another key and the modification revision that it must have.
    pub(crate) async fn write_if_leading(
        &self,
        required_revision: Option<(&str, i64)>,
        operations: &[TxnOp],
    ) -> Result<LeaderWriteOutcome, EtcdError> {
        let leader_condition = Compare::create_revision(self.leader_key.clone(), CompareOp::Equal, self.term);
        let mut conditions = vec![leader_condition];
        let mut read_operations = vec![TxnOp::get(self.leader_key.clone(), Some(GetOptions::new().with_keys_only()))];
        if let Some((key, revision)) = required_revision {
            conditions.push(Compare::mod_revision(key, CompareOp::Equal, revision));
            read_operations.push(TxnOp::get(key, None));
        }
        let transaction = Txn::new().when(conditions).and_then(operations).or_else(read_operations);
        let send_transaction = |mut client: Client| {
            let transaction = transaction.clone();
            async move { client.txn(transaction).await }
        };
        let txn_response = self.cluster.call_until_deadline(self.lease_deadline(), send_transaction).await?;
        if txn_response.succeeded() {
            let revision = txn_response.header().map_or(0, etcd_client::ResponseHeader::revision);
            return Ok(LeaderWriteOutcome::Written { revision });
        }
        let mut read_entries = txn_response.op_responses().into_iter().map(|response| match response {
            TxnOpResponse::Get(get_response) => get_response.kvs().first().cloned(),
            _ => None,
        });
        if read_entries.next().flatten().is_none_or(|leader| leader.create_revision() != self.term) {
            self.lease_end_ns.store(0, Ordering::Relaxed);
            return Err(EtcdError::Deposed("another one does, or its lease has ended".to_owned()));
        }
        Ok(LeaderWriteOutcome::Conflict(read_entries.next().flatten()))
    }

    pub(crate) fn cluster(&self) -> &Arc<EtcdClusterClient> {
        &self.cluster
    }
}

/// Outcome of a write that only the leader may do.
pub(crate) enum LeaderWriteOutcome {
    /// The operations were executed. Contains the revision of the transaction.
    Written { revision: i64 },
    /// The key in `required_revision` has another revision, so nothing was written. Contains the key's current value.
    Conflict(Option<etcd_client::KeyValue>),
}

impl Drop for Leadership {
    fn drop(&mut self) {
        self.renewal_task.abort();
    }
}
