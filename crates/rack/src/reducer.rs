//! Reduces reports to summaries. This module does no I/O and gets the time as an argument.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use coreward_controller::ClockReadings;
use coreward_controller::agent::Agent;
use coreward_controller::message_rejection::MessageRejection;
use coreward_controller::pool::policy_loads_for_rack;
use coreward_model::ServerId;
use coreward_model::policy::{self, PlacementPolicy, PoolServer, RackSummary, ServerPool};
use coreward_wire::rack::encode_summary;
use coreward_wire::{AgentReport, RackConfiguration, RackMember, RackServer, RackService, ServiceIndex, v1};

/// Age at which a forwarded report expires, as a number of detail intervals.
const FORWARDED_REPORT_LIFETIME_INTERVALS: u32 = 3;

/// Converter of agents' reports into summaries for the controller. It also selects the reports to forward completely.
pub struct ReportReducer {
    detail_interval: Duration,
    max_candidates_per_bucket: usize,
    configuration: Option<RackConfiguration>,
    /// Streams of agents whose servers are draining. Their reports are forwarded more often, because operators watch
    /// the remaining connections.
    draining_streams: HashSet<u64>,
    /// State of each agent, by its stream's number.
    agents_by_stream: BTreeMap<u64, ReducedAgentState>,
    /// Placement policy of each service, which keeps state about the loads.
    policies_by_service: HashMap<ServiceIndex, Box<dyn PlacementPolicy>>,
}

/// State of an agent, with the contents of the report that was forwarded last.
#[derive(Default)]
struct ReducedAgentState {
    agent: Agent,
    last_forwarded_report: Option<ForwardedReport>,
}

impl ReducedAgentState {
    /// Returns whether the report must be forwarded completely: it is the first, its state has changed, or its details
    /// are due.
    fn must_forward(&self, report: &v1::Report, min_forwarding_interval: Duration, now: ClockReadings) -> bool {
        self.last_forwarded_report.as_ref().is_none_or(|last_report| {
            let has_new_details = now.monotonic_time.saturating_sub(last_report.forwarded_at)
                >= min_forwarding_interval
                || last_report.warnings != report.warnings;
            let has_new_state = (last_report.configuration_generation, last_report.rss_generation)
                != (report.configuration_generation, report.rss_generation);
            has_new_state || has_new_details && !report.without_details
        })
    }
}

struct ForwardedReport {
    forwarded_at: Duration,
    warnings: Vec<String>,
    configuration_generation: u64,
    rss_generation: u64,
}

impl ReportReducer {
    /// Returns an empty reducer. `detail_interval` is the minimum time between two complete reports of an agent. At
    /// most `max_candidates_per_bucket` candidates are sent per bucket.
    pub fn new(detail_interval: Duration, max_candidates_per_bucket: usize) -> Self {
        Self {
            detail_interval,
            max_candidates_per_bucket,
            configuration: None,
            draining_streams: HashSet::new(),
            agents_by_stream: BTreeMap::new(),
            policies_by_service: HashMap::new(),
        }
    }

    pub fn apply_configuration(&mut self, configuration: RackConfiguration) {
        let policies = &mut self.policies_by_service;
        policies.retain(|index, policy| {
            configuration.services.iter().any(|new| new.index == *index && new.policy_name == policy.name())
        });
        for service in &configuration.services {
            // The seed only matters for hash keys, which summaries do not need.
            match policy::create_policy_by_name(&service.policy_name, 0) {
                Ok(policy) => drop(policies.entry(service.index).or_insert(policy)),
                Err(policy_error) => {
                    tracing::warn!(
                        event = "policy-unknown",
                        service_index = service.index.get(),
                        policy = service.policy_name,
                        error = %policy_error,
                        "the rack controller does not know the service's policy, and sends no loads for the service: \
                         upgrade the rack controller"
                    );
                }
            }
        }
        let members = configuration.services.iter().flat_map(|service| &service.members);
        let ineligible_servers: HashSet<ServerId> =
            members.filter(|member| !member.is_eligible).map(|member| member.id).collect();
        let draining_servers = configuration.servers.iter().filter(|server| ineligible_servers.contains(&server.id));
        self.draining_streams = draining_servers.map(|server| server.stream_number).collect();
        self.configuration = Some(configuration);
    }

    /// Returns the interval at which summaries are sent, or `None` before the first configuration.
    pub fn report_interval(&self) -> Option<Duration> {
        self.configuration.as_ref().map(|configuration| configuration.report_interval)
    }

    pub fn begin_stream(&mut self, stream: u64) {
        self.agents_by_stream.insert(stream, ReducedAgentState::default());
    }

    pub fn end_stream(&mut self, stream: u64) {
        self.agents_by_stream.remove(&stream);
    }

    pub fn agent_count(&self) -> usize {
        self.agents_by_stream.len()
    }

    /// Returns the time until the stream's next message may be read. Zero means that it may be read now.
    pub fn time_until_next_message(&self, stream: u64, now: ClockReadings) -> Duration {
        let agent_and_configuration = self.agents_by_stream.get(&stream).zip(self.configuration.as_ref());
        agent_and_configuration.map_or(Duration::ZERO, |(agent_state, configuration)| {
            agent_state.agent.time_until_next_report(configuration.report_interval, now)
        })
    }

    /// Counts a message that answers no query against the rate limit for reports.
    pub fn count_unsolicited_message(&mut self, stream: u64, now: ClockReadings) {
        if let (Some(agent_state), Some(configuration)) = (self.agents_by_stream.get_mut(&stream), &self.configuration)
        {
            agent_state.agent.take_report_token(configuration.report_interval, now);
        }
    }

