//! Order of a rotation's roll-out, in virtual time. Load balancers, agents and the controller come, go and are late in
//! any order; no server ever stamps with a key that some load balancer lacks.

use std::collections::VecDeque;
use std::time::Duration;

use coreward_api::types::KeyPhase as ShownPhase;
use coreward_config::Source;
use coreward_model::cookie::FleetKeys;
use coreward_model::rss::seeded_rng;
use coreward_wire::{Report, v1};
use proptest::prelude::*;

use super::rotation::{KeyStep, RotationError};
use super::tests::plain_report;
use super::{Controller, Now, Session};
use coreward_fleet::config::FleetConfig;
use coreward_fleet::fleet::Fleet;
use coreward_fleet::key_ring::KeyPhase;
use coreward_fleet::records::Records;

const SERVER_COUNT: usize = 3;
const RETIRE_AFTER: Duration = Duration::from_secs(1000);

fn config(more: &str, service: &str) -> FleetConfig {
    let mut text = format!("max_connection_lifetime = \"1000s\"\n{more}");
    for n in 0..SERVER_COUNT {
        text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\n", n + 1);
    }
    text += &format!("[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n{service}");
    FleetConfig::parse(&Source::from_text("fleet.toml", &text)).unwrap()
}

/// Load balancer or agent. The state of its data plane outlives its stream.
struct Peer<S> {
    keys: Option<FleetKeys>,
    stream: Option<Stream<S>>,
}

struct Stream<S> {
    session: S,
    /// Configurations that have been sent, but not received yet: generation and keys.
    inbox: VecDeque<(u64, FleetKeys)>,
    confirmed_generation: u64,
}

impl<S> Peer<S> {
    fn new() -> Self {
        Self { keys: None, stream: None }
    }

    fn receive(&mut self) {
        if let Some(stream) = &mut self.stream
            && let Some((generation, keys)) = stream.inbox.pop_front()
        {
            stream.confirmed_generation = generation;
            self.keys = Some(keys);
        }
    }

    fn send(&mut self, configuration: (u64, FleetKeys)) {
        if let Some(stream) = &mut self.stream {
            stream.inbox.push_back(configuration);
        }
    }
}

struct Harness {
    config: FleetConfig,
    records: Records,
    controller: Controller,
    now: Duration,
    balancers: Vec<Peer<u64>>,
    agents: Vec<Peer<Session>>,
    sequence: u64,
    rotations: u64,
}

impl Harness {
    fn new(config: FleetConfig) -> Self {
        let mut records = Records::generate(Duration::ZERO, &mut seeded_rng(5, 0));
        records.apply(&config, Duration::ZERO, &mut seeded_rng(6, 0)).unwrap();
        let controller = Controller::new(Fleet::new(&config, &records));
        let agents = (0..SERVER_COUNT).map(|_| Peer::new()).collect();
        let balancers = vec![Peer::new(), Peer::new()];
        Self { config, records, controller, now: Duration::ZERO, balancers, agents, sequence: 0, rotations: 0 }
    }

    fn now(&self) -> Now {
        Now { monotonic: self.now, wall: self.now, record: self.now }
    }

    fn newest(&self) -> (u64, FleetKeys) {
        (self.records.generation, self.records.key_ring.keys)
    }

    /// Puts the records in force, and sends the new configuration to all connected peers, which receive it later.
    fn configure(&mut self) {
        self.records.generation += 1;
        self.controller.configure(Fleet::new(&self.config, &self.records));
        let newest = self.newest();
        self.balancers.iter_mut().for_each(|balancer| balancer.send(newest));
        self.agents.iter_mut().for_each(|agent| agent.send(newest));
    }

    fn step(&mut self, step: KeyStep) {
        let (generation, random) = (self.records.generation + 1, &mut seeded_rng(self.rotations, 9));
        match step {
            KeyStep::Announce { forced } => {
                self.rotations += u64::from(self.records.key_ring.phase == KeyPhase::Steady);
                self.records.key_ring.announce(forced, generation, random);
            }
            KeyStep::Switch => self.records.key_ring.switch(self.now, generation),
        }
        self.configure();
    }

