//! `coreward-lab testbed chaos` injects random faults, reproducible from a seed, while clients connect and the
//! configuration changes. No connection may break, and no acknowledged change may be lost.
//!
//! * [`schedule`] and [`fault`] choose the faults and their times. [`test_env`] injects them with [`network`],
//!   [`tmpfs_disk`], [`etcd`], [`byzantine_agent`] and [`crate::preloaded_faults`].
//! * [`traffic`] contains the clients.
//! * [`config_mutator`] changes the configuration (see [`document`]), drains servers, and records acknowledgements (see
//!   [`expected_drains`]).
//! * [`byzantine_share`] measures how many connections a server attracts with false loads.
//! * [`invariants`] checks values that must grow or stay equal. [`cli_probe`] runs the operator's commands.
//! * [`outcome`] formats the results of a run.

pub mod byzantine_agent;
pub mod byzantine_share;
pub mod cli_probe;
pub mod config_mutator;
pub mod document;
pub mod etcd;
pub mod expected_drains;
pub mod fault;
pub mod invariants;
pub mod network;
pub mod outcome;
pub mod schedule;
pub mod test_env;
pub mod tmpfs_disk;
pub mod traffic;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::conformance::{SetFlagOnDrop, write_core_busy_times, write_random_core_busy_times};
use crate::fleet::{CoreLoadSource, Fleet, TestbedFleetOptions, core_load_file_path, read_log_tails};
use crate::interrupt_flag;
use crate::network_options::TestbedNetworkOptions;
use crate::nginx::NginxServer;
use crate::preloaded_faults::PreloadedFaults;
use crate::topology::{Testbed, TestbedOptions};
use byzantine_agent::FalseReportKind;
use byzantine_share::ByzantineConnectionShare;
use config_mutator::{ConfigWriter, ExpectedConfig};
use document::DocumentGenerator;
use etcd::EtcdCluster;
use fault::ChaosFaultKind;
use invariants::{InvariantChecker, ProcessResourceUsage};
use outcome::{ChaosOutcome, FleetRecovery};
use schedule::{FaultRoundGenerator, FleetComponentCounts, PlannedFault};
use test_env::ChaosTestEnv;
use tmpfs_disk::TmpfsDisk;
use traffic::{TrafficClients, stream_service_address};

/// Options of `coreward-lab testbed chaos`.
#[derive(Debug, Clone, clap::Args)]
pub struct ChaosArgs {
    /// Time during which new faults begin (s)
    #[arg(long, default_value_t = 225, value_parser = clap::value_parser!(u32).range(5..=3_000))]
    pub seconds: u32,
    /// Seed of the faults
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Kinds of fault to inject [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub faults: Vec<ChaosFaultKind>,
    /// Number of configuration changes that the controller must acknowledge
    #[arg(long, default_value_t = 500)]
    pub config_changes: u64,
    /// Number of controllers; several controllers store their records in an etcd cluster of three members
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=5))]
    pub controllers: u16,
    /// Number of rack controllers between agents and controllers
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=4))]
    pub racks: u16,
    #[command(flatten)]
    pub network: TestbedNetworkOptions,
    /// Another version of the `coreward` binary, with which upgrades alternate
    #[arg(long, value_name = "FILE")]
    pub upgrade_binary: Option<PathBuf>,
    /// Print the results as JSON, and nothing else
    #[arg(long)]
    pub json: bool,
}

const LOAD_BALANCER_COUNT: u16 = 2;
const SERVER_COUNT: u16 = 4;
const CORE_COUNT: u16 = 2;
/// Number of the server that an impostor impersonates after the last round of faults. The impostor reports idle cores.
const IMPERSONATED_SERVER_NUMBER: u16 = 1;
/// Number of the client's IP addresses. The first one is for programs that let the kernel choose their port.
const CLIENT_ADDRESS_COUNT: u16 = 4;
/// Maximum time that the fleet may take to converge after a round of faults.
const CONVERGENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Configuration of the web service. Its health checks are frequent and have short timeouts, so that they mark servers
/// down during faults.
const WEB_SERVICE_CONFIG: &str =
    "[service.health]\ncheck = \"http\"\npath = \"/who\"\ninterval = \"200ms\"\ntimeout = \"200ms\"\nfall = 1\n";
const STREAM_SERVICE_CONFIG: &str =
    "consistency = \"stateful\"\n[service.health]\ninterval = \"200ms\"\ntimeout = \"200ms\"\nfall = 1\n";
