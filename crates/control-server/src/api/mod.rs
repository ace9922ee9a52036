//! Handlers of the HTTP API. The doc comment of each endpoint's function is its description, and a line in
//! [`endpoints`] has its role. `coreward_http::endpoints` has the common parts.
//!
//! * [`events`]: events, found by polling the status
//! * [`feed`]: updates for watchers

mod audit;
mod dashboard;
mod drains;
mod events;
mod explain;
mod feed;
mod fleet_handlers;
#[cfg(test)]
mod isolation_tests;
mod keys;
mod status_handlers;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use coreward_api::Role;
use coreward_http::endpoints::{AccessControl, Endpoints, MAX_DOCUMENT_BYTES};
use coreward_http::serve::{Acceptor, Listener, RunningServer};
use coreward_http::tokens::Tokens;
use coreward_http::work::{self, WorkSize};
use coreward_http::{Problem, ProblemKind, routes};
use tokio::signal::unix::Signal;
use tokio::time::{Instant, MissedTickBehavior};

use crate::server::controller_state::ControllerState;
use crate::server::leader_election::{Leader, LeaderElection, is_caused_by_deposition};
use coreward_daemon::priority::lower_thread_priority;
use coreward_store::StoreError;
use events::EventLog;
use feed::StatusFeed;

/// Interval at which the fleet is polled for new events.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

const API_DESCRIPTION: &str = "State and control of a coreward controller (layer-4 load balancer). Every request \
    carries `Authorization: Bearer TOKEN`; errors are `application/problem+json` (RFC 9457).";

/// State that all handlers share.
#[derive(Clone)]
pub struct Api {
    election: Arc<LeaderElection>,
    guard: Arc<AccessControl>,
    events: Arc<EventLog>,
    feed: Arc<StatusFeed>,
    openapi_document: Arc<std::sync::OnceLock<String>>,
}

impl Api {
    /// Returns the state of the controller if it leads. Fails otherwise.
    fn leader_state(&self) -> Result<Arc<ControllerState>, Problem> {
        self.election.leader_state().map_err(|_| self.not_leading_problem(None))
    }
}

impl Api {
    /// Returns the HTTP problem that explains why a change was not made.
    fn change_problem(&self, error: &anyhow::Error) -> Problem {
        if is_caused_by_deposition(error) || self.election.leader_state().is_err() {
            self.not_leading_problem(Some(error))
        } else if error.downcast_ref::<StoreError>().is_some() {
            Problem::new(ProblemKind::NotStored, format!("{error:#}")).retry_after(10)
        } else {
            Problem::internal_error(error)
        }
    }

    fn not_leading_problem(&self, error: Option<&anyhow::Error>) -> Problem {
        let leader = self.election.leader();
        let error_detail = match (error, &leader) {
            (Some(error), _) => format!("{error:#}"),
            (None, Some(leader)) => format!("this controller does not lead: {leader} does"),
            (None, None) => "this controller does not lead, and no other one does at this moment".to_owned(),
        };
        let problem = Problem::new(ProblemKind::NotLeading, error_detail).retry_after(1);
        let Some(Leader { address, api }) = leader else { return problem };
        Problem { leader: Some(address.to_string().into()), leader_api: api.map(Into::into), ..problem }
    }
}

fn endpoints(guard: Arc<AccessControl>) -> Endpoints<Api> {
    let viewer = Role::Viewer;
    Endpoints::new(guard, "coreward controller", API_DESCRIPTION)
        .add(viewer, routes!(status_handlers::version))
        .add(viewer, routes!(status_handlers::health))
        .add(viewer, routes!(status_handlers::status))
        .add(viewer, routes!(status_handlers::services))
        .add(viewer, routes!(status_handlers::service))
        .add(viewer, routes!(status_handlers::servers))
        .add(viewer, routes!(status_handlers::server))
        .add(viewer, routes!(drains::drain_status))
        .add(Role::Operator, routes!(drains::drain, drains::undrain))
        .add(viewer, routes!(status_handlers::load_balancers))
        .add(viewer, routes!(status_handlers::load_balancer))
        .add(viewer, routes!(status_handlers::loads))
        .add(viewer, routes!(status_handlers::tables))
        .add(viewer, routes!(status_handlers::table))
        .add(viewer, routes!(explain::explain))
        .add(viewer, routes!(keys::keys))
        .add(Role::Operator, routes!(keys::rotate))
        .add(viewer, routes!(fleet_handlers::fleet))
        .add(viewer, routes!(fleet_handlers::acknowledgements))
        .add(Role::Operator, routes!(audit::audit))
        .add(Role::Operator, routes!(audit::forget))
        .add_with_body(Role::Operator, MAX_DOCUMENT_BYTES, routes!(fleet_handlers::put_fleet))
        .add_with_body(viewer, MAX_DOCUMENT_BYTES, routes!(fleet_handlers::check))
        .add(viewer, routes!(watch::events))
        .add(viewer, routes!(watch::watch))
        .add(viewer, routes!(dashboard::log_in, dashboard::log_out))
        .add(viewer, routes!(openapi))
}

