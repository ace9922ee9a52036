//! Tests in virtual time of the order in which a key rotation is rolled out. Load balancers, agents and the controller
//! connect, disconnect and are late in any order. No server ever stamps with a key that some load balancer lacks.

use std::collections::VecDeque;
use std::time::Duration;

use coreward_api::types::KeyPhase as ShownPhase;
use coreward_config::TomlSource;
use coreward_model::cookie::FleetCookieKeys;
use coreward_model::rss::seeded_rng;
use coreward_wire::{AgentReport, v1};
use proptest::prelude::*;

use super::rotation::{KeyRotationError, KeyRotationStep};
use super::tests::build_plain_report;
use super::{AgentSession, ClockReadings, Controller};
use coreward_fleet::config::FleetConfig;
use coreward_fleet::fleet::Fleet;
use coreward_fleet::key_ring::KeyRotationPhase;
use coreward_fleet::records::FleetRecords;

const SERVER_COUNT: usize = 3;
const MAX_CONNECTION_LIFETIME: Duration = Duration::from_secs(1000);

fn fleet_config(additional_toml: &str, service_toml: &str) -> FleetConfig {
    let mut text = format!("max_connection_lifetime = \"1000s\"\n{additional_toml}");
    for n in 0..SERVER_COUNT {
        text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{}\"\nid = {n}\n", n + 1);
    }
    text += &format!("[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n{service_toml}");
    FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap()
}

/// Load balancer or agent. The state of its data plane outlives its stream to the controller.
struct FakePeer<S> {
    keys_in_force: Option<FleetCookieKeys>,
    stream: Option<FakeStream<S>>,
}

struct FakeStream<S> {
    session: S,
    /// Configurations that have been sent but not received yet, each with its generation and keys.
    undelivered_configurations: VecDeque<(u64, FleetCookieKeys)>,
    confirmed_config_generation: u64,
}

impl<S> FakePeer<S> {
    fn new() -> Self {
        Self { keys_in_force: None, stream: None }
    }

    fn receive_configuration(&mut self) {
        if let Some(stream) = &mut self.stream
            && let Some((generation, keys)) = stream.undelivered_configurations.pop_front()
        {
            stream.confirmed_config_generation = generation;
            self.keys_in_force = Some(keys);
        }
    }

    fn send_configuration(&mut self, configuration: (u64, FleetCookieKeys)) {
        if let Some(stream) = &mut self.stream {
            stream.undelivered_configurations.push_back(configuration);
        }
    }
}

struct KeyRotationHarness {
    config: FleetConfig,
    records: FleetRecords,
    controller: Controller,
    monotonic_time: Duration,
    load_balancers: Vec<FakePeer<u64>>,
    agents: Vec<FakePeer<AgentSession>>,
    report_sequence: u64,
    started_rotation_count: u64,
}

impl KeyRotationHarness {
    fn new(config: FleetConfig) -> Self {
        let mut records = FleetRecords::generate(Duration::ZERO, &mut seeded_rng(5, 0));
        records.apply_document(&config, Duration::ZERO, &mut seeded_rng(6, 0)).unwrap();
        let controller = Controller::new(Fleet::new(&config, &records));
        let agents = (0..SERVER_COUNT).map(|_| FakePeer::new()).collect();
        let load_balancers = vec![FakePeer::new(), FakePeer::new()];
        Self {
            config,
            records,
            controller,
            monotonic_time: Duration::ZERO,
            load_balancers,
            agents,
            report_sequence: 0,
            started_rotation_count: 0,
        }
    }

    fn now(&self) -> ClockReadings {
        ClockReadings {
            monotonic_time: self.monotonic_time,
            wall_time: self.monotonic_time,
            record_clock_time: self.monotonic_time,
        }
    }

    fn newest_keys(&self) -> (u64, FleetCookieKeys) {
        (self.records.generation, self.records.key_ring.keys)
    }

