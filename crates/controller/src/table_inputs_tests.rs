//! Tests that cached inputs of tables equal inputs that are read again, after any changes.

use std::collections::BTreeMap;
use std::time::Duration;

use coreward_config::TomlSource;
use coreward_model::ServerId;
use coreward_model::health::{AllServersDownTreatment, HealthVerdict};
use coreward_model::policy::{PoolServer, ServerPool};
use coreward_model::rss::seeded_rng;
use coreward_wire::{HealthCheckResultsMessage, ServerCheckResult, TrafficCountsMessage, v1};
use proptest::prelude::*;

use super::service::{ServerEligibility, Service};
use super::tests::{build_plain_report, build_uniform_rss};
use super::{AgentSession, ClockReadings, Controller};
use coreward_fleet::config::FleetConfig;
use coreward_fleet::fleet::Fleet;
use coreward_fleet::records::FleetRecords;

const SERVER_COUNT: usize = 4;
const TESTED_POLICY_NAMES: [&str; 4] = ["hash", "crossrss-plus", "least", "pow2"];

/// Whether each server takes new connections, or `None` if the server is not in the document.
type ServerStates = [Option<bool>; SERVER_COUNT];

#[derive(Debug, Clone)]
enum TableInputChange {
    AgentReport {
        server: usize,
        busy_ms: u64,
        core_count: u32,
    },
    AgentDisconnect {
        server: usize,
    },
    FleetConfiguration {
        states: ServerStates,
        weight: u32,
        capacity: Option<u32>,
        has_slow_start: bool,
        fails_open: bool,
    },
    HealthCheckResults {
        is_down: [bool; SERVER_COUNT],
    },
    UnresolvedServers {
        servers: [bool; SERVER_COUNT],
    },
    OpenedConnections {
        server: usize,
        opened_connection_count: u64,
    },
    LoadBalancerLoss,
    NoChange,
}

fn any_input_change() -> impl Strategy<Value = TableInputChange> {
    let server_state = prop_oneof![1 => Just(None), 1 => Just(Some(false)), 4 => Just(Some(true))];
    let server_states = [server_state.clone(), server_state.clone(), server_state.clone(), server_state];
    let capacity = proptest::option::of(1..4u32);
    prop_oneof![
        6 => (0..SERVER_COUNT, 0..100u64, 1..3u32)
            .prop_map(|(server, busy_ms, cores)| {
                TableInputChange::AgentReport { server, busy_ms, core_count: 2 * cores }
            }),
        1 => (0..SERVER_COUNT).prop_map(|server| TableInputChange::AgentDisconnect { server }),
        2 => (server_states, 1..4u32, capacity, any::<bool>(), any::<bool>()).prop_map(
            |(states, weight, capacity, has_slow_start, fails_open)| {
                TableInputChange::FleetConfiguration { states, weight, capacity, has_slow_start, fails_open }
            }
        ),
        2 => any::<[bool; SERVER_COUNT]>().prop_map(|is_down| TableInputChange::HealthCheckResults { is_down }),
        1 => any::<[bool; SERVER_COUNT]>().prop_map(|servers| TableInputChange::UnresolvedServers { servers }),
        2 => (0..SERVER_COUNT, 1..50u64).prop_map(|(server, opened_connection_count)| {
            TableInputChange::OpenedConnections { server, opened_connection_count }
        }),
        1 => Just(TableInputChange::LoadBalancerLoss),
        2 => Just(TableInputChange::NoChange),
    ]
}

fn now_at_ms(milliseconds: u64) -> ClockReadings {
    let monotonic = Duration::from_millis(milliseconds);
    let wall = Duration::from_secs(1_700_000_000) + monotonic;
    ClockReadings { monotonic_time: monotonic, wall_time: wall, record_clock_time: wall }
}

