//! Reports that an agent sends about its server, ten times a second.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use coreward_intf as intf;
use coreward_model::load::CoreBusyTimeReadings;
use prost::Message as _;

use crate::sanitize::{retain_known_counters, sanitize_dispatched_service, sanitize_rejected_updates, sanitize_string};
use crate::{ReportedRss, WireError, WireErrorContext as _, v1};

/// Report of an agent about its server. Its counters are totals, not differences between reports.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentReport {
    /// Time at which the report was sent, as time since 1970 by the server's wall clock.
    pub sent_at: Duration,
    /// Time after which the report expires. Until the next report, policies use the pool's mean load for the server.
    pub time_to_live: Duration,
    /// Sequence number of the report, time of measurement, and busy times of the cores.
    pub readings: CoreBusyTimeReadings,
    /// Number of the server's open TCP connections.
    pub open_connection_count: u32,
    /// Generation of the RSS configuration, which grows with every change of it.
    pub rss_generation: u64,
    /// RSS configuration of the NIC, or `None` if it has not changed since an earlier report.
    pub rss: Option<ReportedRss>,
    /// Number of SYNs that arrived at the predicted receive queue.
    pub rss_matched_syn_count: u64,
    /// Number of SYNs that arrived at another receive queue than predicted.
    pub rss_mismatched_syn_count: u64,
    /// Generation of the newest configuration from this stream that the agent has activated, or 0 if there is none yet.
    pub configuration_generation: u64,
    /// Details of the server, or `None` if they have not changed since the previous report of the stream.
    pub details: Option<AgentReportDetails>,
}

const AGENT_COUNTER_NAMES: [&[&str]; 3] =
    [&intf::SERVER_COUNTER_NAMES, &intf::STEER_COUNTER_NAMES, &intf::DECAP_COUNTER_NAMES];

/// Returns whether the field `listen` of the service is an address. Other text must not become a label of metrics.
fn has_listen_address(service: &v1::DispatchedService) -> bool {
    service.listen.parse::<SocketAddr>().is_ok()
}

/// Parts of an agent's report that placement tables do not need. Agents send them less often, because they cause most
/// of a report's cost.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AgentReportDetails {
    /// Counters of the server's BPF programs by name.
    pub counters: Vec<(String, u64)>,
    /// Warnings about the server, which are displayed to the operator.
    pub warnings: Vec<String>,
    /// UDP services whose requests `coreward dispatch` distributes at the server. They are only displayed.
    pub dispatched_services: Vec<v1::DispatchedService>,
    /// Newest count of connections, or `None` if there is none yet or the agent does not count connections.
    pub counted_connections: Option<CountedConnections>,
    /// Parts of the newest configuration that the agent cannot use.
    pub rejected_updates: Vec<v1::RejectedUpdate>,
}

/// Numbers of a server's TCP connections, from half-open to closing ones. Listening and TIME-WAIT sockets do not count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CountedConnections {
    /// Time from the start of the count to the sending of the report (whole ms, up to 49 days).
    pub count_age: Duration,
    /// Generation of the agent's configuration that was active when the count began.
    pub configuration_generation: u64,
    /// Number of connections by service name, for all TCP services of the configuration `configuration_generation`,
    /// even those without connections.
    pub connection_count_by_service: BTreeMap<String, u32>,
}

impl From<v1::CountedConnections> for CountedConnections {
    fn from(message: v1::CountedConnections) -> Self {
        Self {
            count_age: Duration::from_millis(message.age_ms.into()),
            configuration_generation: message.configuration_generation,
            connection_count_by_service: message
                .services
                .into_iter()
                .map(|(name, count)| (sanitize_string(name), count))
                .collect(),
        }
    }
}

impl From<CountedConnections> for v1::CountedConnections {
    fn from(counted_connections: CountedConnections) -> Self {
        Self {
            age_ms: u32::try_from(counted_connections.count_age.as_millis()).unwrap_or(u32::MAX),
            configuration_generation: counted_connections.configuration_generation,
            services: counted_connections.connection_count_by_service.into_iter().collect(),
        }
    }
}

