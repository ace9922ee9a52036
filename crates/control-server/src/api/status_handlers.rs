//! API endpoints for the status of the fleet.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use coreward_api::types::{
    Health, HealthState, LoadBalancer, LoadBalancers, Loads, Server, Servers, Service, Services, Status, StatusQuery,
    Table, Tables, Version,
};
use coreward_api::{Caller, Role};
use coreward_http::request_extractors::{Json, Path, Query};
use coreward_http::request_work::{JsonAnswer, RequestWorkSize, compute_json_answer};
use coreward_http::{Problem, ProblemKind};

use super::ApiState;
use crate::server::controller_state::ControllerState;

#[utoipa::path(
    get, path = "/v1/version",
    responses((status = 200, description = "Versions of program and API", body = Version))
)]
pub async fn get_version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION").to_owned(), api: "v1".to_owned() })
}

/// Health of the controller
#[utoipa::path(
    get, path = "/v1/health",
    responses((status = 200, description = "State of this controller", body = Health))
)]
pub async fn get_health(State(api): State<ApiState>) -> Json<Health> {
    let state = match api.leader_state() {
        Ok(controller_state) if controller_state.are_tables_allowed() => HealthState::Ready,
        Ok(_) => HealthState::Settling,
        Err(_) => HealthState::Following,
    };
    let leader = api.election.other_leader();
    let address = leader.as_ref().map(|leader| leader.address.to_string());
    Json(Health { state, leader: address, leader_api: leader.and_then(|leader| leader.api) })
}

/// Full status: services, servers, load balancers, keys
#[utoipa::path(
    get, path = "/v1/status",
    params(StatusQuery),
    responses((status = 200, description = "Full status", body = Status))
)]
pub async fn get_status(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<StatusQuery>,
) -> Result<JsonAnswer, Problem> {
    let controller_state = authorized_controller_state(&api, caller, query)?;
    compute_json_answer(RequestWorkSize::Small, move || Ok(controller_state.status(query.rss_keys))).await
}

/// Returns the controller's state. Fails if the query requests more than this caller may read.
fn authorized_controller_state(
    api: &ApiState,
    caller: Caller,
    query: StatusQuery,
) -> Result<Arc<ControllerState>, Problem> {
    if query.rss_keys && caller.role < Role::Operator {
        let error_detail = "whole RSS keys are for operators: expected the operator's token, or no `rss_keys`";
        return Err(Problem::new(ProblemKind::Forbidden, error_detail));
    }
    api.leader_state()
}

#[utoipa::path(
    get, path = "/v1/services",
    params(StatusQuery),
    responses((status = 200, description = "All services", body = Services))
)]
pub async fn get_services(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<StatusQuery>,
) -> Result<JsonAnswer, Problem> {
    let controller_state = authorized_controller_state(&api, caller, query)?;
    compute_json_answer(RequestWorkSize::Small, move || {
        Ok(Services { services: controller_state.services(query.rss_keys, controller_state.now()) })
    })
    .await
}

/// State of one service
#[utoipa::path(
    get, path = "/v1/services/{service}",
    params(("service" = String, Path, description = "Name of the service"), StatusQuery),
    responses(
        (status = 200, description = "The service", body = Service),
        (status = 404, description = "No service with this name", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn get_service(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Query(query): Query<StatusQuery>,
) -> Result<JsonAnswer, Problem> {
    let controller_state = authorized_controller_state(&api, caller, query)?;
    compute_json_answer(RequestWorkSize::Small, move || {
        let service_status = controller_state.service(&name, query.rss_keys, controller_state.now());
        service_status.ok_or_else(|| Problem::not_found("service", &name))
    })
    .await
}

/// States of all servers, with the load of every core
#[utoipa::path(
    get, path = "/v1/servers",
    params(StatusQuery),
    responses((status = 200, description = "All servers", body = Servers))
)]
pub async fn get_servers(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<StatusQuery>,
) -> Result<JsonAnswer, Problem> {
    let controller_state = authorized_controller_state(&api, caller, query)?;
    compute_json_answer(RequestWorkSize::Small, move || {
        Ok(Servers { servers: controller_state.servers(query.rss_keys, controller_state.now()) })
    })
    .await
}

/// State of one server
#[utoipa::path(
    get, path = "/v1/servers/{server}",
    params(("server" = String, Path, description = "Name of the server"), StatusQuery),
    responses(
        (status = 200, description = "The server", body = Server),
        (status = 404, description = "No server with this name", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn get_server(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Query(query): Query<StatusQuery>,
) -> Result<JsonAnswer, Problem> {
    let controller_state = authorized_controller_state(&api, caller, query)?;
    compute_json_answer(RequestWorkSize::Small, move || {
        let server_status = controller_state.server(&name, query.rss_keys, controller_state.now());
        server_status.ok_or_else(|| Problem::not_found("server", &name))
    })
    .await
}

#[utoipa::path(
    get, path = "/v1/load-balancers",
    responses((status = 200, description = "All load balancers", body = LoadBalancers))
)]
pub async fn get_load_balancers(State(api): State<ApiState>) -> Result<JsonAnswer, Problem> {
    let controller_state = api.leader_state()?;
    compute_json_answer(RequestWorkSize::Small, move || {
        Ok(LoadBalancers { load_balancers: controller_state.load_balancers() })
    })
    .await
}

/// State of one load balancer
#[utoipa::path(
    get, path = "/v1/load-balancers/{load_balancer}",
    params(("load_balancer" = String, Path, description = "Name of the load balancer")),
    responses(
        (status = 200, description = "The load balancer", body = LoadBalancer),
        (status = 404, description = "No load balancer with this name", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn get_load_balancer(State(api): State<ApiState>, Path(name): Path<String>) -> Result<JsonAnswer, Problem> {
    let controller_state = api.leader_state()?;
    compute_json_answer(RequestWorkSize::Small, move || {
        let balancer_status = controller_state.load_balancers().into_iter().find(|balancer| balancer.name == name);
        balancer_status.ok_or_else(|| Problem::not_found("load balancer", &name))
    })
    .await
}

/// Load of every core of every server, and counters
#[utoipa::path(get, path = "/v1/loads", responses((status = 200, description = "Loads and counters", body = Loads)))]
pub async fn get_loads(State(api): State<ApiState>) -> Result<JsonAnswer, Problem> {
    let controller_state = api.leader_state()?;
    compute_json_answer(RequestWorkSize::Small, move || Ok(controller_state.loads())).await
}

/// Newest table of every service, without contents
#[utoipa::path(
    get, path = "/v1/tables",
    responses((status = 200, description = "Summary of each table", body = Tables))
)]
pub async fn get_tables(State(api): State<ApiState>) -> Result<JsonAnswer, Problem> {
    let controller_state = api.leader_state()?;
    compute_json_answer(RequestWorkSize::Small, move || {
        Ok(controller_state.lock_controller().table_summaries(controller_state.now()))
    })
    .await
}

/// Newest table of one service, by which new connections are placed
#[utoipa::path(
    get, path = "/v1/tables/{service}",
    params(("service" = String, Path, description = "Name of the service")),
    responses(
        (status = 200, description = "The table", body = Table),
        (status = 404, description = "No service with this name, or no table yet", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn get_table(State(api): State<ApiState>, Path(name): Path<String>) -> Result<JsonAnswer, Problem> {
    let controller_state = api.leader_state()?;
    compute_json_answer(RequestWorkSize::Small, move || {
        controller_state.table(&name).ok_or_else(|| Problem::not_found("table of service", &name))
    })
    .await
}