    fn connect_balancer(&mut self, n: usize) {
        if self.balancers[n].stream.is_some() {
            return;
        }
        let name = format!("lb{n}");
        let session = self.controller.register_load_balancer(&name, self.now()).unwrap();
        let inbox = VecDeque::new();
        self.balancers[n].stream = Some(Stream { session, inbox, confirmed_generation: 0 });
        if self.records.register_load_balancer(&name, None) {
            self.configure();
        } else {
            let newest = self.newest();
            self.balancers[n].send(newest);
        }
    }

    fn disconnect_balancer(&mut self, n: usize) {
        if let Some(stream) = self.balancers[n].stream.take() {
            self.controller.load_balancers.disconnect(stream.session, self.now());
            self.records.record_disconnect(&format!("lb{n}"), self.now);
        }
    }

    fn connect_agent(&mut self, n: usize) {
        if self.agents[n].stream.is_some() {
            return;
        }
        let session = self.controller.register(&format!("s{n}"), "test", self.now()).unwrap();
        let inbox = VecDeque::from([self.newest()]);
        self.agents[n].stream = Some(Stream { session, inbox, confirmed_generation: 0 });
    }

    fn disconnect_agent(&mut self, n: usize) {
        if let Some(stream) = self.agents[n].stream.take() {
            self.controller.disconnect(&stream.session);
        }
    }

    fn confirm(&mut self) {
        self.now += Duration::from_millis(100);
        self.sequence += 1;
        let now = self.now();
        for balancer in &self.balancers {
            if let Some(stream) = &balancer.stream {
                let state = v1::LoadBalancerState {
                    configuration_generation: stream.confirmed_generation,
                    ..Default::default()
                };
                self.controller.record_load_balancer_state(stream.session, state, now);
            }
        }
        for agent in &self.agents {
            if let Some(stream) = &agent.stream {
                let report = report(self.sequence, now, stream.confirmed_generation);
                self.controller.report(&stream.session, Ok(report), now).unwrap();
            }
        }
    }

    /// Replaces the controller by a new one with the same records, and without connections.
    fn restart_controller(&mut self) {
        (0..self.balancers.len()).for_each(|n| self.disconnect_balancer(n));
        (0..SERVER_COUNT).for_each(|n| self.disconnect_agent(n));
        self.records.generation += 1;
        self.controller = Controller::new(Fleet::new(&self.config, &self.records));
    }

    fn connect_all(&mut self) {
        (0..self.balancers.len()).for_each(|n| self.connect_balancer(n));
        (0..SERVER_COUNT).for_each(|n| self.connect_agent(n));
    }

    /// Delivers and confirms all configurations, until none is left.
    fn settle(&mut self) {
        self.connect_all();
        for _ in 0..100 {
            self.balancers.iter_mut().for_each(Peer::receive);
            self.agents.iter_mut().for_each(Peer::receive);
        }
        self.confirm();
    }

    /// Returns whether every load balancer that was ever configured has the keys of all stamps.
    fn is_every_stamp_readable(&self) -> bool {
        let stamps = self.agents.iter().filter_map(|agent| agent.keys).map(|keys| keys.current.get());
        let stamping = self.agents.iter().filter_map(|agent| agent.keys).zip(stamps);
        let holds = |balancer: &Peer<u64>, slot: usize, keys: &FleetKeys| {
            balancer.keys.is_none_or(|held| held.keys[slot] == keys.keys[slot])
        };
        stamping.into_iter().all(|(keys, slot)| self.balancers.iter().all(|balancer| holds(balancer, slot, &keys)))
    }

    fn apply_event(&mut self, event: u8, n: usize) {
        let (balancer, agent) = (n % self.balancers.len(), n % SERVER_COUNT);
        match event {
            0..3 => self.balancers[balancer].receive(),
            3..6 => self.agents[agent].receive(),
            6..9 => self.confirm(),
            9 => self.disconnect_balancer(balancer),
            10 => self.connect_balancer(balancer),
            11 => self.disconnect_agent(agent),
            12 => self.connect_agent(agent),
            13 => {
                if let Ok(step) = self.controller.requested_key_step(false, self.now()) {
                    self.step(step);
                }
            }
            14 | 15 => {
                if let Ok(Some(step)) = self.controller.due_key_step(self.now()) {
                    self.step(step);
                }
            }
            16 => self.now += RETIRE_AFTER,
            17 if self.balancers.len() < 4 => self.balancers.push(Peer::new()),
            18 if n.is_multiple_of(8) => self.restart_controller(),
            _ => self.connect_all(),
        }
    }
}

