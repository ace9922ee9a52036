//! Health of a server, by checks.
//!
//! * [`Check`]: the request to a server, and its interval
//! * [`HealthTracker`]: the verdict of one observer, which thresholds of failures and successes change
//! * [`majority_verdicts`]: the verdicts of several observers (load balancers)
//!
//! A server without any verdict counts as up: a load balancer that has just started must not take a working pool out of
//! service.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

/// A health check of a service's servers.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// Kind of the check.
    pub probe: Probe,
    /// Address that is checked.
    pub probe_address: ProbeAddress,
    /// Port that is checked; `None`: the service's.
    pub port: Option<u16>,
    /// Longest time between two checks.
    pub interval: Duration,
    /// Time after which a missing answer counts as a failure.
    pub timeout: Duration,
    /// Results that change the verdict.
    pub thresholds: Thresholds,
    /// Part of the interval by which a check may come earlier.
    pub jitter: Jitter,
}

/// Kind of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// By load balancers: whether a TCP connection opens.
    Tcp,
    /// By load balancers: whether a request over HTTP/1.1 is answered.
    Http(HttpProbe),
    /// By load balancers: as `Http`, over TLS.
    Https(HttpProbe, Verification),
    /// By the controller: whether the server's agent reports.
    Agent,
}

impl Probe {
    /// The name in the fleet's document.
    pub fn name(&self) -> &'static str {
        match self {
            Probe::Tcp => "tcp",
            Probe::Http(_) => "http",
            Probe::Https(..) => "https",
            Probe::Agent => "agent",
        }
    }
}

/// An HTTP request, and the answers that pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpProbe {
    /// Path and query, from the slash on.
    pub path: String,
    /// Host header and name in the certificate; `None`: the address.
    pub host: Option<String>,
    /// Status codes that pass.
    pub expect: StatusRange,
}

/// Status codes of HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusRange(RangeInclusive<u16>);

impl StatusRange {
    /// All numbers of three digits (RFC 9110, Sect. 15).
    const ALL: RangeInclusive<u16> = 100..=599;

    /// Returns success and redirection.
    pub const fn good() -> Self {
        Self(200..=399)
    }

    /// `None` unless `first` to `last` are status codes, in this order.
    pub fn new(first: u16, last: u16) -> Option<Self> {
        (Self::ALL.contains(&first) && Self::ALL.contains(&last) && first <= last).then_some(Self(first..=last))
    }

    /// Whether the code is one of them.
    pub fn contains(&self, status: u16) -> bool {
        self.0.contains(&status)
    }

    /// The first and the last.
    pub fn bounds(&self) -> (u16, u16) {
        (*self.0.start(), *self.0.end())
    }
}

impl fmt::Display for StatusRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bounds() {
            (first, last) if first == last => write!(f, "{first}"),
            (first, last) => write!(f, "{first}-{last}"),
        }
    }
}

/// Verification of a server's certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verification {
    /// By the certificate authorities of the load balancer's system.
    System,
    /// By these certificate authorities (PEM).
    Authorities(String),
    /// None.
    Off,
}

/// Address of a server that is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeAddress {
    /// The VIP, which the server holds and clients use.
    Vip,
    /// At the server's own address.
    Server,
}

impl ProbeAddress {
    /// All values.
    pub const ALL: [Self; 2] = [Self::Vip, Self::Server];

    /// The name in the fleet's document.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vip => "vip",
            Self::Server => "server",
        }
    }
}

/// Treatment of new connections when no server is up that could take them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WhenAllDown {
    /// They go to every server as if it were up: checks err more often than all servers fail at once.
    #[default]
    FailOpen,
    /// They are dropped.
    Drop,
}

impl WhenAllDown {
    /// All values.
    pub const ALL: [Self; 2] = [Self::FailOpen, Self::Drop];

    /// The name in the fleet's document.
    pub fn name(self) -> &'static str {
        match self {
            Self::FailOpen => "fail-open",
            Self::Drop => "drop",
        }
    }
}

/// Results in a row that change the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    rise: u32,
    fall: u32,
}

