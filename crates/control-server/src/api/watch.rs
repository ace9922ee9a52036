//! API endpoints for events and for a stream of all changes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use coreward_api::types::{Event, Events, EventsQuery, MAX_SAFE_INTEGER};
use coreward_http::request_extractors::{Json, Query};
use coreward_http::{Problem, ProblemKind};
use serde::Deserialize;
use tokio::time::Instant;
use tokio_stream::Stream;
use utoipa::IntoParams;

use super::ApiState;
use super::events::MAX_STORED_EVENTS;
use super::status_feed::StatusFeedReceivers;
use crate::server::controller_state::ControllerState;

/// Interval of keep-alive messages. If they are absent, both sides detect a broken connection.
const WATCH_KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Delay after which browsers reconnect to the stream.
const WATCHER_RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// Stored events of the fleet
#[utoipa::path(
    get, path = "/v1/events",
    params(EventsQuery),
    responses((status = 200, description = "Events", body = Events))
)]
pub async fn get_events(
    State(api): State<ApiState>,
    Query(query): Query<EventsQuery>,
) -> Result<Json<Events>, Problem> {
    api.leader_state()?;
    if query.after > MAX_SAFE_INTEGER
        || query.limit.is_some_and(|limit| !(1..=MAX_STORED_EVENTS).contains(&limit.into()))
    {
        let error_detail =
            format!("expected `after` up to {MAX_SAFE_INTEGER} and a `limit` of 1 to {MAX_STORED_EVENTS}");
        return Err(Problem::new(ProblemKind::BadRequest, error_detail));
    }
    let max_event_count = query.limit.map_or(MAX_STORED_EVENTS, usize::from);
    Ok(Json(Events {
        run_id: api.events.controller_run_id().to_owned(),
        events: api.events.events_after(query.after, max_event_count),
    }))
}

#[derive(Debug, Clone, Copy, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatusWatchQuery {
    /// Time between two `loads` messages (ms).
    #[serde(default = "default_loads_interval_ms")]
    #[param(value_type = Option<u32>, minimum = 250, maximum = 60000, default = 1000)]
    interval_ms: u32,
}

fn default_loads_interval_ms() -> u32 {
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
    params(StatusWatchQuery, ("Last-Event-ID" = Option<String>, Header, description = "Id of the last received event")),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream", body = String))
)]
pub async fn watch_fleet(
    State(api): State<ApiState>,
    headers: HeaderMap,
    Query(query): Query<StatusWatchQuery>,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, Problem> {
    let allowed_intervals = 250..=60_000;
    if !allowed_intervals.contains(&query.interval_ms) {
        let error_detail = format!("interval_ms {}: expected 250 to 60000", query.interval_ms);
        return Err(Problem::new(ProblemKind::BadRequest, error_detail));
    }
    let controller_state = api.leader_state()?;
    let last_event_header = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let run_id_and_event_id =
        last_event_header.and_then(|id| id.rsplit_once('-')).filter(|(run, _)| *run == api.events.controller_run_id());
    let last_event_id = run_id_and_event_id.and_then(|(_, id)| id.parse().ok());
    let mut watcher = api.status_feed.add_watcher()?;
    watcher.overview_receiver.mark_changed();
    let missed_events = api
        .events
        .events_after(last_event_id.unwrap_or(0), if last_event_id.is_some() { MAX_STORED_EVENTS } else { 100 });
    let watcher_updates = WatcherUpdates {
        controller_state,
        permission_change_receiver: api.access_control.subscribe_to_permission_changes(),
        newest_event_id_receiver: api.events.subscribe_to_newest_id(),
        last_queued_event_id: missed_events.last().map(|event| event.id).or(last_event_id).unwrap_or(0),
        pending_events: missed_events.into(),
        watcher,
        loads_due_at: Instant::now(),
        loads_interval: Duration::from_millis(query.interval_ms.into()),
        api,
    };
    let stream = futures_util::stream::unfold(watcher_updates, async |mut watcher_updates| {
        let sse_event = watcher_updates.next_sse_message().await?;
        Some((Ok(sse_event), watcher_updates))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(WATCH_KEEP_ALIVE_INTERVAL)))
}

/// State of one watcher's stream, with the updates that the watcher still has to get.
struct WatcherUpdates {
    api: ApiState,
    controller_state: Arc<ControllerState>,
    /// Receiver of changes of permissions, after which the watcher must authenticate again.
    permission_change_receiver: tokio::sync::watch::Receiver<u64>,
    watcher: StatusFeedReceivers,
    newest_event_id_receiver: tokio::sync::watch::Receiver<u64>,
    /// Id of the newest event that was sent or is in `pending_events`.
    last_queued_event_id: u64,
    pending_events: VecDeque<Event>,
    loads_due_at: Instant,
    loads_interval: Duration,
}

impl WatcherUpdates {
    /// Returns the next message, or `None` if another controller leads or the watcher must authenticate again.
    async fn next_sse_message(&mut self) -> Option<sse::Event> {
        loop {
            if !self.controller_state.is_leading() {
                return None;
            }
            if let Some(event) = self.pending_events.pop_front() {
                let id = format!("{}-{}", self.api.events.controller_run_id(), event.id);
                return sse::Event::default()
                    .event("event")
                    .id(id)
                    .retry(WATCHER_RECONNECT_DELAY)
                    .json_data(event)
                    .ok();
            }
            let loads_timer = tokio::time::sleep_until(self.loads_due_at);
            tokio::select! {
                biased;
                _ = self.permission_change_receiver.changed() => return None,
                _ = self.controller_state.wait_until_deposed() => return None,
                changed = self.watcher.overview_receiver.changed() => {
                    changed.ok()?;
                    let overview_json = self.watcher.overview_receiver.borrow_and_update().clone();
                    if !overview_json.is_empty() {
                        return Some(sse::Event::default().event("status").data(&*overview_json));
                    }
                }
                changed = self.newest_event_id_receiver.changed() => {
                    changed.ok()?;
                    let events = self.api.events.events_after(self.last_queued_event_id, MAX_STORED_EVENTS);
                    self.last_queued_event_id = events.last().map_or(self.last_queued_event_id, |event| event.id);
                    self.pending_events.extend(events);
                }
                changed = async { loads_timer.await; self.watcher.loads_receiver.changed().await } => {
                    changed.ok()?;
                    let loads_json = self.watcher.loads_receiver.borrow_and_update().clone();
                    self.loads_due_at = (self.loads_due_at + self.loads_interval).max(Instant::now());
                    if !loads_json.is_empty() {
                        return Some(sse::Event::default().event("loads").data(&*loads_json));
                    }
                }
            }
        }
    }
}
