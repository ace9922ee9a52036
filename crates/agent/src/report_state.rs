//! Tracks which parts of a report a controller has already received on a stream, so that later reports omit them.

use std::time::{Duration, Instant};

use coreward_wire::{AgentConfiguration, v1};

/// Interval between reports with details, such as counters, which do not influence placement tables.
const DETAILED_REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Parts of reports that were already sent on a stream. Empty when the stream starts.
#[derive(Debug, Clone, Default)]
pub struct SentReportState {
    sent_rss_generation: u64,
    last_sent_details: Option<SentReportDetails>,
}

#[derive(Debug, Clone)]
struct SentReportDetails {
    send_time: Instant,
    sent_warnings: Vec<String>,
}

impl SentReportState {
    /// Returns the generation of the newest RSS settings that were sent on this stream, or 0 if none were.
    pub fn sent_rss_generation(&self) -> u64 {
        self.sent_rss_generation
    }

    /// Returns whether the next report must contain details. While the server drains, every report must, because
    /// operators then wait for the connection counts.
    pub fn next_report_needs_details(&self, configuration: Option<&AgentConfiguration>, warnings: &[String]) -> bool {
        let may_omit_details = configuration.is_some_and(|configuration| !configuration.is_draining);
        let newest_details = self.last_sent_details.as_ref().filter(|_| may_omit_details);
        newest_details.is_none_or(|sent_details| {
            sent_details.send_time.elapsed() >= DETAILED_REPORT_INTERVAL || sent_details.sent_warnings != *warnings
        })
    }

    pub fn state_after_sending_report(&self, report: &v1::Report) -> Self {
        let build_sent_details =
            || SentReportDetails { send_time: Instant::now(), sent_warnings: report.warnings.clone() };
        let sent_details =
            if report.without_details { self.last_sent_details.clone() } else { Some(build_sent_details()) };
        Self { sent_rss_generation: report.rss_generation, last_sent_details: sent_details }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_report_and_reports_with_new_warnings_need_details() {
        let initial_state = SentReportState::default();
        assert!(initial_state.next_report_needs_details(None, &[]), "nothing was sent");
        let report = v1::Report { rss_generation: 3, warnings: vec!["aRFS is on".into()], ..Default::default() };
        let sent_state = initial_state.state_after_sending_report(&report);
        assert_eq!(sent_state.sent_rss_generation(), 3);
        assert!(sent_state.next_report_needs_details(None, &report.warnings), "there is no configuration yet");
        let report_without_details = v1::Report { rss_generation: 4, without_details: true, ..Default::default() };
        assert_eq!(
            sent_state.state_after_sending_report(&report_without_details).last_sent_details.unwrap().sent_warnings,
            report.warnings
        );
    }
}