    /// Applies the records, and sends the new configuration to all connected peers, which receive it later.
    fn configure_and_send_keys(&mut self) {
        self.records.generation += 1;
        self.controller.configure(Fleet::new(&self.config, &self.records));
        let newest_keys = self.newest_keys();
        self.load_balancers.iter_mut().for_each(|balancer| balancer.send_configuration(newest_keys));
        self.agents.iter_mut().for_each(|agent| agent.send_configuration(newest_keys));
    }

    fn take_rotation_step(&mut self, step: KeyRotationStep) {
        let (generation, random) = (self.records.generation + 1, &mut seeded_rng(self.started_rotation_count, 9));
        match step {
            KeyRotationStep::Announce { is_forced } => {
                self.started_rotation_count += u64::from(self.records.key_ring.phase == KeyRotationPhase::Steady);
                self.records.key_ring.announce_next_key(is_forced, generation, random);
            }
            KeyRotationStep::Switch => self.records.key_ring.switch_to_next_key(self.monotonic_time, generation),
        }
        self.configure_and_send_keys();
    }

    fn connect_balancer(&mut self, n: usize) {
        if self.load_balancers[n].stream.is_some() {
            return;
        }
        let name = format!("lb{n}");
        let session = self.controller.register_load_balancer(&name, self.now()).unwrap();
        let undelivered_configurations = VecDeque::new();
        self.load_balancers[n].stream =
            Some(FakeStream { session, undelivered_configurations, confirmed_config_generation: 0 });
        if self.records.register_load_balancer(&name, None) {
            self.configure_and_send_keys();
        } else {
            let newest_keys = self.newest_keys();
            self.load_balancers[n].send_configuration(newest_keys);
        }
    }

    fn disconnect_balancer(&mut self, n: usize) {
        if let Some(stream) = self.load_balancers[n].stream.take() {
            self.controller.load_balancers.end_session(stream.session, self.now());
            self.records.record_load_balancer_disconnect(&format!("lb{n}"), self.monotonic_time);
        }
    }

    fn connect_agent(&mut self, n: usize) {
        if self.agents[n].stream.is_some() {
            return;
        }
        let session = self.controller.register_agent(&format!("s{n}"), "test", self.now()).unwrap();
        let undelivered_configurations = VecDeque::from([self.newest_keys()]);
        self.agents[n].stream =
            Some(FakeStream { session, undelivered_configurations, confirmed_config_generation: 0 });
    }

    fn disconnect_agent(&mut self, n: usize) {
        if let Some(stream) = self.agents[n].stream.take() {
            self.controller.end_session(&stream.session);
        }
    }

    fn confirm_all_configurations(&mut self) {
        self.monotonic_time += Duration::from_millis(100);
        self.report_sequence += 1;
        let now = self.now();
        for balancer in &self.load_balancers {
            if let Some(stream) = &balancer.stream {
                let state = v1::LoadBalancerState {
                    configuration_generation: stream.confirmed_config_generation,
                    ..Default::default()
                };
                self.controller.record_load_balancer_state(stream.session, state, now);
            }
        }
        for agent in &self.agents {
            if let Some(stream) = &agent.stream {
                let report = report_with_generation(self.report_sequence, now, stream.confirmed_config_generation);
                self.controller.record_report(&stream.session, Ok(report), now).unwrap();
            }
        }
    }

    /// Replaces the controller by a new one with the same records, and disconnects all peers.
    fn restart_controller(&mut self) {
        (0..self.load_balancers.len()).for_each(|n| self.disconnect_balancer(n));
        (0..SERVER_COUNT).for_each(|n| self.disconnect_agent(n));
        self.records.generation += 1;
        self.controller = Controller::new(Fleet::new(&self.config, &self.records));
    }

    fn connect_all_peers(&mut self) {
        (0..self.load_balancers.len()).for_each(|n| self.connect_balancer(n));
        (0..SERVER_COUNT).for_each(|n| self.connect_agent(n));
    }

    /// Delivers and confirms all configurations until none is left.
    fn deliver_and_confirm_all_configurations(&mut self) {
        self.connect_all_peers();
        for _ in 0..100 {
            self.load_balancers.iter_mut().for_each(FakePeer::receive_configuration);
            self.agents.iter_mut().for_each(FakePeer::receive_configuration);
        }
        self.confirm_all_configurations();
    }

