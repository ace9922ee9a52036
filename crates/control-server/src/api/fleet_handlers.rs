//! API endpoints of the fleet document.

use std::path::PathBuf;

use axum::Extension;
use axum::extract::State;
use coreward_api::Caller;
use coreward_api::types::{
    Acknowledgements, CheckRequest, CheckResult, EventId, Fleet, FleetApplied, FleetChange, NewFleet, SubjectKind,
};
use coreward_config::TomlSource;
use coreward_http::request_extractors::Json;
use coreward_http::request_work::{self, JsonAnswer, RequestWorkSize, compute_json_answer};
use coreward_http::{Problem, ProblemKind};

use super::ApiState;
use crate::server::controller_state::ControllerState;
use crate::server::state_manager::{ApplyDocumentError, ApplyDocumentRequest, FleetRecordChange};
use coreward_fleet::config::{self, FleetConfig, list_changes};
use coreward_fleet::records::FleetDocument;

/// Active fleet document, as the operator wrote it
#[utoipa::path(get, path = "/v1/fleet", responses((status = 200, description = "Fleet document", body = Fleet)))]
pub async fn get_fleet(State(api): State<ApiState>) -> Result<JsonAnswer, Problem> {
    let controller_state = api.leader_state()?;
    compute_json_answer(RequestWorkSize::Small, move || {
        let (document, file) = active_document_and_file(&controller_state);
        let file_path = file.map(|file| file.display().to_string());
        Ok(Fleet { generation: document.generation, file: file_path, text: document.text.to_string() })
    })
    .await
}

fn active_document_and_file(state: &ControllerState) -> (FleetDocument, Option<PathBuf>) {
    let controller = state.lock_controller();
    (controller.fleet().document.clone(), controller.fleet().document_file.clone())
}

/// Maximum length of a fleet document's name in bytes, because each reported mistake contains the name.
const MAX_FLEET_DOCUMENT_NAME_BYTES: usize = 4096;

fn check_document_name(name: &str) -> Result<(), Problem> {
    if name.len() > MAX_FLEET_DOCUMENT_NAME_BYTES {
        let error_detail = format!("a name of {} bytes: expected at most {MAX_FLEET_DOCUMENT_NAME_BYTES}", name.len());
        return Err(Problem::new(ProblemKind::BadRequest, error_detail));
    }
    Ok(())
}

/// Acknowledgements and rejections of the newest configuration
#[utoipa::path(
    get, path = "/v1/fleet/acknowledgements",
    responses((status = 200, description = "Acknowledgements and rejections", body = Acknowledgements))
)]
pub async fn get_acknowledgements(State(api): State<ApiState>) -> Result<JsonAnswer, Problem> {
    let controller_state = api.leader_state()?;
    compute_json_answer(RequestWorkSize::Small, move || {
        Ok(controller_state.lock_controller().acknowledgements(controller_state.now()))
    })
    .await
}

/// Apply another fleet document, as a whole or not at all, or only return its changes (`dry_run`)
#[utoipa::path(
    put, path = "/v1/fleet", request_body = NewFleet,
    responses(
        (status = 200, description = "Changes by the document", body = FleetApplied),
        (status = 409, description = "Another generation is in force, or a file manages the fleet", body = Problem,
         content_type = "application/problem+json"),
        (status = 422, description = "The document has mistakes, listed in `mistakes`", body = Problem,
         content_type = "application/problem+json"),
    )
)]
pub async fn put_fleet(
    State(api): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Json(request): Json<NewFleet>,
) -> Result<JsonAnswer, Problem> {
    let NewFleet { name, text, generation, dry_run } = request;
    check_document_name(&name)?;
    let controller_state = api.leader_state()?;
    let (old_document, _) = active_document_and_file(&controller_state);
    let was_in_force = *old_document.text == *text && old_document.generation > 0;
    // Other requests and changes do not wait for this work.
    let (fleet, changes) = request_work::run_on_worker_thread(RequestWorkSize::Large, move || {
        let source = TomlSource::from_text(&name, &text);
        let changes = list_changes(&TomlSource::from_text("the fleet in force", &old_document.text), &source);
        (FleetConfig::parse(&source), changes)
    })
    .await?;
    let change_lines = changes.iter().map(ToString::to_string).collect();
    let change = FleetRecordChange::ApplyDocument(Box::new(ApplyDocumentRequest {
        fleet,
        change_descriptions: change_lines,
        base_generation: generation,
        dry_run,
    }));
    let outcome = controller_state
        .request_change((&caller).into(), change)
        .await
        .map_err(|error| api.problem_for_apply_error(&error))?;
    let applied_generation = outcome.document_generation;
    if !dry_run && !was_in_force {
        let message = format!("{caller}: applied the document of generation {applied_generation}");
        api.events.add_event(
            (SubjectKind::Fleet, EventId::FleetApplied),
            "",
            message,
            controller_state.now().wall_time,
        );
    }
    // No other request may prevent this answer, or the caller would assume that the document was not applied.
    compute_json_answer(RequestWorkSize::Small, move || {
        Ok(FleetApplied {
            generation: applied_generation,
            replaced_generation: generation,
            is_active: !dry_run || was_in_force,
            changes: changes.iter().map(to_fleet_change).collect(),
        })
    })
    .await
}