const EVENT_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Fraction of the run's duration during which configuration changes are made. The rest of the run has only faults.
const CONFIG_CHANGE_TIME_FRACTION: f64 = 0.7;
/// Maximum growth of a daemon's memory during a run (kB). It allows for work in progress and for memory that the
/// allocator does not return.
const MAX_MEMORY_GROWTH_KB: u64 = 32 << 10;
/// Maximum growth of a daemon's number of open files during a run.
const MAX_OPEN_FILE_GROWTH: u64 = 16;

/// Runs the chaos test and prints its results. Fails when the setup fails or an invariant is violated.
pub fn main(options: &ChaosArgs) -> anyhow::Result<()> {
    interrupt_flag::catch_signals()?;
    let outcome = run_chaos_test("chaos", options)?;
    println!("{}", if options.json { serde_json::to_string_pretty(&outcome)? } else { outcome.to_string() });
    ensure!(outcome.has_passed(), "what must hold did not: see above");
    Ok(())
}

/// Runs the chaos test in a new testbed named `instance`. Fails when the setup fails, or when a signal interrupts the
/// run. Does not fail for violated invariants, which are part of the outcome.
pub fn run_chaos_test(instance: &str, options: &ChaosArgs) -> anyhow::Result<ChaosOutcome> {
    let testbed = create_testbed(instance, options)?;
    let server_numbers = testbed.server_numbers();
    let _nginx: Vec<NginxServer> =
        server_numbers.iter().map(|number| testbed.start_nginx(*number)).collect::<anyhow::Result<_>>()?;
    let stream_busy_file_path = |number| testbed.directory().join(format!("streams-s{number}"));
    let _stream_servers =
        testbed.start_stream_servers_at_address(stream_service_address(&testbed), stream_busy_file_path)?;
    for number in &server_numbers {
        write_core_busy_times(&core_load_file_path(&testbed, *number), &vec![0; usize::from(CORE_COUNT)])?;
    }
    let server_racks = rack_numbers_by_server(&server_numbers, options.racks);
    let document_generator = create_document_generator(&testbed, options, server_racks.clone());
    let store_disk = TmpfsDisk::mount(&testbed.directory().join("store"))?;
    let preloaded_faults = PreloadedFaults::create(&testbed.directory())?;
    let etcd_cluster = (options.controllers > 1).then(|| EtcdCluster::start(&testbed)).transpose()?;
    let fleet_options = TestbedFleetOptions {
        core_load_source: CoreLoadSource::PacedServer,
        applied_document: Some(document_generator.document_text()),
        store_file: Some(store_disk.path().join("controller.redb")),
        preloaded_faults: Some(preloaded_faults.clone()),
        controller_count: options.controllers,
        rack_numbers_by_server: server_racks,
        uses_tls: true,
        etcd_endpoints: etcd_cluster.as_ref().map(EtcdCluster::member_endpoints).unwrap_or_default(),
        extra_load_balancer_text: format!("metrics = \"{}\"\n", invariants::LB_METRICS_ADDRESS),
        ..options.network.to_fleet_options()
    };
    let fleet = Fleet::start(&testbed, fleet_options)?;
    let env =
        ChaosTestEnv::new(&testbed, fleet, store_disk, preloaded_faults, etcd_cluster, options.upgrade_binary.clone())?;
    ChaosRun::new(&testbed, env, options)?.run_and_collect_outcome(document_generator)
}

fn create_testbed(instance: &str, options: &ChaosArgs) -> anyhow::Result<Testbed> {
    Testbed::create(TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: SERVER_COUNT,
        core_count: CORE_COUNT,
        load_balancer_count: LOAD_BALANCER_COUNT,
        rack_controller_count: options.racks,
        client_address_count: CLIENT_ADDRESS_COUNT,
        ..options.network.to_testbed_options()
    })
}

/// Returns the numbers of each server's rack controllers, by server number. The map is empty if `rack_count` is 0.
fn rack_numbers_by_server(server_numbers: &[u16], rack_count: u16) -> BTreeMap<u16, Vec<u16>> {
    let servers_with_racks = server_numbers.iter().filter(|_| rack_count > 0);
    servers_with_racks.map(|number| (*number, rack_numbers_of_server(*number, rack_count))).collect()
}