impl Thresholds {
    /// `rise`: successes that make a server up; `fall`: failures that make it down. `None` when one is 0.
    pub fn new(rise: u32, fall: u32) -> Option<Self> {
        (rise > 0 && fall > 0).then_some(Self { rise, fall })
    }

    /// Successes that make a server up that was down; from 1 on.
    pub fn rise(self) -> u32 {
        self.rise
    }

    /// Failures that make a server down; from 1 on.
    pub fn fall(self) -> u32 {
        self.fall
    }
}

/// Part of the interval by which checks come earlier at most, so that those of many load balancers spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Jitter(f64);

impl Jitter {
    /// `None` unless `part` is from 0 to 1.
    pub fn new(part: f64) -> Option<Self> {
        (0.0..=1.0).contains(&part).then_some(Self(part))
    }

    /// From 0 to 1.
    pub fn get(self) -> f64 {
        self.0
    }

    /// Returns the time to the next check: a tenth of `interval` to all of it. `draw`: random, 0 to 1.
    pub fn pause(self, interval: Duration, draw: f64) -> Duration {
        interval.mul_f64((1.0 - self.0 * draw.clamp(0.0, 1.0)).max(0.1))
    }
}

/// Verdict of checks about a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It takes new connections.
    Up,
    /// It does not.
    Down,
}

/// State of one observer's checks of one server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HealthTracker {
    verdict: Option<Verdict>,
    /// Results in a row against the verdict.
    contrary_results: u32,
    /// Checks in a row without a result.
    failed_checks: u32,
}

impl HealthTracker {
    /// Returns the verdict; `None`: too few results.
    pub fn verdict(&self) -> Option<Verdict> {
        self.verdict
    }

    /// Records a result and returns whether it changes the verdict. A server without verdict is up after one success,
    /// and down after as many failures as any other.
    pub fn observe(&mut self, passed: bool, thresholds: Thresholds) -> bool {
        self.failed_checks = 0;
        let (contrary, needed, then) = match self.verdict {
            None if passed => (true, 1, Verdict::Up),
            None => (true, thresholds.fall, Verdict::Down),
            Some(Verdict::Up) => (!passed, thresholds.fall, Verdict::Down),
            Some(Verdict::Down) => (passed, thresholds.rise, Verdict::Up),
        };
        self.contrary_results = if contrary { self.contrary_results + 1 } else { 0 };
        if self.contrary_results < needed {
            return false;
        }
        *self = Self { verdict: Some(then), ..Self::default() };
        true
    }

    /// Records that the observer could not check, for a reason of its own. After as many times in a row as failures
    /// make a server down, the verdict is withdrawn; then returns true.
    pub fn local_fault(&mut self, thresholds: Thresholds) -> bool {
        self.failed_checks += 1;
        if self.verdict.is_none() || self.failed_checks < thresholds.fall {
            return false;
        }
        *self = Self::default();
        true
    }
}

/// Returns the verdict about each target by the majority of observers. A tie, or no observer, keeps `before`.
///
/// An observer that finds everything down while another one finds something up is cut off from the servers: it does not
/// count.
pub fn majority_verdicts<T: Ord + Clone>(
    observers: &[&BTreeMap<T, Verdict>],
    before: impl Fn(&T) -> Verdict,
) -> BTreeMap<T, Verdict> {
    let sees_any = |seen: &BTreeMap<T, Verdict>| seen.values().any(|verdict| *verdict == Verdict::Up);
    let any_sees = observers.iter().any(|seen| sees_any(seen));
    let mut balance: BTreeMap<&T, i64> = BTreeMap::new();
    for seen in observers.iter().filter(|seen| !any_sees || sees_any(seen)) {
        for (target, verdict) in *seen {
            *balance.entry(target).or_default() += if *verdict == Verdict::Up { 1 } else { -1 };
        }
    }
    let decide = |(target, balance): (&T, i64)| {
        let verdict = match balance {
            1.. => Verdict::Up,
            0 => before(target),
            _ => Verdict::Down,
        };
        (target.clone(), verdict)
    };
    balance.into_iter().map(decide).collect()
}

#[cfg(test)]
mod tests;
