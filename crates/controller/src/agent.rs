//! State of a server, as its agent reports it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::ReportState;
use coreward_model::load::{CoreLoadTracker, CoreLoads, SmoothingWeight};
use coreward_model::rss::RssConfig;
use coreward_wire::{AgentReport, AgentReportDetails, AgentReportError, CountedConnections, ReportedRss, v1};

use super::ClockReadings;
use super::message_rejection::{
    MAX_REPORT_CLOCK_LEAD, MAX_REPORTS_PER_BURST, MessageRejection, REGISTRATION_QUOTA_PER_NAME,
};
use super::token_bucket::{TokenBucket, TokenBucketQuota};
use super::traffic_counts::TrafficTotalsByBalancer;

#[derive(Debug, Default)]
pub struct Agent {
    pub session: Option<LiveAgentSession>,
    pub newest_report: Option<NewestAgentReport>,
    /// Generation of the newest confirmed configuration. The server's BPF programs keep it after the agent has ended.
    pub confirmed_config_generation: u64,
    /// Traffic to the server, as load balancers counted it until the newest report was accepted.
    pub traffic_at_report: TrafficTotalsByBalancer,
    pub rss_state: ReportedRssState,
    /// Time by which the newest report's wall clock was ahead of the controller's. `None` if it was at most
    /// [`MAX_REPORT_CLOCK_LEAD`].
    pub clock_lead: Option<Duration>,
    load_tracker: CoreLoadTracker,
    registration_bucket: Option<TokenBucket>,
    report_bucket: Option<TokenBucket>,
}

#[derive(Debug)]
pub struct LiveAgentSession {
    pub session_number: u64,
    /// Time of the agent's last message, since the controller's start.
    pub last_message_at: Duration,
    /// Time without messages after which another agent may take over the server.
    pub time_to_live: Duration,
    pub agent_version: String,
    /// Name of the rack that relays the agent's messages, or `None` if the agent is connected directly.
    pub rack_name: Option<Arc<str>>,
}

/// Fields of the newest report that `coreward status` shows.
#[derive(Debug)]
pub struct NewestAgentReport {
    /// Time at which the report arrived, since the controller's start.
    pub received_at: Duration,
    /// Time at which the report expires, since the controller's start.
    pub expires_at: Duration,
    pub open_connection_count: u32,
    pub rss_matched_syn_count: u64,
    pub rss_mismatched_syn_count: u64,
    pub details: StoredReportDetails,
}

/// Fields of a report that agents send less often than the loads.
#[derive(Debug, Default)]
pub struct StoredReportDetails {
    /// Counters of the server's BPF programs, by name.
    pub bpf_counters: Vec<(String, u64)>,
    pub warnings: Vec<String>,
    pub dispatched_services: Vec<v1::DispatchedService>,
    pub fresh_connection_count: Option<ReportedConnectionCount>,
    pub rejected_updates: Vec<v1::RejectedUpdate>,
}

