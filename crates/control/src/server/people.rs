//! Answers to people: `coreward status`, `coreward explain`, `coreward keys`.

use coreward_model::ServiceAddress;
use coreward_wire::address::{parse_address, parse_port};
use coreward_wire::{Context as _, WireError, v1};
use tonic::Status;

use super::keeper::Change;
use super::shared::Shared;
use crate::controller::explain::{ExplainedPacket, NotExplained};

/// Everything there is to see.
pub fn status(shared: &Shared) -> v1::StatusReply {
    let now = shared.now();
    shared.controller().status(now)
}

/// Where a new connection would go.
pub fn explain(shared: &Shared, request: &v1::ExplainRequest) -> Result<v1::ExplainReply, Status> {
    let service = request.service.as_ref().ok_or_else(|| WireError::missing("service"))?;
    let service = ServiceAddress::try_from(service).within("service")?;
    let ip = parse_address("client_address", &request.client_address)?;
    let port = parse_port("client_port", request.client_port)?;
    let packet = match &request.established {
        None => ExplainedPacket::First,
        Some(packet) => ExplainedPacket::Established { cookie: packet.cookie, reset: packet.reset },
    };
    let now = shared.now();
    shared.controller().explain(service, (ip, port).into(), packet, now).map_err(|error| match &error {
        NotExplained::UnknownService { .. } => Status::not_found(error.to_string()),
        NotExplained::MixedFamilies(_) => Status::invalid_argument(error.to_string()),
    })
}

/// Begins a rotation of the cookie keys, or goes on with it.
pub async fn rotate_keys(shared: &Shared, force: bool) -> Result<v1::KeysStatus, Status> {
    let now = shared.now();
    let step = shared.controller().wanted_key_step(force, now);
    let step = step.map_err(|reason| Status::failed_precondition(reason.to_string()))?;
    shared.change(Change::Keys(step)).await.map_err(|error| Status::internal(format!("{error:#}")))?;
    tracing::info!("cookie keys: {}", step.words());
    Ok(shared.controller().keys_status(now))
}