fn report(sequence: u64, now: Now, configuration_generation: u64) -> Report {
    let time_to_live = Duration::from_millis(1);
    Report { time_to_live, configuration_generation, ..plain_report(sequence, now, &[0]) }
}

/// Returns a harness in which all peers are connected and have confirmed, and the key is old enough to rotate.
fn settled_harness(more: &str, service: &str) -> Harness {
    let mut harness = Harness::new(config(more, service));
    harness.settle();
    harness.now += RETIRE_AFTER;
    harness
}

/// Returns a settled harness after a first rotation: a fleet's first keys need no confirmation.
fn rotated(more: &str) -> Harness {
    let mut harness = settled_harness(more, "");
    harness.step(KeyStep::Announce { forced: false });
    harness.settle();
    harness.step(KeyStep::Switch);
    harness.settle();
    harness.now += RETIRE_AFTER;
    harness
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn no_server_stamps_with_a_key_that_a_load_balancer_lacks(
        events in prop::collection::vec((0u8..20, any::<u8>()), 1..400),
    ) {
        let mut harness = Harness::new(config("key_rotation = \"1h\"\n", ""));
        for (event, n) in events {
            harness.apply_event(event, n.into());
            prop_assert!(harness.is_every_stamp_readable(), "after event {event} of {n}");
        }
        // A rotation completes when all peers are back.
        let before = harness.rotations;
        for _ in 0..4 {
            harness.settle();
            prop_assert!(harness.is_every_stamp_readable());
            harness.now += RETIRE_AFTER;
            if let Ok(step) = harness.controller.requested_key_step(false, harness.now()) {
                harness.step(step);
            }
        }
        prop_assert!(harness.rotations > before);
    }
}

#[test]
fn rotation_has_two_phases_and_changes_the_stamping_key() {
    let mut harness = settled_harness("", "");
    let first = harness.records.key_ring.clone();
    let step = harness.controller.requested_key_step(false, harness.now()).unwrap();
    assert_eq!(step, KeyStep::Announce { forced: false });
    harness.step(step);
    let announced = harness.records.key_ring.clone();
    assert_eq!(announced.keys.keys[0], first.keys.keys[0]);
    assert_ne!(announced.keys.keys[1], first.keys.keys[1]);
    assert_eq!(announced.keys.current, first.keys.current);
    assert_eq!(harness.controller.due_key_step(harness.now()), Ok(None), "no daemon has confirmed it");
    let status = harness.controller.keys(harness.now());
    assert_eq!((status.phase, status.waiting_for.len()), (ShownPhase::Announced, 2 + SERVER_COUNT));
    harness.settle();
    assert_eq!(harness.controller.due_key_step(harness.now()), Ok(Some(KeyStep::Switch)));
    harness.step(KeyStep::Switch);
    let switched = harness.records.key_ring.clone();
    assert_eq!((switched.keys.keys, switched.keys.current.get()), (announced.keys.keys, 1));
    assert_eq!(harness.controller.keys(harness.now()).phase, ShownPhase::Steady);
    assert!(harness.is_every_stamp_readable());
}

#[test]
fn rotation_survives_a_restart_in_both_phases() {
    let mut harness = settled_harness("", "");
    harness.step(KeyStep::Announce { forced: false });
    let announced = harness.records.key_ring.keys;
    harness.restart_controller();
    assert_eq!(harness.controller.due_key_step(harness.now()), Ok(None));
    harness.settle();
    harness.restart_controller();
    // This process does not have the confirmations of the previous one.
    assert_eq!(harness.controller.due_key_step(harness.now()), Ok(None));
    harness.settle();
    let step = harness.controller.due_key_step(harness.now()).unwrap().unwrap();
    harness.step(step);
    harness.restart_controller();
    assert_eq!(harness.controller.fleet().key_ring.keys.keys, announced.keys);
    assert_eq!(harness.controller.fleet().key_ring.phase, KeyPhase::Steady);
}

