//! Run of one method with one seed in a new testbed.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;

use super::method::PccMethod;
use super::timeline::{self, PccFleetChange};
use crate::connection_errors::BrokenConnectionCounts;
use crate::demo::host_cpu::HostCpuMeter;
use crate::fleet::{CoreLoadSource, Fleet, ServerAdminState, TestbedFleetOptions};
use crate::load::DelayStatisticsUs;
use crate::process::DEFAULT_WAIT_TIMEOUT;
use crate::stream_connections::client::{StreamSecondCounts, StreamWorkload};
use crate::stream_connections::server::StreamServerProcess;
use crate::topology::{Testbed, TestbedOptions, find_missing_privilege};
use crate::{instance, interrupt_flag};
use coreward_load::event_loop::now_ns;

/// Interval between the reports of an agent (ms). Servers in the Cheetah paper (NSDI'20) report at least ten times a
/// second, but this test changes the fleet at most once a second.
const REPORT_INTERVAL_MS: u32 = 200;
/// Number of the client's IP addresses. Each has ports for 50,000 connections, which are not reused.
const CLIENT_ADDRESS_COUNT: u16 = 4;
/// Time until routers detect the failure of a load balancer, after three missed BFD packets at intervals of 50 ms
/// (RFC 5880).
const FAILURE_DETECTION_TIME: Duration = Duration::from_millis(150);
/// Time from the start of the client to the start of its warm-up.
const CLIENT_START_DELAY: Duration = Duration::from_millis(500);
/// Maximum lateness at which the client may open connections (us). Beyond it, the machine is too busy for a
/// measurement.
const MAX_CONNECTION_LATENESS_US: u64 = 100_000;

#[derive(Debug, Clone, Serialize)]
pub struct PccRun {
    pub method: &'static str,
    pub seed: u64,
    /// Results of each second, counted from the start of the changes.
    pub seconds: Vec<StreamSecondCounts>,
    /// Numbers of connections completed and broken during the warm-up, before any change.
    pub warm_up: StreamSecondCounts,
    /// Number of unbroken connections that were still open at the end.
    pub open_at_end: u64,
    /// Lateness of the client, from the due time of a connection to its opening.
    pub lateness_us: DelayStatisticsUs,
    /// Busy share of the machine's CPU time during the run (%).
    pub machine_busy_pct: f64,
    /// Counters above 0 of the load balancers that existed at the end, summed by name.
    pub lb_counters: BTreeMap<String, u64>,
    /// Counters above 0 of the servers in the controller's file at the end, summed by name.
    pub server_counters: BTreeMap<String, u64>,
}

/// Warns if the client opened its connections too late for a measurement.
fn warn_if_connections_late(method: PccMethod, lateness_us: DelayStatisticsUs) {
    if lateness_us.p99 > MAX_CONNECTION_LATENESS_US {
        tracing::warn!(
            event = "machine-busy",
            method = method.name,
            p99_lateness_ms = lateness_us.p99 / 1_000,
            "the client opened 1 % of its connections at least `p99_lateness_ms` ms late: the machine is too busy for \
             a valid result"
        );
    }
}

impl PccRun {
    /// Measures one run of a method, and calls `tick` once a second. Fails without root, when a process does not start
    /// or ends early, when the machine is too busy, or when interrupted.
    pub fn measure_run(method: PccMethod, streams: &StreamWorkload, tick: &dyn Fn()) -> anyhow::Result<Self> {
        if let Some(privilege_error) = find_missing_privilege() {
            anyhow::bail!(privilege_error);
        }
        let mut env = PccTestEnv::start(method, streams.seed)?;
        let mut cpu_meter = HostCpuMeter::new()?;
        let start_ns = now_ns() + CLIENT_START_DELAY.as_nanos() as u64;
        let stream_client = env.testbed.start_stream_client(streams, Some(start_ns))?;
        cpu_meter.start_period()?;
        env.apply_timeline(streams, start_ns, tick)?;
        let report = stream_client.wait_and_report(*DEFAULT_WAIT_TIMEOUT)?;
        cpu_meter.end_period()?;
        let lateness_us = report.lateness_us;
        warn_if_connections_late(method, lateness_us);
        let status = env.fleet.query_status(&env.testbed)?;
        let load_balancers = status["load_balancers"].as_array().into_iter().flatten();
        let servers = status["servers"].as_array().into_iter().flatten();
        let (warm_up_results, seconds) = report.seconds.split_at(streams.warm_up_seconds as usize);
        Ok(Self {
            method: method.name,
            seed: streams.seed,
            seconds: seconds.to_vec(),
            warm_up: StreamSecondCounts::sum_seconds(warm_up_results),
            open_at_end: report.open_at_end,
            lateness_us,
            machine_busy_pct: cpu_meter.busy_pct(),
            lb_counters: sum_counters(load_balancers.map(|balancer| &balancer["state"]["counters"])),
            server_counters: sum_counters(servers.map(|server| &server["counters"])),
        })
    }

    pub fn total_counts(&self) -> StreamSecondCounts {
        StreamSecondCounts::sum_seconds(&self.seconds)
    }

    /// Returns the highest percentage of broken connections in any second.
    pub fn highest_broken_connection_pct(&self) -> f64 {
        self.seconds.iter().map(StreamSecondCounts::broken_connection_pct).fold(0.0, f64::max)
    }