fn config_after_change(change: &TableInputChange) -> FleetConfig {
    let TableInputChange::FleetConfiguration {
        states,
        weight,
        capacity,
        has_slow_start: slow_start,
        fails_open: fail_open,
    } = change
    else {
        unreachable!()
    };
    let mut text = String::new();
    for (n, takes_connections) in states.iter().enumerate().filter_map(|(n, state)| Some((n, (*state)?))) {
        let state = if takes_connections { "active" } else { "draining" };
        let address = format!("10.2.0.{}", n + 1);
        text += &format!("[[server]]\nname = \"s{n}\"\naddress = \"{address}\"\nid = {n}\nstate = \"{state}\"\n");
        text += &format!("weight = {weight}\n");
        text += &capacity.map(|capacity| format!("capacity = {capacity}\n")).unwrap_or_default();
    }
    for (n, policy) in TESTED_POLICY_NAMES.iter().enumerate() {
        text += &format!("[[service]]\nname = \"{policy}\"\nvip = \"10.200.0.1:{}\"\npolicy = \"{policy}\"\n", 80 + n);
        text += if *slow_start { "slow_start = \"2s\"\n" } else { "" };
        text += if *fail_open { "when_all_down = \"fail-open\"\n" } else { "" };
        text += "[service.health]\ncheck = \"tcp\"\n";
    }
    FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text)).unwrap()
}

struct TableInputsHarness {
    controller: Controller,
    records: FleetRecords,
    agent_sessions: [Option<AgentSession>; SERVER_COUNT],
    report_sequence: u64,
    balancer_session: Option<u64>,
    traffic_message: TrafficCountsMessage,
    /// Servers of each service as they were read for its newest table, by the service's name.
    table_inputs_by_service: BTreeMap<String, Vec<PoolServer>>,
}

impl TableInputsHarness {
    fn configuration_with_all_servers() -> TableInputChange {
        let server_states = [Some(true); SERVER_COUNT];
        TableInputChange::FleetConfiguration {
            states: server_states,
            weight: 1,
            capacity: None,
            has_slow_start: false,
            fails_open: false,
        }
    }

    fn new() -> Self {
        let initial_change = Self::configuration_with_all_servers();
        let mut records = FleetRecords::generate(now_at_ms(0).wall_time, &mut seeded_rng(5, 0));
        records
            .apply_document(&config_after_change(&initial_change), now_at_ms(0).wall_time, &mut seeded_rng(6, 0))
            .unwrap();
        let controller = Controller::new(Fleet::new(&config_after_change(&initial_change), &records));
        let (agent_sessions, traffic_message, table_inputs_by_service) = Default::default();
        Self {
            controller,
            records,
            agent_sessions,
            report_sequence: 0,
            balancer_session: None,
            traffic_message,
            table_inputs_by_service,
        }
    }

    /// Applies the change, makes the tables that are due, and compares their inputs with the present values.
    fn apply_change_and_check_inputs(&mut self, change: &TableInputChange, now: ClockReadings) {
        self.apply_change(change, now);
        self.controller.poll_table_inputs(now, true);
        while self.controller.make_next_due_table(now).is_some() {}
        self.assert_table_inputs_are_current(now);
    }

    /// Reports, as the load balancer, a health check result of every server for every service.
    fn report_check_results(&mut self, is_down: &[bool; SERVER_COUNT], now: ClockReadings) {
        let Some(session) = self.get_or_create_balancer_session(now) else { return };
        let service_indexes: Vec<_> =
            self.controller.services.iter().map(|service| service.configuration().index).collect();
        let targets = service_indexes.into_iter().flat_map(|index| (0..SERVER_COUNT).map(move |n| (index, n)));
        let build_check_result = |verdict| ServerCheckResult { verdict: Some(verdict), ..Default::default() };
        let check_result_of_server =
            |n: usize| build_check_result(if is_down[n] { HealthVerdict::Down } else { HealthVerdict::Up });
        let checked_servers = targets.map(|(index, n)| (index, server_id(n), check_result_of_server(n))).collect();
        self.controller.load_balancers.record_health_check_results(
            session,
            HealthCheckResultsMessage { check_results: checked_servers },
            now,
        );
    }