fn create_document_generator(
    testbed: &Testbed,
    options: &ChaosArgs,
    server_racks: BTreeMap<u16, Vec<u16>>,
) -> DocumentGenerator {
    DocumentGenerator::new(
        options.seed,
        options.network,
        &testbed.server_numbers(),
        vec![
            ("web".to_owned(), testbed.service_address(), WEB_SERVICE_CONFIG),
            ("streams".to_owned(), stream_service_address(testbed), STREAM_SERVICE_CONFIG),
        ],
        server_racks,
    )
}

struct ChaosRun<'a> {
    testbed: &'a Testbed,
    env: ChaosTestEnv<'a>,
    options: &'a ChaosArgs,
    fault_kinds: Vec<ChaosFaultKind>,
    run_start: Instant,
    fault_counts: BTreeMap<&'static str, u64>,
    recoveries: Vec<FleetRecovery>,
    violations: Vec<String>,
    initial_pin_count: usize,
    initial_resource_usage: BTreeMap<String, ProcessResourceUsage>,
}

impl<'a> ChaosRun<'a> {
    fn new(testbed: &'a Testbed, mut env: ChaosTestEnv<'a>, options: &'a ChaosArgs) -> anyhow::Result<Self> {
        let mut enabled_fault_kinds =
            if options.faults.is_empty() { ChaosFaultKind::ALL.to_vec() } else { options.faults.clone() };
        let impossible_fault_kind = if options.controllers > 1 { ChaosFaultKind::Disk } else { ChaosFaultKind::Etcd };
        enabled_fault_kinds.retain(|kind| *kind != impossible_fault_kind);
        ensure!(
            !enabled_fault_kinds.is_empty(),
            "no fault {:?} with {} controllers",
            impossible_fault_kind.name(),
            options.controllers
        );
        Ok(Self {
            testbed,
            options,
            fault_kinds: enabled_fault_kinds,
            run_start: Instant::now(),
            fault_counts: BTreeMap::new(),
            recoveries: Vec::new(),
            violations: Vec::new(),
            initial_pin_count: count_files(&testbed.pin_directory()),
            initial_resource_usage: env.measure_resource_usage()?,
            env,
        })
    }

    fn run_and_collect_outcome(mut self, documents: DocumentGenerator) -> anyhow::Result<ChaosOutcome> {
        let (traffic, writer, invariant_checker) = (
            TrafficClients::start(self.testbed, self.options.seconds, self.options.seed)?,
            ConfigWriter::new(self.testbed, self.options.controllers),
            InvariantChecker::new(self.testbed, self.options.controllers),
        );
        let (writer_stop_flag, run_stop_flag) = (AtomicBool::new(false), AtomicBool::new(false));
        let config_change_seconds = f64::from(self.options.seconds) * CONFIG_CHANGE_TIME_FRACTION;
        let config_change_interval =
            Duration::from_secs_f64(config_change_seconds / self.options.config_changes.max(1) as f64);
        let (final_resource_usage, byzantine_share) = std::thread::scope(|scope| {
            let _stop_on_drop = (SetFlagOnDrop(&writer_stop_flag), SetFlagOnDrop(&run_stop_flag));
            scope.spawn(|| write_random_core_busy_times(self.testbed, &run_stop_flag));
            scope.spawn(|| invariant_checker.run_checks(&run_stop_flag));
            traffic.spawn_clients(scope, &run_stop_flag);
            let config_writer_thread = scope.spawn(|| {
                writer.apply_random_changes(
                    documents,
                    self.options.config_changes,
                    config_change_interval,
                    &writer_stop_flag,
                )
            });
            self.run_fault_rounds(&traffic, &writer, &invariant_checker)?;
            writer_stop_flag.store(true, Ordering::Relaxed);
            let mut final_config =
                config_writer_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            // A change that was acknowledged must outlive the process that acknowledged it.
            self.print_progress("at last: SIGKILL of every controller");
            self.env.restart_controllers()?;
            self.wait_until_converged(&["kill"], &invariant_checker)?;
            writer.check_final_config(&mut final_config)?;
            let byzantine_share = self.measure_byzantine_share(&writer, &mut final_config)?;
            Ok::<_, anyhow::Error>((self.env.measure_resource_usage()?, byzantine_share))
        })?;
        self.check_resource_growth(&final_resource_usage);
        self.collect_outcome(traffic, &writer, &invariant_checker, final_resource_usage, byzantine_share)
    }