    /// Returns whether every load balancer that was ever configured has each key that a server stamps with.
    fn are_all_stamps_readable(&self) -> bool {
        let stamping_key_slots =
            self.agents.iter().filter_map(|agent| agent.keys_in_force).map(|keys| keys.current_key_index.get());
        let stamping_keys = self.agents.iter().filter_map(|agent| agent.keys_in_force).zip(stamping_key_slots);
        let balancer_has_key = |balancer: &FakePeer<u64>, slot: usize, keys: &FleetCookieKeys| {
            balancer.keys_in_force.is_none_or(|balancer_keys| balancer_keys.keys[slot] == keys.keys[slot])
        };
        stamping_keys
            .into_iter()
            .all(|(keys, slot)| self.load_balancers.iter().all(|balancer| balancer_has_key(balancer, slot, &keys)))
    }

    fn apply_numbered_event(&mut self, event: u8, n: usize) {
        let (balancer, agent) = (n % self.load_balancers.len(), n % SERVER_COUNT);
        match event {
            0..3 => self.load_balancers[balancer].receive_configuration(),
            3..6 => self.agents[agent].receive_configuration(),
            6..9 => self.confirm_all_configurations(),
            9 => self.disconnect_balancer(balancer),
            10 => self.connect_balancer(balancer),
            11 => self.disconnect_agent(agent),
            12 => self.connect_agent(agent),
            13 => {
                if let Ok(step) = self.controller.requested_rotation_step(false, self.now()) {
                    self.take_rotation_step(step);
                }
            }
            14 | 15 => {
                if let Ok(Some(step)) = self.controller.due_rotation_step(self.now()) {
                    self.take_rotation_step(step);
                }
            }
            16 => self.monotonic_time += MAX_CONNECTION_LIFETIME,
            17 if self.load_balancers.len() < 4 => self.load_balancers.push(FakePeer::new()),
            18 if n.is_multiple_of(8) => self.restart_controller(),
            _ => self.connect_all_peers(),
        }
    }
}

fn report_with_generation(sequence: u64, now: ClockReadings, configuration_generation: u64) -> AgentReport {
    let time_to_live = Duration::from_millis(1);
    AgentReport { time_to_live, configuration_generation, ..build_plain_report(sequence, now, &[0]) }
}

/// Returns a harness in which all peers are connected and have confirmed the configuration, and the key is old enough
/// to rotate.
fn harness_ready_to_rotate(additional_toml: &str, service_toml: &str) -> KeyRotationHarness {
    let mut harness = KeyRotationHarness::new(fleet_config(additional_toml, service_toml));
    harness.deliver_and_confirm_all_configurations();
    harness.monotonic_time += MAX_CONNECTION_LIFETIME;
    harness
}

/// Returns a settled harness after a first rotation, because a fleet's first keys need no confirmation.
fn harness_after_rotation(additional_toml: &str) -> KeyRotationHarness {
    let mut harness = harness_ready_to_rotate(additional_toml, "");
    harness.take_rotation_step(KeyRotationStep::Announce { is_forced: false });
    harness.deliver_and_confirm_all_configurations();
    harness.take_rotation_step(KeyRotationStep::Switch);
    harness.deliver_and_confirm_all_configurations();
    harness.monotonic_time += MAX_CONNECTION_LIFETIME;
    harness
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn no_server_stamps_with_key_unknown_to_load_balancer(
        events in prop::collection::vec((0u8..20, any::<u8>()), 1..400),
    ) {
        let mut harness = KeyRotationHarness::new(fleet_config("key_rotation = \"1h\"\n", ""));
        for (event, n) in events {
            harness.apply_numbered_event(event, n.into());
            prop_assert!(harness.are_all_stamps_readable(), "after event {event} of {n}");
        }
        // A rotation completes when all peers are back.
        let previous_rotation_count = harness.started_rotation_count;
        for _ in 0..4 {
            harness.deliver_and_confirm_all_configurations();
            prop_assert!(harness.are_all_stamps_readable());
            harness.monotonic_time += MAX_CONNECTION_LIFETIME;
            if let Ok(step) = harness.controller.requested_rotation_step(false, harness.now()) {
                harness.take_rotation_step(step);
            }
        }
        prop_assert!(harness.started_rotation_count > previous_rotation_count);
    }
}

