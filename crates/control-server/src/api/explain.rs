//! API endpoint that explains a packet's destination.

use axum::extract::State;
use coreward_api::types::{Explain, Explanation, PacketKind};
use coreward_http::request_extractors::Query;
use coreward_http::request_work::{JsonAnswer, RequestWorkSize, compute_json_answer};
use coreward_http::{Problem, ProblemKind};
use coreward_model::ServiceAddress;

use super::ApiState;
use coreward_controller::explain::{ExplainedPacket, PacketExplanationError};

/// Destination of a packet, and the reason
#[utoipa::path(
    get, path = "/v1/explain", params(Explain),
    responses(
        (status = 200, description = "Destination and reason", body = Explanation),
        (status = 404, description = "No service with this address", body = Problem,
            content_type = "application/problem+json"),
        (status = 422, description = "Client and service of different address families", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn explain_packet(State(api): State<ApiState>, Query(query): Query<Explain>) -> Result<JsonAnswer, Problem> {
    let service = ServiceAddress { vip_and_port: query.vip, protocol: query.protocol };
    let packet = to_explained_packet(query.packet, query.tsecr);
    let controller_state = api.leader_state()?;
    if query.client.port() == 0 {
        return Err(Problem::new(ProblemKind::BadRequest, "client port 0: expected one from 1 on"));
    }
    compute_json_answer(RequestWorkSize::Small, move || {
        let service_view = controller_state.service_snapshot(service).map_err(problem_for_explain_error)?;
        service_view.explain_packet(query.client, packet).map_err(problem_for_explain_error)
    })
    .await
}

fn problem_for_explain_error(error: PacketExplanationError) -> Problem {
    let problem_kind = match &error {
        PacketExplanationError::UnknownService { .. } => ProblemKind::NotFound,
        PacketExplanationError::MixedAddressFamilies(_) => ProblemKind::MixedAddressFamilies,
    };
    Problem::new(problem_kind, error.to_string())
}

fn to_explained_packet(kind: PacketKind, tsecr: Option<u32>) -> ExplainedPacket {
    match kind {
        PacketKind::NewConnection => ExplainedPacket::NewConnection,
        PacketKind::Established | PacketKind::Reset => {
            ExplainedPacket::Established { tsecr, is_reset: kind == PacketKind::Reset }
        }
    }
}
