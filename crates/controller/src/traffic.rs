//! Counts of load balancers by server: connections opened and closed since the newest report of the server's agent, and
//! rates of packets and bytes.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::load::Alpha;
use coreward_model::policy::TrafficRates;
use coreward_wire::{ServerTraffic, ServiceIndex, TrafficMessage};

use super::Now;

#[derive(Debug, Default, Clone, Copy)]
struct OpenedCounts {
    /// Number of connections opened since the load balancer's maps were created.
    total: u64,
    /// Number of connections opened since the last query; `None`: only one message has arrived so far.
    since_last_query: Option<u64>,
}

/// Map by server id. Its hash need not resist collisions: the controller draws the ids, so no peer can choose them.
type ByServer<T> = HashMap<ServerId, T, foldhash::fast::FixedState>;

/// Traffic from one load balancer to all servers.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Time at which the last message arrived, since the controller's start.
    last_message_at: Option<Duration>,
    /// Counts for each server over all services, since the load balancer's maps were created.
    totals: ByServer<ServerTraffic>,
    opened: HashMap<ServiceIndex, OpenedCounts>,
    rates: ByServer<TrafficRates>,
}

/// Numbers of connections that were opened since a load balancer's previous message.
#[derive(Debug, Default)]
pub struct OpenedConnections {
    pub services: Vec<(ServiceIndex, u64)>,
    /// Number of connections of all services together, by server.
    pub servers: Vec<(ServerId, u64)>,
}

impl Traffic {
    /// Returns the increases since the previous message. A count that is new or has restarted adds nothing.
    pub fn opened_connections(&self, message: &TrafficMessage) -> OpenedConnections {
        let services = message
            .opened_connections
            .iter()
            .filter_map(|(service, total)| Some((*service, total.checked_sub(self.opened.get(service)?.total)?)));
        let servers = message
            .servers
            .iter()
            .filter_map(|(id, new)| Some((*id, new.opened.checked_sub(self.totals.get(id)?.opened)?)));
        OpenedConnections {
            services: services.filter(|(_, count)| *count > 0).collect(),
            servers: servers.filter(|(_, count)| *count > 0).collect(),
        }
    }

    /// Records the counts of a message. A count that has decreased comes from new maps, so its rate starts anew.
    pub fn record_totals(&mut self, message: &TrafficMessage, alpha: Alpha, now: Now) {
        let totals: ByServer<ServerTraffic> = message.servers.iter().map(|(id, traffic)| (*id, *traffic)).collect();
        self.record_opened(message);
        let elapsed = self.last_message_at.map(|printed| now.monotonic.saturating_sub(printed).as_secs_f64());
        if let Some(elapsed) = elapsed.filter(|elapsed| *elapsed > 0.0) {
            self.rates =
                totals.iter().filter_map(|(id, new)| Some((*id, self.rate(*id, new, elapsed, alpha)?))).collect();
        }
        self.totals = totals;
        self.last_message_at = Some(now.monotonic);
    }

    fn record_opened(&mut self, message: &TrafficMessage) {
        let follow = |(service, total): (&ServiceIndex, &u64)| {
            let (service, total) = (*service, *total);
            // A lower count than before comes from new maps, or a server has left.
            let more = |before: &OpenedCounts| {
                before.since_last_query.unwrap_or(0).saturating_add(total.saturating_sub(before.total))
            };
            let newly = self.opened.get(&service).map(more);
            (service, OpenedCounts { total, since_last_query: newly })
        };
        self.opened = message.opened_connections.iter().map(follow).collect();
    }

    /// Returns the number of connections opened for the service since the last call; `None`: not known yet.
    pub fn newly_opened(&mut self, service: ServiceIndex) -> Option<u64> {
        self.opened.get_mut(&service)?.since_last_query.as_mut().map(std::mem::take)
    }

    fn rate(&self, server: ServerId, new: &ServerTraffic, elapsed: f64, alpha: Alpha) -> Option<TrafficRates> {
        let old = self.totals.get(&server)?;
        let newest = TrafficRates {
            packets: new.packets.checked_sub(old.packets)? as f64 / elapsed,
            bytes: new.bytes.checked_sub(old.bytes)? as f64 / elapsed,
        };
        let smoothed = |new: f64, old: f64| alpha.get() * new + (1.0 - alpha.get()) * old;
        Some(self.rates.get(&server).map_or(newest, |before| TrafficRates {
            packets: smoothed(newest.packets, before.packets),
            bytes: smoothed(newest.bytes, before.bytes),
        }))
    }