/// Reason why an agent's report is unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AgentReportError {
    /// The RSS configuration is invalid, so the report's RSS generation is unusable. Other parts may be valid.
    #[error("{0}")]
    InvalidRssConfiguration(WireError),
    /// The time to live is out of range. With 0, every report would be expired. With a long time, a dead agent's stream
    /// would block the server's next agent.
    #[error("time_to_live_ms: {0}: expected 1 to {MAX_REPORT_LIFETIME_MS}")]
    InvalidTimeToLive(u32),
    /// A list in the report has more elements than a server may report.
    #[error("{field}: {count}: expected at most {limit}")]
    TooManyListElements {
        /// Name of the list's field.
        field: &'static str,
        /// Number of elements of the list in the report.
        count: usize,
        /// Maximum number of elements of the list.
        limit: usize,
    },
}

/// Maximum time to live of a report (ms). Agents report at least once a second. Through a rack controller, they send
/// full reports at least once a minute.
pub const MAX_REPORT_LIFETIME_MS: u32 = 180_000;
/// Maximum size in bytes of a message that a controller or a rack controller reads from an agent.
pub const MAX_AGENT_MESSAGE_BYTES: usize = 256 << 10;
/// Maximum number of cores in a report.
pub(crate) const MAX_REPORTED_CORES: usize = 4096;
const MAX_REPORTED_COUNTERS: usize = 256;
const MAX_REPORTED_WARNINGS: usize = 64;
const MAX_DISPATCHED_SERVICES: usize = 1024;
/// Maximum number of services in a report's connection counts, which is the number of service indexes.
const MAX_COUNTED_SERVICES: usize = 1024;
/// Maximum number of workers in a report, as the sum over all UDP services. It permits one worker per core.
const MAX_REPORTED_WORKERS: usize = 4096;

/// Checks that each list in the report is within its maximum length.
fn check_list_lengths(message: &v1::Report) -> Result<(), AgentReportError> {
    for (field_name, count, max_count) in [
        ("core_busy_ns", message.core_busy_ns.len(), MAX_REPORTED_CORES),
        ("counters", message.counters.len(), MAX_REPORTED_COUNTERS),
        ("warnings", message.warnings.len(), MAX_REPORTED_WARNINGS),
        ("dispatch", message.dispatch.len(), MAX_DISPATCHED_SERVICES),
        ("dispatch.workers", message.dispatch.iter().map(|service| service.workers.len()).sum(), MAX_REPORTED_WORKERS),
        (
            "connections",
            message.connections.as_ref().map_or(0, |counted_connections| counted_connections.services.len()),
            MAX_COUNTED_SERVICES,
        ),
    ] {
        if count > max_count {
            return Err(AgentReportError::TooManyListElements { field: field_name, count, limit: max_count });
        }
    }
    Ok(())
}

impl TryFrom<v1::Report> for AgentReport {
    type Error = AgentReportError;

    fn try_from(message: v1::Report) -> Result<Self, AgentReportError> {
        if !(1..=MAX_REPORT_LIFETIME_MS).contains(&message.time_to_live_ms) {
            return Err(AgentReportError::InvalidTimeToLive(message.time_to_live_ms));
        }
        check_list_lengths(&message)?;
        let rss = message
            .rss
            .as_ref()
            .map(ReportedRss::try_from)
            .transpose()
            .with_field_prefix("rss")
            .map_err(AgentReportError::InvalidRssConfiguration)?;
        let details = (!message.without_details).then(|| AgentReportDetails {
            counters: retain_known_counters(message.counters, &AGENT_COUNTER_NAMES).into_iter().collect(),
            warnings: message.warnings.into_iter().map(sanitize_string).collect(),
            dispatched_services: message
                .dispatch
                .into_iter()
                .filter(has_listen_address)
                .map(sanitize_dispatched_service)
                .collect(),
            counted_connections: message.connections.map(CountedConnections::from),
            rejected_updates: sanitize_rejected_updates(message.rejected),
        });
        Ok(Self {
            sent_at: Duration::from_nanos(message.sent_unix_ns),
            time_to_live: Duration::from_millis(message.time_to_live_ms.into()),
            readings: CoreBusyTimeReadings {
                report_sequence_number: message.sequence,
                measured_at_ns: message.measured_ns,
                busy_ns_by_core: message.core_busy_ns,
            },
            open_connection_count: message.open_connections,
            rss_generation: message.rss_generation,
            rss,
            rss_matched_syn_count: message.rss_matched,
            rss_mismatched_syn_count: message.rss_mismatched,
            configuration_generation: message.configuration_generation,
            details,
        })
    }
}

