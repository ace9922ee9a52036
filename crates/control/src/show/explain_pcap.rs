//! `coreward explain --pcap`: each packet of a capture that is to or from a service.

use std::net::SocketAddr;
use std::path::Path;

use coreward_model::tuple::ServiceAddress;
use coreward_wire::address::address_bytes;
use coreward_wire::v1;
use coreward_wire::v1::control_client::ControlClient;
use serde_json::json;
use tonic::transport::Channel;

use super::packets::{self, Packet};
use super::{Contact, Format, ask, json};

/// A packet and where it goes; of one from a server, who stamped it.
struct Explained {
    packet: Packet,
    service: String,
    to_service: bool,
    reply: v1::ExplainReply,
}

/// What `coreward explain --pcap` prints.
///
/// # Errors
/// When the file is no capture, or the controller cannot be reached.
pub fn explain_pcap(controller: impl Into<Contact>, path: &Path, format: Format) -> anyhow::Result<String> {
    let packets = packets::read(path)?;
    let count = packets.len();
    let explained = ask(controller, async |client| explain_all(client, packets).await.map(tonic::Response::new))?;
    Ok(match format {
        Format::Json => json::pretty(&explained.iter().map(object).collect()),
        Format::Text => {
            let lines: String = explained.iter().map(|explained| line(explained) + "\n").collect();
            let others = count - explained.len();
            format!("{lines}{} packets to or from services, {others} others\n", explained.len())
        }
    })
}

async fn explain_all(
    client: &mut ControlClient<Channel>,
    packets: Vec<Packet>,
) -> Result<Vec<Explained>, tonic::Status> {
    let status = client.status(v1::StatusRequest::default()).await?.into_inner();
    let services: Vec<(ServiceAddress, String)> = status
        .services
        .into_iter()
        .filter_map(|service| Some((ServiceAddress::try_from(service.address.as_ref()?).ok()?, service.name)))
        .collect();
    let mut explained = Vec::new();
    for packet in packets {
        let of = |socket: SocketAddr| {
            services.iter().find(|(address, _)| address.socket == socket && address.protocol == packet.protocol)
        };
        let (to_service, found) = match (of(packet.destination), of(packet.source)) {
            (Some(found), _) => (true, found),
            (None, Some(found)) => (false, found),
            (None, None) => continue,
        };
        // What a server stamped says as much as its echo. Without a timestamp there is nothing to say of an answer.
        if !to_service && packet.timestamp.is_none() {
            continue;
        }
        let reply = client.explain(request(&packet, found.0, to_service)).await?.into_inner();
        explained.push(Explained { packet, service: found.1.clone(), to_service, reply });
    }
    Ok(explained)
}

fn request(packet: &Packet, service: ServiceAddress, to_service: bool) -> v1::ExplainRequest {
    let client = if to_service { packet.source } else { packet.destination };
    let established = v1::EstablishedPacket {
        cookie: packet.timestamp.map(|(value, echo)| if to_service { echo } else { value }),
        reset: packet.reset,
    };
    v1::ExplainRequest {
        service: Some(service.into()),
        client_address: address_bytes(client.ip()),
        client_port: client.port().into(),
        established: (!packet.syn).then_some(established),
    }
}

fn line(explained: &Explained) -> String {
    let Explained { packet, service, to_service, reply } = explained;
    let kind = match (packet.syn, packet.reset) {
        (true, _) => "first packet",
        (_, true) => "reset",
        _ => "packet",
    };
    let server = if reply.chosen_server.is_empty() { "(not known here)" } else { &reply.chosen_server };
    let verb = if *to_service { "goes to" } else { "was stamped by" };
    let Packet { number, source, destination, .. } = packet;
    format!("#{number} {source} -> {destination} ({service}): {kind} {verb} {server}: {}", reply.reason)
}

fn object(explained: &Explained) -> serde_json::Value {
    let Explained { packet, service, to_service, reply } = explained;
    json!({
        "number": packet.number,
        "source": packet.source.to_string(),
        "destination": packet.destination.to_string(),
        "service": service,
        "to_service": to_service,
        "first_packet": packet.syn,
        "reset": packet.reset,
        "server": (!reply.chosen_server.is_empty()).then_some(&reply.chosen_server),
        "reason": reply.reason,
    })
}
