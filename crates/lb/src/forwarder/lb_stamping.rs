//! Reports LB-side stamping to the controller, with the servers' clocks and the counts of stamped packets.

use coreward_dataplane::lb::{self, StampedPacketCounts};
use coreward_model::ServerId;
use coreward_model::consistency::CookieStamper;
use coreward_wire::{Service, v1};

use super::Forwarder;

impl Forwarder {
    /// Returns the timestamp clocks of the servers for which load balancers stamp packets. If a service's clocks cannot
    /// be read, logs this and omits them.
    pub(super) fn clocks_of_lb_stamped_servers(&self) -> Vec<v1::ServerClock> {
        self.lb_stamped_services().flat_map(|(service, index)| self.server_clocks_of_service(service, *index)).collect()
    }

    fn server_clocks_of_service(&self, service: &Service, index: lb::ServiceIndex) -> Vec<v1::ServerClock> {
        let clocks = self.load_balancer.server_clock_measurements(index).unwrap_or_else(|error| {
            tracing::warn!(
                event = "clocks-unreadable",
                service = service.name,
                error = format!("{error:#}"),
                "the load balancer cannot read the clocks of the service's servers: `coreward status` omits them"
            );
            Vec::new()
        });
        let to_server_clock = |(id, clock): (ServerId, lb::ServerClockMeasurements)| {
            let server = service.servers.iter().find(|server| server.id == id)?;
            Some(v1::ServerClock {
                service: service.name.clone(),
                server: server.name.clone(),
                state: clock.state().name().to_owned(),
                syn_acks: clock.syn_ack_count,
                with_timestamps: clock.timestamped_syn_ack_count,
                disagreed: clock.disagreeing_syn_ack_count,
                problem: clock.stamping_problem().unwrap_or_default(),
            })
        };
        clocks.into_iter().filter_map(to_server_clock).collect()
    }

    fn lb_stamped_services(&self) -> impl Iterator<Item = &(Service, lb::ServiceIndex)> {
        self.services_by_index
            .values()
            .filter(|(service, _)| service.settings.timestamps == CookieStamper::LoadBalancer)
    }

    pub(super) fn stamped_packet_counts(&self) -> Vec<v1::StampedPackets> {
        let count_stamped_packets = |(service, index): &(Service, lb::ServiceIndex)| {
            let StampedPacketCounts { found_by_cookie: by_cookie, found_in_flow_table: by_flow_table } =
                self.load_balancer.stamped_packet_counts(*index);
            v1::StampedPackets { service: service.name.clone(), by_cookie, by_flow_table }
        };
        self.lb_stamped_services().map(count_stamped_packets).collect()
    }
}