    /// Collects the results of the run, after its threads have ended.
    fn collect_outcome(
        mut self,
        traffic: TrafficClients<'_>,
        writer: &ConfigWriter<'_>,
        invariant_checker: &InvariantChecker<'_>,
        final_resource_usage: BTreeMap<String, ProcessResourceUsage>,
        byzantine_share: Option<ByzantineConnectionShare>,
    ) -> anyhow::Result<ChaosOutcome> {
        let mut outcome = ChaosOutcome {
            seconds: self.run_start.elapsed().as_secs_f64(),
            seed: self.options.seed,
            fault_counts: self.fault_counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
            false_reports: self.env.false_report_counters().into(),
            byzantine_share,
            recoveries: std::mem::take(&mut self.recoveries),
            write_counts: writer.write_counts(),
            observations: invariant_checker.observations(),
            traffic: traffic.wait_for_final_counts()?,
            usage_before: std::mem::take(&mut self.initial_resource_usage),
            usage_after: final_resource_usage,
            violations: std::mem::take(&mut self.violations),
        };
        outcome.violations.append(&mut self.env.violations);
        outcome
            .violations
            .extend(outcome.write_counts.violations.iter().chain(&outcome.observations.violations).cloned());
        if outcome.traffic.total_broken_count() > 0 {
            tracing::warn!(
                event = "connections-broken",
                "connections broke; the daemons' logs:\n{}",
                read_log_tails(self.testbed)
            );
        }
        Ok(outcome)
    }

    /// Runs rounds of faults in sequence, until the duration of the run is over.
    fn run_fault_rounds(
        &mut self,
        traffic: &TrafficClients<'_>,
        writer: &ConfigWriter<'_>,
        invariant_checker: &InvariantChecker<'_>,
    ) -> anyhow::Result<()> {
        let ChaosArgs { controllers, racks, .. } = *self.options;
        let component_counts = FleetComponentCounts {
            controller_count: controllers,
            load_balancer_count: LOAD_BALANCER_COUNT,
            rack_controller_count: racks,
            server_count: SERVER_COUNT,
        };
        let mut schedule = FaultRoundGenerator::new(self.options.seed, &self.fault_kinds, component_counts);
        let run_end = self.run_start + Duration::from_secs(self.options.seconds.into());
        while Instant::now() < run_end {
            let round_faults = schedule.draw_next_round();
            self.run_fault_round(&round_faults)?;
            let round_fault_kinds: Vec<&'static str> =
                round_faults.iter().map(|planned_fault| planned_fault.fault.kind().name()).collect();
            self.wait_until_converged(&round_fault_kinds, invariant_checker)?;
            let (write_counts, traffic_counts) = (writer.write_counts(), traffic.traffic_counts());
            self.print_progress(&format!(
                "whole again after {:.1} s; {} changes acknowledged, {} answers, {} broken",
                self.recoveries.last().map_or(0.0, |recovery| recovery.duration_s),
                write_counts.acknowledged_changes,
                traffic_counts.total_successful_count(),
                traffic_counts.total_broken_count(),
            ));
        }
        Ok(())
    }

    fn run_fault_round(&mut self, round: &[PlannedFault]) -> anyhow::Result<()> {
        let round_start = Instant::now();
        let mut fault_events: Vec<(Duration, bool, &PlannedFault)> = round
            .iter()
            .flat_map(|planned_fault| {
                [(planned_fault.start_offset, false, planned_fault), (planned_fault.end_offset, true, planned_fault)]
            })
            .collect();
        fault_events.sort_by_key(|(event_offset, is_end, _)| (*event_offset, *is_end));
        for (event_offset, is_end, planned_fault) in fault_events {
            while round_start.elapsed() < event_offset {
                interrupt_flag::ensure_not_interrupted()?;
                self.env.restart_ended_daemons()?;
                std::thread::sleep(EVENT_POLL_INTERVAL.min(event_offset.saturating_sub(round_start.elapsed())));
            }
            if is_end {
                self.env.end_fault(&planned_fault.fault)?;
                continue;
            }
            let fault_duration = planned_fault.end_offset - planned_fault.start_offset;
            self.print_progress(&format!("{}, for {:.1} s", planned_fault.fault, fault_duration.as_secs_f64()));
            *self.fault_counts.entry(planned_fault.fault.kind().name()).or_default() += 1;
            self.env.begin_fault(&planned_fault.fault)?;
        }
        Ok(())
    }

