//! Whether a server is fit for new connections, as checks tell.
//!
//! * [`Check`]: what is asked of a server, and how often
//! * [`Judge`]: when failures make it down and successes up again, as one observer sees it
//! * [`together`]: what several observers (load balancers) say together
//!
//! A server of which nobody has said anything counts as up: a load balancer that has just started must not take a pool out of
//! service that works.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

/// What is asked of the servers of a service, and how often.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// What is asked.
    pub probe: Probe,
    /// Where.
    pub probe_address: ProbeAddress,
    /// At which port; `None`: the service's.
    pub port: Option<u16>,
    /// From one check to the next, at most.
    pub interval: Duration,
    /// An answer that takes longer is none.
    pub timeout: Duration,
    /// When it counts.
    pub thresholds: Thresholds,
    /// How much earlier than the interval says a check may come.
    pub jitter: Jitter,
}

/// What is asked of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// By load balancers: whether a TCP connection opens.
    Tcp,
    /// By load balancers: whether a request over HTTP/1.1 is answered.
    Http(HttpProbe),
    /// The same over TLS.
    Https(HttpProbe, Verification),
    /// By the controller: whether the server's agent reports.
    Agent,
}

impl Probe {
    /// As the fleet's document has it.
    pub fn name(&self) -> &'static str {
        match self {
            Probe::Tcp => "tcp",
            Probe::Http(_) => "http",
            Probe::Https(..) => "https",
            Probe::Agent => "agent",
        }
    }
}

/// A request, and the answers that are good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpProbe {
    /// Path and query, from the slash on.
    pub path: String,
    /// What the request's Host says, and the certificate must be for; `None`: the address.
    pub host: Option<String>,
    /// Status codes of a server that is well.
    pub expect: StatusRange,
}

/// Status codes of HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusRange(RangeInclusive<u16>);

impl StatusRange {
    /// All that three digits can say (RFC 9110, Sect. 15).
    const ALL: RangeInclusive<u16> = 100..=599;

    /// Success, or a redirection to it.
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

/// How a server's certificate is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verification {
    /// It must be signed by one whom the load balancer's system trusts.
    System,
    /// It must be signed by one of these (PEM).
    Authorities(String),
    /// Not at all.
    Off,
}

/// Where a server is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeAddress {
    /// At the VIP, which the server holds: what clients ask.
    Vip,
    /// At the server's own address.
    Server,
}

impl ProbeAddress {
    /// All there are.
    pub const ALL: [Self; 2] = [Self::Vip, Self::Server];

    /// As the fleet's document has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vip => "vip",
            Self::Server => "server",
        }
    }
}

/// What becomes of first packets when no server is up that could take them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WhenAllDown {
    /// They go to all servers that would take them if they were up: checks err more often than all servers fail at once.
    #[default]
    FailOpen,
    /// They are dropped.
    Drop,
}

impl WhenAllDown {
    /// All there are.
    pub const ALL: [Self; 2] = [Self::FailOpen, Self::Drop];

    /// As the fleet's document has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::FailOpen => "fail-open",
            Self::Drop => "drop",
        }
    }
}

/// How many results in a row change the verdict.
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

    /// From one check to the next; `draw`: a random number from 0 to 1. Never longer than `interval`, and at least a tenth of
    /// it.
    pub fn pause(self, interval: Duration, draw: f64) -> Duration {
        interval.mul_f64((1.0 - self.0 * draw.clamp(0.0, 1.0)).max(0.1))
    }
}

/// What checks have said of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It takes new connections.
    Up,
    /// It does not.
    Down,
}

/// One observer's look at one server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judge {
    verdict: Option<Verdict>,
    /// Results in a row that say the contrary.
    contrary: u32,
    /// Times in a row that nothing could be seen.
    blind: u32,
}

impl Judge {
    /// `None`: not enough is known.
    pub fn verdict(&self) -> Option<Verdict> {
        self.verdict
    }

    /// Takes a result. True when it changes the verdict. Of a server that was never judged one success is enough, and no
    /// fewer failures than of any other.
    pub fn observe(&mut self, passed: bool, thresholds: Thresholds) -> bool {
        self.blind = 0;
        let (contrary, needed, then) = match self.verdict {
            None if passed => (true, 1, Verdict::Up),
            None => (true, thresholds.fall, Verdict::Down),
            Some(Verdict::Up) => (!passed, thresholds.fall, Verdict::Down),
            Some(Verdict::Down) => (passed, thresholds.rise, Verdict::Up),
        };
        self.contrary = if contrary { self.contrary + 1 } else { 0 };
        if self.contrary < needed {
            return false;
        }
        *self = Self { verdict: Some(then), ..Self::default() };
        true
    }

    /// The observer could not look, for a reason of its own: nothing is said of the server, and after as many times in a row as
    /// failures make it down the verdict is withdrawn. True when it is.
    pub fn could_not_look(&mut self, thresholds: Thresholds) -> bool {
        self.blind += 1;
        if self.verdict.is_none() || self.blind < thresholds.fall {
            return false;
        }
        *self = Self::default();
        true
    }
}

/// What is true of each target, by what observers say of it: what more of them say than the contrary; when as many say the
/// one as the other, or nobody says anything, it stays as it was `before`.
///
/// An observer that finds everything down, while another one finds something up, has a problem of its own (it is cut off
/// from the servers): it is not believed.
pub fn together<T: Ord + Clone>(
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
