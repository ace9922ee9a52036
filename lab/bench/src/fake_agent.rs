//! Emulated agents, which send realistic reports with random loads.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coreward_intf::{SERVER_COUNTER_NAMES, STEER_COUNTER_NAMES};
use coreward_model::rss::{IndirectionTable, seeded_rng, uniform_below};
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::FleetRole;
use coreward_wire::v1;
use coreward_wire::v1::agent_message;
use rand_xoshiro::Xoshiro256PlusPlus;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use crate::controller_process::ControllerProcess;

pub(crate) fn server_name_of_agent(agent: u32) -> String {
    format!("s{agent}")
}

/// Connects `agent_count` emulated agents, whose reports are spread over the report interval. Returns the counter of
/// all sent reports. Fails when an agent cannot connect.
pub(crate) async fn start_fake_agents(
    controller: &mut ControllerProcess,
    agent_count: u32,
    core_count: u16,
    interval: Duration,
) -> anyhow::Result<Arc<AtomicU64>> {
    let mut clients = Vec::new();
    for agent in 0..agent_count {
        clients.push(controller.connect_as(FleetRole::Agent, &server_name_of_agent(agent)).await?);
    }
    let (start, sent_count) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    for (agent, client) in (0..).zip(clients) {
        // The reports are spread evenly over the interval, as those of independent agents are.
        let report_phase = interval * agent / agent_count;
        tokio::spawn(run_fake_agent(client, agent, core_count, start + report_phase, interval, sent_count.clone()));
    }
    Ok(sent_count)
}

/// Sends an agent's reports until the controller ends. `sent_report_count` counts the reports of all agents.
async fn run_fake_agent(
    mut client: ControlClient<Channel>,
    agent_index: u32,
    core_count: u16,
    start: Instant,
    interval: Duration,
    sent_report_count: Arc<AtomicU64>,
) {
    let (sender, receiver) = mpsc::channel(2);
    let registration = v1::AgentRegistration { server: server_name_of_agent(agent_index), version: "bench".into() };
    let first_message = v1::AgentMessage { message: Some(agent_message::Message::Registration(registration)) };
    if sender.send(first_message).await.is_err() {
        return;
    }
    let Ok(response) = client.agent(ReceiverStream::new(receiver)).await else { return };
    let mut response_stream = response.into_inner();
    tokio::spawn(async move { while let Ok(Some(_)) = response_stream.message().await {} });
    let mut fake_agent = FakeAgent::new(agent_index, core_count, interval);
    let mut next_report_time = start;
    loop {
        sleep_until(next_report_time).await;
        // An agent that is late skips reports.
        next_report_time = (next_report_time + interval).max(Instant::now());
        let report = agent_message::Message::Report(fake_agent.create_next_report());
        if sender.send(v1::AgentMessage { message: Some(report) }).await.is_err() {
            return;
        }
        sent_report_count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Number of reports from one detailed report to the next. An agent with ten reports per second sends one detailed
/// report per second.
const REPORTS_PER_DETAILED_REPORT: u64 = 10;

/// Emulated agent with random loads. Its cores have run for weeks, so that each busy time takes eight bytes in a
/// report.
pub(crate) struct FakeAgent {
    last_sequence_number: u64,
    random_generator: Xoshiro256PlusPlus,
    core_busy_ns: Vec<u64>,
    report_interval: Duration,
    rss_settings: v1::Rss,
}

impl FakeAgent {
    pub(crate) fn new(agent: u32, cores: u16, report_interval: Duration) -> Self {
        let balanced_table =
            IndirectionTable::draw_balanced_entries(agent.into(), 128, cores).expect("128 is a power of two");
        let indirection_table = balanced_table.queue_by_entry().iter().map(|queue| u32::from(*queue)).collect();
        let rss_settings =
            v1::Rss { source: "ethtool".into(), key: vec![0x6d; 40], indirection_table, input_transform: 0 };
        let core_busy_ns = vec![1_000_000_000_000_000; usize::from(cores)];
        Self {
            last_sequence_number: 0,
            random_generator: seeded_rng(agent.into(), 0),
            core_busy_ns,
            report_interval,
            rss_settings,
        }
    }

    /// Restarts the sequence numbers, so that the next report is the first one of a new stream.
    pub(crate) fn restart_sequence_numbers(&mut self) {
        self.last_sequence_number = 0;
    }

    pub(crate) fn create_next_report(&mut self) -> v1::Report {
        self.last_sequence_number += 1;
        let report_interval_ns = self.report_interval.as_nanos() as u32;
        for busy_ns in &mut self.core_busy_ns {
            *busy_ns += u64::from(uniform_below(&mut self.random_generator, report_interval_ns));
        }
        let without_details = !(self.last_sequence_number - 1).is_multiple_of(REPORTS_PER_DETAILED_REPORT);
        let counters = if without_details { HashMap::new() } else { self.current_counter_values() };
        v1::Report {
            sequence: self.last_sequence_number,
            sent_unix_ns: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64,
            time_to_live_ms: 10_000,
            measured_ns: 2_000_000_000_000_000 + self.last_sequence_number * u64::from(report_interval_ns),
            core_busy_ns: self.core_busy_ns.clone(),
            open_connections: 1000,
            rss_generation: 1,
            rss: (self.last_sequence_number == 1).then(|| self.rss_settings.clone()),
            rss_matched: self.last_sequence_number * 100,
            rss_mismatched: 0,
            counters,
            warnings: Vec::new(),
            dispatch: Vec::new(),
            connections: None,
            configuration_generation: 1,
            without_details,
            rejected: Vec::new(),
        }
    }

    /// Returns the next report. It always has all details, which otherwise only every tenth report has.
    pub(crate) fn create_detailed_report(&mut self) -> v1::Report {
        let report = self.create_next_report();
        v1::Report { counters: self.current_counter_values(), without_details: false, ..report }
    }

    fn current_counter_values(&self) -> HashMap<String, u64> {
        let counter_names = SERVER_COUNTER_NAMES.iter().chain(&STEER_COUNTER_NAMES);
        counter_names.map(|name| ((*name).to_owned(), self.last_sequence_number * 1000)).collect()
    }
}
