//! Traffic counts that load balancers report by server. They are connections opened and closed since the newest report
//! of the server's agent, and rates of packets and bytes.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::load::SmoothingWeight;
use coreward_model::policy::TrafficRates;
use coreward_wire::{ServerTraffic, ServiceIndex, TrafficCountsMessage};

use super::ClockReadings;

#[derive(Debug, Default, Clone, Copy)]
struct ServiceConnectionCounter {
    /// Number of connections opened since the load balancer's maps were created.
    total_opened_count: u64,
    /// Number of connections opened since the last call of [`LoadBalancerTraffic::take_opened_connection_count`], or
    /// `None` if only one message has arrived so far.
    opened_count_since_last_take: Option<u64>,
}

/// Map by server id. Its hash need not resist chosen collisions, because the controller and not a peer assigns the ids.
type ServerIdMap<T> = HashMap<ServerId, T, foldhash::fast::FixedState>;

/// Traffic counts and rates that one load balancer reported for all servers.
#[derive(Debug, Default)]
pub struct LoadBalancerTraffic {
    /// Time at which the last message arrived, since the controller's start.
    last_message_at: Option<Duration>,
    /// Counts for each server, summed over all services since the load balancer's maps were created.
    totals_by_server: ServerIdMap<ServerTraffic>,
    connection_counters_by_service: HashMap<ServiceIndex, ServiceConnectionCounter>,
    rates_by_server: ServerIdMap<TrafficRates>,
}

/// Numbers of connections that were opened since a load balancer's previous message.
#[derive(Debug, Default)]
pub struct OpenedConnectionCounts {
    pub opened_count_by_service: Vec<(ServiceIndex, u64)>,
    /// Number of connections to all services together, by server.
    pub opened_count_by_server: Vec<(ServerId, u64)>,
}

impl LoadBalancerTraffic {
    /// Returns the numbers of connections opened since the previous message. A count that is new or has restarted adds
    /// nothing.
    pub fn opened_connection_counts(&self, message: &TrafficCountsMessage) -> OpenedConnectionCounts {
        let opened_by_service = message.opened_connection_count_by_service.iter().filter_map(|(service, total)| {
            Some((*service, total.checked_sub(self.connection_counters_by_service.get(service)?.total_opened_count)?))
        });
        let opened_by_server = message.traffic_by_server.iter().filter_map(|(id, new_traffic)| {
            Some((
                *id,
                new_traffic
                    .opened_connection_count
                    .checked_sub(self.totals_by_server.get(id)?.opened_connection_count)?,
            ))
        });
        OpenedConnectionCounts {
            opened_count_by_service: opened_by_service.filter(|(_, count)| *count > 0).collect(),
            opened_count_by_server: opened_by_server.filter(|(_, count)| *count > 0).collect(),
        }
    }

    /// Records the traffic counts of a message. A count that has decreased comes from new BPF maps, so the measurement
    /// of its rate starts again.
    pub fn record_traffic_totals(
        &mut self,
        message: &TrafficCountsMessage,
        alpha: SmoothingWeight,
        now: ClockReadings,
    ) {
        let totals_by_server: ServerIdMap<ServerTraffic> =
            message.traffic_by_server.iter().map(|(id, traffic)| (*id, *traffic)).collect();
        self.record_opened_connections(message);
        let elapsed_s = self
            .last_message_at
            .map(|previous_message_at| now.monotonic_time.saturating_sub(previous_message_at).as_secs_f64());
        if let Some(elapsed) = elapsed_s.filter(|elapsed| *elapsed > 0.0) {
            self.rates_by_server = totals_by_server
                .iter()
                .filter_map(|(id, new_traffic)| {
                    Some((*id, self.compute_smoothed_rates(*id, new_traffic, elapsed, alpha)?))
                })
                .collect();
        }
        self.totals_by_server = totals_by_server;
        self.last_message_at = Some(now.monotonic_time);
    }

