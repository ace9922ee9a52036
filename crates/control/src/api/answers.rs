//! What there is to see.

use axum::Extension;
use axum::extract::State;
use coreward_api::extract::{Json, Path, Query};
use coreward_api::types::{
    Health, HealthState, LoadBalancer, LoadBalancers, Loads, Server, Servers, Service, Services, Status, StatusQuery,
    Table, Tables, Version,
};
use coreward_api::{Caller, Problem, ProblemKind, Role};

use super::Api;

/// Which controller this is
#[utoipa::path(get, path = "/v1/version", responses((status = 200, description = "Its version", body = Version)))]
pub async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION").to_owned(), api: "v1".to_owned() })
}

/// Whether the controller does its work
#[utoipa::path(get, path = "/v1/health", responses((status = 200, description = "What it does", body = Health)))]
pub async fn health(State(api): State<Api>) -> Json<Health> {
    let state = match api.shared() {
        Ok(shared) if shared.is_settled() => HealthState::Ready,
        Ok(_) => HealthState::Settling,
        Err(_) => HealthState::Following,
    };
    let leader = api.office.leader();
    let address = leader.as_ref().map(|leader| leader.address.to_string());
    Json(Health { state, leader: address, leader_api: leader.and_then(|leader| leader.api) })
}

/// Everything there is to see: services, servers, load balancers, keys
#[utoipa::path(get, path = "/v1/status", params(StatusQuery), responses((status = 200, description = "All of it", body = Status)))]
pub async fn status(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<StatusQuery>,
) -> Result<Json<Status>, Problem> {
    seen(&api, caller, query).map(Json)
}

/// What this caller may see.
fn seen(api: &Api, caller: Caller, query: StatusQuery) -> Result<Status, Problem> {
    if query.rss_keys && caller.role < Role::Operator {
        let detail = "whole RSS keys are for operators: expected the operator's token, or no `rss_keys`";
        return Err(Problem::new(ProblemKind::Forbidden, detail));
    }
    Ok(api.shared()?.status(query.rss_keys))
}

/// All services
#[utoipa::path(get, path = "/v1/services", params(StatusQuery), responses((status = 200, description = "All", body = Services)))]
pub async fn services(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<StatusQuery>,
) -> Result<Json<Services>, Problem> {
    Ok(Json(Services { services: seen(&api, caller, query)?.services }))
}

/// One service
#[utoipa::path(
    get, path = "/v1/services/{service}",
    params(("service" = String, Path, description = "Its name"), StatusQuery),
    responses(
        (status = 200, description = "The service", body = Service),
        (status = 404, description = "There is none of that name", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn service(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Query(query): Query<StatusQuery>,
) -> Result<Json<Service>, Problem> {
    let found = seen(&api, caller, query)?.services.into_iter().find(|service| service.name == name);
    found.map(Json).ok_or_else(|| Problem::not_found("service", &name))
}

/// All servers, with the load of every core
#[utoipa::path(get, path = "/v1/servers", params(StatusQuery), responses((status = 200, description = "All", body = Servers)))]
pub async fn servers(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<StatusQuery>,
) -> Result<Json<Servers>, Problem> {
    Ok(Json(Servers { servers: seen(&api, caller, query)?.servers }))
}

/// One server
#[utoipa::path(
    get, path = "/v1/servers/{server}",
    params(("server" = String, Path, description = "Its name"), StatusQuery),
    responses(
        (status = 200, description = "The server", body = Server),
        (status = 404, description = "There is none of that name", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn server(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Query(query): Query<StatusQuery>,
) -> Result<Json<Server>, Problem> {
    // Of two ids with one name (the operator changed it) the newer one stands last.
    let found = seen(&api, caller, query)?.servers.into_iter().rfind(|server| server.name == name);
    found.map(Json).ok_or_else(|| Problem::not_found("server", &name))
}

/// All load balancers
#[utoipa::path(get, path = "/v1/load-balancers", responses((status = 200, description = "All", body = LoadBalancers)))]
pub async fn load_balancers(State(api): State<Api>) -> Result<Json<LoadBalancers>, Problem> {
    Ok(Json(LoadBalancers { load_balancers: api.shared()?.load_balancers() }))
}

/// One load balancer
#[utoipa::path(
    get, path = "/v1/load-balancers/{load_balancer}",
    params(("load_balancer" = String, Path, description = "Its name")),
    responses(
        (status = 200, description = "The load balancer", body = LoadBalancer),
        (status = 404, description = "There is none of that name", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn load_balancer(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<LoadBalancer>, Problem> {
    let found = api.shared()?.load_balancers().into_iter().find(|balancer| balancer.name == name);
    found.map(Json).ok_or_else(|| Problem::not_found("load balancer", &name))
}

/// The load of every core of every server, and counts to make rates of
#[utoipa::path(get, path = "/v1/loads", responses((status = 200, description = "All of them", body = Loads)))]
pub async fn loads(State(api): State<Api>) -> Result<Json<Loads>, Problem> {
    Ok(Json(api.shared()?.loads()))
}

/// The newest table of every service, without what stands in it
#[utoipa::path(get, path = "/v1/tables", responses((status = 200, description = "All", body = Tables)))]
pub async fn tables(State(api): State<Api>) -> Result<Json<Tables>, Problem> {
    let shared = api.shared()?;
    Ok(Json(shared.controller().table_summaries(shared.now())))
}

/// The newest table of one service: bucket by bucket, where first packets go
#[utoipa::path(
    get, path = "/v1/tables/{service}",
    params(("service" = String, Path, description = "Its name")),
    responses(
        (status = 200, description = "The table", body = Table),
        (status = 404, description = "There is no service of that name, or it has no table yet", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn table(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<Table>, Problem> {
    let shared = api.shared()?;
    let table = shared.controller().table(&name, shared.now());
    table.map(Json).ok_or_else(|| Problem::not_found("table of service", &name))
}
