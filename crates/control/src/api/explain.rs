//! Where packets go, and why.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;

use axum::extract::State;
use coreward_api::extract::{Json, Query};
use coreward_api::types::{
    Explain, ExplainPackets, Explanation, Explanations, MAX_EXPLAINED, PacketExplanation, PacketKind, PacketQuestion,
};
use coreward_api::work::{Answer, Size, answer};
use coreward_api::{Problem, ProblemKind};
use coreward_model::ServiceAddress;

use super::Api;
use crate::controller::explain::{ExplainedPacket, NotExplained, ServiceView};
use crate::server::shared::Shared;

/// Where a packet goes, and why
#[utoipa::path(
    get, path = "/v1/explain", params(Explain),
    responses(
        (status = 200, description = "Where, and why", body = Explanation),
        (status = 404, description = "There is no such service", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn explain(State(api): State<Api>, Query(question): Query<Explain>) -> Result<Answer, Problem> {
    let service = ServiceAddress { socket: question.vip, protocol: question.protocol };
    let packet = explained_packet(question.packet, question.echo);
    let shared = api.shared()?;
    if question.client.port() == 0 {
        return Err(Problem::new(ProblemKind::BadRequest, "client port 0: expected one from 1 on"));
    }
    answer(Size::Small, move || {
        let view = shared.service_view(service).map_err(not_explained)?;
        view.explain(question.client, packet).map_err(not_explained)
    })
    .await
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
pub async fn explain_packets(State(api): State<Api>, Json(question): Json<ExplainPackets>) -> Result<Answer, Problem> {
    let count = question.packets.len();
    if count > MAX_EXPLAINED {
        let detail = format!("{count} packets: expected at most {MAX_EXPLAINED} in one request");
        return Err(Problem::new(ProblemKind::BadRequest, detail));
    }
    let shared = api.shared()?;
    answer(Size::Large, move || Ok(Explanations { packets: of_packets(&shared, &question.packets) })).await
}

/// `None`: it is neither to nor from a service, or says nothing.
fn of_packets(shared: &Shared, packets: &[PacketQuestion]) -> Vec<Option<PacketExplanation>> {
    let known: HashSet<ServiceAddress> =
        shared.controller().fleet().services.iter().map(|service| service.address).collect();
    // Service by service: of each there is one view, and one at a time.
    let mut of_services: BTreeMap<ServiceAddress, Vec<usize>> = BTreeMap::new();
    for (index, packet) in packets.iter().enumerate() {
        let service = [destination(packet), source(packet)].into_iter().find(|address| known.contains(address));
        if let Some(service) = service {
            of_services.entry(service).or_default().push(index);
        }
    }
    let mut explained = vec![None; packets.len()];
    for (service, indices) in of_services {
        let Ok(view) = shared.service_view(service) else { continue };
        for index in indices {
            explained[index] = of_packet(&view, service, &packets[index]);
        }
    }
    explained
}

fn source(packet: &PacketQuestion) -> ServiceAddress {
    ServiceAddress { socket: SocketAddr::new(packet.source_address, packet.source_port), protocol: packet.protocol }
}

fn destination(packet: &PacketQuestion) -> ServiceAddress {
    let socket = SocketAddr::new(packet.destination_address, packet.destination_port);
    ServiceAddress { socket, protocol: packet.protocol }
}

fn of_packet(view: &ServiceView, service: ServiceAddress, packet: &PacketQuestion) -> Option<PacketExplanation> {
    let to_service = destination(packet) == service;
    let client = if to_service { source(packet).socket } else { destination(packet).socket };
    // What a server stamped says as much as its echo. Without a timestamp there is nothing to say of an answer.
    let cookie = if to_service { packet.echo } else { Some(packet.timestamp?) };
    let reply = view.explain_briefly(client, explained_packet(packet.packet, cookie)).ok()?;
    Some(PacketExplanation { service: reply.service, to_service, server: reply.chosen, reason: reply.reason })
}
