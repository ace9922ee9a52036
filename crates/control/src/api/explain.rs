//! Where packets go, and why.

use std::net::SocketAddr;

use axum::extract::State;
use coreward_api::extract::{Json, Query};
use coreward_api::types::{
    Explain, ExplainPackets, Explanation, Explanations, MAX_EXPLAINED, PacketExplanation, PacketKind, PacketQuestion,
};
use coreward_api::{Problem, ProblemKind};
use coreward_model::ServiceAddress;

use super::Api;
use crate::controller::explain::{ExplainedPacket, NotExplained};
use crate::controller::{Controller, Now};

/// Where a packet goes, and why
#[utoipa::path(
    get, path = "/v1/explain", params(Explain),
    responses(
        (status = 200, description = "Where, and why", body = Explanation),
        (status = 404, description = "There is no such service", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn explain(State(api): State<Api>, Query(question): Query<Explain>) -> Result<Json<Explanation>, Problem> {
    let service = ServiceAddress { socket: question.vip, protocol: question.protocol };
    let packet = explained_packet(question.packet, question.echo);
    let shared = api.shared()?;
    if question.client.port() == 0 {
        return Err(Problem::new(ProblemKind::BadRequest, "client port 0: expected one from 1 on"));
    }
    let explanation = shared.controller().explain(service, question.client, packet, shared.now());
    explanation.map(Json).map_err(not_explained)
}

fn not_explained(error: NotExplained) -> Problem {
    let kind = match &error {
        NotExplained::UnknownService { .. } => ProblemKind::NotFound,
        NotExplained::MixedFamilies(_) => ProblemKind::BadRequest,
    };
    Problem::new(kind, error.to_string())
}

fn explained_packet(kind: PacketKind, cookie: Option<u32>) -> ExplainedPacket {
    match kind {
        PacketKind::First => ExplainedPacket::First,
        PacketKind::Established | PacketKind::Reset => {
            ExplainedPacket::Established { cookie, reset: kind == PacketKind::Reset }
        }
    }
}

/// Where the packets of a capture go that are to or from a service
#[utoipa::path(
    post, path = "/v1/explain/packets", request_body = ExplainPackets,
    responses((status = 200, description = "Where each goes, and why", body = Explanations))
)]
pub async fn explain_packets(
    State(api): State<Api>,
    Json(question): Json<ExplainPackets>,
) -> Result<Json<Explanations>, Problem> {
    let count = question.packets.len();
    if count > MAX_EXPLAINED {
        let detail = format!("{count} packets: expected at most {MAX_EXPLAINED} in one request");
        return Err(Problem::new(ProblemKind::BadRequest, detail));
    }
    let shared = api.shared()?;
    let now = shared.now();
    let mut packets = Vec::with_capacity(count);
    for packet in &question.packets {
        // Tables go on in between.
        packets.push(of_packet(&shared.controller(), packet, now));
    }
    Ok(Json(Explanations { packets }))
}

/// `None`: it is neither to nor from a service, or says nothing.
fn of_packet(controller: &Controller, packet: &PacketQuestion, now: Now) -> Option<PacketExplanation> {
    let source = SocketAddr::new(packet.source_address, packet.source_port);
    let destination = SocketAddr::new(packet.destination_address, packet.destination_port);
    let of = |socket| {
        let address = ServiceAddress { socket, protocol: packet.protocol };
        controller.fleet().services.iter().find(|service| service.address == address)
    };
    let (to_service, service, client) = match (of(destination), of(source)) {
        (Some(service), _) => (true, service, source),
        (None, Some(service)) => (false, service, destination),
        (None, None) => return None,
    };
    // What a server stamped says as much as its echo. Without a timestamp there is nothing to say of an answer.
    let cookie = if to_service { packet.echo } else { Some(packet.timestamp?) };
    let asked = explained_packet(packet.packet, cookie);
    let reply = controller.explain(service.address, client, asked, now).ok()?;
    Some(PacketExplanation { service: reply.service, to_service, server: reply.chosen_server, reason: reply.reason })
}
