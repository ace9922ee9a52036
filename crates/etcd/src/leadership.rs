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
use crate::cluster::{Cluster, TIMEOUT};

/// Divisor of the lease duration that yields a safety margin, which the leader does not use (one tenth).
const LEASE_MARGIN_DIVISOR: u32 = 10;
/// Number of times that a lease is renewed per lease duration, so that several renewals may fail.
const RENEWAL_COUNT: u32 = 5;
/// Maximum time to wait for a watch event. The leader's key is then read again.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
const CLOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Controller that competes for the key of the leader in etcd.
#[derive(Debug, Clone)]
pub struct Candidate {
    pub prefix: String,
    /// Value that the leader writes to its key, for followers to read.
    pub value: String,
    /// Time for which a leader continues when it cannot reach etcd, and maximum time without a leader after a failure.
    /// Must be whole seconds, at least 2.
    pub lease_duration: Duration,
}

/// Leader of the fleet, according to the leader's key in etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaderState {
    NoLeader,
    /// Another process leads, which has written this value to the leader's key.
    Leader(String),
    /// etcd did not answer, for this reason.
    Unknown(String),
}

/// Leadership of this process. It lasts until its lease ends or this value is dropped.
pub struct Leadership {
    cluster: Arc<Cluster>,
    key: String,
    lease_id: i64,
    term: i64,
    lease_end: Arc<AtomicU64>,
    end_reason: watch::Receiver<Option<String>>,
    renewal_task: AbortHandle,
}

impl Candidate {
    fn key(&self) -> String {
        format!("{}/leader", self.prefix)
    }