/// Removes lists that are only displayed, such as tables of 4,096 workers, from a report that exceeds the maximum
/// message size.
pub fn shrink_oversized_report(mut report: v1::Report) -> v1::Report {
    // Room for the other parts of the message, and for the warning.
    const MESSAGE_ENVELOPE_BYTES: usize = 256;
    if report.encoded_len() > MAX_AGENT_MESSAGE_BYTES - MESSAGE_ENVELOPE_BYTES {
        report.dispatch.clear();
        report.connections = None;
        report.warnings.truncate(MAX_REPORTED_WARNINGS - 1);
        report.warnings.push(format!(
            "the report was larger than {MAX_AGENT_MESSAGE_BYTES} bytes: sent without workers and connections"
        ));
    }
    report
}

impl From<AgentReport> for v1::Report {
    fn from(report: AgentReport) -> Self {
        let without_details = report.details.is_none();
        let AgentReportDetails {
            counters,
            warnings,
            dispatched_services: dispatch,
            counted_connections: connections,
            rejected_updates: rejected,
        } = report.details.unwrap_or_default();
        Self {
            sequence: report.readings.report_sequence_number,
            sent_unix_ns: report.sent_at.as_nanos() as u64,
            time_to_live_ms: report.time_to_live.as_millis() as u32,
            measured_ns: report.readings.measured_at_ns,
            core_busy_ns: report.readings.busy_ns_by_core,
            open_connections: report.open_connection_count,
            rss_generation: report.rss_generation,
            rss: report.rss.as_ref().map(v1::Rss::from),
            rss_matched: report.rss_matched_syn_count,
            rss_mismatched: report.rss_mismatched_syn_count,
            counters: counters.into_iter().collect(),
            warnings,
            dispatch,
            configuration_generation: report.configuration_generation,
            connections: connections.map(v1::CountedConnections::from),
            rejected,
            without_details,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counter names are labels of metrics, so a sender must not be able to add names.
    #[test]
    fn unknown_counter_names_are_dropped() {
        let unknown_counters = (0..255).map(|n| (format!("mine{n}"), n)).chain([("stamped".to_owned(), 12)]);
        let sample_dispatched_service =
            |listen: &str| v1::DispatchedService { listen: listen.into(), ..Default::default() };
        let dispatch = vec![sample_dispatched_service("mine"), sample_dispatched_service("192.0.2.1:53")];
        let report =
            AgentReport::try_from(v1::Report { counters: unknown_counters.collect(), dispatch, ..sample_report() })
                .unwrap();
        let details = report.details.unwrap();
        assert_eq!(details.counters, [("stamped".to_owned(), 12)]);
        assert_eq!(details.dispatched_services.len(), 1);
    }

    #[test]
    fn counters_of_all_bpf_programs_of_the_agent_are_known() {
        let counter_names =
            [&intf::SERVER_COUNTER_NAMES[..], &intf::STEER_COUNTER_NAMES, &intf::DECAP_COUNTER_NAMES].concat();
        let counters = counter_names.iter().map(|name| ((*name).to_owned(), 1)).collect();
        let report = AgentReport::try_from(v1::Report { counters, ..sample_report() }).unwrap();
        assert_eq!(report.details.unwrap().counters.len(), counter_names.len());
    }

    fn sample_report() -> v1::Report {
        v1::Report {
            sequence: 7,
            sent_unix_ns: 1_700_000_000_000_000_001,
            time_to_live_ms: 300,
            measured_ns: 5,
            core_busy_ns: vec![1, 2, 3],
            open_connections: 4,
            rss_generation: 1,
            rss: Some(v1::Rss {
                source: "ethtool".into(),
                key: vec![1; 40],
                indirection_table: vec![0, 1],
                input_transform: 0,
            }),
            rss_matched: 9,
            rss_mismatched: 1,
            counters: [("stamped".to_owned(), 12)].into(),
            warnings: vec!["aRFS is on".into()],
            dispatch: vec![v1::DispatchedService { listen: "0.0.0.0:53".into(), ..Default::default() }],
            configuration_generation: 3,
            connections: Some(v1::CountedConnections {
                age_ms: 17,
                configuration_generation: 2,
                services: [("web".to_owned(), 5)].into(),
            }),
            rejected: Vec::new(),
            without_details: false,
        }
    }

    #[test]
    fn reports_round_trip() {
        let report_without_connections = v1::Report { connections: None, ..sample_report() };
        assert_eq!(
            v1::Report::from(AgentReport::try_from(report_without_connections.clone()).unwrap()),
            report_without_connections
        );
        let report_without_details = v1::Report {
            counters: [].into(),
            warnings: Vec::new(),
            dispatch: Vec::new(),
            without_details: true,
            ..report_without_connections
        };
        assert_eq!(
            v1::Report::from(AgentReport::try_from(report_without_details.clone()).unwrap()),
            report_without_details
        );
        let report = AgentReport::try_from(sample_report()).unwrap();
        assert_eq!(v1::Report::from(report), sample_report());
    }

    #[test]
    fn oversized_report_loses_dispatched_services_and_connection_counts() {
        assert_eq!(shrink_oversized_report(sample_report()), sample_report());
        let worker = v1::DispatchedWorker {
            worker: u32::MAX,
            pid: u32::MAX,
            outstanding_work_ns: u64::MAX,
            dispatched: u64::MAX,
            completed: u64::MAX,
            abandoned: u64::MAX,
            dropped: u64::MAX,
            ..Default::default()
        };
        let service = v1::DispatchedService { workers: vec![worker; MAX_REPORTED_WORKERS], ..Default::default() };
        let warnings = vec!["w".repeat(512); MAX_REPORTED_WARNINGS];
        let busy_ns = vec![u64::MAX; MAX_REPORTED_CORES];
        let report = v1::Report { dispatch: vec![service], warnings, core_busy_ns: busy_ns.clone(), ..sample_report() };
        assert!(report.encoded_len() > MAX_AGENT_MESSAGE_BYTES);
        let report = shrink_oversized_report(report);
        assert!(report.encoded_len() < MAX_AGENT_MESSAGE_BYTES - 100, "{}", report.encoded_len());
        assert_eq!((report.core_busy_ns, report.warnings.len()), (busy_ns, MAX_REPORTED_WARNINGS));
    }

    #[test]
    fn invalid_report_is_rejected_with_its_field() {
        let mut invalid_message = sample_report();
        invalid_message.rss.as_mut().unwrap().indirection_table.push(0);
        let error = AgentReport::try_from(invalid_message).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rss.indirection_table: an indirection table of 3 entries: expected a power of two from 1 to 2048"
        );
        let error = AgentReport::try_from(v1::Report { time_to_live_ms: 0, ..sample_report() }).unwrap_err();
        assert_eq!(error.to_string(), "time_to_live_ms: 0: expected 1 to 180000");
        let error = AgentReport::try_from(v1::Report { time_to_live_ms: 180_001, ..sample_report() }).unwrap_err();
        assert_eq!(error, AgentReportError::InvalidTimeToLive(180_001));
        let error = AgentReport::try_from(v1::Report { core_busy_ns: vec![0; 4097], ..sample_report() }).unwrap_err();
        assert_eq!(error.to_string(), "core_busy_ns: 4097: expected at most 4096");
        let report =
            AgentReport::try_from(v1::Report { warnings: vec!["\u{1b}[2Jgone".into()], ..sample_report() }).unwrap();
        assert_eq!(report.details.unwrap().warnings, ["\u{fffd}[2Jgone"]);
        let large_service = v1::DispatchedService { workers: vec![Default::default(); 2049], ..Default::default() };
        let dispatch = vec![large_service.clone(), large_service];
        let error = AgentReport::try_from(v1::Report { dispatch, ..sample_report() }).unwrap_err();
        assert_eq!(error.to_string(), "dispatch.workers: 4098: expected at most 4096");
        let policy = "\u{1b}[2J".into();
        let dispatch = vec![v1::DispatchedService { listen: "0.0.0.0:53".into(), policy, ..Default::default() }];
        let report = AgentReport::try_from(v1::Report { dispatch, ..sample_report() }).unwrap();
        assert_eq!(report.details.unwrap().dispatched_services[0].policy, "\u{fffd}[2J");
    }
}