#[test]
fn missing_acknowledgements_are_named() {
    let mut harness = rotated("");
    harness.disconnect_balancer(1);
    harness.disconnect_agent(2);
    assert!(harness.controller.requested_key_step(false, harness.now()).is_ok());
    harness.restart_controller();
    harness.connect_balancer(0);
    harness.connect_agent(0);
    harness.connect_agent(1);
    (0..10).for_each(|_| harness.balancers[0].receive());
    (0..2).for_each(|n| harness.agents[n].receive());
    harness.confirm();
    let refused = harness.controller.requested_key_step(false, harness.now()).unwrap_err();
    let generation = harness.records.key_ring.generation;
    assert_eq!(
        refused.to_string(),
        format!(
            "load balancer lb1, the agent of s2 have not confirmed configuration {generation}, which brought the keys \
             in \
             force: expected all to (--force continues without those that are not connected: their connections may \
             break)"
        )
    );
    assert_eq!(harness.controller.requested_key_step(true, harness.now()), Ok(KeyStep::Announce { forced: true }));
    // Forced later: the first attempt waits for the two.
    harness.step(KeyStep::Announce { forced: false });
    (0..10).for_each(|_| harness.balancers[0].receive());
    (0..2).for_each(|n| (0..10).for_each(|_| harness.agents[n].receive()));
    harness.confirm();
    let refused = harness.controller.requested_key_step(false, harness.now()).unwrap_err();
    assert!(matches!(&refused, RotationError::UnderWay { peers: who, .. } if who.len() == 2), "{refused}");
    assert!(refused.to_string().starts_with("a rotation is under way: load balancer lb1, the agent of s2 have not"));
    assert_eq!(harness.controller.due_key_step(harness.now()), Ok(None));
    assert_eq!(harness.controller.requested_key_step(true, harness.now()), Ok(KeyStep::Switch));
}

#[test]
fn young_key_is_not_rotated_without_force() {
    let mut harness = settled_harness("", "");
    harness.step(KeyStep::Announce { forced: false });
    harness.settle();
    harness.step(KeyStep::Switch);
    harness.settle();
    harness.now += Duration::from_secs(100);
    let refused = harness.controller.requested_key_step(false, harness.now()).unwrap_err();
    assert!(matches!(refused, RotationError::KeyTooYoung { expected: RETIRE_AFTER, .. }));
    assert_eq!(
        refused.to_string(),
        "the key in force is 100 s old: expected at least 1000 s (`max_connection_lifetime`), as connections that have \
         been \
         silent since before it would break (--force does it all the same)"
    );
    assert!(harness.controller.requested_key_step(true, harness.now()).is_ok());
}

#[test]
fn schedule_begins_a_rotation() {
    let mut harness = rotated("key_rotation = \"1h\"\n");
    assert_eq!(harness.controller.due_key_step(harness.now()), Ok(None), "1000 s are no hour");
    harness.now += Duration::from_secs(2600);
    assert_eq!(harness.controller.due_key_step(harness.now()), Ok(Some(KeyStep::Announce { forced: false })));
    harness.restart_controller();
    assert!(matches!(harness.controller.due_key_step(harness.now()), Err(RotationError::Unconfirmed { .. })));
}

#[test]
fn rotation_does_not_wait_for_servers_that_do_not_stamp() {
    let mut harness = Harness::new(config("", "timestamps = \"off\"\n"));
    harness.connect_balancer(0);
    harness.balancers[0].receive();
    harness.now += RETIRE_AFTER;
    harness.confirm();
    assert_eq!(harness.controller.requested_key_step(false, harness.now()), Ok(KeyStep::Announce { forced: false }));
}

#[test]
fn forced_rotation_waits_for_daemons_of_a_new_controller() {
    let mut harness = rotated("");
    harness.step(KeyStep::Announce { forced: true });
    harness.restart_controller();
    let started =
        |seconds: u64| Now { monotonic: Duration::from_secs(seconds), wall: harness.now, record: harness.now };
    assert_eq!(harness.controller.due_key_step(started(4)), Ok(None));
    assert_eq!(harness.controller.due_key_step(started(5)), Ok(Some(KeyStep::Switch)));
}
