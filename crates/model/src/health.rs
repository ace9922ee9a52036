//! Health checks of servers and the verdicts that result from them.
//!
//! * [`HealthCheck`] has the request to a server, and the interval between requests.
//!
//! A server without any verdict counts as up, because a load balancer that has just started must not take a working
//! pool out of service.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Configuration of the health checks of a service's servers.
#[derive(Debug, Clone, PartialEq)]
pub struct HealthCheck {
    /// Kind of health check, with its parameters.
    pub probe: HealthProbe,
    /// Address to which checks of a server are sent.
    pub probe_address: ProbeAddress,
    /// Port to which checks are sent, or `None` for the service's port.
    pub probe_port: Option<u16>,
    /// Maximum time between the starts of two checks.
    pub interval: Duration,
    /// Time after which a check without an answer counts as failed.
    pub timeout: Duration,
    /// Numbers of consecutive results after which the verdict changes.
    pub thresholds: HealthVerdictThresholds,
    /// Maximum fraction of the interval by which a check may start early.
    pub jitter: HealthCheckJitter,
}

/// Kind of health check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealthProbe {
    /// Load balancers check that a TCP connection opens.
    Tcp,
    /// Load balancers check that a server answers a request over HTTP/1.1.
    Http(HttpProbe),
    /// Load balancers check as with `Http`, but over TLS.
    Https(HttpProbe, CertificateVerification),
    /// The controller checks that the server's agent reports.
    Agent,
}

impl HealthProbe {
    /// Returns the name of this kind in the fleet document.
    pub fn name(&self) -> &'static str {
        match self {
            HealthProbe::Tcp => "tcp",
            HealthProbe::Http(_) => "http",
            HealthProbe::Https(..) => "https",
            HealthProbe::Agent => "agent",
        }
    }
}

/// HTTP request of a health check, and the status codes with which the check passes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpProbe {
    /// Path and query of the requested URL, starting with a slash.
    pub path_and_query: String,
    /// Host header, and name expected in the certificate, or `None` for the address to which checks are sent.
    pub host: Option<String>,
    /// Status codes with which the check passes.
    pub expected_status: HttpStatusRange,
}

/// Range of HTTP status codes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpStatusRange(RangeInclusive<u16>);

impl HttpStatusRange {
    /// All valid status codes (RFC 9110, Sect. 15).
    const ALL_HTTP_STATUSES: RangeInclusive<u16> = 100..=599;

    /// Returns the range of success and redirection (200 to 399).
    pub const fn success_or_redirect() -> Self {
        Self(200..=399)
    }

    /// Returns the range from `first` to `last`, or `None` unless both are status codes and `first` is at most `last`.
    pub fn new(first: u16, last: u16) -> Option<Self> {
        (Self::ALL_HTTP_STATUSES.contains(&first) && Self::ALL_HTTP_STATUSES.contains(&last) && first <= last)
            .then_some(Self(first..=last))
    }

    /// Returns whether the status code is in the range.
    pub fn contains(&self, status: u16) -> bool {
        self.0.contains(&status)
    }

    /// Returns the first and the last status code of the range.
    pub fn status_bounds(&self) -> (u16, u16) {
        (*self.0.start(), *self.0.end())
    }
}

impl fmt::Display for HttpStatusRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status_bounds() {
            (first, last) if first == last => write!(f, "{first}"),
            (first, last) => write!(f, "{first}-{last}"),
        }
    }
}

/// Method by which a server's certificate is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateVerification {
    /// The certificate must be issued by an authority that the load balancer's system trusts.
    System,
    /// The certificate must be issued by one of these authorities (PEM).
    PemAuthorities(String),
    /// The certificate is not verified.
    Off,
}

/// Address to which health checks of a server are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeAddress {
    /// The VIP, to which clients connect. Every server has it as a local address.
    Vip,
    /// The address of the server itself.
    Server,
}

impl ProbeAddress {
    /// All addresses to which checks can be sent.
    pub const ALL: [Self; 2] = [Self::Vip, Self::Server];

    /// Returns the name of this address in the fleet document.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vip => "vip",
            Self::Server => "server",
        }
    }
}

/// Treatment of new connections when no eligible server is up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AllServersDownTreatment {
    /// New connections go to every server as if all were up. Wrong results of checks are more likely than a failure of
    /// all servers at once.
    #[default]
    FailOpen,
    /// New connections are dropped.
    Drop,
}

impl AllServersDownTreatment {
    /// All treatments of new connections when no server is up.
    pub const ALL: [Self; 2] = [Self::FailOpen, Self::Drop];

    /// Returns the name of this treatment in the fleet document.
    pub fn name(self) -> &'static str {
        match self {
            Self::FailOpen => "fail-open",
            Self::Drop => "drop",
        }
    }
}

/// Numbers of consecutive results of health checks after which the verdict changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthVerdictThresholds {
    rise: u32,
    fall: u32,
}

