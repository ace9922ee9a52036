//! API endpoints for events and for a stream of all changes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use coreward_api::types::{Event, Events, EventsQuery, MAX_SAFE_INTEGER};
use coreward_http::extract::{Json, Query};
use coreward_http::{Problem, ProblemKind};
use serde::Deserialize;
use tokio::time::Instant;
use tokio_stream::Stream;
use utoipa::IntoParams;

use super::Api;
use super::events::MAX_EVENTS;
use super::feed::Watcher;
use crate::server::controller_state::ControllerState;

/// Interval of keep-alive messages. If they are absent, both sides detect a broken connection.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Delay after which browsers reconnect to the stream.
const RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// Stored events of the fleet
#[utoipa::path(
    get, path = "/v1/events",
    params(EventsQuery),
    responses((status = 200, description = "Events", body = Events))
)]
pub async fn events(State(api): State<Api>, Query(query): Query<EventsQuery>) -> Result<Json<Events>, Problem> {
    api.leader_state()?;
    if query.after > MAX_SAFE_INTEGER || query.limit.is_some_and(|limit| !(1..=MAX_EVENTS).contains(&limit.into())) {
        let detail = format!("expected `after` up to {MAX_SAFE_INTEGER} and a `limit` of 1 to {MAX_EVENTS}");
        return Err(Problem::new(ProblemKind::BadRequest, detail));
    }
    let limit = query.limit.map_or(MAX_EVENTS, usize::from);
    Ok(Json(Events { run: api.events.run().to_owned(), events: api.events.events_after(query.after, limit) }))
}

#[derive(Debug, Clone, Copy, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WatchQuery {
    /// Time between two `loads` messages (ms).
    #[serde(default = "default_interval_ms")]
    #[param(value_type = Option<u32>, minimum = 250, maximum = 60000, default = 1000)]
    interval_ms: u32,
}

fn default_interval_ms() -> u32 {
    1000
}

/// Stream of all changes of the fleet (server-sent events)
///
/// A `status` message (an `Overview`) comes at once and after every change, `loads` (`Loads`) at the interval, and
/// `event` (an `Event`) for each new event. Events have ids. A client that reconnects with `Last-Event-ID` gets the
/// missed events, while other clients get the newest 100. The stream ends when another controller leads, or when the
/// controller checks tokens and certificates again (SIGHUP). Clients should then reconnect.
#[utoipa::path(
    get, path = "/v1/watch",
    params(WatchQuery, ("Last-Event-ID" = Option<String>, Header, description = "Id of the last received event")),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = String))
)]
pub async fn watch(
    State(api): State<Api>,
    headers: HeaderMap,
    Query(query): Query<WatchQuery>,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, Problem> {
    let bounds = 250..=60_000;
    if !bounds.contains(&query.interval_ms) {
        let detail = format!("interval_ms {}: expected 250 to 60000", query.interval_ms);
        return Err(Problem::new(ProblemKind::BadRequest, detail));
    }
    let shared = api.leader_state()?;
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let last = last.and_then(|id| id.rsplit_once('-')).filter(|(run, _)| *run == api.events.run());
    let last_event_id = last.and_then(|(_, id)| id.parse().ok());
    let mut watcher = api.feed.subscribe()?;
    watcher.overview.mark_changed();
    let missed =
        api.events.events_after(last_event_id.unwrap_or(0), if last_event_id.is_some() { MAX_EVENTS } else { 100 });
    let stream = WatcherUpdates {
        shared,
        permission_changes: api.guard.permission_changes(),
        newest_event_id: api.events.newest_id(),
        last_event_id: missed.last().map(|event| event.id).or(last_event_id).unwrap_or(0),
        pending_events: missed.into(),
        watcher,
        loads_due_at: Instant::now(),
        interval: Duration::from_millis(query.interval_ms.into()),
        api,
    };
    let stream = futures_util::stream::unfold(stream, async |mut changes| {
        let next = changes.next().await?;
        Some((Ok(next), changes))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE_INTERVAL)))
}

/// State of one watcher's stream, with the updates that the watcher still has to get.
struct WatcherUpdates {
    api: Api,
    shared: Arc<ControllerState>,
    /// Receiver of changes of permissions, after which the watcher must authenticate again.
    permission_changes: tokio::sync::watch::Receiver<u64>,
    watcher: Watcher,
    newest_event_id: tokio::sync::watch::Receiver<u64>,
    /// Id of the newest event that was sent or is in `pending_events`.
    last_event_id: u64,
    pending_events: VecDeque<Event>,
    loads_due_at: Instant,
    interval: Duration,
}

impl WatcherUpdates {
    /// Returns the next message, or `None` if another controller leads or the watcher must authenticate again.
    async fn next(&mut self) -> Option<sse::Event> {
        loop {
            if !self.shared.is_leading() {
                return None;
            }
            if let Some(event) = self.pending_events.pop_front() {
                let id = format!("{}-{}", self.api.events.run(), event.id);
                return sse::Event::default().event("event").id(id).retry(RECONNECT_DELAY).json_data(event).ok();
            }
            let loads_due = tokio::time::sleep_until(self.loads_due_at);
            tokio::select! {
                biased;
                _ = self.permission_changes.changed() => return None,
                _ = self.shared.wait_until_deposed() => return None,
                changed = self.watcher.overview.changed() => {
                    changed.ok()?;
                    let text = self.watcher.overview.borrow_and_update().clone();
                    if !text.is_empty() {
                        return Some(sse::Event::default().event("status").data(&*text));
                    }
                }
                changed = self.newest_event_id.changed() => {
                    changed.ok()?;
                    let events = self.api.events.events_after(self.last_event_id, MAX_EVENTS);
                    self.last_event_id = events.last().map_or(self.last_event_id, |event| event.id);
                    self.pending_events.extend(events);
                }
                changed = async { loads_due.await; self.watcher.loads.changed().await } => {
                    changed.ok()?;
                    let text = self.watcher.loads.borrow_and_update().clone();
                    self.loads_due_at = (self.loads_due_at + self.interval).max(Instant::now());
                    if !text.is_empty() {
                        return Some(sse::Event::default().event("loads").data(&*text));
                    }
                }
            }
        }
    }
}
