//! Traffic counts that load balancers send for policies.

use std::collections::BTreeMap;

use coreward_model::ServerId;
pub use coreward_model::lb::ServerTraffic;

use crate::address::parse_server_id;
use crate::configuration::ServiceIndex;
use crate::{WireError, WireErrorContext as _, v1};

/// Traffic counts in one message of a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrafficCountsMessage {
    /// Number of opened connections by service. A connection counts at its first packet.
    pub opened_connection_count_by_service: BTreeMap<ServiceIndex, u64>,
    /// Traffic to each server, as the sum over all services.
    pub traffic_by_server: BTreeMap<ServerId, ServerTraffic>,
}

impl From<&TrafficCountsMessage> for v1::LoadBalancerTraffic {
    fn from(message: &TrafficCountsMessage) -> Self {
        let to_service_traffic = |(index, opened_count): (&ServiceIndex, &u64)| v1::ServiceTraffic {
            service_index: index.get().into(),
            servers: Vec::new(),
            opened: *opened_count,
        };
        let to_server_traffic = |(id, traffic): (&ServerId, &ServerTraffic)| v1::ServerTraffic {
            server_id: id.get().into(),
            opened: traffic.opened_connection_count,
            closed: traffic.closed_connection_count,
            packets: traffic.packet_count,
            bytes: traffic.frame_bytes,
        };
        Self {
            services: message.opened_connection_count_by_service.iter().map(to_service_traffic).collect(),
            servers: message.traffic_by_server.iter().map(to_server_traffic).collect(),
        }
    }
}

impl TryFrom<&v1::LoadBalancerTraffic> for TrafficCountsMessage {
    type Error = WireError;

    fn try_from(message: &v1::LoadBalancerTraffic) -> Result<Self, WireError> {
        let mut traffic_message = Self::default();
        for (position, service) in message.services.iter().enumerate() {
            let service_path = format!("services[{position}]");
            let index = ServiceIndex::parse("service_index", service.service_index).with_field_prefix(&service_path)?;
            // A load balancer of the previous version counts the service's servers, but not the service itself.
            let opened_sum_of_servers =
                service.servers.iter().fold(0, |sum: u64, server| sum.saturating_add(server.opened));
            traffic_message.opened_connection_count_by_service.insert(index, service.opened.max(opened_sum_of_servers));
            traffic_message.add_server_traffic(&service.servers, &service_path)?;
        }
        traffic_message.add_server_traffic(&message.servers, "servers")?;
        Ok(traffic_message)
    }
}

impl TrafficCountsMessage {
    fn add_server_traffic(&mut self, servers: &[v1::ServerTraffic], list_path: &str) -> Result<(), WireError> {
        for server in servers {
            let id = parse_server_id("server_id", server.server_id).with_field_prefix(list_path)?;
            let server_total = self.traffic_by_server.entry(id).or_default();
            // The additions saturate, because forged counters may have any value.
            server_total.opened_connection_count = server_total.opened_connection_count.saturating_add(server.opened);
            server_total.closed_connection_count = server_total.closed_connection_count.saturating_add(server.closed);
            server_total.packet_count = server_total.packet_count.saturating_add(server.packets);
            server_total.frame_bytes = server_total.frame_bytes.saturating_add(server.bytes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_id(number: u64) -> ServerId {
        number.try_into().unwrap()
    }

    #[test]
    fn connection_counts_round_trip() {
        let traffic_with_opened_count = |opened: u64| ServerTraffic {
            opened_connection_count: opened,
            closed_connection_count: 1,
            packet_count: 2,
            frame_bytes: 3,
        };
        let message = TrafficCountsMessage {
            opened_connection_count_by_service: [(ServiceIndex::new(3).unwrap(), 21), (ServiceIndex::FIRST, 12)].into(),
            traffic_by_server: [
                (server_id(7), traffic_with_opened_count(22)),
                (server_id(8), traffic_with_opened_count(11)),
            ]
            .into(),
        };
        let mut encoded_message = v1::LoadBalancerTraffic::from(&message);
        assert_eq!(TrafficCountsMessage::try_from(&encoded_message), Ok(message));
        encoded_message.services[1].service_index = 1024;
        assert_eq!(
            TrafficCountsMessage::try_from(&encoded_message).unwrap_err().to_string(),
            "services[1].service_index: service index 1024: expected 0 to 1023"
        );
    }

    /// False counts from a load balancer must not crash the controller.
    #[test]
    fn forged_counts_saturate_without_overflow() {
        let max_traffic = v1::ServerTraffic { server_id: 7, opened: u64::MAX, packets: u64::MAX, ..Default::default() };
        let services = vec![v1::ServiceTraffic { service_index: 0, servers: vec![max_traffic; 2], opened: 1 }];
        let message = v1::LoadBalancerTraffic { services, servers: vec![max_traffic] };
        let parsed_message = TrafficCountsMessage::try_from(&message).unwrap();
        assert_eq!(parsed_message.opened_connection_count_by_service[&ServiceIndex::FIRST], u64::MAX);
        assert_eq!(
            (
                parsed_message.traffic_by_server[&server_id(7)].opened_connection_count,
                parsed_message.traffic_by_server[&server_id(7)].packet_count
            ),
            (u64::MAX, u64::MAX)
        );
    }

    /// A load balancer of the previous version counts connections by service and server.
    #[test]
    fn connection_counts_by_service_and_server_are_summed() {
        let server =
            |server_id: u32, opened: u64| v1::ServerTraffic { server_id, opened, closed: 1, ..Default::default() };
        let service_traffic_message = |service_index: u32, servers: Vec<v1::ServerTraffic>| v1::ServiceTraffic {
            service_index,
            servers,
            opened: 0,
        };
        let services = vec![
            service_traffic_message(0, vec![server(7, 5), server(8, 6)]),
            service_traffic_message(3, vec![server(7, 1)]),
        ];
        let parsed_message =
            TrafficCountsMessage::try_from(&v1::LoadBalancerTraffic { services, servers: Vec::new() }).unwrap();
        assert_eq!(parsed_message.opened_connection_count_by_service.values().copied().collect::<Vec<_>>(), [11, 1]);
        let expected_server_traffic = |n: u64| {
            (
                parsed_message.traffic_by_server[&server_id(n)].opened_connection_count,
                parsed_message.traffic_by_server[&server_id(n)].closed_connection_count,
            )
        };
        assert_eq!((expected_server_traffic(7), expected_server_traffic(8)), ((6, 2), (6, 1)));
    }
}
