//! `coreward orchestrate` on a server, with the paced cores of `coreward-lab testbed orchestrated-server`.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, ensure};
use coreward_load::key_value::{MAX_DATAGRAM_BYTES, REQUEST_TYPE_OFFSET};
use coreward_load::request_type::RequestType;
use coreward_load::workload::RequestMix;
use coreward_model::dispatch::{CoreRankRule, DispatchEligibilityRule};
use coreward_sim::rpc::{JbsrqOptions, RpcSimulationConfig};
use serde_json::Value;

use super::build_real_time_priority_command;
use super::requests::INITIAL_STORED_KEY_COUNT;
use crate::addresses::SERVICE_ADDRESS;
use crate::core_load_file::read_core_load_file;
use crate::fleet::{coreward_binary_path, lab_binary_path};
use crate::process::{DEFAULT_WAIT_TIMEOUT, TestbedProcess};
use crate::topology::Testbed;

/// Length of each value in the database (bytes). A core answers with one datagram, which can hold 46 values of this
/// length with their keys.
const DATABASE_VALUE_BYTES: u16 = 10;

/// Running `coreward orchestrate` process, and the server process whose cores get requests from it. Dropping this value
/// kills both processes.
#[derive(Debug)]
pub struct RunningOrchestrator {
    server_process: TestbedProcess,
    daemon_process: TestbedProcess,
    core_load_file_path: PathBuf,
}

/// Work that the requests of a live figure cause at the server.
#[derive(Debug, Clone, Copy)]
pub enum FigureRequestKind<'a> {
    /// Requests only occupy a core for their service time.
    ServiceTimeOnly,
    /// Requests only occupy a core for their service time. A second service always has waiting batch requests with this
    /// service time (in units of service time).
    ServiceTimeWithBatch(f64),
    /// Requests read and write a RocksDB database.
    RocksDb(&'a RequestMix),
}

/// Returns the configuration of `coreward orchestrate` (docs/orchestrate.md) for a simulated server. `latency_us` is
/// the longest time for which the daemon sleeps while cores have requests (us). Fails when the service has more classes
/// than the protocol allows.
pub fn build_orchestrate_config(
    config: &RpcSimulationConfig,
    options: &JbsrqOptions,
    workload: FigureRequestKind<'_>,
    memory_path: &Path,
    latency_us: u64,
) -> anyhow::Result<String> {
    let policy = match options.rank_rule {
        CoreRankRule::Ranked => "jbsrq",
        CoreRankRule::Global => "global-jbsq",
        CoreRankRule::PerService => "per-service-jbsq",
    };
    let scheduler = match options.eligibility_rule {
        DispatchEligibilityRule::FirstEligible => "feo",
        DispatchEligibilityRule::Pifo => "pifo",
    };
    let (cores, depth) = (config.cores, options.queue_depth);
    let mut text = format!(
        "memory = {memory_path:?}\ncores = {cores}\ndepth = {depth}\npolicy = \"{policy}\"\n\
         scheduler = \"{scheduler}\"\nsleep = \"{latency_us}us\"\nwaiting = 16384\n\
         payload = {MAX_DATAGRAM_BYTES}\nstall_after = \"10s\"\n"
    );
    let services = options.priorities.service_count(config.service_times.class_service_times().len() as u8);
    for service in 0..services {
        let (priority, lambda) = (service, options.lower_priority_weight.get());
        writeln!(text, "[[service]]\nlisten = \"{SERVICE_ADDRESS}\"\npriority = {priority}\nlambda = {lambda:?}")?;
        // The last service gets all requests that match no other service.
        if service + 1 < services {
            let request_type = match workload {
                FigureRequestKind::RocksDb(mix) => {
                    mix.shares().get(usize::from(service)).map(|(request_type, _)| *request_type)
                }
                FigureRequestKind::ServiceTimeOnly | FigureRequestKind::ServiceTimeWithBatch(_) => {
                    RequestType::with_work_class(service)
                }
            };
            let type_byte = request_type.context("more classes than the protocol or the mix has")?.as_byte();
            writeln!(text, "match = {{ offset = {REQUEST_TYPE_OFFSET}, value = {type_byte} }}")?;
        }
    }
    Ok(text)
}

impl RunningOrchestrator {
    /// Starts orchestrator and server process on server 1 for the simulated service of `config`, and waits until all
    /// cores are connected. `unit_us` is the unit of service times (us). Idle cores and the waiting daemon sleep for
    /// the simulated latency of the interface. Fails when one of the two processes does not start.
    pub fn start(
        testbed: &Testbed,
        config: &RpcSimulationConfig,
        options: &JbsrqOptions,
        unit_us: f64,
        workload: FigureRequestKind<'_>,
    ) -> anyhow::Result<Self> {
        let build_file_path = |name: &str| testbed.directory().join(name);
        let (memory_path, core_load_file_path, config_path) =
            (build_file_path("cores"), build_file_path("cores-busy"), build_file_path("orchestrate.toml"));
        for old_file in [&memory_path, &core_load_file_path] {
            // Remove the files of an earlier orchestrator, if any.
            let _ = fs::remove_file(old_file);
        }
        let latency_us = time_units_to_us(config.interface_latency, unit_us);
        fs::write(&config_path, build_orchestrate_config(config, options, workload, &memory_path, latency_us)?)?;
        let log = File::create(build_file_path("orchestrate.log"))?;
        let namespace = testbed.server(1)?;
        let mut command = build_real_time_priority_command(coreward_binary_path()?);
        command.args(["orchestrate", "--config"]).arg(&config_path);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log.try_clone()?);
        let mut daemon = testbed.spawn(namespace, command)?;
        daemon.wait_for_file("coreward orchestrate", &memory_path)?;