    /// Reports, as the load balancer, the servers whose MAC addresses are unknown.
    fn report_unresolved_servers(&mut self, is_unresolved: &[bool; SERVER_COUNT], now: ClockReadings) {
        let Some(session) = self.get_or_create_balancer_session(now) else { return };
        let unresolved_names = is_unresolved
            .iter()
            .enumerate()
            .filter(|(_, is_server_unresolved)| **is_server_unresolved)
            .map(|(n, _)| format!("s{n}"));
        let state = v1::LoadBalancerState { unresolved_servers: unresolved_names.collect(), ..Default::default() };
        self.controller.record_load_balancer_state(session, state, now);
    }

    fn apply_change(&mut self, change: &TableInputChange, now: ClockReadings) {
        match change {
            TableInputChange::AgentReport { server, busy_ms, core_count: cores } => {
                self.report_load(*server, *busy_ms, *cores, now)
            }
            TableInputChange::AgentDisconnect { server } => {
                if let Some(session) = self.agent_sessions[*server].take() {
                    self.controller.end_session(&session);
                }
            }
            TableInputChange::FleetConfiguration { .. } => {
                let config = config_after_change(change);
                if self.records.apply_document(&config, now.wall_time, &mut seeded_rng(7, 0)).is_ok() {
                    self.controller.configure(Fleet::new(&config, &self.records));
                }
            }
            TableInputChange::HealthCheckResults { is_down } => self.report_check_results(is_down, now),
            TableInputChange::UnresolvedServers { servers } => self.report_unresolved_servers(servers, now),
            TableInputChange::OpenedConnections { server, opened_connection_count } => {
                let Some(session) = self.get_or_create_balancer_session(now) else { return };
                self.traffic_message
                    .traffic_by_server
                    .entry(server_id(*server))
                    .or_default()
                    .opened_connection_count += opened_connection_count;
                self.controller.record_load_balancer_traffic(session, &self.traffic_message, now);
            }
            TableInputChange::LoadBalancerLoss => {
                if let Some(session) = self.balancer_session.take() {
                    self.controller.load_balancers.end_session(session, now);
                }
            }
            TableInputChange::NoChange => {}
        }
    }

    /// Reports a server's load. If the number of its cores has changed, the report contains a new RSS configuration.
    fn report_load(&mut self, server: usize, busy_ms: u64, core_count: u32, now: ClockReadings) {
        if self.agent_sessions[server].is_none() {
            self.agent_sessions[server] = self.controller.register_agent(&format!("s{server}"), "test", now).ok();
        }
        let Some(session) = &self.agent_sessions[server] else { return };
        self.report_sequence += 1;
        let mut report = build_plain_report(
            self.report_sequence,
            now,
            &vec![busy_ms * 1_000_000 * self.report_sequence; core_count as usize],
        );
        report.time_to_live = Duration::from_secs(2);
        report.rss_generation = u64::from(core_count);
        report.rss = Some(build_uniform_rss(128, core_count));
        report.open_connection_count = busy_ms as u32;
        let _ = self.controller.record_report(session, Ok(report), now);
    }

    fn get_or_create_balancer_session(&mut self, now: ClockReadings) -> Option<u64> {
        if self.balancer_session.is_none() {
            self.balancer_session = self.controller.register_load_balancer("lb", now).ok();
        }
        self.balancer_session
    }

    /// Returns whether the server takes new connections to the service, according to the present inputs.
    fn is_eligible(controller: &Controller, service: &Service, id: ServerId, now: ClockReadings) -> bool {
        let compute_eligibility = |id: ServerId| controller.eligibility(service.configuration(), id, now);
        let mut member_ids = service.configuration().members.keys();
        let fails_open = service.configuration().when_all_down == AllServersDownTreatment::FailOpen
            && member_ids.all(|id| compute_eligibility(*id) != ServerEligibility::Eligible)
            && compute_eligibility(id) == ServerEligibility::Unhealthy;
        compute_eligibility(id) == ServerEligibility::Eligible || fails_open
    }