    /// Waits until this process has acquired the leader's key. Until then, calls `seen` whenever the leader changes.
    pub async fn campaign(&self, cluster: Arc<Cluster>, mut seen: impl FnMut(LeaderState)) -> Leadership {
        let mut reported = None;
        loop {
            let now = match self.try_campaign(&cluster).await {
                Ok(CampaignOutcome::Elected(leadership)) => return leadership,
                Ok(CampaignOutcome::Lost { leader, revision }) => {
                    let now = LeaderState::Leader(leader);
                    if reported.as_ref() != Some(&now) {
                        seen(now.clone());
                    }
                    reported = Some(now);
                    self.wait_for_change(&cluster, revision).await;
                    continue;
                }
                Ok(CampaignOutcome::NoLeader) => LeaderState::NoLeader,
                Err(error) => LeaderState::Unknown(error.to_string()),
            };
            let unknown = matches!(now, LeaderState::Unknown(_));
            if reported.as_ref() != Some(&now) {
                seen(now.clone());
            }
            reported = Some(now);
            if unknown {
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }

    /// Acquires the leader's key. Fails if another process holds it.
    pub async fn campaign_once(&self, cluster: Arc<Cluster>) -> Result<Leadership, EtcdError> {
        match self.try_campaign(&cluster).await? {
            CampaignOutcome::Elected(leadership) => Ok(leadership),
            CampaignOutcome::Lost { leader, .. } => Err(EtcdError::Deposed(format!("{leader} leads"))),
            CampaignOutcome::NoLeader => {
                Err(EtcdError::Deposed("other controllers campaign at the same time".to_owned()))
            }
        }
    }

    pub async fn read_leader(&self, cluster: &Cluster) -> Result<LeaderState, EtcdError> {
        let found = self.read_leader_key(cluster).await?;
        let value = found.kvs().first().map(|leader| String::from_utf8_lossy(leader.value()).into_owned());
        Ok(value.map_or(LeaderState::NoLeader, LeaderState::Leader))
    }

    async fn read_leader_key(&self, cluster: &Cluster) -> Result<GetResponse, EtcdError> {
        let ask = |mut client: Client| {
            let key = self.key();
            async move { client.get(key, None).await }
        };
        cluster.call(Deadline::now() + TIMEOUT, ask).await
    }

    async fn try_campaign(&self, cluster: &Arc<Cluster>) -> Result<CampaignOutcome, EtcdError> {
        let found = self.read_leader_key(cluster).await?;
        if let Some(leader) = found.kvs().first() {
            return Ok(CampaignOutcome::lost(leader));
        }
        let began = Deadline::now();
        let seconds = self.lease_duration.as_secs() as i64;
        let granted =
            cluster.call(began + TIMEOUT, |mut client| async move { client.lease_grant(seconds, None).await });
        let granted = granted.await?;
        let (lease, time) = (granted.id(), Duration::from_secs(granted.ttl().unsigned_abs()));
        // The process may be ending while a campaign continues. If it acquired the key, no other controller could lead
        // until the lease expires.
        if !cluster.register_lease(lease) {
            return Err(EtcdError::Deposed("this process is ending".to_owned()));
        }
        let attempt = self.write_leader_key(cluster, lease, began, time).await;
        if !matches!(attempt, Ok(CampaignOutcome::Elected(_))) {
            // The unused lease would also expire by itself, but revoking it is faster.
            let held = cluster.clone();
            drop(cluster.spawn(async move { held.revoke(lease, Deadline::now() + TIMEOUT).await }));
        }
        attempt
    }

    /// Writes the leader's key with a lease that was requested at `began` and is valid for `time`.
    async fn write_leader_key(
        &self,
        cluster: &Arc<Cluster>,
        lease: i64,
        began: Deadline,
        time: Duration,
    ) -> Result<CampaignOutcome, EtcdError> {
        let key = self.key();
        // The lease is measured from before the first attempt, so that it never seems longer than it is.
        let lease_end = began + (time - time / LEASE_MARGIN_DIVISOR);
        let take = |mut client: Client| {
            let nobody = Compare::create_revision(key.clone(), CompareOp::Equal, 0);
            let put = TxnOp::put(key.clone(), self.value.clone(), Some(PutOptions::new().with_lease(lease)));
            let take = Txn::new().when([nobody]).and_then([put]).or_else([TxnOp::get(key.clone(), None)]);
            async move { client.txn(take).await }
        };
        let outcome = cluster.call(lease_end, take).await?;
        let revision = outcome.header().map_or(0, etcd_client::ResponseHeader::revision);
        if outcome.succeeded() {
            return Ok(CampaignOutcome::Elected(self.new_leadership(cluster, lease, revision, time, lease_end)));
        }
        for response in outcome.op_responses() {
            let TxnOpResponse::Get(found) = response else { continue };
            // An earlier attempt has succeeded, but its answer was lost.
            if let Some(mine) = found.kvs().iter().find(|leader| leader.lease() == lease) {
                return Ok(CampaignOutcome::Elected(self.new_leadership(
                    cluster,
                    lease,
                    mine.create_revision(),
                    time,
                    lease_end,
                )));
            }
            if let Some(leader) = found.kvs().first() {
                return Ok(CampaignOutcome::lost(leader));
            }
        }
        Ok(CampaignOutcome::NoLeader)
    }

    fn new_leadership(
        &self,
        cluster: &Arc<Cluster>,
        lease_id: i64,
        term: i64,
        time: Duration,
        lease_end: Deadline,
    ) -> Leadership {
        let (ending, end_reason) = watch::channel(None);
        let lease_end = Arc::new(AtomicU64::new(lease_end.since_boot().as_nanos() as u64));
        let renewal_task =
            cluster.spawn(renew_lease(cluster.clone(), lease_id, time, lease_end.clone(), ending)).abort_handle();
        Leadership { cluster: cluster.clone(), key: self.key(), lease_id, term, lease_end, end_reason, renewal_task }
    }

    /// Waits until the leader's key has changed after `revision`, but at most for [`POLL_INTERVAL`].
    async fn wait_for_change(&self, cluster: &Cluster, revision: i64) {
        let from = WatchOptions::new().with_start_revision(revision + 1);
        let watch = |mut client: Client| {
            let (key, from) = (self.key(), from.clone());
            async move { client.watch(key, Some(from)).await }
        };
        let changed = async {
            let mut changes = cluster.call(Deadline::now() + POLL_INTERVAL, watch).await.ok()?;
            while changes.message().await.ok()??.events().is_empty() {}
            Some(())
        };
        if let Ok(None) = tokio::time::timeout(POLL_INTERVAL, changed).await {
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }
}

enum CampaignOutcome {
    Elected(Leadership),
    Lost { leader: String, revision: i64 },
    NoLeader,
}

impl CampaignOutcome {
    fn lost(leader: &etcd_client::KeyValue) -> Self {
        let leader_record = String::from_utf8_lossy(leader.value()).into_owned();
        Self::Lost { leader: leader_record, revision: leader.mod_revision() }
    }
}

/// Renews the lease until that is no longer possible, and sends the reason to `ending`.
async fn renew_lease(
    cluster: Arc<Cluster>,
    lease: i64,
    time: Duration,
    lease_end: Arc<AtomicU64>,
    ending: watch::Sender<Option<String>>,
) {
    let end = || Deadline::at(Duration::from_nanos(lease_end.load(Ordering::Relaxed)));
    loop {
        tokio::time::sleep((time / RENEWAL_COUNT).min(end().remaining())).await;
        if end().remaining().is_zero() {
            let _ = ending.send(Some("its lease has ended: etcd has not renewed it in time".to_owned()));
            return;
        }
        let began = Deadline::now();
        let renewed =
            cluster.call(end(), |mut client: Client| async move { client.lease_keep_alive(lease).await }).await;
        match renewed {
            Ok(_) => {
                let next = began + (time - time / LEASE_MARGIN_DIVISOR);
                lease_end.store(next.since_boot().as_nanos() as u64, Ordering::Relaxed);
            }
            Err(EtcdError::Rejected(reason)) => {
                lease_end.store(0, Ordering::Relaxed);
                let _ = ending.send(Some(format!("etcd has ended its lease: {reason}")));
                return;
            }
            Err(error) => tracing::warn!(
                event = "lease-not-renewed",
                remaining = ?end().remaining(),
                %error,
                "the leader cannot renew its lease in etcd and retries until the lease ends"
            ),
        }
    }
}

impl Leadership {
    /// Returns the term, which is the create revision of the leader's key. It grows with every new leader.
    pub fn term(&self) -> u64 {
        self.term.unsigned_abs()
    }

    /// Returns whether the lease is still valid according to this machine's clock.
    pub fn is_valid(&self) -> bool {
        !self.lease_end().remaining().is_zero()
    }

    pub fn lease_end(&self) -> Deadline {
        Deadline::at(Duration::from_nanos(self.lease_end.load(Ordering::Relaxed)))
    }

    /// Waits until the leadership ends, and returns the reason.
    pub async fn wait_for_end(&self) -> String {
        let mut ended = self.end_reason.clone();
        loop {
            match tokio::time::timeout(CLOCK_POLL_INTERVAL, ended.wait_for(Option::is_some)).await {
                Ok(Ok(reason)) => return reason.clone().unwrap_or_default(),
                Ok(Err(_)) => return "its lease is not renewed".to_owned(),
                // The task that renews the lease may be late, too.
                Err(_) if !self.is_valid() => return "its lease has ended".to_owned(),
                Err(_) => {}
            }
        }
    }

    /// Revokes the lease, so that other controllers need not wait until it expires.
    pub async fn resign(&self) -> Result<(), EtcdError> {
        self.renewal_task.abort();
        self.lease_end.store(0, Ordering::Relaxed);
        self.cluster.revoke(self.lease_id, Deadline::now() + TIMEOUT).await
    }

    /// Executes operations in one transaction if this process still leads. `also` is another key and its required
    /// revision.
    pub(crate) async fn write_if_leading(
        &self,
        also: Option<(&str, i64)>,
        operations: &[TxnOp],
    ) -> Result<WriteOutcome, EtcdError> {
        let leads = Compare::create_revision(self.key.clone(), CompareOp::Equal, self.term);
        let mut conditions = vec![leads];
        let mut looks = vec![TxnOp::get(self.key.clone(), Some(GetOptions::new().with_keys_only()))];
        if let Some((key, revision)) = also {
            conditions.push(Compare::mod_revision(key, CompareOp::Equal, revision));
            looks.push(TxnOp::get(key, None));
        }
        let transaction = Txn::new().when(conditions).and_then(operations).or_else(looks);
        let request = |mut client: Client| {
            let transaction = transaction.clone();
            async move { client.txn(transaction).await }
        };
        let answer = self.cluster.call(self.lease_end(), request).await?;
        if answer.succeeded() {
            let revision = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
            return Ok(WriteOutcome::Written { revision });
        }
        let mut found = answer.op_responses().into_iter().map(|response| match response {
            TxnOpResponse::Get(found) => found.kvs().first().cloned(),
            _ => None,
        });
        if found.next().flatten().is_none_or(|leader| leader.create_revision() != self.term) {
            self.lease_end.store(0, Ordering::Relaxed);
            return Err(EtcdError::Deposed("another one does, or its lease has ended".to_owned()));
        }
        Ok(WriteOutcome::Conflict(found.next().flatten()))
    }

    pub(crate) fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }
}

/// Outcome of a write that requires the leadership.
pub(crate) enum WriteOutcome {
    Written {
        revision: i64,
    },
    /// The key in `also` has another revision. Contains the key's current value.
    Conflict(Option<etcd_client::KeyValue>),
}

impl Drop for Leadership {
    fn drop(&mut self) {
        self.renewal_task.abort();
    }
}