    /// Measures the share of new connections that a server gets while an impostor reports idle cores for it.
    fn measure_byzantine_share(
        &mut self,
        writer: &ConfigWriter<'_>,
        expected_config: &mut ExpectedConfig,
    ) -> anyhow::Result<Option<ByzantineConnectionShare>> {
        if !self.fault_kinds.contains(&ChaosFaultKind::ByzantineAgent) {
            return Ok(None);
        }
        writer.reduce_drained_server_count(expected_config, 0)?;
        self.print_progress(&format!("an impostor reports idle cores of s{IMPERSONATED_SERVER_NUMBER}"));
        self.env.start_false_reports(IMPERSONATED_SERVER_NUMBER, FalseReportKind::IdleCores)?;
        let service = self.testbed.service_address();
        let byzantine_share = self.testbed.client().run_within(|| {
            ByzantineConnectionShare::measure_connection_share(service, IMPERSONATED_SERVER_NUMBER, SERVER_COUNT)
        })?;
        self.env.stop_false_reports(IMPERSONATED_SERVER_NUMBER)?;
        if byzantine_share.is_over_limit() {
            self.violations.push(format!(
                "idle cores reported in s{IMPERSONATED_SERVER_NUMBER}'s name drew {byzantine_share}; by second: \
                {:?}\n{}",
                byzantine_share.seconds,
                read_log_tails(self.testbed)
            ));
        }
        Ok(Some(byzantine_share))
    }

    /// Waits until all daemons report again and all load balancers use new tables. Records the duration of the wait.
    fn wait_until_converged(
        &mut self,
        kinds: &[&'static str],
        invariant_checker: &InvariantChecker<'_>,
    ) -> anyhow::Result<()> {
        let recovery_start = Instant::now();
        let mut last_unmet_condition = None;
        loop {
            interrupt_flag::ensure_not_interrupted()?;
            self.env.restart_ended_daemons()?;
            let unmet_condition = match invariant_checker.query_status() {
                Ok(status) => invariants::find_unconverged_reason(self.testbed, &status, recovery_start)
                    .or_else(|| invariant_checker.find_missing_table_reason(&status, recovery_start)),
                Err(error) => Some(format!("{error:#}")),
            };
            let Some(reason) = unmet_condition else { break };
            if recovery_start.elapsed() > CONVERGENCE_TIMEOUT {
                self.violations.push(format!(
                    "{:.1} s: not converged {CONVERGENCE_TIMEOUT:?} after {kinds:?}: {reason}\n{}",
                    self.run_start.elapsed().as_secs_f64(),
                    read_log_tails(self.testbed)
                ));
                break;
            }
            last_unmet_condition = Some(reason);
            std::thread::sleep(EVENT_POLL_INTERVAL);
        }
        self.recoveries.push(FleetRecovery {
            start_s: recovery_start.duration_since(self.run_start).as_secs_f64(),
            faults: kinds.iter().map(|kind| (*kind).to_owned()).collect(),
            duration_s: recovery_start.elapsed().as_secs_f64(),
            last_condition: last_unmet_condition,
        });
        Ok(())
    }

    /// Records a violation if the number of pinned BPF objects differs from the start, or if a daemon's resource usage
    /// has grown too much.
    fn check_resource_growth(&mut self, final_resource_usage: &BTreeMap<String, ProcessResourceUsage>) {
        let pin_count = count_files(&self.testbed.pin_directory());
        if pin_count != self.initial_pin_count {
            self.violations
                .push(format!("{pin_count} objects are pinned, {} at the beginning", self.initial_pin_count));
        }
        for (name, initial_usage) in &self.initial_resource_usage {
            let Some(final_usage) = final_resource_usage.get(name) else { continue };
            if final_usage.memory_kb > initial_usage.memory_kb + MAX_MEMORY_GROWTH_KB
                || final_usage.open_files > initial_usage.open_files + MAX_OPEN_FILE_GROWTH
            {
                self.violations.push(format!("{name} has grown: {initial_usage:?}, then {final_usage:?}"));
            }
        }
    }

    fn print_progress(&self, message: &str) {
        if !self.options.json {
            println!("{:7.1} s  {message}", self.run_start.elapsed().as_secs_f64());
        }
    }
}

/// Returns the numbers of the rack controllers that a server's agent uses: that of its own rack and the next one.
fn rack_numbers_of_server(server: u16, racks: u16) -> Vec<u16> {
    let (first, second) = (1 + (server - 1) % racks, 1 + server % racks);
    if first == second { vec![first] } else { vec![first, second] }
}

fn count_files(directory: &Path) -> usize {
    let directory_entries = fs::read_dir(directory).into_iter().flatten().flatten();
    directory_entries.map(|entry| if entry.path().is_dir() { count_files(&entry.path()) } else { 1 }).sum()
}