    fn record_opened_connections(&mut self, message: &TrafficCountsMessage) {
        let to_connection_counter = |(service, total): (&ServiceIndex, &u64)| {
            let (service, total) = (*service, *total);
            // A lower count than before comes from new maps, or from the removal of a server.
            let compute_increase_since = |previous_counts: &ServiceConnectionCounter| {
                previous_counts
                    .opened_count_since_last_take
                    .unwrap_or(0)
                    .saturating_add(total.saturating_sub(previous_counts.total_opened_count))
            };
            let opened_count = self.connection_counters_by_service.get(&service).map(compute_increase_since);
            (
                service,
                ServiceConnectionCounter { total_opened_count: total, opened_count_since_last_take: opened_count },
            )
        };
        self.connection_counters_by_service =
            message.opened_connection_count_by_service.iter().map(to_connection_counter).collect();
    }

    /// Returns the number of connections to the service opened since the last call, or `None` if it is not known yet.
    pub fn take_opened_connection_count(&mut self, service: ServiceIndex) -> Option<u64> {
        self.connection_counters_by_service.get_mut(&service)?.opened_count_since_last_take.as_mut().map(std::mem::take)
    }

    fn compute_smoothed_rates(
        &self,
        server: ServerId,
        new_traffic: &ServerTraffic,
        elapsed_s: f64,
        alpha: SmoothingWeight,
    ) -> Option<TrafficRates> {
        let previous_traffic = self.totals_by_server.get(&server)?;
        let newest_rates = TrafficRates {
            packets_per_second: new_traffic.packet_count.checked_sub(previous_traffic.packet_count)? as f64 / elapsed_s,
            bytes_per_second: new_traffic.frame_bytes.checked_sub(previous_traffic.frame_bytes)? as f64 / elapsed_s,
        };
        let smooth_rate = |new: f64, old: f64| alpha.get() * new + (1.0 - alpha.get()) * old;
        Some(self.rates_by_server.get(&server).map_or(newest_rates, |previous_rates| TrafficRates {
            packets_per_second: smooth_rate(newest_rates.packets_per_second, previous_rates.packets_per_second),
            bytes_per_second: smooth_rate(newest_rates.bytes_per_second, previous_rates.bytes_per_second),
        }))
    }

    /// Removes the traffic rates, because the load balancer has disconnected. Its data plane may continue without the
    /// daemon.
    pub fn clear_rates(&mut self) {
        self.rates_by_server.clear();
        self.connection_counters_by_service.clear();
        self.last_message_at = None;
    }

    pub fn server_traffic_total(&self, server: ServerId) -> Option<ServerTraffic> {
        self.totals_by_server.get(&server).copied()
    }