    /// Stores an agent's report. Returns the report if it must be forwarded completely, or the reason if it is
    /// rejected.
    pub fn record_report(
        &mut self,
        stream: u64,
        report: v1::Report,
        now: ClockReadings,
    ) -> (Option<v1::Report>, Result<(), MessageRejection>) {
        let Some(agent_state) = self.agents_by_stream.get_mut(&stream) else { return (None, Ok(())) };
        let Some(configuration) = &self.configuration else { return (Some(report), Ok(())) };
        if !agent_state.agent.take_report_token(configuration.report_interval, now) {
            return (None, Err(MessageRejection::TooManyReports(format!("stream {stream}"))));
        }
        // For a draining server, every report with details is forwarded. Agents send them about once a second.
        let configured_detail_interval =
            if self.draining_streams.contains(&stream) { Duration::ZERO } else { configuration.detail_interval };
        let detail_interval = self.detail_interval.max(configured_detail_interval);
        let min_forwarding_interval = detail_interval.saturating_sub(configuration.report_interval / 2);
        let must_forward = agent_state.must_forward(&report, min_forwarding_interval, now);
        let forwarded_report = (must_forward || report.rss.is_some()).then(|| {
            let (forwarded_at, warnings) = match agent_state.last_forwarded_report.take() {
                Some(last_report) if report.without_details => (last_report.forwarded_at, last_report.warnings),
                _ => (now.monotonic_time, report.warnings.clone()),
            };
            agent_state.last_forwarded_report = Some(ForwardedReport {
                forwarded_at,
                configuration_generation: report.configuration_generation,
                rss_generation: report.rss_generation,
                warnings,
            });
            let validity_ms = (FORWARDED_REPORT_LIFETIME_INTERVALS * detail_interval).as_millis() as u32;
            v1::Report { time_to_live_ms: report.time_to_live_ms.max(validity_ms), ..report.clone() }
        });
        // The acknowledged generation is 0, because the controller handles acknowledgements.
        let report_result =
            agent_state.agent.record_report(AgentReport::try_from(report), configuration.load_ewma_alpha, 0, now);
        (forwarded_report, report_result)
    }

    /// Returns the summaries for all services. Called once per report interval.
    pub fn compute_summaries(&mut self, now: ClockReadings) -> Vec<v1::RackSummary> {
        let Some(configuration) = &self.configuration else { return Vec::new() };
        let servers_by_id: HashMap<ServerId, &RackServer> =
            configuration.servers.iter().map(|server| (server.id, server)).collect();
        let mut summaries = Vec::with_capacity(configuration.services.len());
        for service in &configuration.services {
            let Some(policy) = self.policies_by_service.get_mut(&service.index) else { continue };
            let to_pool_server = |member: &RackMember| {
                let server = servers_by_id.get(&member.id)?;
                let agent_state = self.agents_by_stream.get(&server.stream_number)?;
                Some(build_pool_server(service, server, member, &agent_state.agent, now))
            };
            let pool = ServerPool::new(service.members.iter().filter_map(to_pool_server).collect(), 1);
            let summary =
                RackSummary::from_pool(&pool, policy.as_mut(), service.bucket_count, self.max_candidates_per_bucket);
            summaries.push(encode_summary(service.index, &summary));
        }
        summaries
    }
}

fn build_pool_server(
    service: &RackService,
    server: &RackServer,
    member: &RackMember,
    agent: &Agent,
    now: ClockReadings,
) -> PoolServer {
    let loads = agent.fresh_core_loads(now).map(|loads| policy_loads_for_rack(service.places_each_datagram, loads));
    PoolServer {
        is_eligible: member.is_eligible,
        loads,
        rss: agent.rss_config().cloned(),
        weight: server.weight,
        // The controller applies slow start, so the summary has each server's full share.
        slow_start_fraction: if member.has_full_share { 1.0 } else { 0.0 },
        capacity: server.capacity,
        ..PoolServer::new(server.id)
    }
}

#[cfg(test)]
mod tests {
    use coreward_controller::message_rejection::MAX_REPORTS_PER_BURST;
    use coreward_model::load::SmoothingWeight;

    use super::*;

    #[test]
    fn excess_reports_are_rejected() {
        let mut reducer = ReportReducer::new(Duration::from_secs(1), 8);
        reducer.begin_stream(1);
        reducer.apply_configuration(RackConfiguration {
            report_interval: Duration::from_millis(100),
            detail_interval: Duration::ZERO,
            load_ewma_alpha: SmoothingWeight::PAPER_VALUE,
            servers: Vec::new(),
            services: Vec::new(),
        });
        let now = ClockReadings {
            monotonic_time: Duration::ZERO,
            wall_time: Duration::ZERO,
            record_clock_time: Duration::ZERO,
        };
        let (mut forwarded_count, mut rejected_count) = (0, 0);
        for _ in 0..100 {
            // A report with other RSS settings would be forwarded.
            let report = v1::Report { rss: Some(v1::Rss::default()), time_to_live_ms: 1, ..Default::default() };
            let (report, outcome) = reducer.record_report(1, report, now);
            forwarded_count += u32::from(report.is_some());
            rejected_count += u32::from(matches!(outcome, Err(MessageRejection::TooManyReports(_))));
        }
        assert_eq!((forwarded_count, rejected_count), (MAX_REPORTS_PER_BURST, 100 - MAX_REPORTS_PER_BURST));
    }
}
