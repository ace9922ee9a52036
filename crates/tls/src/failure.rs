//! Why a connection did not come about: for logs and counters.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant, UNIX_EPOCH};

use parking_lot::{Mutex, MutexGuard};
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error};

use crate::identity::{Identity, Name, Role};

/// One of each reason is logged so often: whoever knocks all the time does not fill the disk.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Why the peer was not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// It did not finish its handshake in time.
    Timeout,
    /// It does not speak TLS, or not 1.3.
    NotTls,
    /// It shows no certificate.
    NoCertificate,
    /// Its certificate is signed by nobody in `ca`.
    UnknownAuthority,
    /// Its certificate has expired.
    Expired,
    /// Its certificate is not valid yet.
    NotYetValid,
    /// Its certificate is none of coreward's.
    NoIdentity,
    /// It is of another fleet.
    OtherFleet,
    /// Its role has nothing to do here.
    WrongRole,
    /// It says that it is somebody else, or is at another host than its certificate says.
    WrongName,
    /// Its certificate is on the deny list.
    Revoked,
    /// It does not accept ours.
    RefusedByPeer,
    /// Too many connections wait, from its address or of its certificate.
    TooMany,
    /// Anything else, a broken connection among it.
    Broken,
}

impl Reason {
    /// All of them, for counters.
    pub const ALL: [Self; 14] = [
        Self::Timeout,
        Self::NotTls,
        Self::NoCertificate,
        Self::UnknownAuthority,
        Self::Expired,
        Self::NotYetValid,
        Self::NoIdentity,
        Self::OtherFleet,
        Self::WrongRole,
        Self::WrongName,
        Self::Revoked,
        Self::RefusedByPeer,
        Self::TooMany,
        Self::Broken,
    ];

    /// The counter's label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::NotTls => "not_tls",
            Self::NoCertificate => "no_certificate",
            Self::UnknownAuthority => "unknown_authority",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::NoIdentity => "no_identity",
            Self::OtherFleet => "other_fleet",
            Self::WrongRole => "wrong_role",
            Self::WrongName => "wrong_name",
            Self::Revoked => "revoked",
            Self::RefusedByPeer => "refused_by_peer",
            Self::TooMany => "too_many",
            Self::Broken => "broken",
        }
    }
}

/// A certificate that is right as such, and does not do here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAccepted {
    /// It cannot be read, or names nobody.
    #[error("its certificate names nobody of a fleet ({0}): expected one URI coreward://FLEET/ROLE/NAME")]
    NoIdentity(String),
    /// Of another fleet.
    #[error("its certificate is for {identity} of fleet {}: expected fleet {ours}", identity.fleet)]
    OtherFleet {
        /// Whose it is.
        identity: Identity,
        /// Of which fleet we are.
        ours: Name,
    },
    /// Nothing for this role here.
    #[error("its certificate is for {identity}: expected {}", roles(expected))]
    WrongRole {
        /// Whose it is.
        identity: Identity,
        /// Who is expected.
        expected: Vec<Role>,
    },
    /// Of another host than the one that is wanted.
    #[error("its certificate is for {identity} at {}: expected one for {expected}", hosts_of(hosts))]
    OtherHost {
        /// Whose it is.
        identity: Identity,
        /// Host names and addresses that it names.
        hosts: Vec<String>,
        /// What would do.
        expected: String,
    },
    /// On the deny list.
    #[error("the certificate of {0} is on the deny list")]
    Revoked(Identity),
}

fn roles(roles: &[Role]) -> String {
    roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(" or ")
}

fn hosts_of(hosts: &[String]) -> String {
    if hosts.is_empty() { "no host that it names".to_owned() } else { hosts.join(", ") }
}

impl NotAccepted {
    fn reason(&self) -> Reason {
        match self {
            Self::NoIdentity(_) => Reason::NoIdentity,
            Self::OtherFleet { .. } => Reason::OtherFleet,
            Self::WrongRole { .. } => Reason::WrongRole,
            Self::OtherHost { .. } => Reason::WrongName,
            Self::Revoked(_) => Reason::Revoked,
        }
    }
}