impl HealthVerdictThresholds {
    /// Returns thresholds of `rise` successes for up and `fall` failures for down, or `None` if either number is 0.
    pub fn new(rise: u32, fall: u32) -> Option<Self> {
        (rise > 0 && fall > 0).then_some(Self { rise, fall })
    }

    /// Returns the number (at least 1) of consecutive successes after which a down server counts as up.
    pub fn rise(self) -> u32 {
        self.rise
    }

    /// Returns the number (at least 1) of consecutive failures after which a server counts as down.
    pub fn fall(self) -> u32 {
        self.fall
    }
}

/// Maximum fraction of the interval by which checks start early, so that checks of many load balancers spread out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HealthCheckJitter(f64);

impl HealthCheckJitter {
    /// Returns a jitter of at most the fraction `fraction` of the interval, or `None` if `fraction` is not from 0 to 1.
    pub fn new(fraction: f64) -> Option<Self> {
        (0.0..=1.0).contains(&fraction).then_some(Self(fraction))
    }

    /// Returns the maximum fraction of the interval, from 0 to 1.
    pub fn get(self) -> f64 {
        self.0
    }

    /// Returns the time until the next check, which is between a tenth of `interval` and all of it. `draw` is a random
    /// number from 0 to 1.
    pub fn jittered_interval(self, interval: Duration, draw: f64) -> Duration {
        interval.mul_f64((1.0 - self.0 * draw.clamp(0.0, 1.0)).max(0.1))
    }
}

/// Verdict of the health checks of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HealthVerdict {
    /// The server takes new connections.
    Up,
    /// The server takes no new connections.
    Down,
}

/// State of the health checks of one server by one observer (load balancer).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerHealthTracker {
    verdict: Option<HealthVerdict>,
    /// Number of consecutive results that contradict the verdict.
    contrary_result_count: u32,
    /// Number of consecutive checks without a result, because of faults of the observer.
    consecutive_local_fault_count: u32,
}

impl ServerHealthTracker {
    /// Returns the verdict, or `None` while there are too few results.
    pub fn verdict(&self) -> Option<HealthVerdict> {
        self.verdict
    }

    /// Records the result of a check, and returns whether the verdict changes. A server without a verdict counts as up
    /// after one success, and as down after `fall` failures.
    pub fn record_check_result(&mut self, has_passed: bool, thresholds: HealthVerdictThresholds) -> bool {
        self.consecutive_local_fault_count = 0;
        let (is_contrary, threshold, new_verdict) = match self.verdict {
            None if has_passed => (true, 1, HealthVerdict::Up),
            None => (true, thresholds.fall, HealthVerdict::Down),
            Some(HealthVerdict::Up) => (!has_passed, thresholds.fall, HealthVerdict::Down),
            Some(HealthVerdict::Down) => (has_passed, thresholds.rise, HealthVerdict::Up),
        };
        self.contrary_result_count = if is_contrary { self.contrary_result_count + 1 } else { 0 };
        if self.contrary_result_count < threshold {
            return false;
        }
        *self = Self { verdict: Some(new_verdict), ..Self::default() };
        true
    }

    /// Records that the observer could not check because of a fault of its own. After `fall` consecutive faults,
    /// withdraws the verdict and returns true.
    pub fn record_local_fault(&mut self, thresholds: HealthVerdictThresholds) -> bool {
        self.consecutive_local_fault_count += 1;
        if self.verdict.is_none() || self.consecutive_local_fault_count < thresholds.fall {
            return false;
        }
        *self = Self::default();
        true
    }
}

/// Returns the verdict of the majority of observers about each target. A tie keeps the verdict of `previous_verdict`.
///
/// An observer that finds every server down while another one finds a server up is cut off from the servers, so it does
/// not count.
pub fn majority_verdicts<T: Ord + Clone>(
    observers: &[&BTreeMap<T, HealthVerdict>],
    previous_verdict: impl Fn(&T) -> HealthVerdict,
) -> BTreeMap<T, HealthVerdict> {
    let finds_server_up = |verdict_by_target: &BTreeMap<T, HealthVerdict>| {
        verdict_by_target.values().any(|verdict| *verdict == HealthVerdict::Up)
    };
    let is_any_server_up = observers.iter().any(|verdict_by_target| finds_server_up(verdict_by_target));
    let mut up_surplus_by_target: BTreeMap<&T, i64> = BTreeMap::new();
    for verdict_by_target in observers.iter().filter(|seen| !is_any_server_up || finds_server_up(seen)) {
        for (target, verdict) in *verdict_by_target {
            *up_surplus_by_target.entry(target).or_default() += if *verdict == HealthVerdict::Up { 1 } else { -1 };
        }
    }
    let decide_verdict = |(target, balance): (&T, i64)| {
        let verdict = match balance {
            1.. => HealthVerdict::Up,
            0 => previous_verdict(target),
            _ => HealthVerdict::Down,
        };
        (target.clone(), verdict)
    };
    up_surplus_by_target.into_iter().map(decide_verdict).collect()
}

#[cfg(test)]
mod tests;
