//! One server as its agent's reports show it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coreward_model::load::{Alpha, CoreLoads, LoadTracker};
use coreward_model::rss::Rss;
use coreward_wire::{CountedConnections, Report, ReportDetails, ReportError, ReportedRss, v1};

use super::Now;
use super::rejection::{CLOCK_TOLERANCE, REGISTRATIONS, REPORTS_AT_ONCE, Rejection};
use super::token_bucket::{Quota, TokenBucket};
use super::traffic::Totals;

/// What is known of a server.
#[derive(Debug, Default)]
pub struct Agent {
    /// The agent that speaks for it now.
    pub session: Option<LiveSession>,
    /// The newest report that was taken.
    pub newest: Option<Newest>,
    /// The newest configuration that an agent has said to be in force. The server's programs keep what they have when the
    /// agent ends.
    pub confirmed: u64,
    /// What load balancers had sent to it when the newest report was taken.
    pub sent_at_report: Totals,
    /// What its NIC does.
    pub rss: KnownRss,
    /// How far the newest report was sent ahead of the controller's wall clock, where that is more than clocks may differ.
    pub clock_ahead: Option<Duration>,
    tracker: LoadTracker,
    registrations: Option<TokenBucket>,
    reports: Option<TokenBucket>,
}

#[derive(Debug)]
pub struct LiveSession {
    /// Different for every session.
    pub number: u64,
    /// When it last said something (since the controller's start).
    pub heard: Duration,
    /// After this much silence another agent may take over.
    pub time_to_live: Duration,
    pub version: String,
    /// Name of the rack through which it speaks; `None`: it speaks by itself.
    pub rack: Option<Arc<str>>,
}

/// What is kept of a report for `coreward status`.
#[derive(Debug)]
pub struct Newest {
    /// When it came (since the controller's start).
    pub received: Duration,
    /// Until then it holds.
    pub fresh_until: Duration,
    /// As reported.
    pub open_connections: u32,
    /// As reported.
    pub rss_matched: u64,
    /// As reported.
    pub rss_mismatched: u64,
    /// As last reported.
    pub details: Details,
}

/// What is not in every report.
#[derive(Debug, Default)]
pub struct Details {
    /// As reported.
    pub counters: Vec<(String, u64)>,
    /// As reported.
    pub warnings: Vec<String>,
    /// As reported.
    pub dispatch: Vec<v1::DispatchedService>,
    pub connections: Option<Counted>,
    /// What of its configuration the agent cannot use.
    pub refused: Vec<v1::RefusedUpdate>,
}

