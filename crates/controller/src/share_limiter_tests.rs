//! Attraction of an agent with false reports, in virtual time: a load balancer places connections by the controller's
//! tables, servers' loads follow from their connections, and one always reports idle cores.

use std::collections::VecDeque;

use coreward_config::Source;
use coreward_model::placement::PlacementState;
use coreward_model::rss::{RssKey, seeded_rng};
use coreward_wire::{ServerTraffic, TrafficMessage};

use super::tests::{plain_report, plain_rss};
use super::*;
use coreward_fleet::config::FleetConfig;
use coreward_fleet::records::Records;

const SERVER_COUNT: usize = 10;
const CORE_COUNT: usize = 4;
/// Number of new connections at all servers per interval of 100 ms, and of intervals for which a connection lasts.
const CONNECTIONS_PER_INTERVAL: u64 = 20;
const LIFETIME_INTERVALS: usize = 50;
/// CPU time of a connection on its core, per interval. All connections together use half of the cores' time.
const BUSY_NS: u64 = 2_000_000;
const IMPOSTOR: usize = 0;

fn at(interval: u64) -> Now {
    let monotonic = Duration::from_millis(100 * interval);
    let wall = Duration::from_secs(1_700_000_000) + monotonic;
    Now { monotonic, wall, record: wall }
}

struct Harness {
    controller: Controller,
    sessions: Vec<Session>,
    balancer: u64,
    random: u32,
    /// Server and core of each open connection, by the interval in which the connection was opened.
    open: VecDeque<Vec<(usize, usize)>>,
    busy: Vec<[u64; CORE_COUNT]>,
    opened: Vec<u64>,
    is_byzantine: bool,
    /// RSS key that the false server reports, and every connection's hash with it; `None`: the other servers' key.
    own_key: Option<(RssKey, u32)>,
}

impl Harness {
    fn new(policy: &str, is_byzantine: bool) -> Self {
        let mut text = String::new();
        for n in 0..SERVER_COUNT {
            text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\n", n + 1);
        }
        text += &format!("[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\npolicy = \"{policy}\"\n");
        let config = FleetConfig::parse(&Source::from_text("fleet.toml", &text)).unwrap();
        let mut records = Records::generate(at(0).wall, &mut seeded_rng(5, 0));
        records.apply(&config, at(0).wall, &mut seeded_rng(6, 0)).unwrap();
        let mut controller = Controller::new(Fleet::new(&config, &records));
        let sessions =
            (0..SERVER_COUNT).map(|n| controller.register(&format!("s{n}"), "test", at(0)).unwrap()).collect();
        let balancer = controller.register_load_balancer("lb1", at(0)).unwrap();
        Self {
            controller,
            sessions,
            balancer,
            random: 7,
            open: VecDeque::new(),
            busy: vec![[0; CORE_COUNT]; SERVER_COUNT],
            opened: vec![0; SERVER_COUNT],
            is_byzantine,
            own_key: None,
        }
    }

    fn report(&mut self, interval: u64) {
        for (server, core) in self.open.iter().flatten() {
            if !self.is_byzantine || *server != IMPOSTOR {
                self.busy[*server][*core] += BUSY_NS;
            }
        }
        for (n, session) in self.sessions.iter().enumerate() {
            let mut rss = (interval == 0).then(|| plain_rss(128, CORE_COUNT as u32));
            if let Some((key, _)) = self.own_key.as_ref().filter(|_| n == IMPOSTOR)
                && let Some(rss) = rss.as_mut().and_then(|reported| reported.rss.as_mut())
            {
                rss.key = key.clone();
            }
            let report = plain_report(interval + 1, at(interval), &self.busy[n]);
            let report = Report { rss, rss_generation: 1, ..report };
            self.controller.report(session, Ok(report), at(interval)).unwrap();
        }
    }

