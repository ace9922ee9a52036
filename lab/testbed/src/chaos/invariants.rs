//! Checks of the fleet's invariants under faults. Generations and counters never decrease, server ids never change,
//! load balancers get new tables, and daemons do not leak resources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use serde_json::Value;

use super::cli_probe::OperatorCli;
use crate::addresses::{load_balancer_name, rack_controller_name};
use crate::fleet::as_array_or_empty;
use crate::topology::Testbed;

/// Address where every load balancer serves its metrics, in its own network namespace.
pub const LB_METRICS_ADDRESS: &str = "127.0.0.1:9440";
/// Interval between two checks of the load balancers' forwarding tables.
const TABLE_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Number of forwarding table checks per check of the controller's status. Status checks are rarer, because they cost
/// the controller more time.
const TABLE_CHECKS_PER_STATUS_CHECK: u32 = 5;
const METRICS_SCRAPE_TIMEOUT: Duration = Duration::from_millis(300);
const CONTROLLER_STATUS_TIMEOUT_S: &str = "3";

/// Results of the invariant checks during a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct InvariantObservations {
    /// Number of times that the controller's status was checked.
    pub status_checks: u64,
    /// Number of times that a load balancer's tables were checked.
    pub table_checks: u64,
    /// Longest time during which any load balancer got no new forwarding table (s).
    pub longest_without_table_s: f64,
    /// End of the longest time without a new forwarding table (seconds since the start of the run).
    pub longest_without_table_at_s: f64,
    /// Number of times that the health checks of a load balancer changed a server's state from up to down.
    pub down_verdicts: u64,
    pub violations: Vec<String>,
}

/// Checker that tests the fleet's invariants repeatedly. One thread runs the checks, and others may read the results.
#[derive(Debug)]
pub struct InvariantChecker<'a> {
    testbed: &'a Testbed,
    operator_cli: OperatorCli<'a>,
    run_start: Instant,
    observed_state: Mutex<ObservedFleetState>,
}

#[derive(Debug, Default)]
struct ObservedFleetState {
    observations: InvariantObservations,
    configuration_generation: u64,
    /// Name of each server, by server id.
    server_names: BTreeMap<u64, String>,
    /// Last value of each data plane counter, by owner (load balancer or server) and counter name.
    counter_by_owner_and_name: BTreeMap<(String, String), u64>,
    /// Servers that load balancers consider down, each as the names of the load balancer, the service and the server.
    down_servers: BTreeSet<[String; 3]>,
    /// Sum of each load balancer's table generations, and the time of this sum's last change. The key is the load
    /// balancer's number.
    table_generation_sums_by_lb: BTreeMap<u16, (f64, Instant)>,
    /// Current cookie key of the load balancers, its generation, and the phase of its rotation.
    cookie_key_state: Option<[Value; 3]>,
}

/// Policies whose tables depend on loads. With them, the controller makes new tables as long as there is traffic.
const LOAD_AWARE_POLICIES: [&str; 2] = ["crossrss", "crossrss-plus"];

impl<'a> InvariantChecker<'a> {
    pub fn new(testbed: &'a Testbed, controller_count: u16) -> Self {
        let operator_cli = OperatorCli::new(testbed, controller_count, CONTROLLER_STATUS_TIMEOUT_S);
        Self { testbed, operator_cli, run_start: Instant::now(), observed_state: Mutex::default() }
    }

    pub fn observations(&self) -> InvariantObservations {
        self.lock_state().observations.clone()
    }

    /// Checks all invariants repeatedly until `stop_flag` is set.
    pub fn run_checks(&self, stop_flag: &AtomicBool) {
        for poll_index in 0u32.. {
            if stop_flag.load(Ordering::Relaxed) {
                return;
            }
            let check_start = Instant::now();
            for number in self.testbed.load_balancer_numbers() {
                if let Ok(generation_sum) = self.sum_used_table_generations(number) {
                    self.record_table_generations(number, generation_sum);
                }
            }
            if poll_index.is_multiple_of(TABLE_CHECKS_PER_STATUS_CHECK)
                && let Ok(status) = self.query_status()
            {
                self.check_fleet_status(&status);
            }
            std::thread::sleep(TABLE_CHECK_INTERVAL.saturating_sub(check_start.elapsed()));
        }
    }

