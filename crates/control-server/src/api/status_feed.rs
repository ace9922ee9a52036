//! Updates for watchers, encoded once for all of them. A slow watcher skips to the newest update, so no queue grows.

use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::{Loads, Overview};
use coreward_http::{Problem, ProblemKind};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Minimum time between two publications of the servers' loads to clients that watch the fleet.
pub const MIN_LOAD_PUBLICATION_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of clients that watch the fleet at the same time.
const MAX_FLEET_WATCHERS: usize = 64;

/// Document as JSON text. It is empty before the first document is published.
type JsonText = Arc<str>;

pub struct StatusFeed {
    loads_sender: watch::Sender<JsonText>,
    overview_sender: watch::Sender<JsonText>,
    last_overview: Mutex<Option<Overview>>,
    watcher_slots: Arc<Semaphore>,
}

impl Default for StatusFeed {
    fn default() -> Self {
        Self {
            loads_sender: watch::Sender::new(JsonText::from("")),
            overview_sender: watch::Sender::new(JsonText::from("")),
            last_overview: Mutex::default(),
            watcher_slots: Arc::new(Semaphore::new(MAX_FLEET_WATCHERS)),
        }
    }
}

impl StatusFeed {
    pub fn publish_overview(&self, overview: Overview) {
        let mut last_overview = self.last_overview.lock();
        if last_overview.as_ref() != Some(&overview) {
            publish_json(&self.overview_sender, &overview);
            *last_overview = Some(overview);
        }
    }

    /// Publishes the loads, unless no client watches the fleet.
    pub fn publish_loads(&self, loads: impl FnOnce() -> Loads) {
        if self.loads_sender.receiver_count() > 0 {
            publish_json(&self.loads_sender, &loads());
        }
    }

    /// Adds a watcher. Fails if [`MAX_FLEET_WATCHERS`] clients already watch.
    pub fn add_watcher(&self) -> Result<StatusFeedReceivers, Problem> {
        let watcher_slot = self.watcher_slots.clone().try_acquire_owned().map_err(|_| {
            let error_detail =
                format!("{MAX_FLEET_WATCHERS} watchers are connected already: expected fewer; retry later");
            Problem::new(ProblemKind::TooManyRequests, error_detail).with_retry_after(10)
        })?;
        Ok(StatusFeedReceivers {
            loads_receiver: self.loads_sender.subscribe(),
            overview_receiver: self.overview_sender.subscribe(),
            _slot: watcher_slot,
        })
    }
}

fn publish_json(sender: &watch::Sender<JsonText>, document: &impl Serialize) {
    match serde_json::to_string(document) {
        Ok(text) => drop(sender.send_replace(text.into())),
        Err(error) => tracing::warn!(
            event = "feed-failed",
            %error,
            "the API cannot encode an update for the clients of /v1/watch, which miss this update"
        ),
    }
}

pub struct StatusFeedReceivers {
    /// Receiver of the newest loads as a JSON document, which is replaced at most once per
    /// [`MIN_LOAD_PUBLICATION_INTERVAL`].
    pub loads_receiver: watch::Receiver<JsonText>,
    pub overview_receiver: watch::Receiver<JsonText>,
    _slot: OwnedSemaphorePermit,
}
