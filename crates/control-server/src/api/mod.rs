//! Handlers of the HTTP API. The doc comment of each endpoint's function is its description, and a line in
//! [`build_endpoints`] has its role. `coreward_http::endpoints` has the common parts.
//!
//! * [`events`]: events, found by polling the status
//! * [`status_feed`]: updates for watchers

mod audit;
mod dashboard;
mod drains;
mod events;
mod explain;
mod fleet_handlers;
#[cfg(test)]
mod isolation_tests;
mod keys;
mod status_feed;
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
use coreward_http::endpoints::{ApiAccessControl, ApiEndpoints, MAX_FLEET_DOCUMENT_BYTES};
use coreward_http::request_work::{self, RequestWorkSize};
use coreward_http::serve::{ApiListener, RunningApiServer, StreamAcceptor};
use coreward_http::tokens::ApiTokens;
use coreward_http::{Problem, ProblemKind, routes};
use tokio::signal::unix::Signal;
use tokio::time::{Instant, MissedTickBehavior};

use crate::server::controller_state::ControllerState;
use crate::server::leader_election::{LeaderElection, LeaderRecord, is_caused_by_deposition};
use coreward_daemon::priority::lower_thread_priority;
use coreward_store::FleetStoreError;
use events::FleetEventLog;
use status_feed::StatusFeed;

/// Interval at which the fleet is polled for new events.
const FLEET_EVENT_POLL_INTERVAL: Duration = Duration::from_millis(500);

const API_DESCRIPTION: &str = "State and control of a coreward controller (layer-4 load balancer). Every request \
    carries `Authorization: Bearer TOKEN`; errors are `application/problem+json` (RFC 9457).";

/// State that all handlers share.
#[derive(Clone)]
pub struct ApiState {
    election: Arc<LeaderElection>,
    access_control: Arc<ApiAccessControl>,
    events: Arc<FleetEventLog>,
    status_feed: Arc<StatusFeed>,
    openapi_document: Arc<std::sync::OnceLock<String>>,
}

impl ApiState {
    /// Returns the state of this controller if it leads the fleet. Fails otherwise.
    fn leader_state(&self) -> Result<Arc<ControllerState>, Problem> {
        self.election.leader_state().map_err(|_| self.not_leading_problem(None))
    }
}

impl ApiState {
    /// Returns the HTTP problem that explains why a change was not made.
    fn problem_for_failed_change(&self, error: &anyhow::Error) -> Problem {
        if is_caused_by_deposition(error) || self.election.leader_state().is_err() {
            self.not_leading_problem(Some(error))
        } else if error.downcast_ref::<FleetStoreError>().is_some() {
            Problem::new(ProblemKind::NotStored, format!("{error:#}")).with_retry_after(10)
        } else {
            Problem::internal_error(error)
        }
    }

    fn not_leading_problem(&self, error: Option<&anyhow::Error>) -> Problem {
        let leader = self.election.other_leader();
        let error_detail = match (error, &leader) {
            (Some(error), _) => format!("{error:#}"),
            (None, Some(leader)) => format!("this controller does not lead: {leader} does"),
            (None, None) => "this controller does not lead, and no other one does at this moment".to_owned(),
        };
        let problem = Problem::new(ProblemKind::NotLeading, error_detail).with_retry_after(1);
        let Some(LeaderRecord { address, api }) = leader else { return problem };
        Problem { leader: Some(address.to_string().into()), leader_api: api.map(Into::into), ..problem }
    }
}

fn build_endpoints(access_control: Arc<ApiAccessControl>) -> ApiEndpoints<ApiState> {
    let viewer_role = Role::Viewer;
    ApiEndpoints::new(access_control, "coreward controller", API_DESCRIPTION)
        .add_endpoint(viewer_role, routes!(status_handlers::get_version))
        .add_endpoint(viewer_role, routes!(status_handlers::get_health))
        .add_endpoint(viewer_role, routes!(status_handlers::get_status))
        .add_endpoint(viewer_role, routes!(status_handlers::get_services))
        .add_endpoint(viewer_role, routes!(status_handlers::get_service))
        .add_endpoint(viewer_role, routes!(status_handlers::get_servers))
        .add_endpoint(viewer_role, routes!(status_handlers::get_server))
        .add_endpoint(viewer_role, routes!(drains::get_drain_status))
        .add_endpoint(Role::Operator, routes!(drains::drain_server, drains::undrain_server))
        .add_endpoint(viewer_role, routes!(status_handlers::get_load_balancers))
        .add_endpoint(viewer_role, routes!(status_handlers::get_load_balancer))
        .add_endpoint(viewer_role, routes!(status_handlers::get_loads))
        .add_endpoint(viewer_role, routes!(status_handlers::get_tables))
        .add_endpoint(viewer_role, routes!(status_handlers::get_table))
        .add_endpoint(viewer_role, routes!(explain::explain_packet))
        .add_endpoint(viewer_role, routes!(keys::get_keys))
        .add_endpoint(Role::Operator, routes!(keys::rotate_keys))
        .add_endpoint(viewer_role, routes!(fleet_handlers::get_fleet))
        .add_endpoint(viewer_role, routes!(fleet_handlers::get_acknowledgements))
        .add_endpoint(Role::Operator, routes!(audit::get_audit_log))
        .add_endpoint(Role::Operator, routes!(audit::forget_load_balancer))
        .add_endpoint_with_body_limit(Role::Operator, MAX_FLEET_DOCUMENT_BYTES, routes!(fleet_handlers::put_fleet))
        .add_endpoint_with_body_limit(
            viewer_role,
            MAX_FLEET_DOCUMENT_BYTES,
            routes!(fleet_handlers::check_fleet_document),
        )
        .add_endpoint(viewer_role, routes!(watch::get_events))
        .add_endpoint(viewer_role, routes!(watch::watch_fleet))
        .add_endpoint(viewer_role, routes!(dashboard::log_in, dashboard::log_out))
        .add_endpoint(viewer_role, routes!(get_openapi_document))
}