#[test]
fn key_rotation_has_two_phases_and_changes_the_stamping_key() {
    let mut harness = harness_ready_to_rotate("", "");
    let first_key_ring = harness.records.key_ring.clone();
    let key_step = harness.controller.requested_rotation_step(false, harness.now()).unwrap();
    assert_eq!(key_step, KeyRotationStep::Announce { is_forced: false });
    harness.take_rotation_step(key_step);
    let announced_key_ring = harness.records.key_ring.clone();
    assert_eq!(announced_key_ring.keys.keys[0], first_key_ring.keys.keys[0]);
    assert_ne!(announced_key_ring.keys.keys[1], first_key_ring.keys.keys[1]);
    assert_eq!(announced_key_ring.keys.current_key_index, first_key_ring.keys.current_key_index);
    assert_eq!(harness.controller.due_rotation_step(harness.now()), Ok(None), "no daemon has confirmed it");
    let keys_status = harness.controller.keys(harness.now());
    assert_eq!(
        (keys_status.rotation_phase, keys_status.pending_peers.len()),
        (ShownPhase::Announced, 2 + SERVER_COUNT)
    );
    harness.deliver_and_confirm_all_configurations();
    assert_eq!(harness.controller.due_rotation_step(harness.now()), Ok(Some(KeyRotationStep::Switch)));
    harness.take_rotation_step(KeyRotationStep::Switch);
    let switched_key_ring = harness.records.key_ring.clone();
    assert_eq!(
        (switched_key_ring.keys.keys, switched_key_ring.keys.current_key_index.get()),
        (announced_key_ring.keys.keys, 1)
    );
    assert_eq!(harness.controller.keys(harness.now()).rotation_phase, ShownPhase::Steady);
    assert!(harness.are_all_stamps_readable());
}

#[test]
fn key_rotation_survives_a_restart_in_both_phases() {
    let mut harness = harness_ready_to_rotate("", "");
    harness.take_rotation_step(KeyRotationStep::Announce { is_forced: false });
    let announced_keys = harness.records.key_ring.keys;
    harness.restart_controller();
    assert_eq!(harness.controller.due_rotation_step(harness.now()), Ok(None));
    harness.deliver_and_confirm_all_configurations();
    harness.restart_controller();
    // The restarted controller does not have the confirmations that the previous process received.
    assert_eq!(harness.controller.due_rotation_step(harness.now()), Ok(None));
    harness.deliver_and_confirm_all_configurations();
    let key_step = harness.controller.due_rotation_step(harness.now()).unwrap().unwrap();
    harness.take_rotation_step(key_step);
    harness.restart_controller();
    assert_eq!(harness.controller.fleet().key_ring.keys.keys, announced_keys.keys);
    assert_eq!(harness.controller.fleet().key_ring.phase, KeyRotationPhase::Steady);
}