    fn step(&mut self, interval: u64) {
        self.report(interval);
        let table = self.controller.tick(at(interval)).remove(0).table;
        let index = self.controller.fleet().services[0].index;
        let mut assigned = PlacementState::for_table(&table);
        let mut new = Vec::new();
        for _ in 0..CONNECTIONS_PER_INTERVAL {
            self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let hash = self.random >> 25;
            let own_hash = |key: &RssKey| self.own_key.as_ref().filter(|(own, _)| own == key).map(|(_, hash)| *hash);
            let chosen = table.choose_by_hash(&mut assigned, |group| own_hash(&table.groups[group]).unwrap_or(hash));
            let server = usize::from(chosen.unwrap().get());
            self.opened[server] += 1;
            new.push((server, hash as usize % CORE_COUNT));
        }
        self.open.push_back(new);
        if self.open.len() > LIFETIME_INTERVALS {
            self.open.pop_front();
        }
        let counts = self.opened.iter().enumerate();
        let servers = counts.map(|(id, opened)| {
            ((id as u64).try_into().unwrap(), ServerTraffic { opened: *opened, ..Default::default() })
        });
        let servers = servers.collect();
        let opened = [(index, self.opened.iter().sum())].into();
        let message = TrafficMessage { servers, opened_connections: opened };
        self.controller.record_load_balancer_traffic(self.balancer, &message, at(interval));
    }

    /// Returns the false server's share of the connections that are opened during the second minute.
    fn share_of_impostor(&mut self) -> f64 {
        (0..600).for_each(|interval| self.step(interval));
        let before = self.opened.clone();
        (600..1200).for_each(|interval| self.step(interval));
        let sum: u64 = self.opened.iter().zip(&before).map(|(now, then)| now - then).sum();
        (self.opened[IMPOSTOR] - before[IMPOSTOR]) as f64 / sum as f64
    }
}

#[test]
fn byzantine_agent_gets_at_most_twice_its_fair_share() {
    for policy in ["crossrss", "crossrss-plus", "least:cpu"] {
        let mut harness = Harness::new(policy, true);
        let part = harness.share_of_impostor();
        assert!(part < 0.21, "{policy}: {part}");
        assert_eq!(harness.controller.share_limiter.limited_count(), 1, "{policy}");
    }
}

/// If the false server is excluded too late, it gets connections in a burst.
#[test]
fn impostor_gets_twice_its_fair_share_in_any_ten_seconds() {
    let mut harness = Harness::new("least:cpu", true);
    let opened: Vec<[u64; 2]> = (0..1_200)
        .map(|interval| {
            harness.step(interval);
            [harness.opened[IMPOSTOR], harness.opened.iter().sum()]
        })
        .collect();
    let part = |window: &[[u64; 2]]| {
        let [[impostor, all], [later_impostor, later_all]] = [window[0], window[window.len() - 1]];
        (later_impostor - impostor) as f64 / (later_all - all) as f64
    };
    let most = opened[600..].windows(101).map(part).fold(0.0, f64::max);
    // A quarter of a second's connections may come after the allowance is spent.
    assert!(most < 0.2 + 0.25 / 10.0, "{most}");
}

/// A key that gives every connection the same hash, like one of zeros, puts all connections into one bucket.
#[test]
fn impostor_with_a_degenerate_key_gets_no_more() {
    for hash in 0..16 {
        let mut harness = Harness::new("crossrss", true);
        harness.own_key = Some((RssKey::new(&[0; 40]).unwrap(), hash));
        let part = harness.share_of_impostor();
        assert!(part < 0.21, "hash {hash}: {part}");
    }
}

#[test]
fn honest_servers_are_not_limited() {
    for policy in ["crossrss", "crossrss-plus", "least:cpu"] {
        let mut harness = Harness::new(policy, false);
        for interval in 0..600 {
            harness.step(interval);
            assert_eq!(harness.controller.share_limiter.limited_count(), 0, "{policy}, interval {interval}");
        }
    }
}

#[test]
fn impostor_that_reports_its_load_again_is_no_longer_limited() {
    let mut harness = Harness::new("crossrss", true);
    (0..300).for_each(|interval| harness.step(interval));
    assert_eq!(harness.controller.share_limiter.limited_count(), 1);
    harness.is_byzantine = false;
    (300..900).for_each(|interval| harness.step(interval));
    assert_eq!(harness.controller.share_limiter.limited_count(), 0);
}
