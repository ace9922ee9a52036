//! API endpoints of the cookie keys.

use axum::Extension;
use axum::extract::State;
use coreward_api::Caller;
use coreward_api::types::{EventId, Keys, RotateKeys, SubjectKind};
use coreward_http::request_extractors::Json;
use coreward_http::{Problem, ProblemKind};

use super::ApiState;
use crate::server::state_manager::FleetRecordChange;

/// State of the cookie keys and of their rotation
#[utoipa::path(
    get, path = "/v1/keys",
    responses((status = 200, description = "The keys, without the secrets", body = Keys))
)]
pub async fn get_keys(State(api): State<ApiState>) -> Result<Json<Keys>, Problem> {
    Ok(Json(api.leader_state()?.keys()))
}

/// Begin a rotation of the cookie keys, or continue the rotation in progress
#[utoipa::path(
    post, path = "/v1/keys/rotate", request_body = RotateKeys,
    responses(
        (status = 200, description = "The keys after this step", body = Keys),
        (status = 409, description = "A rotation is not safe now, and `force` is not set", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn rotate_keys(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Json(request): Json<RotateKeys>,
) -> Result<Json<Keys>, Problem> {
    let controller_state = api.leader_state()?;
    let now = controller_state.now();
    let key_step_result = controller_state.lock_controller().requested_rotation_step(request.force, now);
    let key_step = key_step_result.map_err(|reason| Problem::new(ProblemKind::Conflict, reason.to_string()))?;
    controller_state
        .request_change((&caller).into(), FleetRecordChange::TakeKeyRotationStep(key_step))
        .await
        .map_err(|error| api.problem_for_failed_change(&error))?;
    api.events.add_event(
        (SubjectKind::Keys, EventId::KeysRotated),
        "",
        format!("{caller}: {}", key_step.describe()),
        now.wall_time,
    );
    Ok(Json(api.leader_state()?.keys()))
}