        let mut command = build_real_time_priority_command(lab_binary_path()?);
        command.args(["testbed", "orchestrated-server"]).args(build_server_arguments(config, options, unit_us));
        match workload {
            FigureRequestKind::ServiceTimeOnly => (),
            FigureRequestKind::ServiceTimeWithBatch(time) => {
                _ = command.arg(format!("--batch-us={}", time_units_to_us(time, unit_us)))
            }
            FigureRequestKind::RocksDb(_) => _ = command.arg("--rocksdb").arg(build_file_path("rocksdb")),
        }
        command.arg("--memory").arg(&memory_path).arg("--busy-file").arg(&core_load_file_path);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut server = testbed.spawn(namespace, command)?;
        server.wait_for_file("the server of the cores", &core_load_file_path)?;
        Ok(Self { server_process: server, daemon_process: daemon, core_load_file_path })
    }

    /// Returns the total time that all cores have spent on a service (ns). Fails when the core load file cannot be
    /// read.
    pub fn service_busy_ns(&self, service_index: usize) -> anyhow::Result<u64> {
        read_core_load_file(&self.core_load_file_path)?
            .get(service_index)
            .copied()
            .context("a core load file without the service")
    }

    /// Stops orchestrator and server process. Returns the number of requests that the cores completed. Fails when
    /// requests were dropped, rejected or lost, when a worker stalled, or when one of the two processes does not end.
    pub fn stop_and_count_requests(mut self) -> anyhow::Result<u64> {
        for (name, process) in
            [("the server of the cores", &mut self.server_process), ("coreward orchestrate", &mut self.daemon_process)]
        {
            let status = process.terminate(*DEFAULT_WAIT_TIMEOUT)?;
            ensure!(status.success(), "{name} ended with {status}");
        }
        let output = self.daemon_process.child().stdout.take().context("stdout")?;
        let report: Value = serde_json::from_reader(output).context("the report of coreward orchestrate")?;
        let services = report["services"].as_array().context("a report without services")?;
        let sum_over_services =
            |counter_name: &str| services.iter().filter_map(|service| service[counter_name].as_u64()).sum::<u64>();
        let is_zero = |counter_name: &&str| sum_over_services(counter_name) == 0;
        ensure!(["dropped", "rejected", "lost"].iter().all(is_zero) && report["stalls"] == 0, "{report}");
        Ok(sum_over_services("completed"))
    }
}

fn time_units_to_us(time_in_units: f64, unit_us: f64) -> u64 {
    (time_in_units * unit_us).round().max(1.0) as u64
}

/// Returns the arguments of `coreward-lab testbed orchestrated-server` for a simulated server.
fn build_server_arguments(config: &RpcSimulationConfig, options: &JbsrqOptions, unit_us: f64) -> Vec<String> {
    let cores: Vec<String> = (0..options.serving_core_count(config.cores)).map(|core| core.to_string()).collect();
    vec![
        "--paced".to_owned(),
        format!("--keys={INITIAL_STORED_KEY_COUNT}"),
        format!("--value-bytes={DATABASE_VALUE_BYTES}"),
        format!("--cores={}", cores.join(",")),
        format!("--quantum-us={}", time_units_to_us(options.preemption_quantum, unit_us)),
        format!("--sleep-us={}", time_units_to_us(config.interface_latency, unit_us)),
        format!("--switch-us={}", (options.service_switch_time * unit_us).round()),
        format!("--assignment={}", options.core_assignment_mode),
        format!("--reserved={}", options.reserved_cores),
        format!("--epoch-us={}", time_units_to_us(options.load_monitor_interval, unit_us)),
    ]
}

#[cfg(test)]
mod tests {
    use coreward_sim::rpc::CoreSelectionPolicy;

    use super::*;

    fn build_policy_orchestrate_config(policy: &str, service: &str) -> String {
        let config = RpcSimulationConfig {
            policy: policy.parse().unwrap(),
            service_times: service.parse().unwrap(),
            cores: 3,
            ..RpcSimulationConfig::default()
        };
        let CoreSelectionPolicy::RankedQueue(options) = &config.policy else { panic!("{policy}") };
        build_orchestrate_config(&config, options, FigureRequestKind::ServiceTimeOnly, Path::new("/run/cores"), 220)
            .unwrap()
    }

    #[test]
    fn every_simulated_policy_has_orchestrator_configuration() {
        let leading_lines = "memory = \"/run/cores\"\ncores = 3\n";
        let common_lines = "sleep = \"220us\"\nwaiting = 16384\npayload = 1472\nstall_after = \"10s\"\n";
        let first_service = "[[service]]\nlisten = \"10.200.0.1:80\"\npriority = 0\n";
        let second_service = "[[service]]\nlisten = \"10.200.0.1:80\"\npriority = 1\nlambda = 0.2\n";
        let text_with_priorities = format!(
            "{leading_lines}depth = 4\npolicy = \"jbsrq\"\nscheduler = \"feo\"\n{common_lines}\
             {first_service}lambda = 0.2\nmatch = {{ offset = 0, value = 16 }}\n{second_service}"
        );
        assert_eq!(build_policy_orchestrate_config("jbsrq:quantum=1", "bimodal:0.1:5"), text_with_priorities);
        let text_without_priorities = format!(
            "{leading_lines}depth = 2\npolicy = \"global-jbsq\"\nscheduler = \
             \"pifo\"\n{common_lines}{first_service}lambda = 0.0\n"
        );
        let options = "depth=2,lambda=0,rank=global,scheduler=pifo,priorities=none";
        assert_eq!(
            build_policy_orchestrate_config(&format!("jbsrq:{options}"), "bimodal:0.1:5"),
            text_without_priorities
        );
    }
}
