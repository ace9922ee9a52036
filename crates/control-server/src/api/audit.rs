//! API endpoint of the audit log, and removal of load balancers.

use axum::Extension;
use axum::extract::State;
use coreward_api::Caller;
use coreward_api::types::{Audit, AuditQuery, EventId, LoadBalancers, MAX_SAFE_INTEGER, SubjectKind};
use coreward_http::request_extractors::{Path, Query};
use coreward_http::request_work::{JsonAnswer, RequestWorkSize, compute_json_answer};
use coreward_http::{Problem, ProblemKind};

use super::ApiState;
use crate::server::state_manager::{FleetRecordChange, ForgetLoadBalancerError};
use coreward_fleet::audit::MAX_AUDIT_ENTRIES;

/// Newest 1,000 changes with their authors (audit log), including those by earlier controllers
#[utoipa::path(
    get, path = "/v1/audit",
    params(AuditQuery),
    responses((status = 200, description = "Changes and their authors", body = Audit))
)]
pub async fn get_audit_log(
    State(api): State<ApiState>,
    Query(query): Query<AuditQuery>,
) -> Result<JsonAnswer, Problem> {
    let controller_state = api.leader_state()?;
    if query.after > MAX_SAFE_INTEGER
        || query.limit.is_some_and(|limit| !(1..=MAX_AUDIT_ENTRIES).contains(&limit.into()))
    {
        let error_detail =
            format!("expected `after` up to {MAX_SAFE_INTEGER} and a `limit` of 1 to {MAX_AUDIT_ENTRIES}");
        return Err(Problem::new(ProblemKind::BadRequest, error_detail));
    }
    let audit_entries = controller_state.lock_controller().fleet().audit_log.clone();
    compute_json_answer(RequestWorkSize::Small, move || {
        let first_entry_index = audit_entries.partition_point(|entry| entry.id <= query.after);
        let first_index = first_entry_index
            .max(audit_entries.len() - audit_entries.len().min(query.limit.map_or(MAX_AUDIT_ENTRIES, usize::from)));
        Ok(Audit { entries: audit_entries[first_index..].to_vec() })
    })
    .await
}

/// Forget a load balancer that is gone for good, so that another one may get its number in cookies
#[utoipa::path(
    delete, path = "/v1/load-balancers/{load_balancer}",
    params(("load_balancer" = String, Path, description = "Name of the load balancer")),
    responses(
        (status = 200, description = "The remaining load balancers", body = LoadBalancers),
        (status = 404, description = "No load balancer with this name", body = Problem,
         content_type = "application/problem+json"),
        (status = 409, description = "The load balancer is connected", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn forget_load_balancer(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<JsonAnswer, Problem> {
    let controller_state = api.leader_state()?;
    let change_result =
        controller_state.request_change((&caller).into(), FleetRecordChange::ForgetLoadBalancer(name.clone())).await;
    change_result.map_err(|error| match error.downcast_ref::<ForgetLoadBalancerError>() {
        Some(forget_error @ ForgetLoadBalancerError::UnknownLoadBalancer(_)) => {
            Problem::new(ProblemKind::NotFound, forget_error.to_string())
        }
        Some(forget_error @ ForgetLoadBalancerError::ConnectedLoadBalancer(_)) => {
            Problem::new(ProblemKind::Conflict, forget_error.to_string())
        }
        None => api.problem_for_failed_change(&error),
    })?;
    let event_message = format!("{caller}: forgotten");
    api.events.add_event(
        (SubjectKind::LoadBalancer, EventId::LoadBalancerForgotten),
        &name,
        event_message,
        controller_state.now().wall_time,
    );
    compute_json_answer(RequestWorkSize::Small, move || {
        Ok(LoadBalancers { load_balancers: controller_state.load_balancers() })
    })
    .await
}
