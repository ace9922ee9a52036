//! `coreward explain --pcap`: each packet of a capture that is to or from a service.

use std::path::Path;

use coreward_api::client::Client;
use coreward_api::types::{ExplainPackets, MAX_EXPLAINED, PacketExplanation, PacketKind, PacketQuestion};
use serde_json::json;

use super::packets::{self, Packet};
use super::{Format, ask, json as pretty};

/// What `coreward explain --pcap` prints.
///
/// # Errors
/// When the file is no capture, or the controller cannot be reached.
pub fn explain_pcap(client: &Client, path: &Path, format: Format) -> anyhow::Result<String> {
    let packets = packets::read(path)?;
    let explained = ask(explain_all(client, &packets))?;
    match format {
        Format::Json => pretty(&explained.iter().map(object).collect::<Vec<_>>()),
        Format::Text => {
            let lines: String = explained.iter().map(|explained| line(explained) + "\n").collect();
            let others = packets.len() - explained.len();
            Ok(format!("{lines}{} packets to or from services, {others} others\n", explained.len()))
        }
    }
}

/// A packet and where it goes; of one from a server, who stamped it.
type Explained<'a> = (&'a Packet, PacketExplanation);

async fn explain_all<'a>(client: &Client, packets: &'a [Packet]) -> anyhow::Result<Vec<Explained<'a>>> {
    let mut explained = Vec::new();
    for packets in packets.chunks(MAX_EXPLAINED) {
        let questions = ExplainPackets { packets: packets.iter().map(question).collect() };
        let answers = client.explain_packets(&questions).await?.packets;
        anyhow::ensure!(answers.len() == packets.len(), "{} answers: expected {}", answers.len(), packets.len());
        explained.extend(packets.iter().zip(answers).filter_map(|(packet, answer)| Some((packet, answer?))));
    }
    Ok(explained)
}

fn question(packet: &Packet) -> PacketQuestion {
    PacketQuestion {
        protocol: packet.protocol,
        source_address: packet.source.ip(),
        source_port: packet.source.port(),
        destination_address: packet.destination.ip(),
        destination_port: packet.destination.port(),
        packet: match (packet.syn, packet.reset) {
            (true, _) => PacketKind::First,
            (false, true) => PacketKind::Reset,
            (false, false) => PacketKind::Established,
        },
        timestamp: packet.timestamp.map(|(value, _)| value),
        echo: packet.timestamp.map(|(_, echo)| echo),
    }
}

fn line((packet, explanation): &Explained<'_>) -> String {
    let PacketExplanation { service, to_service, server, reason } = explanation;
    let kind = match (packet.syn, packet.reset) {
        (true, _) => "first packet",
        (_, true) => "reset",
        _ => "packet",
    };
    let server = server.as_deref().unwrap_or("(not known here)");
    let verb = if *to_service { "goes to" } else { "was stamped by" };
    let Packet { number, source, destination, .. } = packet;
    format!("#{number} {source} -> {destination} ({service}): {kind} {verb} {server}: {reason}")
}

fn object((packet, explanation): &Explained<'_>) -> serde_json::Value {
    json!({
        "number": packet.number,
        "source": packet.source.to_string(),
        "destination": packet.destination.to_string(),
        "service": explanation.service,
        "to_service": explanation.to_service,
        "first_packet": packet.syn,
        "reset": packet.reset,
        "server": explanation.server,
        "reason": explanation.reason,
    })
}