/// OpenAPI document of the API
#[utoipa::path(
    get, path = "/v1/openapi.json",
    responses((status = 200, description = "OpenAPI 3.1", body = serde_json::Value))
)]
async fn get_openapi_document(State(api): State<ApiState>) -> impl IntoResponse {
    let document = api.openapi_document.get().cloned().unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], document)
}

/// Returns the router of all endpoints, with the state that its handlers share.
fn build_router(election: Arc<LeaderElection>, tokens: Arc<ApiTokens>) -> anyhow::Result<(Router, ApiState)> {
    let access_control = Arc::new(ApiAccessControl::new(
        tokens,
        election.security.revocation_list.clone(),
        election.api_request_counts.clone(),
    ));
    let api = ApiState {
        election,
        access_control: access_control.clone(),
        events: Arc::default(),
        status_feed: Arc::default(),
        openapi_document: Arc::default(),
    };
    let (router, document) = build_endpoints(access_control).into_parts();
    let openapi_text = document.to_json().context("the OpenAPI document cannot be written")?;
    api.openapi_document.get_or_init(|| openapi_text);
    Ok((router.merge(dashboard::dashboard_routes()).with_state(api.clone()), api))
}

/// Serves the API until the returned value is dropped. Fails if no thread can be created.
pub fn serve_api(
    listener: ApiListener,
    acceptor: impl StreamAcceptor,
    election: Arc<LeaderElection>,
    tokens: Arc<ApiTokens>,
    hangup: Signal,
) -> anyhow::Result<RunningApiServer> {
    let (router, api) = build_router(election, tokens)?;
    let access_control = api.access_control.clone();
    let on_thread_start = || lower_thread_priority("API worker");
    listener.serve(acceptor, router, on_thread_start, async move {
        lower_thread_priority("API");
        tokio::join!(update_watchers_loop(api), reload_tokens_on_sighup(&access_control, hangup));
    })
}

/// Reads the token files again at each SIGHUP. Never returns.
async fn reload_tokens_on_sighup(access_control: &ApiAccessControl, mut hangup: Signal) {
    while hangup.recv().await.is_some() {
        if let Err(error) = access_control.reload_tokens() {
            tracing::warn!(
                event = "tokens-not-reloaded",
                error = format!("{error:#}"),
                "the controller cannot reload the API's tokens: the previous tokens stay valid"
            );
        }
    }
}

/// Records events and updates the watchers' documents at regular intervals. Never returns.
async fn update_watchers_loop(api: ApiState) {
    let mut loads_timer = tokio::time::interval(status_feed::MIN_LOAD_PUBLICATION_INTERVAL);
    loads_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut next_overview_time = Instant::now();
    loop {
        let tick_time = loads_timer.tick().await;
        let Ok(controller_state) = api.leader_state() else { continue };
        let is_overview_due = tick_time >= next_overview_time;
        if is_overview_due {
            next_overview_time = tick_time + FLEET_EVENT_POLL_INTERVAL;
        }
        let api = api.clone();
        // The update runs as separate work, because thousands of servers take some time.
        let update_task = request_work::run_on_worker_thread(RequestWorkSize::Small, move || {
            if is_overview_due {
                let now = controller_state.now();
                let overview = controller_state.overview(now);
                api.events.record_overview_changes(&overview, now.wall_time);
                api.status_feed.publish_overview(overview);
            }
            api.status_feed.publish_loads(|| controller_state.loads());
        });
        if let Err(problem) = update_task.await {
            tracing::warn!(
                event = "feed-failed",
                error = %problem,
                "the API cannot collect an update for the clients of /v1/watch, which miss this update"
            );
        }
    }
}