    /// Describes the first load balancer without a new table since `recovery_start`, or returns `None` if all have one.
    /// `status` is the controller's status. If no policy depends on loads, the controller makes new tables only after
    /// changes. In that case, a load balancer passes if it has the controller's newest tables.
    pub fn find_missing_table_reason(&self, status: &Value, recovery_start: Instant) -> Option<String> {
        let services = as_array_or_empty(&status["services"]);
        let has_load_aware_policy =
            services.iter().any(|service| LOAD_AWARE_POLICIES.iter().any(|policy| service["policy"] == *policy));
        let controller_generation_sum: f64 =
            services.iter().filter_map(|service| service["table_generation"].as_f64()).sum();
        let state = self.lock_state();
        let missing_table_reason = |number: u16| match state.table_generation_sums_by_lb.get(&number) {
            Some((_, change_time)) if *change_time > recovery_start => None,
            Some((generation_sum, _)) if !has_load_aware_policy => {
                (*generation_sum != controller_generation_sum).then(|| {
                    format!(
                        "lb{number}'s tables are of generations {generation_sum} in all, and not \
                                  {controller_generation_sum}"
                    )
                })
            }
            _ => Some(format!("lb{number} has no new table")),
        };
        self.testbed.load_balancer_numbers().into_iter().find_map(missing_table_reason)
    }

