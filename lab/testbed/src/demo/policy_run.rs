//! Testbed of one policy, from its start to the measured results of each seed's run.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::fleet::{CoreLoadSource, Fleet, ServerAdminState, TestbedFleetOptions, lab_binary_path};
use crate::instance;
use crate::load::LoadClientReport;
use crate::paced_server::PacedServer;
use crate::process::{DEFAULT_WAIT_TIMEOUT, TestbedProcess};
use crate::topology::{Testbed, TestbedOptions};

use super::load_variances::{BusyTimeSample, SeedRunMeasures};
use super::options::{DemoOptions, TableTrigger};
use super::timeline::{PoolChangeEvent, PoolChangeTimeline};

/// Testbed of one policy, with all its daemons. Fields are dropped in the order of their declaration, so processes end
/// before the testbed is removed.
#[derive(Debug)]
pub struct PolicyTestbed {
    policy: &'static str,
    load_generator: Option<TestbedProcess>,
    fleet: Fleet,
    paced_servers: BTreeMap<u16, PacedServer>,
    /// Number of the only server outside of the pool, which is the next to join it.
    next_joining_server: u16,
    busy_time_samples: Vec<BusyTimeSample>,
    client_addresses_per_log: u16,
    testbed: Testbed,
}

impl PolicyTestbed {
    /// Starts the testbed and all its daemons, with one additional server that waits to join the pool. Fails when the
    /// testbed or a daemon does not start.
    pub fn start(policy: &'static str, options: &DemoOptions, client_addresses_per_log: u16) -> anyhow::Result<Self> {
        let testbed = Testbed::create(TestbedOptions {
            instance_name: instance::unique_testbed_name(&testbed_name_prefix(policy))?,
            server_count: options.servers + 1,
            core_count: options.cores,
            // Each log has its own client addresses, because ports stay in TIME-WAIT for a minute.
            client_address_count: client_addresses_per_log * options.seeds.len() as u16,
            ..options.network.to_testbed_options()
        })?;
        let mut paced_servers = BTreeMap::new();
        for number in testbed.server_numbers() {
            paced_servers.insert(number, testbed.start_paced_server(number)?);
        }
        let fleet_options = TestbedFleetOptions {
            policy_name: policy.to_owned(),
            core_load_source: CoreLoadSource::PacedServer,
            makes_tables_per_interval: options.tables == TableTrigger::Interval,
            ..options.network.to_fleet_options()
        };
        let mut fleet = Fleet::start(&testbed, fleet_options).with_context(|| format!("policy {policy}"))?;
        let mut pool = fleet.server_pool().clone();
        let waiting_server = options.servers + 1;
        pool.remove(&waiting_server);
        fleet.set_server_pool(&testbed, pool)?;
        fleet.wait_until_ready(&testbed)?;
        Ok(Self {
            policy,
            load_generator: None,
            fleet,
            paced_servers,
            next_joining_server: waiting_server,
            busy_time_samples: Vec::new(),
            client_addresses_per_log,
            testbed,
        })
    }

    pub fn policy_name(&self) -> &'static str {
        self.policy
    }

    /// Returns the generation of the controller's newest table. Fails when the controller does not answer.
    pub fn query_table_generation(&self) -> anyhow::Result<u64> {
        let status = self.fleet.query_status(&self.testbed)?;
        status["services"][0]["table_generation"].as_u64().context("a status without a table's generation")
    }

    fn load_report_path(&self) -> PathBuf {
        self.testbed.directory().join("load.json")
    }

    /// Starts the load generator with the arrival log at index `log_index`. Fails when it cannot be started.
    pub fn start_load_generator(&mut self, log_index: usize, log: &Path, start_ns: u64) -> anyhow::Result<()> {
        let first_address = self.testbed.client_address(self.client_addresses_per_log * log_index as u16);
        let mut command = Command::new(lab_binary_path()?);
        command.args(["testbed", "load", "--vip", &self.testbed.service_address().to_string(), "--log"]).arg(log);
        command.args(["--first-address", &first_address.to_string(), "--start-at", &start_ns.to_string()]);
        command.stdout(File::create(self.load_report_path())?);
        self.busy_time_samples.clear();
        self.load_generator = Some(self.testbed.spawn(self.testbed.client(), command)?);
        Ok(())
    }

    /// Records the present busy times of the servers that accept new connections. Fails when a core load file cannot be
    /// read.
    pub fn record_busy_times(&mut self) -> anyhow::Result<()> {
        let active_server_sample = |(number, server): (&u16, &PacedServer)| {
            let is_active = self.fleet.server_pool().get(number) == Some(&ServerAdminState::Active);
            is_active.then(|| server.read_core_busy_ns().map(|busy_ns| (*number, busy_ns)))
        };
        self.busy_time_samples
            .push(self.paced_servers.iter().filter_map(active_server_sample).collect::<anyhow::Result<_>>()?);
        Ok(())
    }

    /// Adds the waiting server to the pool, or drains the server that has been in the pool longest. Fails when the
    /// controller has ended.
    pub fn change_pool(&mut self, event: PoolChangeEvent) -> anyhow::Result<()> {
        let mut pool = self.fleet.server_pool().clone();
        match event {
            PoolChangeEvent::AddServer => pool.insert(self.next_joining_server, ServerAdminState::Active),
            PoolChangeEvent::DrainServer => pool.insert(self.oldest_server_in_pool(), ServerAdminState::Draining),
        };
        self.fleet.set_server_pool(&self.testbed, pool)
    }

    /// Returns the number of the server that has been in the pool longest. It is the next number after that of the
    /// waiting server, because servers join in a cyclic order.
    fn oldest_server_in_pool(&self) -> u16 {
        self.next_joining_server % self.paced_servers.len() as u16 + 1
    }

    /// Waits for the load generator, removes the drained server from the pool, and returns the results of this seed's
    /// run. Fails when the load generator fails or does not end in time.
    pub fn finish_seed_run(&mut self, seed: u64, timeline: &PoolChangeTimeline) -> anyhow::Result<SeedRunMeasures> {
        let mut load_generator = self.load_generator.take().context("no load generator was started")?;
        let exit_status = load_generator.wait_for_exit(*DEFAULT_WAIT_TIMEOUT)?;
        ensure!(exit_status.success(), "the load generator of policy {} failed: {exit_status}", self.policy);
        let report: LoadClientReport = serde_json::from_slice(&fs::read(self.load_report_path())?)?;
        let seed_measures = SeedRunMeasures::new(seed, &std::mem::take(&mut self.busy_time_samples), timeline, report);

        self.next_joining_server = self.oldest_server_in_pool();
        let mut pool = self.fleet.server_pool().clone();
        pool.remove(&self.next_joining_server);
        self.fleet.set_server_pool(&self.testbed, pool)?;
        Ok(seed_measures)
    }
}

/// Returns the prefix of the names of a policy's testbeds, which has only the ASCII letters and digits of `policy`.
fn testbed_name_prefix(policy: &str) -> String {
    "demo".chars().chain(policy.chars().filter(char::is_ascii_alphanumeric).take(20)).collect()
}
