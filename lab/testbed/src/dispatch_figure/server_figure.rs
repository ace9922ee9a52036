//! `coreward-lab figure turbo-9-live` and `ringleader-classes-live`: one server, paced workers, and every policy in
//! turns.

use std::collections::HashMap;
use std::process::Command;

use anyhow::{Context as _, ensure};
use coreward_sim::figure::axes::Metric;
use coreward_sim::figure::job::Job;
use coreward_sim::figure::live::{Progress, Sample};
use coreward_sim::figure::scenario::Scenario;
use coreward_sim::rpc;

use super::dispatcher::{Dispatcher, key_value_service};
use super::points::{self, found, is_same_series, key};
use super::requests::{Measurement, Requests, allow_sockets};
use crate::addresses::{VIP, server_address};
use crate::instance;
use crate::key_value::handle::KeyValueServer;
use crate::topology::{Testbed, TestbedOptions, missing_privilege};

/// Receive buffer of a worker's socket, enough for the longest run.
const RECEIVE_BUFFER: &str = "16000000";

/// Measures every series of `scenario`, which the simulator could simulate. Fails without root, when the scenario has
/// unsupported metrics, when a start fails, when requests are lost or bypass the dispatcher, when the machine is too
/// busy, or when interrupted.
pub fn measure(scenario: &Scenario, progress: Progress<'_>) -> anyhow::Result<Vec<Sample>> {
    if let Some(missing) = missing_privilege() {
        anyhow::bail!(missing);
    }
    allow_sockets()?;
    let live = scenario.live.as_ref().context("a live figure without [live]")?;
    let (unit_us, seconds) = live.unit_us.zip(live.seconds).context("[live]: expected `unit_us` and `seconds`")?;
    let plan = points::plan(scenario)?;
    let mut configs: Vec<&rpc::Config> = plan.jobs.iter().filter_map(|job| as_rpc(job)).collect();
    // Run by run, so that disturbances of the machine affect all series.
    configs.sort_by_key(|config| config.seed);
    let mut measured: HashMap<String, Measurement> = HashMap::new();
    let mut site = None;
    progress(0, configs.len());
    for group in configs.chunk_by(|a, b| is_same_series(a, b)) {
        let site = TestEnv::with_workers(&mut site, group[0].cores)?;
        let service = key_value_service(&group[0].policy, &group[0].service, unit_us)?;
        let dispatcher = Dispatcher::start(&site.testbed, 1, &service, group[0].cores)?;
        for config in group {
            let seen = site.measure(config, &dispatcher, unit_us, seconds)?;
            measured.insert(key(config), seen);
            progress(measured.len(), configs.len());
        }
        dispatcher.stop()?;
    }
    points::samples(scenario, &plan, |place, job| match job {
        Job::Rpc(config) => found(&measured, config)?.value(place.query.measure),
        Job::Peak(search) => {
            let of_seed = rpc::Config { seed: place.seed, ..search.config.clone() };
            let curve = configs.iter().filter(|config| is_same_series(config, &of_seed));
            let p99 = |config: &&&rpc::Config| Ok((config.load, found(&measured, **config)?.value(Metric::ShortP99)?));
            points::peak(curve.map(|config| p99(&config)).collect::<anyhow::Result<_>>()?, search.slo)
        }
        other => anyhow::bail!("{other:?} is not measured at one server"),
    })
}

fn as_rpc(job: &Job) -> Option<&rpc::Config> {
    if let Job::Rpc(config) = job { Some(config) } else { None }
}

/// A client and a server; the fields are dropped in this order.
struct TestEnv {
    workers: u16,
    _server: KeyValueServer,
    testbed: Testbed,
}

impl TestEnv {
    /// Returns the present one, or a new one if it has another number of workers.
    fn with_workers(present: &mut Option<Self>, workers: u16) -> anyhow::Result<&Self> {
        if present.as_ref().is_none_or(|site| site.workers != workers) {
            // The old dispatcher's must be gone first.
            *present = None;
            *present = Some(Self::start(workers)?);
        }
        present.as_ref().context("just started")
    }

    fn start(workers: u16) -> anyhow::Result<Self> {
        let instance = instance::unique_name("dispatchfigure")?;
        let testbed = Testbed::create(TestbedOptions { instance, servers: 1, cores: 2, ..TestbedOptions::default() })?;
        // No load balancer between the two.
        let mut ip = Command::new("ip");
        ip.args(["route", "add", &format!("{VIP}/32"), "via", &server_address(1).to_string()]);
        testbed.run(testbed.client(), ip)?;
        let count = workers.to_string();
        let options = ["--workers", &count, "--paced", "--receive-buffer", RECEIVE_BUFFER];
        let server = testbed.start_key_value_server(1, &options)?;
        Ok(Self { workers, _server: server, testbed })
    }

    fn measure(
        &self,
        config: &rpc::Config,
        dispatcher: &Dispatcher<'_>,
        unit_us: f64,
        seconds: f64,
    ) -> anyhow::Result<Measurement> {
        let rpc::Config { policy, service, load, cores, seed, .. } = config;
        let rate = load * f64::from(*cores) / (service.mean() * unit_us / 1e6);
        let before = dispatcher.dispatched()?;
        let requests = Requests { service: service.clone(), unit_us, rate, seconds, seed: *seed };
        let seen = requests.send(&self.testbed)?;
        let (sent, lost) = seen.requests_and_lost();
        let dispatched = dispatcher.dispatched()? - before;
        ensure!(dispatched >= sent, "{policy}: {dispatched} of {sent} requests were dispatched by coreward dispatch");
        ensure!(lost == 0, "{policy} at a load of {load}: {lost} of {sent} requests were lost");
        let (short, all) = (seen.value(Metric::ShortP99)?, seen.value(Metric::P99)?);
        eprintln!(
            "run {seed}, {service}, {policy}, load {load}: p99 of short requests {short:.2}, of all {all:.2} ({sent})"
        );
        Ok(seen)
    }
}