impl StoredReportDetails {
    fn from_report(details: AgentReportDetails, now: ClockReadings) -> Self {
        let AgentReportDetails {
            counters: bpf_counters,
            warnings,
            dispatched_services,
            counted_connections,
            rejected_updates,
        } = details;
        let fresh_connection_count = counted_connections
            .map(|counted_connections| ReportedConnectionCount::from_report(counted_connections, now));
        Self { bpf_counters, warnings, dispatched_services, fresh_connection_count, rejected_updates }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedConnectionCount {
    /// Time at which the agent began the count, since the controller's start.
    pub started_at: Duration,
    /// Generation of the agent's configuration when the count began.
    pub configuration_generation: u64,
    pub connections_by_service: BTreeMap<String, u32>,
}

impl ReportedConnectionCount {
    fn from_report(reported_connections: CountedConnections, now: ClockReadings) -> Self {
        let CountedConnections {
            count_age: age,
            configuration_generation,
            connection_count_by_service: connections_by_service,
        } = reported_connections;
        Self { started_at: now.monotonic_time.saturating_sub(age), configuration_generation, connections_by_service }
    }

    pub fn total_connection_count(&self) -> u64 {
        self.connections_by_service.values().copied().map(u64::from).sum()
    }

    pub fn age(&self, now: ClockReadings) -> Duration {
        now.monotonic_time.saturating_sub(self.started_at)
    }
}

/// RSS configuration of a server, as its agent reported it.
#[derive(Debug, Default)]
pub struct ReportedRssState {
    rss_generation: Option<u64>,
    pub reported_rss: Option<ReportedRss>,
    /// Reason why the RSS configuration in the agent's reports is unusable or missing, or `None` if it is neither.
    pub rss_problem: Option<String>,
}

impl Agent {
    /// Returns the smoothed load of each core of the server, or `None` if the loads are unknown or expired.
    pub fn fresh_core_loads(&self, now: ClockReadings) -> Option<&CoreLoads> {
        if self.has_fresh_report(now) { self.load_tracker.smoothed_loads() } else { None }
    }

    /// Returns whether the server's loads come from a rack. If so, the agent's own reports are only displayed.
    pub fn is_relayed_by_rack(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.rack_name.is_some())
    }

    pub fn core_count(&self) -> Option<usize> {
        self.load_tracker.smoothed_loads().map(|loads| loads.len())
    }

    pub fn has_fresh_report(&self, now: ClockReadings) -> bool {
        self.newest_report.as_ref().is_some_and(|report| now.monotonic_time <= report.expires_at)
    }

    /// Returns the newest count of the server's connections, or `None` if it is unknown or expired.
    pub fn fresh_connection_count(&self, now: ClockReadings) -> Option<&ReportedConnectionCount> {
        self.newest_report.as_ref().filter(|_| self.has_fresh_report(now))?.details.fresh_connection_count.as_ref()
    }

    /// Returns the number of open connections to the server's services at the last count. An agent of an older version
    /// reports the kernel's number of sockets, including listening ones.
    pub fn open_connection_count(&self) -> u32 {
        let Some(report) = &self.newest_report else { return 0 };
        let counted_connections =
            report.details.fresh_connection_count.as_ref().map(ReportedConnectionCount::total_connection_count);
        counted_connections.map_or(report.open_connection_count, |sum| u32::try_from(sum).unwrap_or(u32::MAX))
    }

    pub fn rss_config(&self) -> Option<&RssConfig> {
        self.rss_state.reported_rss.as_ref().and_then(|reported_rss| reported_rss.rss.as_ref())
    }

    pub fn report_state(&self, now: ClockReadings) -> ReportState {
        match &self.newest_report {
            None => ReportState::None,
            Some(_) if self.has_fresh_report(now) => ReportState::Fresh,
            Some(_) => ReportState::Stale,
        }
    }

    /// Takes a token for a registration. Returns whether this server's rate of registrations is within its limit.
    pub fn take_registration_token(&mut self, now: ClockReadings) -> bool {
        self.registration_bucket
            .get_or_insert(REGISTRATION_QUOTA_PER_NAME.from(now.monotonic_time))
            .try_take(REGISTRATION_QUOTA_PER_NAME, now.monotonic_time)
    }

    pub fn take_report_token(&mut self, report_interval: Duration, now: ClockReadings) -> bool {
        let quota = report_quota(report_interval);
        self.report_bucket.get_or_insert(quota.from(now.monotonic_time)).try_take(quota, now.monotonic_time)
    }

    /// Returns the time until the agent may report again. The controller does not read the agent's stream before then.
    pub fn time_until_next_report(&self, report_interval: Duration, now: ClockReadings) -> Duration {
        self.report_bucket.map_or(Duration::ZERO, |reports| {
            reports.time_until_token(report_quota(report_interval), now.monotonic_time)
        })
    }

    /// Starts the session of a newly connected agent, which numbers its reports from the beginning.
    pub fn begin_session(&mut self, session: LiveAgentSession) {
        self.session = Some(session);
        self.load_tracker.start_report_stream();
    }

    /// Records a report, or its parse error. `active_generation` is that of the active configuration. Reports cannot
    /// confirm a higher one.
    pub fn record_report(
        &mut self,
        report: Result<AgentReport, AgentReportError>,
        alpha: SmoothingWeight,
        active_generation: u64,
        now: ClockReadings,
    ) -> Result<(), MessageRejection> {
        let report = report.inspect_err(|error| {
            if let AgentReportError::InvalidRssConfiguration(problem) = error {
                self.rss_state.mark_unknown(format!("its RSS was rejected: {problem}"));
            }
        })?;
        if let Some(session) = &mut self.session {
            session.last_message_at = now.monotonic_time;
            session.time_to_live = report.time_to_live;
        }
        if report.configuration_generation <= active_generation {
            self.confirmed_config_generation = self.confirmed_config_generation.max(report.configuration_generation);
        }
        // Reports are ordered by their numbers and the server's monotonic clock, because wall clocks may be wrong.
        let clock_lead = report.sent_at.saturating_sub(now.wall_time);
        self.clock_lead = (clock_lead > MAX_REPORT_CLOCK_LEAD).then_some(clock_lead);
        self.load_tracker.record_report(report.readings, alpha)?;
        self.rss_state.update_reported_rss(report.rss_generation, report.rss);
        let previous_details = self.newest_report.take().map(|previous_report| previous_report.details);
        let details = report.details.map(|details| StoredReportDetails::from_report(details, now)).or(previous_details);
        self.newest_report = Some(NewestAgentReport {
            received_at: now.monotonic_time,
            expires_at: now.monotonic_time + report.time_to_live,
            open_connection_count: report.open_connection_count,
            rss_matched_syn_count: report.rss_matched_syn_count,
            rss_mismatched_syn_count: report.rss_mismatched_syn_count,
            details: details.unwrap_or_default(),
        });
        Ok(())
    }
}

/// Returns the rate limit of reports. It is twice the configured rate, because intervals change and clocks differ.
fn report_quota(report_interval: Duration) -> TokenBucketQuota {
    TokenBucketQuota { token_interval: report_interval / 2, max_burst_tokens: MAX_REPORTS_PER_BURST }
}

impl ReportedRssState {
    /// Replaces the RSS configuration by the reported one. If the NIC's RSS has changed and the report lacks it, the
    /// configuration becomes unknown, because a wrong one is worse than none.
    fn update_reported_rss(&mut self, generation: u64, reported_rss: Option<ReportedRss>) {
        if reported_rss.is_some() {
            *self = Self { rss_generation: Some(generation), reported_rss, rss_problem: None };
        } else if self.rss_problem.is_none() && self.rss_generation != Some(generation) {
            self.mark_unknown(format!("its RSS of generation {generation} was announced but not received"));
        }
    }

    fn mark_unknown(&mut self, problem: String) {
        *self = Self { rss_generation: None, reported_rss: None, rss_problem: Some(problem) };
    }
}