#[test]
fn missing_key_confirmations_are_listed_by_name() {
    let mut harness = harness_after_rotation("");
    harness.disconnect_balancer(1);
    harness.disconnect_agent(2);
    assert!(harness.controller.requested_rotation_step(false, harness.now()).is_ok());
    harness.restart_controller();
    harness.connect_balancer(0);
    harness.connect_agent(0);
    harness.connect_agent(1);
    (0..10).for_each(|_| harness.load_balancers[0].receive_configuration());
    (0..2).for_each(|n| harness.agents[n].receive_configuration());
    harness.confirm_all_configurations();
    let rejection = harness.controller.requested_rotation_step(false, harness.now()).unwrap_err();
    let generation = harness.records.key_ring.generation;
    assert_eq!(
        rejection.to_string(),
        format!(
            "load balancer lb1, the agent of s2 have not confirmed configuration {generation}, which brought the keys \
             in force: expected all to (--force continues without those that are not connected: their connections may \
             break)"
        )
    );
    assert_eq!(
        harness.controller.requested_rotation_step(true, harness.now()),
        Ok(KeyRotationStep::Announce { is_forced: true })
    );
    // If the rotation is forced later, the first attempt waits for the two.
    harness.take_rotation_step(KeyRotationStep::Announce { is_forced: false });
    (0..10).for_each(|_| harness.load_balancers[0].receive_configuration());
    (0..2).for_each(|n| (0..10).for_each(|_| harness.agents[n].receive_configuration()));
    harness.confirm_all_configurations();
    let rejection = harness.controller.requested_rotation_step(false, harness.now()).unwrap_err();
    assert!(
        matches!(&rejection, KeyRotationError::RotationUnderWay { peers: who, .. } if who.len() == 2),
        "{rejection}"
    );
    assert!(rejection.to_string().starts_with("a rotation is under way: load balancer lb1, the agent of s2 have not"));
    assert_eq!(harness.controller.due_rotation_step(harness.now()), Ok(None));
    assert_eq!(harness.controller.requested_rotation_step(true, harness.now()), Ok(KeyRotationStep::Switch));
}

#[test]
fn young_key_is_not_rotated_without_force() {
    let mut harness = harness_ready_to_rotate("", "");
    harness.take_rotation_step(KeyRotationStep::Announce { is_forced: false });
    harness.deliver_and_confirm_all_configurations();
    harness.take_rotation_step(KeyRotationStep::Switch);
    harness.deliver_and_confirm_all_configurations();
    harness.monotonic_time += Duration::from_secs(100);
    let rejection = harness.controller.requested_rotation_step(false, harness.now()).unwrap_err();
    assert!(matches!(rejection, KeyRotationError::KeyTooYoung { expected: MAX_CONNECTION_LIFETIME, .. }));
    assert_eq!(
        rejection.to_string(),
        "the key in force is 100 s old: expected at least 1000 s (`max_connection_lifetime`), as connections that have \
         been silent since before it would break (--force does it all the same)"
    );
    assert!(harness.controller.requested_rotation_step(true, harness.now()).is_ok());
}

#[test]
fn scheduled_key_rotation_begins_when_due() {
    let mut harness = harness_after_rotation("key_rotation = \"1h\"\n");
    assert_eq!(harness.controller.due_rotation_step(harness.now()), Ok(None), "1000 s are no hour");
    harness.monotonic_time += Duration::from_secs(2600);
    assert_eq!(
        harness.controller.due_rotation_step(harness.now()),
        Ok(Some(KeyRotationStep::Announce { is_forced: false }))
    );
    harness.restart_controller();
    assert!(matches!(
        harness.controller.due_rotation_step(harness.now()),
        Err(KeyRotationError::UnconfirmedPresentKeys { .. })
    ));
}

#[test]
fn key_rotation_does_not_wait_for_servers_that_do_not_stamp() {
    let mut harness = KeyRotationHarness::new(fleet_config("", "timestamps = \"off\"\n"));
    harness.connect_balancer(0);
    harness.load_balancers[0].receive_configuration();
    harness.monotonic_time += MAX_CONNECTION_LIFETIME;
    harness.confirm_all_configurations();
    assert_eq!(
        harness.controller.requested_rotation_step(false, harness.now()),
        Ok(KeyRotationStep::Announce { is_forced: false })
    );
}

#[test]
fn forced_rotation_waits_for_reconnections_after_controller_start() {
    let mut harness = harness_after_rotation("");
    harness.take_rotation_step(KeyRotationStep::Announce { is_forced: true });
    harness.restart_controller();
    let now_after_start = |seconds: u64| ClockReadings {
        monotonic_time: Duration::from_secs(seconds),
        wall_time: harness.monotonic_time,
        record_clock_time: harness.monotonic_time,
    };
    assert_eq!(harness.controller.due_rotation_step(now_after_start(4)), Ok(None));
    assert_eq!(harness.controller.due_rotation_step(now_after_start(5)), Ok(Some(KeyRotationStep::Switch)));
}
