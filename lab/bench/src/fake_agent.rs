//! Emulated agents, which send realistic reports with random loads.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coreward_intf::{SERVER_COUNTER_NAMES, STEER_COUNTER_NAMES};
use coreward_model::rss::{IndirectionTable, seeded_rng, uniform_below};
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::Role;
use coreward_wire::v1;
use coreward_wire::v1::agent_message;
use rand_xoshiro::Xoshiro256PlusPlus;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use crate::controller_process::Controller;

pub(crate) fn server_name(agent: u32) -> String {
    format!("s{agent}")
}

/// Connects `agents` emulated agents, whose reports are spread over the interval. Returns the counter of all sent
/// reports. Fails when an agent cannot connect.
pub(crate) async fn start_all(
    controller: &mut Controller,
    agents: u32,
    cores: u16,
    interval: Duration,
) -> anyhow::Result<Arc<AtomicU64>> {
    let mut clients = Vec::new();
    for agent in 0..agents {
        clients.push(controller.connect_as(Role::Agent, &server_name(agent)).await?);
    }
    let (start, sent) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    for (agent, client) in (0..).zip(clients) {
        // The reports are spread evenly over the interval, as those of independent agents are.
        let phase = interval * agent / agents;
        tokio::spawn(fake_agent(client, agent, cores, start + phase, interval, sent.clone()));
    }
    Ok(sent)
}

/// Sends an agent's reports until the controller ends. `sent` counts the reports of all agents.
async fn fake_agent(
    mut client: ControlClient<Channel>,
    agent: u32,
    cores: u16,
    start: Instant,
    interval: Duration,
    sent: Arc<AtomicU64>,
) {
    let (sender, receiver) = mpsc::channel(2);
    let registration = v1::AgentRegistration { server: server_name(agent), version: "bench".into() };
    let registration = v1::AgentMessage { message: Some(agent_message::Message::Registration(registration)) };
    if sender.send(registration).await.is_err() {
        return;
    }
    let Ok(answers) = client.agent(ReceiverStream::new(receiver)).await else { return };
    let mut answers = answers.into_inner();
    tokio::spawn(async move { while let Ok(Some(_)) = answers.message().await {} });
    let mut server = FakeAgent::new(agent, cores, interval);
    let mut due = start;
    loop {
        sleep_until(due).await;
        // An agent that is late skips reports.
        due = (due + interval).max(Instant::now());
        let report = agent_message::Message::Report(server.report());
        if sender.send(v1::AgentMessage { message: Some(report) }).await.is_err() {
            return;
        }
        sent.fetch_add(1, Ordering::Relaxed);
    }
}

/// Number of reports among which one is detailed. An agent with ten reports per second thus sends one per second.
const REPORTS_PER_DETAILED_REPORT: u64 = 10;

/// Emulated agent with random loads. Its cores have been up for weeks, so that their busy times need eight bytes.
pub(crate) struct FakeAgent {
    last_sequence_number: u64,
    random_generator: Xoshiro256PlusPlus,
    core_busy_ns: Vec<u64>,
    interval: Duration,
    rss_settings: v1::Rss,
}

impl FakeAgent {
    pub(crate) fn new(agent: u32, cores: u16, interval: Duration) -> Self {
        let balanced_table = IndirectionTable::balanced(agent.into(), 128, cores).expect("128 is a power of two");
        let indirection_table = balanced_table.queues().iter().map(|queue| u32::from(*queue)).collect();
        let rss_settings =
            v1::Rss { source: "ethtool".into(), key: vec![0x6d; 40], indirection_table, input_transform: 0 };
        let core_busy_ns = vec![1_000_000_000_000_000; usize::from(cores)];
        Self {
            last_sequence_number: 0,
            random_generator: seeded_rng(agent.into(), 0),
            core_busy_ns,
            interval,
            rss_settings,
        }
    }

    /// Restarts the sequence numbers, so that the next report is the first one of a stream.
    pub(crate) fn begin_stream(&mut self) {
        self.last_sequence_number = 0;
    }

    pub(crate) fn report(&mut self) -> v1::Report {
        self.last_sequence_number += 1;
        let report_interval_ns = self.interval.as_nanos() as u32;
        for busy in &mut self.core_busy_ns {
            *busy += u64::from(uniform_below(&mut self.random_generator, report_interval_ns));
        }
        let without_details = !(self.last_sequence_number - 1).is_multiple_of(REPORTS_PER_DETAILED_REPORT);
        let counters = if without_details { HashMap::new() } else { self.counter_values() };
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
            refused: Vec::new(),
        }
    }

    /// Returns the next report with all details, whatever its sequence number.
    pub(crate) fn detailed_report(&mut self) -> v1::Report {
        let report = self.report();
        v1::Report { counters: self.counter_values(), without_details: false, ..report }
    }

    fn counter_values(&self) -> HashMap<String, u64> {
        let counter_names = SERVER_COUNTER_NAMES.iter().chain(&STEER_COUNTER_NAMES);
        counter_names.map(|name| ((*name).to_owned(), self.last_sequence_number * 1000)).collect()
    }
}