    /// Compares the inputs of each service's newest table with the present values of the same inputs.
    fn assert_table_inputs_are_current(&mut self, now: ClockReadings) {
        for service in &self.controller.services {
            let service_name = &service.configuration().name;
            let current_pool = self.controller.compute_pool(service, now);
            let current_inputs = comparable_pool_servers(service, &current_pool);
            // A dropped pool is read again for the next table, which is not due yet.
            let table_inputs = self.table_inputs_by_service.entry(service_name.clone()).or_default();
            if let Some(pool) = service.cached_pool() {
                *table_inputs = comparable_pool_servers(service, pool);
            }
            assert_eq!(*table_inputs, current_inputs, "{service_name}");
            for server in table_inputs {
                assert_eq!(
                    server.is_eligible,
                    Self::is_eligible(&self.controller, service, server.id, now),
                    "{service_name} {}",
                    server.id
                );
            }
        }
    }
}

fn server_id(server: usize) -> ServerId {
    ServerId::try_from(server as u64).unwrap()
}

/// Returns the pool's servers, without the inputs that the service's policy ignores, and without the counts that each
/// table restarts.
fn comparable_pool_servers(service: &Service, pool: &ServerPool) -> Vec<PoolServer> {
    let to_comparable_server = |server: PoolServer| {
        let server = PoolServer { has_new_load: true, ..server };
        let server = match service.reads_traffic() {
            true => server,
            false => PoolServer { traffic: None, open_connection_count: 0, ..server },
        };
        if service.reads_loads() { server } else { PoolServer { loads: None, rss: None, ..server } }
    };
    pool.servers().iter().cloned().map(to_comparable_server).collect()
}

/// A table in which a server begins its slow start has the new fraction as an input, and not the earlier value 1.
#[test]
fn slow_start_ends_on_reconfiguration_or_timeout() {
    let server_configuration_change =
        |second_state: Option<bool>, slow_start: bool| TableInputChange::FleetConfiguration {
            states: [Some(true), second_state, None, None],
            weight: 1,
            capacity: None,
            has_slow_start: slow_start,
            fails_open: false,
        };
    for (next, pause) in [(server_configuration_change(Some(true), false), 1), (TableInputChange::NoChange, 2_500)] {
        let mut harness = TableInputsHarness::new();
        harness.apply_change_and_check_inputs(&server_configuration_change(None, true), now_at_ms(1));
        harness.apply_change_and_check_inputs(&server_configuration_change(Some(true), true), now_at_ms(2));
        harness.apply_change_and_check_inputs(&next, now_at_ms(2 + pause));
    }
}

/// A new configuration removes load balancers that are neither on record nor connected, and their counts.
#[test]
fn traffic_of_a_removed_load_balancer_leaves_the_table() {
    let mut harness = TableInputsHarness::new();
    harness.apply_change_and_check_inputs(
        &TableInputChange::OpenedConnections { server: 1, opened_connection_count: 1 },
        now_at_ms(1),
    );
    harness.apply_change_and_check_inputs(
        &TableInputChange::AgentReport { server: 1, busy_ms: 0, core_count: 2 },
        now_at_ms(2),
    );
    harness.apply_change_and_check_inputs(
        &TableInputChange::OpenedConnections { server: 1, opened_connection_count: 1 },
        now_at_ms(3),
    );
    harness.apply_change_and_check_inputs(&TableInputChange::LoadBalancerLoss, now_at_ms(4));
    harness.apply_change_and_check_inputs(&TableInputsHarness::configuration_with_all_servers(), now_at_ms(5));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn cached_table_inputs_equal_recomputed_inputs(
        changes in proptest::collection::vec((any_input_change(), 1..3_000u64), 1..40),
    ) {
        let mut harness = TableInputsHarness::new();
        let mut now_ms = 0;
        for (change, pause) in changes {
            now_ms += pause;
            harness.apply_change_and_check_inputs(&change, now_at_ms(now_ms));
        }
    }
}