impl Details {
    fn reported(details: ReportDetails, now: Now) -> Self {
        let ReportDetails { counters, warnings, dispatch, connections, refused } = details;
        let connections = connections.map(|counted| Counted::reported(counted, now));
        Self { counters, warnings, dispatch, connections, refused }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counted {
    /// When it began (since the controller's start).
    pub at: Duration,
    /// Of the agent's configuration that was in force then.
    pub configuration_generation: u64,
    pub services: BTreeMap<String, u32>,
}

impl Counted {
    fn reported(counted: CountedConnections, now: Now) -> Self {
        let CountedConnections { age, configuration_generation, services } = counted;
        Self { at: now.monotonic.saturating_sub(age), configuration_generation, services }
    }

    /// Of all services together.
    pub fn sum(&self) -> u64 {
        self.services.values().copied().map(u64::from).sum()
    }

    /// How long ago it began.
    pub fn age(&self, now: Now) -> Duration {
        now.monotonic.saturating_sub(self.at)
    }
}

/// A server's RSS, as far as the reports tell.
#[derive(Debug, Default)]
pub struct KnownRss {
    generation: Option<u64>,
    pub reported: Option<ReportedRss>,
    /// Why it is not known, where that is the agent's fault.
    pub problem: Option<String>,
}

impl Agent {
    /// The smoothed load of each core; `None`: not known, or too old.
    pub fn loads(&self, now: Now) -> Option<&CoreLoads> {
        if self.is_fresh(now) { self.tracker.loads() } else { None }
    }

    /// Whether its loads are the rack's to say, and its reports here are for people.
    pub fn is_behind_rack(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.rack.is_some())
    }

    /// How many cores its newest report had.
    pub fn core_count(&self) -> Option<usize> {
        self.tracker.loads().map(|loads| loads.len())
    }

    /// Whether its newest report still holds.
    pub fn is_fresh(&self, now: Now) -> bool {
        self.newest.as_ref().is_some_and(|newest| now.monotonic <= newest.fresh_until)
    }

    /// Its newest count of connections; `None`: not known, or too old.
    pub fn connections(&self, now: Now) -> Option<&Counted> {
        self.newest.as_ref().filter(|_| self.is_fresh(now))?.details.connections.as_ref()
    }

    /// The services' connections as last counted. An agent that does not count them (an older version) reports the
    /// kernel's number of sockets, listening ones included.
    pub fn open_connections(&self) -> u32 {
        let Some(newest) = &self.newest else { return 0 };
        let counted = newest.details.connections.as_ref().map(Counted::sum);
        counted.map_or(newest.open_connections, |sum| u32::try_from(sum).unwrap_or(u32::MAX))
    }

    /// Its NIC's key and table.
    pub fn rss(&self) -> Option<&Rss> {
        self.rss.reported.as_ref().and_then(|reported| reported.rss.as_ref())
    }

    /// Returns whether one more registration for this server is within the limit.
    pub fn allow_register(&mut self, now: Now) -> bool {
        self.registrations.get_or_insert(REGISTRATIONS.from(now.monotonic)).take(REGISTRATIONS, now.monotonic)
    }

    pub fn may_report(&mut self, interval: Duration, now: Now) -> bool {
        let quota = reports_allowed(interval);
        self.reports.get_or_insert(quota.from(now.monotonic)).take(quota, now.monotonic)
    }

    /// Time until it may report again. Its stream is not read before.
    pub fn report_wait(&self, interval: Duration, now: Now) -> Duration {
        self.reports.map_or(Duration::ZERO, |reports| reports.wait(reports_allowed(interval), now.monotonic))
    }

    /// A new agent speaks for the server: it counts its reports anew.
    pub fn begin(&mut self, session: LiveSession) {
        self.session = Some(session);
        self.tracker.new_stream();
    }

    /// Takes a report in. `generation`: of the configuration in force, beyond which nothing can be confirmed.
    pub fn report(
        &mut self,
        report: Result<Report, ReportError>,
        alpha: Alpha,
        generation: u64,
        now: Now,
    ) -> Result<(), Rejection> {
        let report = report.inspect_err(|error| {
            if let ReportError::Rss(problem) = error {
                self.rss.forget(format!("its RSS was refused: {problem}"));
            }
        })?;
        if let Some(session) = &mut self.session {
            session.heard = now.monotonic;
            session.time_to_live = report.time_to_live;
        }
        if report.configuration_generation <= generation {
            self.confirmed = self.confirmed.max(report.configuration_generation);
        }
        // Reports are ordered by their numbers and the server's monotonic clock: a wall clock that is wrong, here or there, is for
        // people to mend.
        let ahead = report.sent.saturating_sub(now.wall);
        self.clock_ahead = (ahead > CLOCK_TOLERANCE).then_some(ahead);
        self.tracker.report(report.readings, alpha)?;
        self.rss.update(report.rss_generation, report.rss);
        let known = self.newest.take().map(|newest| newest.details);
        let details = report.details.map(|details| Details::reported(details, now)).or(known);
        self.newest = Some(Newest {
            received: now.monotonic,
            fresh_until: now.monotonic + report.time_to_live,
            open_connections: report.open_connections,
            rss_matched: report.rss_matched,
            rss_mismatched: report.rss_mismatched,
            details: details.unwrap_or_default(),
        });
        Ok(())
    }
}

/// Twice as often as an agent should report: intervals change, and clocks differ.
fn reports_allowed(interval: Duration) -> Quota {
    Quota { every: interval / 2, at_once: REPORTS_AT_ONCE }
}

impl KnownRss {
    /// A wrong table is worse than none: when the NIC's changed and the new one did not come, nothing is known.
    fn update(&mut self, generation: u64, reported: Option<ReportedRss>) {
        if reported.is_some() {
            *self = Self { generation: Some(generation), reported, problem: None };
        } else if self.problem.is_none() && self.generation != Some(generation) {
            self.forget(format!("its RSS of generation {generation} was announced but has not come"));
        }
    }

    fn forget(&mut self, problem: String) {
        *self = Self { generation: None, reported: None, problem: Some(problem) };
    }
}