    pub fn summary_line(&self) -> String {
        let sums = self.total_counts();
        let BrokenConnectionCounts { refused, reset, timed_out, closed_early, wrong_answer, other_errors: other } =
            sums.broken;
        format!(
            "{} (seed {}): {} completed, {} broken ({:.3} %, at most {:.2} % in a second): {reset} reset, {refused} \
             refused, {timed_out} timed out, {closed_early} closed early, {wrong_answer} wrong bytes, {other} other; \
             client late by {} us (p99), machine {:.0} % busy",
            self.method,
            self.seed,
            sums.completed,
            sums.broken.total_count(),
            sums.broken_connection_pct(),
            self.highest_broken_connection_pct(),
            self.lateness_us.p99,
            self.machine_busy_pct,
        )
    }
}

/// Testbed with all processes of a run. Fields are dropped in the order of their declaration, so processes end before
/// the testbed is removed.
struct PccTestEnv {
    fleet: Fleet,
    _stream_servers: StreamServerProcess,
    seed: u64,
    next_server_number: u16,
    /// Number of servers that have left the pool.
    departed_server_count: u64,
    testbed: Testbed,
}

impl PccTestEnv {
    fn start(method: PccMethod, seed: u64) -> anyhow::Result<Self> {
        let testbed = Testbed::create(TestbedOptions {
            instance_name: instance::unique_testbed_name("pcc")?,
            server_count: timeline::INITIAL_SERVER_COUNT
                + timeline::count_change_occurrences(PccFleetChange::AddServer),
            core_count: 1,
            has_receive_rings: true,
            load_balancer_count: timeline::INITIAL_LOAD_BALANCER_COUNT,
            client_address_count: CLIENT_ADDRESS_COUNT,
            rss_key_seed: seed,
            ..TestbedOptions::default()
        })?;
        let stream_servers = testbed.start_stream_servers()?;
        let options = TestbedFleetOptions {
            policy_name: method.policy.to_owned(),
            consistency: method.consistency,
            report_interval_ms: REPORT_INTERVAL_MS,
            makes_tables_per_interval: true,
            core_load_source: CoreLoadSource::PacedServer,
            steers_connections: false,
            ..TestbedFleetOptions::default()
        };
        let mut fleet = Fleet::start(&testbed, options).with_context(|| format!("method {}", method.name))?;
        let mut pool = fleet.server_pool().clone();
        let next_server_number = timeline::INITIAL_SERVER_COUNT + 1;
        pool.retain(|number, _| *number < next_server_number);
        fleet.set_server_pool(&testbed, pool)?;
        fleet.wait_until_ready(&testbed)?;
        Ok(Self { fleet, _stream_servers: stream_servers, seed, next_server_number, departed_server_count: 0, testbed })
    }

    /// Applies each change of the timeline when it is due, and calls `tick` once a second until the end of the run.
    fn apply_timeline(&mut self, streams: &StreamWorkload, start_ns: u64, tick: &dyn Fn()) -> anyhow::Result<()> {
        let warm_up_seconds = u64::from(streams.warm_up_seconds);
        let mut pending_changes = timeline::FLEET_CHANGES_BY_HALF_SECOND.iter().peekable();
        for half_second in 0..2 * (warm_up_seconds + u64::from(streams.seconds)) {
            interrupt_flag::sleep_until(start_ns + half_second * 500_000_000)?;
            while let Some((_, due_changes)) = pending_changes
                .next_if(|(change_half_second, _)| change_half_second + 2 * warm_up_seconds == half_second)
            {
                self.apply_fleet_changes(due_changes)?;
            }
            if half_second % 2 == 0 {
                tick();
            }
        }
        Ok(())
    }

    /// Applies `changes`, which are due at the same time, by writing the controller's file once.
    fn apply_fleet_changes(&mut self, changes: &[PccFleetChange]) -> anyhow::Result<()> {
        let mut pool = self.fleet.server_pool().clone();
        for change in changes {
            match change {
                PccFleetChange::AddServer => {
                    pool.insert(self.next_server_number, ServerAdminState::Active);
                    self.next_server_number += 1;
                }
                PccFleetChange::DrainServer => {
                    pool.insert(self.select_leaving_server(&pool), ServerAdminState::Draining);
                }
                PccFleetChange::RemoveServer => drop(pool.remove(&self.select_leaving_server(&pool))),
                PccFleetChange::AddLoadBalancer => drop(self.fleet.add_load_balancer(&mut self.testbed)?),
                PccFleetChange::KillLoadBalancer => {
                    let first_load_balancer =
                        *self.testbed.load_balancer_numbers().first().context("no load balancer is left")?;
                    self.fleet.kill_load_balancer(&mut self.testbed, first_load_balancer, FAILURE_DETECTION_TIME)?;
                }
            }
        }
        if pool == *self.fleet.server_pool() { Ok(()) } else { self.fleet.set_server_pool(&self.testbed, pool) }
    }

    fn select_leaving_server(&mut self, pool: &BTreeMap<u16, ServerAdminState>) -> u16 {
        let active_servers = pool.iter().filter(|(_, admin_state)| **admin_state == ServerAdminState::Active);
        let active_servers: Vec<u16> = active_servers.map(|(number, _)| *number).collect();
        self.departed_server_count += 1;
        timeline::choose_leaving_server(&active_servers, self.seed, self.departed_server_count)
    }
}

/// Sums the counters of several JSON objects by name. Returns only the sums above 0.
fn sum_counters<'a>(counter_objects: impl Iterator<Item = &'a serde_json::Value>) -> BTreeMap<String, u64> {
    let mut sums_by_name = BTreeMap::new();
    for (name, count) in counter_objects.filter_map(serde_json::Value::as_object).flatten() {
        *sums_by_name.entry(name.clone()).or_default() += count.as_u64().unwrap_or(0);
    }
    sums_by_name.retain(|_, count| *count > 0);
    sums_by_name
}
