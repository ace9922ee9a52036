//! API endpoints for drains of servers.

use axum::Extension;
use axum::extract::State;
use coreward_api::Caller;
use coreward_api::types::{DrainServer, DrainStatus, EventId, SubjectKind};
use coreward_http::request_extractors::{Json, Path};
use coreward_http::{Problem, ProblemKind};

use super::ApiState;
use crate::server::controller_state::ControllerState;
use crate::server::state_manager::FleetRecordChange;
use coreward_fleet::drains::{ServerDrainError, ServerDrainRequest};

/// Drain of a server, and the server's remaining connections
#[utoipa::path(
    get, path = "/v1/servers/{server}/drain",
    params(("server" = String, Path, description = "Name of the server")),
    responses(
        (status = 200, description = "Drain and remaining connections", body = DrainStatus),
        (status = 404, description = "No server with this name", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn get_drain_status(
    State(api): State<ApiState>,
    Path(name): Path<String>,
) -> Result<Json<DrainStatus>, Problem> {
    find_drain_status(&*api.leader_state()?, &name).map(Json)
}

fn find_drain_status(state: &ControllerState, server: &str) -> Result<DrainStatus, Problem> {
    let now = state.now();
    state.lock_controller().drain_status(server, now).ok_or_else(|| Problem::not_found("server", server))
}

/// Drain a server, so that it gets no new connections until the drain is deleted, whatever the fleet document states
#[utoipa::path(
    post, path = "/v1/servers/{server}/drain", request_body = DrainServer,
    params(("server" = String, Path, description = "Name of the server")),
    responses(
        (status = 200, description = "The drain is stored and in force; remaining connections", body = DrainStatus),
        (status = 404, description = "No server with this name, or a named service does not have it", body = Problem,
         content_type = "application/problem+json"),
        (status = 409, description = "No other server of a service takes new connections, and `force` is not set",
         body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn drain_server(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(server): Path<String>,
    Json(body): Json<DrainServer>,
) -> Result<Json<DrainStatus>, Problem> {
    let controller_state = api.leader_state()?;
    let services = (!body.services.is_empty()).then(|| body.services.iter().cloned().collect());
    let request = ServerDrainRequest { server_name: server.clone(), services, may_drain_last_server: body.force };
    let now = controller_state.now();
    let check_result = controller_state.lock_controller().check_drain_is_possible(&request, now);
    check_result.map_err(|drain_error| problem_for_drain_error(&drain_error))?;
    let scope_suffix = match &request.services {
        Some(_) => format!(" in {}", body.services.join(", ")),
        None => String::new(),
    };
    request_drain_change(
        &api,
        &controller_state,
        &server,
        FleetRecordChange::DrainServer(request),
        (&caller, &format!("drained{scope_suffix}")),
    )
    .await
}

/// End a server's drain, so that it gets new connections again if the fleet document allows it
#[utoipa::path(
    delete, path = "/v1/servers/{server}/drain",
    params(("server" = String, Path, description = "Name of the server")),
    responses(
        (status = 200, description = "No drain by command is in force; remaining connections", body = DrainStatus),
        (status = 404, description = "No server with this name", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn undrain_server(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(server): Path<String>,
) -> Result<Json<DrainStatus>, Problem> {
    let controller_state = api.leader_state()?;
    request_drain_change(
        &api,
        &controller_state,
        &server,
        FleetRecordChange::UndrainServer(server.clone()),
        (&caller, "undrained"),
    )
    .await
}

/// Requests the change from the controller, and records an event if anything has changed.
async fn request_drain_change(
    api: &ApiState,
    controller_state: &ControllerState,
    server: &str,
    change: FleetRecordChange,
    (caller, event): (&Caller, &str),
) -> Result<Json<DrainStatus>, Problem> {
    let outcome = controller_state.request_change(caller.into(), change).await.map_err(|error| match error
        .downcast_ref::<ServerDrainError>(
    ) {
        Some(drain_error) => problem_for_drain_error(drain_error),
        None => api.problem_for_failed_change(&error),
    })?;
    if outcome.has_new_configuration {
        let event_message = format!("{caller}: {event}");
        api.events.add_event(
            (SubjectKind::Server, EventId::ServerDrainChanged),
            server,
            event_message,
            controller_state.now().wall_time,
        );
    }
    find_drain_status(controller_state, server).map(Json)
}

fn problem_for_drain_error(drain_error: &ServerDrainError) -> Problem {
    let problem_kind = match drain_error {
        ServerDrainError::UnknownServer(_) | ServerDrainError::NotInService { .. } => ProblemKind::NotFound,
        ServerDrainError::LastServer { .. } => ProblemKind::Conflict,
    };
    Problem::new(problem_kind, drain_error.to_string())
}