/// OpenAPI document of the API
#[utoipa::path(
    get, path = "/v1/openapi.json",
    responses((status = 200, description = "OpenAPI 3.1", body = serde_json::Value))
)]
async fn openapi(State(api): State<Api>) -> impl IntoResponse {
    let document = api.openapi_document.get().cloned().unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], document)
}

/// Returns the router of all endpoints, with the state that its handlers share.
fn router(election: Arc<LeaderElection>, tokens: Arc<Tokens>) -> anyhow::Result<(Router, Api)> {
    let access_control =
        Arc::new(AccessControl::new(tokens, election.security.revoked.clone(), election.api_requests.clone()));
    let api = Api {
        election,
        guard: access_control.clone(),
        events: Arc::default(),
        feed: Arc::default(),
        openapi_document: Arc::default(),
    };
    let (router, document) = endpoints(access_control).into_parts();
    let openapi_text = document.to_json().context("the OpenAPI document cannot be written")?;
    api.openapi_document.get_or_init(|| openapi_text);
    Ok((router.merge(dashboard::routes()).with_state(api.clone()), api))
}

/// Serves the API until the returned value is dropped. Fails if no thread can be created.
pub fn serve(
    listener: Listener,
    acceptor: impl Acceptor,
    election: Arc<LeaderElection>,
    tokens: Arc<Tokens>,
    hangup: Signal,
) -> anyhow::Result<RunningServer> {
    let (router, api) = router(election, tokens)?;
    let access_control = api.guard.clone();
    let on_thread_start = || lower_thread_priority("API worker");
    listener.serve(acceptor, router, on_thread_start, async move {
        lower_thread_priority("API");
        tokio::join!(update_watchers_loop(api), reload_tokens_on_sighup(&access_control, hangup));
    })
}

/// Reads the token files again at each SIGHUP. Never returns.
async fn reload_tokens_on_sighup(guard: &AccessControl, mut hangup: Signal) {
    while hangup.recv().await.is_some() {
        if let Err(error) = guard.reload() {
            tracing::warn!(
                event = "tokens-not-reloaded",
                error = format!("{error:#}"),
                "the controller cannot reload the API's tokens: the previous tokens stay valid"
            );
        }
    }
}

/// Records events and updates the watchers' documents at regular intervals. Never returns.
async fn update_watchers_loop(api: Api) {
    let mut due = tokio::time::interval(feed::MIN_LOADS_INTERVAL);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut next_poll = Instant::now();
    loop {
        let moment = due.tick().await;
        let Ok(shared) = api.leader_state() else { continue };
        let whole = moment >= next_poll;
        if whole {
            next_poll = moment + POLL_INTERVAL;
        }
        let api = api.clone();
        // This runs as separate work, because thousands of servers take some time.
        let updated = work::run(WorkSize::Small, move || {
            if whole {
                let now = shared.now();
                let overview = shared.overview(now);
                api.events.record_changes(&overview, now.wall);
                api.feed.publish_overview(overview);
            }
            api.feed.publish_loads(|| shared.loads());
        });
        if let Err(problem) = updated.await {
            tracing::warn!(
                event = "feed-failed",
                error = %problem,
                "the API cannot collect an update for the clients of /v1/watch, which miss this update"
            );
        }
    }
}