/// A connection that did not come about.
#[derive(Debug, Clone)]
pub struct Failure {
    /// For counters.
    pub reason: Reason,
    /// For people.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl Failure {
    /// Of TLS, or of what is below.
    pub fn of(error: &std::io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(error) => Self::of_tls(error),
            None => Self { reason: Reason::Broken, message: error.to_string() },
        }
    }

    fn of_tls(error: &Error) -> Self {
        use CertificateError as Wrong;
        let (reason, message) = match error {
            Error::InvalidCertificate(Wrong::Other(other)) => match other.0.downcast_ref::<NotAccepted>() {
                Some(not_accepted) => (not_accepted.reason(), not_accepted.to_string()),
                None => (Reason::Broken, error.to_string()),
            },
            Error::InvalidCertificate(Wrong::ExpiredContext { time, not_after }) => {
                (Reason::Expired, format!("its certificate has expired: {}", clocks("until", *not_after, *time)))
            }
            Error::InvalidCertificate(Wrong::NotValidYetContext { time, not_before }) => (
                Reason::NotYetValid,
                format!("its certificate is not valid yet: {}", clocks("from", *not_before, *time)),
            ),
            Error::InvalidCertificate(Wrong::UnknownIssuer | Wrong::BadSignature) => {
                (Reason::UnknownAuthority, "its certificate is signed by nobody in `ca`".to_owned())
            }
            Error::InvalidCertificate(Wrong::NotValidForName | Wrong::NotValidForNameContext { .. }) => {
                (Reason::WrongName, error.to_string())
            }
            Error::InvalidCertificate(other) => {
                (Reason::UnknownAuthority, format!("its certificate is wrong: {other:?}"))
            }
            Error::NoCertificatesPresented => (Reason::NoCertificate, "it shows no certificate".to_owned()),
            Error::AlertReceived(AlertDescription::CertificateRequired) => {
                (Reason::RefusedByPeer, "the peer wants a certificate: expected `[tls]` with one".to_owned())
            }
            Error::AlertReceived(alert) => (Reason::RefusedByPeer, refusal(*alert)),
            Error::InvalidMessage(_) | Error::PeerIncompatible(_) | Error::InappropriateMessage { .. } => {
                (Reason::NotTls, format!("the peer does not speak TLS 1.3 ({error})"))
            }
            _ => (Reason::Broken, error.to_string()),
        };
        Self { reason, message }
    }
}

/// "valid from 2026-11-24T19:00:00Z, and this machine's clock is at 2026-11-22T19:00:00Z".
fn clocks(word: &str, bound: UnixTime, now: UnixTime) -> String {
    let date = |time: UnixTime| humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(time.as_secs()));
    format!("valid {word} {}, and this machine's clock is at {} (timedatectl)", date(bound), date(now))
}

/// What the peer's alert means for whom it is sent to.
fn refusal(alert: AlertDescription) -> String {
    let why = match alert {
        // By RFC 8446 also for one that is not valid yet.
        AlertDescription::CertificateExpired => {
            return "the peer refuses our certificate: by the peer's clock it has expired or is not valid yet; compare \
                    the clocks (timedatectl) and its dates (coreward certs show)"
                .to_owned();
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => "its signer is not in the peer's `ca`",
        AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => {
            "wrong fleet, role or name, or on the deny list; the peer's log says which"
        }
        _ => return format!("the peer ended the handshake with the alert {alert:?}"),
    };
    format!("the peer refuses our certificate: {why} ({alert:?})")
}

/// How many connections did not come about, and when that was last said.
#[derive(Debug, Default)]
pub struct Failures(Mutex<BTreeMap<Reason, Counted>>);

#[derive(Debug, Default)]
struct Counted {
    count: u64,
    not_logged: u64,
    logged: Option<Instant>,
}

impl Failures {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Reason, Counted>> {
        self.0.lock()
    }

    /// Counts it; logs it, unless one like it was logged within the last second.
    pub fn count(&self, peer: &dyn fmt::Display, failure: &Failure) {
        let mut all = self.lock();
        let counted = all.entry(failure.reason).or_default();
        counted.count += 1;
        if counted.logged.is_some_and(|logged| logged.elapsed() < LOG_INTERVAL) {
            counted.not_logged += 1;
            return;
        }
        let more = std::mem::take(&mut counted.not_logged);
        counted.logged = Some(Instant::now());
        drop(all);
        let others = if more > 0 { format!(" ({more} more like it)") } else { String::new() };
        tracing::warn!("{peer} was not let in ({}): {failure}{others}", failure.reason.name());
    }

    /// Since the process began, of every reason.
    pub fn counts(&self) -> Vec<(Reason, u64)> {
        let all = self.lock();
        Reason::ALL.into_iter().map(|reason| (reason, all.get(&reason).map_or(0, |counted| counted.count))).collect()
    }
}