    pub fn server_traffic_rates(&self, server: ServerId) -> Option<TrafficRates> {
        self.rates_by_server.get(&server).copied()
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrafficTotalsByBalancer(pub BTreeMap<String, ServerTraffic>);

impl TrafficTotalsByBalancer {
    /// Returns the increase in the number of open connections since `earlier_totals`, as load balancers counted it. A
    /// load balancer with new or restarted counts adds nothing, because the report may already include its connections.
    pub fn open_connection_increase_since(&self, earlier_totals: &TrafficTotalsByBalancer) -> i64 {
        let increase_at_balancer = |(name, current_traffic): (&String, &ServerTraffic)| {
            let earlier_traffic = earlier_totals.0.get(name)?;
            let opened_count =
                current_traffic.opened_connection_count.checked_sub(earlier_traffic.opened_connection_count)?;
            let closed_count =
                current_traffic.closed_connection_count.checked_sub(earlier_traffic.closed_connection_count)?;
            let maximum_increase = i128::from(u32::MAX);
            let open_connection_increase = i128::from(opened_count) - i128::from(closed_count);
            Some(open_connection_increase.clamp(-maximum_increase, maximum_increase) as i64)
        };
        self.0.iter().filter_map(increase_at_balancer).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now_at_ms(milliseconds: u64) -> ClockReadings {
        let monotonic = Duration::from_millis(milliseconds);
        ClockReadings { monotonic_time: monotonic, wall_time: monotonic, record_clock_time: monotonic }
    }

    fn server_id(number: u64) -> ServerId {
        number.try_into().unwrap()
    }

    fn build_traffic_message(packet_counts: &[(u64, u64)]) -> TrafficCountsMessage {
        let to_server_entry = |(server, packets): &(u64, u64)| {
            (
                server_id(*server),
                ServerTraffic { packet_count: *packets, frame_bytes: packets * 100, ..Default::default() },
            )
        };
        TrafficCountsMessage {
            traffic_by_server: packet_counts.iter().map(to_server_entry).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn traffic_rates_are_smoothed() {
        let mut traffic = LoadBalancerTraffic::default();
        traffic.record_traffic_totals(
            &build_traffic_message(&[(1, 150), (2, 7)]),
            SmoothingWeight::PAPER_VALUE,
            now_at_ms(0),
        );
        assert_eq!(traffic.server_traffic_rates(server_id(1)), None);
        traffic.record_traffic_totals(
            &build_traffic_message(&[(1, 170), (2, 7)]),
            SmoothingWeight::PAPER_VALUE,
            now_at_ms(100),
        );
        assert_eq!(
            traffic.server_traffic_rates(server_id(1)),
            Some(TrafficRates { packets_per_second: 200.0, bytes_per_second: 20_000.0 })
        );
        assert_eq!(
            traffic.server_traffic_rates(server_id(2)),
            Some(TrafficRates { packets_per_second: 0.0, bytes_per_second: 0.0 })
        );
        traffic.record_traffic_totals(
            &build_traffic_message(&[(1, 170)]),
            SmoothingWeight::PAPER_VALUE,
            now_at_ms(200),
        );
        assert_eq!(traffic.server_traffic_rates(server_id(1)).unwrap().packets_per_second, 100.0);
        assert_eq!(traffic.server_traffic_rates(server_id(2)), None);
        traffic.record_traffic_totals(&build_traffic_message(&[(1, 3)]), SmoothingWeight::PAPER_VALUE, now_at_ms(300));
        assert_eq!(traffic.server_traffic_rates(server_id(1)), None);
        traffic.clear_rates();
        assert_eq!(traffic.server_traffic_total(server_id(1)).unwrap().packet_count, 3);
    }

    #[test]
    fn new_load_balancer_adds_no_connections_to_an_agents_count() {
        let build_traffic_totals = |counts: &[(&str, u64, u64)]| {
            let to_entry = |(name, opened_count, closed_count): &(&str, u64, u64)| {
                (
                    (*name).to_owned(),
                    ServerTraffic {
                        opened_connection_count: *opened_count,
                        closed_connection_count: *closed_count,
                        ..Default::default()
                    },
                )
            };
            TrafficTotalsByBalancer(counts.iter().map(to_entry).collect())
        };
        let earlier_totals = build_traffic_totals(&[("lb1", 100, 90), ("lb2", 50, 50)]);
        let later_totals = build_traffic_totals(&[("lb1", 110, 93), ("lb2", 51, 55), ("lb3", 1000, 0)]);
        assert_eq!(later_totals.open_connection_increase_since(&earlier_totals), 7 - 4);
        assert_eq!(
            build_traffic_totals(&[("lb1", 5, 0)]).open_connection_increase_since(&earlier_totals),
            0,
            "it restarted its counts"
        );
        let invalid_totals = build_traffic_totals(&[("lb1", u64::MAX, 90), ("lb2", 1 << 63, u64::MAX)]);
        assert_eq!(invalid_totals.open_connection_increase_since(&earlier_totals), 0, "as many one way as the other");
    }

    #[test]
    fn implausible_connection_counts_saturate() {
        let build_opened_message = |total: u64| TrafficCountsMessage {
            opened_connection_count_by_service: [(ServiceIndex::FIRST, total)].into(),
            ..Default::default()
        };
        let mut load_balancers = super::super::load_balancers::LoadBalancers::default();
        let sessions = ["lb1", "lb2"].map(|name| load_balancers.register_session(name, now_at_ms(0)).unwrap());
        for total in [0, u64::MAX, 0, u64::MAX] {
            for session in sessions {
                load_balancers.record_traffic(
                    session,
                    &build_opened_message(total),
                    SmoothingWeight::PAPER_VALUE,
                    now_at_ms(100),
                );
            }
        }
        assert_eq!(load_balancers.take_opened_connection_count(ServiceIndex::FIRST), Some(u64::MAX));
    }
}