impl ApiState {
    fn problem_for_apply_error(&self, error: &anyhow::Error) -> Problem {
        match error.downcast_ref::<ApplyDocumentError>() {
            Some(ApplyDocumentError::InvalidDocument(mistakes)) => mistakes.into(),
            Some(
                conflict @ (ApplyDocumentError::GenerationConflict { .. } | ApplyDocumentError::ManagedByFile { .. }),
            ) => Problem::new(ProblemKind::Conflict, conflict.to_string()),
            None => self.problem_for_failed_change(error),
        }
    }
}

fn to_fleet_change(change: &config::FleetDocumentChange) -> FleetChange {
    let message = change.to_string();
    let breaking_reason = change.reason_for_broken_connections().map(str::to_owned);
    let whole_subject_change = |subject: &String| FleetChange {
        subject: subject.clone(),
        key: None,
        old: None,
        new: None,
        message: String::new(),
        breakage_reason: breaking_reason.clone(),
    };
    let document_change = match change {
        config::FleetDocumentChange::Added { subject, .. } | config::FleetDocumentChange::Removed { subject } => {
            whole_subject_change(subject)
        }
        config::FleetDocumentChange::Changed { subject, key, old, new } => {
            FleetChange { key: Some(key.clone()), old: old.clone(), new: new.clone(), ..whole_subject_change(subject) }
        }
    };
    FleetChange { message, ..document_change }
}

/// Check a fleet document and return all mistakes
#[utoipa::path(
    post, path = "/v1/check",
    request_body = CheckRequest,
    responses((status = 200, description = "Mistakes of the document", body = CheckResult))
)]
pub async fn check_fleet_document(Json(request): Json<CheckRequest>) -> Result<JsonAnswer, Problem> {
    check_document_name(&request.name)?;
    compute_json_answer(RequestWorkSize::Large, move || {
        Ok(match FleetConfig::parse(&TomlSource::from_text(&request.name, &request.text)) {
            Ok(_) => CheckResult { mistakes: Vec::new(), omitted_count: 0 },
            Err(mistakes) => CheckResult {
                mistakes: mistakes.shown_diagnostics.iter().map(Into::into).collect(),
                omitted_count: mistakes.omitted_diagnostic_count as u64,
            },
        })
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;

    use axum::response::IntoResponse as _;
    use coreward_api::Role;
    use coreward_http::endpoints::ApiAccessControl;
    use coreward_http::tokens::ApiTokens;
    use tokio::sync::mpsc;

    use super::*;
    use crate::api::isolation_tests::open_controller_parts;
    use crate::server::apply_record_change;
    use crate::server::controller_state::FleetRecordChangeRequest;
    use crate::server::state_manager::FleetStateManager;

    fn open_leader_api(
        state_directory: &std::path::Path,
    ) -> (ApiState, FleetStateManager, mpsc::Receiver<FleetRecordChangeRequest>) {
        let (election, manager, state, changes) = open_controller_parts(state_directory);
        election.become_leader(Arc::new(state));
        let access_control = Arc::new(ApiAccessControl::new(
            Arc::new(ApiTokens::open(state_directory).unwrap()),
            Default::default(),
            Arc::default(),
        ));
        let (events, feed, openapi_document) = Default::default();
        (
            ApiState { election: Arc::new(election), access_control, events, status_feed: feed, openapi_document },
            manager,
            changes,
        )
    }

    /// If two operators apply documents, each gets the generation of its own document, even if the second document is
    /// already active.
    #[tokio::test]
    async fn acknowledgement_names_the_generation_of_the_callers_document() {
        let directory = tempfile::tempdir().unwrap();
        let (api, mut manager, mut changes) = open_leader_api(directory.path());
        let state = api.leader_state().unwrap();
        let put_document = |generation: u64| {
            let document_text = format!("max_connection_lifetime = \"{}h\"\n", generation + 1);
            let request = NewFleet { name: "fleet.toml".to_owned(), text: document_text, generation, dry_run: false };
            let caller =
                Caller { role: Role::Operator, address: IpAddr::from([127, 0, 0, 1]), principal: "alice".into() };
            put_fleet(State(api.clone()), Extension(caller), Json(request))
        };
        let first_request_notification = tokio::sync::Notify::new();
        let apply_both_documents = async {
            let mut reported_generations = Vec::new();
            for _ in 0..2 {
                let FleetRecordChangeRequest { change, author, reply_sender } = changes.recv().await.unwrap();
                first_request_notification.notify_one();
                let (returned_manager, outcome) = apply_record_change(manager, &state, change, author).await.unwrap();
                manager = returned_manager;
                reported_generations.push((reply_sender, outcome));
            }
            reported_generations.into_iter().for_each(|(reply_sender, outcome)| reply_sender.send(outcome).unwrap());
        };
        let put_second_document = async {
            first_request_notification.notified().await;
            put_document(1).await
        };
        let (first_result, second_result, ()) =
            tokio::join!(put_document(0), put_second_document, apply_both_documents);
        for (put_result, expected) in [(first_result, 1), (second_result, 2)] {
            let response_body = put_result.unwrap_or_else(|problem| panic!("{problem:?}")).into_response().into_body();
            let response_text = axum::body::to_bytes(response_body, usize::MAX).await.unwrap();
            assert_eq!(serde_json::from_slice::<FleetApplied>(&response_text).unwrap().generation, expected);
        }
    }
}
