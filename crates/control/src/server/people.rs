//! Answers to people: `coreward status`, `explain`, `keys`, `apply`, `fleet`.

use coreward_model::ServiceAddress;
use coreward_wire::address::{parse_address, parse_port};
use coreward_wire::{Context as _, WireError, v1};
use tonic::Status;

use super::keeper::{Change, NotApplied, WantedDocument};
use super::office::is_deposed;
use super::shared::Shared;
use crate::controller::explain::{ExplainedPacket, NotExplained};

/// Everything there is to see.
pub fn status(shared: &Shared, request: &v1::StatusRequest) -> v1::StatusReply {
    let now = shared.now();
    let mut reply = shared.controller().status_v1(now);
    if !request.rss_keys {
        reply.services.iter_mut().flat_map(|service| &mut service.rss_groups).for_each(|group| group.key.clear());
        reply.servers.iter_mut().filter_map(|server| server.rss.as_mut()).for_each(|rss| rss.key.clear());
    }
    reply
}

/// The fleet's document.
pub fn fleet(shared: &Shared) -> v1::FleetDocument {
    let controller = shared.controller();
    let (document, file) = (&controller.fleet().document, &controller.fleet().file);
    v1::FleetDocument {
        generation: document.generation,
        text: document.text.to_string(),
        file: file.as_ref().map(|file| file.display().to_string()).unwrap_or_default(),
    }
}

/// Puts another document in force.
pub async fn apply(shared: &Shared, request: v1::ApplyFleetRequest) -> Result<v1::ApplyFleetReply, Status> {
    let v1::ApplyFleetRequest { name, text, generation, dry_run } = request;
    let wanted = Change::Apply(WantedDocument { name, text, generation, dry_run });
    shared.change(wanted).await.map_err(|error| match error.downcast_ref::<NotApplied>() {
        Some(NotApplied::Wrong(_)) => Status::invalid_argument(error.to_string()),
        Some(NotApplied::Moved(..)) => Status::aborted(error.to_string()),
        Some(NotApplied::FileIsTheTruth { .. }) => Status::failed_precondition(error.to_string()),
        None => not_made(&error),
    })?;
    let generation = shared.controller().fleet().document.generation;
    if !dry_run {
        tracing::info!("the fleet's document of generation {generation} was applied");
    }
    Ok(v1::ApplyFleetReply { generation })
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
    shared.change(Change::Keys(step)).await.map_err(|error| not_made(&error))?;
    tracing::info!("cookie keys: {}", step.words());
    Ok(shared.controller().keys_status_v1(now))
}

/// Of a change that is not in force, or of which that is not known.
fn not_made(error: &anyhow::Error) -> Status {
    if is_deposed(error) { Status::unavailable(format!("{error:#}")) } else { Status::internal(format!("{error:#}")) }
}