    /// Runs `coreward status` and returns its JSON output. Fails when no controller answers in time.
    pub fn query_status(&self) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.operator_cli.run_coreward(&["status", "--format", "json"])?)?)
    }

    fn lock_state(&self) -> std::sync::MutexGuard<'_, ObservedFleetState> {
        self.observed_state.lock().expect("no watcher panics")
    }

    /// Returns the sum of the generations of all tables that load balancer `number` uses.
    fn sum_used_table_generations(&self, number: u16) -> anyhow::Result<f64> {
        let metrics_page = self.testbed.load_balancer(number)?.run_within(scrape_load_balancer_metrics)?;
        let generation_samples =
            metrics_page.lines().filter_map(|line| line.strip_prefix("coreward_table_generation{"));
        Ok(generation_samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    fn record_table_generations(&self, number: u16, generation_sum: f64) {
        let (mut state, now) = (self.lock_state(), Instant::now());
        state.observations.table_checks += 1;
        let previous_change = state.table_generation_sums_by_lb.get(&number).copied();
        match previous_change {
            // Any different sum means a new table. It may be smaller, because a new controller restarts its
            // generations.
            Some((previous_sum, _)) if previous_sum == generation_sum => {}
            Some((_, change_time)) => {
                let seconds_without_table = (now - change_time).as_secs_f64();
                if seconds_without_table > state.observations.longest_without_table_s {
                    state.observations.longest_without_table_s = seconds_without_table;
                    state.observations.longest_without_table_at_s = (now - self.run_start).as_secs_f64();
                }
                state.table_generation_sums_by_lb.insert(number, (generation_sum, now));
            }
            None => drop(state.table_generation_sums_by_lb.insert(number, (generation_sum, now))),
        }
    }

    fn check_fleet_status(&self, status: &Value) {
        let mut state = self.lock_state();
        state.observations.status_checks += 1;
        let configuration_generation = status["configuration_generation"].as_u64().unwrap_or(0);
        if configuration_generation < state.configuration_generation {
            let previous_generation = state.configuration_generation;
            state.record_violation(format!(
                "configuration generation {configuration_generation} after {previous_generation}"
            ));
        }
        state.configuration_generation = state.configuration_generation.max(configuration_generation);
        for server in as_array_or_empty(&status["servers"]) {
            state.check_server_id(server);
            state.check_data_plane_counters(server["name"].as_str().unwrap_or_default(), &server["counters"]);
        }
        as_array_or_empty(&status["services"]).iter().for_each(|service| state.record_health_checks(service));
        state.check_cookie_keys(&status["keys"]);
        for balancer in as_array_or_empty(&status["load_balancers"]) {
            let balancer_name = balancer["name"].as_str().unwrap_or_default();
            state.check_data_plane_counters(balancer_name, &balancer["state"]["counters"]);
        }
    }
}

impl ObservedFleetState {
    fn record_violation(&mut self, description: String) {
        if !self.observations.violations.contains(&description) {
            self.observations.violations.push(description);
        }
    }

    /// Checks that the server still has its first id, because cookies may contain it.
    fn check_server_id(&mut self, server: &Value) {
        let (Some(id), Some(name)) = (server["id"].as_u64(), server["name"].as_str()) else { return };
        let previous_id = self
            .server_names
            .iter()
            .find(|(known_id, owner)| **known_id != id && *owner == name)
            .map(|(other, _)| *other);
        if let Some(previous_id) = previous_id {
            self.record_violation(format!("{name} has id {id}, after {previous_id}"));
        }
        let id_owner = self.server_names.entry(id).or_insert_with(|| name.to_owned()).clone();
        if id_owner != name {
            self.record_violation(format!("id {id} is {name}'s, after {id_owner}'s"));
        }
    }

    fn record_health_checks(&mut self, service: &Value) {
        for member in as_array_or_empty(&service["members"]) {
            for check in as_array_or_empty(&member["health_checks"]) {
                let health_check_key =
                    [&check["load_balancer"], &service["name"], &member["server"]].map(Value::to_string);
                match check["is_up"] == false {
                    true => self.observations.down_verdicts += u64::from(self.down_servers.insert(health_check_key)),
                    false => drop(self.down_servers.remove(&health_check_key)),
                }
            }
        }
    }

    /// Checks that the cookie keys do not change, because the run is too short for a rotation.
    fn check_cookie_keys(&mut self, keys: &Value) {
        let current_keys = ["current_key", "configuration_generation", "rotation_phase"].map(|key| keys[key].clone());
        let first_keys = self.cookie_key_state.get_or_insert_with(|| current_keys.clone()).clone();
        if current_keys != first_keys {
            self.record_violation(format!("the cookie keys changed: {first_keys:?}, then {current_keys:?}"));
        }
    }

    /// Checks that none of these data plane counters has decreased. The counters must outlive restarts of the daemons.
    fn check_data_plane_counters(&mut self, owner: &str, counters: &Value) {
        for (name, count) in counters.as_object().into_iter().flatten() {
            let current_count = count.as_u64().unwrap_or(0);
            let previous_count =
                self.counter_by_owner_and_name.insert((owner.to_owned(), name.clone()), current_count).unwrap_or(0);
            if current_count < previous_count {
                self.record_violation(format!(
                    "counter {name} of {owner} went from {previous_count} to {current_count}"
                ));
            }
        }
    }
}

/// Returns the reason why the fleet has not converged, or `None` if it has. All servers in the document must report and
/// be up, and all rack controllers must be connected. Each load balancer must have resolved all servers and have sent
/// its state after `recovery_start`.
pub fn find_unconverged_reason(testbed: &Testbed, status: &Value, recovery_start: Instant) -> Option<String> {
    for server in as_array_or_empty(&status["servers"]) {
        if server["state"] != "gone" && server["report_state"] != "fresh" {
            return Some(format!("{} reports {}", server["name"], server["report_state"]));
        }
        if server["state"] == "down" {
            return Some(format!("{} is down: {}", server["name"], server["state_reason"]));
        }
    }
    for number in 1..=testbed.options().rack_controller_count {
        let name = rack_controller_name(number);
        if !as_array_or_empty(&status["racks"]).iter().any(|rack| rack["name"] == name) {
            return Some(format!("{name} is not there"));
        }
    }
    let load_balancers = as_array_or_empty(&status["load_balancers"]);
    for number in testbed.load_balancer_numbers() {
        let name = load_balancer_name(number);
        let Some(balancer) = load_balancers.iter().find(|balancer| balancer["name"] == name) else {
            return Some(format!("{name} is not there"));
        };
        let balancer_state = &balancer["state"];
        let state_age = Duration::from_millis(balancer["state_age_ms"].as_u64().unwrap_or(u64::MAX / 2));
        if balancer_state.is_null() || state_age > recovery_start.elapsed() {
            return Some(format!("{name} has sent nothing since"));
        }
        let unresolved_servers = as_array_or_empty(&balancer_state["unresolved_servers"]);
        if !unresolved_servers.is_empty() {
            return Some(format!("{name} does not find {unresolved_servers:?}"));
        }
    }
    None
}

fn scrape_load_balancer_metrics() -> anyhow::Result<String> {
    let address: SocketAddr = LB_METRICS_ADDRESS.parse()?;
    let mut stream = TcpStream::connect_timeout(&address, METRICS_SCRAPE_TIMEOUT)?;
    stream.set_read_timeout(Some(METRICS_SCRAPE_TIMEOUT))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: coreward\r\nConnection: close\r\n\r\n")?;
    let mut metrics_page = String::new();
    stream.read_to_string(&mut metrics_page)?;
    Ok(metrics_page)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ProcessResourceUsage {
    pub memory_kb: u64,
    pub open_files: u64,
}

/// Returns the present resource usage of a process. Fails when the process has ended.
pub fn read_resource_usage(pid: u32) -> anyhow::Result<ProcessResourceUsage> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let resident_memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    let memory_kb = resident_memory.with_context(|| format!("process {pid} has ended"))?.trim().parse()?;
    Ok(ProcessResourceUsage { memory_kb, open_files: fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64 })
}
