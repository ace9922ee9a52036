//! What load balancers count for policies.

use coreward_model::ServerId;
pub use coreward_model::lb::ServerTraffic;

use crate::address::parse_server_id;
use crate::configuration::ServiceIndex;
use crate::{Context as _, WireError, v1};

/// A message of traffic: service, server, and what went there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrafficMessage {
    /// In any order.
    pub counts: Vec<(ServiceIndex, ServerId, ServerTraffic)>,
}

impl From<&TrafficMessage> for v1::LoadBalancerTraffic {
    fn from(message: &TrafficMessage) -> Self {
        let mut services: Vec<v1::ServiceTraffic> = Vec::new();
        for (service, server, traffic) in &message.counts {
            let index = u32::from(service.get());
            let position = services.iter().position(|known| known.service_index == index).unwrap_or_else(|| {
                services.push(v1::ServiceTraffic { service_index: index, servers: Vec::new() });
                services.len() - 1
            });
            services[position].servers.push(v1::ServerTraffic {
                server_id: server.get().into(),
                opened: traffic.opened,
                closed: traffic.closed,
                packets: traffic.packets,
                bytes: traffic.bytes,
            });
        }
        Self { services }
    }
}

impl TryFrom<&v1::LoadBalancerTraffic> for TrafficMessage {
    type Error = WireError;

    fn try_from(message: &v1::LoadBalancerTraffic) -> Result<Self, WireError> {
        let mut counts = Vec::new();
        for (position, service) in message.services.iter().enumerate() {
            let within = format!("services[{position}]");
            let index = ServiceIndex::parse("service_index", service.service_index).within(&within)?;
            for server in &service.servers {
                let id = parse_server_id("server_id", server.server_id).within(&within)?;
                let v1::ServerTraffic { opened, closed, packets, bytes, .. } = *server;
                counts.push((index, id, ServerTraffic { opened, closed, packets, bytes }));
            }
        }
        Ok(Self { counts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_back_and_unknown_places_are_named() {
        let entry = |index: u32, id: u64, opened: u64| {
            let traffic = ServerTraffic { opened, closed: 1, packets: 2, bytes: 3 };
            (ServiceIndex::new(index).unwrap(), ServerId::try_from(id).unwrap(), traffic)
        };
        let message = TrafficMessage { counts: vec![entry(3, 7, 10), entry(3, 8, 11), entry(0, 7, 12)] };
        let mut sent = v1::LoadBalancerTraffic::from(&message);
        assert_eq!(sent.services.len(), 2);
        assert_eq!(TrafficMessage::try_from(&sent), Ok(message));
        sent.services[1].service_index = 64;
        assert_eq!(
            TrafficMessage::try_from(&sent).unwrap_err().to_string(),
            "services[1].service_index: service index 64: expected 0 to 63"
        );
    }
}