    /// Ends the rates after the load balancer has disconnected. Its data plane may continue without the daemon.
    pub fn stop(&mut self) {
        self.rates.clear();
        self.opened.clear();
        self.last_message_at = None;
    }

    pub fn total(&self, server: ServerId) -> Option<ServerTraffic> {
        self.totals.get(&server).copied()
    }

    pub fn rates(&self, server: ServerId) -> Option<TrafficRates> {
        self.rates.get(&server).copied()
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrafficTotals(pub BTreeMap<String, ServerTraffic>);

impl TrafficTotals {
    /// Returns the increase of the number of open connections since `earlier`, by load balancers' counts. A load
    /// balancer with new or restarted counts adds nothing, because the report may already include its connections.
    pub fn opened_since(&self, then: &TrafficTotals) -> i64 {
        let of = |(name, now): (&String, &ServerTraffic)| {
            let then = then.0.get(name)?;
            let opened = now.opened.checked_sub(then.opened)?;
            let closed = now.closed.checked_sub(then.closed)?;
            let most = i128::from(u32::MAX);
            Some((i128::from(opened) - i128::from(closed)).clamp(-most, most) as i64)
        };
        self.0.iter().filter_map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Now {
        let monotonic = Duration::from_millis(milliseconds);
        Now { monotonic, wall: monotonic, record: monotonic }
    }

    fn id(number: u64) -> ServerId {
        number.try_into().unwrap()
    }

    fn message(counts: &[(u64, u64)]) -> TrafficMessage {
        let entry = |(server, packets): &(u64, u64)| {
            (id(*server), ServerTraffic { packets: *packets, bytes: packets * 100, ..Default::default() })
        };
        TrafficMessage { servers: counts.iter().map(entry).collect(), ..Default::default() }
    }

    #[test]
    fn rates_are_smoothed() {
        let mut traffic = Traffic::default();
        traffic.record_totals(&message(&[(1, 150), (2, 7)]), Alpha::PUBLISHED, at(0));
        assert_eq!(traffic.rates(id(1)), None);
        traffic.record_totals(&message(&[(1, 170), (2, 7)]), Alpha::PUBLISHED, at(100));
        assert_eq!(traffic.rates(id(1)), Some(TrafficRates { packets: 200.0, bytes: 20_000.0 }));
        assert_eq!(traffic.rates(id(2)), Some(TrafficRates { packets: 0.0, bytes: 0.0 }));
        traffic.record_totals(&message(&[(1, 170)]), Alpha::PUBLISHED, at(200));
        assert_eq!(traffic.rates(id(1)).unwrap().packets, 100.0);
        assert_eq!(traffic.rates(id(2)), None);
        traffic.record_totals(&message(&[(1, 3)]), Alpha::PUBLISHED, at(300));
        assert_eq!(traffic.rates(id(1)), None);
        traffic.stop();
        assert_eq!(traffic.total(id(1)).unwrap().packets, 3);
    }

    #[test]
    fn new_load_balancer_adds_no_connections_to_a_report() {
        let totals = |counts: &[(&str, u64, u64)]| {
            let of = |(name, opened, closed): &(&str, u64, u64)| {
                ((*name).to_owned(), ServerTraffic { opened: *opened, closed: *closed, ..Default::default() })
            };
            TrafficTotals(counts.iter().map(of).collect())
        };
        let then = totals(&[("lb1", 100, 90), ("lb2", 50, 50)]);
        let now = totals(&[("lb1", 110, 93), ("lb2", 51, 55), ("lb3", 1000, 0)]);
        assert_eq!(now.opened_since(&then), 7 - 4);
        assert_eq!(totals(&[("lb1", 5, 0)]).opened_since(&then), 0, "it restarted its counts");
        let lies = totals(&[("lb1", u64::MAX, 90), ("lb2", 1 << 63, u64::MAX)]);
        assert_eq!(lies.opened_since(&then), 0, "as many one way as the other");
    }

    #[test]
    fn invented_counts_saturate() {
        let opened = |total: u64| TrafficMessage {
            opened_connections: [(ServiceIndex::FIRST, total)].into(),
            ..Default::default()
        };
        let mut balancers = super::super::load_balancers::LoadBalancers::default();
        let sessions = ["lb1", "lb2"].map(|name| balancers.register(name, at(0)).unwrap());
        for total in [0, u64::MAX, 0, u64::MAX] {
            for session in sessions {
                balancers.record_traffic(session, &opened(total), Alpha::PUBLISHED, at(100));
            }
        }
        assert_eq!(balancers.newly_opened(ServiceIndex::FIRST), Some(u64::MAX));
    }
}
